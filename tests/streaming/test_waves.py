"""Waves and barriers: their order, the spool between waves, and the input of a barrier."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.control.commands import Deliver, RunBatches, StartWorker, StopWorker
from dovetail.control.events import Drain, WorkerLost, WorkerStopped
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, Kills, LoseNode, PostEvent, Raises, ScriptedEvent
from dovetail.streaming.settings import StreamOptions
from streaming.harness import SimulatedRun, numbers, simulate_stages, stage
from streaming.random_runs import random_case, run

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import ItemOutcome, Key

THREE = [stage("a"), stage("b", batch_size=4), stage("c", batch_size=3)]


def span(rig: SimulatedRun, unit: str) -> tuple[float, float]:
    """Time between the first and the last message of a unit."""
    sent = [now for now, message in rig.timed(RunBatches) if message.hosted == unit]
    return min(sent), max(sent)


def gone_at(rig: SimulatedRun, unit: str) -> float:
    mine = {start.worker for _, start in rig.starts(unit)}
    times = [now for now, event in rig.events(WorkerStopped) if event.worker in mine]
    times += [now for now, event in rig.events(WorkerLost) if event.worker in mine]
    assert len(times) == len(mine)
    return max(times)


def test_sequential_mode_has_the_same_output_as_streaming() -> None:
    rig = simulate_stages(THREE, {}, 100, mode="sequential")
    assert rig.stream.waves == 3
    assert rig.out("c") == numbers(100)


def test_a_wave_begins_after_the_previous_one_and_uses_its_seats() -> None:
    rig = simulate_stages(THREE, {name: Behaviour(0.3) for name in "abc"}, 200, mode="sequential")
    for earlier, later in pairwise("abc"):
        assert span(rig, earlier)[1] < span(rig, later)[0]
        assert gone_at(rig, earlier) <= span(rig, later)[0] + 1.0
    assert [note.text for note in rig.notes("wave ")] == ["wave 1 of 3: a", "wave 2 of 3: b", "wave 3 of 3: c"]


def test_workers_of_a_wave_stop_before_the_next_one_takes_their_seats() -> None:
    """Each wave fills the whole node; the ledger is checked after every step."""
    rig = simulate_stages(
        [stage("a", cpus=8), stage("b", cpus=8)], {"a": Behaviour(0.2), "b": Behaviour(0.2)}, 40, mode="sequential"
    )
    assert rig.out("b") == numbers(40)
    assert gone_at(rig, "a") <= rig.starts("b")[0][0]


def test_output_for_a_later_wave_is_spooled_independently_of_nodes() -> None:
    rig = simulate_stages(THREE, {}, 50, mode="sequential")
    assert all(message.spool for message in rig.messages("a") + rig.messages("b"))
    assert not any(message.spool for message in rig.messages("c"))
    for deliver in rig.all(Deliver):
        assert all(not segment.node for segments in deliver.spooled.values() for segment in segments)
    assert rig.data.spooled == {"b": 50, "c": 50}


def test_a_node_loss_does_not_repeat_a_finished_wave() -> None:
    rig = simulate_stages(
        THREE,
        {"a": Behaviour(0.1), "b": Behaviour(2.0), "c": Behaviour(0.1)},
        200,
        mode="sequential",
        cluster="2x(4cpu, 16GB)",
        script=(ScriptedEvent(30.0, LoseNode("node-1")),),
    )
    assert rig.run_state is RunState.FINISHED
    assert span(rig, "a")[1] < 30.0
    assert Counter(key for message in rig.messages("a") for key in part_keys(message.parts)) == numbers(200)
    assert rig.out("c") == numbers(200)


WITH_BARRIER = [stage("a"), stage("all", barrier=True), stage("b", batch_size=4)]


def test_a_barrier_is_called_once_with_all_items_in_its_own_wave() -> None:
    rig = simulate_stages(WITH_BARRIER, {}, 230)
    (message,) = rig.messages("all")
    assert Counter(part_keys(message.parts)) == numbers(230)
    assert message.items == message.batch_size == 230
    assert rig.out("b") == numbers(230)
    assert span(rig, "a")[1] < span(rig, "all")[0] < span(rig, "b")[0]


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 1 << 32))
def test_the_waves_that_run_are_the_waves_of_the_plan(seed: int) -> None:
    case = random_case(seed, failures=False)
    waves = [sorted(wave) for wave in case.plan.waves]
    ran = [note.partition(": ")[2].split(", ") for note in run(case).watch.notes if note.startswith("wave ")]
    assert ran == (waves if len(waves) > 1 else [])
    for unit in case.plan.units:
        assert not unit.barrier or waves[unit.wave] == [unit.name]


def test_the_output_of_a_barrier_is_cut_into_epochs() -> None:
    rig = simulate_stages(
        WITH_BARRIER,
        {"all": Behaviour(0.01, item=lambda *_: Gives(3)), "b": Behaviour(0.5)},
        300,
        options=StreamOptions(target_epoch_batches=2, target_epoch_s=0.1),
    )
    assert rig.data.delivered["b"] == 900
    assert len([deliver for deliver in rig.all(Deliver) if deliver.wave == 2]) > 1


def test_a_barrier_at_the_end_of_the_pipeline_delivers() -> None:
    rig = simulate_stages(WITH_BARRIER[:2], {}, 30)
    assert rig.out("all") == numbers(30)


@pytest.mark.parametrize("items", [0, 20])
def test_a_barrier_without_input_is_not_called(items: int) -> None:
    rig = simulate_stages(WITH_BARRIER, {"a": Behaviour(0.1, item=lambda *_: Gives(0))}, items)
    assert rig.run_state is RunState.FINISHED
    assert not rig.messages("all")
    assert not rig.data.outputs


@pytest.mark.parametrize("outcome", [Raises(), Kills()], ids=["raises", "kills"])
def test_a_barrier_that_fails_is_called_again_with_all_items(outcome: ItemOutcome) -> None:
    def once(key: Key, attempt: int) -> ItemOutcome:
        return outcome if key == (7,) and attempt == 1 else Gives()

    rig = simulate_stages(WITH_BARRIER, {"all": Behaviour(0.01, item=once)}, 60)
    assert [message.items for message in rig.messages("all")] == [60, 60]
    assert rig.out("b") == numbers(60)


@pytest.mark.parametrize("breadcrumb_share", [1.0, 0.0])
def test_a_barrier_that_never_succeeds_fails_the_run_or_all_its_items(breadcrumb_share: float) -> None:
    bad = Behaviour(0.01, item=lambda key, _: Kills() if key == (7,) else Gives())
    world = {"breadcrumb_share": breadcrumb_share}
    failed = simulate_stages([stage("a"), stage("all", barrier=True)], {"all": bad}, 30, world=world)
    assert failed.run_state is RunState.FAILED
    assert failed.error.startswith("all: 30 items failed")
    assert [message.items for message in failed.messages("all")] == [30] * 4
    skipped = simulate_stages(
        [stage("a"), stage("all", barrier=True, on_error="skip", retries=0)], {"all": bad}, 30, world=world
    )
    assert skipped.run_state is RunState.FINISHED
    assert skipped.failed() == numbers(30)
    assert [message.items for message in skipped.messages("all")] == [30]


def test_a_drain_before_a_barrier_has_all_input_leaves_it_to_a_resume() -> None:
    """It is called once with all items, and not with the items that were read before a drain."""
    stages = [stage("all", barrier=True), stage("b")]
    rig = simulate_stages(stages, {}, 400, source={"rate": 10.0}, script=(ScriptedEvent(20.0, PostEvent(Drain())),))
    assert rig.run_state is RunState.DRAINED
    assert not rig.messages("all")
    assert not rig.data.log
    rest = simulate_stages(stages, {}, 400, resume=rig.data.log)
    assert [message.items for message in rest.messages("all")] == [400]


def test_two_barriers_in_a_row_each_get_all_items() -> None:
    rig = simulate_stages([stage("a"), stage("x", barrier=True), stage("y", barrier=True), stage("b")], {}, 40)
    assert [message.items for message in rig.messages("x") + rig.messages("y")] == [40, 40]
    assert rig.out("b") == numbers(40)


def test_a_barrier_restarts_with_all_items_after_a_node_loss() -> None:
    rig = simulate_stages(
        WITH_BARRIER,
        {"a": Behaviour(0.01), "all": Behaviour(1.0)},
        60,
        cluster="2x(4cpu, 16GB)",
        script=(ScriptedEvent(20.0, LoseNode("node-0")), ScriptedEvent(25.0, LoseNode("node-9"))),
    )
    assert rig.run_state is RunState.FINISHED
    assert {message.items for message in rig.messages("all")} == {60}
    assert rig.out("b") == numbers(60)


def test_a_stage_of_a_later_wave_without_parents_gets_the_source_items() -> None:
    rig = simulate_stages(
        [stage("a"), stage("all", barrier=True), stage("b", after=["all"]), stage("own", after=[])],
        {},
        45,
        mode="sequential",
    )
    assert rig.out("b") == numbers(45)
    assert rig.out("own") == numbers(45)


def test_output_for_two_later_waves_goes_to_both() -> None:
    rig = simulate_stages(
        [stage("a"), stage("b", after=["a"]), stage("c", after=["a", "b"])], {}, 30, mode="sequential"
    )
    assert rig.out("c") == numbers(30) + numbers(30)


def test_every_worker_that_was_started_is_stopped_once() -> None:
    rig = simulate_stages(THREE, {}, 60, mode="sequential")
    started = Counter(start.worker for start in rig.all(StartWorker))
    stopped = Counter(stop.worker for stop in rig.all(StopWorker))
    assert started == stopped
    assert set(started.values()) == {1}
