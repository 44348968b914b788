"""Remove e-mail addresses from texts."""

from __future__ import annotations

import re

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.regex import Replacement, check_replacement, compile_pattern

LOCAL_PART_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-+_"
DOMAIN = re.compile(r"[a-z0-9.\-+_]+\.[a-z]+")


class CleanEmailMapper(TextMapper):
    """Replace addresses, or matches of `pattern`, by `repl`.

    Addresses are searched from their @ outwards: a pattern that starts at the first letter, as in Data-Juicer, takes
    quadratic time on a long word.
    """

    def __init__(self, pattern: str | None = None, repl: str = "") -> None:
        self.pattern = None if pattern is None else compile_pattern("pattern", pattern)
        if self.pattern:
            check_replacement("repl", repl, self.pattern)
        self.repl = repl
        self.replacement = Replacement("repl", repl) if self.pattern is None else None

    def change(self, text: str) -> str:
        if self.replacement is None:
            assert self.pattern is not None
            return self.pattern.sub(self.repl, text)
        sign = text.find("@")
        if sign < 0:
            return text
        parts: list[str] = []
        done = searched = 0
        while sign >= 0:
            start = searched + len(text[searched:sign].rstrip(LOCAL_PART_CHARACTERS))
            domain = DOMAIN.match(text, sign + 1) if start < sign else None
            searched = sign + 1
            if domain:
                parts += (text[done:start], self.replacement.expand(text[start : domain.end()]))
                done = searched = domain.end()
            sign = text.find("@", searched)
        return "".join((*parts, text[done:])) if parts else text
