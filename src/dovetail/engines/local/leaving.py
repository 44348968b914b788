"""What of a worker's message is on its way out, and how is it undone if the message fails after all?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.engines.local.frames import Piece
    from dovetail.engines.local.pool import Placed, Pool


class Leaving:
    """What is told of each payload, and what goes with it."""

    __slots__ = ("_placed", "body", "descriptors", "outs", "spilled")

    def __init__(self) -> None:
        self.outs: list[Any] = []
        self.body: list[Piece] = []
        """The small ones."""
        self.descriptors: list[int] = []
        """Of the large ones."""
        self.spilled: list[int] = []
        """Those that are closed when they are sent."""
        self._placed: list[Placed] = []

    def add(self, placed: tuple[list[Any], list[Piece], list[int], list[int]], placing: Sequence[Placed]) -> None:
        outs, body, descriptors, spilled = placed
        self.outs += outs
        self.body += body
        self.descriptors += descriptors
        self.spilled += spilled
        self._placed += placing

    def undo(self, pool: Pool | None) -> None:
        """Nothing leaves. What was appended to files stays there, and nobody is told of it."""
        discard(self._placed, pool)
        self.outs, self.body, self.descriptors, self.spilled, self._placed = [], [], [], [], []


def discard(placed: Sequence[Placed], pool: Pool | None) -> None:
    for one in placed:
        if one.spilled:
            os.close(one.fd)
        elif pool is not None:
            pool.discard(one.buffer)
