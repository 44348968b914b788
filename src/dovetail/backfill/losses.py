"""Which values would Arrow store as others without a word: 1.9 as 1, {"nmae": "x"} as NULL?"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from itertools import chain
from numbers import Integral, Number
from typing import TYPE_CHECKING, Any

from dovetail.backfill.types import is_list, stored, value_class
from dovetail.errors import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

WHOLE = (int, datetime.datetime, datetime.date, datetime.time, datetime.timedelta)
"""Python's values of the types that Arrow stores as whole numbers."""


class Loss(ValueError):
    """A value that would not be the same afterwards."""

    def __init__(self, message: str, value: object = None) -> None:
        super().__init__(message)
        self.value = value
        """The one, in what was given, that does not fit."""


@functools.lru_cache(maxsize=256)
def lossy(kind: Any) -> bool:
    """Whether anything can be lost in a type at all."""
    import pyarrow as pa

    kind = stored(kind)
    if pa.types.is_map(kind):
        return lossy(kind.key_type) or lossy(kind.item_type)
    if is_list(kind):
        return lossy(kind.value_type)
    return pa.types.is_struct(kind) or value_class(kind) in WHOLE


def check_losses(values: Sequence[Any], kind: Any) -> None:
    """Loss: one of these values, which Arrow takes for this type, would be stored as another."""
    import pyarrow as pa

    if not lossy(kind):
        return
    kind = stored(kind)
    if pa.types.is_struct(kind):
        _records(values, kind)
    elif pa.types.is_map(kind):
        pairs = list(chain.from_iterable(one.items() if isinstance(one, Mapping) else one for one in values if one))
        both = [tuple(pair.values()) if isinstance(pair, Mapping) else pair for pair in pairs]
        check_losses([key for key, _ in both], kind.key_type)
        check_losses([item for _, item in both], kind.item_type)
    elif is_list(kind):
        check_losses(_inside(values, kind.value_type), kind.value_type)
    else:
        _whole(values, kind)


def _whole(values: Sequence[Any], kind: Any) -> None:
    for sort in set(map(type, values)):
        if _may_be_broken(sort):
            for value in values:
                if type(value) is sort and _is_broken(value):
                    raise Loss(f"{shown(value)}, a {sort.__name__}, does not fit {kind}", value)


def _may_be_broken(sort: type) -> bool:
    return (issubclass(sort, Number) and not issubclass(sort, Integral)) or sort.__name__ == "ndarray"


def _is_broken(value: Any) -> bool:
    try:
        return bool(value != int(value))
    except (ValueError, OverflowError, TypeError):  # nan, inf
        return True


def _inside(values: Sequence[Any], kind: Any) -> list[Any]:
    """What is in lists and has to be looked at: nothing, where the types of the values say enough."""
    plain = [one for one in values if one is not None]
    numbers = value_class(stored(kind)) in WHOLE
    if any(hasattr(sort, "dtype") for sort in set(map(type, plain))):
        return _inside_arrays(plain, "iub" if numbers else "")
    if numbers and not any(map(_may_be_broken, set(map(type, chain.from_iterable(plain))))):
        return []
    return list(chain.from_iterable(plain))


def _inside_arrays(arrays: Sequence[Any], whole: str) -> list[Any]:
    """The same of numpy's, lists among them. Of floats only those that are broken."""
    found: list[Any] = []
    for one in arrays:
        number = one.dtype.kind if hasattr(one, "dtype") else "O"
        if number not in whole:
            found.extend(one[one % 1 != 0] if number == "f" else one)
    return found


def _records(values: Sequence[Any], kind: Any) -> None:
    fields = {field.name: field.type for field in kind}
    there = [one for one in values if one is not None]
    sorts = set(map(type, there))
    for sort in sorts:
        _same_order(sort, fields, kind)
    if all(issubclass(sort, tuple) for sort in sorts):
        columns = dict(zip(fields, zip(*there, strict=False), strict=False))
    else:
        rows = [one if isinstance(one, dict) else _by_name(one, fields) for one in there]
        check_names(set(chain.from_iterable(rows)), [*fields], f"in {kind}")
        columns = {
            name: tuple(row[name] for row in rows if name in row) for name, inner in fields.items() if lossy(inner)
        }
    for name, column in columns.items():
        check_losses(column, fields[name])


def _same_order(sort: type, fields: Mapping[str, Any], kind: Any) -> None:
    """Arrow takes tuples by the place of their values, whatever their names are."""
    names = getattr(sort, "_fields", None)
    if names is not None and list(names) != [*fields]:
        raise Loss(f"its fields are {', '.join(names)}, and not those of {kind}")


def _by_name(one: Any, fields: Mapping[str, Any]) -> dict[Any, Any]:
    return dict(zip(fields, one, strict=False) if isinstance(one, tuple) else one)


def check_names(given: set[Any], known: Sequence[str], where: str) -> None:
    """Loss: a name that nothing has a place for."""
    strange = sorted(map(str, given.difference(known)))
    if strange:
        raise Loss(f"there is no {strange[0]!r} {where}{did_you_mean(strange[0], known)}")
