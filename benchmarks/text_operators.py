"""The five text operators of `text.py`: functions from one row to a row or None.

On the corpus of `text.py` they give the results of Data-Juicer's whitespace_normalization_mapper, clean_links_mapper,
text_length_filter, special_characters_filter and word_repetition_filter.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from typing import Any

Row = dict[str, Any]

SPACES = dict.fromkeys(map(ord, "\t\x84\xa0\u202f\u205f\u2060\u3000\ufffc"), " ") | dict.fromkeys(
    range(0x2000, 0x200E), " "
)
LINK = re.compile(
    r"""\b(?:[a-z][\w-]+:(?:/{1,3}|[a-z0-9%])        # https:// or mailto:a
        |www\d{0,3}[.]                                # or www.
        |[a-z0-9.-]+[.][a-z]{2,4}/)                   # or example.com/
        (?:[^\s()<>]+|\((?:[^\s()<>]+|\([^\s()<>]+\))*\))+
        (?:\((?:[^\s()<>]+|\([^\s()<>]+\))*\)|[^\s`!()\[\]{};:'".,<>?«»“”‘’])  # not the full stop of its sentence
    """,  # noqa: RUF001
    re.VERBOSE | re.IGNORECASE,
)
MIN_LENGTH, MAX_LENGTH = 50, 5000
MAX_SPECIAL_SHARE = 0.25
SPECIAL_KINDS = "PSZNC"
"""Punctuation, symbols, spaces, numbers, controls."""
SPECIAL = frozenset(
    letter
    for letter in map(chr, (*range(0x250), *range(0x2000, 0x2C00), *range(0x3000, 0x3040), *range(0xFF00, 0xFFF0)))
    if unicodedata.category(letter)[0] in SPECIAL_KINDS
)
WORD_ENDS = f"{string.punctuation}{string.digits}“”‘’«»…"  # noqa: RUF001
"""Characters that are stripped from the ends of words."""
RUN_WORDS = 5
MAX_REPEATED_SHARE = 0.5


def normalize_whitespace(row: Row) -> Row:
    """Replace every kind of space by a plain space."""
    row["text"] = row["text"].strip().translate(SPACES)
    return row


def clean_links(row: Row) -> Row:
    row["text"] = LINK.sub("", row["text"])
    return row


def fit_length(row: Row) -> Row | None:
    return row if MIN_LENGTH <= len(row["text"]) <= MAX_LENGTH else None


def few_special_characters(row: Row) -> Row | None:
    text = row["text"]
    special = sum(map(SPECIAL.__contains__, text))
    return row if special <= MAX_SPECIAL_SHARE * len(text) else None


def few_repetitions(row: Row) -> Row | None:
    """Keep rows in which at most half of the runs of five words occur more than once."""
    words = [word.strip(WORD_ENDS) for word in row["text"].lower().split()]
    runs = Counter(zip(*(words[at:] for at in range(RUN_WORDS)), strict=False))
    repeated = sum(count for count in runs.values() if count > 1)
    return row if repeated <= MAX_REPEATED_SHARE * runs.total() else None


OPERATORS = (normalize_whitespace, clean_links, fit_length, few_special_characters, few_repetitions)
