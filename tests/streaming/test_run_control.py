"""Control of a run from outside (drain, cancel, pins), late events, and determinism."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.control.codec import encode
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
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.world import Behaviour, Gives, Lognormal, PostEvent, Raises, ScriptedEvent
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs
from streaming.harness import ManualStream, numbers, of_kind, simulate_stages, stage
from streaming.random_runs import random_case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event


def test_cancel_stops_every_worker_immediately() -> None:
    rig = simulate_stages(
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
    rig = simulate_stages(
        [stage("a")],
        {"a": Behaviour(500.0)},
        500,
        script=(ScriptedEvent(12.0, PostEvent(Drain())), ScriptedEvent(14.0, PostEvent(CancelRun()))),
    )
    assert rig.run_state is RunState.CANCELLED
    assert rig.seconds < 15


def test_a_second_drain_and_a_late_cancel_change_nothing() -> None:
    rig = simulate_stages(
        [stage("a")],
        {"a": Behaviour(1.0)},
        500,
        script=(ScriptedEvent(12.0, PostEvent(Drain("first"))), ScriptedEvent(12.5, PostEvent(Drain("second")))),
    )
    assert rig.run_state is RunState.DRAINED
    assert len(rig.notes("draining")) == 1


@pytest.mark.parametrize("mode", ["streaming", "sequential"])
def test_a_drain_in_any_wave_finishes_the_work_in_flight(mode: str) -> None:
    stages = [stage("a"), stage("b", batch_size=3)]
    behaviours = {"a": Behaviour(0.2), "b": Behaviour(1.0)}
    rig = simulate_stages(stages, behaviours, 200, mode=mode, script=(ScriptedEvent(16.0, PostEvent(Drain())),))
    assert rig.run_state is RunState.DRAINED
    assert 0 < sum(rig.out("b").values()) < 200
    rest = simulate_stages(stages, behaviours, 200, mode=mode, resume=rig.data.log)
    assert rig.out("b") + rest.out("b") == numbers(200)


@pytest.mark.parametrize("mode", ["streaming", "waves"])
def test_a_drain_ends_with_the_epochs_that_were_begun(mode: str) -> None:
    stages = [stage("first", workers=1), stage("slow", workers=2)]
    behaviours = {"first": Behaviour(0.00001), "slow": Behaviour(0.5)}
    left: list[float | None] = []

    def look(stream: StreamController) -> None:
        view = stream.view(stream.state.now)
        if view.state == "draining":
            left.append(view.drain_s)

    options = StreamOptions(max_epoch_s=1.0)
    script = (ScriptedEvent(20.0, PostEvent(Drain())),)
    rig = simulate_stages(stages, behaviours, 1000, mode=mode, script=script, options=options, after_step=look)
    assert rig.run_state is RunState.DRAINED
    assert rig.seconds < 20.0 + 3.0
    assert left[0] is not None
    assert 20.0 + left[0] == pytest.approx(rig.seconds, abs=1.0)
    rest = simulate_stages(stages, behaviours, 1000, mode=mode, resume=rig.data.log, options=options)
    assert rig.out("slow") + rest.out("slow") == numbers(1000)


def test_a_drain_finishes_everything_that_was_read_if_the_run_cannot_be_resumed() -> None:
    options = StreamOptions(drain_finishes_input=True)
    script = (ScriptedEvent(20.0, PostEvent(Drain())),)
    rig = simulate_stages([stage("slow", workers=2)], {"slow": Behaviour(0.5)}, 1000, script=script, options=options)
    assert sum(rig.out("slow").values()) == rig.stream.state.items_read < 1000


@pytest.mark.parametrize("drain_s", [3.0, 6.7, 11.1])
def test_a_drain_of_an_ordered_run_leaves_no_gap(drain_s: float) -> None:
    stages = [stage("a", workers=4), stage("b", workers=3)]
    behaviours = {"a": Behaviour(0.3, spread=Lognormal(2.0)), "b": Behaviour(0.5)}
    options = StreamOptions(ordered=True, target_epoch_batches=1, target_epoch_s=0.01)
    script = (ScriptedEvent(drain_s, PostEvent(Drain())),)
    rig = simulate_stages(stages, behaviours, 200, options=options, script=script)
    rest = simulate_stages(stages, behaviours, 200, options=options, resume=rig.data.log)
    firsts = [deliver.first for deliver in [*rig.data.log, *rest.data.log] if deliver.outputs]
    assert firsts == sorted(firsts)
    assert rig.stream.epoch_tracker.undelivered == {}
    assert rig.out("b") + rest.out("b") == numbers(200)


def test_failed_items_of_epochs_that_a_drain_drops_do_not_count() -> None:
    odd_fail = Behaviour(0.01, item=lambda key, _: Raises() if key[0] % 2 else Gives())
    rig = simulate_stages(
        [stage("a", on_error="skip", retries=0, workers=2), stage("b", workers=1, batch_size=4)],
        {"a": odd_fail, "b": Behaviour(5.0)},
        400,
        script=(ScriptedEvent(8.0, PostEvent(Drain())),),
    )
    assert rig.stream.state.items_failed == sum(rig.failed().values())


def test_the_rate_of_a_slow_source_is_known_and_that_of_a_fast_one_is_not() -> None:
    slow = simulate_stages([stage("a")], {"a": Behaviour(0.001)}, 60, source={"rate": 2.0})
    assert slow.stream.feeder.source_rate() == pytest.approx(2.0, rel=0.1)
    fast = simulate_stages([stage("a", workers=1)], {"a": Behaviour(0.1)}, 200, source={"rate": 1000.0})
    assert fast.stream.feeder.source_rate() is None


def test_a_drain_before_anything_was_read_ends_the_run() -> None:
    manual = ManualStream.of([stage("a")])
    starts = of_kind(manual.step(Drain()), StartWorker)
    manual.step(*[WorkerStopped(start.worker) for start in starts])
    assert manual.stream.done
    assert manual.stream.state.run_state is RunState.DRAINED


def test_steps_after_the_end_do_nothing() -> None:
    rig = simulate_stages([stage("a")], {}, 10)
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


def test_events_of_workers_that_have_ended_are_ignored() -> None:
    manual = ManualStream.of([stage("a", workers=1)])
    manual.begin()
    (sent,) = of_kind(manual.items(4), RunBatches)
    before = repr(manual.stream.state.units[0])
    late: list[Event] = [
        WorkerReady(999),
        WorkerStopped(999),
        WorkerLost(999, LossCause.SIGNAL),
        BatchesDone(999, sent.message, [manual.segment(1)], 1.0),
        BatchesDone(sent.worker, 999, [manual.segment(1)], 1.0),
        BatchesReturned(999, sent.message),
        BatchesReturned(sent.worker, 999),
        WorkerReady(sent.worker, 5.0),
        NodeLeft("nowhere"),
        PinWorkers("unknown", 3),
    ]
    commands = manual.step(*late)
    assert repr(manual.stream.state.units[0]) == before
    assert not [command for command in commands if type(command) in (RunBatches, StartWorker, StopWorker)]


def test_a_repeated_event_counts_once() -> None:
    manual = ManualStream.of([stage("a", workers=1)])
    manual.begin()
    (sent,) = of_kind(manual.items(1, ends=True), RunBatches)
    done = BatchesDone(sent.worker, sent.message, [manual.segment(1)], 1.0)
    manual.step(done, done)
    assert manual.stream.state.items_delivered == 1


def test_a_late_end_of_the_source_does_not_end_a_later_wave() -> None:
    rig = simulate_stages(
        [stage("a"), stage("b", batch_size=2)],
        {"a": Behaviour(0.1, item=lambda key, _: Gives(3)), "b": Behaviour(1.0)},
        200,
        mode="sequential",
        script=(ScriptedEvent(20.0, PostEvent(InputEnded(200))),),
    )
    begun = [now for now, message in rig.timed(RunBatches) if message.hosted == "b"]
    assert begun[0] < 20 < begun[-1]
    assert len(rig.out("b")) == rig.data.delivered["b"] == 600


def test_it_asks_to_be_woken_only_for_its_timers() -> None:
    manual = ManualStream.of([stage("a", workers=1, timeout="7s")])
    manual.begin()
    assert manual.stream.wake_at() is None
    manual.items(1)
    wake = manual.stream.wake_at()
    assert wake is not None
    assert wake == pytest.approx(10.5, abs=0.01), (
        "the timeout, and as long again by half for a call that can be interrupted"
    )
    replanning = ManualStream.of([stage("a")], options=StreamOptions(replan_every_s=3.0))
    replanning.begin()
    assert replanning.stream.wake_at() == 3.0


def test_only_one_pull_is_open_at_a_time() -> None:
    manual = ManualStream.of([stage("a", workers=1)])
    manual.begin()
    assert len(of_kind(manual.commands, Pull)) == 1
    manual.step()
    assert len(of_kind(manual.commands, Pull)) == 1
    manual.items(1)
    firsts = [pull.first for pull in of_kind(manual.commands, Pull)]
    assert firsts in ([0], [0, 1])


@pytest.mark.parametrize("workers", [5, 1])
def test_pinned_workers_stay_until_the_pin_is_removed(workers: int) -> None:
    counts: dict[float, int] = {}

    def look(stream: StreamController) -> None:
        counts[stream.state.now] = stream.view(stream.state.now).units[0].ready

    simulate_stages(
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


def test_a_pin_is_limited_to_what_fits_and_to_at_least_one() -> None:
    for asked, got in ((100, 8), (0, 1)):
        rig = simulate_stages(
            [stage("a")], {"a": Behaviour(1.0)}, 150, script=(ScriptedEvent(12.0, PostEvent(PinWorkers("a", asked))),)
        )
        assert rig.run_state is RunState.FINISHED, rig.error
        late = [start for now, start in rig.starts("a") if now < 30]
        assert len(late) <= 8
        if got == 8:
            assert len(late) == 8


def test_a_pin_on_a_full_cluster_takes_seats_from_other_units() -> None:
    most = 0

    def look(stream: StreamController) -> None:
        nonlocal most
        if stream.state.now < 60:
            most = max(most, stream.view(stream.state.now).units[1].ready)

    rig = simulate_stages(
        [stage("a"), stage("b")],
        {"a": Behaviour(2.0), "b": Behaviour(0.4)},
        400,
        script=(ScriptedEvent(25.0, PostEvent(PinWorkers("b", 5))),),
        after_step=look,
    )
    assert most == 5
    assert rig.out("b") == numbers(400)


class CommandLog:
    """Observer that keeps all commands as JSON."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        self.lines += [json.dumps([now, encode(command)]) for command in commands]

    def close(self, now: float) -> None:
        pass


def recorded_commands(seed: int) -> list[str]:
    case = random_case(seed)
    engine = SimulatedEngine(case.world, case.cluster, limit_s=500_000)
    log = CommandLog()
    stream = StreamController(unit_specs(case.pipeline, case.plan), case.plan, case.options)
    assert not run_loop(stream, engine, SimulatedData(engine, case.items), [log])
    return log.lines


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(0, 10**9))
def test_the_same_events_give_the_same_commands_byte_for_byte(seed: int) -> None:
    assert recorded_commands(seed) == recorded_commands(seed)
