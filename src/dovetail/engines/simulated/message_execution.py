"""Simulated execution of messages and calls, counted or tracked item by item."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any, cast

from dovetail.control.commands import RunBatches
from dovetail.control.events import BatchesDone, BatchesReturned, Breadcrumb, CallFailure, LossCause
from dovetail.control.payload import Segment
from dovetail.engines.call_future import CallDeadlines, deadline_error
from dovetail.engines.epoch_starts import EpochStarts
from dovetail.engines.simulated.worker_model import CallRequest, RunningMessage
from dovetail.engines.simulated.world import Gives, Hangs, Key, Kills, OutOfMemory, Raises, Slow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.control.payload import SegmentSlice
    from dovetail.engines.call_future import WorkerCallFuture
    from dovetail.engines.item_keys import CountChange
    from dovetail.engines.simulated.engine import EventQueue
    from dovetail.engines.simulated.worker_model import SimulatedObject, SimulatedWorker
    from dovetail.engines.simulated.world import ItemOutcome, World

Attempts = Counter[tuple[str, Key]]


def part_keys(parts: Iterable[SegmentSlice]) -> list[Key]:
    return [key for segment, start, stop in parts for key in cast("list[Key]", segment.ref)[start:stop]]


class TrackedMessage:
    """A message that a worker runs, call by call."""

    __slots__ = (
        "_attempts",
        "_batch_size",
        "_call",
        "_end",
        "_hosting",
        "_keys",
        "changes",
        "failures",
        "index",
        "out",
    )

    def __init__(self, command: RunBatches, hosting: SimulatedObject, attempts: Attempts) -> None:
        self._keys = part_keys(command.parts)
        assert len(self._keys) == command.items, (
            f"message {command.message} has {self._keys} items, not {command.items}"
        )
        self._batch_size = command.batch_size
        self._hosting = hosting
        self._attempts = attempts
        self.index = 0
        self.out: list[Key] = []
        self.failures: list[CallFailure] = []
        self.changes: list[CountChange] = []
        """Calls whose results do not correspond one to one to their items."""
        self._call: list[Key] = []
        self._end: ItemOutcome | None = None

    @property
    def has_more(self) -> bool:
        return self.index < len(self._keys)

    def begin_call(self) -> tuple[float, Kills | Hangs | None]:
        """Duration of the call, and its effect on the worker."""
        keys = self._keys[self.index : self.index + self._batch_size]
        unit = self._hosting.unit
        behaviour = unit.behaviour
        weight = 0.0
        self._call, self._end = [], None
        for key in keys:
            outcome = self._draw_outcome(key, len(keys))
            match outcome:
                case Gives(n):
                    self._call += [key] if n == 1 else [(*key, child) for child in range(n)]
                case Slow(factor):
                    weight += factor - 1
                    self._call.append(key)
                case _:
                    self._end = outcome
                    break
        time = behaviour.seconds_per_batch + (len(keys) + weight) * behaviour.seconds_per_item
        if isinstance(self._end, OutOfMemory) and behaviour.oom == "death":
            self._end = Kills(LossCause.OUT_OF_MEMORY, 9)
        seconds = time * unit.factor(1) * self._hosting.slower * unit.slowed
        return seconds, self._end if isinstance(self._end, Kills | Hangs) else None

    def end_call(self) -> None:
        start, stop = self.index, min(self.index + self._batch_size, len(self._keys))
        if self._end is None:
            self.out += self._call
        else:
            memory = isinstance(self._end, OutOfMemory)
            error = self._end.text if isinstance(self._end, Raises) else "MemoryError: simulated"
            keys = tuple(self._keys[start:stop])
            broken = isinstance(self._end, Raises) and self._end.worker_broken
            failure = CallFailure(start, stop, error, out_of_memory=memory, keys=keys, worker_broken=broken)
            self.failures.append(failure)
        given = self._call if self._end is None else []
        if len(given) != stop - start:  # a real worker does not see which item a result belongs to, either
            self.changes.append((start, stop, len(given)))
        self.index = stop

    def _draw_outcome(self, key: Key, together: int) -> ItemOutcome:
        unit = self._hosting.unit
        limit = unit.behaviour.memory_items
        if limit is not None and together > limit:
            return OutOfMemory()
        if key in unit.behaviour.poison:
            self._hosting.poison()
        if self._hosting.broken:
            self._attempts[unit.name, key] += 1
            return Raises("RuntimeError: the worker is poisoned")
        if unit.behaviour.item is None:
            return Gives(unit.outputs_of_item(sum(key)))
        self._attempts[unit.name, key] += 1
        return unit.behaviour.item(key, self._attempts[unit.name, key])


class MessageExecutor:
    def __init__(
        self,
        world: World,
        agenda: EventQueue,
        lose: Callable[[SimulatedWorker, LossCause, str, tuple[Breadcrumb, ...]], None],
        drained: Callable[[SimulatedWorker], None],
    ) -> None:
        """`lose` and `drained`: called when a message kills its worker, and when a worker may have no work left."""
        self._world = world
        self._agenda = agenda
        self._lose_worker = lose
        self._on_drained = drained
        self._hop_s = world.hop_s
        self._random = Random(f"{world.seed} crumbs")  # noqa: S311
        self._attempts = Attempts()
        self.segments = 0
        """Number of the last segment written."""
        self.lost_before: dict[str, int] = {}
        """Lost node -> the last segment that may have been stored there."""
        self.answered = 0
        self._calls: dict[int, CallRequest] = {}
        """Unanswered calls, by number."""
        self.deadlines = CallDeadlines()

    def enqueue(self, hosting: SimulatedObject, item: RunBatches | CallRequest) -> None:
        if hosting.free and hosting.worker.ready:
            self._start(hosting, item)
        else:
            hosting.waiting.append(item)

    def enqueue_call(self, hosting: SimulatedObject, asked: CallRequest) -> None:
        asked.hosting = hosting
        self._calls[asked.future.number] = asked
        if asked.takes_slot:
            self.enqueue(hosting, asked)
        elif hosting.worker.ready:
            self._start(hosting, asked)
        else:
            hosting.waiting.appendleft(asked)
        if asked.deadline_s is not None:
            self.deadlines.add(asked.future.number, self._agenda.now + asked.deadline_s)

    def end_overdue(self) -> None:
        """End the calls whose deadline has passed."""
        for number in self.deadlines.take_due(self._agenda.now):
            asked = self._calls[number]
            self.withdraw(asked.future)
            self.answered += 1
            if asked.future.set_running_or_notify_cancel():
                asked.future.set_exception(deadline_error(asked.deadline_s or 0.0))

    def withdraw(self, call: WorkerCallFuture) -> bool:
        """Forget a call: it does not start, or its result is dropped. False: it was answered."""
        asked = self._calls.pop(call.number, None)
        if asked is None:
            return False
        self.deadlines.discard(call.number)
        hosting = asked.hosting
        assert hosting is not None
        if asked in hosting.waiting:
            hosting.waiting.remove(asked)
            self.start_waiting(hosting)
        return True

    def end_call(self, asked: CallRequest, error: BaseException | None, value: Any = None) -> None:
        """Complete the future of a call, unless it was withdrawn."""
        if self._calls.pop(asked.future.number, None) is None:
            return
        self.deadlines.discard(asked.future.number)
        self.answered += 1
        if not asked.future.set_running_or_notify_cancel():
            return
        if error is None:
            asked.future.set_result(value)
        else:
            asked.future.set_exception(error)

    def start_waiting(self, hosting: SimulatedObject) -> None:
        """Start waiting messages; a stopping worker without work ends."""
        waiting = hosting.waiting
        while waiting and hosting.free and hosting.worker.ready:
            self._start(hosting, waiting.popleft())
        if hosting.worker.stopping:
            self._on_drained(hosting.worker)

    def cancel(self, worker: SimulatedWorker, message: int) -> None:
        for hosting in worker.hosting.values():
            for item in hosting.waiting:
                if isinstance(item, RunBatches) and item.message == message:
                    hosting.waiting.remove(item)
                    self._agenda.out.append(BatchesReturned(worker.number, message))
                    self.start_waiting(hosting)
                    return

    def breadcrumbs_of(self, worker: SimulatedWorker) -> tuple[Breadcrumb, ...]:
        """Breadcrumbs of all running calls."""
        if not worker.running or self._random.random() >= self._world.breadcrumb_share:
            return ()
        return tuple(self._breadcrumb(running) for running in worker.running.values())

    def _breadcrumb(self, running: RunningMessage) -> Breadcrumb:
        message = running.command.message
        if self._random.random() < self._world.inexact_share:
            return Breadcrumb(message, 0, exact=False)
        return Breadcrumb(message, running.call_at(self._agenda.now, self._hop_s))

    def new_segment(self, items: int, size_bytes: int, node: str, ref: object = None) -> Segment:
        self.segments += 1
        return Segment(self.segments, items, size_bytes, node, ref)

    def _start(self, hosting: SimulatedObject, item: RunBatches | CallRequest) -> None:
        """Occupy a slot, unless the message's input was lost."""
        if type(item) is CallRequest:
            hosting.free -= item.takes_slot
            hosting.worker.calls[id(item)] = item
            seconds = hosting.unit.behaviour.seconds_per_item * hosting.slower * hosting.unit.slowed
            self._agenda.schedule(self._agenda.now + self._hop_s + seconds, self._answer, item)
            return
        assert type(item) is RunBatches
        assert item.items, f"{item} has no items"
        if self.lost_before and self._input_is_lost(item):
            self._agenda.out.append(BatchesReturned(item.worker, item.message))
            return
        hosting.free -= 1
        running = RunningMessage(item, hosting, self._agenda.now)
        hosting.worker.running[item.message] = running
        if self._world.tracked:
            running.tracked = TrackedMessage(item, hosting, self._attempts)
            self._next_call(running, self._agenda.now + self._hop_s)
        else:
            self._run_counted(running)

    def _input_is_lost(self, command: RunBatches) -> bool:
        return any(segment.id <= self.lost_before.get(segment.node, 0) for segment, _, _ in command.parts)

    def _run_counted(self, running: RunningMessage) -> None:
        command, hosting = running.command, running.hosting
        unit = hosting.unit
        behaviour = unit.behaviour
        calls = -(-command.items // command.batch_size)
        seconds = calls * behaviour.seconds_per_batch + command.items * behaviour.seconds_per_item
        running.seconds = seconds = seconds * unit.factor(calls) * hosting.slower * unit.slowed
        do = self._finish
        if behaviour.memory_items is not None and behaviour.oom == "death" and _out_of_memory_failures(running):
            do, seconds = self._die_of_memory, seconds / calls
        self._agenda.schedule(self._agenda.now + self._hop_s + seconds, do, running)

    def _die_of_memory(self, running: RunningMessage) -> None:
        if running.live:
            worker = running.hosting.worker
            running.seconds = 0.0  # it is the first call, whatever its duration
            self._lose_worker(worker, LossCause.OUT_OF_MEMORY, "signal 9", self.breadcrumbs_of(worker))

    def _next_call(self, running: RunningMessage, begins: float) -> None:
        assert running.tracked is not None
        seconds, end = running.tracked.begin_call()
        running.seconds += seconds
        if not isinstance(end, Hangs):
            self._agenda.schedule(begins + seconds, self._call_ended, (running, end))

    def _call_ended(self, what: tuple[RunningMessage, Kills | None]) -> None:
        running, kills = what
        assert running.tracked is not None
        if not running.live:
            return
        if kills is not None:
            worker = running.hosting.worker
            self._lose_worker(worker, kills.cause, kills.detail, self.breadcrumbs_of(worker))
            return
        running.tracked.end_call()
        if running.tracked.has_more:
            self._next_call(running, self._agenda.now)
        else:
            self._finish(running)

    def _finish(self, running: RunningMessage) -> None:
        if not running.live:
            return
        command, hosting, tracked = running.command, running.hosting, running.tracked
        worker, behaviour = hosting.worker, hosting.unit.behaviour
        del worker.running[command.message]
        if tracked is not None:
            failures = tracked.failures
            out, changes = len(tracked.out), tracked.changes
        else:
            failures = [] if behaviour.memory_items is None else _out_of_memory_failures(running)
            passed = command.items
            for failure in failures:
                passed -= failure.stop - failure.start
            out = hosting.unit.output_count(passed)
            changes = [(0, command.items, out)] if out != command.items else []
        segments, epoch_segments = self._cut_segments(running, out, None if tracked is None else tracked.out, changes)
        done = BatchesDone(worker.number, command.message, segments, running.seconds, failures, worker.peak_bytes)
        done.epoch_segments = epoch_segments
        self._agenda.out.append(done)
        hosting.free += 1
        if hosting.waiting or worker.stopping:
            self.start_waiting(hosting)

    def _cut_segments(
        self, running: RunningMessage, items: int, keys: list[Key] | None, changes: list[CountChange]
    ) -> tuple[list[Segment], list[int] | None]:
        """The segments of the output, and how many belong to each epoch of the message."""
        command, each = running.command, running.hosting.unit.behaviour.bytes_out
        node = "" if command.spool else running.hosting.worker.nodes[0]
        starts = EpochStarts(command.epoch_starts) if command.epoch_starts else None
        edges = [0, items]
        if starts is not None:
            starts.apply(changes)
            edges = [0, *starts.positions, items]
        segments = []
        begins = []
        for begin, end in pairwise(edges):
            for start in range(begin, end, command.segment_items):
                n = min(command.segment_items, end - start)
                self.segments += 1
                ref = None if keys is None else keys[start : start + n]
                segments.append(Segment(self.segments, n, n * each, node, ref))
                begins.append(start)
        return segments, None if starts is None else starts.segment_counts(begins)

    def _answer(self, asked: CallRequest) -> None:
        if not asked.live:
            return
        hosting = asked.hosting
        assert hosting is not None
        del hosting.worker.calls[id(asked)]
        try:
            value = hosting.answer(asked)
        except Exception as error:  # passed to the caller
            self.end_call(asked, error)
        else:
            self.end_call(asked, None, value)
        hosting.free += asked.takes_slot
        self.start_waiting(hosting)


def _out_of_memory_failures(running: RunningMessage) -> list[CallFailure]:
    """The calls of a counted message that have more items than fit in memory."""
    command, limit = running.command, running.hosting.unit.behaviour.memory_items
    if limit is None or min(command.batch_size, command.items) <= limit:
        return []
    starts = range(0, command.items, command.batch_size)
    ranges = [(start, min(start + command.batch_size, command.items)) for start in starts]
    return [
        CallFailure(start, stop, "MemoryError: simulated", out_of_memory=True)
        for start, stop in ranges
        if stop - start > limit
    ]
