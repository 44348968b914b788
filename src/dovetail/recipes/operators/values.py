"""By which number is a value sorted? A text by the number that it is, a list by its mean, all else comes last."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dovetail.recipes.operators.base import Row


def as_number(value: object, *, lowest: bool = True) -> float:
    """What is no number is the lowest there is, or the highest: Data-Juicer has the same two."""
    try:
        if isinstance(value, str):
            return float(value)
        numbers = list(_flat(value))
        return math.fsum(numbers) / len(numbers)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError):
        return float(-sys.maxsize if lowest else sys.maxsize)


def _flat(value: Any) -> Iterator[float]:
    if isinstance(value, str):
        raise TypeError("a text in a list is no number")
    if not isinstance(value, list | tuple):
        yield float(value)
        return
    if len({len(one) if isinstance(one, list | tuple) else -1 for one in value}) > 1:
        raise ValueError("a list with lists of several lengths has no mean")
    for one in value:
        yield from _flat(one)


def how_many(rows: Iterable[Row]) -> int:
    return sum(1 for _ in rows)
