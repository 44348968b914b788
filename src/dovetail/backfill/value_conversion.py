"""Conversion of UDF results to Arrow arrays, with the rows whose values do not fit."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Number
from typing import TYPE_CHECKING, Any

from dovetail.backfill.arrow_types import can_store, python_class
from dovetail.backfill.lossy_values import (
    LossyValueError,
    can_lose_values,
    check_field_names,
    check_lossless,
    count_infinities,
    has_narrow_floats,
    loses_time_zone,
)
from dovetail.backfill.result import format_rows
from dovetail.errors import short_repr

if TYPE_CHECKING:
    from collections.abc import Iterable

ARRAY_KINDS_TEXT = "an Arrow array, a numpy array or a list"
NOT_AWAITED_TEXT = "returned a coroutine, which is never awaited: write async def"


class ValueConverter:
    """Converts results to these types, for outputs with these names."""

    def __init__(self, types: Sequence[Any], names: Sequence[str]) -> None:
        self.types = tuple(types)
        self.names = tuple(names)
        self.single = self.names == ("",)
        self.null_result: Any = None if self.single else (None,) * len(self.types)
        """Value of a row that failed."""

    # values of rows

    def values(self, results: list[Any]) -> tuple[list[Any], dict[int, Exception]]:
        """Arrays, with NULL for rows whose values do not fit, and the exception of each such row."""
        with suppress(Exception):  # at least one row does not fit; it is found below
            return [
                to_arrow_array(column, kind) for column, kind in zip(self._columns(results), self.types, strict=True)
            ], {}
        wrong: dict[int, Exception] = {}
        kept = []
        for index, result in enumerate(results):
            try:
                kept.append(self._row(result))
            except Exception as error:
                wrong[index] = error
                kept.append(self.null_result)
        columns = [kept] if self.single else list(zip(*kept, strict=True))
        return [_array_row_by_row(list(column), kind) for column, kind in zip(columns, self.types, strict=True)], wrong

    def _columns(self, results: list[Any]) -> Iterable[Any]:
        if self.single:
            return [results]
        if not all(issubclass(kind, tuple) for kind in set(map(type, results))):
            raise TypeError
        return zip(*results, strict=True) if results else [()] * len(self.types)

    def _row(self, result: Any) -> Any:
        """Result of one row in a form that can be converted together with others."""
        if self.single:
            return _convertible_value(result, self.types[0], "")
        if result is None:
            return self.null_result
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError(NOT_AWAITED_TEXT)
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            result = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        if isinstance(result, Mapping):
            result = self._values_by_name(result)
        if not isinstance(result, tuple | list):
            raise TypeError(f"returned {short_repr(result)}, not {len(self.types)} values ({', '.join(self.names)})")
        if len(result) != len(self.types):
            raise ValueError(f"returned {len(result)} values, not {len(self.types)} ({', '.join(self.names)})")
        fields = zip(result, self.types, self.names, strict=True)
        return tuple(_convertible_value(value, kind, name) for value, kind, name in fields)

    def _values_by_name(self, result: Mapping[Any, Any]) -> list[Any]:
        try:
            check_field_names(set(result), self.names, f"among {', '.join(self.names)}")
        except LossyValueError as error:
            raise ValueError(f"returned {short_repr([*result])}: {error}") from None
        return [result.get(name) for name in self.names]

    # arrays

    def arrays(self, result: Any, rows: int) -> list[Any]:
        """Result of a call of `rows` rows. ValueError, TypeError: not one value per row, or values that do not fit."""
        try:
            return self._arrays(result, rows)
        except Exception as error:
            raise error from None  # about the values; the previous exception is irrelevant

    def _arrays(self, result: Any, rows: int) -> list[Any]:
        import pyarrow as pa

        if self.single:
            if isinstance(result, pa.RecordBatch | pa.Table) and result.num_columns == 1:
                result = result.column(0)
            return [_to_column(result, self.types[0], rows, "")]
        if isinstance(result, pa.RecordBatch | pa.Table):
            by_name = not set(self.names).isdisjoint(result.schema.names)
            names = result.schema.names
            result = self._values_by_name(dict(zip(names, result.columns, strict=True))) if by_name else result.columns
        elif isinstance(result, Mapping):
            result = self._values_by_name(result)
        if not isinstance(result, tuple | list):
            raise TypeError(f"returned {_type_name(result)}, not {len(self.types)} arrays ({', '.join(self.names)})")
        if len(result) != len(self.types):
            raise ValueError(f"returned {len(result)} arrays, not {len(self.types)} ({', '.join(self.names)})")
        fields = zip(result, self.types, self.names, strict=True)
        return [_to_column(one, kind, rows, name) for one, kind, name in fields]


def to_arrow_array(values: Any, kind: Any) -> Any:
    """A pyarrow array of Python values; LossyValueError: a value would be changed."""
    import pyarrow as pa

    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    found = pa.array(values, storage)
    if isinstance(found, pa.ChunkedArray):  # more than 2 GB of text
        found = found.combine_chunks()
    check_lossless(values, storage, found)
    return found if storage is kind else pa.ExtensionArray.from_storage(kind, found)


def _array_row_by_row(values: list[Any], kind: Any) -> Any:
    """Array of values that fit one by one: Arrow does not accept dictionaries and tuples in one array."""
    import pyarrow as pa

    with suppress(Exception):
        return to_arrow_array(values, kind)
    return pa.concat_arrays([to_arrow_array([value], kind) for value in values])


def _convertible_value(value: Any, kind: Any, name: str) -> Any:
    """The value, possibly in simpler types; raises the reason why it does not fit."""
    trouble = _conversion_error(value, kind)
    if trouble is None:
        return value
    plain = to_plain_value(value)
    trouble = _conversion_error(plain, kind) if plain is not value else trouble
    if trouble is None:
        return plain
    field = f" for {name}" if name else ""
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(f"{NOT_AWAITED_TEXT}{field}")
    if isinstance(trouble, LossyValueError):
        whole = trouble.value is not None and trouble.value is plain
        sort = f", a {type(value).__name__},{field}{',' if field else ''} which does not fit {kind}{trouble.why}"
        reason = sort if whole else f"{field}: {trouble}"
        raise ValueError(f"returned {short_repr(value)}{reason}")  # noqa: TRY004 - of the row's value, not of its type
    wanted = python_class(kind)
    broad = Number if wanted in (int, float) else wanted
    made = ValueError if isinstance(value, broad) and not isinstance(trouble, TypeError) else TypeError
    raise made(
        f"returned {short_repr(value)} of type {type(value).__name__}{field}, which does not fit {kind}: {trouble}"
    )


def _conversion_error(value: Any, kind: Any) -> Exception | None:
    try:
        to_arrow_array([value], kind)
    except Exception as error:
        return error
    return None


def to_plain_value(value: Any) -> Any:
    """NamedTuples and dataclasses as dictionaries, multidimensional arrays as lists; other values unchanged."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_plain_value(one) for name, one in value._asdict().items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        made = [to_plain_value(one) for one in value]
        return made if any(new is not old for new, old in zip(made, value, strict=True)) else value
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, dict):
        changed = {name: to_plain_value(one) for name, one in value.items()}
        return changed if any(changed[name] is not value[name] for name in value) else value
    if hasattr(value, "as_py"):
        return value.as_py()
    if hasattr(value, "tolist") and hasattr(value, "ndim"):
        return _to_python_times(value) if _has_numpy_times(value) else value.tolist()
    return value


def _has_numpy_times(value: Any) -> bool:
    return type(value).__module__ == "numpy" and value.dtype.kind in "mM"


def _to_python_times(value: Any) -> Any:
    """numpy times as Python times if they are equal: tolist() returns numbers for nanoseconds and distant years."""
    import numpy

    with suppress(TypeError):  # years and months have no fixed length
        plain = value.astype(f"{value.dtype.kind}8[us]")
        if (numpy.isnat(value) | (plain == value)).all() and int not in set(map(type, plain.ravel().tolist())):
            return plain.tolist()
    return [_to_python_times(one) for one in value] if value.ndim > 1 else value


def _type_name(result: Any) -> str:
    return f"{type(result).__module__}.{type(result).__qualname__}".removeprefix("builtins.")


def _to_column(result: Any, kind: Any, rows: int, name: str) -> Any:
    import pyarrow as pa

    field = f" for {name}" if name else ""
    if isinstance(result, pa.ChunkedArray):
        result = result.combine_chunks()
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(f"{NOT_AWAITED_TEXT}{field}")
    array_like = (
        isinstance(result, pa.Array | Sequence) or hasattr(result, "__array__") or hasattr(result, "__arrow_array__")
    )
    if not array_like or isinstance(result, str | bytes):
        raise TypeError(f"returned {_type_name(result)}{field}, not {ARRAY_KINDS_TEXT} with {rows} values")
    length = len(result) if getattr(result, "ndim", 1) else 0
    if length != rows:
        values = f"{length} {'value' if length == 1 else 'values'}"
        raise ValueError(f"returned {values}{field} for {format_rows(rows)}")
    if isinstance(result, pa.Array):
        found = result
    elif getattr(result, "ndim", 1) > 1 or isinstance(result, Sequence):
        found = _values_to_array([to_plain_value(one) for one in result], kind, name)
    elif getattr(getattr(result, "dtype", None), "kind", "") == "O":
        found = _objects_to_array(result, kind, name)
    else:
        found = pa.array(result)
    return cast_array(found, kind, field)


def _objects_to_array(result: Any, kind: Any, name: str) -> Any:
    """Array of Python values with the type that Arrow infers, or with the type of the column if that would lose
    data."""
    import pyarrow as pa

    found = pa.array(result)
    if not can_lose_values(found.type):
        return found
    there = found.is_valid().to_pylist()
    with suppress(Exception):  # at least one value does not fit
        check_lossless([one for one, valid in zip(result, there, strict=True) if valid], found.type, found)
        return found
    return _values_to_array(
        [to_plain_value(one) if valid else None for one, valid in zip(result, there, strict=True)], kind, name
    )


def _values_to_array(values: list[Any], kind: Any, name: str) -> Any:
    with suppress(Exception):  # at least one value does not fit
        return to_arrow_array(values, kind)
    return _array_row_by_row([_convertible_value(value, kind, name) for value in values], kind)


def cast_array(array: Any, kind: Any, field: str = "") -> Any:
    """Cast to this type if it is of the same kind; values out of range are a ValueError."""
    import pyarrow as pa

    if array.type.equals(kind):
        return array
    into_float = pa.types.is_integer(array.type) and pa.types.is_floating(kind)
    if not (into_float or can_store(array.type, kind)) or loses_time_zone(array.type, kind):
        raise TypeError(f"returned {array.type}{field}, but the column is {kind}")
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, cast_array(array, kind.storage_type, field))
    try:
        found = array.cast(kind)
    except pa.ArrowInvalid as error:
        raise ValueError(f"returned {array.type}{field}, which does not fit {kind}: {error}") from None
    if has_narrow_floats(kind) and (infinite := count_infinities(found)) and infinite > count_infinities(array):
        raise ValueError(f"returned {array.type}{field}, which does not fit {kind}: a number is too large")
    return found
