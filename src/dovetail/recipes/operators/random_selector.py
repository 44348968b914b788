"""Select random rows."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import Row, Selector
from dovetail.recipes.operators.support.fields import count_rows
from dovetail.recipes.operators.support.text_filters import check_count, check_ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SEED = 42
"""Random seed of Data-Juicer, which is fixed there."""


class RandomSelector(Selector):
    """Keep `select_num` rows, or the `select_ratio` of all, if that is fewer: the same rows for the same `seed`.

    They are other rows than Data-Juicer's, and leave in the order in which they came. It also gives all rows if the
    share is below one row, and rows several times if there are fewer than wanted; here it is no row, and each once.
    """

    def __init__(self, *, select_ratio: float | None = None, select_num: int | None = None, seed: int = SEED) -> None:
        self.select_ratio = check_ratio("select_ratio", select_ratio) if select_ratio is not None else None
        self.select_num = check_count("select_num", select_num) if select_num is not None else None
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed is {seed!r}, which is not a whole number")  # noqa: TRY004
        self.seed = seed

    def columns(self) -> tuple[str, ...]:
        return ()

    def select_rows(self, rows: Iterable[Row]) -> Sequence[int]:
        total = count_rows(rows)
        wanted = total
        if self.select_num is not None:
            wanted = min(wanted, self.select_num)
        if self.select_ratio is not None:
            wanted = min(wanted, int(self.select_ratio * total))
        if total <= 1 or wanted == total:
            return range(total)
        return sorted(Random(self.seed).sample(range(total), wanted))  # noqa: S311
