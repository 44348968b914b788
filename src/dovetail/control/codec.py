"""JSON codec for plain values (the journal), and for events and commands (replay recordings).

Encoded values survive a round trip through JSON. Payloads are not encoded: a decoded segment has no `ref`, a decoded
hosted object no `definition`, a decoded StartWorker no `context`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from dovetail.control.commands import Command, FailedItem, HostedObject, StartWorker
from dovetail.control.events import Breadcrumb, CallFailure, Event, LossCause, WorkerLost
from dovetail.control.payload import Segment
from dovetail.resources.cluster import Gpu, Node
from dovetail.resources.seat import CardShare, Seat

TUPLE_KEY, PAIRS_KEY, OBJECT_KEY = "()", "{}", "<>"
"""Keys that mark values without a JSON form: a tuple, a mapping whose keys are not all strings, and an object."""
MARKS = frozenset((TUPLE_KEY, PAIRS_KEY, OBJECT_KEY))

ObjectFields = Mapping[type[Any], tuple[str, ...]]


def to_jsonable(value: object, objects: ObjectFields | None = None) -> Any:
    """Convert any value to JSON. Tuples, mappings with other keys and `objects` (type -> fields) are marked; all other
    objects become their string."""
    if isinstance(value, Enum):  # first, because some enums are also numbers or strings
        return to_jsonable(value.value, objects)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    names = objects.get(type(value)) if objects else None
    if names is not None:
        encoded = {name: to_jsonable(getattr(value, name), objects) for name in names}
        return {OBJECT_KEY: type(value).__name__, **encoded}
    if isinstance(value, tuple):
        return {TUPLE_KEY: [to_jsonable(inner, objects) for inner in value]}
    if isinstance(value, list):
        return [to_jsonable(inner, objects) for inner in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and MARKS.isdisjoint(value):
            return {key: to_jsonable(inner, objects) for key, inner in value.items()}
        pairs = [[to_jsonable(key, objects), to_jsonable(inner, objects)] for key, inner in value.items()]
        return {PAIRS_KEY: pairs}
    return str(value)


def from_jsonable(value: Any) -> Any:
    """The inverse of `to_jsonable`."""
    if isinstance(value, list):
        return [from_jsonable(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if TUPLE_KEY in value:
        return tuple(from_jsonable(inner) for inner in value[TUPLE_KEY])
    if PAIRS_KEY in value:
        return {from_jsonable(key): from_jsonable(inner) for key, inner in value[PAIRS_KEY]}
    decoded = {key: from_jsonable(inner) for key, inner in value.items() if key != OBJECT_KEY}
    if OBJECT_KEY not in value:
        return decoded
    kind = _TYPES_BY_NAME[value[OBJECT_KEY]]
    if kind is WorkerLost:
        decoded["cause"] = LossCause(decoded["cause"])
    return kind(**decoded)


class DecodeError(ValueError):
    """Data that `encode` did not write."""


def encode(value: Event | Command) -> dict[str, Any]:
    """Convert an event or a command to JSON."""
    encoded: dict[str, Any] = to_jsonable(value, _FIELDS)
    return encoded


def decode_event(data: Mapping[str, Any]) -> Event:
    found: Event = _decode(data, EVENT_TYPES)
    return found


def decode_command(data: Mapping[str, Any]) -> Command:
    found: Command = _decode(data, COMMAND_TYPES)
    return found


def _decode(data: Mapping[str, Any], kinds: tuple[type[Any], ...]) -> Any:
    try:
        found = from_jsonable(data)
    except (KeyError, TypeError, ValueError) as error:
        raise DecodeError(f"{data!r:.200} cannot be decoded: {error!r}") from None
    if not isinstance(found, kinds):
        raise DecodeError(f"{data!r:.200} is not one of {', '.join(kind.__name__ for kind in kinds)}")
    return found


EVENT_TYPES: tuple[type[Any], ...] = Event.__args__
COMMAND_TYPES: tuple[type[Any], ...] = Command.__args__
_FIELDS: dict[type[Any], tuple[str, ...]] = {
    **{
        kind: tuple(item.name for item in fields(kind))
        for kind in (*EVENT_TYPES, *COMMAND_TYPES, Breadcrumb, CallFailure, FailedItem, Gpu, Node)
    },
    **{kind: kind._fields for kind in (CardShare, Seat)},
    Segment: ("id", "items", "size_bytes", "node", "first"),
    HostedObject: ("name", "slots"),
    StartWorker: ("worker", "seats", "hosted"),
}
_TYPES_BY_NAME = {kind.__name__: kind for kind in _FIELDS}
