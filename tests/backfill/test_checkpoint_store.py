"""Parts: written, read, merged, and the marks beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("lance")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dovetail.backfill.checkpoints import (  # noqa: E402
    MIN_PARTS_TO_MERGE,
    AttemptMark,
    BrokenMark,
    CheckpointStore,
    HangMark,
    Part,
    PartMissingError,
    deserialize_batches,
    merge_kept_values,
    serialize_batches,
    slice_batches,
)
from dovetail.backfill.task import FailedRow, FillSpec, OutputColumn, RangeTask  # noqa: E402
from dovetail.pipeline.error_policy import ErrorPolicy  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

TASK = RangeTask(3, 1000, "inputs", 0, 1000)
SCHEMA = pa.schema([("n", pa.int64())])


def batch(values: list[int | None]) -> Any:
    return pa.record_batch([pa.array(values, pa.int64())], schema=SCHEMA)


@pytest.fixture
def kept(tmp_path: Path) -> CheckpointStore:
    outputs = (OutputColumn("n", 1, pa.int64()),)
    spec = FillSpec(str(tmp_path), {}, 1, "c-n", ("id",), outputs, "identity", "identity", "run", ErrorPolicy())
    return CheckpointStore(spec)


@given(st.lists(st.lists(st.one_of(st.none(), st.integers(-9, 9)), min_size=1, max_size=5), min_size=1, max_size=5))
def test_batches_are_read_as_they_were_written(values: list[list[int | None]]) -> None:
    batches = [batch(some) for some in values]
    assert [it.to_pydict() for it in deserialize_batches(serialize_batches(batches))] == [
        it.to_pydict() for it in batches
    ]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 50), st.data())
def test_slices_of_joined_batches_have_the_requested_rows(sizes: list[int], begin: int, data: st.DataObject) -> None:
    at, batches = begin, []
    for size in sizes:
        batches.append(batch(list(range(at, at + size))))
        at += size
    start = data.draw(st.integers(begin, at))
    stop = data.draw(st.integers(start, at))
    found = list(slice_batches(batches, begin, start, stop))
    assert [row for piece, _ in found for row in piece.column(0).to_pylist()] == list(range(start, stop))
    assert all(piece.column(0)[0].as_py() == first for piece, first in found)


@given(st.lists(st.tuples(st.booleans(), st.one_of(st.none(), st.integers(0, 9)), st.integers(10, 19)), min_size=1))
def test_new_values_replace_old_ones_also_if_they_are_null(rows: list[tuple[bool, int | None, int]]) -> None:
    new = pa.array([is_new for is_new, _, _ in rows])
    found = merge_kept_values(batch([value for _, value, _ in rows]), new, batch([old for _, _, old in rows]), SCHEMA)
    assert found.column(0).to_pylist() == [value if is_new else old for is_new, value, old in rows]


def test_a_missing_part_is_reported(kept: CheckpointStore) -> None:
    with pytest.raises(PartMissingError):
        kept.load(TASK, Part(0, 1, 5))


def test_a_saved_part_is_found_and_loaded(kept: CheckpointStore) -> None:
    kept.save(TASK, 10, 13, [batch([1, None]), batch([3])], [FailedRow(3, 11, "ValueError", "no")])
    (part,) = kept.scan(TASK).parts
    assert (part.start, part.stop) == (10, 13)
    assert [value for it in kept.load(TASK, part) for value in it.column(0).to_pylist()] == [1, None, 3]


def test_an_empty_range_is_not_saved(kept: CheckpointStore) -> None:
    kept.save(TASK, 10, 10, [], [])
    assert kept.scan(TASK).parts == []


def test_many_small_parts_are_merged(kept: CheckpointStore) -> None:
    for at in range(MIN_PARTS_TO_MERGE):
        kept.save(TASK, 10 * at, 10 * at + 10, [batch(list(range(10 * at, 10 * at + 10)))], [])
    kept.clean_up(TASK, "run", TASK.stop, merge=True)
    (part,) = kept.scan(TASK).parts
    assert (part.start, part.stop) == (0, 10 * MIN_PARTS_TO_MERGE)
    assert [value for it in kept.load(TASK, part) for value in it.column(0).to_pylist()] == list(
        range(10 * MIN_PARTS_TO_MERGE)
    )


def test_a_finished_task_deletes_its_marks_and_those_of_dead_workers(kept: CheckpointStore) -> None:
    mine = RangeTask(3, 1000, "inputs", 100, 200)
    for mark in (
        AttemptMark(100, 200, "run"),
        AttemptMark(300, 400, "run"),
        AttemptMark(500, 600, "earlier"),
        HangMark(700, "earlier"),
    ):
        kept.mark(mine, mark)
    kept.clean_up(mine, "run", mine.stop, merge=False)
    found = kept.scan(mine)
    assert found.tried == [AttemptMark(300, 400, "run")]
    assert found.hung == []


def test_a_task_that_ends_before_a_row_keeps_its_mark(kept: CheckpointStore) -> None:
    marks = [AttemptMark(0, 1000, "run"), AttemptMark(40, 50, "run"), AttemptMark(77, 78, "run")]
    for mark in marks:
        kept.mark(TASK, mark)
    kept.clean_up(TASK, "run", 77, merge=False)
    assert kept.scan(TASK).tried == [AttemptMark(77, 78, "run")]


def test_the_mark_of_rows_that_broke_a_worker_is_kept_until_parts_have_them(kept: CheckpointStore) -> None:
    kept.mark(TASK, BrokenMark(5, 6, "run"))
    kept.mark(TASK, BrokenMark(7, 8, "earlier"))
    kept.clean_up(TASK, "run", TASK.stop, merge=False)
    assert kept.scan(TASK).broken == [BrokenMark(5, 6, "run")]
    kept.save(TASK, 0, 10, [batch(list(range(10)))], [])
    kept.clean_up(TASK, "run", TASK.stop, merge=False)
    assert kept.scan(TASK).broken == []


def test_the_mark_of_a_row_that_hung_is_kept_until_a_part_has_the_row(kept: CheckpointStore) -> None:
    kept.mark(TASK, HangMark(5, "run"))
    kept.clean_up(TASK, "run", TASK.stop, merge=False)
    assert kept.scan(TASK).hung == [HangMark(5, "run")]
    kept.save(TASK, 5, 6, [batch([None])], [])
    kept.clean_up(TASK, "run", TASK.stop, merge=False)
    assert kept.scan(TASK).hung == []
