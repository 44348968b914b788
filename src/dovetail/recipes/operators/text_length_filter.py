"""Is a text too short or too long?"""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.figures import FigureFilter, bound


class TextLengthFilter(FigureFilter):
    """Keeps texts by their number of characters."""

    figure: ClassVar[str] = "text_len"

    def __init__(self, *, min_len: float | None = 10, max_len: float | None = sys.maxsize) -> None:
        self.low = bound("min_len", min_len)
        self.high = bound("max_len", max_len)

    def figure_of(self, text: str) -> float:
        return len(text)
