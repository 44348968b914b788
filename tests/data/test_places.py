"""The place of a row in its source, as messages show it."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.data.sources import open_source

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.data.readers.cursor import Cursor


def opened(source: Any, limit: int | None = None) -> Cursor:
    cursor = open_source(source, limit, None)
    assert cursor is not None
    return cursor


def places(cursor: Cursor, rows: int) -> list[str]:
    """The places of all rows, by marks that were taken on the way."""
    marks: dict[int, object] = {}
    while True:
        at, mark = cursor.row, cursor.mark()
        if cursor.take(rows) is None:
            break
        marks[at] = mark
    found = [cursor.place_of(row, marks) for row in range(cursor.row)]
    assert found == [cursor.place_of(row, {}) for row in range(cursor.row)], "without marks it is only slower"
    cursor.close()
    return found


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_a_line_of_a_file_is_named_by_file_and_line(tmp_path: Path, rows: int) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(5)))
    wanted = [f"{tmp_path}/{name}.jsonl:{line}" for name in ("a", "b") for line in range(1, 6)]
    assert places(opened(f"{tmp_path}/*.jsonl"), rows) == wanted


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_a_row_of_csv_is_named_by_the_line_on_which_it_begins(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,"one\ntwo"\n2,three\n3,"\n\n"\n4,last\n')
    assert places(opened(str(path)), rows) == [f"{path}:{line}" for line in (2, 4, 5, 8)]


def test_a_line_of_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(50))))
    assert places(opened(str(path)), 7) == [f"{path}:{line}" for line in range(1, 51)]


@pytest.mark.parametrize("rows", [2, 100])
def test_a_row_of_parquet_is_named_by_its_number_in_the_file(tmp_path: Path, rows: int) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("a", "b"):
        pq.write_table(pa.table({"n": list(range(5))}), tmp_path / f"{name}.parquet", row_group_size=2)
    wanted = [f"{tmp_path}/{name}.parquet, row {row}" for name in ("a", "b") for row in range(5)]
    assert places(opened(f"{tmp_path}/*.parquet"), rows) == wanted


def test_a_row_of_a_lance_table_is_named_by_its_number_in_the_table(tmp_path: Path) -> None:
    pa, lance = pytest.importorskip("pyarrow"), pytest.importorskip("lance")
    names = [str(tmp_path / f"{name}.lance") for name in ("a", "b")]
    for name in names:
        lance.write_dataset(pa.table({"n": list(range(5))}), name, max_rows_per_file=2)
    wanted = [f"{name}, row {row}" for name in names for row in range(5)]
    assert places(opened({"path": names}), 100) == wanted


def test_a_limited_source_has_the_places_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    assert places(opened(str(path), limit=2), 1) == [f"{path}:1", f"{path}:2"]
