"""Filter texts by their number of words."""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.support.parameter_checks import check_bound, reject_tokenization
from dovetail.recipes.operators.support.text_filters import TextStatFilter
from dovetail.recipes.operators.support.words import count_words


class WordsNumFilter(TextStatFilter):
    """Keep texts by their number of words. A word of special characters only does not count.

    It does not use the shared cache: cached words are in lower case, where a few characters are no longer special, and
    counting words is faster than splitting them. `lang` has no effect: it selects the model of `tokenization`, which is
    not supported.
    """

    stat_name: ClassVar[str] = "num_words"

    def __init__(
        self,
        *,
        lang: str = "en",  # noqa: ARG002
        tokenization: bool = False,
        min_num: float | None = 10,
        max_num: float | None = sys.maxsize,
    ) -> None:
        reject_tokenization(tokenization)
        self.low = check_bound("min_num", min_num)
        self.high = check_bound("max_num", max_num)

    def compute_stat(self, text: str) -> float:
        return count_words(text)
