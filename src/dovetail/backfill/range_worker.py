"""RangeWorker, the stage function: read rows, call the UDF, save checkpoints, write data files, isolate rows that kill
workers.

A task ends when its rows are done, or when its time or its room is over; what it has then becomes a part beside the
table, and the rest of the range is another task. A worker that died leaves a mark of what it had begun with. Whoever
gets that task next goes through those rows in ever smaller steps, until the row that kills workers stands alone.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from threading import local
from typing import TYPE_CHECKING, Any

from dovetail.backfill.checkpoints import (
    AttemptMark,
    CheckpointStore,
    HangMark,
    Part,
    PartMissingError,
    covering_parts,
    finished_file_name,
    merge_kept_values,
    narrowest_attempt,
    slice_batches,
    uncovered_ranges,
)
from dovetail.backfill.lance_table import LanceTable
from dovetail.backfill.row_reader import RowReader, RowWindow
from dovetail.backfill.target import data_file_name, files_hash
from dovetail.backfill.task import (
    COMPUTED_COLUMN,
    WORKER_DIED,
    FailedRow,
    FillJob,
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

BISECTION_STEPS = 16
"""Rows in which a worker died are gone through in so many steps."""
RETRY_PAUSE_S = 0.5
"""After something that is not the function's fault: it may be over by then."""
MAX_TRACEBACK_CHARS = 4_000
MIN_DEATHS_TO_BLAME = 2
"""A single row is to blame when it killed so many workers: one may have been killed by somebody else."""


@dataclass(slots=True)
class ComputedRange:
    """Rows [start, stop) that this worker has computed, and not left anywhere yet."""

    start: int
    stop: int
    batches: list[Any] = field(default_factory=list)
    size_bytes: int = 0
    computed: int = 0
    failures: list[FailedRow] = field(default_factory=list)
    failed: FailedRow | None = None
    """At `stop`: nothing more is to be computed."""

    def add(self, batch: Any) -> None:
        self.batches.append(batch)
        self.size_bytes += batch.nbytes


class RangeWorker:
    """A stage's function: a list of tasks in, how far each came out."""

    def __init__(self, job: FillJob, udf: Udf) -> None:
        self.job = job
        self.udf = udf

    def code_key(self) -> str:
        """What was measured of one column's function says nothing of another's."""
        return f"fill {self.job.folder} {self.udf.version}"

    def setup(self, worker: Worker) -> None:
        job = self.job
        self.worker_key = (worker.node, worker.id)
        self.table = self._open_table()
        self.checkpoints = CheckpointStore(job)
        self._thread_state = local()
        types = [output.type for output in job.outputs]
        self._first_caller = UdfCaller(self.udf, types, job.on_error, job.batch_size, job.timeout_s, job.slots)
        self._first_caller.setup(worker)
        self._thread_state.caller = self._first_caller  # what is awaited lives in the event loop of this thread
        self._other_callers: list[UdfCaller] = []

    def _open_table(self) -> LanceTable:
        """The version that all read; the newest, if somebody cleaned up: then each fragment is looked at."""
        job = self.job
        try:
            return LanceTable(job.uri, job.storage, job.version)
        except ConfigError:
            return LanceTable(job.uri, job.storage)

    def teardown(self) -> None:
        self._first_caller.teardown()
        for other in self._other_callers:
            other.watchdog.close()

    @property
    def caller(self) -> UdfCaller:
        """Of this thread: with several slots each has its own, and all call the same object."""
        found: UdfCaller | None = getattr(self._thread_state, "caller", None)
        if found is None:
            found = self._thread_state.caller = self._first_caller.clone_for_thread()
            self._other_callers.append(found)
        return found

    @property
    def reader(self) -> RowReader:
        found: RowReader | None = getattr(self._thread_state, "reader", None)
        if found is None:
            found = self._thread_state.reader = RowReader(self.table, self.job)
        return found

    def __call__(self, tasks: Sequence[RangeTask]) -> list[RangeResult]:
        return [self._run_task(task) for task in tasks]

    def _run_task(self, task: RangeTask) -> RangeResult:
        """What is not the function's is told to the driver, which knows how often that was."""
        try:
            if self.table.version != self.job.version and not self._is_unchanged(task, self.table):
                return RangeResult(task, task.stop, worker=self.worker_key, fragment_changed=True)
            return self._process(task)
        except Exception as error:
            if self._was_rewritten(task):
                return RangeResult(task, task.stop, worker=self.worker_key, fragment_changed=True)
            told = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
            time.sleep(RETRY_PAUSE_S)
            return RangeResult(
                task, task.start, worker=self.worker_key, worker_error=f"{type(error).__name__}: {error}\n{told}"
            )

    def _is_unchanged(self, task: RangeTask, table: LanceTable) -> bool:
        ids = table.field_ids()
        watched = {ids[name] for name in self.job.dependencies if name in ids}
        own = [output.field for output in self.job.outputs]
        return any(
            files_hash(fragment, watched) == task.inputs
            and (not task.before or files_hash(fragment, own) == task.before)
            for fragment in table.fragments()
            if fragment.id == task.fragment
        )

    def _was_rewritten(self, task: RangeTask) -> bool:
        """Whether it cannot be read because it was rewritten, and what was there before was cleaned up."""
        try:
            return not self._is_unchanged(task, self.table.newest())
        except Exception:  # nobody knows
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
        # what is there already was done by one who died before it could say so: ranges are handed out once
        kept = (task.stop - task.start) - sum(
            stop - start for start, stop in uncovered_ranges(found.parts, task.start, task.stop)
        )
        done.computed = sum(piece.computed for piece in pieces) + (0 if self.job.masked else kept)
        done.errors = sum(len(piece.failures) for piece in pieces)
        self._save_ranges(task, found, pieces, done)
        return done

    # --- computing

    def _compute_marked(self, task: RangeTask, start: int, stop: int, until: float, times: PhaseTimes) -> ComputedRange:
        with _Timer(times, "checkpoint"):
            self.checkpoints.mark(task, AttemptMark(start, stop, self.job.run))
        return self._compute(task, start, stop, until, times)

    def _compute(self, task: RangeTask, start: int, stop: int, until: float, times: PhaseTimes) -> ComputedRange:
        piece = ComputedRange(start, start)
        while piece.stop < stop:
            with _Timer(times, "read"):
                window = self.reader.window(task, piece.stop, stop)
            with _Timer(times, "compute"):
                called = self._call_udf(task, window, until)
            self._add_results(task, piece, window, called)
            if piece.failed is not None or time.monotonic() >= until or piece.size_bytes >= self.job.part_bytes:
                break
        return piece

    def _call_udf(self, task: RangeTask, window: RowWindow, until: float) -> BatchResult | None:
        if window.batch is None:
            return None

        def condemn(index: int) -> None:
            self.checkpoints.mark(task, HangMark(window.row_at(index), self.job.run))

        return self.caller.run(window.batch, until, condemn)

    def _add_results(
        self, task: RangeTask, piece: ComputedRange, window: RowWindow, called: BatchResult | None
    ) -> None:
        if called is None:  # nothing in it is to be computed
            piece.add(window.null_rows(self.job))
            piece.stop = window.stop
            return
        rows = [FailedRow(task.fragment, window.row_at(it.index), it.error_type, it.message, it.traceback, it.exception)
                for it in called.failures]  # fmt: skip
        end = window.first_uncomputed_row(called.rows)
        piece.computed += called.rows
        if called.stopped and rows:
            piece.failed = rows.pop()
            end = piece.failed.offset
        piece.failures += rows
        if end > piece.stop:
            piece.add(window.scatter(self.job, called.arrays, end))
        piece.stop = end

    # --- rows that kill workers

    def _compute_suspects(
        self, task: RangeTask, found: FragmentFiles, start: int, stop: int, until: float, times: PhaseTimes
    ) -> ComputedRange | None:
        """None: nobody died here before. What is done here is left at once, step by step."""
        mine = [item for item in found.tried if item.run == self.job.run]
        hung = sorted(item.row for item in found.hung if item.run == self.job.run and start <= item.row < stop)
        if hung:
            return self._compute_around(task, start, hung[0], self._timed_out_row(task, hung[0]), until, times)
        suspect = narrowest_attempt(mine, start, stop)
        if suspect is None:
            return None
        first, last, deaths = suspect
        if last - first == 1 and deaths >= MIN_DEATHS_TO_BLAME:
            return self._compute_around(task, start, first, _fatal_row(task, first), until, times)
        if first > start:
            return self._compute_in_steps(task, start, first, first - start, until, times)
        step = max(1, (last - first) // BISECTION_STEPS)
        return self._compute_in_steps(task, first, last, step, until, times, deaths + 1 if last - first == 1 else 1)

    def _compute_in_steps(
        self, task: RangeTask, start: int, stop: int, step: int, until: float, times: PhaseTimes, time_number: int = 1
    ) -> ComputedRange:
        """Rows in steps, each marked before and left as a part after it."""
        whole = ComputedRange(start, start)
        while whole.stop < stop and (whole.stop == start or time.monotonic() < until):
            mark = AttemptMark(whole.stop, min(stop, whole.stop + step), self.job.run, time_number)
            with _Timer(times, "checkpoint"):
                self.checkpoints.mark(task, mark)
            piece = self._compute(task, mark.start, mark.stop, until, times)
            with _Timer(times, "checkpoint"):
                self.checkpoints.save(task, piece.start, piece.stop, piece.batches, piece.failures)
                self.checkpoints.unmark(task, mark)
            whole.stop, whole.failed = piece.stop, piece.failed
            whole.computed += piece.computed
            whole.failures += piece.failures
            if piece.failed is not None or piece.stop < mark.stop:
                break
        return whole  # without batches: they are in parts

    def _compute_around(
        self, task: RangeTask, start: int, row: int, failed: FailedRow, until: float, times: PhaseTimes
    ) -> ComputedRange:
        """The rows before one that is not tried again, and that row."""
        if row > start:
            return self._compute_in_steps(task, start, row, row - start, until, times)
        piece = ComputedRange(row, row)
        if self.job.on_error.then == "fail":
            piece.failed = failed
            return piece
        with _Timer(times, "checkpoint"):
            self.checkpoints.save(task, row, row + 1, [self.reader.null_rows(1)], [failed])
        return ComputedRange(row, row + 1, failures=[failed])

    def _timed_out_row(self, task: RangeTask, row: int) -> FailedRow:
        message = f"it did not come back within {self.job.timeout_s:g} s, and its worker had to be ended"
        return FailedRow(task.fragment, row, "TimeoutError", message)

    # --- what is left behind

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
            self.checkpoints.clean_up(task, self.job.run, merge=not whole)

    def _write_or_save(self, task: RangeTask, held: Sequence[ComputedRange], done: RangeResult) -> None:
        """Another worker may have done the same, or makes one part of several right now. Then the driver sees that no
        file came, and has it made when nobody else is at this fragment."""
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
        """The fragment's data file, of what is in hand and of parts."""
        job = self.job
        name = data_file_name(job.identity, task.inputs, incomplete=self.checkpoints.has_failures(task))
        in_hand = {(piece.start, piece.stop): piece.batches for piece in held}
        with_parts = self.checkpoints.scan(task).parts if len(in_hand) != 1 or (0, task.rows) not in in_hand else []
        # what is in hand comes first: parts are read back
        parts = [Part(start, stop) for start, stop in in_hand] + with_parts
        schema = self.reader.schema
        done.size_bytes = self.table.write(name, schema, self._batches(task, parts, in_hand), task.rows)
        self.checkpoints.mark_finished(task, finished_file_name(name, task.before))
        done.file = name

    def _batches(
        self, task: RangeTask, parts: Sequence[Part], in_hand: dict[tuple[int, int], list[Any]]
    ) -> Iterator[Any]:
        chosen = covering_parts(parts, task.rows)
        if not chosen:
            raise PartMissingError(f"parts of fragment {task.fragment}")
        for part, start, stop in chosen:
            batches = in_hand.get((part.start, part.stop)) or self.checkpoints.load(task, part)
            for batch, first in slice_batches(batches, part.start, start, stop):
                if not self.job.masked:
                    yield batch
                    continue
                new = batch.column(batch.schema.get_field_index(COMPUTED_COLUMN))
                old = self.reader.current_values(task.fragment, first, first + batch.num_rows)
                yield merge_kept_values(batch, new, old, self.reader.schema)


def _is_partial_range(task: RangeTask) -> bool:
    """A range that is not all of its fragment: others may have done the rest meanwhile."""
    return task.stop - task.start < task.rows


def _fatal_row(task: RangeTask, row: int) -> FailedRow:
    message = (
        f"its worker died, {MIN_DEATHS_TO_BLAME} times with this row alone (a crash in native code, a kill, no memory)"
    )
    return FailedRow(task.fragment, row, WORKER_DIED, message)


class _Timer:
    """Adds what a block took to one of the times."""

    __slots__ = ("_began", "_name", "_times")

    def __init__(self, times: PhaseTimes, name: str) -> None:
        self._times, self._name = times, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        setattr(self._times, self._name, getattr(self._times, self._name) + time.perf_counter() - self._began)
