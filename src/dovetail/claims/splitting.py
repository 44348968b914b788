"""How is one thing split evenly among those who want it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def split(total: int, wishes: Sequence[tuple[int, int]], granule: int = 1) -> list[int]:
    """To each (least, most) as much as to the others, but never below its least nor above its most; what one does not
    want goes to the others. In whole granules as far as possible, the odd ones to the first."""
    bounds = [(low, max(low, high)) for low, high in wishes]
    assert sum(low for low, _ in bounds) <= total, (total, wishes)
    below, above = 0, total // granule + 1
    while above - below > 1:
        level = (below + above) // 2
        if sum(_at(level * granule, bound) for bound in bounds) <= total:
            below = level
        else:
            above = level
    got = [_at(below * granule, bound) for bound in bounds]
    left = total - sum(got)
    while left:
        wanting = [number for number, (_, high) in enumerate(bounds) if got[number] < high]
        if not wanting:
            break
        number = min(wanting, key=lambda number: got[number])
        more = min(granule, left, bounds[number][1] - got[number])
        got[number] += more
        left -= more
    return got


def _at(level: int, bound: tuple[int, int]) -> int:
    low, high = bound
    return min(max(level, low), high)
