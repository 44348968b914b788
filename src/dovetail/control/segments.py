"""What moves between workers, unopened?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Segment:
    """The smallest payload that can be moved: some items that one worker wrote. Only workers open it.

    `ref` belongs to the engine, and its lifetime is the payload's: when nothing refers to it any more, the payload is
    gone. A block is the list of segments that one message brought back.
    """

    id: int
    items: int
    size_bytes: int = 0
    node: str = ""
    """Where it lies; empty: where no lost node can take it away (the driver, a spool)."""
    ref: object = None
    first: tuple[int, ...] | None = None
    """The key of its first item, where the order of a later wave's input depends on it."""


Part = tuple[Segment, int, int]
"""Items `from` to `to` of a segment."""


def items_in(parts: list[Part]) -> int:
    return sum(stop - start for _, start, stop in parts)


def bytes_in(parts: list[Part]) -> int:
    """In proportion, where a segment is cut."""
    total = 0
    for segment, start, stop in parts:
        whole = stop - start == segment.items
        total += segment.size_bytes if whole else segment.size_bytes * (stop - start) // segment.items
    return total


def cut(parts: list[Part], start: int, stop: int) -> list[Part]:
    """Items `start` to `stop` of what the parts hold one after another."""
    found: list[Part] = []
    passed = 0
    for segment, begin, end in parts:
        length = end - begin
        low, high = max(start - passed, 0), min(stop - passed, length)
        if low < high:
            found.append((segment, begin + low, begin + high))
        passed += length
    return found
