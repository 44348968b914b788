"""Field access by dotted name (`meta.score`), values as sortable numbers, and bases of operators over one field."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from dovetail.recipes.operators.base import Filter, Row, Selector, missing_field
from dovetail.recipes.operators.support.parameter_checks import (
    check_optional_count,
    check_optional_ratio,
    parameter_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def check_field_name(value: object, *, needed: bool = False) -> str:
    """The value of a parameter `field_key`."""
    if not isinstance(value, str):
        raise parameter_error("field_key", "the name of a field", value)
    if needed and not value:
        raise ValueError("field_key is empty: name a field, with dots for nested fields, such as field_key: meta.score")
    return value


class FieldReader:
    """Reads a field of a row, or raises BadField."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.path = field.split(".")

    def __call__(self, row: Row) -> Any:
        value: Any = row
        for name in self.path:
            if not isinstance(value, dict) or name not in value:
                raise missing_field(row, self.field)
            value = value[name]
        return value


def sort_number(value: object, *, lowest: bool = True) -> float:
    """The value as a number; other values are the lowest or highest number, as in Data-Juicer."""
    try:
        if isinstance(value, str):
            return float(value)
        numbers = list(_flatten(value))
        return math.fsum(numbers) / len(numbers)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError):
        return float(-sys.maxsize if lowest else sys.maxsize)


def _flatten(value: Any) -> Iterator[float]:
    if isinstance(value, str):
        raise TypeError("a string in a list is not a number")
    if not isinstance(value, list | tuple):
        yield float(value)
        return
    if len({len(one) if isinstance(one, list | tuple) else -1 for one in value}) > 1:
        raise ValueError("a list with lists of several lengths has no mean")
    for one in value:
        yield from _flatten(one)


def count_rows(rows: Iterable[Row]) -> int:
    return sum(1 for _ in rows)


class FieldFilter(Filter):
    """Keeps rows by the value of `field_key`."""

    def __init__(self, field_key: str) -> None:
        self.field_key = check_field_name(field_key, needed=True)
        self._read = FieldReader(field_key)

    def columns(self) -> tuple[str, ...]:
        return (self.field_key,)

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        if self.field_key not in stats:
            stats[self.field_key] = self._read(row)


class TopFieldSelector(Selector):
    """Keeps the top `topk`, or `top_ratio`, of a ranking by `field_key`; all rows without a field or a limit."""

    def __init__(
        self, *, field_key: str = "", top_ratio: float | None = None, topk: int | None = None, reverse: bool = True
    ) -> None:
        self.field_key = check_field_name(field_key)
        self.top_ratio = check_optional_ratio("top_ratio", top_ratio)
        self.topk = check_optional_count("topk", topk)
        self.reverse = reverse

    def columns(self) -> tuple[str, ...]:
        return (self.field_key,) if self.field_key and (self.top_ratio or self.topk) else ()
