"""Select rows with the most, or least, frequent values of a field."""

from __future__ import annotations

from array import array
from itertools import chain
from numbers import Number
from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import BadField, Row, Selector
from dovetail.recipes.operators.support.fields import FieldReader, check_field_name, count_rows
from dovetail.recipes.operators.support.text_filters import check_count, check_ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class FrequencySpecifiedFieldSelector(Selector):
    """Keep all rows with one of the `topk` most frequent values, or the `top_ratio` of all values, if that is fewer.

    The most frequent go first, or, with `reverse: false`, the rarest; of equally frequent ones those seen earlier.
    Without a field, or without a number of values, all rows are kept.
    Eight bytes per row are held, and the rows that are chosen.
    """

    def __init__(
        self, *, field_key: str = "", top_ratio: float | None = None, topk: int | None = None, reverse: bool = True
    ) -> None:
        self.field_key = check_field_name(field_key)
        self.top_ratio = check_ratio("top_ratio", top_ratio) if top_ratio is not None else None
        self.topk = check_count("topk", topk) if topk is not None else None
        self.reverse = reverse

    def columns(self) -> tuple[str, ...]:
        return (self.field_key,) if self.field_key and (self.top_ratio or self.topk) else ()

    def check(self, row: Row) -> None:
        super().check(row)
        if self.columns():
            self._checked(FieldReader(self.field_key)(row))

    def _checked(self, value: object) -> object:
        if value is not None and not isinstance(value, str | Number):
            raise BadField(f"field {self.field_key!r} is {type(value).__name__}, neither a string nor a number")
        return value

    def select_rows(self, rows: Iterable[Row]) -> Sequence[int]:
        if not self.columns():
            return range(count_rows(rows))
        read = FieldReader(self.field_key)
        places: dict[object, array[int]] = {}
        total = 0
        for number, row in enumerate(rows):
            value = self._checked(read(row))
            places.setdefault(value, array("q")).append(number)
            total = number + 1
        if total <= 1:
            return range(total)
        wanted = self.topk or len(places)
        if self.top_ratio:
            wanted = min(wanted, int(self.top_ratio * len(places)))
        most = sorted(places.values(), key=len, reverse=self.reverse)[:wanted]
        return list(chain.from_iterable(most))
