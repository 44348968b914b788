"""Which input is finished as a whole? One counter per epoch and unit, instead of a lineage per item."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.control.commands import SetAside
    from dovetail.control.segments import Part, Segment

Place = tuple[int, ...]
"""Where in the order of the source something belongs."""


class Epoch:
    """A stretch [first, last) of the input of a wave, and how far it is."""

    __slots__ = (
        "aside",
        "bytes",
        "closed",
        "complete",
        "dead",
        "first",
        "goal",
        "id",
        "last",
        "left",
        "opened_at",
        "outputs",
        "pending",
        "read_bytes",
        "source",
        "spooled",
        "unsorted",
    )

    def __init__(self, number: int, first: int, units: int, now: float) -> None:
        self.id = number
        self.first = first
        self.last = first
        self.goal = 1
        """Items after which it is closed."""
        self.opened_at = now
        self.closed = False
        """No more input will be added."""
        self.dead = False
        """It begins anew as another epoch: whatever still comes of this one is ignored."""
        self.bytes = 0
        """Of its input and of the results it holds."""
        self.read_bytes = 0
        """Of its input, whether or not it is kept."""
        self.pending = [0] * units
        """Per unit of the wave: items that wait for it or are with its workers."""
        self.complete = [False] * units
        """Per unit: nothing more will come to it, and it has nothing."""
        self.left = units
        self.source: list[tuple[str, Part]] = []
        """Its input, kept until it is finished: (unit, or empty for a source item, part)."""
        self.outputs: dict[str, list[Segment]] = {}
        self.spooled: dict[str, list[Segment]] = {}
        self.aside: list[SetAside] = []
        self.unsorted: dict[int, list[tuple[Place, Segment]]] = {}
        """Unit (its place in the wave) -> what waits until all of its input is there and can be sorted."""

    @property
    def finished(self) -> bool:
        return not self.left

    def lies_on(self, node: str) -> bool:
        """Whether a result that it holds lies on this node."""
        held = (*self.outputs.values(), *self.spooled.values())
        waiting = (segment for pairs in self.unsorted.values() for _, segment in pairs)
        return any(one.node == node for segments in (*held, waiting) for one in segments)


def gaps_of(done: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """What is not covered below the highest end, and that end."""
    gaps: list[tuple[int, int]] = []
    reached = 0
    for first, last in sorted(done):
        if first > reached:
            gaps.append((reached, first))
        reached = max(reached, last)
    return gaps, reached
