"""Does a text say the same again and again, letter by letter?"""

from __future__ import annotations

from heapq import nlargest
from math import isqrt
from typing import ClassVar

from dovetail.recipes.operators.figures import FigureFilter, bound, count
from dovetail.recipes.operators.runs import repeated_characters


class CharacterRepetitionFilter(FigureFilter):
    """Keeps texts by the share of their runs of `rep_len` characters that are there more than once.

    Of n different runs only the square root of n that are there most often are counted, as in Data-Juicer: otherwise
    long texts would always have many.
    """

    figure: ClassVar[str] = "char_rep_ratio"

    def __init__(self, *, rep_len: int = 10, min_ratio: float | None = 0.0, max_ratio: float | None = 0.5) -> None:
        self.length = count("rep_len", rep_len)
        self.low = bound("min_ratio", min_ratio)
        self.high = bound("max_ratio", max_ratio)

    def figure_of(self, text: str) -> float:
        different, repeated = repeated_characters(text, self.length)
        if not repeated:
            return 0.0
        return sum(nlargest(isqrt(different), repeated)) / (len(text) - self.length + 1)
