"""Parse durations such as "90s" or "1h30m"."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dovetail.documents.fields import Mistake, Schema, Type, WrongValue, nearest, number_in
from dovetail.errors import UNSET, Change, ConfigError, Given, Problem, Subject, Text

if TYPE_CHECKING:
    from collections.abc import Iterator

DURATION_LIMIT_S = 366 * 86_400
"""One year: a longer duration is a typing error."""

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|d)\s*", re.ASCII)
DURATION_PATTERN = r"^\s*((\d+(\.\d*)?|\.\d+)\s*(ms|s|m|h|d)\s*)+$"


def parse_duration(value: object) -> float:
    """Seconds of 90, "90s", "5m" or "1h30m"; ValueError if it is not one."""
    if isinstance(value, str):
        return _in_range(_seconds(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError('is not seconds, or a text such as "90s", "5m" or "1h"')  # noqa: TRY004
    return _in_range(value)


def _seconds(text: str) -> float:
    total, at, written = 0.0, 0, text.strip()
    while at < len(written):
        part = _PART.match(written, at)
        if part is None or len(written) > 100:
            raise ValueError('is not a time such as "90s", "5m" or "1h"')
        total += float(part[1]) * _SECONDS[part[2]]
        at = part.end()
    return total


def _in_range(seconds: float) -> float:
    if not 0 < seconds <= DURATION_LIMIT_S:
        raise ValueError("is not above 0 and at most 366 days")
    return float(seconds)


def checked_duration(name: str, value: object, code: str, example: str) -> float:
    """Seconds of an argument; ConfigError with this code, and `example` as the fix, if it is no duration."""
    try:
        return parse_duration(value)
    except ValueError as error:
        message = Text(Given(name, value), f" {error}")
        subject = Subject("setting", name)
        raise ConfigError(Problem(code, message, fixes=(Change({name: example}),), subject=subject)) from None


def _duration_mistakes(value: object) -> Iterator[Mistake]:
    try:
        parse_duration(value)
    except ValueError as error:
        written = number_in(value) if isinstance(value, str) else None
        seconds = nearest(written, 0.001, 86_400, otherwise=90)
        yield WrongValue(value, DURATION_TEXT, str(error), (f"{seconds:g}s", UNSET))


DURATION_TEXT = "a number of seconds, or a string such as 90s, 5m or 1h"
DURATION_TEXT_SCHEMA: Schema = {"type": "string", "pattern": DURATION_PATTERN}
DURATION = Type(
    DURATION_TEXT,
    "90s",
    {"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": DURATION_LIMIT_S}, DURATION_TEXT_SCHEMA]},
    _duration_mistakes,
)
