"""Which values would Arrow store as others without a word: 1.9 as 1, {"nmae": "x"} as NULL, 1e300 as infinity?"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Mapping
from itertools import chain
from numbers import Integral, Number
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

from dovetail.backfill.types import is_list, stored, value_class
from dovetail.errors import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Test = tuple[Callable[[Any], Any], str]
"""What is true of a value that does not fit, and why it does not."""

WHOLE = (int, datetime.datetime, datetime.date, datetime.time, datetime.timedelta)
"""Python's values of the types that Arrow stores as whole numbers."""

OVER = {"float": 2.0**128 - 2.0**103, "halffloat": 65520.0}
"""The smallest number that becomes infinity in floats of less than 64 bits."""

TEXTS = (str, bytes, bytearray)
"""What Arrow takes for lists, of their letters, too."""

FINER = {"s": "it has fractions of a second", "ms": "it has microseconds", "us": "it has nanoseconds"}

UTC = ("UTC", "Etc/UTC", "Z", "+00:00")


class Loss(ValueError):
    """A value that would not be the same afterwards."""

    def __init__(self, message: str, value: object = None, why: str = "") -> None:
        super().__init__(message)
        self.value = value
        """The one, in what was given, that does not fit."""
        self.why = why


def _loss(value: object, kind: Any, why: str = "") -> Loss:
    because = f": {why}" if why else ""
    return Loss(f"{shown(value)}, a {type(value).__name__}, does not fit {kind}{because}", value, because)


@functools.lru_cache(maxsize=256)
def lossy(kind: Any, infinite: bool = False) -> bool:
    """Whether anything can be lost in a type at all; in narrow floats only if infinities are there."""
    kind = stored(kind)
    return _is_nested(kind) or value_class(kind) in WHOLE or (infinite and str(kind) in OVER)


def _is_nested(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind) or is_list(kind))


@functools.lru_cache(maxsize=256)
def narrow(kind: Any) -> bool:
    """Whether there are floats of less than 64 bits in a type."""
    import pyarrow as pa

    kind = stored(kind)
    if pa.types.is_struct(kind):
        return any(narrow(field.type) for field in kind)
    if pa.types.is_map(kind):
        return narrow(kind.key_type) or narrow(kind.item_type)
    return narrow(kind.value_type) if is_list(kind) else str(kind) in OVER


def infinities(array: Any) -> int:
    """How many there are in an Arrow array, also inside of lists and structs."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return infinities(array.storage)
    if pa.types.is_dictionary(kind):
        return infinities(array.dictionary)
    if pa.types.is_floating(kind):
        return pc.sum(pc.is_inf(array)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(infinities, array.flatten()))
    if pa.types.is_map(kind):
        return infinities(array.keys) + infinities(array.items)
    return infinities(array.flatten()) if is_list(kind) else 0


def loses_zone(given: Any, column: Any) -> bool:
    """Whether Arrow, which casts one type to the other, would store other hours, those of UTC."""
    import pyarrow as pa

    given, column = stored(given), stored(column)
    if is_list(given) and is_list(column):
        return loses_zone(given.value_type, column.value_type)
    if pa.types.is_struct(given) and pa.types.is_struct(column):
        return any(loses_zone(given.field(field.name).type, field.type) for field in column)
    both = pa.types.is_timestamp(given) and pa.types.is_timestamp(column)
    return both and column.tz is None and given.tz not in (None, *UTC)


def check_losses(values: Sequence[Any], kind: Any, found: Any) -> None:
    """Loss: one of these values, of which Arrow made this array of this type, is stored as another."""
    _check(values, kind, narrow(kind) and infinities(found) > 0)


def _check(values: Sequence[Any], kind: Any, infinite: bool) -> None:
    import pyarrow as pa

    if not lossy(kind, infinite):
        return
    kind = stored(kind)
    if pa.types.is_struct(kind):
        _records(values, kind, infinite)
    elif pa.types.is_map(kind):
        _no_texts(values, set(map(type, values)), kind)
        _pairs(values, kind, infinite)
    elif is_list(kind):
        _no_texts(values, set(map(type, values)), kind)
        if lossy(kind.value_type, infinite):
            _check(_inside(values, stored(kind.value_type)), kind.value_type, infinite)
    else:
        _leaf(values, kind)


def _no_texts(values: Sequence[Any], sorts: set[type], kind: Any) -> None:
    for sort in sorts:
        if issubclass(sort, TEXTS):
            raise _loss(next(value for value in values if type(value) is sort), kind)


def _pairs(values: Sequence[Any], kind: Any, infinite: bool) -> None:
    if not (lossy(kind.key_type, infinite) or lossy(kind.item_type, infinite)):
        return
    pairs = list(chain.from_iterable(one.items() if isinstance(one, Mapping) else one for one in values if one))
    both = [tuple(pair.values()) if isinstance(pair, Mapping) else pair for pair in pairs]
    _check([key for key, _ in both], kind.key_type, infinite)
    _check([item for _, item in both], kind.item_type, infinite)


def _leaf(values: Sequence[Any], kind: Any) -> None:
    sorts = set(map(type, values))
    for sort in sorts:
        tests = _tests(sort, kind)
        those = [value for value in values if type(value) is sort] if tests and len(sorts) > 1 else values
        for wrong, why in tests:
            if any(map(wrong, those)):
                raise _loss(next(filter(wrong, those)), kind, why)


def _tests(sort: type, kind: Any) -> list[Test]:
    """What has to be asked of values of this class: nothing, where the class says enough."""
    if str(kind) in OVER:
        return [(functools.partial(_is_over, OVER[str(kind)]), "it is too large")] if issubclass(sort, Number) else []
    if _may_be_broken(sort):
        return [(_is_broken, "")]
    if sort.__name__ in ("datetime64", "timedelta64") and value_class(kind) in (datetime.date, datetime.time):
        return [(lambda _: True, "")]  # Arrow takes its number, whatever that counts
    return [test for name, *test in _parts(kind) if hasattr(sort, name)]  # type: ignore[misc]


@functools.lru_cache(maxsize=256)
def _parts(kind: Any) -> tuple[tuple[str, Callable[[Any], Any], str], ...]:
    """Of times: attributes that have to be zero, or to have nothing, to fit a type."""
    sort = value_class(kind)
    if sort not in WHOLE or sort is int:
        return ()
    if sort is datetime.date:
        names = ("hour", "minute", "second", "microsecond", "nanosecond")
        return tuple((name, attrgetter(name), "it has a time of day") for name in names)
    found: list[tuple[str, Callable[[Any], Any], str]] = []
    if sort is datetime.time or (sort is datetime.datetime and kind.tz is None):
        found.append(("utcoffset", methodcaller("utcoffset"), "it has a zone, and the column has none"))
    micro, nano = ("microseconds", "nanoseconds") if sort is datetime.timedelta else ("microsecond", "nanosecond")
    if kind.unit == "s":
        found.append((micro, attrgetter(micro), FINER["s"]))
    if kind.unit == "ms":
        found.append((micro, lambda one: getattr(one, micro) % 1000, FINER["ms"]))
    if kind.unit != "ns":
        found.append((nano, attrgetter(nano), FINER[kind.unit]))  # pandas has them
    return tuple(found)


def _is_over(limit: float, value: Any) -> bool:
    return limit <= abs(float(value)) < math.inf


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
    if any(hasattr(sort, "dtype") for sort in set(map(type, plain))):
        return list(chain.from_iterable(_suspects(one, kind) for one in plain))
    if not _is_nested(kind) and not any(_tests(sort, kind) for sort in set(map(type, chain.from_iterable(plain)))):
        return []
    return list(chain.from_iterable(plain))


def _suspects(one: Any, kind: Any) -> Iterable[Any]:
    """The same of one of numpy's arrays, or of a list beside them. Of numbers only those that do not fit."""
    number = one.dtype.kind if hasattr(one, "dtype") else "O"
    sort = value_class(kind)
    if str(kind) in OVER and number in "iuf":
        wide = abs(one.astype("f8"))
        return one[(wide >= OVER[str(kind)]) & (wide < math.inf)]  # type: ignore[no-any-return]
    if sort not in WHOLE:
        return one  # type: ignore[no-any-return]
    if number == "f":
        return one[one % 1 != 0]  # type: ignore[no-any-return]
    if number in "mM" and sort is not int and type(one).__name__ == "ndarray":
        _same_unit(one, kind)
        return ()
    return () if number in "iub" else one


def _same_unit(times: Any, kind: Any) -> None:
    """Arrow takes the numbers of numpy's arrays of times, whatever they count."""
    import numpy

    unit = getattr(kind, "unit", "")
    if numpy.datetime_data(times.dtype) != (unit, 1):
        raise _loss(times, kind, f"it is of {times.dtype}")


def _records(values: Sequence[Any], kind: Any, infinite: bool) -> None:
    fields = {field.name: field.type for field in kind}
    there = [one for one in values if one is not None]
    sorts = set(map(type, there))
    _no_texts(there, sorts, kind)
    for sort in sorts:
        _same_order(sort, fields, kind)
    if all(issubclass(sort, tuple) for sort in sorts):
        columns = dict(zip(fields, zip(*there, strict=False), strict=False))
    else:
        rows = [one if isinstance(one, dict) else _by_name(one, fields) for one in there]
        check_names(set(chain.from_iterable(rows)), [*fields], f"in {kind}")
        columns = {
            name: tuple(row[name] for row in rows if name in row)
            for name, inner in fields.items()
            if lossy(inner, infinite)
        }
    for name, column in columns.items():
        _check(column, fields[name], infinite)


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
