"""What are all rows together? One row, each field of which is a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import Grouper, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class NaiveGrouper(Grouper):
    """Makes one row of all. If there are none, there is none. All rows are held in memory: the result has them all."""

    def columns(self) -> tuple[str, ...]:
        return ()

    def groups(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        group = list(rows)
        if group:
            yield group
