"""Group rows with the same values in some fields."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from dovetail.recipes.operators.base import Grouper, Row
from dovetail.recipes.operators.support.parameter_checks import parameter_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class KeyValueGrouper(Grouper):
    """Group rows with the same values in `group_by_keys`, by default the same text, into one row.

    Groups are in the order of their first rows. Values are equal if their text is equal: 1 and 1.0 are not. A missing
    field equals null, as in Data-Juicer, which logs a warning. `meta.tags.0` is the first item of a list. Rows are held
    in memory until their group and all groups before it are complete.
    """

    def __init__(self, *, group_by_keys: Sequence[str] | None = None) -> None:
        keys = group_by_keys or ()
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise parameter_error("group_by_keys", "a list of fields, such as [meta.lang]", group_by_keys)
        self.group_by_keys = tuple(keys)

    def columns(self) -> tuple[str, ...]:
        """No field is required."""
        return ()

    def groups(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        paths = [key.split(".") for key in self.group_by_keys or (self.text_key,)]
        left = Counter(_group_key(row, paths) for row in rows)
        order = iter(list(left))
        first = next(order, b"")
        waiting: dict[bytes, list[Row]] = {}
        for row in rows:
            key = _group_key(row, paths)
            waiting.setdefault(key, []).append(row)
            left[key] -= 1
            while first and not left[first]:
                yield waiting.pop(first)
                first = next(order, b"")


def _group_key(row: Row, paths: Sequence[Sequence[str]]) -> bytes:
    """A short digest of the values, because there may be many long ones."""
    values = repr([_value_at(row, path) for path in paths])
    return blake2b(values.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _value_at(row: Row, path: Sequence[str]) -> Any:
    value: Any = row
    for name in path:
        try:
            value = value[int(name) if name.isdecimal() else name]
        except (KeyError, IndexError, TypeError):
            return None
    return value
