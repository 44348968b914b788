"""Payloads that travel instead of items: segments between workers, splits of a source, ranges of written part files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dovetail.control.engine import UnreadableItem, UnsendableItemError


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
    """Key of its first item, if the order of a later wave's input depends on it."""

    def default_first(self, key: tuple[int, ...]) -> tuple[int, ...]:
        """Set the key of the first item unless it is known, and return it."""
        if not self.first:
            self.first = key
        return self.first


SegmentSlice = tuple[Segment, int, int]
"""Items `from` to `to` of a segment."""


def total_items(parts: list[SegmentSlice]) -> int:
    return sum(stop - start for _, start, stop in parts)


def total_bytes(parts: list[SegmentSlice]) -> int:
    """In proportion, where a segment is cut."""
    total = 0
    for segment, start, stop in parts:
        whole = stop - start == segment.items
        total += segment.size_bytes if whole else segment.size_bytes * (stop - start) // segment.items
    return total


def slice_items(parts: list[SegmentSlice], start: int, stop: int) -> list[SegmentSlice]:
    """Items `start` to `stop` of what the parts hold one after another."""
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
    """So many consecutive rows of the source. It is pickled and opened in a worker: plain fields, and only what is
    needed to read. Large buffers (raw lines, a piece of a table) travel beside the pickle, if they are wrapped in
    `pickle.PickleBuffer` or are Arrow or numpy buffers."""

    items: int
    """Rows it has; the driver counts with it."""

    def read(self) -> list[Any]:
        """Exactly `items` of them; in the place of a row that cannot be parsed is a BadRow. Raises `Unusable` if the
        source is not what it was: gone, shorter, changed, forbidden."""
        ...


class BadRow(UnreadableItem):
    """Stands for a row that cannot be parsed: it is set aside, whatever the stage says about errors."""

    __slots__ = ("place", "raw")

    def __init__(self, error_text: str, place: str, raw: str) -> None:
        """`place`: 'file:line'; `raw`: the row as text, as far as it can be shown."""
        super().__init__(error_text)
        self.place = place
        self.raw = raw


class BlankRow:
    """The type of BLANK."""

    __slots__ = ()


BLANK_ROW = BlankRow()
"""Stands for a row with nothing in it (an empty line): it is dropped before the first stage, without a word."""


class SourceSinkError(Exception):
    """The source or the sink cannot be used as it is: nobody can go on, and nobody is to blame for an item.

    Has to survive pickling; `fix` is a line for people.
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
    """A result that its sink has no form for: its place among those given, and why."""


class PartFileRange(NamedTuple):
    """Where some results lie. Plain data: it is written to the commit log as a JSON list, and read back from it."""

    part: str
    """Name of the part file, in the sink's folder for parts."""
    offset: int
    length: int
    items: int
    first: list[int]
    """The least of the keys, as a list of numbers."""
    last: list[int]
    """The greatest."""
    keys: list[int] | None = None
    """Where in the part file the keys of all items are told: [offset, length]; None: they are consecutive numbers from
    `first` to `last`."""
    meta: Any = None
    """What else the sink wants to know at the end; JSON."""


class Writer(Protocol):
    """Made in the driver, pickled with the unit that it belongs to, used in every worker of that unit.

    Every worker process has a part file of its own, to which it only ever appends.
    """

    def begin(self, part: str) -> None:
        """In the worker, before the first `write`. `part` is a name that no other process ever had or will have."""
        ...

    def write(self, keys: Any, items: list[Any]) -> PartFileRange:
        """Appends these results (at least one), in the order of their keys; they are in the file (not yet synced) when
        it returns. `keys` is a range, or a list of numbers and tuples of numbers, one per item, unique, but perhaps not
        sorted. Raises `Unwritable` (then nothing was written that counts) or `Unusable` (the disk is full, ...)."""
        ...

    def end(self) -> None:
        """In the worker, when it is stopped. May never be called."""
        ...
