"""What becomes of a message, or a call, that a simulated worker was sent?"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dovetail.control.commands import RunBatches
from dovetail.control.events import BatchesDone, BatchesReturned, Cause, Crumb, Failure
from dovetail.control.segments import Segment
from dovetail.engines.simulated.tracked import Attempts, Tracked
from dovetail.engines.simulated.workers import Asked, Running
from dovetail.engines.simulated.world import Hangs, Kills

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.simulated.agenda import Agenda
    from dovetail.engines.simulated.workers import Hosting, Worker
    from dovetail.engines.simulated.world import Key, World


class Messages:
    def __init__(
        self,
        world: World,
        agenda: Agenda,
        lose: Callable[[Worker, Cause, str, tuple[Crumb, ...]], None],
        drained: Callable[[Worker], None],
    ) -> None:
        """`lose` and `drained`: who is told that a worker dies of a message, or may have nothing left to do."""
        self._world = world
        self._agenda = agenda
        self._lose = lose
        self._drained = drained
        self._hop_s = world.hop_s
        self._random = Random(f"{world.seed} crumbs")  # noqa: S311
        self._attempts = Attempts()
        self.segments = 0
        """How many were written so far: the number of the last."""
        self.lost_before: dict[str, int] = {}
        """Node that was lost -> the last segment that may have lain there."""
        self.answered = 0

    def enter(self, hosting: Hosting, item: RunBatches | Asked) -> None:
        if hosting.free and hosting.worker.ready:
            self._begin(hosting, item)
        else:
            hosting.waiting.append(item)

    def go_on(self, hosting: Hosting) -> None:
        """With what waits; and when nothing does, a worker that is to stop is done."""
        waiting = hosting.waiting
        while waiting and hosting.free and hosting.worker.ready:
            self._begin(hosting, waiting.popleft())
        if hosting.worker.stopping:
            self._drained(hosting.worker)

    def take_back(self, worker: Worker, message: int) -> None:
        for hosting in worker.hosting.values():
            for item in hosting.waiting:
                if isinstance(item, RunBatches) and item.message == message:
                    hosting.waiting.remove(item)
                    self._agenda.out.append(BatchesReturned(worker.number, message))
                    self.go_on(hosting)
                    return

    def crumbs_of(self, worker: Worker) -> tuple[Crumb, ...]:
        """Of every call that it was in."""
        if not worker.running or self._random.random() >= self._world.crumbs:
            return ()
        return tuple(self._crumb(running) for running in worker.running.values())

    def _crumb(self, running: Running) -> Crumb:
        message = running.command.message
        if self._random.random() < self._world.inexact:
            return Crumb(message, 0, exact=False)
        return Crumb(message, running.call_at(self._agenda.now, self._hop_s))

    def new_segment(self, items: int, size_bytes: int, node: str, ref: object = None) -> Segment:
        self.segments += 1
        return Segment(self.segments, items, size_bytes, node, ref)

    def _begin(self, hosting: Hosting, item: RunBatches | Asked) -> None:
        """Takes a slot, unless the message's input is not there any more."""
        if type(item) is Asked:
            hosting.free -= 1
            hosting.worker.calls[id(item)] = item
            seconds = hosting.unit.behaviour.seconds_per_item * hosting.slower * hosting.unit.slowed
            self._agenda.at(self._agenda.now + self._hop_s + seconds, self._answer, item)
            return
        assert type(item) is RunBatches
        assert item.items, f"{item} has no items"
        if self.lost_before and self._input_is_lost(item):
            self._agenda.out.append(BatchesReturned(item.worker, item.message))
            return
        hosting.free -= 1
        running = Running(item, hosting, self._agenda.now)
        hosting.worker.running[item.message] = running
        if self._world.tracked:
            running.tracked = Tracked(item, hosting, self._attempts)
            self._next_call(running, self._agenda.now + self._hop_s)
        else:
            self._run_counted(running)

    def _input_is_lost(self, command: RunBatches) -> bool:
        return any(segment.id <= self.lost_before.get(segment.node, 0) for segment, _, _ in command.parts)

    def _run_counted(self, running: Running) -> None:
        command, hosting = running.command, running.hosting
        unit = hosting.unit
        behaviour = unit.behaviour
        calls = -(-command.items // command.batch_size)
        seconds = calls * behaviour.seconds_per_batch + command.items * behaviour.seconds_per_item
        running.seconds = seconds = seconds * unit.factor(calls) * hosting.slower * unit.slowed
        do = self._finish
        if behaviour.memory_items is not None and behaviour.oom == "death" and _calls_too_big(running):
            do, seconds = self._die_of_memory, seconds / calls
        self._agenda.at(self._agenda.now + self._hop_s + seconds, do, running)

    def _die_of_memory(self, running: Running) -> None:
        if running.live:
            worker = running.hosting.worker
            running.seconds = 0.0  # it is the first call, however long it took
            self._lose(worker, Cause.OUT_OF_MEMORY, "signal 9", self.crumbs_of(worker))

    def _next_call(self, running: Running, begins: float) -> None:
        assert running.tracked is not None
        seconds, end = running.tracked.begin_call()
        running.seconds += seconds
        if not isinstance(end, Hangs):
            self._agenda.at(begins + seconds, self._call_ended, (running, end))

    def _call_ended(self, what: tuple[Running, Kills | None]) -> None:
        running, kills = what
        assert running.tracked is not None
        if not running.live:
            return
        if kills is not None:
            worker = running.hosting.worker
            self._lose(worker, kills.cause, kills.detail, self.crumbs_of(worker))
            return
        running.tracked.end_call()
        if running.tracked.more:
            self._next_call(running, self._agenda.now)
        else:
            self._finish(running)

    def _finish(self, running: Running) -> None:
        if not running.live:
            return
        command, hosting, tracked = running.command, running.hosting, running.tracked
        worker, behaviour = hosting.worker, hosting.unit.behaviour
        del worker.running[command.message]
        if tracked is not None:
            failures = tracked.failures
            segments = self._cut(running, len(tracked.out), tracked.out)
        else:
            failures = [] if behaviour.memory_items is None else _calls_too_big(running)
            passed = command.items
            for failure in failures:
                passed -= failure.stop - failure.start
            segments = self._cut(running, hosting.unit.out_of(passed), None)
        self._agenda.out.append(
            BatchesDone(worker.number, command.message, segments, running.seconds, failures, worker.peak_bytes)
        )
        hosting.free += 1
        if hosting.waiting or worker.stopping:
            self.go_on(hosting)

    def _cut(self, running: Running, items: int, keys: list[Key] | None) -> list[Segment]:
        command, each = running.command, running.hosting.unit.behaviour.bytes_out
        node = "" if command.spool else running.hosting.worker.nodes[0]
        segments = []
        for start in range(0, items, command.cut):
            n = min(command.cut, items - start)
            self.segments += 1
            ref = None if keys is None else keys[start : start + n]
            segments.append(Segment(self.segments, n, n * each, node, ref))
        return segments

    def _answer(self, asked: Asked) -> None:
        if not asked.live:
            return
        hosting = asked.hosting
        assert hosting is not None
        del hosting.worker.calls[id(asked)]
        self.answered += 1
        try:
            asked.future.set_result(hosting.answer(asked))
        except Exception as error:  # it is the caller's
            asked.future.set_exception(error)
        hosting.free += 1
        self.go_on(hosting)


def _calls_too_big(running: Running) -> list[Failure]:
    """The calls of a counted message that have more items than there is memory for."""
    command, limit = running.command, running.hosting.unit.behaviour.memory_items
    if limit is None or min(command.batch_size, command.items) <= limit:
        return []
    starts = range(0, command.items, command.batch_size)
    ranges = [(start, min(start + command.batch_size, command.items)) for start in starts]
    return [
        Failure(start, stop, "MemoryError: simulated", out_of_memory=True)
        for start, stop in ranges
        if stop - start > limit
    ]
