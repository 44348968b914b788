"""Regular expressions of recipes: the semantics of the package `regex` translated to `re`, and replacements.

In the package regex, which Data-Juicer uses, the file separators U+001C to U+001F are not white space, and the marks of
Thai, Hindi or Arabic words are part of words: with `re` alone, `[^\\w\\s]` would remove the vowels of a Hindi text. So
`\\s`, `\\w` and `\\b` are expanded to character classes. Syntax that only regex has, such as `\\p{L}`, is an error.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING

from dovetail.recipes.operators.support.parameter_checks import ADAPTER_HINT, NeedsDataJuicer, check_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPACE_CLASS = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Contents of a character class `[...]` that matches white space."""
WORD_CATEGORIES = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc"))
JOINERS = range(0x200C, 0x200E)
CIRCLED_LETTERS = range(0x24B6, 0x24EA)
IDEOGRAPHS = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3))
ASTRAL_WORD_RANGES = (
    r"\U00010000-\U0001cfff\U0001d400-\U0001d7ff\U0001df00-\U0001ecff\U0001ee00-\U0001eeff\U0001f130-\U0001f149"
    r"\U0001f150-\U0001f169\U0001f170-\U0001f189\U00020000-\U000323af\U000e0100-\U000e01ef"
)
"""Word characters above U+FFFF, as few blocks, because `re` tests these ranges one by one."""
TOKEN = re.compile(r"\\[\s\S]|\[\^?\]?|\]|[^\\\[\]]+|\\")
OWN_FLAGS = re.compile(r"\(\?[imsu]*[axL]")
"""Flags that change the meaning of letters or spaces in a pattern: such a pattern is not translated."""


def _word_codes() -> Iterator[int]:
    start = 0
    for first, last in (*IDEOGRAPHS, (0xD800, 0xFFFF)):
        for code in range(start, first):
            if unicodedata.category(chr(code)) in WORD_CATEGORIES or code in JOINERS or code in CIRCLED_LETTERS:
                yield code
        start = last + 1
    for code in range(0xF900, 0x10000):
        if unicodedata.category(chr(code)) in WORD_CATEGORIES:
            yield code


@cache
def _word_ranges() -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for code in _word_codes():
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    return tuple(sorted((*ranges, *IDEOGRAPHS)))


@cache
def word_class() -> str:
    """Contents of a character class that matches word characters."""
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in _word_ranges()) + ASTRAL_WORD_RANGES


@cache
def _non_word_class() -> str:
    """Contents of a character class that matches all other characters up to U+FFFF."""
    gaps = []
    start = 0
    for first, last in _word_ranges():
        if first > start:
            gaps.append(f"\\u{start:04x}-\\u{first - 1:04x}")
        start = last + 1
    return "".join(gaps) + f"\\u{start:04x}-\\uffff\\U0001f000-\\U0001f12f\\U0001f18a-\\U0001ffff"


def word_boundary() -> str:
    r"""Pattern of `\b`."""
    return f"(?:(?<=[{word_class()}])(?![{word_class()}])|(?<![{word_class()}])(?=[{word_class()}]))"


def _non_word_boundary() -> str:
    return f"(?:(?<=[{word_class()}])(?=[{word_class()}])|(?<![{word_class()}])(?![{word_class()}]))"


OUTSIDE_CLASS: dict[str, Callable[[], str]] = {
    r"\s": lambda: f"[{SPACE_CLASS}]",
    r"\S": lambda: f"[^{SPACE_CLASS}]",
    r"\w": lambda: f"[{word_class()}]",
    r"\W": lambda: f"[^{word_class()}]",
    r"\b": word_boundary,
    r"\B": _non_word_boundary,
}
INSIDE_CLASS: dict[str, Callable[[], str]] = {
    r"\s": lambda: SPACE_CLASS,
    r"\S": lambda: r"\S\x1c-\x1f",
    r"\w": word_class,
    r"\W": _non_word_class,
}


def expand_escapes(pattern: str) -> str:
    r"""The pattern with `\s`, `\w` and `\b` as in the package regex."""
    if OWN_FLAGS.match(pattern):
        return pattern
    parts = []
    in_a_class = False
    for token in TOKEN.findall(pattern):
        if token[0] == "[" and not in_a_class:
            in_a_class = True
        elif token[-1] == "]" and token[0] != "\\":
            in_a_class = False
        make = (INSIDE_CLASS if in_a_class else OUTSIDE_CLASS).get(token)
        parts.append(make() if make else token)
    return "".join(parts)


def strip_python_quotes(pattern: str) -> str:
    """The pattern without r'...', which Python users put around patterns in YAML."""
    if len(pattern) > 2 and (pattern[:2], pattern[-1]) in (("r'", "'"), ('r"', '"')):
        return pattern[2:-1]
    return pattern


def compile_pattern(name: str, pattern: object) -> re.Pattern[str]:
    """Compile the pattern of a parameter; ValueError has the position of the error."""
    plain = strip_python_quotes(check_text(name, pattern))
    try:
        re.compile(plain, re.DOTALL)
    except re.error as error:
        at = f" at position {error.pos}: {plain[error.pos : error.pos + 20]!r}" if error.pos is not None else ""
        raise NeedsDataJuicer(
            f"{name} {plain!r} is not a regular expression of Python's re: {error.msg}{at}; "
            f"if it is one for the package regex, {ADAPTER_HINT}"
        ) from None
    return re.compile(expand_escapes(plain), re.DOTALL)


def check_replacement(name: str, repl: object, pattern: re.Pattern[str]) -> str:
    """Check that the groups of a replacement exist in the pattern."""
    checked = check_text(name, repl)
    try:
        # an empty alternative makes every pattern match, and keeps its groups
        re.compile(f"{pattern.pattern}|").sub(checked, "")
    except (re.error, IndexError) as error:
        raise ValueError(f"{name} {repl!r} is not a valid replacement for {pattern.pattern[:80]!r}: {error}") from None
    return checked


ANY_TEXT_GROUP = re.compile("([\\s\\S]*)")
ANY_TEXT = re.compile("[\\s\\S]*")


class Replacement:
    r"""Replacement function: `repl`, in which `\g<0>`, and with `as_group` `\1`, is the match."""

    def __init__(self, name: str, repl: object, *, as_group: bool = False) -> None:
        self._pattern = ANY_TEXT_GROUP if as_group else ANY_TEXT
        self._repl = check_replacement(name, repl, self._pattern)
        self._plain = "\\" not in self._repl

    def expand(self, found: str) -> str:
        if self._plain:
            return self._repl
        match = self._pattern.fullmatch(found)
        assert match is not None
        return match.expand(self._repl)
