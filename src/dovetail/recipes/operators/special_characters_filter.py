"""Is too much of a text special characters: punctuation, digits, spaces, emoji?"""

from __future__ import annotations

from typing import ClassVar

from dovetail.recipes.operators.characters import SPECIAL, counter
from dovetail.recipes.operators.figures import FigureFilter, bound

_count = counter(SPECIAL.__contains__)


class SpecialCharactersFilter(FigureFilter):
    """Keeps texts by the share of their characters that are special; 0.0 if there are no characters."""

    figure: ClassVar[str] = "special_char_ratio"

    def __init__(self, *, min_ratio: float | None = 0.0, max_ratio: float | None = 0.25) -> None:
        self.low = bound("min_ratio", min_ratio)
        self.high = bound("max_ratio", max_ratio)

    def figure_of(self, text: str) -> float:
        return _count(text) / len(text) if text else 0.0
