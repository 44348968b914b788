"""Workers that process the same fragment: parts, data files and rounds."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import fill_functions as fns
from backfill_aids import by_id, create_table, twice
from dovetail.backfill.checkpoints import BrokenMark, PartMissingError
from dovetail.backfill.range_worker import WorkerAlreadyBrokenError, WorkerBrokenError
from dovetail.backfill.store import TableStore
from staged_backfill import NEVER_S, PATIENCE_S, Staged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.backfill.commit_thread import Committer
    from dovetail.backfill.pending_work import PendingWork
    from dovetail.backfill.task import RangeResult, RangeTask


pa = pytest.importorskip("pyarrow")


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    return Staged(create_table(tmp_path, 200, 200), fns.doubled)


lance = pytest.importorskip("lance")


def test_a_worker_whose_parts_were_merged_writes_no_empty_file(staged: Staged) -> None:
    """Another worker has written the file meanwhile, and the driver has committed it."""
    first, second, committer = staged.worker(), staged.worker(), staged.committer()
    dealer = staged.dealer(staged.task(100, 200), staged.task(100, 200))
    assert not first([staged.task(0, 100)])[0].file
    look, looked = second.checkpoints.scan, 0

    def scan_once_cleared(task: RangeTask) -> Any:
        nonlocal looked
        found, looked = look(task), looked + 1
        if looked == 1:
            found.parts.clear()  # the other one's was saved just now
        if looked == 2:
            staged.filling._on_rows(first([staged.task(100, 200)])[0], dealer, committer)
            committer.finish()
        return found

    second.checkpoints.scan = scan_once_cleared  # type: ignore[method-assign]
    late = second([staged.task(100, 200)])[0]
    assert looked == 3
    assert (late.file, late.reached, late.worker_error) == ("", 200, "")
    staged.filling._on_rows(late, dealer, committer)
    committer.finish()
    assert by_id(staged.found.uri, "n") == twice(range(200))


def test_a_data_file_with_too_few_rows_is_not_written(staged: Staged) -> None:
    schema = pa.schema([staged.found.schema.field("n")])
    batch = pa.record_batch([pa.array([1], pa.int64())], schema=schema)
    for batches in ([], [batch]):
        with pytest.raises(RuntimeError, match="instead of 200"):
            staged.found.write("dt-short.lance", schema, batches, 200)
    assert not Path(staged.found.uri, "data", "dt-short.lance").exists()


def test_a_worker_that_is_killed_while_it_writes_leaves_nothing_in_the_folder_of_data(staged: Staged) -> None:
    """Lance writes under a temporary name, which a killed process leaves."""
    worker = staged.worker()
    staged.leave(worker, 0, 200)
    data, seen = Path(staged.found.uri, "data"), []
    before = set(data.iterdir())
    batches = worker._batches

    def watched_batches(*given: Any) -> Iterator[Any]:
        seen.append(set(data.iterdir()))  # the file is open
        yield from batches(*given)
        seen.append(set(data.iterdir()))

    worker._batches = watched_batches  # type: ignore[method-assign, assignment]
    done = worker([staged.task(200, 200)])[0]
    assert seen == [before] * 2
    assert set(data.iterdir()) - before == {data / done.file}


def test_of_two_files_of_one_fragment_one_is_committed(staged: Staged) -> None:
    """Lance refuses both in one commit, and every time again."""
    worker, filling = staged.worker(), staged.filling
    task = staged.task(0, 200)
    dealer, committer = staged.dealer(task), staged.committer()
    committer._due += NEVER_S  # so that both are there when it commits
    for _ in range(2):
        done = worker([task])[0]
        assert done.file
        filling._on_rows(done, dealer, committer)
        TableStore(staged.found.uri).delete_folder(f"{filling.target.folder}/parts")
    assert [one.fragments for one in committer.finish()] == [(0,)]
    assert filling.result.fragments == 1
    assert by_id(staged.found.uri, "n") == twice(range(200))


def test_a_fragment_whose_parts_were_merged_while_they_were_read_gets_its_file(staged: Staged) -> None:
    merging, reading = staged.worker(), staged.worker()
    for start in range(0, 90, 10):
        staged.leave(merging, start, start + 10)
    tidy, look, looked = merging.checkpoints.clean_up, reading.checkpoints.scan, 0
    at_its_end, seen, merged = threading.Event(), threading.Event(), threading.Event()

    def tidies(*given: Any, **more: Any) -> None:
        at_its_end.set()
        assert seen.wait(PATIENCE_S)
        tidy(*given, **more)
        merged.set()

    def scan_and_count(task: RangeTask) -> Any:
        nonlocal looked
        found, looked = look(task), looked + 1
        if looked == 2:  # it is about to read them
            seen.set()
            assert merged.wait(PATIENCE_S)
        return found

    merging.checkpoints.clean_up, reading.checkpoints.scan = tidies, scan_and_count  # type: ignore[method-assign]
    tasks = staged.task(90, 100), staged.task(100, 200)
    dealer, committer = staged.dealer(*tasks), staged.committer()
    came: list[RangeResult] = []
    other = threading.Thread(target=lambda: came.extend(merging([tasks[0]])))
    other.start()
    assert at_its_end.wait(PATIENCE_S)
    came += reading([tasks[1]])
    other.join()
    assert [(done.file, done.worker_error) for done in came] == [("", "")] * 2
    for done in came:
        staged.filling._on_rows(done, dealer, committer)
        dealer.task_done(done)
    asked = next(iter(dealer))
    assert (asked.start, asked.stop) == (200, 200)
    staged.filling._on_rows(staged.worker()([asked])[0], dealer, committer)
    committer.finish()
    assert by_id(staged.found.uri, "n") == twice(range(200))


def test_a_data_file_that_could_not_be_written_is_requested_again(staged: Staged) -> None:
    worker, asked = staged.worker(), staged.task(200, 200)
    staged.leave(worker, 0, 100)
    staged.leave(worker, 100, 200)
    load, loaded = worker.checkpoints.load, 0

    def loads(task: RangeTask, part: Any) -> Any:
        nonlocal loaded
        loaded += 1
        if loaded == 1:
            raise PartMissingError("merged by another worker")
        return load(task, part)

    worker.checkpoints.load = loads  # type: ignore[method-assign]
    dealer, committer = staged.dealer(asked), staged.committer()
    done = worker([asked])[0]
    assert done.worker_error.startswith("PartMissingError")
    staged.filling._on_rows(done, dealer, committer)
    dealer.task_done(done)
    again = next(iter(dealer))
    assert (again.fragment, again.start, again.stop) == (0, 200, 200)
    staged.filling._on_rows(worker([again])[0], dealer, committer)
    committer.finish()
    assert by_id(staged.found.uri, "n") == twice(range(200))


def test_a_fragment_without_a_data_file_is_computed_in_another_round(tmp_path: Path) -> None:
    uri = create_table(tmp_path, 200, 100)
    filling = Staged(uri, fns.doubled).filling
    run, rounds = filling._run_workers, 0

    def runs(work: PendingWork, committer: Committer) -> None:
        nonlocal rounds
        rounds += 1
        if rounds > 1:
            run(work, committer)

    filling._run_workers = runs  # type: ignore[method-assign]
    assert filling.fill().status == "finished"
    assert rounds == 2
    assert by_id(uri, "n") == twice(range(200))


# --- rows that leave their worker broken


@pytest.fixture
def breaking(tmp_path: Path) -> Staged:
    """In a worker that has called row 777, every row fails."""
    function: Any = fns.FailsFrom
    return Staged(create_table(tmp_path, 1000, 1000), function, on_error="skip")


def test_a_worker_that_a_row_has_broken_calls_no_row_of_the_tasks_that_it_still_has(breaking: Staged) -> None:
    worker = breaking.worker()
    assert not worker([breaking.task(0, 700)])[0].errors
    with pytest.raises(WorkerBrokenError, match=f"row {fns.BAD} of fragment 0 left its worker broken: ValueError"):
        worker([breaking.task(700, 800)])
    with pytest.raises(WorkerAlreadyBrokenError, match=f"row {fns.BAD} of fragment 0"):
        worker([breaking.task(900, 950)])
    assert worker.checkpoints.scan(breaking.task(0, 1000)).broken == [BrokenMark(fns.BAD, fns.BAD + 1, "run")]


@pytest.mark.parametrize("function", [fns.FailsFrom, fns.BreaksAt, fns.AsyncBreaksAt])
def test_a_suspect_row_that_fails_behind_the_row_that_broke_its_worker_is_tried_again(
    tmp_path: Path, function: Any
) -> None:
    """The worker computes both rows alone, and no other: nothing shows that it is broken when the second one fails."""
    breaking = Staged(create_table(tmp_path, 1000, 1000), function, on_error="skip")
    broken, bad, good = breaking.worker(), breaking.task(fns.BAD, fns.BAD + 1), breaking.task(901, 902)
    for suspect in (bad, good):
        broken.checkpoints.mark(suspect, BrokenMark(suspect.start, suspect.stop, broken.spec.run))
    (found,) = broken([bad])
    assert (found.reached, found.errors) == (fns.BAD + 1, 1)
    with pytest.raises(WorkerAlreadyBrokenError):
        broken([good])
    found_files = broken.checkpoints.scan(good)
    assert not found_files.tried, "the row failed again, but in a worker that was already broken"
    assert BrokenMark(901, 902, broken.spec.run, 2) in found_files.broken
    (found,) = breaking.worker()([good])
    assert (found.reached, found.errors) == (902, 0)


def test_a_row_that_breaks_a_second_worker_fails_and_that_worker_calls_no_further_row(breaking: Staged) -> None:
    first, second = breaking.worker(), breaking.worker()
    for worker in (first, second):
        assert not worker([breaking.task(0, 700)])[0].errors
    with pytest.raises(WorkerBrokenError):
        first([breaking.task(700, 800)])
    assert second([breaking.task(700, 800)])[0].reached == fns.BAD  # the rows before it
    (found,) = second([breaking.task(fns.BAD, 800)])
    assert (found.reached, found.errors) == (fns.BAD + 1, 1)
    with pytest.raises(WorkerAlreadyBrokenError):
        second([breaking.task(fns.BAD + 1, 800)])
    (found,) = breaking.worker()([breaking.task(fns.BAD + 1, 800)])
    assert (found.reached, found.errors) == (800, 0)
