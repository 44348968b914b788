"""Workers of a unit, the messages they hold, and the pool that finds the least loaded one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import LEGAL_WORKER_MOVES, WorkerState, checked_move
from dovetail.control.payload import slice_items, total_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.control.payload import SegmentSlice
    from dovetail.resources.seat import Seats
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.failure_streak import Trial


@dataclass(slots=True, eq=False)
class HalvedBatch:
    """The two halves of a batch that ran out of memory. If both succeed, the batch was too large; if one fails, an item
    is to blame."""

    batch_size: int
    passed: int = 0
    parts: int = 2
    """More if the batch had items of several epochs, which run apart."""

    def count_passed(self) -> bool:
        """Count a part that succeeded; True: all did."""
        self.passed += 1
        return self.passed == self.parts


@dataclass(slots=True, eq=False)
class Suspect:
    """Items that may have caused a failure: they run alone, in smaller groups with each attempt."""

    epoch: Epoch
    parts: list[SegmentSlice]
    items: int
    batch_size: int
    failed_attempts: int
    """How many exceptions these items were charged with."""
    halved_batch: HalvedBatch | None = None
    """Set for one half of a batch that ran out of memory."""
    error: str = ""
    detail: str = ""
    stage: str = ""
    """See `CallFailure`."""
    place: str = ""
    """See `CallFailure`."""
    keys: tuple[tuple[int, ...], ...] = ()
    """Keys of the items, if the failure named them."""
    memory_bytes: int = 0
    """The worker must have at least this much memory."""
    deaths: int = 0
    """How many deaths of workers these items were charged with."""
    failed_on: int = 0
    """The worker in which their last call raised; 0: none did."""
    trial: Trial | None = None
    """The trial for which they run."""
    broke_worker: bool = False
    """Their worker was broken after they failed in it: if they fail again, they are to blame."""

    @property
    def needs_sound_worker(self) -> bool:
        """Whether a failure must not be the fault of the worker."""
        return self.trial is not None or self.broke_worker

    def require_memory(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes

    def accept_any_worker(self) -> None:
        self.memory_bytes = 0


@dataclass(slots=True, eq=False)
class Message:
    """Batches that were sent to one worker together."""

    id: int
    epoch: Epoch
    parts: list[SegmentSlice]
    items: int
    size_bytes: int
    batch_size: int
    sent_at: float
    suspect: Suspect | None = None
    expected_bytes: int = 0
    """Estimated output."""
    timeout_at: float = math.inf
    """When the message counts as hung, if its unit has a timeout."""
    cancelled: bool = False
    input_lost: bool = False
    """Some of its input was lost with a node: if the message is returned, it cannot be sent again."""
    more_epochs: tuple[tuple[int, Epoch], ...] = ()
    """If a batch is filled across epochs: index of the first item of each further epoch, and the epoch."""

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        return (self.epoch, *(epoch for _, epoch in self.more_epochs))

    @property
    def is_discarded(self) -> bool:
        """Whether nothing of it is needed any more."""
        return self.epoch.discarded and all(epoch.discarded for _, epoch in self.more_epochs)

    def by_epoch(self, start: int = 0, stop: int | None = None) -> list[tuple[int, Message]]:
        """Items [start, stop) as one message per epoch that is still needed, and the index of its first item."""
        stop = self.items if stop is None else stop
        if not self.more_epochs and (start, stop) == (0, self.items):
            return [(0, self)]
        found = []
        begins = [0, *(index for index, _ in self.more_epochs)]
        ends = [*begins[1:], self.items]
        for begin, end, epoch in zip(begins, ends, self.epochs, strict=True):
            first, last = max(begin, start), min(end, stop)
            if first < last and not epoch.discarded:
                parts = slice_items(self.parts, first, last)
                size = total_bytes(parts)
                own = replace(self, epoch=epoch, parts=parts, items=last - first, size_bytes=size, more_epochs=())
                found.append((first, own))
        return found

    def set_timeout(self, at: float) -> None:
        self.timeout_at = at

    def mark_cancelled(self) -> None:
        self.cancelled = True

    def mark_input_lost(self) -> None:
        self.input_lost = True

    def set_more_epochs(self, epochs: tuple[tuple[int, Epoch], ...]) -> None:
        self.more_epochs = epochs


class Worker:
    """One worker of a unit, from the command that starts it to its end."""

    __slots__ = (
        "batches",
        "busy_s",
        "exclusive",
        "has_timeout_timer",
        "id",
        "is_broken",
        "messages",
        "node",
        "paused",
        "ready_at",
        "recycling",
        "requested_at",
        "seats",
        "state",
        "stop_reason",
        "unit",
        "will_be_replaced",
    )

    def __init__(self, number: int, unit: str, seats: Seats, now: float) -> None:
        self.id = number
        self.unit = unit
        self.seats = seats
        self.node = seats[0].node
        self.state = WorkerState.STARTING
        self.messages: dict[int, Message] = {}
        """Messages at the worker, in the order sent."""
        self.requested_at = now
        self.ready_at: float | None = None
        self.batches = 0
        self.busy_s = 0.0
        self.exclusive = False
        """It runs a suspect and nothing else, or waits until it can."""
        self.paused = False
        """It gets no messages until a trial has shown whether it is broken."""
        self.is_broken = False
        """It is replaced because it is broken."""
        self.stop_reason = ""
        self.recycling = False
        """It is being replaced because of its age, or replaces such a worker."""
        self.has_timeout_timer = False
        """A timer watches the timeouts of its messages."""
        self.will_be_replaced = False
        """Another worker takes its seats when it is gone."""

    def transition_to(self, new: WorkerState, reason: str | None = None) -> None:
        """Change the state; `reason`: why the worker is drained or stopped."""
        self.state = checked_move(LEGAL_WORKER_MOVES, self.state, new, f"worker {self.id}")
        if reason is not None:
            self.stop_reason = reason

    def mark_ready(self, now: float) -> None:
        self.transition_to(WorkerState.READY)
        self.ready_at = now

    def take_messages(self) -> list[Message]:
        """Return all messages and forget them: the worker is gone."""
        messages = list(self.messages.values())
        self.messages.clear()
        return messages

    def count_batches(self, batches: int, seconds: float) -> None:
        self.batches += batches
        self.busy_s += seconds

    def make_exclusive(self) -> None:
        self.exclusive = True

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def mark_broken(self) -> None:
        self.is_broken = True

    def set_timeout_timer(self, running: bool) -> None:
        self.has_timeout_timer = running

    def set_will_be_replaced(self, replaced: bool) -> None:
        self.will_be_replaced = replaced

    def begin_recycling(self) -> None:
        self.recycling = self.will_be_replaced = True

    def end_recycling(self) -> None:
        self.recycling = False

    def hand_over_recycling(self, successor: Worker) -> None:
        """The successor counts as the recycled worker until it is ready."""
        self.recycling, successor.recycling = False, True


class WorkerPool:
    """Workers of one unit that can take another message, by the number of messages they hold.

    `by_load[n]` contains the workers with n messages: node -> workers, so that a worker on the node of the data is
    found without a loop over all workers.
    """

    __slots__ = ("by_load", "free_count", "max_messages", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.max_messages = slots
        """Messages that a worker may hold: its slots, and one in advance if the transport time matters."""
        self.by_load: list[dict[str, dict[int, Worker]]] = [{} for _ in range(slots + 1)]
        self.free_count = 0
        """Workers that hold fewer than `max_messages`."""

    def add(self, worker: Worker) -> None:
        level = len(worker.messages)
        if level < len(self.by_load):
            self.by_load[level].setdefault(worker.node, {})[worker.id] = worker
            if level < self.max_messages:
                self.free_count += 1

    def remove(self, worker: Worker) -> None:
        """Remove a worker. Call it before the worker's messages change."""
        level = len(worker.messages)
        if level < len(self.by_load):
            on_node = self.by_load[level].get(worker.node)
            if on_node is not None and on_node.pop(worker.id, None) is not None:
                if level < self.max_messages:
                    self.free_count -= 1
                if not on_node:
                    del self.by_load[level][worker.node]

    def assign(self, worker: Worker, message: Message) -> None:
        """Give a worker a message; a suspect gets the worker for itself, outside the pool."""
        self.remove(worker)
        worker.messages[message.id] = message
        if message.suspect is None:
            self.add(worker)
        else:
            worker.exclusive = True

    def release(self, worker: Worker, message: Message) -> bool:
        """Take a message from a worker, which returns to the pool if it can; True: it was exclusive until now."""
        was_exclusive = worker.exclusive
        if not was_exclusive:
            self.remove(worker)
        del worker.messages[message.id]
        if was_exclusive and not worker.messages:
            worker.exclusive = False
        if not (worker.exclusive or worker.paused) and worker.state is WorkerState.READY:
            self.add(worker)
        return was_exclusive and not worker.exclusive

    def least_loaded(self, node: str) -> Worker | None:
        """A worker with the fewest messages, on this node if one of them is there."""
        for level in range(self.max_messages):
            by_node = self.by_load[level]
            if by_node:
                on_node = by_node.get(node)
                if on_node is None:
                    on_node = next(iter(by_node.values()))
                return next(iter(on_node.values()))
        return None

    def find_idle(self) -> Worker | None:
        """A worker without messages."""
        by_node = self.by_load[0]
        return next(iter(next(iter(by_node.values())).values())) if by_node else None

    def is_idle(self, worker: Worker) -> bool:
        return worker.id in self.by_load[0].get(worker.node, ())

    def idle_workers(self) -> Iterator[Worker]:
        """All workers without messages."""
        for on_node in self.by_load[0].values():
            yield from on_node.values()

    def with_prefetched(self) -> Iterator[Worker]:
        """Workers with a message beyond their slots, which another worker could run."""
        for level in range(len(self.by_load) - 1, self.slots, -1):
            for on_node in self.by_load[level].values():
                yield from on_node.values()

    def set_max_messages(self, depth: int) -> None:
        """Set the number of messages that a worker may hold."""
        self.max_messages = depth
        while len(self.by_load) <= depth:
            self.by_load.append({})
        self.free_count = sum(len(on_node) for level in self.by_load[:depth] for on_node in level.values())
