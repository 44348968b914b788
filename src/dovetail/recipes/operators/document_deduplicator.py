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
    """Texts are compared without leading and trailing white space; with `lowercase` also without case, and with
    `ignore_non_character` without white space, digits and ASCII punctuation. A row is compared by 16 bytes: ten million
    rows need about 0.6 GB in the worker that compares them."""

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
