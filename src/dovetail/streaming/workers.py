"""Which workers does a unit have, and which of them gets the next message?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState, checked_worker_move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.resources.seat import Seats
    from dovetail.streaming.messages import Message


class Worker:
    """One worker of a unit, from the command that starts it to its end."""

    __slots__ = (
        "asked_at",
        "batches",
        "busy_s",
        "exclusive",
        "id",
        "messages",
        "node",
        "ready_at",
        "reason",
        "recycling",
        "replaced",
        "seats",
        "state",
        "unit",
        "watched",
    )

    def __init__(self, number: int, unit: str, seats: Seats, now: float) -> None:
        self.id = number
        self.unit = unit
        self.seats = seats
        self.node = seats[0].node
        self.state = WorkerState.STARTING
        self.messages: dict[int, Message] = {}
        """In the order sent."""
        self.asked_at = now
        self.ready_at: float | None = None
        self.batches = 0
        self.busy_s = 0.0
        self.exclusive = False
        """It runs a suspect, and nothing beside it."""
        self.reason = ""
        """Why it is being stopped."""
        self.recycling = False
        """It is being replaced by age, or takes the place of one that was."""
        self.watched = False
        """A timer looks at the deadlines of its messages."""
        self.replaced = False
        """Another takes its seats when it is gone."""

    def move(self, new: WorkerState) -> None:
        self.state = checked_worker_move(self.state, new, self.id)


class Pool:
    """The workers of one unit that can take another message, by how many they have in hand.

    `levels[n]` are those with n in hand: node -> workers, so that one beside the data is found at once. No loop over
    all workers, however many there are.
    """

    __slots__ = ("depth", "free", "levels", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.depth = slots
        """Messages that a worker may have in hand: its slots, and one in advance where a hop would cost."""
        self.levels: list[dict[str, dict[int, Worker]]] = [{} for _ in range(slots + 1)]
        self.free = 0
        """Workers in all levels below `depth`."""

    def add(self, worker: Worker) -> None:
        level = len(worker.messages)
        if level < len(self.levels):
            self.levels[level].setdefault(worker.node, {})[worker.id] = worker
            if level < self.depth:
                self.free += 1

    def remove(self, worker: Worker) -> None:
        """Before its messages change."""
        level = len(worker.messages)
        if level < len(self.levels):
            there = self.levels[level].get(worker.node)
            if there is not None and there.pop(worker.id, None) is not None:
                if level < self.depth:
                    self.free -= 1
                if not there:
                    del self.levels[level][worker.node]

    def best(self, node: str) -> Worker | None:
        """One with the least in hand, on this node if there is such a one there."""
        for level in range(self.depth):
            by_node = self.levels[level]
            if by_node:
                there = by_node.get(node)
                if there is None:
                    there = next(iter(by_node.values()))
                return next(iter(there.values()))
        return None

    def idle(self) -> Worker | None:
        """One with nothing in hand."""
        by_node = self.levels[0]
        return next(iter(next(iter(by_node.values())).values())) if by_node else None

    def laden(self) -> Iterator[Worker]:
        """Those with a message that waits although their slots are taken, and that another could have."""
        for level in range(len(self.levels) - 1, self.slots, -1):
            for there in self.levels[level].values():
                yield from there.values()

    def set_depth(self, depth: int) -> None:
        """How many messages a worker may have in hand from now on."""
        self.depth = depth
        while len(self.levels) <= depth:
            self.levels.append({})
        self.free = sum(len(there) for level in self.levels[:depth] for there in level.values())
