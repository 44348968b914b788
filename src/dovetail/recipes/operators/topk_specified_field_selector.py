"""Select the rows with the highest, or lowest, values of a field."""

from __future__ import annotations

from heapq import nlargest, nsmallest
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dovetail.recipes.operators.base import BadField, Row
from dovetail.recipes.operators.support.fields import FieldReader, TopFieldSelector, count_rows, sort_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class TopkSpecifiedFieldSelector(TopFieldSelector):
    """Keep the `topk` rows with the highest values, or the `top_ratio` of all, whichever is fewer, highest first.

    With `reverse: false`, keep the lowest, lowest first. Of equal values, earlier rows come first. As in Data-Juicer,
    values of nested fields are converted to numbers, and those at the top level are compared as they are. Without a
    field, or without a number of rows, all rows are kept. With `topk`, memory holds only `topk` values at a time.
    """

    def select_rows(self, rows: Iterable[Row]) -> Sequence[int]:
        if not self.columns():
            return range(count_rows(rows))
        values = _NumberedValues(self._values(rows))
        best = nlargest if self.reverse else nsmallest
        try:
            if self.topk is None:
                every = list(values)
                top = best(int((self.top_ratio or 0) * len(every)), every, key=itemgetter(1))
            else:
                top = best(self.topk, values, key=itemgetter(1))
        except TypeError as error:
            raise BadField(f"the values of field {self.field_key!r} cannot be compared: {error}") from None
        if values.seen <= 1:
            return range(values.seen)
        if self.top_ratio:
            del top[int(self.top_ratio * values.seen) :]
        return [number for number, _ in top]

    def _values(self, rows: Iterable[Row]) -> Iterator[Any]:
        read = FieldReader(self.field_key)
        if "." not in self.field_key:
            return map(read, rows)
        return (sort_number(read(row), lowest=self.reverse) for row in rows)


class _NumberedValues:
    """(row number, value) pairs, and the number of rows read."""

    def __init__(self, values: Iterator[Any]) -> None:
        self._values = values
        self.seen = 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for value in self._values:
            self.seen += 1
            yield self.seen - 1, value
