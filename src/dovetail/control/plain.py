"""How is any value written as JSON so that it can be read back as it was?"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

TUPLE, PAIRS = "()", "{}"
"""Marks of what JSON has no form for: a tuple, and a mapping whose keys are not all text."""


def plain(value: object) -> Any:
    """Any value as JSON can hold it: tuples and odd keys are marked, what is no data at all becomes its text."""
    if isinstance(value, Enum):  # first, because some enums are numbers or texts too
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {TUPLE: [plain(inner) for inner in value]}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and value.keys().isdisjoint((TUPLE, PAIRS)):
            return {key: plain(inner) for key, inner in value.items()}
        return {PAIRS: [[plain(key), plain(inner)] for key, inner in value.items()]}
    return str(value)


def as_it_was(value: Any) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, list):
        return [as_it_was(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if TUPLE in value:
        return tuple(as_it_was(inner) for inner in value[TUPLE])
    if PAIRS in value:
        return {as_it_was(key): as_it_was(inner) for key, inner in value[PAIRS]}
    return {key: as_it_was(inner) for key, inner in value.items()}
