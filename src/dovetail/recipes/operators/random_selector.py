"""Select random rows."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import Row, Selector
from dovetail.recipes.operators.support.fields import count_rows
from dovetail.recipes.operators.support.parameter_checks import check_int, check_optional_count, check_optional_ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SEED = 42
"""Random seed of Data-Juicer, which is fixed there."""


class RandomSelector(Selector):
    """Keep `select_num` rows, or the `select_ratio` of all, if that is fewer: the same rows for the same `seed`.

    The rows differ from those that Data-Juicer selects, and keep the order of the input. If the share is less than one
    row, Data-Juicer returns all rows and Dovetail none; if there are fewer rows than wanted, Data-Juicer repeats rows
    and Dovetail returns each once.
    """

    def __init__(self, *, select_ratio: float | None = None, select_num: int | None = None, seed: int = SEED) -> None:
        self.select_ratio = check_optional_ratio("select_ratio", select_ratio)
        self.select_num = check_optional_count("select_num", select_num)
        self.seed = check_int("seed", seed)

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
