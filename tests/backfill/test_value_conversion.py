"""Values that a column cannot hold exactly fail their rows."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dovetail.backfill.udf import udf
from dovetail.backfill.udf_caller import UdfCaller
from dovetail.backfill.value_conversion import ValueConverter
from dovetail.pipeline.error_policy import ErrorPolicy

STRUCT = pa.struct([("a", pa.int32()), ("b", pa.string())])


class Pair(NamedTuple):
    a: int
    b: str


def converted(value: Any, kind: Any) -> tuple[Any, str]:
    """The stored value, between two values that are NULL, and the error."""
    (array,), wrong = ValueConverter([kind], [""]).values([None, value, None])
    assert not wrong or [*wrong] == [1]
    return array.to_pylist()[1], "".join(f"{type(error).__name__}: {error}" for error in wrong.values())


class Swapped(NamedTuple):
    b: str
    a: int


@dataclasses.dataclass
class Made:
    a: int
    b: str


class Fragile(int):
    def __ne__(self, other: object) -> bool:
        raise AssertionError("a value was looked at")


def halves(n: int) -> int:
    return n / 2  # type: ignore[return-value]


def halves_of_arrays(n: pa.Array) -> list[int]:
    return [value.as_py() / 2 for value in n]


DAY = datetime.datetime(2026, 1, 2)


FINE = datetime.datetime(2026, 1, 2, 12, 30, 15, 123456)


MILLI = FINE.replace(microsecond=123000)


NANO = pd.Timestamp("2026-01-02 12:30:15.000000001")


EAST = datetime.timezone(datetime.timedelta(hours=5))


S, MS, US, NS = (pa.timestamp(unit) for unit in ("s", "ms", "us", "ns"))


CUT = [
    (FINE, S, "it has fractions of a second"),
    (FINE, MS, "it has microseconds"),
    (MILLI, S, "it has fractions of a second"),
    (FINE, pa.timestamp("s", "UTC"), "it has fractions of a second"),
    (FINE, pa.date32(), "it has a time of day"),
    (FINE, pa.date64(), "it has a time of day"),
    (FINE.time(), pa.time32("s"), "it has fractions of a second"),
    (FINE.time(), pa.time32("ms"), "it has microseconds"),
    (datetime.timedelta(seconds=1.5), pa.duration("s"), "it has fractions of a second"),
    (datetime.timedelta(seconds=-1.5), pa.duration("s"), "it has fractions of a second"),
    (datetime.timedelta(microseconds=1), pa.duration("ms"), "it has microseconds"),
    (NANO, US, "it has nanoseconds"),
    (NANO, S, "it has fractions of a second"),
    (pd.Timedelta(1, unit="ns"), pa.duration("us"), "it has nanoseconds"),
    (np.datetime64("2026-01-02T00:00:00.5"), S, "it has fractions of a second"),
    (np.timedelta64(1500, "ms"), pa.duration("s"), "it has fractions of a second"),
    (np.datetime64("2026-01-02T12", "h"), pa.date32(), "it has a time of day"),
    (DAY.replace(tzinfo=EAST), US, "it has a time zone, but the column has none"),
    (FINE.timetz().replace(tzinfo=EAST), pa.time64("us"), "it has a time zone, but the column has none"),
    (pd.Timestamp(DAY, tz="Europe/Paris"), US, "it has a time zone, but the column has none"),
]


FLOAT = pa.float32()


def struct(kind: Any) -> Any:
    return pa.struct([("a", kind), ("b", pa.string())])


ZONED = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (0.5, pa.int64(), "ValueError: returned 0.5, a float, which does not fit int64"),
        (np.float64(1.9), pa.int32(), "ValueError: returned np.float64(1.9), a float64, which does not fit int32"),
        (np.array(1.9), pa.int32(), "does not fit int32"),
        (decimal.Decimal("1.5"), pa.int8(), "a Decimal, which does not fit int8"),
        (1.9, pa.timestamp("us"), "does not fit timestamp[us]"),
        (1.9, pa.dictionary(pa.int8(), pa.int32()), "a float, which does not fit"),
        (math.nan, pa.int64(), "ValueError: returned nan of type float, which does not fit int64"),
        ([1.9], pa.list_(pa.int32()), "ValueError: returned [1.9]: 1.9, a float, does not fit int32"),
        ([1, 2.5], pa.list_(pa.int32()), "2.5, a float, does not fit int32"),
        (np.array([1.9, 2]), pa.list_(pa.int32()), "does not fit int32"),
        ([[1], [1.5]], pa.list_(pa.list_(pa.int8())), "1.5, a float, does not fit int8"),
        ({"a": 1.9}, STRUCT, "ValueError: returned {'a': 1.9}: 1.9, a float, does not fit int32"),
        (Pair(1.9, "x"), STRUCT, "1.9, a float, does not fit int32"),  # type: ignore[arg-type]
        ([{"a": 1.9}], pa.list_(STRUCT), "1.9, a float, does not fit int32"),
        ({"k": 1.9}, pa.map_(pa.string(), pa.int32()), "1.9, a float, does not fit int32"),
    ],
)
def test_a_fraction_is_not_stored_in_an_integer_column(value: Any, kind: Any, message: str) -> None:
    found, why = converted(value, kind)
    assert found is None
    assert message in why


@pytest.mark.parametrize(
    ("value", "kind", "stored"),
    [
        (2.0, pa.int64(), 2),
        (np.float32(3), pa.int8(), 3),
        (np.int64(5), pa.int64(), 5),
        ([1, 2.0, None], pa.list_(pa.int32()), [1, 2, None]),
        (np.array([1.0, 2.0]), pa.list_(pa.int32()), [1, 2]),
        (np.array([1, 2]), pa.list_(pa.int32()), [1, 2]),
        (np.array([1.5, 2]), pa.list_(pa.float32()), [1.5, 2]),
        (1.5, pa.float32(), 1.5),
        ({"a": 2.0}, STRUCT, {"a": 2, "b": None}),
        ((1, "x"), STRUCT, {"a": 1, "b": "x"}),
        (Pair(1, "x"), STRUCT, {"a": 1, "b": "x"}),
        (Swapped("x", 1), STRUCT, {"a": 1, "b": "x"}),
        (Made(1, "x"), STRUCT, {"a": 1, "b": "x"}),
        (datetime.date(2026, 1, 2), pa.date32(), datetime.date(2026, 1, 2)),
        ({"k": 1}, pa.map_(pa.string(), pa.int32()), [("k", 1)]),
    ],
)
def test_a_value_that_the_column_holds_exactly_is_stored(value: Any, kind: Any, stored: Any) -> None:
    assert converted(value, kind) == (stored, "")


def test_lists_of_functions_of_arrays_are_checked_too() -> None:
    converter = ValueConverter([pa.int64()], [""])
    assert converter.arrays([1, 2.0], 2)[0].to_pylist() == [1, 2]
    with pytest.raises(ValueError, match=r"returned 1.9, a float, which does not fit int64"):
        converter.arrays([1, 1.9], 2)


def test_records_with_different_fields_are_stored() -> None:
    rows = [{"a": 1}, (2, "x"), Made(3, "y"), {"a": 1.5}]
    (array,), wrong = ValueConverter([STRUCT], [""]).values(rows)
    assert [row and row["a"] for row in array.to_pylist()] == [1, 2, 3, None]
    assert [*wrong] == [3]


@pytest.mark.parametrize("value", [{"a": 1, "bb": "x"}, {"bb": "x"}])
def test_an_unknown_field_of_a_struct_is_rejected(value: Any) -> None:
    found, why = converted(value, STRUCT)
    assert found is None
    assert "ValueError" in why
    assert "unknown field 'bb' in struct<a: int32, b: string> (did you mean 'b'?)" in why


def test_a_missing_output_column_is_rejected() -> None:
    converter = ValueConverter([pa.int64(), pa.string()], ["count", "word"])
    arrays, wrong = converter.values([{"count": 1, "wrod": "x"}, {"count": 2}, Pair(3, "y"), (4.5, "z")])
    assert [array.to_pylist() for array in arrays] == [[None, 2, 3, None], [None, None, "y", None]]
    assert "unknown field 'wrod' among count, word (did you mean 'word'?)" in str(wrong[0])
    assert str(wrong[3]) == "returned 4.5, a float, for count, which does not fit int64"
    for batch in ({"count": [1], "wrod": ["x"]}, pa.record_batch({"count": [1], "wrod": ["x"]})):
        with pytest.raises(ValueError, match="did you mean 'word'"):
            converter.arrays(batch, 1)
    by_place = converter.arrays(pa.record_batch({"x": [1], "y": ["z"]}), 1)
    assert [array.to_pylist() for array in by_place] == [[1], ["z"]]


def test_integers_are_checked_by_type_only() -> None:
    rows: list[Any] = [Fragile(n) for n in range(5)]
    for values, kind in ((rows, pa.int64()), ([rows], pa.list_(pa.int64())), ([{"a": rows[3]}], STRUCT)):
        (array,), wrong = ValueConverter([kind], [""]).values(values)
        assert (len(array), wrong) == (len(values), {})


@pytest.mark.parametrize("fn", [halves, halves_of_arrays])
def test_a_value_that_does_not_fit_is_reported_without_internal_frames(fn: Any) -> None:
    made = udf(fn)
    caller = UdfCaller(made, [pa.int64()], ErrorPolicy("skip"))
    found = caller.run(pa.record_batch({"n": range(4)}), math.inf, lambda _: None)
    caller.teardown()
    assert found.arrays[0].to_pylist() == [0, None, 1, None]
    for failure in found.failures:
        assert failure.traceback.strip() == f"ValueError: {failure.message}"


@pytest.mark.parametrize(("value", "kind", "why"), CUT)
def test_a_time_that_would_be_truncated_or_shifted_fails(value: Any, kind: Any, why: str) -> None:
    found, message = converted(value, kind)
    assert found is None
    assert message.startswith("ValueError: returned ")
    assert f", a {type(value).__name__}, which does not fit {kind}: {why}" in message


@pytest.mark.parametrize(
    ("value", "kind", "why"), [*CUT, (1e300, FLOAT, "it is too large"), ("ab", pa.list_(pa.string()), "")]
)
def test_values_inside_lists_and_structs_are_checked(value: Any, kind: Any, why: str) -> None:
    for given, nested in (
        ([None, value], pa.list_(kind)),
        ([[value]], pa.list_(pa.list_(kind))),
        ({"a": value}, struct(kind)),
        ([{"a": value, "b": "x"}], pa.list_(struct(kind))),
        ((getattr(value, "item", lambda: value)(), "x"), struct(kind)),
        ({"k": value}, pa.map_(pa.string(), kind)),
    ):
        found, message = converted(given, nested)
        assert found is None
        assert message.startswith("ValueError: returned ")
        assert f"does not fit {kind}" in message
        assert why in message


@pytest.mark.parametrize(
    ("value", "kind", "stored"),
    [
        (FINE, US, FINE),
        (MILLI, MS, MILLI),
        (DAY, S, DAY),
        (DAY, pa.date32(), DAY.date()),
        (DAY, pa.date64(), DAY.date()),
        (DAY.date(), pa.date32(), DAY.date()),
        (FINE.time(), pa.time64("us"), FINE.time()),
        (datetime.timedelta(seconds=2), pa.duration("s"), datetime.timedelta(seconds=2)),
        (NANO, NS, NANO),
        (pd.Timestamp(FINE), US, FINE),
        (FINE, ZONED, FINE.replace(tzinfo=datetime.UTC)),  # as ever: what has no zone is UTC
        (DAY.replace(tzinfo=EAST), ZONED, DAY.replace(tzinfo=EAST)),
        (DAY.replace(tzinfo=datetime.UTC), US, DAY),  # as ever: nothing is shifted
        ([FINE, None], pa.list_(US), [FINE, None]),
        (5, S, datetime.datetime(1970, 1, 1, 0, 0, 5)),
    ],
)
def test_a_time_that_the_column_holds_exactly_is_stored(value: Any, kind: Any, stored: Any) -> None:
    assert converted(value, kind) == (stored, "")


def test_times_of_numpy_keep_their_unit() -> None:
    nano, day = np.datetime64("2026-01-02", "ns"), np.array(["2026-01-02"], "M8[D]")
    assert converted(nano, US) == (DAY, "")
    assert converted({"a": nano}, struct(US)) == ({"a": DAY, "b": None}, "")
    assert converted(nano, pa.date64()) == (DAY.date(), "")
    assert converted(np.timedelta64(2000, "ns"), pa.duration("us")) == (datetime.timedelta(microseconds=2), "")
    assert converted(np.datetime64("NaT", "ns"), US) == (None, "")
    for array in (day, day.astype("M8[ms]"), day.astype("M8[us]"), day.astype("M8[ns]"), pd.Series(day)):
        assert converted(array, pa.list_(US)) == ([DAY], "")
    assert converted(day.astype("M8[ns]").reshape(1, 1), pa.list_(pa.list_(US))) == ([[DAY]], "")
    finest = np.array([NANO.to_datetime64()])
    assert converted(finest, pa.list_(NS)) == ([NANO], "")
    assert converted([finest], pa.list_(pa.list_(NS))) == ([[NANO]], "")
    assert converted(finest.reshape(1, 1), pa.list_(pa.list_(NS))) == ([[NANO]], "")
    for value, kind in ((finest, pa.list_(US)), (finest[0], US), (np.timedelta64(1, "Y"), pa.duration("us"))):
        found, message = converted(value, kind)
        assert found is None
        assert "does not fit" in message


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1e300, FLOAT),
        (-1e39, FLOAT),
        (np.float64(1e300), FLOAT),
        (70000.0, pa.float16()),
        (70000, pa.float16()),
        (1e300, pa.dictionary(pa.int32(), FLOAT)),
        ([1.0, math.inf, 1e300], pa.list_(FLOAT)),
        ([1.0, 1e300], pa.list_(FLOAT, 2)),
        (np.array([math.inf, 1e300]), pa.list_(FLOAT)),
        (np.array([1.0, 1e300], dtype=object), pa.list_(FLOAT)),
        (pd.Series([1.0, 1e300]), pa.list_(FLOAT)),
        ([np.array([1e300])], pa.list_(pa.list_(FLOAT))),
    ],
)
def test_a_number_that_would_become_infinite_fails(value: Any, kind: Any) -> None:
    found, message = converted(value, kind)
    assert found is None
    assert message.startswith("ValueError: returned ")
    assert message.endswith(": it is too large")


def test_floats_may_be_rounded_and_infinite() -> None:
    largest = float(np.finfo(np.float32).max)
    for value, stored in ((0.1, float(np.float32(0.1))), (math.inf, math.inf), (-math.inf, -math.inf)):
        assert converted(value, FLOAT) == (stored, "")
        assert converted([value, largest], pa.list_(FLOAT)) == ([stored, largest], "")
        assert converted(np.array([value, 1.0]), pa.list_(FLOAT)) == ([stored, 1.0], "")
        assert converted({"a": value}, struct(FLOAT)) == ({"a": stored, "b": None}, "")
    assert converted(largest * (1 + 2**-26), FLOAT) == (largest, "")
    assert math.isnan(converted(math.nan, FLOAT)[0])
    (array,), wrong = ValueConverter([FLOAT], [""]).values([1e300, math.inf, 1.5, -1e300])
    assert array.to_pylist() == [None, math.inf, 1.5, None]
    assert [*wrong] == [0, 3]


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.binary()), pa.list_(pa.string(), 3)])
@pytest.mark.parametrize("value", ["abc", "", np.str_("abc")])
def test_a_string_is_not_stored_as_a_list_of_characters(value: Any, kind: Any) -> None:
    found, message = converted(value, kind)
    assert found is None
    assert "does not fit" in message
    assert converted([value] * 3, kind)[1] == ""


def test_bytes_are_not_a_list_of_numbers_and_a_string_is_not_a_record() -> None:
    for value in (b"ab", bytearray(b"ab")):
        found, message = converted(value, pa.list_(pa.uint8()))
        assert found is None
        assert f", a {type(value).__name__}, which does not fit list<item: uint8>" in message
    for kind in (struct(US), pa.map_(pa.string(), pa.string())):
        assert "returned '', a str, which does not fit" in converted("", kind)[1]


class FragileFloat(float):
    def __float__(self) -> float:
        raise AssertionError("a value was read")


def test_floats_are_checked_only_where_an_infinity_appears() -> None:
    few = [FragileFloat(1.5)] * 3
    assert ValueConverter([FLOAT], [""]).values(few)[1] == {}
    assert ValueConverter([pa.list_(FLOAT)], [""]).values([few])[1] == {}
    assert ValueConverter([pa.list_(pa.float64())], [""]).values([[*few, math.inf]])[1] == {}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (pa.array([1.0, 1e300]), FLOAT, "returned double, which does not fit float: a number is too large"),
        (pa.array([1.0, 70000.0]), pa.float16(), "a number is too large"),
        (pa.array([1, 70000]), pa.float16(), "a number is too large"),
        (np.array([math.inf, 1e300]), FLOAT, "a number is too large"),
        (pa.array([[1.0], [1e300]]), pa.list_(FLOAT), "a number is too large"),
        (pa.array([{"a": 1e300}, None]), pa.struct([("a", FLOAT)]), "a number is too large"),
        (pa.array([FINE, FINE]), S, "would lose data"),
        (
            pa.array([DAY, DAY], pa.timestamp("us", "+05:00")),
            US,
            r"returned timestamp\[us, tz=\+05:00\], but the column is",
        ),
        (pa.array([[DAY], None], pa.list_(pa.timestamp("us", "Asia/Tokyo"))), pa.list_(US), "but the column is"),
        (pd.Series([NANO, None], dtype=object), US, "a Timestamp, which does not fit .*it has nanoseconds"),
        (np.array([DAY, DAY.replace(tzinfo=EAST)], dtype=object), US, "it has a time zone"),
        (np.array([DAY.date(), FINE], dtype=object), pa.date32(), "it has a time of day"),
        ([FINE, DAY], S, "it has fractions of a second"),
        ([NANO.to_datetime64(), None], US, "does not fit"),
    ],
)
def test_arrays_that_would_lose_information_are_rejected(given: Any, kind: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ValueConverter([kind], [""]).arrays(given, 2)


@pytest.mark.parametrize(
    ("given", "kind", "stored"),
    [
        (pa.array([0.5, math.inf]), FLOAT, [0.5, math.inf]),
        (pa.array([[0.5], [-math.inf]]), pa.list_(FLOAT), [[0.5], [-math.inf]]),
        (pa.array([FINE, None]), ZONED, [FINE.replace(tzinfo=datetime.UTC), None]),
        (pa.array([FINE, None], ZONED), US, [FINE, None]),
        (pd.Series([NANO, pd.NaT], dtype=object), NS, [NANO, None]),
        (pd.Series([FINE, None], dtype=object), US, [FINE, None]),
        (pd.Series([1, None], dtype=object), pa.int64(), [1, None]),
        ([np.datetime64("2026-01-02", "ns"), None], US, [DAY, None]),
    ],
)
def test_arrays_that_the_column_holds_exactly_are_stored(given: Any, kind: Any, stored: Any) -> None:
    assert ValueConverter([kind], [""]).arrays(given, 2)[0].to_pylist() == stored


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"text", pa.string()),
        (bytearray(b"text"), pa.large_string()),
        (np.bytes_(b"text"), pa.string()),
        (True, pa.float64()),
        (np.bool_(True), pa.float32()),
    ],
)
def test_a_value_of_another_class_is_not_converted(value: Any, kind: Any) -> None:
    good = "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else 1.5
    arrays, wrong = ValueConverter([kind], [""]).values([good, value, None])
    assert arrays[0].to_pylist() == [good, None, None]
    assert list(wrong) == [1]
    assert "which does not fit" in str(wrong[1])
