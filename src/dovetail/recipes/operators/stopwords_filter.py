"""Filter texts by their share of stop words: the, of, and."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dovetail.recipes.operators.support.word_lists import WordListFilter

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopwordsFilter(WordListFilter):
    """Keep texts by the share of stop words.

    Lists are read from `stopwords_dir`, by default the folder of Data-Juicer's lists. They are never downloaded.
    """

    stat_name: ClassVar[str] = "stopwords_ratio"
    kind: ClassVar[str] = "stopwords"

    def __init__(
        self,
        *,
        lang: str = "en",
        tokenization: bool = False,
        min_ratio: float | None = 0.3,
        max_ratio: float | None = 1.0,
        stopwords_dir: str | None = None,
        use_words_aug: bool = False,
        words_aug_group_sizes: Sequence[int] = (2,),
        words_aug_join_char: str = "",
    ) -> None:
        groups = (use_words_aug, words_aug_group_sizes, words_aug_join_char)
        super().__init__(stopwords_dir, lang, tokenization=tokenization, bounds=(min_ratio, max_ratio), groups=groups)
