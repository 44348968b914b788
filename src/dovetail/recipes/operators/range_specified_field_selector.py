"""Select rows between two ranks of a field's value."""

from __future__ import annotations

from array import array
from heapq import nlargest, nsmallest
from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import Row, Selector
from dovetail.recipes.operators.support.fields import FieldReader, check_field_name, count_rows, sort_number
from dovetail.recipes.operators.support.parameter_checks import check_optional_count, check_optional_ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class RangeSpecifiedFieldSelector(Selector):
    """Keep the rows between a lower and an upper rank of all rows, sorted by a field; highest first.

    A bound is a rank or a share of all rows; of two lower bounds the higher applies, of two upper bounds the lower. As
    in Data-Juicer, all rows are kept without a field, or without a bound on both sides.
    Memory: eight bytes per row, and the selected rows.
    """

    def __init__(
        self,
        *,
        field_key: str = "",
        lower_percentile: float | None = None,
        upper_percentile: float | None = None,
        lower_rank: int | None = None,
        upper_rank: int | None = None,
    ) -> None:
        self.field_key = check_field_name(field_key)
        self.lower_percentile = check_optional_ratio("lower_percentile", lower_percentile)
        self.upper_percentile = check_optional_ratio("upper_percentile", upper_percentile)
        self.lower_rank = check_optional_count("lower_rank", lower_rank)
        self.upper_rank = check_optional_count("upper_rank", upper_rank)

    def columns(self) -> tuple[str, ...]:
        low = self.lower_percentile is not None or self.lower_rank is not None
        high = self.upper_percentile is not None or self.upper_rank is not None
        return (self.field_key,) if self.field_key and low and high else ()

    def select_rows(self, rows: Iterable[Row]) -> Sequence[int]:
        if not self.columns():
            return range(count_rows(rows))
        read = FieldReader(self.field_key)
        values = array("d", (sort_number(read(row)) for row in rows))
        if len(values) <= 1:
            return range(len(values))
        low, high = self._bounds(len(values))
        # of equal values at the lower bound the earliest rows stay: Data-Juicer takes the lowest, then the highest
        lowest = nsmallest(high, range(len(values)), values.__getitem__)
        return nlargest(high - low, lowest, values.__getitem__)

    def _bounds(self, total: int) -> tuple[int, int]:
        low = max(int((self.lower_percentile or 0) * total), self.lower_rank or 0)
        high = total if self.upper_percentile is None else int(self.upper_percentile * total)
        if self.upper_rank is not None:
            high = min(high, self.upper_rank)
        return low, max(low, high)
