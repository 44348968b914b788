"""Functions that tests use as stages."""

from __future__ import annotations

from typing import Any


def same(items: list[Any]) -> list[Any]:
    """The items, unchanged."""
    return items
