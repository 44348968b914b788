"""Filter texts by their share of repeated word n-grams."""

from __future__ import annotations

from typing import ClassVar

from dovetail.recipes.operators.support.ngrams import repeated_words
from dovetail.recipes.operators.support.parameter_checks import check_bound, check_int, reject_tokenization
from dovetail.recipes.operators.support.words import WordFilter


class WordRepetitionFilter(WordFilter):
    """Keep texts by the share of their runs of `rep_len` words that occur more than once; 0.0 without runs.

    `lang` has no effect: it selects the model of `tokenization`, which is not supported.
    """

    stat_name: ClassVar[str] = "word_rep_ratio"

    def __init__(
        self,
        *,
        lang: str = "en",  # noqa: ARG002
        tokenization: bool = False,
        rep_len: int = 10,
        min_ratio: float | None = 0.0,
        max_ratio: float | None = 0.5,
    ) -> None:
        reject_tokenization(tokenization)
        self.length = check_int("rep_len", rep_len, 1)
        self.low = check_bound("min_ratio", min_ratio)
        self.high = check_bound("max_ratio", max_ratio)

    def compute_stat(self, text: str) -> float:
        words = self.words(text)
        _, repeated = repeated_words(words, self.length)
        return sum(repeated) / (len(words) - self.length + 1) if repeated else 0.0
