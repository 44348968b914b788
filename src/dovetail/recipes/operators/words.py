"""What are the words of a text? What stands between spaces, tabs and line ends, without special characters around it.

No other kind of space parts words, as in Data-Juicer. Words that are compared are in lower case; words that are only
counted are not, and are not made at all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from dovetail.recipes.operators.characters import SPECIAL, SPECIAL_OF_ASCII
from dovetail.recipes.operators.figures import FigureFilter
from dovetail.recipes.operators.shared import shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.worker import Worker

BETWEEN_WORDS = " \n\t"
_NEVER_A_WORD = "".join(set(SPECIAL_OF_ASCII) - set(BETWEEN_WORDS)).encode()
_CORE = re.compile("[^{0}](?:.*[^{0}])?".format("".join(map(re.escape, sorted(SPECIAL)))), re.DOTALL)


def _parts(text: str) -> list[str]:
    """What stands between separators, nothing at all included."""
    return text.replace("\n", " ").replace("\t", " ").split(" ")


def stripped(word: str) -> str:
    """A word without the special characters at both ends."""
    if word and word[0] not in SPECIAL and word[-1] not in SPECIAL:
        return word
    found = _CORE.search(word)
    return found[0] if found else ""


def lowered_words(text: str) -> list[str]:
    """Its words in lower case. Nobody may change the list: it is shared."""
    parts = _parts(text.lower())
    if text.isascii():  # most words are all letters, and to see that is quicker than to strip them
        return [word for part in parts if (word := part if part.isalpha() else part.strip(SPECIAL_OF_ASCII))]
    return [word for part in parts if (word := stripped(part))]


def number_of_words(text: str) -> int:
    """How many words are left after special characters are gone from their ends: those that are not all special."""
    if text.isascii():
        return len(text.encode().translate(None, _NEVER_A_WORD).split())
    return sum(not SPECIAL.issuperset(part) for part in _parts(text))


class WordFilter(FigureFilter):
    """A filter whose figure is about the words of a text, in lower case."""

    shares: ClassVar[tuple[str, ...]] = ("words",)
    words: Callable[[str], list[str]] = staticmethod(lowered_words)

    def setup(self, worker: Worker) -> None:  # noqa: ARG002
        self.words = shared("words", lowered_words) if self.sharing else lowered_words
