"""Type words of operator parameters (`int>0`, `text?`, `'avg'|'max'`): parsing, checks, examples, YAML text."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dovetail.documents.fields import is_finite

_TYPE_WORD = re.compile(r"(?P<name>[a-z]+)(?:(?P<sign>>=?)(?P<least>\d+)| (?P<low>\d+)\.\.(?P<high>\d+))?")
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w ./-]*")
_YAML_RESERVED = ("null", "true", "false", "yes", "no", "on", "off")
"""Unquoted, they are not strings in YAML 1.1, in any case."""
_NUMBER = re.compile(r"\s*[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?\s*")
_EXAMPLES: dict[str, Any] = {"flag": True, "text": "abc", "texts": ["abc"], "mapping": {}, "list": [], "any": "abc"}
_TYPE_TEXTS = {
    "flag": "true or false",
    "text": "a string",
    "texts": "a list of strings",
    "mapping": "a mapping",
    "list": "a list",
    "any": "anything",
    "int": "a whole number",
    "ints": "a list of whole numbers",
    "float": "a number",
}


class _YamlEscapes(dict[int, str]):
    """Escapes of a double-quoted string. JSON's differ for characters outside the BMP."""

    def __missing__(self, code: int) -> str:
        known = {10: "\\n", 9: "\\t", 34: '\\"', 92: "\\\\"}
        return known.get(code) or (chr(code) if chr(code).isprintable() else f"\\U{code:08x}")


@dataclass(frozen=True, slots=True)
class ParameterType:
    """One alternative of a parameter's type."""

    name: str
    """Such as "text"; "" for a literal value."""
    constant: str = ""
    low: int | None = None
    high: int | None = None
    exclusive: bool = False
    """Whether `low` itself is excluded."""

    def text(self) -> str:
        if not self.name:
            return to_yaml(self.constant)
        text = _TYPE_TEXTS[self.name]
        if self.high is not None:
            return f"{text} from {self.low} to {self.high}"
        if self.low is None:
            return text
        return f"{text} above {self.low}" if self.exclusive else f"{text} of {self.low} or more"

    def fits(self, value: object, *, unbounded: bool = False) -> bool:
        """`unbounded`: infinity is valid and means "no bound"."""
        match self.name:
            case "":
                return value == self.constant
            case "any":
                return True
            case "flag":
                return isinstance(value, bool)
            case "text":
                return isinstance(value, str)
            case "mapping":
                return isinstance(value, Mapping)
            case "int" | "float":
                return self._is_number(value, unbounded)
        if not isinstance(value, list | tuple):
            return False
        if self.name == "texts":
            return all(isinstance(item, str) for item in value)
        return self.name == "list" or all(self._is_number(item, unbounded) for item in value)

    def _is_number(self, value: object, unbounded: bool) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            return False
        if not is_finite(value):
            return unbounded and self.in_range(value)
        is_whole = isinstance(value, int) or value.is_integer()
        return (self.name == "float" or is_whole) and self.in_range(value)

    def in_range(self, value: float) -> bool:
        if self.low is not None and (value <= self.low if self.exclusive else value < self.low):
            return False
        return self.high is None or value <= self.high

    def example(self) -> Any:
        if not self.name:
            return self.constant
        if self.name in _EXAMPLES:
            return _EXAMPLES[self.name]
        number = 1 if self.low is None else self.low + self.exclusive
        return [number] if self.name == "ints" else float(number) if self.name == "float" else number


@cache
def parse_types(word: str) -> tuple[ParameterType, ...]:
    """The alternatives of a type word without its "?"."""
    return tuple(_parse_type(part) for part in word.split("|"))


def _parse_type(part: str) -> ParameterType:
    if part.startswith("'"):
        return ParameterType("", constant=part.strip("'"))
    match = _TYPE_WORD.fullmatch(part)
    assert match is not None, f"{part!r} is not a type word"
    low = match["least"] or match["low"]
    high = int(match["high"]) if match["high"] else None
    return ParameterType(match["name"], low=int(low) if low else None, high=high, exclusive=match["sign"] == ">")


def type_text(word: str, *, nullable: bool = False) -> str:
    """A type word as text for messages."""
    texts = [kind.text() for kind in parse_types(word)] + ["null"] * nullable
    return f"{', '.join(texts[:-1])} or {texts[-1]}" if len(texts) > 1 else texts[0]


def to_int(value: Any) -> Any:
    """A float as an integer: 1e3 is 1000, infinity is the largest integer; other values unchanged."""
    if isinstance(value, list | tuple):
        return [to_int(item) for item in value]
    if not isinstance(value, float):
        return value
    if math.isinf(value):
        return sys.maxsize if value > 0 else -sys.maxsize
    return int(value) if value.is_integer() else value


def parse_number(text: str) -> int | float | None:
    """The number in a quoted string; None if it is not a number."""
    if len(text) > 30 or not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    if math.isinf(number):
        return None
    return int(number) if number.is_integer() and "." not in text else number


def _yaml_key(key: object) -> str:
    plain = isinstance(key, str) and _PLAIN_KEY.fullmatch(key) and key.casefold() not in _YAML_RESERVED
    return str(key) if plain else to_yaml(key)


def to_yaml(value: object) -> str:
    """A value as one line of YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, float) and "." not in repr(value):
        return repr(value).replace("e", ".0e")  # 1e-05 is a text in YAML 1.1
    if isinstance(value, str):
        return f"'{value}'" if value.isprintable() and "'" not in value else f'"{value.translate(_YamlEscapes())}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_yaml(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_yaml_key(key)}: {to_yaml(item)}' for key, item in value.items())}}}"
    return repr(value)
