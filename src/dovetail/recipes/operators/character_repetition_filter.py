"""Filter texts by their share of repeated character n-grams."""

from __future__ import annotations

from heapq import nlargest
from math import isqrt
from typing import ClassVar

from dovetail.recipes.operators.support.ngrams import repeated_characters
from dovetail.recipes.operators.support.text_filters import TextStatFilter, check_bound, check_count


class CharacterRepetitionFilter(TextStatFilter):
    """Keep texts by the share of their runs of `rep_len` characters that occur more than once.

    Of n different runs only the square root of n that are there most often are counted, as in Data-Juicer: otherwise
    long texts would always have many.
    """

    stat_name: ClassVar[str] = "char_rep_ratio"

    def __init__(self, *, rep_len: int = 10, min_ratio: float | None = 0.0, max_ratio: float | None = 0.5) -> None:
        self.length = check_count("rep_len", rep_len)
        self.low = check_bound("min_ratio", min_ratio)
        self.high = check_bound("max_ratio", max_ratio)

    def compute_stat(self, text: str) -> float:
        different, repeated = repeated_characters(text, self.length)
        if not repeated:
            return 0.0
        return sum(nlargest(isqrt(different), repeated)) / (len(text) - self.length + 1)
