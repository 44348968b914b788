"""Filter texts by their average line length."""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.support.parameter_checks import check_bound
from dovetail.recipes.operators.support.text_filters import LineFilter


class AverageLineLengthFilter(LineFilter):
    """Keep texts by their number of characters per line, line ends included; 0.0 without lines."""

    stat_name: ClassVar[str] = "avg_line_length"

    def __init__(self, *, min_len: float | None = 10, max_len: float | None = sys.maxsize) -> None:
        self.low = check_bound("min_len", min_len)
        self.high = check_bound("max_len", max_len)

    def compute_stat(self, text: str) -> float:
        lines = self.lines(text)
        return len(text) / len(lines) if lines else 0.0
