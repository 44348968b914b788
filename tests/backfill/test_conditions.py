"""Backfills with `where`, and rows that keep their values."""

# ruff: noqa: A002, A006 - parameters are called like columns, and one is `id`

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, by_id, column, create_table, twice
from backfill_scenes import failing_function
from dovetail.backfill.checkpoints import merge_kept_values
from dovetail.errors import ConfigError
from staged_backfill import Staged

if TYPE_CHECKING:
    from pathlib import Path


pa = pytest.importorskip("pyarrow")


lance = pytest.importorskip("lance")


def not_null(uri: str, rows: int) -> str:
    """A table whose column `n` is there, and must have a value in every row."""
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("n", pa.int64(), nullable=False)])
    lance.write_dataset(pa.table([list(range(rows)), [7] * rows], schema=schema), uri)
    return uri


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    return Staged(create_table(tmp_path, 200, 200), fns.doubled)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A folder that says which rows fail: 7 and 13."""
    folder = tmp_path / "bad"
    folder.mkdir()
    for row in (7, 13):
        (folder / str(row)).touch()
    return folder


def test_the_data_file_of_a_killed_call_does_not_replace_newer_values(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 100, 100)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    killed = Staged(uri, fns.first_version, where="id < 10")
    assert killed.worker()([killed.task(0, 100)])[0].file
    table.backfill("n", fns.second_version, cluster=HALF, where="id >= 10")
    table.backfill("n", fns.first_version, cluster=HALF, where="id < 10")
    assert by_id(uri, "n") == {row: row + (1 if row < 10 else 2) for row in range(100)}


def test_a_number_of_fragments_counts_those_with_matching_rows(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 80, 20)
    table = dt.table(uri)
    for expected in (20, 20, 0):
        assert table.backfill("n", fns.doubled, cluster=HALF, where="id >= 40", fragments=1).rows == expected
    assert by_id(uri, "n") == twice(range(80), range(40))


def test_a_condition_keeps_the_rest_of_a_column_of_uuids(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    old, new = b"0" * 16, b"1" * 16
    lance.write_dataset(pa.table({"id": list(range(10)), "n": pa.array([old] * 10, pa.uuid())}), uri)

    @dt.udf(data_type=pa.uuid())
    def replace_value(id: int) -> Any:
        return new

    assert dt.table(uri).backfill("n", replace_value, cluster=HALF, where="id < 3").rows == 3
    assert [value.bytes for value in column(uri, "n")] == [new] * 3 + [old] * 7


@pytest.mark.parametrize(("kind", "values"), [("uuid", [b"a" * 16, b"b" * 16]), ("json_", ['"a"', '"b"'])])
def test_kept_values_of_types_without_an_arrow_if_else_are_merged(kind: str, values: list[Any]) -> None:
    of = getattr(pa, kind)()
    given, before = pa.array([values[0], None], of), pa.array([None, values[1]], of)
    schema = pa.schema([pa.field("n", of)])
    batches = [pa.record_batch([it], schema=schema) for it in (given, before)]
    found = merge_kept_values(batches[0], pa.array([True, False]), batches[1], schema).column(0)
    assert found.type == of
    assert found.to_pylist() == pa.array(values, of).to_pylist()


def test_a_condition_has_no_note_and_the_next_full_call_notes_why_it_computes_again(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 40, 20)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    filled = table.backfill("n", fns.tripled, cluster=HALF, where="id < 5")
    assert (filled.rows, filled.notes) == (5, [])
    plain = table.backfill("n", fns.doubled, cluster=HALF)
    assert plain.rows == 20
    assert [note for note in plain.notes if "1 fragment filled by" in note and "or with another condition" in note]


def test_a_column_that_is_not_nullable_is_filled_beside_deleted_rows(tmp_path: Path) -> None:
    uri = not_null(str(tmp_path / "t.lance"), 3000)
    lance.dataset(uri).delete("id < 2000 OR id % 10 = 3")  # with the first rows that are read there is none
    left = [row for row in range(2000, 3000) if row % 10 != 3]
    assert dt.table(uri).backfill("n", fns.doubled, cluster=HALF, recompute=True).rows == len(left)
    assert by_id(uri, "n") == twice(left)


@pytest.mark.processes
def test_the_data_file_of_a_killed_call_is_used_if_nothing_changed(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 200, 200)
    staged = Staged(uri, fns.doubled, where="id >= 100")
    assert staged.worker()([staged.task(0, 200)])[0].file  # and then it was killed
    filled = staged.table.backfill("n", fns.doubled, where="id >= 100", cluster=HALF)
    assert (filled.rows, filled.kept, filled.fragments) == (0, 200, 1)
    assert by_id(uri, "n") == twice(range(200), range(100))


def test_parts_of_a_condition_do_not_replace_newer_values(tmp_path: Path, bad: Path) -> None:
    uri = create_table(tmp_path, 40, 40)
    table = dt.table(uri)
    table.add_column("n", failing_function(bad))
    with pytest.raises(ValueError, match="row 7"):
        table.backfill("n", failing_function(bad), cluster=HALF, where="n IS NULL")
    table.backfill("n", dt.udf(lambda id: -1, input_columns=["id"], data_type="int64"), cluster=HALF, where="id < 5")
    (bad / "7").unlink()
    (bad / "13").unlink()
    table.backfill("n", failing_function(bad), cluster=HALF, where="n IS NULL")
    assert by_id(uri, "n") == twice(range(40)) | dict.fromkeys(range(5), -1)


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_blobs_are_passed_to_a_function_as_bytes(tmp_path: Path, version: str) -> None:
    uri = str(tmp_path / "t.lance")
    image = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    blobs = pa.array([b"x" * (row + 1) for row in range(20)], pa.large_binary())
    table = pa.table([pa.array(range(20)), blobs], schema=pa.schema([pa.field("id", pa.int64()), image]))
    lance.write_dataset(table, uri, max_rows_per_file=10, data_storage_version=version)
    lance.dataset(uri).delete("id = 12")

    def size(image: bytes) -> int:
        return len(image)

    def new(id: int) -> bytes:
        return b"new" * (id + 1)

    dt.table(uri).backfill("n", dt.udf(size), cluster=HALF)
    assert by_id(uri, "n") == {row: row + 1 for row in range(20) if row != 12}
    if version == "2.2":
        with pytest.raises(ConfigError, match="a blob column"):
            dt.table(uri).backfill("image", dt.udf(new), cluster=HALF)
        return
    dt.table(uri).backfill("image", dt.udf(new), cluster=HALF, where="id < 2")
    read = lance.dataset(uri).take_blobs("image", indices=[0, 1, 2])
    assert [one.readall() for one in read] == [b"new", b"newnew", b"xxx"]
