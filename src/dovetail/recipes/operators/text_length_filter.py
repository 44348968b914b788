"""Filter texts by their number of characters."""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.support.parameter_checks import check_bound
from dovetail.recipes.operators.support.text_filters import TextStatFilter


class TextLengthFilter(TextStatFilter):
    """Keep texts by their number of characters."""

    stat_name: ClassVar[str] = "text_len"

    def __init__(self, *, min_len: float | None = 10, max_len: float | None = sys.maxsize) -> None:
        self.low = check_bound("min_len", min_len)
        self.high = check_bound("max_len", max_len)

    def compute_stat(self, text: str) -> float:
        return len(text)
