"""Which rows of a fragment are done, and which are not? Names of files say it; no file is opened for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PART, TRIED, HUNG, FINISHED = "p", "t", "x", "f"
MANY_PARTS = 8


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Rows [start, stop) that were computed."""

    start: int
    stop: int
    size_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{PART}.{self.start}.{self.stop}.{self.size_bytes}"


@dataclass(frozen=True, slots=True, order=True)
class Tried:
    """A worker of a run began with these rows; whoever finds it there knows that it did not come to their end."""

    start: int
    stop: int
    run: str
    time: int = 1

    @property
    def name(self) -> str:
        return f"{TRIED}.{self.start}.{self.stop}.{self.time}.{self.run}"


@dataclass(frozen=True, slots=True)
class Hung:
    """A row whose call did not come back in its time."""

    row: int
    run: str

    @property
    def name(self) -> str:
        return f"{HUNG}.{self.row}.{self.run}"


@dataclass(slots=True)
class Found:
    """What lies in a fragment's folder."""

    parts: list[Part] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    hung: list[Hung] = field(default_factory=list)
    finished: list[tuple[str, str]] = field(default_factory=list)
    """Data files that are whole, and may not be committed yet; each with the hash of what its other rows kept."""


def found_in(names: Iterable[str]) -> Found:
    """What is not ours is left alone."""
    found = Found()
    for name in names:
        kind, _, rest = name.partition(".")
        pieces = rest.split(".")
        if kind == FINISHED:
            before, _, name = ("", "", rest) if rest.startswith("dt-") else rest.partition(".")
            found.finished.append((name, before))
        elif kind == PART and len(pieces) == 3 and all(map(str.isdecimal, pieces)):
            found.parts.append(Part(int(pieces[0]), int(pieces[1]), int(pieces[2])))
        elif kind == TRIED and len(pieces) >= 4 and all(map(str.isdecimal, pieces[:3])):
            found.tried.append(Tried(int(pieces[0]), int(pieces[1]), ".".join(pieces[3:]), int(pieces[2])))
        elif kind == HUNG and len(pieces) >= 2 and pieces[0].isdecimal():
            found.hung.append(Hung(int(pieces[0]), ".".join(pieces[1:])))
    found.parts.sort()
    return found


def finished_name(file: str, before: str = "") -> str:
    return f"{FINISHED}.{before}.{file}" if before else f"{FINISHED}.{file}"


def gaps(parts: Iterable[Part], start: int, stop: int) -> list[tuple[int, int]]:
    """What of [start, stop) no part covers."""
    missing = []
    at = start
    for part in sorted(parts):
        if part.stop <= at:
            continue
        if part.start >= stop:
            break
        if part.start > at:
            missing.append((at, part.start))
        at = max(at, part.stop)
    if at < stop:
        missing.append((at, stop))
    return missing


def chain(parts: Iterable[Part], rows: int) -> list[tuple[Part, int, int]]:
    """Parts that cover [0, rows), each with the rows to take of it; they may overlap. Empty if there is a gap."""
    chosen = []
    at = 0
    waiting = sorted(parts)
    while at < rows:
        best = max((part for part in waiting if part.start <= at < part.stop), key=lambda part: part.stop, default=None)
        if best is None:
            return []
        end = min(best.stop, rows)
        chosen.append((best, at, end))
        at = end
    return chosen


def to_merge(parts: Iterable[Part], end: int, most_bytes: int) -> list[Part]:
    """Small neighbours up to `end` that should become one file, so that there are few; empty if they are few."""
    by_stop = {part.stop: part for part in sorted(parts)}
    run: list[Part] = []
    size, at = 0, end
    while at in by_stop:
        part = by_stop[at]
        size += part.size_bytes
        if size > most_bytes or part.start >= at:
            break
        run.append(part)
        at = part.start
    return run[::-1] if len(run) >= MANY_PARTS else []


def cut(start: int, stop: int, pieces: int, least: int) -> list[tuple[int, int]]:
    """A range in about equal pieces of at least so many rows."""
    rows = stop - start
    pieces = max(1, min(pieces, rows // max(1, least)))
    edges = [start + rows * number // pieces for number in range(pieces + 1)]
    return list(pairwise(edges))


def narrowest(tried: Sequence[Tried], start: int, stop: int) -> tuple[int, int, int] | None:
    """Of what was tried within [start, stop) the fewest rows, and how often those; None if nothing was."""
    inside = [item for item in tried if max(start, item.start) < min(stop, item.stop)]
    if not inside:
        return None
    least = min(inside, key=lambda item: (item.stop - item.start, item.start))
    times = max(item.time for item in inside if (item.start, item.stop) == (least.start, least.stop))
    return max(start, least.start), min(stop, least.stop), times
