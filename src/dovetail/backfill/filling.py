"""What does a worker do with a range of rows? Read, call, keep, and write the file of a fragment that is complete.

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

from dovetail.backfill.calling import Caller
from dovetail.backfill.identity import file_name, files_hash
from dovetail.backfill.job import KILLED, NEW, Done, FailedRow, FillJob, Task, Times
from dovetail.backfill.lance_table import LanceTable
from dovetail.backfill.parts import Gone, PartStore, joined, masked_with
from dovetail.backfill.ranges import Hung, Part, Tried, chain, finished_name, gaps, narrowest
from dovetail.backfill.reading import Reader, Window
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.backfill.calling import Called
    from dovetail.backfill.ranges import Found
    from dovetail.backfill.udf import Udf
    from dovetail.engines.worker import Worker

STEPS = 16
"""Rows in which a worker died are gone through in so many steps."""
PAUSE_S = 0.5
"""After something that is not the function's fault: it may be over by then."""
TOLD = 4_000
LEAST_DEATHS = 2
"""A single row is to blame when it killed so many workers: one may have been killed by somebody else."""


@dataclass(slots=True)
class Piece:
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


class Filler:
    """A stage's function: a list of tasks in, how far each came out."""

    def __init__(self, job: FillJob, udf: Udf) -> None:
        self.job = job
        self.udf = udf

    def code_key(self) -> str:
        """What was measured of one column's function says nothing of another's."""
        return f"fill {self.job.folder} {self.udf.version}"

    def setup(self, worker: Worker) -> None:
        job = self.job
        self.me = (worker.node, worker.id)
        self.table = self._opened()
        self.kept = PartStore(job)
        self._mine = local()
        types = [output.type for output in job.outputs]
        self._first = Caller(self.udf, types, job.on_error, job.batch_size, job.timeout_s, job.slots)
        self._first.setup(worker)
        self._mine.caller = self._first  # what is awaited lives in the event loop of this thread
        self._others: list[Caller] = []

    def _opened(self) -> LanceTable:
        """The version that all read; the newest, if somebody cleaned up: then each fragment is looked at."""
        job = self.job
        try:
            return LanceTable(job.uri, job.storage, job.version)
        except ConfigError:
            return LanceTable(job.uri, job.storage)

    def teardown(self) -> None:
        self._first.teardown()
        for other in self._others:
            other.watchdog.close()

    @property
    def caller(self) -> Caller:
        """Of this thread: with several slots each has its own, and all call the same object."""
        found: Caller | None = getattr(self._mine, "caller", None)
        if found is None:
            found = self._mine.caller = self._first.beside()
            self._others.append(found)
        return found

    @property
    def reader(self) -> Reader:
        found: Reader | None = getattr(self._mine, "reader", None)
        if found is None:
            found = self._mine.reader = Reader(self.table, self.job)
        return found

    def __call__(self, tasks: Sequence[Task]) -> list[Done]:
        return [self._tried(task) for task in tasks]

    def _tried(self, task: Task) -> Done:
        """What is not the function's is told to the driver, which knows how often that was."""
        try:
            if self.table.version != self.job.version and not self._is_as_it_was(task, self.table):
                return Done(task, task.stop, worker=self.me, gone=True)
            return self._fill(task)
        except Exception as error:
            if self._is_gone(task):
                return Done(task, task.stop, worker=self.me, gone=True)
            told = "".join(traceback.format_exception(error))[-TOLD:]
            time.sleep(PAUSE_S)
            return Done(task, task.start, worker=self.me, broken=f"{type(error).__name__}: {error}\n{told}")

    def _is_as_it_was(self, task: Task, table: LanceTable) -> bool:
        ids = table.field_ids()
        watched = {ids[name] for name in self.job.watched if name in ids}
        own = [output.field for output in self.job.outputs]
        return any(
            files_hash(fragment, watched) == task.inputs
            and (not task.before or files_hash(fragment, own) == task.before)
            for fragment in table.fragments()
            if fragment.id == task.fragment
        )

    def _is_gone(self, task: Task) -> bool:
        """Whether it cannot be read because it was rewritten, and what was there before was cleaned up."""
        try:
            return not self._is_as_it_was(task, self.table.newest())
        except Exception:  # nobody knows
            return False

    def _fill(self, task: Task) -> Done:
        times = Times()
        began = time.monotonic()
        until = began + task.budget_s
        done = Done(task, task.stop, times=times, worker=self.me)
        with _timed(times, "read"):
            done.untouched = self.reader.is_untouched(task)
        if done.untouched:
            return done
        with _timed(times, "checkpoint"):
            found = self.kept.look(task)
        pieces: list[Piece] = []
        for start, stop in gaps(found.parts, task.start, task.stop):
            piece = self._careful(task, found, start, stop, until, times) or self._plain(
                task, start, stop, until, times
            )
            pieces.append(piece)
            if piece.stop < stop or piece.failed is not None:
                done.reached, done.failed = piece.stop, piece.failed
                break
        # what is there already was done by one who died before it could say so: ranges are handed out once
        kept = (task.stop - task.start) - sum(stop - start for start, stop in gaps(found.parts, task.start, task.stop))
        done.computed = sum(piece.computed for piece in pieces) + (0 if self.job.masked else kept)
        done.errors = sum(len(piece.failures) for piece in pieces)
        self._leave(task, found, pieces, done)
        return done

    # --- computing

    def _plain(self, task: Task, start: int, stop: int, until: float, times: Times) -> Piece:
        with _timed(times, "checkpoint"):
            self.kept.mark(task, Tried(start, stop, self.job.run))
        return self._compute(task, start, stop, until, times)

    def _compute(self, task: Task, start: int, stop: int, until: float, times: Times) -> Piece:
        piece = Piece(start, start)
        while piece.stop < stop:
            with _timed(times, "read"):
                window = self.reader.window(task, piece.stop, stop)
            with _timed(times, "compute"):
                called = self._call(task, window, until)
            self._take(task, piece, window, called)
            if piece.failed is not None or time.monotonic() >= until or piece.size_bytes >= self.job.part_bytes:
                break
        return piece

    def _call(self, task: Task, window: Window, until: float) -> Called | None:
        if window.batch is None:
            return None

        def condemn(index: int) -> None:
            self.kept.mark(task, Hung(window.row_of(index), self.job.run))

        return self.caller.run(window.batch, until, condemn)

    def _take(self, task: Task, piece: Piece, window: Window, called: Called | None) -> None:
        if called is None:  # nothing in it is to be computed
            piece.add(window.empty(self.job))
            piece.stop = window.stop
            return
        rows = [FailedRow(task.fragment, window.row_of(it.index), it.error_type, it.message, it.traceback, it.exception)
                for it in called.failures]  # fmt: skip
        end = window.end_of(called.rows)
        piece.computed += called.rows
        if called.stopped and rows:
            piece.failed = rows.pop()
            end = piece.failed.offset
        piece.failures += rows
        if end > piece.stop:
            piece.add(window.spread(self.job, called.arrays, end))
        piece.stop = end

    # --- rows that kill workers

    def _careful(self, task: Task, found: Found, start: int, stop: int, until: float, times: Times) -> Piece | None:
        """None: nobody died here before. What is done here is left at once, step by step."""
        mine = [item for item in found.tried if item.run == self.job.run]
        hung = sorted(item.row for item in found.hung if item.run == self.job.run and start <= item.row < stop)
        if hung:
            return self._around(task, start, hung[0], self._overdue(task, hung[0]), until, times)
        suspect = narrowest(mine, start, stop)
        if suspect is None:
            return None
        first, last, deaths = suspect
        if last - first == 1 and deaths >= LEAST_DEATHS:
            return self._around(task, start, first, _killer(task, first), until, times)
        if first > start:
            return self._stepped(task, start, first, first - start, until, times)
        step = max(1, (last - first) // STEPS)
        return self._stepped(task, first, last, step, until, times, deaths + 1 if last - first == 1 else 1)

    def _stepped(
        self, task: Task, start: int, stop: int, step: int, until: float, times: Times, time_number: int = 1
    ) -> Piece:
        """Rows in steps, each marked before and left as a part after it."""
        whole = Piece(start, start)
        while whole.stop < stop and (whole.stop == start or time.monotonic() < until):
            mark = Tried(whole.stop, min(stop, whole.stop + step), self.job.run, time_number)
            with _timed(times, "checkpoint"):
                self.kept.mark(task, mark)
            piece = self._compute(task, mark.start, mark.stop, until, times)
            with _timed(times, "checkpoint"):
                self.kept.save(task, piece.start, piece.stop, piece.batches, piece.failures)
                self.kept.unmark(task, mark)
            whole.stop, whole.failed = piece.stop, piece.failed
            whole.computed += piece.computed
            whole.failures += piece.failures
            if piece.failed is not None or piece.stop < mark.stop:
                break
        return whole  # without batches: they are in parts

    def _around(self, task: Task, start: int, row: int, failed: FailedRow, until: float, times: Times) -> Piece:
        """The rows before one that is not tried again, and that row."""
        if row > start:
            return self._stepped(task, start, row, row - start, until, times)
        piece = Piece(row, row)
        if self.job.on_error.then == "fail":
            piece.failed = failed
            return piece
        with _timed(times, "checkpoint"):
            self.kept.save(task, row, row + 1, [self.reader.nothing(1)], [failed])
        return Piece(row, row + 1, failures=[failed])

    def _overdue(self, task: Task, row: int) -> FailedRow:
        message = f"it did not come back within {self.job.timeout_s:g} s, and its worker had to be ended"
        return FailedRow(task.fragment, row, "TimeoutError", message)

    # --- what is left behind

    def _leave(self, task: Task, found: Found, pieces: Sequence[Piece], done: Done) -> None:
        held = [piece for piece in pieces if piece.batches]
        parts = found.parts + [Part(piece.start, piece.stop) for piece in pieces if piece.stop > piece.start]
        whole = done.failed is None and bool(chain(parts, task.rows))
        with _timed(done.times, "checkpoint"):
            if whole:
                self.kept.set_aside(task, [failure for piece in held for failure in piece.failures])
            else:
                for piece in held:
                    self.kept.save(task, piece.start, piece.stop, piece.batches, piece.failures)
                if done.failed is None and done.reached >= task.stop and _may_be_whole(task):
                    parts = self.kept.look(task).parts
                    whole, held = bool(chain(parts, task.rows)), []
        if whole:
            with _timed(done.times, "write"):
                self._write_or_leave(task, held, done)
        with _timed(done.times, "checkpoint"):
            self.kept.tidy(task, self.job.run, merge=not whole)

    def _write_or_leave(self, task: Task, held: Sequence[Piece], done: Done) -> None:
        """Another worker may have done the same, or makes one part of several right now. Then the driver sees that no
        file came, and has it made when nobody else is at this fragment."""
        try:
            self._write(task, held, done)
        except Gone:
            if task.start == task.stop:
                done.missing = tuple(gaps(self.kept.look(task).parts, 0, task.rows))
                if not done.missing:
                    raise
            for piece in held:
                self.kept.save(task, piece.start, piece.stop, piece.batches, piece.failures)

    def _write(self, task: Task, held: Sequence[Piece], done: Done) -> None:
        """The fragment's data file, of what is in hand and of parts."""
        job = self.job
        name = file_name(job.identity, task.inputs, incomplete=self.kept.has_failures(task))
        in_hand = {(piece.start, piece.stop): piece.batches for piece in held}
        with_parts = self.kept.look(task).parts if len(in_hand) != 1 or (0, task.rows) not in in_hand else []
        # what is in hand comes first: parts are read back
        parts = [Part(start, stop) for start, stop in in_hand] + with_parts
        schema = self.reader.schema
        done.size_bytes = self.table.write(name, schema, self._batches(task, parts, in_hand), task.rows)
        self.kept.finished(task, finished_name(name, task.before))
        done.file = name

    def _batches(self, task: Task, parts: Sequence[Part], in_hand: dict[tuple[int, int], list[Any]]) -> Iterator[Any]:
        chosen = chain(parts, task.rows)
        if not chosen:
            raise Gone(f"parts of fragment {task.fragment}")
        for part, start, stop in chosen:
            batches = in_hand.get((part.start, part.stop)) or self.kept.load(task, part)
            for batch, first in joined(batches, part.start, start, stop):
                if not self.job.masked:
                    yield batch
                    continue
                new = batch.column(batch.schema.get_field_index(NEW))
                old = self.reader.before(task.fragment, first, first + batch.num_rows)
                yield masked_with(batch, new, old, self.reader.schema)


def _may_be_whole(task: Task) -> bool:
    """A range that is not all of its fragment: others may have done the rest meanwhile."""
    return task.stop - task.start < task.rows


def _killer(task: Task, row: int) -> FailedRow:
    message = f"its worker died, {LEAST_DEATHS} times with this row alone (a crash in native code, a kill, no memory)"
    return FailedRow(task.fragment, row, KILLED, message)


class _timed:  # noqa: N801 - reads as a verb
    """Adds what a block took to one of the times."""

    __slots__ = ("_began", "_name", "_times")

    def __init__(self, times: Times, name: str) -> None:
        self._times, self._name = times, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        setattr(self._times, self._name, getattr(self._times, self._name) + time.perf_counter() - self._began)
