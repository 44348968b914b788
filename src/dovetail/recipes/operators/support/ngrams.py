"""N-grams of words and characters: counts of repeated ones, and shingles for MinHash."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING
from unicodedata import category

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

PREFIX_LENGTH = 3
QUICK_CHECK_MAX_RUNS = 256
"""Up to this many words, runs of three rarely repeat; then no longer run does, which is fast to check."""
MAX_DIRECT_LENGTH = 64
"""Longer runs are composed from shorter ones, because slicing all of them would take quadratic time."""

RepeatCounts = tuple[int, list[int]]
"""Number of different runs, and the counts of repeated ones."""


def repeated_words(words: Sequence[str], length: int) -> RepeatCounts:
    total = len(words) - length + 1
    if total < 1:
        return 0, []
    if length > MAX_DIRECT_LENGTH:
        return _count_repeats(_number_long_runs(words, length), total)
    if length > PREFIX_LENGTH and total < QUICK_CHECK_MAX_RUNS:
        beginnings = set(islice(zip(words, words[1:], words[2:], strict=False), total))
        if len(beginnings) == total:
            return total, []
    return _count_repeats(zip(*[words[at:] for at in range(length)], strict=False), total)


def repeated_characters(text: str, length: int) -> RepeatCounts:
    total = len(text) - length + 1
    if total < 1:
        return 0, []
    if length > MAX_DIRECT_LENGTH:
        return _count_repeats(_number_long_runs(text, length), total)
    return _count_repeats([text[at : at + length] for at in range(total)], total)


def _count_repeats(runs: Iterable[Hashable], total: int) -> RepeatCounts:
    counts = Counter(runs)
    if len(counts) == total:
        return total, []
    return len(counts), [count for count in counts.values() if count > 1]


def _number_long_runs(items: Sequence[Hashable], length: int) -> Sequence[Hashable]:
    """A number for each run; equal runs have equal numbers. Computed for 2 items, then 4, 8, and so on."""
    total = len(items) - length + 1
    width = 1
    while width < length:
        step = min(width, length - width)
        seen: dict[Hashable, int] = {}
        pairs = zip(items, islice(items, step, None), strict=False)
        items = [seen.setdefault(pair, len(seen)) for pair in pairs]
        width += step
        if len(seen) == len(items):  # different runs stay different when extended
            return items[:total]
    return items


TOKENIZATIONS = ("space", "punctuation", "character")
_NEWER_PUNCTUATION = (
    "\u1b4e\u1b4f\u1b7f\u2e60-\u2e63\U00010d6e\U00010ed0\U000113d4\U000113d5\U000113d7\U000113d8"
    "\U00011b00-\U00011b09\U00011be1\U00011f43-\U00011f4f\U00016d6d-\U00016d6f\U0001e5ff"
)
"""Up to Unicode 17, as in Data-Juicer's `regex`; Python 3.11 has Unicode 14."""

Shingles = Callable[[str], "tuple[bytes, set[bytes]]"]
"""Text -> its shingles; with too few tokens, no shingles and all tokens as one."""


def encode_text(text: str) -> bytes:
    """UTF-8 that accepts lone surrogates, which JSON may contain."""
    return text.encode("utf-8", "surrogatepass")


@cache
def punctuation_pattern() -> re.Pattern[str]:
    found = "".join(chr(code) for code in range(min(0x20000, sys.maxunicode)) if category(chr(code))[0] == "P")
    return re.compile(f"[{re.escape(found)}{_NEWER_PUNCTUATION}]")


def shingler(tokenization: str, window: int) -> Shingles:
    if tokenization == "character":
        return lambda text: _character_shingles(text, window)
    if tokenization == "punctuation":
        split = punctuation_pattern().split
        return lambda text: _word_shingles([encode_text(part) for part in split(text)], window, b",")
    return lambda text: _word_shingles(list(filter(None, encode_text(text).split(b" "))), window, b" ")


def _word_shingles(words: Sequence[bytes], window: int, never_in_words: bytes) -> tuple[bytes, set[bytes]]:
    if len(words) < window:
        return never_in_words.join(words), set()
    if window > 64:  # more lists would cost more than they save
        return b"", {b" ".join(words[start : start + window]) for start in range(len(words) - window + 1)}
    return b"", set(map(b" ".join, zip(*(words[start:] for start in range(window)), strict=False)))


def _character_shingles(text: str, window: int) -> tuple[bytes, set[bytes]]:
    last = len(text) - window
    if last < 0:
        return encode_text(text), set()
    if text.isascii():
        data = text.encode()
        return b"", {data[start : start + window] for start in range(last + 1)}
    return b"", {encode_text(run) for run in {text[start : start + window] for start in range(last + 1)}}
