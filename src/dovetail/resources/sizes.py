"""How many bytes is "1.5GB", and how is a number of bytes or thousandths written?"""

from __future__ import annotations

import math
import re

SIZE_LIMIT_BYTES = 1 << 60
"""1 EB: more than any machine has, so a larger number is a slip of the pen."""

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(
    r"(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(?P<unit>[kmgtp]?)(?P<b>i?b)?", re.IGNORECASE
)


def parse_size(value: object) -> int:
    """Bytes of a size as people write it; a ValueError says what to write instead.

    MB and MiB are both 1024-based: that is what users of '2GB' cards and GPU memory hints mean.
    """
    if not isinstance(value, str):
        hint = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else "4"
        raise ValueError(f"{value!r} has no unit: write '{hint}GB', '{hint}MB' or '{hint}B'")  # noqa: TRY004
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size: write it like '1.5GB', '500MB' or '64KiB'")
    if not match["unit"] and not match["b"]:
        raise ValueError(f"{value!r} has no unit: write '{value.strip()}GB', '{value.strip()}MB' or '{value.strip()}B'")
    number = float(match["number"])
    if number < 0 or math.copysign(1.0, number) < 0:
        raise ValueError(f"{value!r} is negative: write a size of 0 or more, like '2GB'")
    size = number * float(1024 ** _UNITS[match["unit"].lower()])
    if size > SIZE_LIMIT_BYTES:
        raise ValueError(f"{value!r} is more than any machine has: write at most '1024PB'")
    return round(size)


def exact_size(size_bytes: int) -> str:
    """The shortest text that `parse_size` reads back to the very same number."""
    for unit, power in (("PB", 5), ("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        whole, rest = divmod(size_bytes * 1000, 1024**power)
        if whole >= 1000 and not rest:
            return f"{_decimals(whole)}{unit}"
    return f"{size_bytes}B"


def about_size(size_bytes: int) -> str:
    """A size for people: three digits are enough."""
    for unit, power in (("PB", 5), ("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        if size_bytes >= 1024**power:
            return f"{float(f'{size_bytes / 1024**power:.3g}'):g}{unit}"
    return f"{size_bytes}B"


def parse_milli(number: float) -> int:
    """Thousandths of a number, rounded down, so that seven workers of 1/7 fit where one of 1 does."""
    return math.floor(number * 1000 + 1e-6)


def milli(amount_milli: int) -> str:
    """Thousandths as people write them: 2500 is '2.5'."""
    return _decimals(amount_milli)


def _decimals(thousandths: int) -> str:
    sign = "-" if thousandths < 0 else ""
    whole, rest = divmod(abs(thousandths), 1000)
    return f"{sign}{whole}" + (f".{rest:03d}".rstrip("0") if rest else "")
