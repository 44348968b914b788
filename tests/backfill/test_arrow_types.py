"""Arrow types of annotations, and the columns that annotations accept."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from dovetail.backfill.arrow_types import accepts, arrow_type, can_store, data_type_fixes, parse_data_type

Word = NewType("Word", str)


class Point(NamedTuple):
    x: int
    name: str | None


@dataclass
class Box:
    left: float
    corner: Point


class TypedWords(TypedDict):
    words: list[str]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (str, pa.string()),
        (bytes, pa.binary()),
        (bool, pa.bool_()),
        (int, pa.int64()),
        (float, pa.float64()),
        (datetime.datetime, pa.timestamp("us")),
        (datetime.date, pa.date32()),
        (datetime.time, pa.time64("us")),
        (datetime.timedelta, pa.duration("us")),
        (Optional[int], pa.int64()),  # noqa: UP045
        (str | None, pa.string()),
        (list[float], pa.list_(pa.float64())),
        (list[list[int] | None], pa.list_(pa.list_(pa.int64()))),
        (Sequence[str], pa.list_(pa.string())),
        (tuple[int, ...], pa.list_(pa.int64())),
        (tuple[float, float], pa.list_(pa.float64())),
        (set[str], pa.list_(pa.string())),
        (Annotated[int, "words"], pa.int64()),
        (Annotated[int, pa.int8()], pa.int8()),
        (Annotated[list[float], pa.list_(pa.float32(), 4)], pa.list_(pa.float32(), 4)),
        (Literal["a", "b"], pa.string()),
        (Literal[1, 2], pa.int64()),
        (Word, pa.string()),
        (np.float32, pa.float32()),
        (np.uint8, pa.uint8()),
        (np.str_, pa.string()),
        (npt.NDArray[np.float32], pa.list_(pa.float32())),
        (Point, pa.struct([("x", pa.int64()), ("name", pa.string())])),
        (Box, pa.struct([("left", pa.float64()), ("corner", pa.struct([("x", pa.int64()), ("name", pa.string())]))])),
        (TypedWords, pa.struct([("words", pa.list_(pa.string()))])),
        (list[Point], pa.list_(pa.struct([("x", pa.int64()), ("name", pa.string())]))),
        (pa.StringArray, pa.string()),
        (pa.FloatArray, pa.float32()),
        (pa.BooleanArray, pa.bool_()),
    ],
)
def test_an_annotation_means_a_type(annotation: Any, expected: pa.DataType) -> None:
    assert arrow_type(annotation) == expected


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (Any, "has no return annotation"),
        (None.__class__, "returns only None"),
        (int | str, "returns int or str, but a column has one type"),
        (dict, 'data_type="struct<a: string>"'),
        (dict[str, int], 'data_type="struct<a: int64, b: int64>"'),
        (tuple[int, str], 'data_type="struct<a: int64, b: string>"'),
        (set, 'data_type="list<string>"'),
        (int | float, 'data_type="double"'),
        (Mapping[str, int], "data_type="),
        (list, 'data_type="list<string>"'),
        (list[dict], 'data_type="list<struct<a: string>>"'),  # type: ignore[type-arg]
        (decimal.Decimal, 'data_type="decimal128(18, 2)"'),
        (np.ndarray, 'data_type="list<float32>"'),
        (complex, "complex has no single Arrow type"),
        (pa.Array, "Array has no element type"),
    ],
)
def test_an_annotation_without_a_type_has_a_reason(annotation: Any, message: str) -> None:
    found = arrow_type(annotation)
    assert isinstance(found, str)
    assert message in found


@pytest.mark.parametrize("annotation", [dict, list, tuple[int, str], int | float, dict[str, int], Any, pa.Array])
def test_the_suggested_data_type_works(annotation: Any) -> None:
    why = arrow_type(annotation)
    for name in ("words", "<lambda>"):
        fixes = " ".join(data_type_fixes(name, why))
        assert "def <lambda>" not in fixes
        assert isinstance(parse_data_type(fixes.partition('data_type="')[2].partition('"')[0]), pa.DataType)
    assert data_type_fixes("words", arrow_type(int | str)) == ("def words(...) -> str, and return str(...)",)


VECTOR = pa.list_(pa.float32(), 3)


@pytest.mark.parametrize(
    ("annotation", "takes", "refuses"),
    [
        (int, [pa.int8(), pa.uint64(), pa.bool_()], [pa.float32(), pa.string(), pa.list_(pa.int8())]),
        (float, [pa.float16(), pa.float64(), pa.int32()], [pa.string(), pa.decimal128(5, 2)]),
        (str, [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], [pa.binary()]),
        (bytes, [pa.binary(), pa.large_binary(), pa.binary(4)], [pa.string()]),
        (str | None, [pa.string(), pa.null()], [pa.int8()]),
        (int | str, [pa.string(), pa.int8()], [pa.float32()]),
        (
            list[float],
            [VECTOR, pa.list_(pa.int8()), pa.large_list(pa.float64())],
            [pa.list_(pa.string()), pa.float32()],
        ),
        (list, [VECTOR, pa.list_(pa.string())], [pa.string()]),
        (Sequence[str], [pa.list_(pa.string())], [pa.list_(pa.int8())]),
        (dict, [pa.struct([("a", pa.int8())])], [pa.string(), pa.map_(pa.string(), pa.int8())]),
        (TypedWords, [pa.struct([("words", pa.list_(pa.string()))])], [pa.string()]),
        (datetime.datetime, [pa.timestamp("ns"), pa.timestamp("us", "UTC")], [pa.date32()]),
        (datetime.date, [pa.date32(), pa.timestamp("us")], [pa.string()]),
        (decimal.Decimal, [pa.decimal128(5, 2)], [pa.float64()]),
        (np.float32, [pa.float32(), pa.int8()], [pa.string()]),
        (Point, [], [pa.struct([("x", pa.int64())]), pa.string()]),
        (Any, [pa.string(), VECTOR], []),
        (object, [pa.string(), VECTOR], []),
        (Annotated[int, "n"], [pa.int8()], [pa.string()]),
        (Word, [pa.string()], [pa.int8()]),
        (pa.Array, [pa.string(), VECTOR], []),
        (pa.StringArray, [pa.string()], [pa.int8()]),
    ],
)
def test_a_parameter_takes_columns_of_its_type(
    annotation: Any, takes: list[pa.DataType], refuses: list[pa.DataType]
) -> None:
    assert [kind for kind in takes if not accepts(annotation, kind)] == []
    assert [kind for kind in refuses if accepts(annotation, kind)] == []


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.large_string(),
        pa.binary(), pa.binary(4), pa.date32(), pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.duration("s"),
        pa.time32("ms"), pa.time64("ns"), pa.decimal128(10, 2), pa.decimal256(50, 3), pa.list_(pa.float32()),
        pa.list_(pa.float32(), 768), pa.large_list(pa.string()),
        pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]), pa.date64(), pa.null(), pa.string_view(),
    ],
)  # fmt: skip
def test_a_type_can_be_written_as_arrow_prints_it(kind: pa.DataType) -> None:
    assert parse_data_type(str(kind)) == kind
    assert parse_data_type(kind) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("int32", pa.int32()),
        (" list < float32 > ", pa.list_(pa.float32())),
        ("fixed_size_list<float32, 3>", pa.list_(pa.float32(), 3)),
        ("map<string, int32>", pa.map_(pa.string(), pa.int32())),
        ("float32", pa.float32()),
        ("timestamp", pa.timestamp("us")),
        (list[str], pa.list_(pa.string())),
    ],
)
def test_other_ways_to_write_a_type(text: Any, kind: pa.DataType) -> None:
    assert parse_data_type(text) == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strin", "unknown type 'strin'"),
        ("list<float32", "'>' is missing"),
        ("list", "'<' is missing"),
        ("int32 int8", "'int8' is left after the type"),
        ("", "a name is missing"),
        ("struct<a int32>", "':' is missing before 'int32>'"),
        ("decimal128(99, 2)", "has 1 to 38 digits, not 99"),
        ("time32[us]", "is s or ms, not 'us'"),
        ("list<" * 60 + "int8" + ">" * 60, "nested too deeply"),
        ("timestamp[us, tz=", "']' is missing"),
        (3, "is not an Arrow type"),
    ],
)
def test_an_invalid_type_name_has_a_reason(text: Any, message: str) -> None:
    found = parse_data_type(text)
    assert isinstance(found, str)
    assert message in found


def test_a_result_may_have_another_width_than_the_column() -> None:
    assert can_store(pa.int64(), pa.int8())
    assert can_store(pa.string(), pa.large_string())
    assert can_store(pa.list_(pa.float64()), pa.list_(pa.float32(), 3))
    assert can_store(pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int8())]))
    assert not can_store(pa.struct([("a", pa.int64())]), pa.struct([("b", pa.int8())]))
    assert not can_store(pa.int64(), pa.float32())
    assert not can_store(pa.string(), pa.int8())
