"""Has a text too few or too many words?"""

from __future__ import annotations

import sys
from typing import ClassVar

from dovetail.recipes.operators.figures import FigureFilter, bound, no_tokenization
from dovetail.recipes.operators.words import number_of_words


class WordsNumFilter(FigureFilter):
    """Keeps texts by their number of words. What is all special characters is no word.

    It shares no words with its neighbours: theirs are in lower case, where a few characters are special no longer, and
    counting is quicker than making them. `lang` is accepted and changes nothing: it names the model of `tokenization`.
    """

    figure: ClassVar[str] = "num_words"

    def __init__(
        self,
        *,
        lang: str = "en",  # noqa: ARG002
        tokenization: bool = False,
        min_num: float | None = 10,
        max_num: float | None = sys.maxsize,
    ) -> None:
        no_tokenization(tokenization)
        self.low = bound("min_num", min_num)
        self.high = bound("max_num", max_num)

    def figure_of(self, text: str) -> float:
        return number_of_words(text)
