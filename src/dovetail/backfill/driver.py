"""BackfillDriver: one call of Table.backfill, from the lease to the last commit.

It runs in rounds: fragments that other processes change during a round are computed again in the next one."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dovetail.backfill.change_notes import (
    change_note,
    column_dropped_error,
    lease_lost_error,
    recompute_notes,
    rows_not_retried_error,
    task_failed_error,
)
from dovetail.backfill.checkpoints import parts_folder
from dovetail.backfill.commit_thread import Committer
from dovetail.backfill.compaction_history import write_carried_fragments
from dovetail.backfill.error_cleanup import (
    RETRY_INFIX,
    delete_orphaned_errors,
    delete_pending_errors,
    delete_superseded_errors,
    replace_retried_errors,
)
from dovetail.backfill.failed_rows import TOO_MANY_FAILED_ROWS, make_row_failed
from dovetail.backfill.lance_table import NewDataFile
from dovetail.backfill.lease import hold_leases
from dovetail.backfill.pending_work import add_missing_column_files, find_pending_work
from dovetail.backfill.records import CANCELLED, DRAINED, FAILED, FINISHED, RUNNING, BackfillRecord, write_backfill
from dovetail.backfill.result import BackfillResult, format_rows
from dovetail.backfill.row_progress import RowProgress
from dovetail.backfill.task_queue import FragmentTracker, TaskQueue
from dovetail.backfill.worker_stage import (
    clamp_note,
    explain_infeasible,
    known_rate,
    make_fill_spec,
    make_stage,
    plan_workers,
    run_arguments,
    run_name,
    save_rate,
)
from dovetail.engines.ray.address import is_ray_engine
from dovetail.errors import PYTHON, Call, DovetailError, Expression, InfeasibleError, Problem, RunError, Setting, Text
from dovetail.observe.failed_items import RecordedFailure, append_failure
from dovetail.observe.run_folder import RunFolder
from dovetail.pipeline.error_policy import ErrorBudget
from dovetail.pipeline.pipeline import Pipeline
from dovetail.runtime.run import run as start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.backfill.arguments import BackfillArguments
    from dovetail.backfill.lance_table import CommitResult, LanceTable
    from dovetail.backfill.lease import Lease
    from dovetail.backfill.pending_work import PendingWork
    from dovetail.backfill.store import TableStore
    from dovetail.backfill.target import FillTarget
    from dovetail.backfill.task import FailedRow, FillSpec, RangeResult
    from dovetail.backfill.udf import Udf
    from dovetail.errors import Renderer
    from dovetail.runtime.run_handle import Run

MAX_ROUNDS = 20
"""Rounds before giving up, if other processes keep changing the table."""


@dataclass
class BackfillDriver:
    """One call of `backfill`."""

    table: LanceTable
    store: TableStore
    udf: Udf
    target: FillTarget
    arguments: BackfillArguments
    run_id: str
    reads: tuple[str, ...] = ()
    """Columns to read, if they differ from those in the identity."""
    renderer: Renderer = PYTHON
    """Spelling of calls in the notes that are printed."""
    refresh_target: Callable[[], FillTarget] | None = None
    """Called when the lease is held, to reload the target."""
    count_earlier_failures: Callable[[], int] = lambda: 0
    """Number of failed rows of earlier calls that are not computed again."""
    on_commit: Callable[[CommitResult], None] = lambda _: None
    """Called after every commit and its cleanup."""
    on_finished: Callable[[], None] = lambda: None
    """Called when all is done, while the lease is still held."""
    result: BackfillResult = field(init=False)
    progress: RowProgress = field(init=False)
    _began: float = field(default_factory=time.monotonic)
    _changed_fragments: set[int] = field(default_factory=set)
    _run_started: float | None = None
    """Start of the run until the first result; then None."""
    _budget: ErrorBudget = field(init=False)
    _earlier_failures: int = 0
    """Rows that failed in earlier calls: they count too, or a repeated call would succeed."""
    _requested_rows: int = 0
    _tracker: FragmentTracker = field(default_factory=FragmentTracker)
    _errors_by_fragment: Counter[int] = field(default_factory=Counter)
    """Failed rows by fragment."""
    _leases: list[Lease] = field(default_factory=list)
    _record_of_run: BackfillRecord = field(init=False)

    def __post_init__(self) -> None:
        column = self.target.columns[0]
        self.result = BackfillResult(column, run=self.run_id, version=self.table.version)
        self._record_of_run = BackfillRecord(self.run_id, column, RUNNING, time.time())
        self._budget = ErrorBudget()
        self.progress = RowProgress(self.result, self.arguments.progress, renderer=self.renderer)

    # --- rounds

    def fill(self) -> BackfillResult:
        """Run the backfill. Finished fragments are committed even if it raises."""
        record = self._record_of_run
        record.udf, record.version = self.udf.reference or self.udf.name, self.udf.version
        record.where, record.engine = self.target.where, self.arguments.engine
        with hold_leases(
            self.store, self.target.columns, self.run_id, wait=self.arguments.wait, say=self.progress.print_note
        ) as self._leases:
            if self.refresh_target is not None:
                self.target = self.refresh_target()
            write_backfill(self.store, record)
            try:
                self._run_rounds()
                record.status = self.result.status
                if record.status == FINISHED:
                    self._delete_stale_checkpoints()
                    self.on_finished()
            except KeyboardInterrupt:
                record.status = CANCELLED
                raise
            except BaseException as error:
                record.status, record.message = FAILED, _error_summary(error)
                raise
            finally:
                self.result.seconds = time.monotonic() - self._began
                record.ended = time.time()
                self._save_record()
        return self.result

    def _delete_stale_checkpoints(self) -> None:
        """Delete checkpoints that are no longer needed: of removed fragments, and of other versions if all is done."""
        target, store = self.target, self.store
        if target.fragments is None and target.where is None and target.only is None:
            store.delete_folder(f"{target.folder}/parts")
        elif target.fragments is None or target.recompute_fragments:
            store.delete_folder(parts_folder(target.folder, target.parts))
        for name in store.folders(f"{target.folder}/parts") if target.only is not None else ():
            if name.startswith(f"{target.identity}{RETRY_INFIX}"):  # a retry with another version of the function
                store.delete_folder(parts_folder(target.folder, name))
        delete_orphaned_errors(store, target, {fragment.id for fragment in self.table.newest().fragments()})

    def _save_record(self) -> None:
        record, result = self._record_of_run, self.result
        record.rows, record.errors = result.rows, result.errors
        record.fragments, record.workers = result.fragments, result.workers
        record.table_version = result.version if result.commits else 0
        with suppress(OSError, DovetailError):  # full disk: the error that is raised matters more
            write_backfill(self.store, record)

    def _run_rounds(self) -> None:
        for number in range(MAX_ROUNDS):
            self.table = add_missing_column_files(self.table.newest(), self.target)
            work = find_pending_work(self.table, self.store, self._target_of_round(number))
            if not number:
                self._report_existing_values(work)
            self._changed_fragments.clear()
            if self.target.only is None and not self.target.recompute_fragments:
                write_carried_fragments(self.store, self._target_of_round(number), work.carried)
            delete_pending_errors(self.store, self.target, work)
            if not number:
                self._check_error_budget(work)
            if not (work.tasks or work.files):
                return
            self._run_round(work)
            if not self._changed_fragments or self.result.status == DRAINED:
                return
            self._check_inputs_exist()
            self._report_changes()
            self._subtract_errors(
                self._errors_by_fragment.keys() - {fragment.id for fragment in self.table.newest().fragments()}
            )
        message = f"the table changed {MAX_ROUNDS} times during the backfill"
        raise RunError(
            Problem("DT438", message, fixes=("repeat the backfill while the table is not compacted or updated",))
        )

    def _check_inputs_exist(self) -> None:
        there = self.table.newest().schema.names
        names = [
            name
            for name in (*(self.reads or self.target.inputs), *self.target.dependencies(self.table))
            if name not in there
        ]
        if names:
            raise column_dropped_error(self.udf.name, names, there)

    def _check_error_budget(self, work: PendingWork) -> None:
        """Set up the error budget; failed rows of earlier calls count too."""
        result, limit = self.result, self.arguments.max_errors
        if limit is not None or not (work.tasks or work.files):
            result.failed_before = self.count_earlier_failures()
        self._earlier_failures, self._requested_rows = result.failed_before, self._count_requested_rows(work)
        self._budget = ErrorBudget(limit)
        if self._is_budget_exceeded():
            raise self._budget_error()

    def _is_budget_exceeded(self) -> bool:
        return self._budget.is_exceeded(self._earlier_failures + self.result.errors, self._requested_rows)

    def _budget_error(self) -> RunError:
        column, before = self.target.columns[0], self._earlier_failures
        failed, allowed = before + self.result.errors, self._budget.text(self._requested_rows, "row")
        what = f"column {column!r}: {format_rows(failed)} failed, more than "
        message = Text(what, Setting("max_errors"), f" allows ({allowed})")
        earlier = (f"{before:,} of them in earlier calls",) if before else ()
        fixes = (
            Text(
                *(Call("table.errors", (column,)), " shows why; "),
                *(Call("table.retry_errors", (column,)), " computes them again"),
            ),
            Text("a larger ", Setting("max_errors"), "; what is finished is committed"),
        )
        return RunError(Problem(TOO_MANY_FAILED_ROWS, message, earlier, fixes))

    def _count_requested_rows(self, work: PendingWork) -> int:
        target = self.target
        if target.only is not None:
            return sum(map(len, target.only.values()))
        if target.where is not None and isinstance(self.arguments.max_errors, float):
            return self.table.count(target.where)
        return work.rows + work.done_rows

    def _target_of_round(self, number: int) -> FillTarget:
        """The target; in later rounds only the requested fragments that changed and still exist."""
        wanted = self.target.fragments
        if not number or wanted is None:
            return self.target
        if isinstance(wanted, int):
            return replace(self.target, fragments=max(0, wanted - self.result.fragments))
        return replace(self.target, fragments=tuple(sorted(self._changed_fragments - self._removed_fragments())))

    def _removed_fragments(self) -> set[int]:
        return self._changed_fragments - {fragment.id for fragment in self.table.newest().fragments()}

    def _add_notes(self, notes: Iterable[str]) -> None:
        for note in notes:
            self.result.notes.append(note)
            self.progress.print_note(note)

    def _report_existing_values(self, work: PendingWork) -> None:
        self.result.done_before, self.result.kept = work.done_rows, work.kept
        if work.kept:
            self.progress.print_note(f"resuming: {work.kept:,} of {work.rows:,} rows are in checkpoints")
        if self.target.where is None and not self.arguments.recompute:
            self._add_notes(recompute_notes(work, self.target.columns[0]))

    def _report_changes(self) -> None:
        """Note the changed fragments; raises if rows were to be retried, because their addresses changed."""
        vanished = self._removed_fragments()
        if self.target.only is not None:
            raise rows_not_retried_error(self.target.columns[0], len(self._changed_fragments), vanished=bool(vanished))
        named = isinstance(self.target.fragments, tuple)
        self._add_notes([change_note(self.target.columns[0], self._changed_fragments, vanished if named else set())])

    # --- one run

    def _run_round(self, work: PendingWork) -> None:
        self.progress.start_round(work.rows, work.rows - work.kept, work.fragments)
        self._tracker = FragmentTracker(work.tasks)
        committer = Committer(
            self.table, self.arguments.commit_every_s, self.target.input_hash, self._on_commit, self._check_leases
        )
        try:
            for file in work.files:
                committer.add(file)
            if work.tasks:
                self._run_workers(work, committer)
                self._changed_fragments.update(self._tracker.incomplete_fragments())
        except BaseException as error:
            try:
                committer.finish()
            except Exception as second:
                error.add_note(f"finished fragments could not be committed: {second}")
            raise
        else:
            committer.finish()
        finally:
            self.result.times.commit += committer.seconds

    def _subtract_errors(self, fragments: Iterable[int]) -> None:
        """Remove the errors of fragments that are computed again."""
        self.result.errors -= sum(self._errors_by_fragment.pop(number, 0) for number in list(fragments))

    def _check_leases(self) -> None:
        """Raise if another process took over the column."""
        if not all(lease.check_still_held() for lease in self._leases):
            raise lease_lost_error(self.target.columns[0])

    def _on_commit(self, committed: CommitResult) -> None:
        result = self.result
        self._changed_fragments.update(committed.changed_fragments)
        self._subtract_errors(committed.changed_fragments)
        if committed.fragments:
            result.first_commit_s = result.first_commit_s or time.monotonic() - self._began
            result.commits += 1
            result.fragments += len(committed.fragments)
            result.version = committed.version
            self.progress.committed += len(committed.fragments)
        folder = parts_folder(self.target.folder, self.target.parts)
        done = {str(number) for number in (*committed.fragments, *committed.changed_fragments)}
        for name in self.store.folders(folder):
            if name.partition("-")[0] in done:
                self.store.delete_folder(f"{folder}/{name}")
        delete_superseded_errors(self.store, self.target, committed.inputs)
        if self.target.recompute_fragments:
            replace_retried_errors(self.store, self.target, committed.fragments)
        self.on_commit(committed)
        self._save_record()

    def _run_workers(self, work: PendingWork, committer: Committer) -> None:
        stage = make_stage(self._make_fill_spec(), self.udf, self.arguments)
        pipeline = Pipeline([stage], name=run_name(self.table.uri, self.target.columns[0]))
        on_ray = is_ray_engine(self.arguments.engine)
        workers = 1 if on_ray else plan_workers(self.udf, self.arguments).units[0].workers
        rate = None if on_ray else known_rate(pipeline, self.arguments.cluster)
        queue = TaskQueue(work.tasks, workers, stage.slots or 1, rate)
        self.progress.count_rows_left = lambda: queue.rows_left
        self._run_started = time.monotonic()
        try:
            arguments = run_arguments(self.arguments, self.table.uri, self.target.columns[0], self.udf.reference)
            run = start(pipeline, iter(queue), **arguments, counts=self.progress.counts)
        except InfeasibleError as error:
            raise explain_infeasible(self.udf, error) from None
        self.result.folder = run.folder
        self._report_workers(run)
        queue.expect_workers(self.result.workers)
        try:
            for done in run:
                self._on_result(done, queue, committer)
            if queue.has_more:  # a run that serves is finished also if it was drained
                self.result.status = DRAINED
        finally:
            queue.abandon()
        if self.target.only is None:
            save_rate(pipeline, run.plan, queue.measured)

    def _report_workers(self, run: Run) -> None:
        self.result.workers = run.plan.units[0].workers
        note = clamp_note(self.udf, self.arguments, run.plan)
        if note and note not in self.result.notes:
            self.result.notes.append(note)
            self.progress.print_note(note)

    def _make_fill_spec(self) -> FillSpec:
        target = self.target
        reads = self.reads or target.inputs
        return make_fill_spec(
            self.table, self.udf, target, self.arguments, columns=target.columns, reads=reads, run=self.run_id
        )

    # --- results

    def _on_result(self, done: RangeResult, queue: TaskQueue, committer: Committer) -> None:
        result = self.result
        if self._run_started is not None:
            result.times.start += max(0.0, time.monotonic() - self._run_started - done.busy_s)
            self._run_started = None
        result.rows += done.computed
        result.errors += done.errors
        self._errors_by_fragment[done.task.fragment] += done.errors
        result.times.add(done.times)
        self._on_rows(done, queue, committer)
        if self._tracker.has_failed_repeatedly(done):
            queue.stop(task_failed_error(done, self.table.uri))
        elif done.failed is not None:
            self._record_failed_row(done.failed)
            queue.stop(make_row_failed(done.failed, self._skip_call()))
        elif self._is_budget_exceeded():
            queue.stop(self._budget_error())
        elif any(lease.is_lost() for lease in self._leases):
            queue.stop(lease_lost_error(self.target.columns[0]))
        elif committer.error is not None:  # further results could not be kept
            queue.stop(committer.error)
        self.progress.on_result()
        queue.task_done(done)

    def _record_failed_row(self, failed: FailedRow) -> None:
        """Record the row with which the run fails in its folder, for `dovetail errors`."""
        column = self.target.columns[0]
        failure = RecordedFailure(
            unit=column,
            stage=column,
            error=failed.error_type,
            message=failed.message,
            place=failed.place,
            traceback=failed.traceback,
            ended_run=True,
        )
        if self.result.folder is not None:
            with suppress(OSError):  # full disk: the error that is raised matters more
                append_failure(RunFolder(self.result.folder).errors, failure)

    def _skip_call(self) -> Call:
        """This call with on_error="skip"."""
        function = () if self.udf.reference else (Expression(self.udf.name),)
        if self.target.only is not None:
            return Call("table.retry_errors", (self.target.columns[0], *function), {"on_error": "skip"})
        fragments = self.arguments.fragments
        given = {
            "where": self.target.where,
            "fragments": list(fragments) if isinstance(fragments, tuple) else fragments,
        }
        changed = {name: value for name, value in given.items() if value is not None} | {"on_error": "skip"}
        return Call("table.backfill", (self.target.columns[0], *function), changed)

    def _on_rows(self, done: RangeResult, queue: TaskQueue, committer: Committer) -> None:
        task, more = done.task, self._tracker.on_result(done)
        if more is None:
            return
        for one in more:
            queue.add(one)
        if done.fragment_changed:
            self._changed_fragments.add(task.fragment)
        if done.file:
            fields = self.target.fields(self.table)
            committer.add(NewDataFile(task.fragment, done.file, fields, task.inputs, done.size_bytes, task.before))


def _error_summary(error: BaseException) -> str:
    problems = getattr(error, "problems", ())
    return problems[0].message if problems else f"{type(error).__name__}: {error}".splitlines()[0][:500]
