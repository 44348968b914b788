"""Replace all kinds of spaces by plain spaces, and strip both ends of a text."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper

OTHER_SPACES = re.compile("[\t\x84\xa0\u2000-\u200d\u202f\u205f\u2060\u3000\ufffc]")


class WhitespaceNormalizationMapper(TextMapper):
    """Replace each tab, wide, narrow or invisible space by a space. Line ends and, as in Data-Juicer, U+1680 are
    kept."""

    def change(self, text: str) -> str:
        text = text.strip()
        return text.replace("\t", " ") if text.isascii() else OTHER_SPACES.sub(" ", text)
