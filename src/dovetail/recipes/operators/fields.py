"""What is in a field of a row? `meta.score` is the field `score` of the mapping in the field `meta`."""

from __future__ import annotations

from typing import Any

from dovetail.recipes.operators.base import Row, missing


def field_name(value: object, *, needed: bool = False) -> str:
    """The value of a parameter `field_key`."""
    if not isinstance(value, str):
        raise ValueError(f"field_key is {value!r}, which is not the name of a field")  # noqa: TRY004
    if needed and not value:
        raise ValueError(
            "field_key is empty: name the field, with dots for what is inside, such as field_key: meta.score"
        )
    return value


class Reader:
    """What gives a field of any row, or raises BadField."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.path = field.split(".")

    def __call__(self, row: Row) -> Any:
        value: Any = row
        for name in self.path:
            if not isinstance(value, dict) or name not in value:
                raise missing(row, self.field)
            value = value[name]
        return value
