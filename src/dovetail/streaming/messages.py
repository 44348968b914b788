"""What is on its way to a worker, or with it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.control.segments import Part
    from dovetail.streaming.epochs import Epoch


@dataclass(slots=True, eq=False)
class Halves:
    """Two halves of a batch that ran out of memory. If both pass, it was too large; if one does not, it was an item."""

    batch_size: int
    passed: int = 0


@dataclass(slots=True, eq=False)
class Suspect:
    """Items that were there when something went wrong: they run alone, and smaller each time."""

    epoch: Epoch
    parts: list[Part]
    items: int
    batch_size: int
    charged: int
    """How many times they were charged."""
    halves: Halves | None = None
    """It is one of them."""
    error: str = ""
    detail: str = ""
    keys: tuple[tuple[int, ...], ...] = ()
    """Of its items, where the failure named them."""
    memory_bytes: int = 0
    """It needs a worker with at least so much memory."""


@dataclass(slots=True, eq=False)
class Message:
    """Some batches that one worker has."""

    id: int
    epoch: Epoch
    parts: list[Part]
    items: int
    size_bytes: int
    batch_size: int
    sent_at: float
    suspect: Suspect | None = None
    cancelled: bool = False
    due: float = 0.0
    """When it should have ended, if its unit has a deadline."""
    expected_bytes: int = 0
    """What will probably come out."""
    input_lost: bool = False
    """Some of its input lay on a node that is gone: if it comes back, it cannot be sent again."""
