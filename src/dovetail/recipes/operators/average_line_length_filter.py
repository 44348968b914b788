"""Are the lines of a text too short or too long, on average?"""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.figures import bound
from dovetail.recipes.operators.lines import LineFilter


class AverageLineLengthFilter(LineFilter):
    """Keeps texts by their number of characters, line ends included, per line; 0.0 if there are no lines."""

    figure: ClassVar[str] = "avg_line_length"

    def __init__(self, *, min_len: float | None = 10, max_len: float | None = sys.maxsize) -> None:
        self.low = bound("min_len", min_len)
        self.high = bound("max_len", max_len)

    def figure_of(self, text: str) -> float:
        lines = self.lines(text)
        return len(text) / len(lines) if lines else 0.0
