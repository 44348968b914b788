"""Is enough of a text letters and digits?"""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.characters import counter
from dovetail.recipes.operators.figures import FigureFilter, bound, no_tokenization

_count = counter(str.isalnum)


class AlphanumericFilter(FigureFilter):
    """Keeps texts by the share of their characters that are letters or digits of any script; 0.0 if there are none."""

    figure: ClassVar[str] = "alnum_ratio"

    def __init__(
        self, *, tokenization: bool = False, min_ratio: float | None = 0.25, max_ratio: float | None = sys.maxsize
    ) -> None:
        no_tokenization(tokenization)
        self.low = bound("min_ratio", min_ratio)
        self.high = bound("max_ratio", max_ratio)

    def figure_of(self, text: str) -> float:
        return _count(text) / len(text) if text else 0.0
