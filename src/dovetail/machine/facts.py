"""What can be said about one machine and its cards?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.machine.gpus import CardFacts


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What this process may use of its machine, and why that is less than all of it."""

    hostname: str
    cpu_milli: int
    memory_bytes: int
    cards: tuple[CardFacts, ...]
    notes: tuple[str, ...]
    """Every limit that was applied and everything that went wrong, one sentence each, for people."""
