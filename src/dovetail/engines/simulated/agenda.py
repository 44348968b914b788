"""What happens next, and when is now?"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.events import Event


class Agenda:
    """Virtual time. What is due at the same time happens in the order in which it was put here."""

    __slots__ = ("_entries", "_waiting", "now", "out")

    def __init__(self) -> None:
        self.now = 0.0
        self.out: list[Event] = []
        """What happened and was not reported yet."""
        self._waiting: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._entries = 0

    def at(self, time_s: float, do: Callable[[Any], None], what: Any) -> None:
        self._entries += 1
        heappush(self._waiting, (time_s, self._entries, do, what))

    def run(self, end: float, grain_s: float) -> None:
        """Until something is to be reported, with what happens up to a grain later; not beyond the end."""
        waiting = self._waiting
        limit = self.now
        while True:
            while waiting and waiting[0][0] <= limit:
                self.now, _, do, what = heappop(waiting)
                do(what)
            if self.out or not waiting or waiting[0][0] > end:
                break
            limit = min(waiting[0][0] + grain_s, end)
        if not self.out and end < inf:
            self.now = end

    def clear(self) -> None:
        self._waiting.clear()
        self.out = []
