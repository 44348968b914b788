"""Does a stream do what it is told from outside, ignore what does not concern it, and always do the same?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.control.codec import encode_command
from dovetail.control.commands import Pull, RunBatches, StartWorker, StopWorker
from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    CancelRun,
    Drain,
    InputEnded,
    ItemsArrived,
    LossCause,
    NodeLeft,
    PinWorkers,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.lifecycle import RunState
from dovetail.control.loop import run_loop
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.source_sink import SimulatedData
from dovetail.engines.simulated.world import Behaviour, Gives, PostEvent, ScriptedEvent
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs
from streaming.rigs import Hand, go, numbers, of_kind, stage
from streaming.worlds import a_case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event


def test_cancel_stops_every_worker_now() -> None:
    rig = go(
        [stage("a"), stage("b")],
        {"a": Behaviour(5.0)},
        500,
        script=(ScriptedEvent(12.0, PostEvent(CancelRun("Ctrl-C"))),),
    )
    assert rig.run_state is RunState.CANCELLED
    assert rig.seconds == pytest.approx(12.0, abs=0.1)
    assert all(not stop.drain for stop in rig.all(StopWorker))
    assert rig.notes("cancelled: Ctrl-C")


def test_cancel_during_a_drain_does_not_wait_for_it() -> None:
    rig = go(
        [stage("a")],
        {"a": Behaviour(500.0)},
        500,
        script=(ScriptedEvent(12.0, PostEvent(Drain())), ScriptedEvent(14.0, PostEvent(CancelRun()))),
    )
    assert rig.run_state is RunState.CANCELLED
    assert rig.seconds < 15


def test_a_second_drain_and_a_late_cancel_change_nothing() -> None:
    rig = go(
        [stage("a")],
        {"a": Behaviour(1.0)},
        500,
        script=(ScriptedEvent(12.0, PostEvent(Drain("first"))), ScriptedEvent(12.5, PostEvent(Drain("second")))),
    )
    assert rig.run_state is RunState.DRAINED
    assert len(rig.notes("draining")) == 1


@pytest.mark.parametrize("mode", ["streaming", "sequential"])
def test_a_drain_in_any_wave_ends_with_what_is_in_hand(mode: str) -> None:
    stages = [stage("a"), stage("b", batch_size=3)]
    behaviours = {"a": Behaviour(0.2), "b": Behaviour(1.0)}
    rig = go(stages, behaviours, 200, mode=mode, script=(ScriptedEvent(16.0, PostEvent(Drain())),))
    assert rig.run_state is RunState.DRAINED
    assert 0 < sum(rig.out("b").values()) < 200
    rest = go(stages, behaviours, 200, mode=mode, resume=rig.data.log)
    assert rig.out("b") + rest.out("b") == numbers(200)


def test_a_drain_before_anything_was_read_ends_the_run() -> None:
    hand = Hand.of([stage("a")])
    starts = of_kind(hand.step(Drain()), StartWorker)
    hand.step(*[WorkerStopped(start.worker) for start in starts])
    assert hand.stream.done
    assert hand.stream.state.run_state is RunState.DRAINED


def test_steps_after_the_end_do_nothing() -> None:
    rig = go([stage("a")], {}, 10)
    late: list[Event] = [
        CancelRun(),
        Drain(),
        InputEnded(3),
        ItemsArrived(0, []),
        NodeLeft("node-0"),
        PinWorkers("a", 2),
    ]
    assert not of_kind(rig.stream.step(1e6, late), StartWorker)
    assert not rig.stream.step(1e6 + 1, [])
    assert rig.run_state is RunState.FINISHED


def test_whatever_is_said_of_workers_that_are_gone_is_ignored() -> None:
    hand = Hand.of([stage("a", workers=1)])
    hand.begin()
    (sent,) = of_kind(hand.items(4), RunBatches)
    before = repr(hand.stream.state.units[0])
    late: list[Event] = [
        WorkerReady(999),
        WorkerStopped(999),
        WorkerLost(999, LossCause.SIGNAL),
        BatchesDone(999, sent.message, [hand.segment(1)], 1.0),
        BatchesDone(sent.worker, 999, [hand.segment(1)], 1.0),
        BatchesReturned(999, sent.message),
        BatchesReturned(sent.worker, 999),
        WorkerReady(sent.worker, 5.0),
        NodeLeft("nowhere"),
        PinWorkers("nobody", 3),
    ]
    commands = hand.step(*late)
    assert repr(hand.stream.state.units[0]) == before
    assert not [command for command in commands if type(command) in (RunBatches, StartWorker, StopWorker)]


def test_the_same_answer_twice_counts_once() -> None:
    hand = Hand.of([stage("a", workers=1)])
    hand.begin()
    (sent,) = of_kind(hand.items(1, ends=True), RunBatches)
    done = BatchesDone(sent.worker, sent.message, [hand.segment(1)], 1.0)
    hand.step(done, done)
    assert hand.stream.state.items_delivered == 1


def test_a_late_end_of_the_source_does_not_end_a_later_wave() -> None:
    rig = go(
        [stage("a"), stage("b", batch_size=2)],
        {"a": Behaviour(0.1, item=lambda key, _: Gives(3)), "b": Behaviour(1.0)},
        200,
        mode="sequential",
        script=(ScriptedEvent(20.0, PostEvent(InputEnded(200))),),
    )
    begun = [now for now, message in rig.timed(RunBatches) if message.hosted == "b"]
    assert begun[0] < 20 < begun[-1]
    assert len(rig.out("b")) == rig.data.delivered["b"] == 600


def test_it_asks_to_be_woken_for_its_timers_and_not_otherwise() -> None:
    hand = Hand.of([stage("a", workers=1, timeout="7s")])
    hand.begin()
    assert hand.stream.wake_at() is None
    hand.items(1)
    wake = hand.stream.wake_at()
    assert wake is not None
    assert wake == pytest.approx(10.5, abs=0.01), (
        "the timeout, and as long again by half for a call that can be interrupted"
    )
    replanning = Hand.of([stage("a")], options=StreamOptions(replan_every_s=3.0))
    replanning.begin()
    assert replanning.stream.wake_at() == 3.0


def test_only_one_pull_is_open_at_a_time() -> None:
    hand = Hand.of([stage("a", workers=1)])
    hand.begin()
    assert len(of_kind(hand.said, Pull)) == 1
    hand.step()
    assert len(of_kind(hand.said, Pull)) == 1
    hand.items(1)
    firsts = [pull.first for pull in of_kind(hand.said, Pull)]
    assert firsts in ([0], [0, 1])


@pytest.mark.parametrize("workers", [5, 1])
def test_a_repin_holds_until_it_is_taken_back(workers: int) -> None:
    counts: dict[float, int] = {}

    def look(stream: StreamController) -> None:
        counts[stream.state.now] = stream.view(stream.state.now).units[0].ready

    go(
        [stage("a", workers=3)],
        {"a": Behaviour(1.0)},
        400,
        script=(
            ScriptedEvent(12.0, PostEvent(PinWorkers("a", workers))),
            ScriptedEvent(60.0, PostEvent(PinWorkers("a", None))),
        ),
        after_step=look,
    )
    assert {count for now, count in counts.items() if 15 < now < 59} == {workers}
    assert {count for now, count in counts.items() if 5 < now < 11} == {3}
    assert {count for now, count in counts.items() if 65 < now < 90} == {3}


def test_more_than_fits_is_as_many_as_fit_and_none_is_one() -> None:
    for asked, got in ((100, 8), (0, 1)):
        rig = go(
            [stage("a")], {"a": Behaviour(1.0)}, 150, script=(ScriptedEvent(12.0, PostEvent(PinWorkers("a", asked))),)
        )
        assert rig.run_state is RunState.FINISHED, rig.error
        late = [start for now, start in rig.starts("a") if now < 30]
        assert len(late) <= 8
        if got == 8:
            assert len(late) == 8


def test_a_repin_on_a_full_cluster_takes_seats_from_others() -> None:
    most = 0

    def look(stream: StreamController) -> None:
        nonlocal most
        if stream.state.now < 60:
            most = max(most, stream.view(stream.state.now).units[1].ready)

    rig = go(
        [stage("a"), stage("b")],
        {"a": Behaviour(2.0), "b": Behaviour(0.4)},
        400,
        script=(ScriptedEvent(25.0, PostEvent(PinWorkers("b", 5))),),
        after_step=look,
    )
    assert most == 5
    assert rig.out("b") == numbers(400)


class Wire:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        self.lines += [json.dumps([now, encode_command(command)]) for command in commands]

    def close(self, now: float) -> None:
        pass


def everything_said(seed: int) -> list[str]:
    case = a_case(seed)
    engine = SimulatedEngine(case.world, case.cluster, limit_s=500_000)
    wire = Wire()
    stream = StreamController(unit_specs(case.pipeline, case.plan), case.plan, case.options)
    assert not run_loop(stream, engine, SimulatedData(engine, case.items), [wire])
    return wire.lines


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(0, 10**9))
def test_the_same_events_give_the_same_commands_byte_for_byte(seed: int) -> None:
    assert everything_said(seed) == everything_said(seed)
