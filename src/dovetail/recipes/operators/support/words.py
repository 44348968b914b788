"""Words of a text: splitting, stripping special characters, counting, keeping some; base class of word filters.

Words are separated by space, tab and line feed only, as in Data-Juicer. Words that are compared are in lower case;
words that are only counted are not split.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from dovetail.recipes.operators.support.characters import ASCII_SPECIAL_CHARACTERS, SPECIAL_CHARACTERS
from dovetail.recipes.operators.support.text_filters import TextStatFilter, shared_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.worker_context import Worker

WORD_SEPARATORS = " \n\t"
_ASCII_SPECIAL_BYTES = "".join(set(ASCII_SPECIAL_CHARACTERS) - set(WORD_SEPARATORS)).encode()
_WORD_CORE = re.compile("[^{0}](?:.*[^{0}])?".format("".join(map(re.escape, sorted(SPECIAL_CHARACTERS)))), re.DOTALL)


def _split_words(text: str) -> list[str]:
    """Texts between separators, including empty ones."""
    return text.replace("\n", " ").replace("\t", " ").split(" ")


def strip_special(word: str) -> str:
    """A word without the special characters at both ends."""
    if word and word[0] not in SPECIAL_CHARACTERS and word[-1] not in SPECIAL_CHARACTERS:
        return word
    found = _WORD_CORE.search(word)
    return found[0] if found else ""


def lowercase_words(text: str) -> list[str]:
    """Words in lower case. The list is shared and must not be modified."""
    parts = _split_words(text.lower())
    if text.isascii():  # most words are all letters, which is faster to test than to strip them
        return [word for part in parts if (word := part if part.isalpha() else part.strip(ASCII_SPECIAL_CHARACTERS))]
    return [word for part in parts if (word := strip_special(part))]


def count_words(text: str) -> int:
    """Number of words that are not only special characters."""
    if text.isascii():
        return len(text.encode().translate(None, _ASCII_SPECIAL_BYTES).split())
    return sum(not SPECIAL_CHARACTERS.issuperset(part) for part in _split_words(text))


class WordFilter(TextStatFilter):
    """A filter with a statistic of the words of a text, in lower case."""

    shared_intermediates: ClassVar[tuple[str, ...]] = ("words",)
    words: Callable[[str], list[str]] = staticmethod(lowercase_words)

    def setup(self, worker: Worker) -> None:  # noqa: ARG002
        self.words = shared_cache("words", lowercase_words) if self.use_shared_cache else lowercase_words


def keep_words(text: str, keeps: Callable[[str], bool] | None) -> str:
    """Remove empty lines, tab-separated cells and words together with their separators."""
    if keeps is None and "  " not in text and "\n" not in text and "\t" not in text:
        return text.strip(" ")
    lines = []
    for line in text.split("\n"):
        if "\t" in line:
            cells = [_filter_cell(cell, keeps) for cell in line.split("\t")]
            kept = "\t".join([cell for cell in cells if cell])
        else:
            kept = _filter_cell(line, keeps)
        if kept:
            lines.append(kept)
    return "\n".join(lines)


def _filter_cell(cell: str, keeps: Callable[[str], bool] | None) -> str:
    words = cell.split(" ")
    if keeps is None:
        return " ".join([word for word in words if word])
    return " ".join([word for word in words if word and keeps(word)])
