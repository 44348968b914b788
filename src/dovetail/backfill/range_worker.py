"""RangeWorker, the stage function: read rows, call the UDF, save checkpoints, write data files, isolate rows that kill
workers.

A task ends when its rows are done, or when its time budget or buffer is used up; its results are then saved as a part
beside the table, and the rest of the range becomes another task. A worker that dies leaves a mark of the rows it had
started. The next worker that gets the task computes those rows in smaller and smaller steps, until the row that kills
workers is isolated (`fatal_rows`).
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field, replace
from threading import local
from typing import TYPE_CHECKING, Any

from dovetail.backfill.checkpoints import (
    AttemptMark,
    BrokenMark,
    CheckpointStore,
    HangMark,
    Part,
    PartMissingError,
    covering_parts,
    finished_file_name,
    merge_kept_values,
    slice_batches,
    uncovered_ranges,
)
from dovetail.backfill.fatal_rows import fatal_row, next_step
from dovetail.backfill.lance_table import LanceTable
from dovetail.backfill.row_reader import RowReader, RowWindow
from dovetail.backfill.target import data_file_name, files_hash
from dovetail.backfill.task import (
    COMPUTED_COLUMN,
    FailedRow,
    FillSpec,
    PhaseTimes,
    RangeResult,
    RangeTask,
)
from dovetail.backfill.udf_caller import UdfCaller
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.backfill.checkpoints import FragmentFiles
    from dovetail.backfill.udf import Udf
    from dovetail.backfill.udf_caller import BatchResult
    from dovetail.engines.worker_context import Worker

RETRY_PAUSE_S = 0.5
"""Pause after an error outside of the function, which may be temporary."""
MAX_TRACEBACK_CHARS = 4_000


@dataclass(slots=True)
class ComputedRange:
    """Rows [start, stop) that this worker computed and has not saved yet."""

    start: int
    stop: int
    batches: list[Any] = field(default_factory=list)
    size_bytes: int = 0
    computed: int = 0
    failures: list[FailedRow] = field(default_factory=list)
    failed: FailedRow | None = None
    """The row at `stop` that ends the backfill."""

    def add(self, batch: Any) -> None:
        self.batches.append(batch)
        self.size_bytes += batch.nbytes


class WorkerBrokenError(Exception):
    """A row left the process of its worker broken: `worker_stage` has the worker replaced."""


class WorkerAlreadyBrokenError(WorkerBrokenError):
    """The process was broken before the rows of a task were called: they are not to blame."""


class RangeWorker:
    """Stage function: a list of tasks in, their results out."""

    def __init__(self, spec: FillSpec, udf: Udf) -> None:
        self.spec = spec
        self.udf = udf
        self._broken = ""
        """Why this process is broken; empty: it is not. It calls no further rows."""

    def code_key(self) -> str:
        """Key of the profile: rates of one function and column do not apply to another. A condition that skips rows
        makes rows faster, so it has a profile of its own."""
        return f"fill {self.spec.uri} {self.spec.folder} {self.udf.version} {self.spec.where or ''}"

    def setup(self, worker: Worker) -> None:
        spec = self.spec
        self.worker_key = (worker.node, worker.id)
        self.table = self._open_table()
        self.checkpoints = CheckpointStore(spec)
        self._thread_state = local()
        types = [output.type for output in spec.outputs]
        self._first_caller = UdfCaller(self.udf, types, spec.on_error, spec.batch_size, spec.timeout_s, spec.slots)
        self._first_caller.setup(worker)
        self._thread_state.caller = self._first_caller  # coroutines run in the event loop of this thread
        self._other_callers: list[UdfCaller] = []

    def _open_table(self) -> LanceTable:
        """The version of the table in the spec; the newest if that was cleaned up (then every fragment is checked)."""
        spec = self.spec
        try:
            return LanceTable(spec.uri, spec.storage, spec.version)
        except ConfigError:
            return LanceTable(spec.uri, spec.storage)

    def teardown(self) -> None:
        self._first_caller.teardown()
        for other in self._other_callers:
            other.watchdog.close()

    @property
    def caller(self) -> UdfCaller:
        """Caller of this thread: each slot has its own, and all call the same object."""
        found: UdfCaller | None = getattr(self._thread_state, "caller", None)
        if found is None:
            found = self._thread_state.caller = self._first_caller.clone_for_thread()
            self._other_callers.append(found)
        return found

    @property
    def reader(self) -> RowReader:
        found: RowReader | None = getattr(self._thread_state, "reader", None)
        if found is None:
            found = self._thread_state.reader = RowReader(self.table, self.spec)
        return found

    def __call__(self, tasks: Sequence[RangeTask]) -> list[RangeResult]:
        return [self._run_task(task) for task in tasks]

    def _run_task(self, task: RangeTask) -> RangeResult:
        """Run a task. Errors outside of the function are reported to the driver, which counts them."""
        if self._broken:  # tasks that were queued before the worker is replaced
            raise WorkerAlreadyBrokenError(self._broken)
        try:
            if self.table.version != self.spec.version and not self._is_unchanged(task, self.table):
                return RangeResult(task, task.stop, worker=self.worker_key, fragment_changed=True)
            return self._process(task)
        except WorkerBrokenError:
            raise
        except Exception as error:
            if self._was_rewritten(task):
                return RangeResult(task, task.stop, worker=self.worker_key, fragment_changed=True)
            trace = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
            time.sleep(RETRY_PAUSE_S)
            return RangeResult(
                task, task.start, worker=self.worker_key, worker_error=f"{type(error).__name__}: {error}\n{trace}"
            )

    def _is_unchanged(self, task: RangeTask, table: LanceTable) -> bool:
        ids = table.field_ids()
        watched = {ids[name] for name in self.spec.dependencies if name in ids}
        own = [output.field for output in self.spec.outputs]
        return any(
            files_hash(fragment, watched) == task.inputs
            and (not task.before or files_hash(fragment, own) == task.before)
            for fragment in table.fragments()
            if fragment.id == task.fragment
        )

    def _was_rewritten(self, task: RangeTask) -> bool:
        """Whether the fragment was rewritten and its old files cleaned up."""
        try:
            return not self._is_unchanged(task, self.table.newest())
        except Exception:  # unknown
            return False

    def _process(self, task: RangeTask) -> RangeResult:
        times = PhaseTimes()
        began = time.monotonic()
        until = began + task.budget_s
        done = RangeResult(task, task.stop, times=times, worker=self.worker_key)
        with _Timer(times, "read"):
            done.untouched = self.reader.is_untouched(task)
        if done.untouched:
            return done
        with _Timer(times, "checkpoint"):
            found = self.checkpoints.scan(task)
        pieces: list[ComputedRange] = []
        for start, stop in uncovered_ranges(found.parts, task.start, task.stop):
            piece = self._compute_suspects(task, found, start, stop, until, times) or self._compute_marked(
                task, start, stop, until, times
            )
            pieces.append(piece)
            if piece.stop < stop or piece.failed is not None:
                done.reached, done.failed = piece.stop, piece.failed
                break
        # existing parts are from a worker that died before it reported: ranges are handed out once
        kept = (task.stop - task.start) - sum(
            stop - start for start, stop in uncovered_ranges(found.parts, task.start, task.stop)
        )
        done.computed = sum(piece.computed for piece in pieces) + (0 if self.spec.masked else kept)
        done.errors = sum(len(piece.failures) for piece in pieces)
        self._save_ranges(task, found, pieces, done)
        return done

    # --- computing

    def _compute_marked(self, task: RangeTask, start: int, stop: int, until: float, times: PhaseTimes) -> ComputedRange:
        with _Timer(times, "checkpoint"):
            self.checkpoints.mark(task, AttemptMark(start, stop, self.spec.run))
        return self._compute(task, start, stop, until, times)

    def _compute(self, task: RangeTask, start: int, stop: int, until: float, times: PhaseTimes) -> ComputedRange:
        piece = ComputedRange(start, start)
        while piece.stop < stop:
            with _Timer(times, "read"):
                window = self.reader.window(task, piece.stop, stop)
            with _Timer(times, "compute"):
                called = self._call_udf(task, window, until)
            if called is not None and called.broken is not None:
                called = self._on_process_broken(task, window, called, called.broken)
            self._add_results(task, piece, window, called)
            if piece.failed is not None or time.monotonic() >= until or piece.size_bytes >= self.spec.part_bytes:
                break
        return piece

    def _call_udf(self, task: RangeTask, window: RowWindow, until: float) -> BatchResult | None:
        if window.batch is None:
            return None

        def report_hang(index: int) -> None:
            self.checkpoints.mark(task, HangMark(window.row_at(index), self.spec.run))

        return self.caller.run(window.batch, until, report_hang)

    def _add_results(
        self, task: RangeTask, piece: ComputedRange, window: RowWindow, called: BatchResult | None
    ) -> None:
        if called is None:  # no row of the window is computed
            piece.add(window.null_rows(self.spec))
            piece.stop = window.stop
            return
        rows = [replace(row, fragment=task.fragment, offset=window.row_at(row.offset)) for row in called.failures]
        end = window.first_uncomputed_row(called.rows)
        piece.computed += called.rows
        if called.stopped and rows:
            piece.failed = rows.pop()
            end = piece.failed.offset
        piece.failures += rows
        if end > piece.stop:
            piece.add(window.scatter(self.spec, called.arrays, end))
        piece.stop = end

    def _on_process_broken(
        self, task: RangeTask, window: RowWindow, called: BatchResult, broken: tuple[int, int]
    ) -> BatchResult:
        """Have this worker replaced: another one tries the rows alone. A row that broke that one too is to blame."""
        first, last = window.row_at(broken[0]), window.row_at(broken[1] - 1) + 1
        rows = f"row {first}" if last - first == 1 else f"one of the rows {first} to {last - 1}"
        reason = f": {called.failures[-1].error_type}: {called.failures[-1].message}" if called.failures else ""
        reason = f"{rows} of fragment {task.fragment} left its worker broken{reason}"
        if self._broken:
            raise WorkerAlreadyBrokenError(self._broken)  # by a call in another thread
        watch = self.caller.watch
        again = any((mark.start, mark.stop) == (first, last) for mark in self._broken_marks(task))
        if again and broken == (0, 1) and not watch.was_doubtful:
            self._broken = reason if watch.has_passed else ""  # if no row has passed, the next one shows it
            failures = called.failures[:1]
            return replace(called, rows=1, arrays=self.caller.nulls(1), failures=failures, stopped=False, broken=None)
        self._broken = reason
        replaced = 1 if watch.has_passed else watch.replaced_before + 1
        self.checkpoints.mark(task, BrokenMark(first, last, self.spec.run, replaced))
        if watch.was_doubtful:
            raise WorkerAlreadyBrokenError(reason)
        raise WorkerBrokenError(reason)

    def _broken_marks(self, task: RangeTask) -> list[BrokenMark]:
        return [mark for mark in self.checkpoints.scan(task).broken if mark.run == self.spec.run]

    # --- rows that kill workers

    def _compute_suspects(
        self, task: RangeTask, found: FragmentFiles, start: int, stop: int, until: float, times: PhaseTimes
    ) -> ComputedRange | None:
        """Compute rows of dead or broken workers in steps, each saved at once; None: no worker died or broke here."""
        mine = [item for item in found.tried if item.run == self.spec.run]
        hung = sorted(item.row for item in found.hung if item.run == self.spec.run and start <= item.row < stop)
        if hung:
            return self._compute_around(task, start, hung[0], self._timed_out_row(task, hung[0]), until, times)
        broken = [item for item in found.broken if item.run == self.spec.run]
        mine += [AttemptMark(item.start, item.stop, item.run, 0) for item in broken]
        step = next_step(mine, start, stop)
        if step is None:
            return None
        watch = self.caller.watch
        watch.replaced_before = max([watch.replaced_before, *(item.replaced for item in broken if item.stop > start)])
        if step.is_fatal:
            return self._compute_around(task, start, step.start, fatal_row(task, step.start), until, times)
        return self._compute_in_steps(task, step.start, step.stop, step.rows, until, times, step.attempt)

    def _compute_in_steps(
        self, task: RangeTask, start: int, stop: int, step: int, until: float, times: PhaseTimes, time_number: int = 1
    ) -> ComputedRange:
        """Compute rows in steps: each is marked before, and saved as a part after."""
        whole = ComputedRange(start, start)
        while whole.stop < stop and (whole.stop == start or time.monotonic() < until):
            mark = AttemptMark(whole.stop, min(stop, whole.stop + step), self.spec.run, time_number)
            with _Timer(times, "checkpoint"):
                self.checkpoints.mark(task, mark)
            try:
                piece = self._compute(task, mark.start, mark.stop, until, times)
            except WorkerAlreadyBrokenError:
                self.checkpoints.unmark(task, mark)
                raise
            with _Timer(times, "checkpoint"):
                self.checkpoints.save(task, piece.start, piece.stop, piece.batches, piece.failures)
                self.checkpoints.unmark(task, mark)
            whole.stop, whole.failed = piece.stop, piece.failed
            whole.computed += piece.computed
            whole.failures += piece.failures
            if piece.failed is not None or piece.stop < mark.stop or piece.failures:
                break  # failures are reported before the next step, which may end the worker
        return whole  # without batches: they are saved in parts

    def _compute_around(
        self, task: RangeTask, start: int, row: int, failed: FailedRow, until: float, times: PhaseTimes
    ) -> ComputedRange:
        """Compute the rows before a fatal row, then record that row as failed."""
        if row > start:
            return self._compute_in_steps(task, start, row, row - start, until, times)
        piece = ComputedRange(row, row)
        if self.spec.on_error.then == "fail":
            piece.failed = failed
            return piece
        with _Timer(times, "checkpoint"):
            self.checkpoints.save(task, row, row + 1, [self.reader.null_rows(1)], [failed])
        return ComputedRange(row, row + 1, failures=[failed])

    def _timed_out_row(self, task: RangeTask, row: int) -> FailedRow:
        message = f"no result within the timeout of {self.spec.timeout_s:g} s; its worker was killed"
        return FailedRow(task.fragment, row, "TimeoutError", message)

    # --- saving

    def _save_ranges(
        self, task: RangeTask, found: FragmentFiles, pieces: Sequence[ComputedRange], done: RangeResult
    ) -> None:
        held = [piece for piece in pieces if piece.batches]
        parts = found.parts + [Part(piece.start, piece.stop) for piece in pieces if piece.stop > piece.start]
        whole = done.failed is None and bool(covering_parts(parts, task.rows))
        with _Timer(done.times, "checkpoint"):
            if whole:
                self.checkpoints.save_failures(task, [failure for piece in held for failure in piece.failures])
            else:
                for piece in held:
                    self.checkpoints.save(task, piece.start, piece.stop, piece.batches, piece.failures)
                if done.failed is None and done.reached >= task.stop and _is_partial_range(task):
                    parts = self.checkpoints.scan(task).parts
                    whole, held = bool(covering_parts(parts, task.rows)), []
        if whole:
            with _Timer(done.times, "write"):
                self._write_or_save(task, held, done)
        with _Timer(done.times, "checkpoint"):
            self.checkpoints.clean_up(task, self.spec.run, done.reached, merge=not whole)

    def _write_or_save(self, task: RangeTask, held: Sequence[ComputedRange], done: RangeResult) -> None:
        """Write the data file, or save parts if one is missing: another worker may be writing the same file or merging
        parts. The driver then requests the file when no other worker processes the fragment."""
        try:
            self._write_file(task, held, done)
        except PartMissingError:
            if task.start == task.stop:
                done.missing = tuple(uncovered_ranges(self.checkpoints.scan(task).parts, 0, task.rows))
                if not done.missing:
                    raise
            for piece in held:
                self.checkpoints.save(task, piece.start, piece.stop, piece.batches, piece.failures)

    def _write_file(self, task: RangeTask, held: Sequence[ComputedRange], done: RangeResult) -> None:
        """Write the data file of the fragment from buffered results and parts."""
        spec = self.spec
        name = data_file_name(spec.identity, task.inputs, incomplete=self.checkpoints.has_failures(task))
        buffered = {(piece.start, piece.stop): piece.batches for piece in held}
        with_parts = self.checkpoints.scan(task).parts if len(buffered) != 1 or (0, task.rows) not in buffered else []
        # buffered results come first: parts must be read back
        parts = [Part(start, stop) for start, stop in buffered] + with_parts
        schema = self.reader.schema
        batches, scratch = self._batches(task, parts, buffered), self.checkpoints.scratch_folder(task)
        done.size_bytes = self.table.write(name, schema, batches, task.rows, scratch)
        self.checkpoints.mark_finished(task, finished_file_name(name, task.before))
        done.file = name

    def _batches(
        self, task: RangeTask, parts: Sequence[Part], buffered: dict[tuple[int, int], list[Any]]
    ) -> Iterator[Any]:
        chosen = covering_parts(parts, task.rows)
        if not chosen:
            raise PartMissingError(f"parts of fragment {task.fragment}")
        for part, start, stop in chosen:
            batches = buffered.get((part.start, part.stop)) or self.checkpoints.load(task, part)
            for batch, first in slice_batches(batches, part.start, start, stop):
                if not self.spec.masked:
                    yield batch
                    continue
                new = batch.column(batch.schema.get_field_index(COMPUTED_COLUMN))
                old = self.reader.current_values(task.fragment, first, first + batch.num_rows)
                yield merge_kept_values(batch, new, old, self.reader.schema)


def _is_partial_range(task: RangeTask) -> bool:
    """Whether the range is not the whole fragment: other workers may have computed the rest."""
    return task.stop - task.start < task.rows


class _Timer:
    """Adds the duration of a block to a phase."""

    __slots__ = ("_began", "_name", "_times")

    def __init__(self, times: PhaseTimes, name: str) -> None:
        self._times, self._name = times, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        setattr(self._times, self._name, getattr(self._times, self._name) + time.perf_counter() - self._began)
