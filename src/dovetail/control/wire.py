"""How are events and commands written down as plain data, and read back?

What is written is JSON-able and stays the same through JSON. Payloads are not part of it: a segment comes back without
its `ref`, a hosted object without its `work`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dovetail.control import commands as c
from dovetail.control import events as e
from dovetail.control.commands import Command
from dovetail.control.events import Event
from dovetail.control.plain import as_it_was, plain
from dovetail.control.segments import Part, Segment
from dovetail.resources.cluster import Cluster, Node
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class NotOnTheWire(ValueError):
    """Data that no `encode_...` of this module wrote."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one kind of value is written and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def encode_event(event: Event) -> dict[str, Any]:
    return _encode(event)


def decode_event(data: Mapping[str, Any]) -> Event:
    found: Event = _decode(data, EVENTS)
    return found


def encode_command(command: Command) -> dict[str, Any]:
    return _encode(command)


def decode_command(data: Mapping[str, Any]) -> Command:
    found: Command = _decode(data, COMMANDS)
    return found


def _segment(segment: Segment) -> list[Any]:
    written: list[Any] = [segment.id, segment.items, segment.size_bytes, segment.node]
    return written if segment.first is None else [*written, list(segment.first)]


def _read_segment(data: list[Any]) -> Segment:
    number, items, size, node, *first = data
    return Segment(number, items, size, node, first=tuple(first[0]) if first else None)


def _part(part: Part) -> list[Any]:
    segment, start, stop = part
    return [_segment(segment), start, stop]


def _read_part(data: list[Any]) -> Part:
    return _read_segment(data[0]), data[1], data[2]


def _node(node: Node) -> Any:
    return Cluster((node,)).to_dict()["nodes"][0]


def _read_node(data: Any) -> Node:
    return Cluster.from_dict({"nodes": [data]}).nodes[0]


def _list_of(form: Form) -> Form:
    return Form(
        lambda values: [form.write(value) for value in values], lambda values: [form.read(value) for value in values]
    )


def _tuple_of(form: Form) -> Form:
    return Form(
        lambda values: [form.write(value) for value in values],
        lambda values: tuple(form.read(value) for value in values),
    )


def _optional(form: Form) -> Form:
    return Form(
        lambda value: None if value is None else form.write(value),
        lambda value: None if value is None else form.read(value),
    )


def _record(kind: type[Any]) -> Form:
    """A dataclass inside another: its fields, without the tag."""
    return Form(
        lambda value: _fields(value, kind),
        lambda data: kind(**{name: _FORMS[kind][name].read(data[name]) for name in data}),
    )


_AS_IS = Form(lambda value: value, lambda value: value)
_NUMBERS = Form(list, tuple)
_SEGMENTS = _list_of(Form(_segment, _read_segment))
_BY_UNIT = Form(
    lambda found: {unit: _SEGMENTS.write(segments) for unit, segments in found.items()},
    lambda found: {unit: _SEGMENTS.read(segments) for unit, segments in found.items()},
)
_PART = Form(_part, _read_part)
_SEATS = _tuple_of(Form(Seat.to_dict, Seat.from_dict))
_SPECIAL: dict[tuple[type[Any], str], Form] = {
    (e.WorkerLost, "cause"): Form(lambda cause: cause.value, e.Cause),
    (e.WorkerLost, "crumbs"): _tuple_of(_record(e.Crumb)),
    (e.Failure, "keys"): _tuple_of(_NUMBERS),
    (e.BatchesDone, "segments"): _SEGMENTS,
    (e.BatchesDone, "failures"): _list_of(_record(e.Failure)),
    (e.BatchesDone, "stages"): _optional(_list_of(_NUMBERS)),
    (e.NodeJoined, "node"): Form(_node, _read_node),
    (e.ItemsArrived, "segments"): _SEGMENTS,
    (e.Reserved, "seats"): _SEATS,
    (c.StartWorker, "seats"): _SEATS,
    (c.StartWorker, "hosted"): _tuple_of(Form(lambda it: [it.name, it.slots], lambda it: c.Hosted(it[0], slots=it[1]))),
    (c.RunBatches, "parts"): _list_of(_PART),
    (c.SetAside, "part"): _PART,
    (c.SetAside, "key"): _optional(_NUMBERS),
    (c.Deliver, "outputs"): _BY_UNIT,
    (c.Deliver, "spooled"): _BY_UNIT,
    (c.Deliver, "aside"): _list_of(_record(c.SetAside)),
    (c.Note, "data"): Form(lambda data: plain(dict(data)), as_it_was),
}
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}
COMMANDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Command.__args__}
_FORMS: dict[type[Any], dict[str, Form]] = {
    kind: {item.name: _SPECIAL.get((kind, item.name), _AS_IS) for item in fields(kind)}
    for kind in (*EVENTS.values(), *COMMANDS.values(), e.Crumb, e.Failure, c.SetAside)
}


def _fields(value: Any, kind: type[Any]) -> dict[str, Any]:
    return {name: form.write(getattr(value, name)) for name, form in _FORMS[kind].items()}


def _encode(value: Any) -> dict[str, Any]:
    kind = type(value)
    return {"type": kind.__name__, **_fields(value, kind)}


def _decode(data: Mapping[str, Any], known: Mapping[str, type[Any]]) -> Any:
    try:
        kind = known[data["type"]]
        forms = _FORMS[kind]
        return kind(**{name: forms[name].read(value) for name, value in data.items() if name != "type"})
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise NotOnTheWire(f"{data!r:.200} is not one of {', '.join(known)}: {error!r}") from None
