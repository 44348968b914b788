"""Filter rows by the value of a field."""

from __future__ import annotations

from typing import Any

from dovetail.recipes.operators.base import Filter, Row
from dovetail.recipes.operators.support.fields import FieldReader, check_field_name


class SpecifiedFieldFilter(Filter):
    """Keep rows whose field is one of `target_value`; of a list, all items must be, so an empty list is kept.

    Without `target_value` all rows are kept. Data-Juicer raises at the first row if `field_key` is empty; here that is
    said when the operator is made.
    """

    def __init__(self, *, field_key: str = "", target_value: list[Any] | tuple[Any, ...] | None = ()) -> None:
        self.field_key = check_field_name(field_key, needed=True)
        if target_value is not None and not isinstance(target_value, list | tuple):
            raise ValueError(f"target_value is {target_value!r}, which is not a list; write [{target_value!r}]")
        self.targets = list(target_value or ())
        self._read = FieldReader(field_key)

    def columns(self) -> tuple[str, ...]:
        return (self.field_key,)

    def measure(self, row: Row, stats: dict[str, Any]) -> None:
        if self.field_key not in stats:
            stats[self.field_key] = self._read(row)

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        if not self.targets:
            return True
        value = stats[self.field_key]
        values = value if isinstance(value, list | tuple) else (value,)
        return all(one in self.targets for one in values) is not self.reversed_range
