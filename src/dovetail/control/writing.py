"""How do results leave a run without passing through the driver? Whoever made them writes them, and reports where."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from dovetail.control.engine import Unsendable


class Unwritable(Unsendable):
    """A result that its sink has no form for: its place among those given, and why."""


class Piece(NamedTuple):
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

    def write(self, keys: Any, items: list[Any]) -> Piece:
        """Appends these results (at least one), in the order of their keys; they are in the file (not yet synced) when
        it returns. `keys` is a range, or a list of numbers and tuples of numbers, one per item, unique, but perhaps not
        sorted. Raises `Unwritable` (then nothing was written that counts) or `Unusable` (the disk is full, ...)."""
        ...

    def end(self) -> None:
        """In the worker, when it is stopped. May never be called."""
        ...
