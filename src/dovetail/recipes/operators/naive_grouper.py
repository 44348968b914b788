"""Group all rows into one row, in which each field is a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import Grouper, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class NaiveGrouper(Grouper):
    """One row from all rows; none from none. All rows are held in memory, because the result contains them."""

    def columns(self) -> tuple[str, ...]:
        return ()

    def groups(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        group = list(rows)
        if group:
            yield group
