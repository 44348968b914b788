"""Filter texts by their share of special characters: punctuation, digits, spaces, emoji."""

from __future__ import annotations

from typing import ClassVar

from dovetail.recipes.operators.support.characters import SPECIAL_CHARACTERS, character_counter
from dovetail.recipes.operators.support.parameter_checks import check_bound
from dovetail.recipes.operators.support.text_filters import TextStatFilter

_count = character_counter(SPECIAL_CHARACTERS.__contains__)


class SpecialCharactersFilter(TextStatFilter):
    """Keep texts by the share of special characters; 0.0 for an empty text."""

    stat_name: ClassVar[str] = "special_char_ratio"

    def __init__(self, *, min_ratio: float | None = 0.0, max_ratio: float | None = 0.25) -> None:
        self.low = check_bound("min_ratio", min_ratio)
        self.high = check_bound("max_ratio", max_ratio)

    def compute_stat(self, text: str) -> float:
        return _count(text) / len(text) if text else 0.0
