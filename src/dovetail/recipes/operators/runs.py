"""Which runs of so many neighbouring words or characters are there more than once?"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

BEGINNING = 3
FEW = 256
"""In so few words hardly any run of three is there twice: then no longer one is, which is quickly seen."""
LONG = 64
"""Runs that are longer are put together from shorter ones: cutting them all out would take length times length."""

Repeated = tuple[int, list[int]]
"""How many different runs there are; and for each that is there more than once, how often."""


def repeated_words(words: Sequence[str], length: int) -> Repeated:
    total = len(words) - length + 1
    if total < 1:
        return 0, []
    if length > LONG:
        return _counted(_long_runs(words, length), total)
    if length > BEGINNING and total < FEW:
        beginnings = set(islice(zip(words, words[1:], words[2:], strict=False), total))
        if len(beginnings) == total:
            return total, []
    return _counted(zip(*[words[at:] for at in range(length)], strict=False), total)


def repeated_characters(text: str, length: int) -> Repeated:
    total = len(text) - length + 1
    if total < 1:
        return 0, []
    if length > LONG:
        return _counted(_long_runs(text, length), total)
    return _counted([text[at : at + length] for at in range(total)], total)


def _counted(runs: Iterable[Hashable], total: int) -> Repeated:
    counts = Counter(runs)
    if len(counts) == total:
        return total, []
    return len(counts), [count for count in counts.values() if count > 1]


def _long_runs(items: Sequence[Hashable], length: int) -> Sequence[Hashable]:
    """A number for each run, the same for the same: those of 2 items, of 4, of 8, and so on, are numbered in turn."""
    total = len(items) - length + 1
    width = 1
    while width < length:
        step = min(width, length - width)
        seen: dict[Hashable, int] = {}
        pairs = zip(items, islice(items, step, None), strict=False)
        items = [seen.setdefault(pair, len(seen)) for pair in pairs]
        width += step
        if len(seen) == len(items):  # what differs goes on differing, however much longer it gets
            return items[:total]
    return items
