"""JSON codec for events, commands and arbitrary values (replay recordings and the journal).

Encoded values survive a round trip through JSON. Payloads are not encoded: a decoded segment has no `ref`, a decoded
hosted object no `definition`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from dovetail.control import commands as c
from dovetail.control import events as e
from dovetail.control.commands import Command
from dovetail.control.events import Event
from dovetail.control.payload import Segment, SegmentSlice
from dovetail.resources.cluster import Cluster, Node
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Callable

TUPLE_KEY, PAIRS_KEY = "()", "{}"
"""Keys that mark values without a JSON form: a tuple, and a mapping whose keys are not all strings."""


def to_jsonable(value: object) -> Any:
    """Convert any value to JSON: tuples and mappings with other keys are marked, other objects become their string."""
    if isinstance(value, Enum):  # first, because some enums are also numbers or strings
        return to_jsonable(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {TUPLE_KEY: [to_jsonable(inner) for inner in value]}
    if isinstance(value, list):
        return [to_jsonable(inner) for inner in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and value.keys().isdisjoint((TUPLE_KEY, PAIRS_KEY)):
            return {key: to_jsonable(inner) for key, inner in value.items()}
        return {PAIRS_KEY: [[to_jsonable(key), to_jsonable(inner)] for key, inner in value.items()]}
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
    return {key: from_jsonable(inner) for key, inner in value.items()}


class DecodeError(ValueError):
    """Data that was not written by an `encode_...` function of this module."""


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """Functions that encode and decode one kind of value."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def encode_event(event: Event) -> dict[str, Any]:
    return _encode(event)


def decode_event(data: Mapping[str, Any]) -> Event:
    found: Event = _decode(data, EVENT_TYPES)
    return found


def encode_command(command: Command) -> dict[str, Any]:
    return _encode(command)


def decode_command(data: Mapping[str, Any]) -> Command:
    found: Command = _decode(data, COMMAND_TYPES)
    return found


def _encode_segment(segment: Segment) -> list[Any]:
    written: list[Any] = [segment.id, segment.items, segment.size_bytes, segment.node]
    return written if segment.first is None else [*written, list(segment.first)]


def _decode_segment(data: list[Any]) -> Segment:
    number, items, size, node, *first = data
    return Segment(number, items, size, node, first=tuple(first[0]) if first else None)


def _encode_slice(part: SegmentSlice) -> list[Any]:
    segment, start, stop = part
    return [_encode_segment(segment), start, stop]


def _decode_slice(data: list[Any]) -> SegmentSlice:
    return _decode_segment(data[0]), data[1], data[2]


def _encode_node(node: Node) -> Any:
    return Cluster((node,)).to_dict()["nodes"][0]


def _decode_node(data: Any) -> Node:
    return Cluster.from_dict({"nodes": [data]}).nodes[0]


def _list_of(form: FieldCodec) -> FieldCodec:
    return FieldCodec(
        lambda values: [form.write(value) for value in values], lambda values: [form.read(value) for value in values]
    )


def _tuple_of(form: FieldCodec) -> FieldCodec:
    return FieldCodec(
        lambda values: [form.write(value) for value in values],
        lambda values: tuple(form.read(value) for value in values),
    )


def _optional(form: FieldCodec) -> FieldCodec:
    return FieldCodec(
        lambda value: None if value is None else form.write(value),
        lambda value: None if value is None else form.read(value),
    )


def _nested(kind: type[Any]) -> FieldCodec:
    """A dataclass as a field of another one: its fields without the type tag."""
    return FieldCodec(
        lambda value: _encode_fields(value, kind),
        lambda data: kind(**{name: _CODECS[kind][name].read(data[name]) for name in data}),
    )


_AS_IS = FieldCodec(lambda value: value, lambda value: value)
_NUMBERS = FieldCodec(list, tuple)
_SEGMENTS = _list_of(FieldCodec(_encode_segment, _decode_segment))
_BY_UNIT = FieldCodec(
    lambda found: {unit: _SEGMENTS.write(segments) for unit, segments in found.items()},
    lambda found: {unit: _SEGMENTS.read(segments) for unit, segments in found.items()},
)
_SLICE = FieldCodec(_encode_slice, _decode_slice)
_SEATS = _tuple_of(FieldCodec(Seat.to_dict, Seat.from_dict))
_FIELD_CODECS: dict[tuple[type[Any], str], FieldCodec] = {
    (e.WorkerLost, "cause"): FieldCodec(lambda cause: cause.value, e.LossCause),
    (e.WorkerLost, "breadcrumbs"): _tuple_of(_nested(e.Breadcrumb)),
    (e.CallFailure, "keys"): _tuple_of(_NUMBERS),
    (e.BatchesDone, "segments"): _SEGMENTS,
    (e.BatchesDone, "failures"): _list_of(_nested(e.CallFailure)),
    (e.BatchesDone, "stages"): _optional(_list_of(_NUMBERS)),
    (e.NodeJoined, "node"): FieldCodec(_encode_node, _decode_node),
    (e.ItemsArrived, "segments"): _SEGMENTS,
    (e.CapacityReserved, "seats"): _SEATS,
    (c.StartWorker, "seats"): _SEATS,
    (c.StartWorker, "hosted"): _tuple_of(
        FieldCodec(lambda it: [it.name, it.slots], lambda it: c.HostedObject(it[0], slots=it[1]))
    ),
    (c.RunBatches, "parts"): _list_of(_SLICE),
    (c.FailedItem, "part"): _SLICE,
    (c.FailedItem, "key"): _optional(_NUMBERS),
    (c.Deliver, "outputs"): _BY_UNIT,
    (c.Deliver, "spooled"): _BY_UNIT,
    (c.Deliver, "failed_items"): _list_of(_nested(c.FailedItem)),
    (c.Note, "data"): FieldCodec(lambda data: to_jsonable(dict(data)), from_jsonable),
}
EVENT_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}
COMMAND_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in Command.__args__}
_CODECS: dict[type[Any], dict[str, FieldCodec]] = {
    kind: {item.name: _FIELD_CODECS.get((kind, item.name), _AS_IS) for item in fields(kind)}
    for kind in (*EVENT_TYPES.values(), *COMMAND_TYPES.values(), e.Breadcrumb, e.CallFailure, c.FailedItem)
}


def _encode_fields(value: Any, kind: type[Any]) -> dict[str, Any]:
    return {name: form.write(getattr(value, name)) for name, form in _CODECS[kind].items()}


def _encode(value: Any) -> dict[str, Any]:
    kind = type(value)
    return {"type": kind.__name__, **_encode_fields(value, kind)}


def _decode(data: Mapping[str, Any], known: Mapping[str, type[Any]]) -> Any:
    try:
        kind = known[data["type"]]
        forms = _CODECS[kind]
        return kind(**{name: forms[name].read(value) for name, value in data.items() if name != "type"})
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DecodeError(f"{data!r:.200} is not one of {', '.join(known)}: {error!r}") from None
