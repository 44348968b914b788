"""Filter rows by the value of a field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.recipes.operators.support.fields import FieldFilter
from dovetail.recipes.operators.support.parameter_checks import parameter_error

if TYPE_CHECKING:
    from dovetail.recipes.operators.base import Row


class SpecifiedFieldFilter(FieldFilter):
    """Keep rows whose field is one of `target_value`. If the field is a list, all its items must be; an empty list is
    kept. Without `target_value`, all rows are kept. Unlike in Data-Juicer, an empty `field_key` is an error before the
    run, not at the first row."""

    def __init__(self, *, field_key: str = "", target_value: list[Any] | tuple[Any, ...] | None = ()) -> None:
        super().__init__(field_key)
        if target_value is not None and not isinstance(target_value, list | tuple):
            raise parameter_error("target_value", f"a list, such as [{target_value!r}]", target_value)
        self.targets = list(target_value or ())

    def keeps(self, row: Row, stats: dict[str, Any]) -> bool:  # noqa: ARG002
        if not self.targets:
            return True
        value = stats[self.field_key]
        values = value if isinstance(value, list | tuple) else (value,)
        return all(one in self.targets for one in values) is not self.reversed_range
