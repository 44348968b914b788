"""Remove words that contain given substrings, such as "http" or ".com"."""

from __future__ import annotations

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.parameter_checks import ADAPTER_HINT, NeedsDataJuicer, check_texts
from dovetail.recipes.operators.support.words import keep_words, strip_special

DEFAULT_SUBSTRINGS = ("http", "www", ".com", "href", "//")


class RemoveWordsWithIncorrectSubstringsMapper(TextMapper):
    """Remove words that contain one of `substrings`, without special characters around the word. Separators between
    words become one space, tab or line end."""

    def __init__(self, lang: str = "en", tokenization: bool = False, substrings: list[str] | None = None) -> None:
        if tokenization:
            raise NeedsDataJuicer(
                f"tokenization: true needs a sentencepiece model, which Data-Juicer downloads; {ADAPTER_HINT}"
            )
        self.lang = lang
        self.substrings = DEFAULT_SUBSTRINGS if substrings is None else tuple(check_texts("substrings", substrings))

    def change(self, text: str) -> str:
        found = tuple(one for one in self.substrings if one in text)
        if not found:
            return keep_words(text, None)

        def keeps(word: str) -> bool:
            for one in found:
                if one in word:
                    word = strip_special(word)
                    return not any(other in word for other in found)
            return True

        return keep_words(text, keeps)
