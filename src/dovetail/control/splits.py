"""What can travel instead of items? A stretch of the source that whoever opens it reads by itself."""

from __future__ import annotations

from typing import Any, Protocol

from dovetail.control.engine import Unreadable


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


class BadRow(Unreadable):
    """Stands for a row that cannot be parsed: it is set aside, whatever the stage says about errors."""

    __slots__ = ("place", "raw")

    def __init__(self, error_text: str, place: str, raw: str) -> None:
        """`place`: 'file:line'; `raw`: the row as text, as far as it can be shown."""
        super().__init__(error_text)
        self.place = place
        self.raw = raw


class Blank:
    """The type of BLANK."""

    __slots__ = ()


BLANK = Blank()
"""Stands for a row with nothing in it (an empty line): it is dropped before the first stage, without a word."""


class Unusable(Exception):
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
