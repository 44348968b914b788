"""Which Arrow type does an annotation mean, and which columns does it take?"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import re
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dovetail.backfill.signature import NOTHING, Unresolved, is_array, is_arrow, members, resolved
from dovetail.backfill.type_texts import type_of_text

SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, Sequence, Collection, Iterable)
NOT_SAID = "does not say what it gives"
NEEDS = 'has no one Arrow type: write data_type="..."'


def arrow_type(annotation: Any) -> Any:
    """The pyarrow type of one value, or a text that says why there is none."""
    import pyarrow as pa

    if annotation is NOTHING or annotation is Any or annotation is object:
        return NOT_SAID
    if isinstance(annotation, Unresolved):
        return f"is annotated with {annotation.text!r}, of which a name cannot be found: {annotation.reason}"
    if isinstance(annotation, pa.DataType):
        return annotation
    said = [one for one in _extras(annotation) if isinstance(one, pa.DataType)]
    if said:
        return said[0]
    annotation = _opened(annotation)
    inner = [one for one in members(annotation) if one is not type(None)]
    if not inner:
        return "gives None, and nothing else"
    if len(inner) > 1:
        found = {str(one): one for one in (arrow_type(member) for member in inner)}
        only = next(iter(found.values()))
        return only if len(found) == 1 else _of_several(inner)
    if inner[0] is not annotation:
        return arrow_type(inner[0])
    if typing.get_origin(annotation) is typing.Literal:
        return arrow_type(typing.Union[tuple({type(value) for value in typing.get_args(annotation)})])  # noqa: UP007
    return _generic(annotation) if typing.get_origin(annotation) is not None else _plain(annotation)


def _of_several(kinds: Sequence[Any]) -> str:
    numbers = all(isinstance(kind, type) and issubclass(kind, int | float) for kind in kinds)
    said = f"gives {' or '.join(map(shown_type, kinds))}, and a column has one type"
    return f'{said}: write data_type="double"' if numbers and bool not in kinds else said


def how_to_say(name: str, why: str) -> tuple[str, ...]:
    """How a function can say what it gives, where `arrow_type` says why it does not; each works as it is."""
    written = re.search(r'data_type="[^"]+"', why)
    said = written[0] if written else 'data_type="string"'
    if not name.isidentifier():
        return (f"udf(lambda ..., {said})",)
    if written:
        return (f"@dt.udf({said})",)
    if "one type" in why:
        return (f"def {name}(...) -> str, and return str(...)",)
    return (f"def {name}(...) -> str", f"or @dt.udf({said})")


def _generic(annotation: Any) -> Any:
    import pyarrow as pa

    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in SEQUENCES and _element(origin, args) is not NOTHING:
        inner = arrow_type(_element(origin, args))
        return _in_a_list(annotation, inner) if isinstance(inner, str) else pa.list_(inner)
    if getattr(origin, "__name__", "") == "ndarray":
        kinds = typing.get_args(args[-1])  # ndarray[shape, dtype[float32]]
        inner = arrow_type(kinds[0]) if kinds else ""
        return (
            f"{shown_type(annotation)} {NEEDS.replace('...', 'list<float32>')}"
            if isinstance(inner, str)
            else pa.list_(inner)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping) and args:
        return f"{shown_type(annotation)} {NEEDS.replace('...', _struct_text(args[1:] * 2))}"
    if origin is tuple and args and Ellipsis not in args:
        return f"{shown_type(annotation)} {NEEDS.replace('...', _struct_text(args))}"
    return _plain(origin)


def _in_a_list(annotation: Any, why: str) -> str:
    written = re.search(r'data_type="([^"]+)"', why)
    return f"{shown_type(annotation)} {NEEDS.replace('...', f'list<{written[1]}>')}" if written else why


def _struct_text(kinds: Sequence[Any]) -> str:
    """Of fields with these annotations, as `data_type=` takes it."""
    found = [arrow_type(kind) for kind in kinds]
    texts = ["string" if isinstance(kind, str) else str(kind) for kind in found]
    return f"struct<{', '.join(f'{chr(97 + at % 26)}: {text}' for at, text in enumerate(texts))}>"


def _element(origin: Any, args: tuple[Any, ...]) -> Any:
    """Of `list[T]` and `tuple[T, ...]` the T."""
    if origin is tuple:
        kinds = [one for one in args if one is not Ellipsis]
        return kinds[0] if kinds and all(one == kinds[0] for one in kinds) else NOTHING
    return args[0] if args else NOTHING


def _plain(kind: Any) -> Any:
    import pyarrow as pa

    fields = record_fields(kind)
    if fields is not None:
        return _struct(kind, fields)
    for python, made in _PLAIN:
        if isinstance(kind, type) and issubclass(kind, python) and not _is_numpy(kind):
            return getattr(pa, made[0])(*made[1:])
    if _is_numpy(kind):
        return _of_numpy(kind)
    if is_array(kind):
        return _of_array_class(kind)
    example = "string"
    if kind is decimal.Decimal:
        example = "decimal128(18, 2)"
    elif kind in SEQUENCES:
        example = "list<string>"
    elif getattr(kind, "__name__", "") == "ndarray":
        example = "list<float32>"
    elif isinstance(kind, type) and issubclass(kind, Mapping):
        example = "struct<a: string>"
    return f"{shown_type(kind)} {NEEDS.replace('...', example)}"


_PLAIN: tuple[tuple[type, tuple[Any, ...]], ...] = (
    (str, ("string",)),
    (bytes, ("binary",)),
    (bytearray, ("binary",)),
    (memoryview, ("binary",)),
    (bool, ("bool_",)),
    (int, ("int64",)),
    (float, ("float64",)),
    (datetime.datetime, ("timestamp", "us")),
    (datetime.date, ("date32",)),
    (datetime.time, ("time64", "us")),
    (datetime.timedelta, ("duration", "us")),
)
"""In this order: a bool is an int, a datetime is a date."""


def record_fields(kind: Any) -> dict[str, Any] | None:
    """Field -> annotation of a NamedTuple, dataclass or TypedDict; None: it is none of these."""
    if not isinstance(kind, type):
        return None
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if not (named or dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)):
        return None
    import sys

    names = dict(vars(sys.modules.get(kind.__module__, typing)))
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).get("__annotations__", {}).items():
            found[name] = resolved(value, names)
    if named:
        return {name: found.get(name, NOTHING) for name in kind._fields}  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(kind):
        return {field.name: found.get(field.name, NOTHING) for field in dataclasses.fields(kind)}
    return found


def _struct(kind: type, fields: dict[str, Any]) -> Any:
    import pyarrow as pa

    made = {name: arrow_type(annotation) for name, annotation in fields.items()}
    wrong = [f"field {name} {found}" for name, found in made.items() if isinstance(found, str)]
    return f"{kind.__qualname__}: {'; '.join(wrong)}" if wrong else pa.struct(list(made.items()))


def _is_numpy(kind: Any) -> bool:
    return isinstance(kind, type) and any(
        base.__module__ == "numpy" and base.__name__ == "generic" for base in kind.__mro__
    )


def _of_numpy(kind: Any) -> Any:
    import numpy
    import pyarrow as pa

    try:
        found = numpy.dtype(kind)
        texts = {"U": pa.string(), "S": pa.binary()}
        return texts[found.kind] if found.kind in texts else pa.from_numpy_dtype(found)
    except (TypeError, ValueError, NotImplementedError, pa.ArrowException):
        return f"{shown_type(kind)} {NEEDS.replace('...', 'float32')}"


def _of_array_class(kind: Any) -> Any:
    """StringArray -> string, and so on; of `pa.Array` nothing is known."""
    import pyarrow as pa

    made = {"boolean": "bool_", "largestring": "large_string", "largebinary": "large_binary", "halffloat": "float16",
            "float": "float32", "double": "float64"}  # fmt: skip
    name = kind.__name__.removesuffix("Array").lower()
    name = made.get(name, name)
    plain = (
        "string",
        "binary",
        "bool_",
        "large_string",
        "large_binary",
        "date32",
        "date64",
        "float16",
        "float32",
        "float64",
    )
    if name in plain or re.fullmatch(r"u?int(8|16|32|64)", name):
        return getattr(pa, name)()
    return f'{kind.__name__} does not say of what: write data_type="float32"'


def _extras(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__metadata__", ()) if typing.get_origin(annotation) is typing.Annotated else ()


def _opened(annotation: Any) -> Any:
    """Without Annotated, NewType and the names that `type X = ...` gives."""
    for _ in range(20):
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            break
    return annotation


def shown_type(annotation: Any) -> str:
    if isinstance(annotation, Unresolved):
        return annotation.text
    plain = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return annotation.__qualname__ if plain else str(annotation).replace("typing.", "")


# --- what a parameter takes


def accepts(annotation: Any, column: Any) -> bool:
    """Whether a parameter with this annotation takes values, or arrays, of this pyarrow type."""
    import pyarrow as pa

    annotation = _opened(annotation)
    if annotation in (NOTHING, Any, object) or isinstance(annotation, Unresolved | typing.TypeVar):
        return True
    inner = members(annotation)
    if len(inner) > 1:
        return any(accepts(one, column) for one in inner if one is not type(None))
    if is_arrow(annotation, "Array", "ChunkedArray"):
        found = pa.nulls(0, stored(column) if is_blob(column) else column)
        return annotation.__name__ in ("Array", "ChunkedArray") or isinstance(found, annotation)
    column = stored(column)
    if pa.types.is_null(column):
        return True
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Literal:
        return any(accepts(type(value), column) for value in typing.get_args(annotation))
    if typing.is_typeddict(origin):
        return bool(pa.types.is_struct(column))
    if _is_numpy(origin):
        return _takes_numbers(origin, column)
    kind = value_class(column)
    if not isinstance(origin, type) or not (issubclass(kind, origin) or (origin is float and kind is int)):
        return False
    inside = _element(origin, typing.get_args(annotation)) if origin in SEQUENCES else NOTHING
    return inside is NOTHING or kind is not list or pa.types.is_map(column) or accepts(inside, column.value_type)


def _takes_numbers(kind: Any, column: Any) -> bool:
    """numpy's scalars: the values are Python's, which compute the same."""
    python = value_class(column)
    names = {base.__name__ for base in kind.__mro__}
    return (python is int and not names.isdisjoint({"integer", "floating"})) or (
        python is float and "floating" in names
    )


def stored(column: Any) -> Any:
    """What its values are: of dictionaries the words, of extensions what they store."""
    import pyarrow as pa

    while True:
        if pa.types.is_dictionary(column):
            column = column.value_type
        elif is_blob(column):
            column = pa.large_binary()
        elif isinstance(column, pa.BaseExtensionType):
            column = column.storage_type
        else:
            return column


def is_blob(column: Any) -> bool:
    """Of tables of version 2.2 and later; before, a blob is bytes and the column's metadata says where they lie."""
    return getattr(column, "extension_name", "") == "lance.blob.v2"


def value_class(column: Any) -> type:
    """Of Python's values of an Arrow type."""
    import pyarrow as pa

    is_ = pa.types
    tests: tuple[tuple[type, tuple[Any, ...]], ...] = (
        (str, (is_.is_string, is_.is_large_string, is_.is_string_view)),
        (bytes, (is_.is_binary, is_.is_large_binary, is_.is_binary_view, is_.is_fixed_size_binary)),
        (bool, (is_.is_boolean,)),
        (int, (is_.is_integer,)),
        (float, (is_.is_floating,)),
        (decimal.Decimal, (is_.is_decimal,)),
        (datetime.datetime, (is_.is_timestamp,)),
        (datetime.date, (is_.is_date,)),
        (datetime.time, (is_.is_time,)),
        (datetime.timedelta, (is_.is_duration,)),
        (list, (is_list, is_.is_map)),
        (dict, (is_.is_struct,)),
    )
    return next((kind for kind, ways in tests if any(way(column) for way in ways)), object)


def is_list(column: Any) -> bool:
    import pyarrow as pa

    is_ = pa.types
    views = (is_.is_list_view, is_.is_large_list_view)
    return any(way(column) for way in (is_.is_list, is_.is_large_list, is_.is_fixed_size_list, *views))


def fits(given: Any, column: Any) -> bool:
    """Whether what a function gives, as its annotation says, can be stored in a column that is there: the same, or the
    same kind in another width. (Values that are too large are failures of their rows.)"""
    import pyarrow as pa

    given, column = stored(given), stored(column)
    if given.equals(column) or pa.types.is_null(given):
        return True
    if is_list(given) and is_list(column):
        return fits(given.value_type, column.value_type)
    if pa.types.is_struct(given) and pa.types.is_struct(column):
        ours, theirs = ({field.name: field.type for field in one} for one in (given, column))
        return ours.keys() == theirs.keys() and all(fits(ours[name], theirs[name]) for name in ours)
    kind = value_class(given)
    return kind is value_class(column) and kind not in (list, dict, object)


# --- types that are written


def given_type(value: Any) -> Any:
    """The pyarrow type of what `data_type=` was given: a pyarrow type, a text, a Python type; or what is wrong."""
    import pyarrow as pa

    if isinstance(value, pa.DataType):
        return value
    if isinstance(value, pa.Field):
        return value.type
    if isinstance(value, str):
        try:
            return type_of_text(value)
        except ValueError as error:
            return f"is not the name of an Arrow type: {error}"
    found = arrow_type(value) if isinstance(value, type) or typing.get_origin(value) is not None else None
    return "is not an Arrow type" if found is None or isinstance(found, str) else found
