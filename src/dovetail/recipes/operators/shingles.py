"""What are the pieces of a text that are compared? Its tokens, and every run of so many of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from unicodedata import category

TOKENIZATIONS = ("space", "punctuation", "character")
_NEWER_PUNCTUATION = (
    "\u1b4e\u1b4f\u1b7f\u2e60-\u2e63\U00010d6e\U00010ed0\U000113d4\U000113d5\U000113d7\U000113d8"
    "\U00011b00-\U00011b09\U00011be1\U00011f43-\U00011f4f\U00016d6d-\U00016d6f\U0001e5ff"
)
"""Up to Unicode 17, as Data-Juicer's `regex` has it; Python 3.11 stopped at 14."""

Shingles = Callable[[str], "tuple[bytes, set[bytes]]"]
"""Text -> its runs; or none, and all of its tokens as one, if there are too few of them."""


def encoded(text: str) -> bytes:
    """Half of a surrogate pair, as JSON may have it, is no reason to set a row aside."""
    return text.encode("utf-8", "surrogatepass")


@cache
def punctuation() -> re.Pattern[str]:
    found = "".join(chr(code) for code in range(min(0x20000, sys.maxunicode)) if category(chr(code))[0] == "P")
    return re.compile(f"[{re.escape(found)}{_NEWER_PUNCTUATION}]")


def shingler(tokenization: str, window: int) -> Shingles:
    if tokenization == "character":
        return lambda text: _of_characters(text, window)
    if tokenization == "punctuation":
        split = punctuation().split
        return lambda text: _of_words([encoded(part) for part in split(text)], window, b",")
    return lambda text: _of_words(list(filter(None, encoded(text).split(b" "))), window, b" ")


def _of_words(words: Sequence[bytes], window: int, never_in_words: bytes) -> tuple[bytes, set[bytes]]:
    if len(words) < window:
        return never_in_words.join(words), set()
    if window > 64:  # so many lists would cost more than they save
        return b"", {b" ".join(words[start : start + window]) for start in range(len(words) - window + 1)}
    return b"", set(map(b" ".join, zip(*(words[start:] for start in range(window)), strict=False)))


def _of_characters(text: str, window: int) -> tuple[bytes, set[bytes]]:
    last = len(text) - window
    if last < 0:
        return encoded(text), set()
    if text.isascii():
        data = text.encode()
        return b"", {data[start : start + window] for start in range(last + 1)}
    return b"", {encoded(run) for run in {text[start : start + window] for start in range(last + 1)}}
