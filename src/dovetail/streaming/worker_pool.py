"""Workers of a unit, the messages they hold, and the pool that finds the least loaded one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState, checked_worker_move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.control.payload import SegmentSlice
    from dovetail.resources.seat import Seats
    from dovetail.streaming.epochs import Epoch


@dataclass(slots=True, eq=False)
class HalvedBatch:
    """Two halves of a batch that ran out of memory. If both pass, it was too large; if one does not, it was an item."""

    batch_size: int
    passed: int = 0


@dataclass(slots=True, eq=False)
class Suspect:
    """Items that were there when something went wrong: they run alone, and smaller each time."""

    epoch: Epoch
    parts: list[SegmentSlice]
    items: int
    batch_size: int
    failed_attempts: int
    """How many times they were charged."""
    halved_batch: HalvedBatch | None = None
    """It is one of them."""
    error: str = ""
    detail: str = ""
    keys: tuple[tuple[int, ...], ...] = ()
    """Of its items, where the failure named them."""
    memory_bytes: int = 0
    """It needs a worker with at least so much memory."""


@dataclass(slots=True, eq=False)
class Message:
    """Some batches that one worker has."""

    id: int
    epoch: Epoch
    parts: list[SegmentSlice]
    items: int
    size_bytes: int
    batch_size: int
    sent_at: float
    suspect: Suspect | None = None
    cancelled: bool = False
    deadline_at: float = 0.0
    """When it should have ended, if its unit has a deadline."""
    expected_bytes: int = 0
    """What will probably come out."""
    input_lost: bool = False
    """Some of its input lay on a node that is gone: if it comes back, it cannot be sent again."""


class Worker:
    """One worker of a unit, from the command that starts it to its end."""

    __slots__ = (
        "batches",
        "busy_s",
        "exclusive",
        "has_deadline_timer",
        "id",
        "messages",
        "node",
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
        """In the order sent."""
        self.requested_at = now
        self.ready_at: float | None = None
        self.batches = 0
        self.busy_s = 0.0
        self.exclusive = False
        """It runs a suspect, and nothing beside it."""
        self.stop_reason = ""
        """Why it is being stopped."""
        self.recycling = False
        """It is being replaced by age, or takes the place of one that was."""
        self.has_deadline_timer = False
        """A timer looks at the deadlines of its messages."""
        self.will_be_replaced = False
        """Another takes its seats when it is gone."""

    def transition_to(self, new: WorkerState) -> None:
        self.state = checked_worker_move(self.state, new, self.id)


class WorkerPool:
    """The workers of one unit that can take another message, by how many they have in hand.

    `levels[n]` are those with n in hand: node -> workers, so that one beside the data is found at once. No loop over
    all workers, however many there are.
    """

    __slots__ = ("by_load", "free_count", "max_messages", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.max_messages = slots
        """Messages that a worker may have in hand: its slots, and one in advance where a hop would cost."""
        self.by_load: list[dict[str, dict[int, Worker]]] = [{} for _ in range(slots + 1)]
        self.free_count = 0
        """Workers in all levels below `depth`."""

    def add(self, worker: Worker) -> None:
        level = len(worker.messages)
        if level < len(self.by_load):
            self.by_load[level].setdefault(worker.node, {})[worker.id] = worker
            if level < self.max_messages:
                self.free_count += 1

    def remove(self, worker: Worker) -> None:
        """Before its messages change."""
        level = len(worker.messages)
        if level < len(self.by_load):
            there = self.by_load[level].get(worker.node)
            if there is not None and there.pop(worker.id, None) is not None:
                if level < self.max_messages:
                    self.free_count -= 1
                if not there:
                    del self.by_load[level][worker.node]

    def least_loaded(self, node: str) -> Worker | None:
        """One with the least in hand, on this node if there is such a one there."""
        for level in range(self.max_messages):
            by_node = self.by_load[level]
            if by_node:
                there = by_node.get(node)
                if there is None:
                    there = next(iter(by_node.values()))
                return next(iter(there.values()))
        return None

    def find_idle(self) -> Worker | None:
        """One with nothing in hand."""
        by_node = self.by_load[0]
        return next(iter(next(iter(by_node.values())).values())) if by_node else None

    def with_prefetched(self) -> Iterator[Worker]:
        """Those with a message that waits although their slots are taken, and that another could have."""
        for level in range(len(self.by_load) - 1, self.slots, -1):
            for there in self.by_load[level].values():
                yield from there.values()

    def set_max_messages(self, depth: int) -> None:
        """How many messages a worker may have in hand from now on."""
        self.max_messages = depth
        while len(self.by_load) <= depth:
            self.by_load.append({})
        self.free_count = sum(len(there) for level in self.by_load[:depth] for there in level.values())
