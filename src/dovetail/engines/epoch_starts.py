"""Epochs in a message: where each further epoch begins, among the items and, after every stage, among the results.

A call that returns as many items as it gets is taken to return one result per item, in their order. If it returns
another number, or an object that it got from the other epoch, the results of the two epochs cannot be separated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Self

from dovetail.control.events import JOINED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.engines.item_keys import CountChange


VALUE_TYPES = frozenset({int, float, complex, bool, str, bytes, tuple, frozenset, type(None)})
"""Types of which equal objects may be the same object."""


class EpochStarts:
    """Position of the first item of every epoch but the first."""

    __slots__ = ("joined", "positions")

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = list(positions)
        self.joined = [False] * len(self.positions)
        """For each position, whether a call with items of both sides returned results that cannot be separated."""

    def apply_call(self, changes: Sequence[CountChange], items: Sequence[Any], results: Sequence[Any]) -> None:
        """Move the positions from the input of a stage to its output, and look for items that changed sides."""
        before = list(self.positions)
        self.apply(changes)
        ids = [0 if type(item) in VALUE_TYPES else id(item) for item in items]
        for number, (old, new) in enumerate(zip(before, self.positions, strict=True)):
            first, second = set(ids[:old]), set(ids[old:])
            moved = any(id(result) in second - first for result in results[:new]) or any(
                id(result) in first - second for result in results[new:]
            )
            self.joined[number] = self.joined[number] or moved

    def apply(self, changes: Sequence[CountChange]) -> None:
        """Move the positions from the input of a stage to its output."""
        at = shift = 0
        positions = self.positions
        for start, stop, count in changes:
            while at < len(positions) and positions[at] <= start:
                positions[at] += shift
                at += 1
            while at < len(positions) and positions[at] < stop:
                positions[at] = start + shift + count
                self.joined[at] = self.joined[at] or count > 0
                at += 1
            shift += count - (stop - start)
        for later in range(at, len(positions)):
            positions[later] += shift

    def inside(self, begin: int, end: int) -> Self:
        """The starts strictly between two items, counted from the first of them."""
        return type(self)([position - begin for position in self.positions if begin < position < end])

    def keep(self, kept: Sequence[int]) -> None:
        """Only these results (ascending positions) are kept."""
        self.positions = [bisect_left(kept, position) for position in self.positions]

    def segment_counts(self, segment_starts: Sequence[int]) -> list[int]:
        """Segments per epoch, for segments that begin at these positions and end with their epoch; or JOINED."""
        counts = [0] * (len(self.positions) + 1)
        for start in segment_starts:
            counts[bisect_right(self.positions, start)] += 1
        for epoch in range(len(self.positions), 0, -1):
            if self.joined[epoch - 1]:
                counts[epoch - 1] += counts[epoch]
                counts[epoch] = JOINED
        return counts


def join_starts(starts: EpochStarts, pieces: Sequence[tuple[int, int, EpochStarts, int]]) -> EpochStarts:
    """The starts among all results of a message that ran in pieces: (first item, end, starts inside, results)."""
    found = EpochStarts(starts.positions)
    for number, position in enumerate(starts.positions):
        results = 0
        for begin, end, inside, count in pieces:
            if position <= begin:
                break
            if position < end:
                own = inside.positions
                rank = sum(1 for other in starts.positions[:number] if begin < other < end)
                results += own[rank]
                found.joined[number] = inside.joined[rank]
                break
            results += count
        found.positions[number] = results
    return found
