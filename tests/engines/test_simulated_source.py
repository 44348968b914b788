"""Simulated source and sink."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.control.commands import Deliver, FailedItem, Pull
from dovetail.control.events import InputEnded, ItemsArrived
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.world import World
from dovetail.resources.cluster import Cluster


def engine_of(*, tracked: bool = False) -> SimulatedEngine:
    return SimulatedEngine(World({}, tracked=tracked), Cluster.parse("1x(1cpu)"))


def arrivals(engine: SimulatedEngine, until_s: float = 1000.0) -> tuple[list[tuple[float, int, int]], list[int]]:
    """(time, first, items) of each arrival, and the total of every end of the source."""
    came, ends = [], []
    while engine.now() < until_s:
        for event in engine.poll(until_s - engine.now()):
            if isinstance(event, ItemsArrived):
                came.append((engine.now(), event.first, sum(segment.items for segment in event.segments)))
            else:
                assert isinstance(event, InputEnded)
                ends.append(event.items)
    return came, ends


def test_items_arrive_at_once_in_segments_of_limited_size() -> None:
    engine = engine_of()
    data = SimulatedData(engine, 5000, item_bytes=3)
    data.submit([Pull(0, 2500)])
    came, ends = arrivals(engine)
    assert came == [(0.0, 0, 1024), (0.0, 1024, 1024), (0.0, 2048, 452)]
    assert ends == []


@given(items=st.integers(0, 3000), pulls=st.lists(st.integers(1, 1500), max_size=6), first=st.integers(0, 500))
def test_every_number_and_the_end_arrive_once(items: int, pulls: list[int], first: int) -> None:
    engine = engine_of(tracked=True)
    data = SimulatedData(engine, items)
    asked = first
    for n in pulls:
        data.submit([Pull(asked, n)])
        asked += n
    keys: list[Any] = []
    ends = []
    for event in engine.poll(1.0):
        if isinstance(event, ItemsArrived):
            assert event.segments[0].ref == [(event.first + i,) for i in range(event.segments[0].items)]
            keys += [key for segment in event.segments for key in segment.ref]  # type: ignore[attr-defined]
        else:
            ends.append(event)
    assert keys == [(n,) for n in range(first, min(asked, items))]
    assert ends == ([InputEnded(items)] if pulls and asked >= items else [])


def test_an_endless_source_never_ends() -> None:
    engine = engine_of()
    data = SimulatedData(engine, None)
    data.submit([Pull(10**9, 100)])
    assert arrivals(engine) == ([(0.0, 10**9, 100)], [])


def test_a_rate_holds_over_several_pulls_and_idle_time_is_not_compensated() -> None:
    engine = engine_of()
    data = SimulatedData(engine, 500, rate=100.0)
    data.submit([Pull(0, 200), Pull(200, 100)])
    came, _ = arrivals(engine, 10.0)
    assert came[-1][0] == pytest.approx(3.0)
    assert {n for _, _, n in came} == {5}
    data.submit([Pull(300, 200)])
    came, ends = arrivals(engine)
    assert came[0][0] == pytest.approx(10.05)
    assert came[-1][0] == pytest.approx(12.0)
    assert ends == [500]


def test_no_items_arrive_during_a_pause() -> None:
    engine = engine_of()
    data = SimulatedData(engine, 100, rate=10.0, pauses=((20.0, 30.0), (2.0, 5.0)))
    data.submit([Pull(0, 100)])
    came, _ = arrivals(engine)
    assert not [at for at, _, _ in came if 2.0 < at < 5.0]
    assert came[-1][0] == pytest.approx(13.0)


def test_a_source_without_a_rate_pauses_too() -> None:
    engine = engine_of()
    data = SimulatedData(engine, 100, pauses=((0.0, 7.0),))
    data.submit([Pull(0, 50)])
    assert arrivals(engine)[0] == [(7.0, 0, 50)]


def test_delivered_items_are_counted_and_kept_on_request() -> None:
    engine = engine_of(tracked=True)
    data = SimulatedData(engine, 10)
    out, later, bad = (engine.new_segment(2, 0, "", [(n,), (n + 1,)]) for n in (0, 2, 4))
    record = FailedItem("a", (bad, 1, 2), "ValueError: no")
    delivered = Deliver(0, 0, 0, 5, {"b": [out]}, {"c": [later]}, [record])
    data.submit([delivered, Deliver(0, 1, 5, 10, {"b": [later]})])
    assert data.delivered == {"b": 4}
    assert data.spooled == {"c": 2}
    assert data.outputs == {"b": [(0,), (1,), (2,), (3,)]}
    assert data.failed_items == [record]
    assert [(entry.first, entry.last) for entry in data.log] == [(0, 5), (5, 10)]


def test_a_counted_run_keeps_only_the_counts() -> None:
    engine = engine_of()
    data = SimulatedData(engine, 10)
    data.submit([Deliver(0, 0, 0, 5, {"b": [engine.new_segment(2, 0, "")]})])
    assert (data.delivered, data.outputs, data.log) == ({"b": 2}, {}, [])
