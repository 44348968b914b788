"""Remove rows with the same text; the first one is kept."""

from __future__ import annotations

import hashlib
import re
import string
from typing import TYPE_CHECKING

from dovetail.recipes.operators.base import Deduplicator, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NON_CHARACTERS = re.compile(
    r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\d" + re.escape(string.punctuation) + "]+"
)
"""White space of Unicode; Python's `\\s` also matches four control characters."""


class DocumentDeduplicator(Deduplicator):
    """Texts are compared without the white space around them; with `lowercase` and `ignore_non_character` (white space,
    digits, ASCII punctuation) in a plainer form, too. Compared are 16 bytes of each, so that ten million rows need
    about 0.6 GB in the place where they are compared."""

    extra = "recipes"
    needs = ("numpy",)

    def __init__(self, lowercase: bool = False, ignore_non_character: bool = False) -> None:
        self.lowercase = lowercase
        self.ignore_non_character = ignore_non_character

    def compute_hash(self, row: Row) -> bytes:
        return self.digest(self.text_of(row))

    def digest(self, text: str) -> bytes:
        if self.lowercase:
            text = text.lower()
        if self.ignore_non_character:
            text = _NON_CHARACTERS.sub("", text)
        return hashlib.md5(text.strip().encode("utf-8", "surrogatepass"), usedforsecurity=False).digest()

    def originals(self, hashes: Iterable[bytes]) -> Sequence[int]:
        from dovetail.recipes.operators.support.duplicate_groups import first_equal

        return first_equal(hashes)
