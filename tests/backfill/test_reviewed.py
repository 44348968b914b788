"""Does what a review of the backfill found stay mended: workers that meet, drivers that wait, words that mislead?"""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

import dovetail as dt  # noqa: E402
import fill_functions as fns  # noqa: E402
from backfill_aids import HALF, Calls, by_id, column, driver, made, twice  # noqa: E402
from dovetail.backfill.checkpoints import PartMissingError, merge_kept_values  # noqa: E402
from dovetail.backfill.commit_thread import Committer  # noqa: E402
from dovetail.backfill.driver import BackfillDriver  # noqa: E402
from dovetail.backfill.lance_table import LanceTable, NewDataFile  # noqa: E402
from dovetail.backfill.lease import Lease  # noqa: E402
from dovetail.backfill.range_worker import RangeWorker  # noqa: E402
from dovetail.backfill.result import BackfillResult  # noqa: E402
from dovetail.backfill.row_progress import RowProgress  # noqa: E402
from dovetail.backfill.store import Store  # noqa: E402
from dovetail.backfill.target import make_target  # noqa: E402
from dovetail.backfill.task import PhaseTimes, RangeResult, RangeTask  # noqa: E402
from dovetail.backfill.task_queue import FragmentTracker, TaskQueue  # noqa: E402
from dovetail.engines.worker_context import Worker  # noqa: E402
from dovetail.errors import ConfigError, RunError  # noqa: E402
from waiting import until  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.backfill.pending_work import PendingWork
    from dovetail.backfill.udf import Udf

PATIENCE_S = 30.0
NEVER_S = 1e6


WORKERS: list[RangeWorker] = []


class Staged:
    """A backfill of column `n` whose driver and workers do only what a test has them do."""

    def __init__(self, uri: str, udf: Udf, **how: Any) -> None:
        self.table = dt.table(uri)
        found, _, names, before, asked = self.table._check_call("n", udf, {"cluster": HALF, **how})
        ready, record = self.table._ensure_columns(found, udf, names, before)
        aim = make_target(ready, udf, record, asked)
        self.udf, self.found = udf, ready
        self.filling = BackfillDriver(ready, Store(uri), udf, aim, asked, "run")
        self.inputs = aim.input_hash(ready, ready.fragments()[0])
        self.before = aim.kept_values_hash(ready, ready.fragments()[0])
        self.rows = ready.fragments()[0].rows

    def task(self, start: int, stop: int) -> RangeTask:
        """Of the first fragment."""
        return RangeTask(0, self.rows, self.inputs, start, stop, before=self.before, budget_s=PATIENCE_S)

    def worker(self) -> RangeWorker:
        made = RangeWorker(self.filling._make_job(), self.udf)
        made.setup(Worker(0, "fill"))
        WORKERS.append(made)
        return made

    def leave(self, worker: RangeWorker, start: int, stop: int) -> None:
        """A part, by a worker that was not asked to tidy up."""
        batch = pa.record_batch([pa.array([2 * row for row in range(start, stop)], pa.int64())], ["n"])
        worker.checkpoints.save(self.task(start, stop), start, stop, [batch], [])

    def committer(self) -> Committer:
        return Committer(self.found, NEVER_S, self.filling.target.input_hash, self.filling._on_commit)

    def dealer(self, *tasks: RangeTask) -> TaskQueue:
        """As `_round` begins with these."""
        self.filling._tracker = FragmentTracker(tasks)
        dealer = TaskQueue((), 2)
        dealer._outstanding = len(tasks)
        return dealer


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    return Staged(made(tmp_path, 200, 200), fns.doubled)


@pytest.fixture(autouse=True)
def _workers_end() -> Iterator[None]:
    """Their watchdogs are threads of this process, which other tests would find."""
    yield
    while WORKERS:
        WORKERS.pop().teardown()


def taken(uri: str) -> Lease:
    """By somebody else."""
    return Lease.acquire(Store(uri), "n", "other", wait=False, say=lambda _: None)


def not_null(uri: str, rows: int) -> str:
    """A table whose column `n` is there, and must have a value in every row."""
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("n", pa.int64(), nullable=False)])
    lance.write_dataset(pa.table([list(range(rows)), [7] * rows], schema=schema), uri)
    return uri


# --- two workers at one fragment


def test_who_finds_the_parts_gone_that_it_saw_writes_no_file_without_rows(staged: Staged) -> None:
    """Another worker has written the file meanwhile, and the driver has committed it."""
    first, second, committer = staged.worker(), staged.worker(), staged.committer()
    dealer = staged.dealer(staged.task(100, 200), staged.task(100, 200))
    assert not first([staged.task(0, 100)])[0].file
    look, looked = second.checkpoints.scan, 0

    def looks(task: RangeTask) -> Any:
        nonlocal looked
        found, looked = look(task), looked + 1
        if looked == 1:
            found.parts.clear()  # the other one's was saved just now
        if looked == 2:
            staged.filling._on_rows(first([staged.task(100, 200)])[0], dealer, committer)
            committer.finish()
        return found

    second.checkpoints.scan = looks  # type: ignore[method-assign]
    late = second([staged.task(100, 200)])[0]
    assert looked == 3
    assert (late.file, late.reached, late.worker_error) == ("", 200, "")
    staged.filling._on_rows(late, dealer, committer)
    committer.finish()
    assert by_id(staged.found.uri, "n") == twice(range(200))


def test_a_data_file_of_too_few_rows_is_not_made(staged: Staged) -> None:
    schema = pa.schema([staged.found.schema.field("n")])
    batch = pa.record_batch([pa.array([1], pa.int64())], schema=schema)
    for batches in ([], [batch]):
        with pytest.raises(RuntimeError, match="instead of 200"):
            staged.found.write("dt-short.lance", schema, batches, 200)
    assert not Path(staged.found.uri, "data", "dt-short.lance").exists()


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
        Store(staged.found.uri).delete_folder(f"{filling.target.folder}/parts")
    assert [one.fragments for one in committer.finish()] == [(0,)]
    assert filling.result.fragments == 1
    assert by_id(staged.found.uri, "n") == twice(range(200))


def test_a_fragment_whose_parts_were_merged_under_who_read_them_gets_its_file(staged: Staged) -> None:
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

    def looks(task: RangeTask) -> Any:
        nonlocal looked
        found, looked = look(task), looked + 1
        if looked == 2:  # it is about to read them
            seen.set()
            assert merged.wait(PATIENCE_S)
        return found

    merging.checkpoints.clean_up, reading.checkpoints.scan = tidies, looks  # type: ignore[method-assign]
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


def test_a_file_that_is_asked_for_and_cannot_be_made_is_asked_for_again(staged: Staged) -> None:
    worker, asked = staged.worker(), staged.task(200, 200)
    staged.leave(worker, 0, 100)
    staged.leave(worker, 100, 200)
    load, loaded = worker.checkpoints.load, 0

    def loads(task: RangeTask, part: Any) -> Any:
        nonlocal loaded
        loaded += 1
        if loaded == 1:
            raise PartMissingError("merged by somebody else")
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


def test_a_fragment_of_which_no_file_came_is_done_in_another_round(tmp_path: Path) -> None:
    uri = made(tmp_path, 200, 100)
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


# --- errors


@pytest.mark.processes
def test_rows_of_fragments_that_are_not_finished_are_not_retried(tmp_path: Path) -> None:
    uri = made(tmp_path, 200, 200)
    staged = Staged(uri, fns.every_tenth_fails, on_error="skip")
    assert staged.worker()([staged.task(0, 100)])[0].errors == 10  # and then it was killed
    table = staged.table
    assert len(table.errors("n")) == 10
    told = table.retry_errors("n", fns.doubled, cluster=HALF)
    assert told.rows == 0
    assert '10 rows of unfinished fragments, or of fragments whose input changed: table.backfill("n") first' in str(
        told
    )
    assert table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip").kept == 100
    assert table.retry_errors("n", fns.doubled, cluster=HALF).rows == 20
    assert by_id(uri, "n") == twice(range(200))


def test_rows_are_retried_with_the_columns_that_the_function_names_now(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"a": list(range(20)), "b": [1000] * 20}), uri)

    @dt.udf(version="1")
    def before(a: int, b: int) -> int:
        if a == 5:
            raise ValueError("five")
        return a - b

    @dt.udf(version="2")
    def after(b: int, a: int) -> int:
        return a - b

    table = dt.table(uri)
    table.backfill("n", before, cluster=HALF, on_error="skip")
    assert table.retry_errors("n", after, cluster=HALF).rows == 1
    assert column(uri, "n") == [a - 1000 for a in range(20)]


def test_after_a_compaction_a_retry_says_what_to_do(tmp_path: Path) -> None:
    uri = made(tmp_path, 40, 20)
    table = dt.table(uri)
    table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip")
    lance.dataset(uri).optimize.compact_files()
    told = table.retry_errors("n", fns.doubled, cluster=HALF)
    assert told.rows == 0
    assert 'after a compaction table.backfill("n") computes what is NULL' in str(told)
    table.backfill("n", fns.doubled, cluster=HALF)
    assert by_id(uri, "n") == twice(range(40))


def test_what_to_paste_names_a_function_that_no_module_has(tmp_path: Path) -> None:
    def of_a_script(id: int) -> int:  # noqa: A002
        return 1 // (id - 3)

    table = dt.table(made(tmp_path, 20, 20))
    with pytest.raises(ZeroDivisionError) as caught:
        table.backfill("n", of_a_script, cluster=HALF)
    assert 'table.backfill("n", of_a_script, on_error="skip")' in str(caught.value)
    with pytest.raises(ValueError, match="multiple of ten") as known:
        table.backfill("m", fns.every_tenth_fails, cluster=HALF)
    assert 'table.backfill("m", on_error="skip")' in str(known.value)


# --- conditions


def test_a_file_that_a_killed_call_with_a_condition_left_is_not_put_over_newer_values(tmp_path: Path) -> None:
    uri = made(tmp_path, 100, 100)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    killed = Staged(uri, fns.first_version, where="id < 10")
    assert killed.worker()([killed.task(0, 100)])[0].file
    table.backfill("n", fns.second_version, cluster=HALF, where="id >= 10")
    table.backfill("n", fns.first_version, cluster=HALF, where="id < 10")
    assert by_id(uri, "n") == {row: row + (1 if row < 10 else 2) for row in range(100)}


def test_so_many_fragments_are_so_many_that_the_condition_names(tmp_path: Path) -> None:
    uri = made(tmp_path, 80, 20)
    table = dt.table(uri)
    for expected in (20, 20, 0):
        assert table.backfill("n", fns.doubled, cluster=HALF, where="id >= 40", fragments=1).rows == expected
    assert by_id(uri, "n") == twice(range(80), range(40))


def test_a_condition_keeps_the_rest_of_a_column_of_uuids(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    old, new = b"0" * 16, b"1" * 16
    lance.write_dataset(pa.table({"id": list(range(10)), "n": pa.array([old] * 10, pa.uuid())}), uri)

    @dt.udf(data_type=pa.uuid())
    def made_anew(id: int) -> Any:  # noqa: A002
        return new

    assert dt.table(uri).backfill("n", made_anew, cluster=HALF, where="id < 3").rows == 3
    assert [value.bytes for value in column(uri, "n")] == [new] * 3 + [old] * 7


@pytest.mark.parametrize(("kind", "values"), [("uuid", [b"a" * 16, b"b" * 16]), ("json_", ['"a"', '"b"'])])
def test_values_of_types_that_arrow_cannot_choose_between_are_chosen(kind: str, values: list[Any]) -> None:
    of = getattr(pa, kind)()
    given, before = pa.array([values[0], None], of), pa.array([None, values[1]], of)
    schema = pa.schema([pa.field("n", of)])
    batches = [pa.record_batch([it], schema=schema) for it in (given, before)]
    found = merge_kept_values(batches[0], pa.array([True, False]), batches[1], schema).column(0)
    assert found.type == of
    assert found.to_pylist() == pa.array(values, of).to_pylist()


def test_a_condition_does_not_say_that_all_is_computed_again_and_the_call_after_it_says_why(tmp_path: Path) -> None:
    uri = made(tmp_path, 40, 20)
    table = dt.table(uri)
    table.backfill("n", fns.doubled, cluster=HALF)
    filled = table.backfill("n", fns.tripled, cluster=HALF, where="id < 5")
    assert (filled.rows, filled.notes) == (5, [])
    plain = table.backfill("n", fns.doubled, cluster=HALF)
    assert plain.rows == 20
    assert [note for note in plain.notes if "1 fragment filled by" in note and "or with another condition" in note]


# --- columns that may not be NULL


def test_a_column_that_may_not_be_null_is_filled_where_rows_are_deleted(tmp_path: Path) -> None:
    uri = not_null(str(tmp_path / "t.lance"), 3000)
    lance.dataset(uri).delete("id < 2000 OR id % 10 = 3")  # with the first rows that are read there is none
    left = [row for row in range(2000, 3000) if row % 10 != 3]
    assert dt.table(uri).backfill("n", fns.doubled, cluster=HALF).rows == len(left)
    assert by_id(uri, "n") == twice(left)


def test_to_leave_rows_null_in_a_column_that_may_not_be_is_refused_at_once(tmp_path: Path) -> None:
    table = dt.table(not_null(str(tmp_path / "t.lance"), 30))
    with pytest.raises(ConfigError, match="is not nullable") as caught:
        table.backfill("n", fns.every_tenth_fails, cluster=HALF, on_error="skip")
    assert 'on_error="fail"' in str(caught.value)
    assert table.history() == []


# --- others at the same column


def test_a_script_without_a_terminal_says_whom_it_waits_for(tmp_path: Path, calls: Calls) -> None:
    uri = made(tmp_path, 20, 20)
    with (
        taken(uri) as lease,
        driver(tmp_path, uri, f'backfill("n", fill_functions.doubled, cluster="{HALF}")', calls) as running,
    ):
        running.says("is being filled by other on ")
        lease.release()
        running.finish()
    assert by_id(uri, "n") == twice(range(20))


def test_notes_are_printed_unless_progress_is_false() -> None:
    for show, heard in ((None, "n: waiting\n"), (True, "n: waiting\n"), (False, "")):
        stream = io.StringIO()
        RowProgress(BackfillResult("n"), show, stream).print_note("waiting")
        assert stream.getvalue() == heard


def test_the_progress_counts_all_rows_that_are_done_and_rows_in_checkpoints() -> None:
    progress = RowProgress(BackfillResult("n", rows=5, errors=2), None)  # 5 of 500 rows match a condition
    progress.start_round(rows=1000, left=900, fragments=4)
    assert (progress.counts().finished, progress.counts().total, progress.counts().failed) == (100, 1000, 2)
    progress.count_rows_left = lambda: 400
    progress.committed = 2
    assert progress.counts().finished == 600
    assert progress.counts().detail.startswith("2 of 4 fragments committed, slowest: ")


def test_a_column_that_somebody_else_adds_at_the_same_moment_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = made(tmp_path, 20, 20)
    add, others = LanceTable.add_columns, [fns.doubled]

    def adds(self: LanceTable, fields: Sequence[Any]) -> LanceTable:
        if others:
            dt.table(uri).add_column("n", others.pop())
        return add(self, fields)

    monkeypatch.setattr(LanceTable, "add_columns", adds)
    dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    assert by_id(uri, "n") == twice(range(20))
    dt.table(uri).drop("n")
    others.append(fns.upper)
    with pytest.raises(ConfigError, match="cannot add 'n'"):
        dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    assert dt.table(uri).schema.field("n").type == pa.string()


def test_a_column_that_is_dropped_while_it_is_waited_for_is_told(tmp_path: Path) -> None:
    uri = made(tmp_path, 20, 20)
    dt.table(uri).add_column("n", fns.doubled)
    lease = taken(uri)

    def drops() -> None:
        until(lambda: len(list(Path(uri).glob("_dovetail/*/lease/*.asks"))) == 2, "it waits")
        lance.dataset(uri).drop_columns(["n"])
        lease.release()

    other = threading.Thread(target=drops)
    other.start()
    with pytest.raises(ConfigError, match="no column 'n'"):
        dt.table(uri).backfill("n", fns.doubled, cluster=HALF)
    other.join()


def test_a_column_that_is_being_filled_is_not_dropped_and_the_fix_is_one(tmp_path: Path) -> None:
    uri = made(tmp_path, 20, 20)
    table = dt.table(uri)
    table.add_column("n", fns.doubled)
    with taken(uri):
        with pytest.raises(RunError, match="is being filled by other on ") as caught:
            table.drop("n")
        assert [problem.fix_texts for problem in caught.value.problems] == [("wait until it has finished, or stop it",)]
        assert "n" in table.schema.names
    table.drop("n")
    assert "n" not in table.schema.names


def test_a_call_whose_commits_cannot_work_ends_soon(tmp_path: Path, calls: Calls) -> None:
    uri = made(tmp_path, 6000, 100)

    def drops() -> None:
        until(lambda: any(len(one.data_files()) > 1 for one in lance.dataset(uri).get_fragments()), "it commits")
        lance.dataset(uri).drop_columns(["n"])

    other = threading.Thread(target=drops)
    other.start()
    with pytest.raises(RunError, match="'n' was dropped"):
        dt.table(uri).backfill("n", fns.slow, cluster=HALF, commit_every=0)
    other.join()
    assert len(calls.all()) < 4000


# --- arguments


def test_a_typing_error_beside_recompute_computes_nothing_again(tmp_path: Path) -> None:
    table = dt.table(made(tmp_path, 20, 20))
    table.backfill("n", fns.doubled, cluster=HALF)
    with pytest.raises(ConfigError, match="spark"):
        table.backfill("n", fns.doubled, cluster=HALF, engine="spark", recompute=True)
    assert table.backfill("n", fns.doubled, cluster=HALF).rows == 0


@pytest.mark.parametrize("env_from", ["HOME", 3, ["not a name"]])
def test_arguments_that_mean_nothing_are_told_together(tmp_path: Path, env_from: Any) -> None:
    table: Any = dt.table(made(tmp_path, 20, 20))
    with pytest.raises(ConfigError) as caught:
        table.backfill("n", fns.doubled, env_from=env_from, progress="yes", engine="spark")
    told = " ".join(problem.message for problem in caught.value.problems)
    assert all(name in told for name in ("env_from=", "progress=", "unknown engine 'spark'")), told
    assert "n" not in table.schema.names


# --- how much at once, how long


def test_no_file_is_compared_with_all_others(tmp_path: Path) -> None:
    hashed = 0

    class Counted(NewDataFile):
        def __hash__(self) -> int:
            nonlocal hashed
            hashed += 1
            return hash(self.name)

    many = 30
    found = LanceTable(made(tmp_path, many, 1)).add_columns([pa.field("n", pa.int64())])
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


def test_of_tasks_that_take_long_one_for_each_slot_is_out_and_one_more() -> None:
    workers = 2
    dealer = TaskQueue([RangeTask(number, 1000, "inputs", 0, 1000) for number in range(50)], workers)
    handing = iter(dealer)
    out = [next(handing)]
    dealer.task_done(_long(out.pop()))
    out += [next(handing) for _ in range(workers + 1)]
    assert not _comes(handing, 0.1)
    dealer.task_done(_long(out.pop(0)))
    until(lambda: dealer._outstanding == workers + 1, "the one that was waited for is out")
    dealer.abandon()


def _long(task: RangeTask) -> RangeResult:
    reached = min(task.stop, task.start + 100)
    return RangeResult(task, reached, computed=reached - task.start, times=PhaseTimes(compute=1.0), worker=("here", 0))


def _comes(handing: Iterator[RangeTask], within_s: float) -> bool:
    came = threading.Event()

    def ask() -> None:
        next(handing, None)
        came.set()

    threading.Thread(target=ask, daemon=True).start()
    return came.wait(within_s)


@pytest.mark.processes
def test_a_file_that_a_killed_call_with_a_condition_left_is_used_where_nothing_changed(tmp_path: Path) -> None:
    uri = made(tmp_path, 200, 200)
    staged = Staged(uri, fns.doubled, where="id >= 100")
    assert staged.worker()([staged.task(0, 200)])[0].file  # and then it was killed
    filled = staged.table.backfill("n", fns.doubled, where="id >= 100", cluster=HALF)
    assert (filled.rows, filled.kept, filled.fragments) == (0, 200, 1)
    assert by_id(uri, "n") == twice(range(200), range(100))
