"""Base classes of filters over one statistic per text or per lines, and the cache that adjacent filters share.

Fused stages see the very same text objects one after the other, so a small table in the worker is enough: nothing
travels with the row. It is used only by operators that were told (`sharing`) that a neighbour needs the same.
"""

from __future__ import annotations

import math
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


def check_bound(name: str, value: object) -> float | None:
    """A number, or None. The low bound may exceed the high one, as in Data-Juicer: then nothing is kept."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name} is {value!r}, which is not a number")
    return value


def check_count(name: str, value: object) -> int:
    """A count of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, which is not a whole number above 0")
    return value


def check_ratio(name: str, value: object) -> float:
    """A fraction from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}, which is not a number from 0 to 1")
    return value


def reject_tokenization(tokenization: object) -> None:
    """Raise ValueError if tokens require a model."""
    if tokenization is False or tokenization is None:
        return
    if tokenization is not True:
        raise ValueError(f"tokenization is {tokenization!r}, which is neither true nor false")
    raise ValueError(
        "tokenization: true needs a model, which Data-Juicer downloads;"
        " run this operator through Data-Juicer: adapter: data_juicer"
    )


class LineFilter(TextStatFilter):
    """A filter with a statistic of the lines of a text."""

    shared_intermediates: ClassVar[tuple[str, ...]] = ("lines",)
    lines: Callable[[str], list[str]] = staticmethod(str.splitlines)

    def setup(self, worker: Worker) -> None:  # noqa: ARG002
        self.lines = shared_cache("lines", str.splitlines) if self.use_shared_cache else str.splitlines
