"""Wave after wave: what starts when, what is kept between, and what does a barrier see?"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.control.commands import Deliver, RunBatches, StartWorker, StopWorker
from dovetail.control.events import Drain, WorkerLost, WorkerStopped
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, Kills, LoseNode, PostEvent, Raises, ScriptedEvent
from dovetail.streaming.settings import StreamOptions
from streaming.rigs import Rig, go, numbers, stage
from streaming.worlds import a_case, run

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import ItemOutcome, Key

THREE = [stage("a"), stage("b", batch_size=4), stage("c", batch_size=3)]


def span(rig: Rig, unit: str) -> tuple[float, float]:
    """From the first message of a unit to the last."""
    sent = [now for now, message in rig.timed(RunBatches) if message.hosted == unit]
    return min(sent), max(sent)


def gone_at(rig: Rig, unit: str) -> float:
    mine = {start.worker for _, start in rig.starts(unit)}
    times = [now for now, event in rig.events(WorkerStopped) if event.worker in mine]
    times += [now for now, event in rig.events(WorkerLost) if event.worker in mine]
    assert len(times) == len(mine)
    return max(times)


def test_one_stage_at_a_time_gives_the_same_as_all_at_once() -> None:
    rig = go(THREE, {}, 100, mode="sequential")
    assert rig.stream.waves == 3
    assert rig.out("c") == numbers(100)


def test_the_next_wave_begins_only_after_the_former_and_with_its_room() -> None:
    rig = go(THREE, {name: Behaviour(0.3) for name in "abc"}, 200, mode="sequential")
    for earlier, later in pairwise("abc"):
        assert span(rig, earlier)[1] < span(rig, later)[0]
        assert gone_at(rig, earlier) <= span(rig, later)[0] + 1.0
    assert [note.text for note in rig.notes("wave ")] == ["wave 1 of 3: a", "wave 2 of 3: b", "wave 3 of 3: c"]


def test_workers_of_the_old_wave_are_gone_when_the_new_ones_need_their_seats() -> None:
    """Each wave fills the whole node; the ledger is checked after every step."""
    rig = go(
        [stage("a", cpus=8), stage("b", cpus=8)], {"a": Behaviour(0.2), "b": Behaviour(0.2)}, 40, mode="sequential"
    )
    assert rig.out("b") == numbers(40)
    assert gone_at(rig, "a") <= rig.starts("b")[0][0]


def test_what_is_for_a_later_wave_is_spooled_where_no_node_can_take_it() -> None:
    rig = go(THREE, {}, 50, mode="sequential")
    assert all(message.spool for message in rig.messages("a") + rig.messages("b"))
    assert not any(message.spool for message in rig.messages("c"))
    for deliver in rig.all(Deliver):
        assert all(not segment.node for segments in deliver.spooled.values() for segment in segments)
    assert rig.data.spooled == {"b": 50, "c": 50}


def test_a_lost_node_does_not_repeat_a_wave_that_is_over() -> None:
    rig = go(
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


def test_a_barrier_is_called_once_with_everything_and_alone_in_its_wave() -> None:
    rig = go(WITH_BARRIER, {}, 230)
    (message,) = rig.messages("all")
    assert Counter(part_keys(message.parts)) == numbers(230)
    assert message.items == message.batch_size == 230
    assert rig.out("b") == numbers(230)
    assert span(rig, "a")[1] < span(rig, "all")[0] < span(rig, "b")[0]


@given(st.integers(0, 1 << 32))
def test_the_waves_that_run_are_the_waves_of_the_plan(seed: int) -> None:
    case = a_case(seed, mishaps=False)
    waves = [sorted(wave) for wave in case.plan.waves]
    ran = [note.partition(": ")[2].split(", ") for note in run(case).watch.notes if note.startswith("wave ")]
    assert ran == (waves if len(waves) > 1 else [])
    for unit in case.plan.units:
        assert not unit.barrier or waves[unit.wave] == [unit.name]


def test_what_comes_after_a_barrier_is_cut_into_epochs_again() -> None:
    rig = go(
        WITH_BARRIER,
        {"all": Behaviour(0.01, item=lambda *_: Gives(3)), "b": Behaviour(0.5)},
        300,
        options=StreamOptions(target_epoch_batches=2, target_epoch_s=0.1),
    )
    assert rig.data.delivered["b"] == 900
    assert len([deliver for deliver in rig.all(Deliver) if deliver.wave == 2]) > 1


def test_a_barrier_that_ends_the_pipeline_delivers() -> None:
    rig = go(WITH_BARRIER[:2], {}, 30)
    assert rig.out("all") == numbers(30)


@pytest.mark.parametrize("items", [0, 20])
def test_a_barrier_to_which_nothing_comes_is_not_called(items: int) -> None:
    rig = go(WITH_BARRIER, {"a": Behaviour(0.1, item=lambda *_: Gives(0))}, items)
    assert rig.run_state is RunState.FINISHED
    assert not rig.messages("all")
    assert not rig.data.outputs


@pytest.mark.parametrize("outcome", [Raises(), Kills()], ids=["raises", "kills"])
def test_a_barrier_that_fails_gets_everything_again(outcome: ItemOutcome) -> None:
    def once(key: Key, attempt: int) -> ItemOutcome:
        return outcome if key == (7,) and attempt == 1 else Gives()

    rig = go(WITH_BARRIER, {"all": Behaviour(0.01, item=once)}, 60)
    assert [message.items for message in rig.messages("all")] == [60, 60]
    assert rig.out("b") == numbers(60)


@pytest.mark.parametrize("breadcrumb_share", [1.0, 0.0])
def test_a_barrier_that_never_succeeds_fails_the_run_or_sets_all_aside(breadcrumb_share: float) -> None:
    bad = Behaviour(0.01, item=lambda key, _: Kills() if key == (7,) else Gives())
    world = {"breadcrumb_share": breadcrumb_share}
    failed = go([stage("a"), stage("all", barrier=True)], {"all": bad}, 30, world=world)
    assert failed.run_state is RunState.FAILED
    assert failed.error.startswith("all: 30 items failed")
    assert [message.items for message in failed.messages("all")] == [30] * 3
    skipped = go([stage("a"), stage("all", barrier=True, on_error="skip", retries=1)], {"all": bad}, 30, world=world)
    assert skipped.run_state is RunState.FINISHED
    assert skipped.aside() == numbers(30)
    assert [message.items for message in skipped.messages("all")] == [30]


def test_a_drain_while_a_barrier_is_being_filled_leaves_everything_to_who_resumes() -> None:
    """It is called once with everything, and not with what was there when somebody drained."""
    stages = [stage("all", barrier=True), stage("b")]
    rig = go(stages, {}, 400, source={"rate": 10.0}, script=(ScriptedEvent(20.0, PostEvent(Drain())),))
    assert rig.run_state is RunState.DRAINED
    assert not rig.messages("all")
    assert not rig.data.log
    rest = go(stages, {}, 400, resume=rig.data.log)
    assert [message.items for message in rest.messages("all")] == [400]


def test_two_barriers_in_a_row_each_see_everything() -> None:
    rig = go([stage("a"), stage("x", barrier=True), stage("y", barrier=True), stage("b")], {}, 40)
    assert [message.items for message in rig.messages("x") + rig.messages("y")] == [40, 40]
    assert rig.out("b") == numbers(40)


def test_a_lost_node_while_a_barrier_runs_gives_it_everything_again() -> None:
    rig = go(
        WITH_BARRIER,
        {"a": Behaviour(0.01), "all": Behaviour(1.0)},
        60,
        cluster="2x(4cpu, 16GB)",
        script=(ScriptedEvent(20.0, LoseNode("node-0")), ScriptedEvent(25.0, LoseNode("node-9"))),
    )
    assert rig.run_state is RunState.FINISHED
    assert {message.items for message in rig.messages("all")} == {60}
    assert rig.out("b") == numbers(60)


def test_a_stage_of_a_later_wave_that_reads_the_source_gets_it_too() -> None:
    rig = go(
        [stage("a"), stage("all", barrier=True), stage("b", after=["all"]), stage("own", after=[])],
        {},
        45,
        mode="sequential",
    )
    assert rig.out("b") == numbers(45)
    assert rig.out("own") == numbers(45)


def test_output_for_two_later_waves_goes_to_both() -> None:
    rig = go([stage("a"), stage("b", after=["a"]), stage("c", after=["a", "b"])], {}, 30, mode="sequential")
    assert rig.out("c") == numbers(30) + numbers(30)


def test_every_worker_that_was_started_is_stopped_once() -> None:
    rig = go(THREE, {}, 60, mode="sequential")
    started = Counter(start.worker for start in rig.all(StartWorker))
    stopped = Counter(stop.worker for stop in rig.all(StopWorker))
    assert started == stopped
    assert set(started.values()) == {1}
