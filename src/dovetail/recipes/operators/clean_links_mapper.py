"""Remove links from texts: https://..., mailto:..., www. ..., example.com/...

Finds the same links as Data-Juicer's pattern. That pattern takes quadratic time, or worse, on long runs of digits and
dots, and with Python's `re` exponential time on `www.........`; this one visits each part of a text once.
"""

from __future__ import annotations

import re
from functools import cache

from dovetail.recipes.operators.base import TextMapper
from dovetail.recipes.operators.support.regex import (
    SPACE_CLASS,
    Replacement,
    check_replacement,
    compile_pattern,
    word_boundary,
    word_class,
)

LETTER = "A-Za-z\u0130\u017f\u212a"
"""Including the characters that case folding maps to ASCII letters, as in the package regex."""
LINK_HINT = re.compile(rf":[/{LETTER}0-9%]|\.[{LETTER}]{{2,4}}/|w[Ww][Ww]|W[Ww][Ww]")
"""Part of every link."""
IN_DOMAIN = rf"{LETTER}0-9.\-"


def _path_pattern() -> str:
    """Pattern of the rest of a link: runs of characters, and brackets with contents, up to a valid last character.

    A backtracking pattern would end at the last bracket, or at the last valid character after it; so does this one.
    """
    one = rf"[^{SPACE_CLASS}()<>]"
    last = rf"[^{SPACE_CLASS}`!()\[\]{{}};:'\".,<>?«»“”‘’]"  # noqa: RUF001
    brackets = rf"\((?:{one}++|\({one}++\))*+\)"
    return (
        rf"(?:(?:{one}++{brackets}(?:{one}*+{brackets})*+|{brackets}(?:{one}*+{brackets})++)(?:{one}*{last})?"
        rf"|{brackets}{one}*{last}|{one}{one}*{last})"
    )


@cache
def link_pattern() -> re.Pattern[str]:
    """Pattern of a link. Groups 1 and 2 are the text before the link in the same run of characters, which is kept.

    A run is tested at its start, and only if it ends like the head of a link; the head starts at the first word
    boundary in the run.
    """
    in_word = word_class()
    scheme = (
        rf"(?<![{in_word}\-])(?=[{in_word}\-]++:[/{LETTER}0-9%])"
        rf"(?>([{in_word}\-]*?)(?<![{in_word}])[{LETTER}][{in_word}\-]++:)(?:/{{1,3}}|[{LETTER}0-9%])"
    )
    www = rf"(?<![{in_word}])[Ww]{{3}}\d{{0,3}}\."
    ends = "|".join(rf"(?<=\.[{LETTER}]{{{length}}})" for length in (2, 3, 4))
    domain = (
        rf"(?<![{IN_DOMAIN}])(?=[{IN_DOMAIN}]++(?:{ends})/)"
        rf"(?>([{IN_DOMAIN}]*?){word_boundary()}[{IN_DOMAIN}]+\.[{LETTER}]{{2,4}}/)"
    )
    return re.compile(f"(?:{scheme}|{www}|{domain}){_path_pattern()}")


class CleanLinksMapper(TextMapper):
    """Replace links, or matches of `pattern`, by `repl`, in which `\\1` is the link."""

    def __init__(self, pattern: str | None = None, repl: str = "") -> None:
        self.pattern = None if pattern is None else compile_pattern("pattern", pattern)
        if self.pattern:
            check_replacement("repl", repl, self.pattern)
        self.repl = repl
        self.replacement = Replacement("repl", repl, as_group=True) if self.pattern is None else None

    def change(self, text: str) -> str:
        if self.replacement is None:
            assert self.pattern is not None
            return self.pattern.sub(self.repl, text)
        if ":" not in text and "/" not in text and "www" not in text.lower():
            return text
        parts: list[str] = []
        done = 0
        while hint := LINK_HINT.search(text, done):
            # a link contains no space, so the rest of the text is not searched
            start = text.rfind(" ", done, hint.start()) + 1 or done
            end = text.find(" ", hint.end())
            end = len(text) if end < 0 else end
            parts += (text[done:start], link_pattern().sub(self._put, text[start:end]))
            done = end
        return "".join((*parts, text[done:])) if parts else text

    def _put(self, match: re.Match[str]) -> str:
        assert self.replacement is not None
        before = match[1] or match[2] or ""
        return before + self.replacement.expand(match[0][len(before) :])
