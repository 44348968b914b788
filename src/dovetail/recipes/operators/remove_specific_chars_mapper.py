"""Remove given characters from texts."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.parameter_checks import check_texts


class RemoveSpecificCharsMapper(TextMapper):
    """Remove each of `chars_to_remove`, a string or a list of strings."""

    def __init__(self, chars_to_remove: str | list[str] = "◆●■►▼▲▴∆▻▷❖♡□") -> None:
        characters = "".join(check_texts("chars_to_remove", chars_to_remove))
        self.pattern = re.compile(f"[{re.escape(characters)}]+") if characters else None
        self.beyond_ascii = bool(characters) and all(ord(character) > 127 for character in characters)

    def change(self, text: str) -> str:
        if self.pattern is None or (self.beyond_ascii and text.isascii()):
            return text
        return self.pattern.sub("", text)
