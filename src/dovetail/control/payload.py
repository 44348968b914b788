"""Payloads that travel instead of items: segments between workers, splits of a source, ranges of written part files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dovetail.control.engine import UnreadableItem, UnsendableItemError


@dataclass(slots=True, eq=False)
class Segment:
    """The smallest payload that can be moved: items written by one worker. Only workers open it.

    `ref` belongs to the engine and keeps the payload alive: the payload is freed with the last reference to it.
    """

    id: int
    items: int
    size_bytes: int = 0
    node: str = ""
    """Node that stores it; empty: it cannot be lost with a node (it is at the driver or in a spool)."""
    ref: object = None
    first: tuple[int, ...] | None = None
    """Key of its first item, if the order of a later wave's input depends on it."""

    def default_first(self, key: tuple[int, ...]) -> tuple[int, ...]:
        """Set the key of the first item unless it is known, and return it."""
        if not self.first:
            self.first = key
        return self.first


SegmentSlice = tuple[Segment, int, int]
"""Items [start, stop) of a segment: (segment, start, stop)."""


def total_items(parts: list[SegmentSlice]) -> int:
    return sum(stop - start for _, start, stop in parts)


def total_bytes(parts: list[SegmentSlice]) -> int:
    """Bytes of the slices; proportional for parts of a segment."""
    total = 0
    for segment, start, stop in parts:
        whole = stop - start == segment.items
        total += segment.size_bytes if whole else segment.size_bytes * (stop - start) // segment.items
    return total


def slice_items(parts: list[SegmentSlice], start: int, stop: int) -> list[SegmentSlice]:
    """Items [start, stop) of the concatenated slices."""
    found: list[SegmentSlice] = []
    passed = 0
    for segment, begin, end in parts:
        length = end - begin
        low, high = max(start - passed, 0), min(stop - passed, length)
        if low < high:
            found.append((segment, begin + low, begin + high))
        passed += length
    return found


class Split(Protocol):
    """Consecutive rows of the source. A split is pickled and read in a worker, so it contains only what is needed to
    read. Large buffers (raw lines, part of a table) are transferred out of band if they are wrapped in
    `pickle.PickleBuffer` or are Arrow or numpy buffers."""

    items: int
    """Number of rows."""

    def read(self) -> list[Any]:
        """Return exactly `items` rows, with a BadRow for each row that cannot be parsed. Raises SourceSinkError if the
        source was removed, truncated or changed, or access is denied."""
        ...


class BadRow(UnreadableItem):
    """Placeholder for a row that cannot be parsed: it fails regardless of the stage's `on_error`."""

    __slots__ = ("place", "raw")

    def __init__(self, error_text: str, place: str, raw: str) -> None:
        """`place`: 'file:line'; `raw`: the row as text, possibly truncated."""
        super().__init__(error_text)
        self.place = place
        self.raw = raw


class BlankRow:
    """Type of BLANK_ROW."""

    __slots__ = ()


BLANK_ROW = BlankRow()
"""Placeholder for an empty row (an empty line): it is dropped silently before the first stage."""


class SourceSinkError(Exception):
    """The source or the sink cannot be used: the run must fail, and no item is to blame.

    Picklable; `fix` is one line for users.
    """

    def __init__(self, code: str, message: str, fix: str = "", place: str = "") -> None:
        super().__init__(code, message, fix, place)
        self.code = code
        self.message = message
        self.fix = fix
        self.place = place

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


class UnwritableItemError(UnsendableItemError):
    """A result that the sink cannot represent: its index and the reason."""


class PartFileRange(NamedTuple):
    """Location of results in a part file. Plain data: stored in the commit log as a JSON list."""

    part: str
    """Name of the part file in the sink's parts folder."""
    offset: int
    length: int
    items: int
    first: list[int]
    """The smallest key, as a list of numbers."""
    last: list[int]
    """The largest key."""
    keys: list[int] | None = None
    """Location of the keys of all items in the part file: [offset, length]; None: the keys are the consecutive numbers
    from `first` to `last`."""
    meta: Any = None
    """Further data of the sink, as JSON."""


class Writer(Protocol):
    """Writes results of a unit: created in the driver, pickled with the unit, used in every worker of the unit.

    Every worker process appends to a part file of its own.
    """

    def begin(self, part: str) -> None:
        """Called in the worker before the first `write`. `part` is a unique name that no other process uses."""
        ...

    def write(self, keys: Any, items: list[Any]) -> PartFileRange:
        """Append at least one result, in the order of the keys; the data is in the file (not yet synced) on return.
        `keys` is a range, or a list of numbers and tuples of numbers, one per item: unique, not necessarily sorted.
        Raises UnwritableItemError (nothing was written) or SourceSinkError (the disk is full, ...)."""
        ...

    def end(self) -> None:
        """Called in the worker when it stops; not called if the worker dies."""
        ...
