"""Arrow types of Python annotations and of type names such as "list<float32>"; which columns an annotation accepts."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import re
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

from dovetail.backfill.signature import (
    NO_ANNOTATION,
    UnresolvedAnnotation,
    is_array,
    is_arrow,
    resolve_annotation,
    union_members,
)

NAME_PATTERN = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*)")
NUMBER_PATTERN = re.compile(r"\s*(\d+)")
LIST_TYPES = {"list": "list_", "large_list": "large_list", "list_view": "list_view", "array": "list_"}
TIME_UNITS = ("s", "ms", "us", "ns")
TYPE_ALIASES = {
    "str": "string",
    "utf8": "string",
    "large_utf8": "large_string",
    "bytes": "binary",
    "boolean": "bool_",
    "bool": "bool_",
    "int": "int64",
    "float": "float32",
    "double": "float64",
    "halffloat": "float16",
    "date": "date32",
}
"""Names as Arrow prints them; "float" has 32 bits."""
SIMPLE_TYPE_PATTERN = re.compile(
    r"(u?int(8|16|32|64)|float(16|32|64)|bool_|string|large_string|string_view|binary|large_binary|binary_view"
    r"|date32|date64|null)"
)
MAX_NESTING = 50


def parse_type_name(text: str) -> Any:
    """Parse the name of an Arrow type; ValueError with the reason if it is invalid."""
    parser = _TypeParser(text)
    found = parser.type(0)
    if parser.rest():
        raise ValueError(f"{parser.rest()!r} is left after the type")
    return found


class _TypeParser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rest(self) -> str:
        return self._text[self._at :].strip()

    def type(self, depth: int) -> Any:
        import pyarrow as pa

        if depth > MAX_NESTING:
            raise ValueError("nested too deeply")
        word = self._word()
        name = TYPE_ALIASES.get(word.lower(), word.lower())
        if name in LIST_TYPES or name == "fixed_size_list":
            return self._list(name, depth)
        if name == "struct":
            return pa.struct(self._fields(depth))
        if name == "map":
            self._need("<")
            key = self.type(depth + 1)
            self._need(",")
            found = pa.map_(key, self.type(depth + 1))
            self._need(">")
            return found
        if name in ("timestamp", "duration", "time32", "time64"):
            return self._timed(name)
        if name in ("decimal128", "decimal256", "decimal"):
            return self._decimal(name)
        if name in ("binary", "fixed_size_binary") and self._is("["):
            size = self._number()
            self._need("]")
            return pa.binary(size)
        if not SIMPLE_TYPE_PATTERN.fullmatch(name):
            raise ValueError(f"unknown type {word!r}")
        unit = {"date32": "[day]", "date64": "[ms]"}.get(name)
        if unit:
            self._is(unit)
        return getattr(pa, name)()

    def _list(self, name: str, depth: int) -> Any:
        """list<float32>, list<item: float>, fixed_size_list<float32, 768>, fixed_size_list<item: float>[768]."""
        import pyarrow as pa

        self._need("<")
        before = self._at
        label = NAME_PATTERN.match(self._text, self._at)
        self._at = label.end() if label else before
        if not label or not self._is(":"):
            self._at = before
        inner = self.type(depth + 1)
        size = self._number() if name == "fixed_size_list" and self._is(",") else None
        self._need(">")
        if name == "fixed_size_list" and size is None:
            self._need("[")
            size = self._number()
            self._need("]")
        return pa.list_(inner, size) if size is not None else getattr(pa, LIST_TYPES[name])(inner)

    def _fields(self, depth: int) -> list[tuple[str, Any]]:
        self._need("<")
        found = []
        while True:
            name = self._word()
            self._need(":")
            found.append((name, self.type(depth + 1)))
            if not self._is(","):
                break
        self._need(">")
        return found

    def _timed(self, name: str) -> Any:
        import pyarrow as pa

        unit, zone = ("ms" if name == "time32" else "us"), None
        if self._is("["):
            unit = self._word()
            if self._is(","):
                self._is("tz=")
                end = self._text.find("]", self._at)
                zone, self._at = self._text[self._at : end].strip(), end if end >= 0 else self._at
            self._need("]")
        allowed = {"time32": ("s", "ms"), "time64": ("us", "ns")}.get(name, TIME_UNITS)
        if unit not in allowed:
            raise ValueError(f"the unit of {name} is {' or '.join(allowed)}, not {unit!r}")
        return pa.timestamp(unit, zone) if zone else getattr(pa, name)(unit)

    def _decimal(self, name: str) -> Any:
        import pyarrow as pa

        self._need("(")
        digits = self._number()
        scale = self._number() if self._is(",") else 0
        self._need(")")
        most = 76 if name == "decimal256" else 38
        if not 1 <= digits <= most:
            raise ValueError(f"{name} has 1 to {most} digits, not {digits}")
        return (pa.decimal256 if name == "decimal256" else pa.decimal128)(digits, scale)

    # pieces

    def _is(self, piece: str) -> bool:
        at = self._at + len(self._text[self._at :]) - len(self._text[self._at :].lstrip())
        if not self._text.startswith(piece, at):
            return False
        self._at = at + len(piece)
        return True

    def _need(self, piece: str) -> None:
        if not self._is(piece):
            raise ValueError(f"{piece!r} is missing before {self.rest()!r}" if self.rest() else f"{piece!r} is missing")

    def _word(self) -> str:
        found = NAME_PATTERN.match(self._text, self._at)
        if found is None:
            raise ValueError(f"a name is missing before {self.rest()!r}" if self.rest() else "a name is missing")
        self._at = found.end()
        return found[1]

    def _number(self) -> int:
        found = NUMBER_PATTERN.match(self._text, self._at)
        if found is None:
            raise ValueError(f"a number is missing before {self.rest()!r}")
        self._at = found.end()
        return int(found[1])


SEQUENCE_TYPES: tuple[Any, ...] = (list, tuple, set, frozenset, Sequence, Collection, Iterable)


class NoArrowType(str):
    """The reason why an annotation has no Arrow type, and a data type that the user can write instead."""

    __slots__ = ("example", "is_union")
    example: str
    """A data type as text; "" if none is obvious."""
    is_union: bool
    """The annotation is a union of types, and a column has one type."""

    def __new__(cls, reason: str, example: str = "", *, is_union: bool = False) -> Self:
        made = super().__new__(cls, reason)
        made.example, made.is_union = example, is_union
        return made


def _needs_data_type(annotation: Any, example: str) -> NoArrowType:
    reason = f'{annotation_text(annotation)} has no single Arrow type: write data_type="{example}"'
    return NoArrowType(reason, example)


def arrow_type(annotation: Any) -> Any:
    """The pyarrow type of one value, or a NoArrowType."""
    import pyarrow as pa

    if annotation is NO_ANNOTATION or annotation is Any or annotation is object:
        return NoArrowType("has no return annotation")
    if isinstance(annotation, UnresolvedAnnotation):
        return NoArrowType(f"is annotated with {annotation.text!r}, which cannot be resolved: {annotation.reason}")
    if isinstance(annotation, pa.DataType):
        return annotation
    explicit = [one for one in _annotated_metadata(annotation) if isinstance(one, pa.DataType)]
    if explicit:
        return explicit[0]
    annotation = _unwrap_annotation(annotation)
    inner = [one for one in union_members(annotation) if one is not type(None)]
    if not inner:
        return NoArrowType("returns only None")
    if len(inner) > 1:
        found = {str(one): one for one in (arrow_type(member) for member in inner)}
        only = next(iter(found.values()))
        return only if len(found) == 1 else _union_error(inner)
    if inner[0] is not annotation:
        return arrow_type(inner[0])
    if typing.get_origin(annotation) is typing.Literal:
        return arrow_type(typing.Union[tuple({type(value) for value in typing.get_args(annotation)})])  # noqa: UP007
    return _generic_type(annotation) if typing.get_origin(annotation) is not None else _plain_type(annotation)


def _union_error(kinds: Sequence[Any]) -> NoArrowType:
    numbers = all(isinstance(kind, type) and issubclass(kind, int | float) for kind in kinds)
    reason = f"returns {' or '.join(map(annotation_text, kinds))}, but a column has one type"
    if numbers and bool not in kinds:
        return NoArrowType(f'{reason}: write data_type="double"', "double", is_union=True)
    return NoArrowType(reason, is_union=True)


def data_type_fixes(name: str, missing: NoArrowType) -> tuple[str, ...]:
    """Fixes for a function without a usable return type; each works when pasted."""
    option = f'data_type="{missing.example or "string"}"'
    if not name.isidentifier():
        return (f"udf(lambda ..., {option})",)
    if missing.example:
        return (f"@dt.udf({option})",)
    if missing.is_union:
        return (f"def {name}(...) -> str, and return str(...)",)
    return (f"def {name}(...) -> str", f"@dt.udf({option})")


def _generic_type(annotation: Any) -> Any:
    import pyarrow as pa

    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in SEQUENCE_TYPES and _element_annotation(origin, args) is not NO_ANNOTATION:
        inner = arrow_type(_element_annotation(origin, args))
        return _list_error(annotation, inner) if isinstance(inner, NoArrowType) else pa.list_(inner)
    if getattr(origin, "__name__", "") == "ndarray":
        kinds = typing.get_args(args[-1])  # ndarray[shape, dtype[float32]]
        inner = arrow_type(kinds[0]) if kinds else ""
        return _needs_data_type(annotation, "list<float32>") if isinstance(inner, str) else pa.list_(inner)
    if isinstance(origin, type) and issubclass(origin, Mapping) and args:
        return _needs_data_type(annotation, _struct_text(args[1:] * 2))
    if origin is tuple and args and Ellipsis not in args:
        return _needs_data_type(annotation, _struct_text(args))
    return _plain_type(origin)


def _list_error(annotation: Any, element: NoArrowType) -> NoArrowType:
    return _needs_data_type(annotation, f"list<{element.example}>") if element.example else element


def _struct_text(kinds: Sequence[Any]) -> str:
    """Text of a struct with these field annotations, for `data_type=`."""
    found = [arrow_type(kind) for kind in kinds]
    texts = ["string" if isinstance(kind, str) else str(kind) for kind in found]
    return f"struct<{', '.join(f'{chr(97 + at % 26)}: {text}' for at, text in enumerate(texts))}>"


def _element_annotation(origin: Any, args: tuple[Any, ...]) -> Any:
    """T of `list[T]` and `tuple[T, ...]`."""
    if origin is tuple:
        kinds = [one for one in args if one is not Ellipsis]
        return kinds[0] if kinds and all(one == kinds[0] for one in kinds) else NO_ANNOTATION
    return args[0] if args else NO_ANNOTATION


def _plain_type(kind: Any) -> Any:
    import pyarrow as pa

    fields = record_fields(kind)
    if fields is not None:
        return _struct_type(kind, fields)
    for python, made in _PYTHON_TYPES:
        if isinstance(kind, type) and issubclass(kind, python) and not _is_numpy(kind):
            return getattr(pa, made[0])(*made[1:])
    if _is_numpy(kind):
        return _numpy_type(kind)
    if is_array(kind):
        return _array_class_type(kind)
    example = "string"
    if kind is decimal.Decimal:
        example = "decimal128(18, 2)"
    elif kind in SEQUENCE_TYPES:
        example = "list<string>"
    elif getattr(kind, "__name__", "") == "ndarray":
        example = "list<float32>"
    elif isinstance(kind, type) and issubclass(kind, Mapping):
        example = "struct<a: string>"
    return _needs_data_type(kind, example)


_PYTHON_TYPES: tuple[tuple[type, tuple[Any, ...]], ...] = (
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
"""The order matters: a bool is an int, a datetime is a date."""


def record_fields(kind: Any) -> dict[str, Any] | None:
    """Field -> annotation of a NamedTuple, dataclass or TypedDict; None for other types."""
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
            found[name] = resolve_annotation(value, names)
    if named:
        return {name: found.get(name, NO_ANNOTATION) for name in kind._fields}  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(kind):
        return {field.name: found.get(field.name, NO_ANNOTATION) for field in dataclasses.fields(kind)}
    return found


def _struct_type(kind: type, fields: dict[str, Any]) -> Any:
    import pyarrow as pa

    made = {name: arrow_type(annotation) for name, annotation in fields.items()}
    wrong = [f"field {name} {found}" for name, found in made.items() if isinstance(found, str)]
    return NoArrowType(f"{kind.__qualname__}: {'; '.join(wrong)}") if wrong else pa.struct(list(made.items()))


def _is_numpy(kind: Any) -> bool:
    return isinstance(kind, type) and any(
        base.__module__ == "numpy" and base.__name__ == "generic" for base in kind.__mro__
    )


def _numpy_type(kind: Any) -> Any:
    import numpy
    import pyarrow as pa

    try:
        found = numpy.dtype(kind)
        texts = {"U": pa.string(), "S": pa.binary()}
        return texts[found.kind] if found.kind in texts else pa.from_numpy_dtype(found)
    except (TypeError, ValueError, NotImplementedError, pa.ArrowException):
        return _needs_data_type(kind, "float32")


def _array_class_type(kind: Any) -> Any:
    """Element type of an array class: StringArray -> string; unknown for `pa.Array`."""
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
    return NoArrowType(f'{kind.__name__} has no element type: write data_type="float32"', "float32")


def _annotated_metadata(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__metadata__", ()) if typing.get_origin(annotation) is typing.Annotated else ()


def _unwrap_annotation(annotation: Any) -> Any:
    """The annotation without Annotated, NewType and type aliases."""
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


def annotation_text(annotation: Any) -> str:
    if isinstance(annotation, UnresolvedAnnotation):
        return annotation.text
    plain = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return annotation.__qualname__ if plain else str(annotation).replace("typing.", "")


# --- types that a parameter accepts


def accepts(annotation: Any, column: Any) -> bool:
    """Whether a parameter with this annotation accepts values or arrays of this pyarrow type."""
    import pyarrow as pa

    annotation = _unwrap_annotation(annotation)
    if annotation in (NO_ANNOTATION, Any, object) or isinstance(annotation, UnresolvedAnnotation | typing.TypeVar):
        return True
    inner = union_members(annotation)
    if len(inner) > 1:
        return any(accepts(one, column) for one in inner if one is not type(None))
    if is_arrow(annotation, "Array", "ChunkedArray"):
        found = pa.nulls(0, underlying_type(column) if is_blob(column) else column)
        return annotation.__name__ in ("Array", "ChunkedArray") or isinstance(found, annotation)
    column = underlying_type(column)
    if pa.types.is_null(column):
        return True
    origin = typing.get_origin(annotation) or annotation
    if origin is typing.Literal:
        return any(accepts(type(value), column) for value in typing.get_args(annotation))
    if typing.is_typeddict(origin):
        return bool(pa.types.is_struct(column))
    if _is_numpy(origin):
        return _accepts_numpy(origin, column)
    kind = python_class(column)
    if not isinstance(origin, type) or not (issubclass(kind, origin) or (origin is float and kind is int)):
        return False
    inside = _element_annotation(origin, typing.get_args(annotation)) if origin in SEQUENCE_TYPES else NO_ANNOTATION
    return inside is NO_ANNOTATION or kind is not list or pa.types.is_map(column) or accepts(inside, column.value_type)


def _accepts_numpy(kind: Any, column: Any) -> bool:
    """Whether it is a numpy scalar type; Python values are passed, which behave the same."""
    python = python_class(column)
    names = {base.__name__ for base in kind.__mro__}
    return (python is int and not names.isdisjoint({"integer", "floating"})) or (
        python is float and "floating" in names
    )


def underlying_type(column: Any) -> Any:
    """Type of the values: value type of dictionaries, storage type of extensions."""
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
    """Blob type of tables of version 2.2 and later; earlier, a blob is binary with metadata on the column."""
    return getattr(column, "extension_name", "") == "lance.blob.v2"


def python_class(column: Any) -> type:
    """Python class of the values of an Arrow type."""
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


def can_store(given: Any, column: Any) -> bool:
    """Whether the annotated return type can be stored in an existing column: the same type, or the same kind in another
    width. (Rows with values out of range fail.)"""
    import pyarrow as pa

    given, column = underlying_type(given), underlying_type(column)
    if given.equals(column) or pa.types.is_null(given):
        return True
    if is_list(given) and is_list(column):
        return can_store(given.value_type, column.value_type)
    if pa.types.is_struct(given) and pa.types.is_struct(column):
        ours, theirs = ({field.name: field.type for field in one} for one in (given, column))
        return ours.keys() == theirs.keys() and all(can_store(ours[name], theirs[name]) for name in ours)
    kind = python_class(given)
    return kind is python_class(column) and kind not in (list, dict, object)


# --- data_type=


def parse_data_type(value: Any) -> Any:
    """The pyarrow type of `data_type=`, given as a pyarrow type, a string or a Python type; or the problem."""
    import pyarrow as pa

    if isinstance(value, pa.DataType):
        return value
    if isinstance(value, pa.Field):
        return value.type
    if isinstance(value, str):
        try:
            return parse_type_name(value)
        except ValueError as error:
            return NoArrowType(f"is not the name of an Arrow type: {error}")
    found = arrow_type(value) if isinstance(value, type) or typing.get_origin(value) is not None else None
    return NoArrowType("is not an Arrow type") if found is None or isinstance(found, str) else found
