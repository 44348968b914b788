"""Remove words that are too long or too short."""

from __future__ import annotations

import sys

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.parameter_checks import check_int
from dovetail.recipes.operators.support.words import keep_words, strip_special


class RemoveLongWordsMapper(TextMapper):
    """Keep words of `min_len` to `max_len` characters, counted with or without special characters around them.
    Separators between words become one space, tab or line end."""

    def __init__(self, min_len: int = 1, max_len: int = sys.maxsize) -> None:
        self.min_len = check_int("min_len", min_len)
        self.max_len = check_int("max_len", max_len)
        if min_len > max_len:
            raise ValueError(f"min_len {min_len} must not be greater than max_len {max_len}")

    def change(self, text: str) -> str:
        all_fit = self.min_len <= 1 and len(text) <= self.max_len
        return keep_words(text, None if all_fit else self._fits)

    def _fits(self, word: str) -> bool:
        length = len(word)
        if length <= self.max_len:
            # a short word stays short without its special characters
            return length >= self.min_len
        return self.min_len <= len(strip_special(word)) <= self.max_len
