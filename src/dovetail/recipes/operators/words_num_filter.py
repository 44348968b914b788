"""Filter texts by their number of words."""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.support.text_filters import TextStatFilter, check_bound, reject_tokenization
from dovetail.recipes.operators.support.words import count_words


class WordsNumFilter(TextStatFilter):
    """Keep texts by their number of words. A word of special characters only does not count.

    It shares no words with its neighbours: theirs are in lower case, where a few characters are special no longer, and
    counting is quicker than making them. `lang` is accepted and changes nothing: it names the model of `tokenization`.
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
