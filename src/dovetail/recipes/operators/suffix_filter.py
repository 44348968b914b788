"""Filter rows by the suffix of the file that they come from."""

from __future__ import annotations

from typing import Any

from dovetail.recipes.operators.base import Filter, Row, missing_field
from dovetail.recipes.operators.support.parameter_checks import parameter_error

SUFFIX_FIELD = "__dj__suffix__"
"""Field with the suffix of the file that a row was read from, such as ".txt"."""


class SuffixFilter(Filter):
    """Keep rows whose suffix is exactly one of `suffixes`; without `suffixes`, all rows."""

    def __init__(self, *, suffixes: str | list[str] | tuple[str, ...] | None = ()) -> None:
        wanted: object = (suffixes,) if isinstance(suffixes, str) else suffixes or ()
        if not isinstance(wanted, list | tuple) or not all(isinstance(suffix, str) for suffix in wanted):
            raise parameter_error("suffixes", "a suffix such as .txt, or a list of suffixes", suffixes)
        self.suffixes: tuple[str, ...] = tuple(wanted)

    def columns(self) -> tuple[str, ...]:
        return (SUFFIX_FIELD,) if self.suffixes else ()

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        """No stats."""

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        if not self.suffixes:
            return True
        if SUFFIX_FIELD not in row:
            raise missing_field(row, SUFFIX_FIELD)
        return (row[SUFFIX_FIELD] in self.suffixes) is not self.reversed_range
