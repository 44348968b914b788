"""Which values does a column not hold as they are? They fail their rows, and are never stored as others."""

from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dovetail.backfill.value_conversion import ValueConverter

DAY = datetime.datetime(2026, 1, 2)
FINE = datetime.datetime(2026, 1, 2, 12, 30, 15, 123456)
MILLI = FINE.replace(microsecond=123000)
NANO = pd.Timestamp("2026-01-02 12:30:15.000000001")
EAST = datetime.timezone(datetime.timedelta(hours=5))
S, MS, US, NS = (pa.timestamp(unit) for unit in ("s", "ms", "us", "ns"))
ZONED = pa.timestamp("us", "UTC")
FLOAT = pa.float32()


def converted(value: Any, kind: Any) -> tuple[Any, str]:
    """What is stored of it between values that are NULL, and why it is not."""
    (array,), wrong = ValueConverter([kind], [""]).values([None, value, None])
    assert not wrong or [*wrong] == [1]
    return array.to_pylist()[1], "".join(f"{type(error).__name__}: {error}" for error in wrong.values())


def struct(kind: Any) -> Any:
    return pa.struct([("a", kind), ("b", pa.string())])


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


@pytest.mark.parametrize(("value", "kind", "why"), CUT)
def test_a_time_that_would_be_cut_or_shifted_fails(value: Any, kind: Any, why: str) -> None:
    found, said = converted(value, kind)
    assert found is None
    assert said.startswith("ValueError: returned ")
    assert f", a {type(value).__name__}, which does not fit {kind}: {why}" in said


@pytest.mark.parametrize(
    ("value", "kind", "why"), [*CUT, (1e300, FLOAT, "it is too large"), ("ab", pa.list_(pa.string()), "")]
)
def test_the_same_inside_of_lists_and_structs(value: Any, kind: Any, why: str) -> None:
    for given, nested in (
        ([None, value], pa.list_(kind)),
        ([[value]], pa.list_(pa.list_(kind))),
        ({"a": value}, struct(kind)),
        ([{"a": value, "b": "x"}], pa.list_(struct(kind))),
        ((getattr(value, "item", lambda: value)(), "x"), struct(kind)),
        ({"k": value}, pa.map_(pa.string(), kind)),
    ):
        found, said = converted(given, nested)
        assert found is None
        assert said.startswith("ValueError: returned ")
        assert f"does not fit {kind}" in said
        assert why in said


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
def test_a_time_that_is_the_same_afterwards_is_stored(value: Any, kind: Any, stored: Any) -> None:
    assert converted(value, kind) == (stored, "")


def test_times_of_numpy_are_not_taken_for_numbers_of_another_unit() -> None:
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
        found, said = converted(value, kind)
        assert found is None
        assert "does not fit" in said


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
    found, said = converted(value, kind)
    assert found is None
    assert said.startswith("ValueError: returned ")
    assert said.endswith(": it is too large")


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
def test_a_text_is_no_list_of_its_letters(value: Any, kind: Any) -> None:
    found, said = converted(value, kind)
    assert found is None
    assert "does not fit" in said
    assert converted([value] * 3, kind)[1] == ""


def test_bytes_are_no_list_of_numbers_and_a_text_no_record() -> None:
    for value in (b"ab", bytearray(b"ab")):
        found, said = converted(value, pa.list_(pa.uint8()))
        assert found is None
        assert f", a {type(value).__name__}, which does not fit list<item: uint8>" in said
    for kind in (struct(US), pa.map_(pa.string(), pa.string())):
        assert "returned '', a str, which does not fit" in converted("", kind)[1]


class Fragile(float):
    def __float__(self) -> float:
        raise AssertionError("a value was looked at")


def test_floats_are_looked_at_only_where_an_infinity_appears() -> None:
    few = [Fragile(1.5)] * 3
    assert ValueConverter([FLOAT], [""]).values(few)[1] == {}
    assert ValueConverter([pa.list_(FLOAT)], [""]).values([few])[1] == {}
    assert ValueConverter([pa.list_(pa.float64())], [""]).values([[*few, math.inf]])[1] == {}


# --- functions of arrays


@pytest.mark.parametrize(
    ("given", "kind", "said"),
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
def test_arrays_do_not_lose_anything_either(given: Any, kind: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
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
def test_arrays_that_are_the_same_afterwards_are_stored(given: Any, kind: Any, stored: Any) -> None:
    assert ValueConverter([kind], [""]).arrays(given, 2)[0].to_pylist() == stored
