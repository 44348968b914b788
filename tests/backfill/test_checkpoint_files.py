"""Checkpoint files beside a table: damaged, stale and superfluous ones."""

# ruff: noqa: A002 - parameters are called like columns, and one is `id`

from __future__ import annotations

import time

import pytest

pytest.importorskip("lance")
pytest.importorskip("pyarrow")

from typing import TYPE_CHECKING

import lance
import pyarrow as pa

import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, Calls, by_id, create_table, driver, left_over, twice
from dovetail.backfill.checkpoints import CheckpointStore, PartMissingError
from dovetail.backfill.lance_table import LanceTable, NewDataFile
from dovetail.backfill.task import RangeTask
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def _slow_until_350(id: int) -> int:
    time.sleep(0.001)
    if id == 350:
        raise ValueError("350")
    return 2 * id


def test_checkpoints_that_are_no_longer_needed_are_deleted(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 4000, 2000)
    with driver(tmp_path, uri, f'backfill("n", fill_functions.held, cluster="{HALF}")', calls) as running:
        until(calls.is_held, "it is in the middle")
        running.kill()
        running.ended()
        running.all_gone()
    assert left_over(uri)
    dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    assert not left_over(uri)


def test_checkpoints_of_removed_fragments_are_deleted(tmp_path: Path, calls: Calls) -> None:
    uri = create_table(tmp_path, 4000, 1000)
    with driver(tmp_path, uri, f'backfill("n", fill_functions.held, cluster="{HALF}")', calls) as running:
        until(calls.is_held, "it is in the middle")
        running.kill()
        running.ended()
        running.all_gone()
    lance.dataset(uri).optimize.compact_files(target_rows_per_fragment=4000)
    calls.go()
    dt.table(uri).backfill("n", fns.held, cluster=HALF)
    assert by_id(uri, "n") == twice(range(4000))
    assert not left_over(uri)


def test_a_damaged_part_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = dt.table(create_table(tmp_path, 400, 400))
    monkeypatch.setattr("dovetail.backfill.task_queue.FIRST_TASK_BUDGET_S", 0.05)
    with pytest.raises(ValueError, match="350"):
        table.backfill("n", dt.udf(_slow_until_350, version="1"), cluster=HALF)
    parts = sorted((tmp_path / "t.lance/_dovetail/c-n/parts").rglob("p.*"))
    assert parts
    parts[0].write_bytes(b"")
    filled = table.backfill("n", dt.udf(fns.doubled.fn, version="1"), cluster=HALF)
    assert filled.status == "finished"
    assert by_id(table.uri, "n") == twice(range(400))


def test_a_file_that_is_not_a_part_is_deleted_when_it_is_read(tmp_path: Path) -> None:
    from dovetail.backfill.checkpoints import Part
    from dovetail.backfill.task import FillSpec
    from dovetail.pipeline.error_policy import parse_error_policy

    spec = FillSpec(str(tmp_path), {}, 1, "c-n", ("id",), (), "i", "i", "run", parse_error_policy("fail"))
    kept, task, part = CheckpointStore(spec), RangeTask(0, 10, "h", 0, 10), Part(0, 10, 3)
    path = tmp_path / "_dovetail/c-n/parts/i/0-h" / part.name
    path.parent.mkdir(parents=True)
    for damaged in (b"", b"abc"):
        path.write_bytes(damaged)
        with pytest.raises(PartMissingError):
            kept.load(task, part)
        assert not path.exists()


def test_finding_pending_work_is_linear_in_the_number_of_files(tmp_path: Path) -> None:
    hashed = 0

    class Counted(NewDataFile):
        def __hash__(self) -> int:
            nonlocal hashed
            hashed += 1
            return hash(self.name)

    many = 30
    found = LanceTable(create_table(tmp_path, many, 1)).add_columns([pa.field("n", pa.int64())])
    schema = pa.schema([found.schema.field("n")])
    files = []
    for number in range(many):
        found.write(f"dt-{number}.lance", schema, [pa.record_batch([pa.array([number])], schema=schema)], 1)
        files.append(Counted(number, f"dt-{number}.lance", (found.field_ids()["n"],), "same"))
    gone = Counted(many, "dt-gone.lance", files[0].fields, "same")
    committed = found.commit([*files, gone], lambda *_: "same")
    assert (committed.fragments, committed.changed_fragments) == (tuple(range(many)), (many,))
    assert hashed <= 2 * many
    assert by_id(found.uri, "n") == {number: number for number in range(many)}
