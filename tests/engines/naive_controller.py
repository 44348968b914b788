"""Minimal controller: one unit, one message per segment; lost messages are sent again and lost workers replaced."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dovetail.control.commands import Deliver, HostedObject, Pull, RunBatches, StartWorker, StopWorker
from dovetail.control.events import BatchesDone, InputEnded, ItemsArrived, WorkerLost, WorkerReady, WorkerStopped
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.control.payload import Segment


class NaiveController:
    def __init__(
        self, hosted: HostedObject, *, workers: int, items: int, batch_size: int = 1, node: str = "node-0"
    ) -> None:
        self._hosted = hosted
        self._wanted = workers
        self._items = items
        self._batch_size = batch_size
        self._node = node
        self._started = self._sent = 0
        self._alive: set[int] = set()
        self._idle: deque[int] = deque()
        self._waiting: deque[Segment] = deque()
        self._in_flight: dict[int, tuple[int, Segment]] = {}
        self._out: list[Segment] = []
        self._ended = self._delivered = False
        self.deaths = 0

    @property
    def done(self) -> bool:
        return self._delivered and not self._alive

    def wake_at(self) -> float | None:
        return None

    def step(self, now: float, events: Sequence[Event]) -> list[Command]:
        commands: list[Command] = [] if self._started else [Pull(0, self._items)]
        for event in events:
            self._hear(event)
        finished = self._ended and not self._waiting and not self._in_flight
        if finished and not self._delivered:
            self._delivered = True
            commands.append(Deliver(0, 0, 0, self._items, {self._hosted.name: self._out}))
            commands += [StopWorker(worker) for worker in sorted(self._alive)]
        while not self._delivered and len(self._alive) < self._wanted:
            self._alive.add(self._started)
            commands.append(StartWorker(self._started, (Seat(self._node, 100),), (self._hosted,)))
            self._started += 1
        while self._idle and self._waiting:
            commands.append(self._send(self._idle.popleft(), self._waiting.popleft()))
        return commands

    def _hear(self, event: Event) -> None:
        match event:
            case ItemsArrived(_, segments):
                self._waiting.extend(segments)
            case InputEnded():
                self._ended = True
            case WorkerReady(worker):
                self._idle.append(worker)
            case BatchesDone(worker, message, segments):
                self._in_flight.pop(message)
                self._out += segments
                self._idle.append(worker)
            case WorkerLost(worker) | WorkerStopped(worker):
                self._alive.discard(worker)
                self.deaths += isinstance(event, WorkerLost)
                self._idle = deque(other for other in self._idle if other != worker)
                lost = [message for message, (by, _) in self._in_flight.items() if by == worker]
                self._waiting.extend(self._in_flight.pop(message)[1] for message in lost)

    def _send(self, worker: int, segment: Segment) -> RunBatches:
        self._sent += 1
        self._in_flight[self._sent] = (worker, segment)
        parts = [(segment, 0, segment.items)]
        return RunBatches(self._sent, worker, self._hosted.name, parts, segment.items, self._batch_size, 100)
