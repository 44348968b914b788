"""What do filters of texts have in common? One figure per text, and two bounds that it is kept between."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from dovetail.recipes.operators.base import Filter, Row


class FigureFilter(Filter):
    """Keeps texts with a figure that is not below `low` nor above `high`; None is no bound."""

    figure: ClassVar[str]
    """Its name in the stats of a row."""
    low: float | None
    high: float | None

    def figure_of(self, text: str) -> float:
        raise NotImplementedError

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        if self.figure not in stats:
            stats[self.figure] = self.figure_of(self.text_of(row))

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        return self.in_range(stats[self.figure], self.low, self.high)


def bound(name: str, value: object) -> float | None:
    """A number, or None. Low ones may be above high ones, as in Data-Juicer: then nothing is kept."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name} is {value!r}, which is not a number")
    return value


def count(name: str, value: object) -> int:
    """A number of things, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, which is not a whole number above 0")
    return value


def share(name: str, value: object) -> float:
    """A part of a whole, from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}, which is not a number from 0 to 1")
    return value


def no_tokenization(tokenization: object) -> None:
    """Raises if a model is to make the tokens."""
    if tokenization is False or tokenization is None:
        return
    if tokenization is not True:
        raise ValueError(f"tokenization is {tokenization!r}, which is neither true nor false")
    raise ValueError(
        "tokenization: true needs a model, which Data-Juicer downloads;"
        " run this operator through Data-Juicer: adapter: data_juicer"
    )
