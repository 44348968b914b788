"""Select rows with the most, or least, frequent values of a field."""

from __future__ import annotations

from array import array
from itertools import chain
from numbers import Number
from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import BadField, Row
from dovetail.recipes.operators.support.fields import FieldReader, TopFieldSelector, count_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class FrequencySpecifiedFieldSelector(TopFieldSelector):
    """Keep all rows with one of the `topk` most frequent values, or the `top_ratio` of all values, if that is fewer.

    Rows with the most frequent value come first, or, with `reverse: false`, those with the rarest; equally frequent
    values are in the order of their first rows. Without a field, or without a number of values, all rows are kept.
    Memory: eight bytes per row, and the selected rows.
    """

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
