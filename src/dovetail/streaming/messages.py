"""What is on its way to a worker, or with it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.control.segments import Part
    from dovetail.streaming.epochs import Epoch


@dataclass(slots=True, eq=False)
class Suspect:
    """Items that were there when something went wrong: they run alone, and smaller each time."""

    epoch: Epoch
    parts: list[Part]
    items: int
    batch_size: int
    charged: int
    """How many times they were charged."""
    halves: bool = False
    """Halved because of memory: if it passes, batches of this size are the limit."""
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
    input_lost: bool = False
    """Some of its input lay on a node that is gone: if it comes back, it cannot be sent again."""
