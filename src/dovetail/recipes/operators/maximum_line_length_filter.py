"""Filter texts by the length of their longest line."""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.support.parameter_checks import check_bound
from dovetail.recipes.operators.support.text_filters import LineFilter


class MaximumLineLengthFilter(LineFilter):
    """Keep texts by the number of characters of their longest line; 0 without lines."""

    stat_name: ClassVar[str] = "max_line_length"

    def __init__(self, *, min_len: float | None = 10, max_len: float | None = sys.maxsize) -> None:
        self.low = check_bound("min_len", min_len)
        self.high = check_bound("max_len", max_len)

    def compute_stat(self, text: str) -> float:
        return max(map(len, self.lines(text)), default=0)
