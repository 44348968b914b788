"""Replanning of a running stream: when workers are started, stopped and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.control.commands import Note, RunBatches
from dovetail.control.events import PinWorkers
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.world import Behaviour, KillWorker, Lognormal, PostEvent, ScriptedEvent, SlowDown
from dovetail.streaming.settings import StreamOptions
from streaming.harness import UNTRACKED, SimulatedRun, assert_no_idle_worker, numbers, simulate_stages, stage
from waiting import LONG

if TYPE_CHECKING:
    from dovetail.streaming.controller import StreamController

BIG = "1x(16cpu, 64GB)"


class Ready:
    """Ready workers per unit, over time."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, dict[str, int]]] = []

    def __call__(self, stream: StreamController) -> None:
        view = stream.view(stream.state.now)
        self.seen.append((view.now, {unit.name: unit.ready for unit in view.units}))

    def at(self, time: float) -> dict[str, int]:
        return [counts for now, counts in self.seen if now <= time][-1]


def test_unknown_rates_are_measured_and_the_slow_stage_gets_the_workers() -> None:
    ready = Ready()
    rig = simulate_stages(
        [stage("quick"), stage("slow")],
        {"quick": Behaviour(0.1), "slow": Behaviour(0.7, spread=Lognormal(0.3))},
        2000,
        cluster=BIG,
        world=UNTRACKED,
        after_step=ready,
    )
    assert ready.at(60) == {"quick": 2, "slow": 14}
    assert rig.seconds < 1.2 * 2000 * 0.7 / 14 + 30


def test_known_rates_are_used_from_the_start() -> None:
    ready = Ready()
    stages = [stage("quick", rate=10), stage("slow", rate=1.5)]
    simulate_stages(
        stages,
        {"quick": Behaviour(0.1), "slow": Behaviour(1 / 1.5)},
        500,
        cluster=BIG,
        world=UNTRACKED,
        after_step=ready,
    )
    assert ready.at(0.1)["slow"] >= 12


def test_without_replanning_no_worker_is_started_or_stopped() -> None:
    rig = simulate_stages(
        [stage("a"), stage("b")],
        {"a": Behaviour(0.1), "b": Behaviour(1.0)},
        300,
        cluster=BIG,
        options=StreamOptions(replan=False, follow_plan=True),
        world=UNTRACKED,
    )
    assert {now for now, _ in rig.starts("a") + rig.starts("b")} == {0.0}
    assert rig.stream.replanner.replans == 0


def test_pinned_counts_are_kept_at_any_measured_rate() -> None:
    most: dict[str, int] = {}

    def look(stream: StreamController) -> None:
        for unit in stream.state.units:
            most[unit.name] = max(most.get(unit.name, 0), len(unit.workers))

    simulate_stages(
        [stage("quick", workers=4), stage("slow", workers=2), stage("few", workers=(1, 3))],
        {"quick": Behaviour(0.01), "slow": Behaviour(1.0), "few": Behaviour(3.0)},
        300,
        cluster=BIG,
        world=UNTRACKED,
        after_step=look,
    )
    assert most == {"quick": 4, "slow": 2, "few": 3}


def gpu_run(setup_s: float) -> SimulatedRun:
    """Two workers of a GPU stage. For 20 s the stage before it produces almost nothing and could use their CPUs; events
    request replans meanwhile."""
    begin = 150.3
    replan_requests = tuple(
        ScriptedEvent(begin + after, PostEvent(PinWorkers("cpu", None))) for after in (6.0, 12.0, 18.0)
    )
    return simulate_stages(
        [stage("cpu"), stage("gpu", resources=dt.Resources(cpus=4, gpus=1))],
        {"cpu": Behaviour(1.0), "gpu": Behaviour(0.25, setup_s=setup_s)},
        6000,
        cluster="1x(16cpu, 64GB, 2xL40S:48GB)",
        script=(ScriptedEvent(begin, SlowDown("cpu", 20.0, begin + 20.0)), *replan_requests),
        world=UNTRACKED,
    )


def test_a_lull_does_not_stop_workers_with_a_long_setup() -> None:
    rig = gpu_run(setup_s=90.0)
    assert len(rig.starts("gpu")) == 2
    assert min(now for now, _ in rig.stops("gpu")) > rig.seconds - 10
    quick = gpu_run(setup_s=0.0)
    assert [now for now, _ in quick.stops("gpu") if now < 200], "the scenario must be one in which the rule matters"


def test_a_pause_of_the_source_stops_no_worker() -> None:
    rig = simulate_stages(
        [stage("cpu"), stage("gpu", resources=dt.Resources(cpus=4, gpus=1))],
        {"cpu": Behaviour(1.0), "gpu": Behaviour(0.25, setup_s=90.0)},
        3000,
        cluster="1x(16cpu, 64GB, 2xL40S:48GB)",
        source={"pauses": [(200.0, 220.0)]},
        world=UNTRACKED,
    )
    assert not [now for now, _ in rig.stops("gpu") + rig.stops("cpu") if 195 < now < 240]
    assert rig.run_state is RunState.FINISHED


def cold_start(whole: dt.Resources) -> tuple[SimulatedRun, Ready]:
    """Workers with half a GPU that take a minute per item and are backlogged, and a second stage."""
    ready = Ready()
    rig = simulate_stages(
        [
            stage("share", resources=dt.Resources(cpus=1, gpus=0.5)),
            stage("whole", resources=whole),
        ],
        {"share": Behaviour(60.0, setup_s=3.0), "whole": Behaviour(60.0, setup_s=3.0)},
        60,
        cluster="1x(16cpu, 64GB, 3xL40S:48GB)",
        world=UNTRACKED,
        after_step=ready,
    )
    return rig, ready


def test_workers_with_a_gpu_share_leave_the_last_whole_card_until_rates_are_measured() -> None:
    """The stage with whole GPUs gets its first worker: first workers are seated before any unit grows."""
    rig, ready = cold_start(dt.Resources(cpus=1, gpus=1))
    assert rig.starts("whole")[0][0] == 0.0
    assert ready.at(55) == {"share": 2, "whole": 1}
    without, freely = cold_start(dt.Resources(cpus=1))
    assert without.starts("whole")[0][0] == 0.0
    assert freely.at(55)["share"] == 6


def quarters_and_wholes() -> SimulatedRun:
    """Unknown rates; workers with a quarter of either of two GPUs, and a stage that needs a whole GPU and the CPUs
    beside it."""
    return simulate_stages(
        [
            stage("share", resources=dt.Resources(cpus=1.5, gpus=0.25), workers=(2, 8)),
            stage("whole", resources=dt.Resources(cpus=8, gpus=1)),
        ],
        {"share": Behaviour(2.0, setup_s=3.0), "whole": Behaviour(0.5, setup_s=3.0)},
        200,
        cluster="1x(4cpu, 64GB, 1xL40S:48GB) + 1x(16cpu, 64GB, 1xL40S:48GB)",
        world=UNTRACKED,
    )


def test_at_a_cold_start_quarter_gpus_never_block_a_stage_that_needs_a_whole_gpu() -> None:
    rig = quarters_and_wholes()
    assert rig.starts("whole")[0][0] == 0.0
    assert rig.data.delivered["whole"] == 200


def test_a_worker_that_dies_is_replaced_at_once_on_its_seats() -> None:
    rig = simulate_stages(
        [stage("a", workers=2)],
        {"a": Behaviour(1.0)},
        100,
        options=StreamOptions(replan=False, follow_plan=True),
        script=(ScriptedEvent(10.5, KillWorker("a")),),
    )
    first, _, third = rig.starts("a")
    assert third[0] == pytest.approx(10.5, abs=0.01)
    assert third[1].seats == first[1].seats
    assert rig.out("a") == numbers(100)


def test_at_the_end_of_the_input_seats_of_the_first_stage_go_to_the_last() -> None:
    """The first stage finishes long before the last, in front of which all items are queued."""
    ready = Ready()
    rig = simulate_stages(
        [stage("a"), stage("b", batch_size=4)],
        {"a": Behaviour(0.5), "b": Behaviour(0.5)},
        600,
        cluster=BIG,
        options=StreamOptions(queued_messages_per_slot=30.0),
        world=UNTRACKED,
        after_step=ready,
    )
    last_of_a = max(now for now, message in rig.timed(RunBatches) if message.hosted == "a")
    after = [counts for now, counts in ready.seen if last_of_a + 6 < now < rig.seconds - 1]
    assert all(counts["a"] == 0 for counts in after)
    assert all(counts["b"] >= 1 for counts in after)
    assert rig.data.delivered["b"] == 600


def test_a_finished_stage_has_no_workers_and_gets_none() -> None:
    def look(stream: StreamController) -> None:
        for unit in stream.state.units:
            if unit.finished:
                assert all(worker.state.value in ("draining", "stopping") for worker in unit.workers.values())

    rig = simulate_stages(
        [stage("a"), stage("b"), stage("c")],
        {"a": Behaviour(0.2, setup_s=5.0), "b": Behaviour(0.4, setup_s=5.0), "c": Behaviour(1.0, setup_s=5.0)},
        300,
        after_step=look,
    )
    assert rig.out("c") == numbers(300)


def test_a_stage_that_becomes_slow_gets_more_workers() -> None:
    ready = Ready()
    rig = simulate_stages(
        [stage("a"), stage("b")],
        {"a": Behaviour(0.5), "b": Behaviour(0.5)},
        6000,
        cluster=BIG,
        script=(ScriptedEvent(100.0, SlowDown("b", 4.0, 1e9)),),
        world=UNTRACKED,
        after_step=ready,
    )
    assert ready.at(95)["b"] == 8
    assert ready.at(400)["b"] >= 12
    assert rig.run_state is RunState.FINISHED


def test_noise_does_not_change_a_balanced_pipeline() -> None:
    rig = simulate_stages(
        [stage("a"), stage("b")],
        {"a": Behaviour(0.5, spread=Lognormal(1.0)), "b": Behaviour(0.5, spread=Lognormal(1.0))},
        6000,
        cluster=BIG,
        world=UNTRACKED,
        after_step=assert_no_idle_worker,
    )
    late = [now for unit in "ab" for now, _ in rig.starts(unit) if 120 < now < 370]
    assert len(late) <= 4


def test_every_replan_is_noted_with_its_figures() -> None:
    rig = simulate_stages([stage("a"), stage("b")], {"a": Behaviour(0.1), "b": Behaviour(0.5)}, 600, world=UNTRACKED)
    decisions = [note for note in rig.all(Note) if note.kind == "decision"]
    assert decisions
    starts = 0
    for note in decisions:
        assert note.text
        found = note.data.get("starts")
        assert isinstance(found, int)
        starts += found
    assert starts == len(rig.starts("a")) + len(rig.starts("b"))


@pytest.mark.parametrize(
    ("straggle", "setup_s"), [pytest.param((0.0, 1.0), 10.0, marks=pytest.mark.long), ((0.1, 4.0), 10.0)]
)
def test_heavy_tails_move_few_workers(straggle: tuple[float, float], setup_s: float) -> None:
    seconds = {"a": 2.0, "b": 4.0, "c": 1.0, "d": 3.0}
    world = {
        name: Behaviour(each, spread=Lognormal(1.0), stragglers=straggle, setup_s=setup_s)
        for name, each in seconds.items()
    }
    stages = [stage(name, rate=1 / each) for name, each in seconds.items()]
    items = 12_000 if LONG else 5000
    rig = simulate_stages(stages, world, items, cluster="4x(16cpu, 64GB)", world=UNTRACKED)
    late = [now for name in seconds for now, _ in rig.starts(name) + rig.stops(name) if 300 < now < 0.75 * rig.seconds]
    assert len(late) <= items / 600


def slow_source() -> SimulatedRun:
    return simulate_stages(
        [stage("a"), stage("b"), stage("c", resources=dt.Resources(gpus=1))],
        {"a": Behaviour(0.5, setup_s=5.0), "b": Behaviour(2.0, setup_s=5.0), "c": Behaviour(0.8, setup_s=30.0)},
        2000,
        cluster="4x(16cpu, 64GB, 2xL40S:48GB)",
        source={"rate": 1.0},
        world=UNTRACKED,
    )


def test_no_workers_are_started_beyond_the_rate_of_the_source() -> None:
    rig = slow_source()
    assert len(rig.starts("a")) + len(rig.starts("b")) + len(rig.starts("c")) <= 40  # 70 would fit
    assert rig.notes("the source is the bottleneck: 1 items/s")
    view = rig.stream.view(rig.seconds)
    assert view.read == 2000
