"""Validation of a document against a dataclass; every mistake is reported at once, with its place."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from dovetail.documents.fields import (
    ANYTHING,
    FLAG,
    NUMBER,
    STRING,
    WHOLE_NUMBER,
    Field,
    Record,
    Type,
    UnknownKey,
    file_problem,
    list_of,
    mapping_of,
    record_type,
)
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.documents.document import Document

T = TypeVar("T")

_SIMPLE_TYPES: dict[object, Type] = {
    Any: ANYTHING,
    str: STRING,
    bool: FLAG,
    int: WHOLE_NUMBER,
    float: NUMBER,
}


def validate_document(document: Document, schema: type[T], *, ignore_unknown: bool = False) -> T:
    """The document as a dataclass; ConfigError with every mistake and its place. The fields of the dataclass may be
    strings, numbers, flags, lists, mappings, other dataclasses, and None."""
    kind: Any = schema
    problems = [
        replace(file_problem(mistake), place=document.place(mistake.path))
        for mistake in record_type(_record(kind)).check(document.data)
        if not (ignore_unknown and isinstance(mistake, UnknownKey))
    ]
    if problems:
        raise ConfigError(problems)
    built: T = _build(schema, document.data)
    return built


@cache
def _hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema)


@cache
def _record(schema: Any) -> Record:
    hints = _hints(schema)
    found = []
    for item in fields(schema):
        inner, nullable = _without_none(hints[item.name])
        required = item.default is MISSING and item.default_factory is MISSING
        found.append(Field(item.name, _type(inner), "", required=required, nullable=nullable))
    return Record(schema.__name__, "", tuple(found))


def _type(hint: Any) -> Type:
    if hint in _SIMPLE_TYPES:
        return _SIMPLE_TYPES[hint]
    if isinstance(hint, type) and is_dataclass(hint):
        return record_type(_record(hint))
    arguments = get_args(hint)
    if get_origin(hint) is list:
        return list_of(_type(arguments[0]))
    assert get_origin(hint) is dict, f"{hint} is not a type of plain data"
    return mapping_of(_type(arguments[1]), "a mapping", {}, key=lambda _name: True)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True)."""
    if get_origin(hint) is not UnionType:
        return hint, False
    (inner,) = (one for one in get_args(hint) if one is not NoneType)
    return inner, True


def _build(hint: Any, data: Any) -> Any:
    """The value of a valid document, with dataclasses for their mappings."""
    inner, _ = _without_none(hint)
    if data is None:
        return None
    if isinstance(inner, type) and is_dataclass(inner):
        hints = _hints(inner)
        return inner(
            **{item.name: _build(hints[item.name], data[item.name]) for item in fields(inner) if item.name in data}
        )
    if get_origin(inner) is list:
        return [_build(get_args(inner)[0], item) for item in data]
    if get_origin(inner) is dict:
        return {key: _build(get_args(inner)[1], item) for key, item in data.items()}
    return data
