"""Takes words out of texts that have something in them which no word has, such as "http" or ".com"."""

from __future__ import annotations

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.checks import texts
from dovetail.recipes.operators.kept_words import stripped, words_kept
from dovetail.recipes.operators.patterns import ADAPTER

SUBSTRINGS = ("http", "www", ".com", "href", "//")


class RemoveWordsWithIncorrectSubstringsMapper(TextMapper):
    """Removes words that hold one of `substrings` when special characters around them are left out. What is between
    words becomes one space, tab or line end."""

    def __init__(self, lang: str = "en", tokenization: bool = False, substrings: list[str] | None = None) -> None:
        if tokenization:
            raise ValueError(f"tokenization: true needs a sentencepiece model, which Data-Juicer downloads; {ADAPTER}")
        self.lang = lang
        self.substrings = SUBSTRINGS if substrings is None else tuple(texts("substrings", substrings))

    def change(self, text: str) -> str:
        found = tuple(one for one in self.substrings if one in text)
        if not found:
            return words_kept(text, None)

        def keeps(word: str) -> bool:
            for one in found:
                if one in word:
                    word = stripped(word)
                    return not any(other in word for other in found)
            return True

        return words_kept(text, keeps)
