"""The slot in which a message or a call runs, and the call that it waits for."""

from __future__ import annotations

from contextvars import ContextVar
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import Task

    from dovetail.engines.local.call_waits import WaitableCall


class RunningSlot:
    """A slot in which a message or a call runs."""

    __slots__ = ("depth", "hosted", "number", "task", "thread", "waits_for")

    def __init__(self, hosted: str, number: int | None = None, depth: int = 0) -> None:
        self.hosted = hosted
        self.number = number
        """Number of the call; None: a message."""
        self.depth = depth
        """How many callers wait for the call."""
        self.thread = get_ident()
        self.task: Task[Any] | None = None
        """Task of an async method."""
        self.waits_for: WaitableCall | None = None


CURRENT_SLOT: ContextVar[RunningSlot | None] = ContextVar("dovetail_slot", default=None)
"""The slot of the call that runs in this context."""
