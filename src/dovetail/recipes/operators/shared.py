"""What do several filters need of the same text? Its words and its lines, made once for neighbours that share them.

Fused stages see the very same text objects one after the other, so a small table in the worker is enough: nothing
travels with the row. It is used only by operators that were told (`sharing`) that a neighbour needs the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_TEXTS = 4096
MOST_CHARACTERS = 4_000_000


class Table:
    """Text -> what was made of it; emptied when it is full."""

    __slots__ = ("_characters", "_made", "make")

    def __init__(self, make: Callable[[str], Any]) -> None:
        self.make = make
        self._made: dict[str, Any] = {}
        self._characters = 0

    def of(self, text: str) -> Any:
        found = self._made.get(text)
        if found is None:
            if self._characters > MOST_CHARACTERS or len(self._made) >= MOST_TEXTS:
                self._made.clear()
                self._characters = 0
            found = self._made[text] = self.make(text)
            self._characters += len(text)
        return found


_TABLES: dict[str, Table] = {}


def shared(name: str, make: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same as `make`, once per text for all operators of this worker that name it. Results must not be changed."""
    return _TABLES.setdefault(name, Table(make)).of
