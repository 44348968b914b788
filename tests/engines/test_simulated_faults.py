"""Failures of items, workers and nodes in the simulated engine."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.control.commands import HostedObject, StopWorker
from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    Breadcrumb,
    Drain,
    LossCause,
    NodeJoined,
    NodeLeft,
    WorkerLost,
    WorkerReady,
)
from dovetail.control.loop import run_loop
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.world import (
    Behaviour,
    Gives,
    ItemOutcome,
    JoinNode,
    Key,
    Kills,
    KillWorker,
    Lognormal,
    LoseNode,
    OutOfMemory,
    PostEvent,
    Raises,
    ScriptedEvent,
    Slow,
    SlowDown,
    World,
)
from dovetail.resources.cluster import Node
from engines.naive_controller import NaiveController
from engines.simulated_scenes import HOUR_S, NODES, all_events, engine_of, message, start, the

# Memory


def test_a_call_with_too_many_items_kills_the_worker() -> None:
    engine = engine_of(Behaviour(1.0, memory_items=3), workers=2)
    engine.submit([message(engine, 1, 0, 9, batch_size=4), message(engine, 2, 1, 9, batch_size=3)])
    log = all_events(engine, 20)
    (lost,) = the(WorkerLost, log)
    assert (lost.worker, lost.cause, lost.breadcrumbs) == (0, LossCause.OUT_OF_MEMORY, (Breadcrumb(1, 0),))
    assert [done.message for done in the(BatchesDone, log)] == [2]


@pytest.mark.parametrize("tracked", [True, False])
def test_a_call_with_too_many_items_may_raise_and_smaller_calls_succeed(tracked: bool) -> None:
    engine = engine_of(Behaviour(1.0, memory_items=3, oom="raise"), workers=1, tracked=tracked)
    engine.submit([message(engine, 1, 0, 11, batch_size=4)])
    (done,) = the(BatchesDone, all_events(engine, 20))
    assert [(failure.start, failure.stop, failure.out_of_memory) for failure in done.failures] == [
        (0, 4, True),
        (4, 8, True),
    ]
    assert sum(segment.items for segment in done.segments) == 3


# Single items


def outcomes_by_item(**by_number: ItemOutcome) -> Any:
    def item(key: Key, attempt: int) -> ItemOutcome:
        return by_number.get(f"n{key[0]}", Gives(1))

    return item


def test_a_slow_item_slows_only_its_call() -> None:
    engine = engine_of(Behaviour(1.0, item=outcomes_by_item(n1=Slow(5.0))), workers=1, tracked=True)
    engine.submit([message(engine, 1, 0, 4, batch_size=2)])
    (done,) = the(BatchesDone, all_events(engine, 20))
    assert done.seconds == 4 + 4


def test_an_item_that_needs_too_much_memory_kills_or_raises() -> None:
    ways: tuple[Literal["death", "raise"], ...] = ("death", "raise")
    for oom in ways:
        behaviour = Behaviour(1.0, item=outcomes_by_item(n1=OutOfMemory()), oom=oom)
        engine = engine_of(behaviour, workers=1, tracked=True)
        engine.submit([message(engine, 1, 0, 3)])
        log = all_events(engine, 20)
        if oom == "death":
            (lost,) = the(WorkerLost, log)
            assert (lost.cause, lost.breadcrumbs) == (LossCause.OUT_OF_MEMORY, (Breadcrumb(1, 1),))
        else:
            (failure,) = the(BatchesDone, log)[0].failures
            assert (failure.start, failure.stop, failure.out_of_memory, failure.keys) == (1, 2, True, ((1,),))


def test_attempts_are_counted_per_item_when_they_are_made() -> None:
    made: list[tuple[Key, int]] = []

    def item(key: Key, attempt: int) -> ItemOutcome:
        made.append((key, attempt))
        return Raises() if (key, attempt) == ((0,), 1) else Kills() if (key, attempt) == ((2,), 1) else Gives(1)

    engine = engine_of(Behaviour(1.0, item=item), workers=2, tracked=True)
    engine.submit([message(engine, 1, 0, 5, batch_size=2)])
    all_events(engine, 10)
    engine.submit([message(engine, 2, 1, 5, batch_size=2)])
    all_events(engine, 20)
    assert made == [((0,), 1), ((2,), 1), ((0,), 2), ((1,), 1), ((2,), 2), ((3,), 1), ((4,), 1)]


@given(
    fate=st.dictionaries(st.integers(0, 59), st.sampled_from(["kills", "exits"]), max_size=8), seed=st.integers(0, 9)
)
def test_every_item_is_delivered_exactly_once_after_any_loss(fate: dict[int, str], seed: int) -> None:
    def item(key: Key, attempt: int) -> ItemOutcome:
        if attempt == 1 and key[0] in fate:
            return Kills(LossCause.EXIT if fate[key[0]] == "exits" else LossCause.SIGNAL)
        return Gives(key[0] % 3)

    behaviour = Behaviour(1.0, spread=Lognormal(1.0), item=item, deaths_per_hour=100, setup_failures=0.2, setup_s=5.0)
    engine = SimulatedEngine(World({"a": behaviour}, seed=seed, tracked=True), NODES, limit_s=HOUR_S)
    data = SimulatedData(engine, 60, rate=100)
    controller = NaiveController(HostedObject("a"), workers=3, items=60, batch_size=2)
    run_loop(controller, engine, data)
    children: dict[int, list[Key]] = {0: [], 1: [()], 2: [(0,), (1,)]}
    assert Counter(data.outputs["a"]) == Counter((n, *rest) for n in range(60) for rest in children[n % 3])
    assert controller.deaths >= len(fate) / 5


# Breadcrumbs


def test_the_breadcrumb_of_a_counted_message_identifies_the_call_by_time() -> None:
    engine = engine_of(Behaviour(1.0), workers=1, hop_s=0.5, script=(ScriptedEvent(6.5, KillWorker("a")),))
    engine.submit([message(engine, 7, 0, 10, batch_size=2)])
    (lost,) = the(WorkerLost, all_events(engine, 20))
    assert lost.breadcrumbs == (Breadcrumb(7, 4),)  # it began at 1.0, after the worker's hop and its own


@pytest.mark.parametrize(
    ("crumbs", "inexact", "expected"), [(False, 0.0, ()), (True, 1.0, (Breadcrumb(7, 0, exact=False),))]
)
def test_a_loss_may_leave_no_breadcrumb_or_an_inexact_one(
    crumbs: bool, inexact: float, expected: tuple[Breadcrumb, ...]
) -> None:
    engine = engine_of(
        Behaviour(1.0),
        workers=1,
        breadcrumb_share=crumbs,
        inexact_share=inexact,
        script=(ScriptedEvent(6.5, KillWorker("a")),),
    )
    engine.submit([message(engine, 7, 0, 10, batch_size=2)])
    (lost,) = the(WorkerLost, all_events(engine, 20))
    assert lost.breadcrumbs == expected


# Script and nodes


def test_the_script_kills_the_nth_worker_if_it_exists() -> None:
    script = (
        ScriptedEvent(1.0, KillWorker("a", 1)),
        ScriptedEvent(2.0, KillWorker("a", 1)),
        ScriptedEvent(3.0, KillWorker("a", 5)),
    )
    lost = the(WorkerLost, all_events(engine_of(Behaviour(), workers=3, script=script), 10))
    assert [event.worker for event in lost] == [1, 2]


def test_a_slowdown_applies_to_calls_that_begin_before_its_end() -> None:
    engine = engine_of(
        Behaviour(1.0),
        workers=1,
        script=(ScriptedEvent(0.5, SlowDown("a", 3.0, 2.0)), ScriptedEvent(1.5, PostEvent(Drain()))),
    )
    engine.submit([message(engine, number, 0, 1) for number in range(3)])
    log = all_events(engine, 10)
    assert [done.seconds for done in the(BatchesDone, log)] == [1.0, 3.0, 1.0]
    assert (1.5, Drain()) in log


def test_a_lost_node_loses_its_workers_first_and_gangs_with_a_rank_there() -> None:
    engine = engine_of(
        Behaviour(1.0),
        workers=4,
        script=(ScriptedEvent(5.0, LoseNode("node-1")), ScriptedEvent(6.0, LoseNode("node-1"))),
    )
    engine.submit([start(10, "node-1", "node-2"), start(11, "node-2", "node-3"), message(engine, 1, 10, 100)])
    log = [(at, event) for at, event in all_events(engine, 10) if not isinstance(event, WorkerReady)]
    assert [(at, getattr(event, "worker", "node")) for at, event in log] == [(5.0, 1), (5.0, 10), (5.0, "node")]
    assert {event.cause for event in the(WorkerLost, log)} == {LossCause.NODE_LOST}
    assert the(WorkerLost, log)[1].breadcrumbs == (Breadcrumb(1, 5),)
    assert the(NodeLeft, log)[0].node == "node-1"
    engine.submit([start(12, "node-1")])
    assert [(type(event), event.cause) for event in engine.poll(0) if isinstance(event, WorkerLost)] == [
        (WorkerLost, LossCause.NODE_LOST)
    ]


def test_a_node_that_joins_can_be_used() -> None:
    node = Node("new", 4000)
    engine = engine_of(Behaviour(), script=(ScriptedEvent(1.0, JoinNode(node)),))
    assert engine.poll(None) == [NodeJoined(node)]
    engine.submit([start(1, "new")])
    assert engine.poll(None) == [WorkerReady(1, 0.0)]


def test_messages_whose_input_was_on_a_lost_node_are_returned() -> None:
    again = Node("node-1", 4000)
    script = (ScriptedEvent(5.0, LoseNode("node-1")), ScriptedEvent(6.0, JoinNode(again)))
    engine = engine_of(Behaviour(10.0), workers=1, script=script)
    engine.submit([message(engine, 1, 0, 1, node="node-1"), message(engine, 2, 0, 1, node="node-1")])
    log = all_events(engine, 15)
    assert [(at, event) for at, event in log if isinstance(event, BatchesReturned)] == [(10.0, BatchesReturned(0, 2))]
    assert [done.message for done in the(BatchesDone, log)] == [1]
    old, new = message(engine, 3, 0, 1, node="node-1"), message(engine, 4, 0, 1, node="node-1")
    old.parts[0][0].id = 2  # written before the node was lost
    engine.submit([old, new])
    log = all_events(engine, 30)
    assert the(BatchesReturned, log) == [BatchesReturned(0, 3)]
    assert [done.message for done in the(BatchesDone, log)] == [4]


def test_a_drained_worker_with_lost_input_still_stops() -> None:
    engine = engine_of(Behaviour(10.0), workers=1, script=(ScriptedEvent(5.0, LoseNode("node-1")),))
    engine.submit([message(engine, 1, 0, 1), message(engine, 2, 0, 1, node="node-1"), StopWorker(0)])
    kinds = [type(event).__name__ for _, event in all_events(engine, 30)]
    assert kinds == ["WorkerReady", "NodeLeft", "BatchesDone", "BatchesReturned", "WorkerStopped"]
