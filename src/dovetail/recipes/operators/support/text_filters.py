"""Base classes of filters over one statistic per text or per lines, and the cache that adjacent filters share.

Fused stages process the same text one after the other, so a small cache in the worker is sufficient and nothing is
added to the row. Only operators with `use_shared_cache` use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.recipes.operators.base import Filter, Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.worker_context import Worker

MAX_CACHED_TEXTS = 4096
MAX_CACHED_CHARACTERS = 4_000_000


class TextCache:
    """Cache by text; cleared when it is full."""

    __slots__ = ("_characters", "_made", "make")

    def __init__(self, make: Callable[[str], Any]) -> None:
        self.make = make
        self._made: dict[str, Any] = {}
        self._characters = 0

    def get(self, text: str) -> Any:
        found = self._made.get(text)
        if found is None:
            if self._characters > MAX_CACHED_CHARACTERS or len(self._made) >= MAX_CACHED_TEXTS:
                self._made.clear()
                self._characters = 0
            found = self._made[text] = self.make(text)
            self._characters += len(text)
        return found


_CACHES: dict[str, TextCache] = {}


def shared_cache(name: str, make: Callable[[str], Any]) -> Callable[[str], Any]:
    """Call `make` once per text for all operators of this worker. Results must not be modified."""
    return _CACHES.setdefault(name, TextCache(make)).get


class TextStatFilter(Filter):
    """Keeps texts with a statistic between `low` and `high`; None: no bound."""

    stat_name: ClassVar[str]
    """Name of the statistic in the stats of a row."""
    low: float | None
    high: float | None

    def compute_stat(self, text: str) -> float:
        raise NotImplementedError

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        if self.stat_name not in stats:
            stats[self.stat_name] = self.compute_stat(self.text_of(row))

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        return self.in_range(stats[self.stat_name], self.low, self.high)


class LineFilter(TextStatFilter):
    """A filter with a statistic of the lines of a text."""

    shared_intermediates: ClassVar[tuple[str, ...]] = ("lines",)
    lines: Callable[[str], list[str]] = staticmethod(str.splitlines)

    def setup(self, worker: Worker) -> None:  # noqa: ARG002
        self.lines = shared_cache("lines", str.splitlines) if self.use_shared_cache else str.splitlines
