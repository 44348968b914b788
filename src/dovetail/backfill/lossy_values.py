"""Detection of values that Arrow would silently change when storing them (1.9 as 1, unknown fields as NULL, overflow
to infinity)."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Mapping
from itertools import chain
from numbers import Integral, Number
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

from dovetail.backfill.arrow_types import is_list, python_class, underlying_type
from dovetail.errors import did_you_mean, short_repr

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LossTest = tuple[Callable[[Any], Any], str]
"""Predicate that is true for values that do not fit, and the reason."""

INTEGER_STORED_TYPES = (int, datetime.datetime, datetime.date, datetime.time, datetime.timedelta)
"""Python types of the Arrow types stored as integers."""

OVERFLOW_LIMITS = {"float": 2.0**128 - 2.0**103, "halffloat": 65520.0}
"""Smallest number that becomes infinity in floats of fewer than 64 bits."""

TEXT_TYPES = (str, bytes, bytearray)
"""Types that Arrow accepts as lists, also of their characters."""

REFUSED_NAMES: Mapping[type, frozenset[str]] = {
    str: frozenset({"bytes", "bytearray", "memoryview", "bytes_"}),
    float: frozenset({"bool", "bool_"}),
}
"""Class of a column -> names of classes, also of NumPy, whose values Arrow would convert."""

FINER_UNIT_TEXT = {"s": "it has fractions of a second", "ms": "it has microseconds", "us": "it has nanoseconds"}

UTC_NAMES = ("UTC", "Etc/UTC", "Z", "+00:00")


class LossyValueError(ValueError):
    """A value that would be changed by storing it."""

    def __init__(self, message: str, value: object = None, why: str = "") -> None:
        super().__init__(message)
        self.value = value
        """The part of the value that does not fit."""
        self.why = why


def _lossy_value_error(value: object, kind: Any, why: str = "") -> LossyValueError:
    because = f": {why}" if why else ""
    return LossyValueError(
        f"{short_repr(value)}, a {type(value).__name__}, does not fit {kind}{because}", value, because
    )


@functools.lru_cache(maxsize=256)
def can_lose_values(kind: Any, infinite: bool = False) -> bool:
    """Whether a type can lose data at all; narrow floats only if the array has infinities."""
    kind = underlying_type(kind)
    return _is_nested(kind) or python_class(kind) in INTEGER_STORED_TYPES or (infinite and str(kind) in OVERFLOW_LIMITS)


def _is_nested(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind) or is_list(kind))


@functools.lru_cache(maxsize=256)
def has_narrow_floats(kind: Any) -> bool:
    """Whether a type contains floats of fewer than 64 bits."""
    import pyarrow as pa

    kind = underlying_type(kind)
    if pa.types.is_struct(kind):
        return any(has_narrow_floats(field.type) for field in kind)
    if pa.types.is_map(kind):
        return has_narrow_floats(kind.key_type) or has_narrow_floats(kind.item_type)
    return has_narrow_floats(kind.value_type) if is_list(kind) else str(kind) in OVERFLOW_LIMITS


def count_infinities(array: Any) -> int:
    """Number of infinities in an Arrow array, including lists and structs."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return count_infinities(array.storage)
    if pa.types.is_dictionary(kind):
        return count_infinities(array.dictionary)
    if pa.types.is_floating(kind):
        return pc.sum(pc.is_inf(array)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(count_infinities, array.flatten()))
    if pa.types.is_map(kind):
        return count_infinities(array.keys) + count_infinities(array.items)
    return count_infinities(array.flatten()) if is_list(kind) else 0


def loses_time_zone(given: Any, column: Any) -> bool:
    """Whether the cast of Arrow between these types would change the time to UTC."""
    import pyarrow as pa

    given, column = underlying_type(given), underlying_type(column)
    if is_list(given) and is_list(column):
        return loses_time_zone(given.value_type, column.value_type)
    if pa.types.is_struct(given) and pa.types.is_struct(column):
        return any(loses_time_zone(given.field(field.name).type, field.type) for field in column)
    both = pa.types.is_timestamp(given) and pa.types.is_timestamp(column)
    return both and column.tz is None and given.tz not in (None, *UTC_NAMES)


def check_lossless(values: Sequence[Any], kind: Any, found: Any) -> None:
    """Raise LossyValueError if Arrow changed one of these values in the array."""
    _check_classes(values, kind)
    _check_values(values, kind, has_narrow_floats(kind) and count_infinities(found) > 0)


def _check_classes(values: Sequence[Any], kind: Any) -> None:
    """Check values of a column of strings or floats, for which Arrow accepts bytes and truth values."""
    refused = REFUSED_NAMES.get(python_class(underlying_type(kind)))
    if refused is None or hasattr(values, "dtype"):
        return
    for sort in set(map(type, values)):
        if sort.__name__ in refused:
            raise _lossy_value_error(next(value for value in values if type(value) is sort), kind)


def _check_values(values: Sequence[Any], kind: Any, infinite: bool) -> None:
    import pyarrow as pa

    if not can_lose_values(kind, infinite):
        return
    kind = underlying_type(kind)
    if pa.types.is_struct(kind):
        _check_structs(values, kind, infinite)
    elif pa.types.is_map(kind):
        _check_no_text(values, set(map(type, values)), kind)
        _check_pairs(values, kind, infinite)
    elif is_list(kind):
        _check_no_text(values, set(map(type, values)), kind)
        if can_lose_values(kind.value_type, infinite):
            _check_values(_list_elements(values, underlying_type(kind.value_type)), kind.value_type, infinite)
    else:
        _check_leaf(values, kind)


def _check_no_text(values: Sequence[Any], sorts: set[type], kind: Any) -> None:
    for sort in sorts:
        if issubclass(sort, TEXT_TYPES):
            raise _lossy_value_error(next(value for value in values if type(value) is sort), kind)


def _check_pairs(values: Sequence[Any], kind: Any, infinite: bool) -> None:
    if not (can_lose_values(kind.key_type, infinite) or can_lose_values(kind.item_type, infinite)):
        return
    pairs = list(chain.from_iterable(one.items() if isinstance(one, Mapping) else one for one in values if one))
    both = [tuple(pair.values()) if isinstance(pair, Mapping) else pair for pair in pairs]
    _check_values([key for key, _ in both], kind.key_type, infinite)
    _check_values([item for _, item in both], kind.item_type, infinite)


def _check_leaf(values: Sequence[Any], kind: Any) -> None:
    sorts = set(map(type, values))
    for sort in sorts:
        tests = _loss_tests(sort, kind)
        those = [value for value in values if type(value) is sort] if tests and len(sorts) > 1 else values
        for wrong, why in tests:
            if any(map(wrong, those)):
                raise _lossy_value_error(next(filter(wrong, those)), kind, why)


def _loss_tests(sort: type, kind: Any) -> list[LossTest]:
    """Checks for values of this class; none where the class suffices."""
    if str(kind) in OVERFLOW_LIMITS:
        return (
            [(functools.partial(_overflows, OVERFLOW_LIMITS[str(kind)]), "it is too large")]
            if issubclass(sort, Number)
            else []
        )
    if _may_have_fraction(sort):
        return [(_has_fraction, "")]
    if sort.__name__ in ("datetime64", "timedelta64") and python_class(kind) in (datetime.date, datetime.time):
        return [(lambda _: True, "")]  # Arrow stores its number regardless of the unit
    return [test for name, *test in _time_field_tests(kind) if hasattr(sort, name)]  # type: ignore[misc]


@functools.lru_cache(maxsize=256)
def _time_field_tests(kind: Any) -> tuple[tuple[str, Callable[[Any], Any], str], ...]:
    """Attributes of times that must be zero or None to fit a type."""
    sort = python_class(kind)
    if sort not in INTEGER_STORED_TYPES or sort is int:
        return ()
    if sort is datetime.date:
        names = ("hour", "minute", "second", "microsecond", "nanosecond")
        return tuple((name, attrgetter(name), "it has a time of day") for name in names)
    found: list[tuple[str, Callable[[Any], Any], str]] = []
    if sort is datetime.time or (sort is datetime.datetime and kind.tz is None):
        found.append(("utcoffset", methodcaller("utcoffset"), "it has a time zone, but the column has none"))
    micro, nano = ("microseconds", "nanoseconds") if sort is datetime.timedelta else ("microsecond", "nanosecond")
    if kind.unit == "s":
        found.append((micro, attrgetter(micro), FINER_UNIT_TEXT["s"]))
    if kind.unit == "ms":
        found.append((micro, lambda one: getattr(one, micro) % 1000, FINER_UNIT_TEXT["ms"]))
    if kind.unit != "ns":
        found.append((nano, attrgetter(nano), FINER_UNIT_TEXT[kind.unit]))  # pandas has them
    return tuple(found)


def _overflows(limit: float, value: Any) -> bool:
    return limit <= abs(float(value)) < math.inf


def _may_have_fraction(sort: type) -> bool:
    return (issubclass(sort, Number) and not issubclass(sort, Integral)) or sort.__name__ == "ndarray"


def _has_fraction(value: Any) -> bool:
    try:
        return bool(value != int(value))
    except (ValueError, OverflowError, TypeError):  # nan, inf
        return True


def _list_elements(values: Sequence[Any], kind: Any) -> list[Any]:
    """Elements of lists to check; none where the types of the values suffice."""
    plain = [one for one in values if one is not None]
    if any(hasattr(sort, "dtype") for sort in set(map(type, plain))):
        return list(chain.from_iterable(_suspect_elements(one, kind) for one in plain))
    if not _is_nested(kind) and not any(_loss_tests(sort, kind) for sort in set(map(type, chain.from_iterable(plain)))):
        return []
    return list(chain.from_iterable(plain))


def _suspect_elements(one: Any, kind: Any) -> Iterable[Any]:
    """The same for a numpy array, or a list among arrays. Of numbers only those that do not fit."""
    number = one.dtype.kind if hasattr(one, "dtype") else "O"
    sort = python_class(kind)
    if str(kind) in OVERFLOW_LIMITS and number in "iuf":
        wide = abs(one.astype("f8"))
        return one[(wide >= OVERFLOW_LIMITS[str(kind)]) & (wide < math.inf)]  # type: ignore[no-any-return]
    if sort not in INTEGER_STORED_TYPES:
        return one  # type: ignore[no-any-return]
    if number == "f":
        return one[one % 1 != 0]  # type: ignore[no-any-return]
    if number in "mM" and sort is not int and type(one).__name__ == "ndarray":
        _check_unit(one, kind)
        return ()
    return () if number in "iub" else one


def _check_unit(times: Any, kind: Any) -> None:
    """Check the unit of numpy arrays of times: Arrow stores their numbers regardless of it."""
    import numpy

    unit = getattr(kind, "unit", "")
    if numpy.datetime_data(times.dtype) != (unit, 1):
        raise _lossy_value_error(times, kind, f"it is of {times.dtype}")


def _check_structs(values: Sequence[Any], kind: Any, infinite: bool) -> None:
    fields = {field.name: field.type for field in kind}
    there = [one for one in values if one is not None]
    sorts = set(map(type, there))
    _check_no_text(there, sorts, kind)
    for sort in sorts:
        _check_field_order(sort, fields, kind)
    if all(issubclass(sort, tuple) for sort in sorts):
        columns = dict(zip(fields, zip(*there, strict=False), strict=False))
    else:
        rows = [one if isinstance(one, dict) else _as_dict(one, fields) for one in there]
        check_field_names(set(chain.from_iterable(rows)), [*fields], f"in {kind}")
        columns = {
            name: tuple(row[name] for row in rows if name in row)
            for name, inner in fields.items()
            if can_lose_values(inner, infinite)
        }
    for name, column in columns.items():
        _check_values(column, fields[name], infinite)


def _check_field_order(sort: type, fields: Mapping[str, Any], kind: Any) -> None:
    """Check the field names of named tuples: Arrow stores them by position."""
    names = getattr(sort, "_fields", None)
    if names is not None and list(names) != [*fields]:
        raise LossyValueError(f"its fields are {', '.join(names)}, not those of {kind}")


def _as_dict(one: Any, fields: Mapping[str, Any]) -> dict[Any, Any]:
    return dict(zip(fields, one, strict=False) if isinstance(one, tuple) else one)


def check_field_names(given: set[Any], known: Sequence[str], where: str) -> None:
    """Raise LossyValueError for a name without a field."""
    strange = sorted(map(str, given.difference(known)))
    if strange:
        raise LossyValueError(f"unknown field {strange[0]!r} {where}{did_you_mean(strange[0], known)}")
