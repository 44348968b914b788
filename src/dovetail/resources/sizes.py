"""Parse and format byte sizes and thousandths."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from dovetail.errors import short_repr

SIZE_LIMIT_BYTES = 1 << 60
"""1 EB: more than any machine has, so a larger number is a typing error."""

EXAMPLE_SIZES = ("4GB", "500MB", "64KiB")

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(
    r"(?P<number>[-+]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?)\s*(?P<unit>[kmgtp]?)(?P<b>i?b)?", re.IGNORECASE
)


class SizeError(ValueError):
    """A value is not a size: what is wrong with it, and sizes to write instead."""

    def __init__(self, value: object, reason: str, examples: tuple[str, ...]) -> None:
        self.value = value
        self.reason = reason
        self.examples = examples
        *others, last = map(repr, examples)
        super().__init__(f"{short_repr(value)} {reason}: write {', '.join(others)}{' or ' if others else ''}{last}")

    def __reduce__(self) -> tuple[type[SizeError], tuple[object, str, tuple[str, ...]]]:
        return type(self), (self.value, self.reason, self.examples)


def parse_size(value: object) -> int:
    """Bytes of a size such as '4GB'; a SizeError names sizes to write instead.

    MB and MiB are both 1024-based: that is what users of '2GB' cards and GPU memory hints mean.
    """
    if not isinstance(value, str):
        raise SizeError(value, "has no unit", _with_units(value))
    text = value.strip()
    match = _SIZE.fullmatch(text)
    if match is None or len(text) > 100:
        raise SizeError(value, "is not a size", EXAMPLE_SIZES)
    if text.startswith("-"):
        raise SizeError(value, "is negative", EXAMPLE_SIZES)
    if not match["unit"] and not match["b"]:
        raise SizeError(value, "has no unit", _with_units(text))
    size = Decimal(match["number"]) * 1024 ** _UNITS[match["unit"].lower()]
    if size > SIZE_LIMIT_BYTES:
        raise SizeError(value, "is more than the limit of 1024PB", ("1024PB",))
    return int(size.to_integral_value())


def _with_units(value: object) -> tuple[str, ...]:
    """The number with units, if that would be a size; else examples."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < SIZE_LIMIT_BYTES
    number = str(value) if isinstance(value, str) or is_number else ""
    for unit in ("GB", "MB", "B"):
        match = _SIZE.fullmatch(f"{number}{unit}") if len(number) < 100 else None
        if match is None or number.startswith("-") or Decimal(match["number"]) * 1024**3 > SIZE_LIMIT_BYTES:
            return EXAMPLE_SIZES
    return tuple(f"{number}{unit}" for unit in ("GB", "MB", "B"))


def format_exact_size(size_bytes: int) -> str:
    """The shortest string that `parse_size` reads back to the same number."""
    for unit, power in (("PB", 5), ("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        whole, rest = divmod(size_bytes * 1000, 1024**power)
        if whole >= 1000 and not rest:
            return f"{_format_decimal(whole)}{unit}"
    return f"{size_bytes}B"


SHORT_SIZE_CHARS = 7
"""Longest exact size that is shown as it is."""


def format_size_below(size_bytes: int) -> str:
    """A short text of this size or, if its exact text is long, of the next smaller tenth of a unit."""
    exact = format_exact_size(size_bytes)
    if len(exact) <= SHORT_SIZE_CHARS:
        return exact
    for unit, power in (("PB", 5), ("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        tenths = size_bytes * 10 // 1024**power
        if tenths >= 10:
            return f"{_format_decimal(tenths * 100)}{unit}"
    return exact


def format_size(size_bytes: int) -> str:
    """A size with three digits, for display."""
    for unit, power in (("PB", 5), ("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        if size_bytes >= 1024**power:
            return f"{float(f'{size_bytes / 1024**power:.3g}'):g}{unit}"
    return f"{size_bytes}B"


def parse_milli(number: float) -> int:
    """Thousandths of a number, rounded down, so that seven workers of 1/7 fit where one of 1 does. A number that was
    written with three decimals is exact: 0.57 is 570, although 0.57 * 1000 is a little less."""
    nearest = round(number * 1000)
    return nearest if math.isclose(nearest / 1000, number, rel_tol=1e-12) else math.floor(number * 1000)


def format_milli(amount_milli: int) -> str:
    """Thousandths as a decimal number: 2500 is '2.5'."""
    return _format_decimal(amount_milli)


def from_milli(amount_milli: int) -> int | float:
    """Thousandths as the number that `parse_milli` reads back: 2500 is 2.5, 2000 is 2."""
    whole, rest = divmod(amount_milli, 1000)
    return amount_milli / 1000 if rest else whole


def _format_decimal(thousandths: int) -> str:
    sign = "-" if thousandths < 0 else ""
    whole, rest = divmod(abs(thousandths), 1000)
    return f"{sign}{whole}" + (f".{rest:03d}".rstrip("0") if rest else "")
