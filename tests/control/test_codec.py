"""Encoding of events and commands."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.control import commands as c
from dovetail.control import events as e
from dovetail.control.codec import (
    COMMAND_TYPES,
    EVENT_TYPES,
    DecodeError,
    decode_command,
    decode_event,
    encode,
    from_jsonable,
    to_jsonable,
)
from dovetail.control.payload import Segment
from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.seat import CardShare, Seat

COUNT = st.integers(0, 1 << 40)
NUMBER = st.floats(allow_nan=False)
TEXT = st.text(max_size=10)
KEY = st.lists(COUNT, max_size=3).map(tuple)
SEGMENT = st.builds(Segment, COUNT, COUNT, COUNT, TEXT, st.just(object()), st.none() | KEY)
PART = st.tuples(SEGMENT, COUNT, COUNT)
NODES = st.sampled_from(
    [
        Node("node-0", 4000),
        Node("node-7", 32500, 128 << 30, (Gpu.of("A100"), Gpu.of("A100", "10GB", 1, 2)), kept_back_milli=500),
        *Cluster.parse("2x(8cpu, 16GB, 1xL4){pool=gpu, zone=b} + 1x(2cpu, licence=1.5)").nodes,
    ]
)
SHARES = st.builds(CardShare, *[COUNT] * 5)
SEATS = st.builds(
    Seat,
    TEXT,
    COUNT,
    COUNT,
    st.lists(SHARES, max_size=2).map(tuple),
    st.dictionaries(TEXT, COUNT, max_size=2).map(lambda it: tuple(sorted(it.items()))),
)
DATA = st.recursive(
    st.none() | st.booleans() | COUNT | NUMBER | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXT | COUNT | st.tuples(COUNT, TEXT) | st.sampled_from(["()", "{}"]), inner, max_size=3)
    ),
    max_leaves=8,
)
FAILURE = st.builds(
    e.CallFailure,
    COUNT,
    COUNT,
    TEXT,
    TEXT,
    st.booleans(),
    st.booleans(),
    st.lists(KEY, max_size=2).map(tuple),
    *[TEXT] * 5,
)
FAILED = st.builds(c.FailedItem, TEXT, PART, TEXT, TEXT, st.none() | KEY, COUNT, TEXT, TEXT)
BY_UNIT = st.dictionaries(TEXT, st.lists(SEGMENT, max_size=3), max_size=2)
STAGES = st.none() | st.lists(st.tuples(COUNT, COUNT, NUMBER), max_size=2)

MADE: dict[type[Any], st.SearchStrategy[Any]] = {
    e.WorkerReady: st.builds(e.WorkerReady, COUNT, NUMBER),
    e.WorkerStopped: st.builds(e.WorkerStopped, COUNT),
    e.WorkerLost: st.builds(
        e.WorkerLost,
        COUNT,
        st.sampled_from(e.LossCause),
        TEXT,
        st.lists(st.builds(e.Breadcrumb, COUNT, COUNT, st.booleans()), max_size=3).map(tuple),
        COUNT,
    ),
    e.BatchesDone: st.builds(
        e.BatchesDone, COUNT, COUNT, st.lists(SEGMENT, max_size=3), NUMBER, st.lists(FAILURE, max_size=2), COUNT, STAGES
    ),
    e.BatchesReturned: st.builds(e.BatchesReturned, COUNT, COUNT),
    e.NodeJoined: st.builds(e.NodeJoined, NODES),
    e.NodeLeft: st.builds(e.NodeLeft, TEXT, TEXT),
    e.ItemsArrived: st.builds(e.ItemsArrived, COUNT, st.lists(SEGMENT, max_size=3)),
    e.InputExpected: st.builds(e.InputExpected, COUNT),
    e.InputEnded: st.builds(e.InputEnded, COUNT),
    e.Drain: st.builds(e.Drain, TEXT),
    e.CancelRun: st.builds(e.CancelRun, TEXT),
    e.FailRun: st.builds(e.FailRun, TEXT, TEXT, TEXT, TEXT),
    e.PinWorkers: st.builds(e.PinWorkers, TEXT, st.none() | COUNT),
    e.CapacityReserved: st.builds(e.CapacityReserved, st.lists(SEATS, max_size=2).map(tuple)),
    c.StartWorker: st.builds(
        c.StartWorker,
        COUNT,
        st.lists(SEATS, min_size=1, max_size=2).map(tuple),
        st.lists(st.builds(c.HostedObject, TEXT, st.none(), COUNT), max_size=2).map(tuple),
    ),
    c.RunBatches: st.builds(
        c.RunBatches, COUNT, COUNT, TEXT, st.lists(PART, max_size=3), COUNT, COUNT, COUNT, st.booleans()
    ),
    c.Cancel: st.builds(c.Cancel, COUNT, COUNT),
    c.StopWorker: st.builds(c.StopWorker, COUNT, st.booleans(), TEXT),
    c.Pull: st.builds(c.Pull, COUNT, COUNT, COUNT, COUNT),
    c.Deliver: st.builds(c.Deliver, COUNT, COUNT, COUNT, COUNT, BY_UNIT, BY_UNIT, st.lists(FAILED, max_size=2)),
    c.ReportFailure: st.builds(c.ReportFailure, st.lists(FAILED, max_size=2)),
    c.Note: st.builds(c.Note, TEXT, TEXT, st.dictionaries(TEXT, DATA, max_size=3)),
}


def opened(value: Any) -> Any:
    """All fields, because segments are compared by identity; without fields that are not encoded."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = [(item.name, opened(getattr(value, item.name))) for item in fields(value) if item.name != "ref"]
        return type(value), shown
    if isinstance(value, dict):
        return {key: opened(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [opened(inner) for inner in value]
    return value


def test_examples_cover_every_kind_of_event_and_command() -> None:
    assert set(MADE) == {*EVENT_TYPES, *COMMAND_TYPES}


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_encoded_events_and_commands_decode_to_the_same_fields(kind: type[Any], data: st.DataObject) -> None:
    made = data.draw(MADE[kind])
    written = encode(made)
    assert json.loads(json.dumps(written)) == written
    back = decode_event(written) if kind in EVENT_TYPES else decode_command(written)
    assert opened(back) == opened(made)


def test_payloads_and_definitions_of_hosted_objects_are_not_encoded() -> None:
    run = c.RunBatches(1, 2, "a", [(Segment(3, 4, ref=object()), 0, 4)], 4, 4, 4)
    back = decode_command(encode(run))
    assert isinstance(back, c.RunBatches)
    assert back.parts[0][0].ref is None
    start = decode_command(encode(c.StartWorker(1, (), (c.HostedObject("a", definition=print, slots=2),))))
    assert isinstance(start, c.StartWorker)
    assert start.hosted == (c.HostedObject("a", slots=2),)


@given(DATA)
def test_plain_data_survives_with_its_tuples_and_odd_keys(value: Any) -> None:
    written = to_jsonable(value)
    assert json.loads(json.dumps(written)) == written
    assert opened(from_jsonable(written)) == opened(value)


def test_values_that_are_not_plain_data_are_encoded_as_text() -> None:
    assert to_jsonable({"path": object, "cause": e.LossCause.EXIT, "some": {1}}) == {
        "path": "<class 'object'>",
        "cause": "exit",
        "some": "{1}",
    }


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"<>": "Nothing"},
        {"<>": "Pull", "first": 0, "last": 1},
        {"<>": "Drain", 1: 2},
        {"<>": "Segment", "id": 1, "items": 1},
    ],
)
def test_unknown_data_is_refused(data: dict[Any, Any]) -> None:
    with pytest.raises(DecodeError):
        decode_command(data)
    with pytest.raises(DecodeError):
        decode_event(data)
