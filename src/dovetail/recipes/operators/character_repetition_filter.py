"""Filter texts by their share of repeated character n-grams."""

from __future__ import annotations

from heapq import nlargest
from math import isqrt
from typing import ClassVar

from dovetail.recipes.operators.support.ngrams import repeated_characters
from dovetail.recipes.operators.support.parameter_checks import check_bound, check_int
from dovetail.recipes.operators.support.text_filters import TextStatFilter


class CharacterRepetitionFilter(TextStatFilter):
    """Keep texts by the share of their runs of `rep_len` characters that occur more than once.

    As in Data-Juicer, only the sqrt(n) most frequent of n different runs are counted: otherwise every long text would
    have a high share.
    """

    stat_name: ClassVar[str] = "char_rep_ratio"

    def __init__(self, *, rep_len: int = 10, min_ratio: float | None = 0.0, max_ratio: float | None = 0.5) -> None:
        self.length = check_int("rep_len", rep_len, 1)
        self.low = check_bound("min_ratio", min_ratio)
        self.high = check_bound("max_ratio", max_ratio)

    def compute_stat(self, text: str) -> float:
        different, repeated = repeated_characters(text, self.length)
        if not repeated:
            return 0.0
        return sum(nlargest(isqrt(different), repeated)) / (len(text) - self.length + 1)
