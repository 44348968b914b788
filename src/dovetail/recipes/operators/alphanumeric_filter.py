"""Filter texts by their share of letters and digits."""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.support.characters import character_counter
from dovetail.recipes.operators.support.parameter_checks import check_bound, reject_tokenization
from dovetail.recipes.operators.support.text_filters import TextStatFilter

_count = character_counter(str.isalnum)


class AlphanumericFilter(TextStatFilter):
    """Keep texts by the share of letters and digits of any script among their characters; 0.0 for an empty text."""

    stat_name: ClassVar[str] = "alnum_ratio"

    def __init__(
        self, *, tokenization: bool = False, min_ratio: float | None = 0.25, max_ratio: float | None = sys.maxsize
    ) -> None:
        reject_tokenization(tokenization)
        self.low = check_bound("min_ratio", min_ratio)
        self.high = check_bound("max_ratio", max_ratio)

    def compute_stat(self, text: str) -> float:
        return _count(text) / len(text) if text else 0.0
