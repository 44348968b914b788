"""Filter texts by their share of flagged words."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dovetail.recipes.operators.support.word_lists import WordListFilter

if TYPE_CHECKING:
    from collections.abc import Sequence


class FlaggedWordsFilter(WordListFilter):
    """Keep texts by the share of flagged words.

    Lists are read from `flagged_words_dir`, by default the folder of Data-Juicer's lists. They are never downloaded.
    """

    stat_name: ClassVar[str] = "flagged_words_ratio"
    kind: ClassVar[str] = "flagged_words"

    def __init__(
        self,
        *,
        lang: str = "en",
        tokenization: bool = False,
        min_ratio: float | None = 0.0,
        max_ratio: float | None = 0.045,
        flagged_words_dir: str | None = None,
        use_words_aug: bool = False,
        words_aug_group_sizes: Sequence[int] = (2,),
        words_aug_join_char: str = "",
    ) -> None:
        groups = (use_words_aug, words_aug_group_sizes, words_aug_join_char)
        super().__init__(
            flagged_words_dir, lang, tokenization=tokenization, bounds=(min_ratio, max_ratio), groups=groups
        )
