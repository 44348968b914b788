"""Plans keep what their author asked for, over-commit nothing, and say why they are as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import dovetail as dt
from dovetail.resources.fit import Fit
from dovetail.scheduling.plan_report import rates_with_one_more
from dovetail.scheduling.planner import plan_on_cluster
from scheduling.pipelines import (
    all_fit,
    any_clusters,
    pipeline,
    pipelines,
    stage,
    tiny_clusters,
    tiny_pipelines,
    usual_clusters,
)

VIDEO = Path(__file__).parents[2] / "examples" / "video.yaml"
MODES = ("auto", "streaming", "sequential", "waves")
SEVEN_SPEC = "1x(32cpu, 128GB, 2xgpu:20GB)"
SEVEN = tuple(stage(f"s{number}", cpus=4, gpus=1, workers=2) for number in range(7))
few_fit = settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
costly = settings(few_fit, max_examples=max(15, few_fit.max_examples // 4))
"""For properties that plan several times, or explain why there is no plan."""


def planned(made: dt.Pipeline, cluster: dt.Cluster, mode: str = "auto", headroom: float = 1.5) -> dt.Plan:
    """The plan; an example that has none is left out."""
    try:
        return dt.plan(made, cluster, mode, headroom=headroom)
    except dt.InfeasibleError:
        assume(False)
        raise


def refused(made: dt.Pipeline, cluster: dt.Cluster | str, mode: str) -> dt.InfeasibleError:
    with pytest.raises(dt.InfeasibleError) as caught:
        dt.plan(made, cluster, mode)
    return caught.value


def wave_rates(plan: dt.Plan) -> list[float]:
    """Rate of the slowest unit of each wave, by the plan's own numbers."""
    return [
        min(u.workers * u.rate / u.per_source for u in plan.units if u.name in names and u.per_source)
        for names in plan.waves
    ]


def harmonic(rates: list[float]) -> float:
    return 1 / sum(1 / rate for rate in rates)


@few_fit
@given(pipelines(), any_clusters(), st.sampled_from(MODES))
def test_no_wave_overcommits_a_node_and_every_process_has_a_seat(
    made: dt.Pipeline, cluster: dt.Cluster, mode: str
) -> None:
    plan = planned(made, cluster, mode)
    for names in plan.waves:
        ledger = dt.Ledger(cluster)
        for unit in plan.units:
            if unit.name in names:
                for seat in plan.seats[unit.stages[0]]:
                    ledger.take(seat)
    for unit in plan.units:
        assert unit.workers >= 1
        for name in unit.stages:
            assert len(plan.seats[name]) == unit.workers * unit.shape.ranks
            assert plan.seats[name] == plan.seats[unit.stages[0]]
    assert list(plan.seats) == list(plan.workers)
    assert set(plan.workers) == {stage.name for stage in made}


@few_fit
@given(pipelines(gangs=False), any_clusters(), st.sampled_from(MODES))
def test_every_seat_is_allowed_for_its_stage(made: dt.Pipeline, cluster: dt.Cluster, mode: str) -> None:
    plan = planned(made, cluster, mode)
    labels = {node.name: dict(node.labels) for node in cluster.nodes}
    cards = {node.name: node.gpus for node in cluster.nodes}
    for stage_ in made:
        shape = stage_.shape
        for seat in plan.seats[stage_.name]:
            assert (seat.cpu_milli, seat.memory_bytes) == (shape.cpu_milli, shape.memory_bytes)
            assert len(set(seat.gpus)) == shape.cards
            assert all(labels[seat.node].get(name) in values for name, values in shape.labels)
            used = [cards[seat.node][index] for index in seat.gpus]
            assert all(not shape.accelerators or gpu.key in shape.accelerators for gpu in used)
            assert sum(share.nvdecs for share in seat.cards) >= shape.nvdecs
            assert sum(share.nvencs for share in seat.cards) >= shape.nvencs


@few_fit
@given(pipelines(gangs=False), any_clusters(), st.sampled_from(MODES))
def test_counts_that_the_author_gave_are_kept(made: dt.Pipeline, cluster: dt.Cluster, mode: str) -> None:
    plan = planned(made, cluster, mode)
    for stage_ in made:
        workers = plan.workers[stage_.name]
        if stage_.barrier:
            assert workers == 1
        elif stage_.workers_per_node is not None:
            fit = Fit(stage_.shape)
            empty = zip(cluster.nodes, dt.Ledger(cluster).free, strict=True)
            able = {node.name: stage_.workers_per_node for node, free in empty if fit.capacity(free)}
            assert Counter(seat.node for seat in plan.seats[stage_.name]) == able
        elif isinstance(stage_.workers, tuple):
            assert stage_.workers[0] <= workers <= stage_.workers[1]
        elif stage_.workers != "auto":
            assert workers == stage_.workers


@few_fit
@given(pipelines(), any_clusters(), st.sampled_from(MODES))
def test_the_rate_follows_from_the_plans_own_numbers_and_is_within_the_bound(
    made: dt.Pipeline, cluster: dt.Cluster, mode: str
) -> None:
    plan = planned(made, cluster, mode)
    if not all(unit.has_known_rate for unit in plan.units):
        assert (plan.rate, plan.bound, plan.bottleneck) == (None, None, None)
        return
    assert plan.rate == pytest.approx(harmonic(wave_rates(plan)), rel=1e-9)
    assert plan.rate is not None
    assert plan.bound is not None
    assert plan.rate <= plan.bound * (1 + 1e-9)
    slowest = min(unit.throughput for unit in plan.units)
    assert next(unit.throughput for unit in plan.units if unit.name == plan.bottleneck) == slowest


@costly
@given(pipelines(per_node=False), usual_clusters(), usual_clusters(1), st.sampled_from((1.0, 1.5)))
def test_one_more_node_never_makes_it_slower(
    made: dt.Pipeline, cluster: dt.Cluster, more: dt.Cluster, headroom: float
) -> None:
    before = planned(made, cluster, "streaming", headroom)
    larger = dt.Cluster((*cluster.nodes, replace(more.nodes[0], name="one more")))
    after = dt.plan(made, larger, "streaming", headroom=headroom)
    assert harmonic(wave_rates(after)) >= harmonic(wave_rates(before)) * (1 - 1e-9)


@costly
@given(pipelines(gangs=False, barriers=False), usual_clusters(2))
def test_one_more_node_like_the_last_never_makes_it_slower_with_workers_per_node(
    made: dt.Pipeline, cluster: dt.Cluster
) -> None:
    before = planned(made, cluster, "streaming", 1.0)
    larger = dt.Cluster((*cluster.nodes, replace(cluster.nodes[-1], name="one more")))
    after = dt.plan(made, larger, "streaming", headroom=1.0)
    assert harmonic(wave_rates(after)) >= harmonic(wave_rates(before)) * (1 - 1e-9)


@given(tiny_pipelines(single=True), tiny_clusters())
def test_a_plan_exists_exactly_when_trying_everything_finds_one(made: dt.Pipeline, cluster: dt.Cluster) -> None:
    shapes = [stage.shape for stage in made]
    if all_fit(shapes, [1] * len(shapes), cluster):
        assert set(dt.plan(made, cluster, "streaming").workers.values()) == {1}
    else:
        assert refused(made, cluster, "streaming").exit_code == 3


@costly
@given(pipelines(), any_clusters(), st.sampled_from(MODES))
def test_the_same_input_gives_the_same_plan(made: dt.Pipeline, cluster: dt.Cluster, mode: str) -> None:
    assert planned(made, cluster, mode).to_json() == dt.plan(made, cluster, mode).to_json()


SCRIPT = """
import sys, dovetail as dt
plan = dt.plan(dt.Pipeline.load(sys.argv[1]), "3x(32cpu, 128GB, 2xL40S) + 2x(16cpu, 64GB, 1xL4){pool=b, rack=2}")
print(plan.to_json())
assert all(len(plan.seats[name]) == count for name, count in plan.workers.items()) or sys.exit("seats are missing")
"""


def printed(*options: str, **environment: str) -> bytes:
    command = [sys.executable, *options, "-c", SCRIPT, str(VIDEO)]
    return subprocess.run(command, check=True, capture_output=True, env=os.environ | environment).stdout


@pytest.mark.outside
def test_every_process_and_every_hash_seed_gives_the_same_bytes() -> None:
    plans = {printed(PYTHONHASHSEED=seed) for seed in ("0", "1", "2", "77", "random")}
    assert len(plans) == 1
    assert dt.Plan.from_json(plans.pop().decode()).name == "video"


@pytest.mark.outside
def test_a_python_that_skips_asserts_gives_the_same_bytes() -> None:
    assert printed("-O") == printed()


def applied(stages: tuple[dt.Stage, ...], spec: str, mode: str, fix: str) -> tuple[dt.Pipeline, dt.Cluster, str]:
    """The input with a fix applied as its reader would."""
    fix = fix.removeprefix("or ")
    if found := re.fullmatch(r'mode="(\w+)"', fix):
        return pipeline(*stages), dt.Cluster.parse(spec), found[1]
    if found := re.fullmatch(r"add (\d+|a) nodes? like 1x(.*)", fix):
        return pipeline(*stages), dt.Cluster.parse(f"{spec} + {found[1].replace('a', '1')}x{found[2]}"), mode
    found = re.fullmatch(r'(workers="auto")?(?:, )?(?:gpus=([\d.]+))? for (.+)', fix)
    assert found, f"no rule applies the fix {fix!r}"
    changed = []
    for old in stages:
        if old.name in found[3].split(", "):
            asked = replace(old.resources, gpus=float(found[2])) if found[2] else old.resources
            count: dict[str, Any] = {"workers": "auto", "workers_per_node": None} if found[1] else {}
            changed.append(replace(old, resources=asked, **count))
        else:
            changed.append(old)
    return pipeline(*changed), dt.Cluster.parse(spec), mode


def fixes_of(error: dt.InfeasibleError) -> list[str]:
    return [fix for problem in error.problems for fix in problem.fix_texts]


def test_fourteen_gpus_on_two_are_refused_with_sums_and_fixes_that_work() -> None:
    error = refused(pipeline(*SEVEN), SEVEN_SPEC, "streaming")
    assert error.exit_code == 3
    (problem,) = error.problems
    assert re.search(r"\b14 GPUs\b", problem.message)
    assert re.search(r"\b2\b.* free", problem.message)
    assert len(problem.fix_texts) >= 2
    kinds = [fix.removeprefix("or ").split("=")[0].split()[0] for fix in problem.fix_texts]
    assert kinds == ["workers", "mode", "mode", "add"]
    for fix in problem.fix_texts:
        assert dt.plan(*applied(SEVEN, SEVEN_SPEC, "streaming", fix)).workers


def test_fourteen_gpus_on_two_run_in_seven_waves_by_default() -> None:
    plan = dt.plan(pipeline(*SEVEN), SEVEN_SPEC)
    assert plan.mode == "waves"
    assert plan.waves == tuple((f"s{number}",) for number in range(7))
    assert set(plan.workers.values()) == {2}
    assert "7 waves" in plan.reason
    assert "14 GPUs of 2" in plan.reason
    assert "56 CPUs of 32" in plan.reason
    assert plan.reason in plan.notes
    (note,) = [note for note in plan.notes if "without the worker counts" in note]
    brought = re.search(r"at ([\d.]+) items/s, not ([\d.]+)", note)
    assert brought
    free = dt.plan(pipeline(*(replace(old, workers="auto") for old in SEVEN)), SEVEN_SPEC)
    assert float(brought[1]) == pytest.approx(free.rate, rel=1e-3)
    assert float(brought[2]) == pytest.approx(plan.rate, rel=1e-3)


@costly
@given(tiny_pipelines(), tiny_clusters(), st.lists(st.sampled_from(("auto", 1, 2, 3)), min_size=3, max_size=3))
def test_every_fix_of_units_that_do_not_fit_together_works(
    made: dt.Pipeline, cluster: dt.Cluster, counts: list[Any]
) -> None:
    stages = tuple(replace(old, workers=count) for old, count in zip(made, counts, strict=False))
    try:
        dt.plan(pipeline(*stages), cluster, "streaming")
    except dt.InfeasibleError as error:
        problems = error.problems
    else:
        assume(False)
        raise AssertionError
    assume(len(problems) == 1 and problems[0].code in ("DT101", "DT102"))
    for fix in problems[0].fix_texts:
        assert dt.plan(*applied(stages, cluster.spec(), "streaming", fix)).workers, fix


def test_a_fix_that_shares_cards_names_every_stage_whose_count_must_go() -> None:
    stages = (stage("a", cpus=1, gpus=1), stage("b", cpus=1, gpus=1), stage("c", cpus=1, workers=8))
    error = refused(pipeline(*stages), "1x(8cpu, 1xgpu:20GB)", "streaming")
    for fix in (fix for problem in error.problems for fix in problem.fix_texts if "gpus=" in fix):
        assert dt.plan(*applied(stages, "1x(8cpu, 1xgpu:20GB)", "streaming", fix)).workers, fix


def test_a_shortage_behind_a_barrier_is_reported_at_once_and_fixed_by_every_fix() -> None:
    two = {"cpus": 1, "gpus": 1, "workers": 2}
    stages = (stage("a", **two), stage("b", **two), stage("c", barrier=True, **two), stage("d", **two))
    spec = "1x(8cpu, 2xgpu:20GB)"
    error = refused(pipeline(*stages), spec, "streaming")
    assert fixes_of(error)
    for fix in fixes_of(error):
        assert dt.plan(*applied(stages, spec, "streaming", fix)).workers, fix


def test_video_on_cards_without_encoders_is_refused_with_cards_that_have_some() -> None:
    error = refused(dt.Pipeline.load(VIDEO), "1x(32cpu, 128GB, 2xH100)", "auto")
    (problem,) = [problem for problem in error.problems if problem.code == "DT112"]
    assert "'encode'" in problem.message
    assert any("NVENC" in fix and "L40S" in fix for fix in problem.fix_texts)


def test_video_on_cards_with_encoders_is_planned() -> None:
    plan = dt.plan(dt.Pipeline.load(VIDEO), "1x(32cpu, 128GB, 2xL40S:48GB)")
    assert plan.mode == "streaming"
    assert list(plan.workers) == ["download", "decode", "caption", "embed", "encode", "write"]
    assert min(plan.workers.values()) >= 1
    assert plan.assumptions == ()


def test_sequential_gives_each_unit_the_whole_cluster_in_turn() -> None:
    made = pipeline(stage("a", cpus=2, rate=3), stage("b", cpus=1, gpus=0.5), stage("c", cpus=1, returns=2))
    plan = dt.plan(made, "2x(8cpu, 2xgpu:20GB)", "sequential")
    assert plan.mode == "sequential"
    assert plan.waves == (("a",), ("b",), ("c",))
    assert plan.workers == {"a": 8, "b": 8, "c": 16}
    assert plan.rate == pytest.approx(1 / (1 / 24 + 1 / 8 + 1 / 16))
    assert "requested" in plan.reason


def test_waves_are_the_neighbours_that_fit_together() -> None:
    made = pipeline(*(stage(name, cpus=1, gpus=gpus) for name, gpus in zip("abcde", (1, 1, 0.5, 0.5, 2), strict=True)))
    plan = dt.plan(made, "1x(8cpu, 2xgpu:20GB)")
    assert plan.mode == "waves"
    assert plan.waves == (("a", "b"), ("c", "d"), ("e",))
    assert "3 waves" in plan.reason
    assert "5 GPUs of 2" in plan.reason
    assert not any("without the worker counts" in note for note in plan.notes)
    assert dt.plan(made, "1x(8cpu, 2xgpu:20GB)", "waves").waves == plan.waves


@costly
@given(pipelines(gangs=False), usual_clusters())
def test_no_wave_could_take_its_next_neighbour_along(made: dt.Pipeline, cluster: dt.Cluster) -> None:
    plan = planned(made, cluster, "waves")
    assume(len(plan.waves) > 1)
    stages = {stage.name: stage for stage in made}
    for now, then in zip(plan.waves, plan.waves[1:], strict=False):
        heads = [unit for unit in plan.units if unit.name in (*now, then[0])]
        if any(unit.barrier for unit in heads):
            continue
        together = [replace(stages[u.stages[0]], fuse=False, after=None) for u in heads]
        refused(pipeline(*together), cluster, "streaming")


def test_a_barrier_has_a_wave_of_its_own_and_both_sides_get_the_cluster() -> None:
    made = pipeline(stage("a"), stage("b"), stage("c", barrier=True), stage("d"))
    plan = dt.plan(made, "1x(8cpu)")
    assert plan.mode == "streaming"
    assert plan.waves == (("a", "b"), ("c",), ("d",))
    assert plan.workers == {"a": 4, "b": 4, "c": 1, "d": 8}
    assert plan.rate == pytest.approx(1 / (1 / 4 + 1 + 1 / 8))
    assert "1 barrier:" in plan.reason


def test_a_barrier_needs_no_space_beside_its_neighbours() -> None:
    """They never run at once, so one CPU is enough for streaming."""
    made = pipeline(stage("b", barrier=True), stage("c"))
    assert dt.plan(made, "1x(1cpu)", "streaming").waves == (("b",), ("c",))


@pytest.mark.parametrize("counts", [{"workers": 4}, {"workers": (2, 4)}, {"workers_per_node": 2}])
def test_worker_counts_of_a_barrier_are_ignored_with_a_warning(counts: dict[str, Any]) -> None:
    plan = dt.plan(pipeline(stage("a"), stage("b", barrier=True, **counts)), "1x(8cpu)")
    assert plan.workers["b"] == 1
    assert any("'b'" in warning and "ignored" in warning for warning in plan.warnings)
    assert not dt.plan(pipeline(stage("a"), stage("b", barrier=True)), "1x(8cpu)").warnings


def test_streaming_states_its_reason() -> None:
    plan = dt.plan(pipeline(stage("a"), stage("b")), "1x(8cpu)")
    assert (plan.mode, plan.waves) == ("streaming", (("a", "b"),))
    assert "at once" in plan.reason


@pytest.mark.parametrize(("mode", "meant"), [("streeming", "streaming"), ("wave", "waves"), ("Auto", "auto")])
def test_an_unknown_mode_is_refused_with_the_one_that_was_meant(mode: str, meant: str) -> None:
    with pytest.raises(dt.ConfigError, match=f"did you mean '{meant}'") as caught:
        dt.plan(pipeline(stage("a")), "1x(8cpu)", mode)
    assert caught.value.codes == ("DT036",)


@pytest.mark.parametrize("headroom", [0.99, 0, -1, float("nan"), float("inf"), True, "2", 101])
def test_headroom_that_is_no_factor_is_refused(headroom: Any) -> None:
    with pytest.raises(dt.ConfigError) as caught:
        dt.plan(pipeline(stage("a")), "1x(8cpu)", headroom=headroom)
    assert caught.value.codes == ("DT036",)


def test_headroom_gives_spare_cpus_to_stages_near_the_slowest() -> None:
    made = pipeline(stage("caption", cpus=1, gpus=1, rate=4), stage("read"), stage("write", rate=2))
    off = dt.plan(made, "1x(64cpu, 1xgpu:20GB)", headroom=1)
    on = dt.plan(made, "1x(64cpu, 1xgpu:20GB)")
    assert off.workers == {"caption": 1, "read": 4, "write": 2}
    assert on.workers == {"caption": 1, "read": 6, "write": 3}
    assert on.rate == off.rate == 4
    assert any("headroom" in phase and "read +2" in phase for phase in on.phases)


@few_fit
@given(pipelines(), any_clusters(), st.sampled_from((1.1, 1.5, 4.0)))
def test_headroom_never_makes_it_slower(made: dt.Pipeline, cluster: dt.Cluster, headroom: float) -> None:
    plain = planned(made, cluster, headroom=1)
    spare = dt.plan(made, cluster, headroom=headroom)
    assert harmonic(wave_rates(spare)) >= harmonic(wave_rates(plain))
    assert all(spare.workers[name] >= count for name, count in plain.workers.items())


def test_without_known_speeds_workers_are_shared_equally_and_no_rate_is_predicted() -> None:
    plan = dt.plan(pipeline(stage("a", rate=None), stage("b", rate=None)), "1x(8cpu)")
    assert plan.workers == {"a": 4, "b": 4}
    assert [unit.rate_source for unit in plan.units] == ["assumed", "assumed"]
    assert (plan.rate, plan.bound, plan.bottleneck, plan.binding) == (None, None, None, None)
    (note,) = plan.assumptions
    assert "no speed is known" in note
    assert "equally fast" in note
    assert "--probe" in note
    assert note in plan.notes
    assert dt.Plan.from_json(plan.to_json()) == plan


def test_an_unknown_rate_among_known_ones_is_their_middle() -> None:
    made = pipeline(stage("a", rate=2), stage("b", rate=None), stage("c", rate=6))
    plan = dt.plan(made, "1x(8cpu)")
    assert [unit.rate for unit in plan.units] == [2, 4, 6]
    assert [unit.rate_source for unit in plan.units] == ["given", "assumed", "given"]
    assert plan.rate is None
    assert "the speed of b is unknown" in plan.assumptions[0]


def test_profiles_are_used_and_what_the_author_gave_wins() -> None:
    made = pipeline(stage("a", rate=3, returns=2), stage("b", rate=None), stage("c", rate=None))
    profiles = {name: dt.Profile(rate=5, returns=4) for name in ("a", "b", "c")}
    plan = dt.plan(made, "1x(8cpu)", profiles=profiles)
    assert [unit.rate for unit in plan.units] == [3, 5, 5]
    assert [unit.rate_source for unit in plan.units] == ["given", "measured", "measured"]
    assert [unit.per_source for unit in plan.units] == [1, 2, 8]
    assert plan.assumptions == ()


def test_items_multiply_along_edges_and_parents_add_up() -> None:
    made = pipeline(
        stage("split", returns=4),
        stage("left", returns=0.5, after=["split"]),
        stage("right", returns=2, after=["split"]),
        stage("join", after=["left", "right"]),
    )
    plan = dt.plan(made, "1x(64cpu)")
    assert {unit.name: unit.per_source for unit in plan.units} == {"split": 1, "left": 4, "right": 4, "join": 10}
    assert plan.rate == min(unit.workers / unit.per_source for unit in plan.units)
    assert plan.workers["join"] > plan.workers["left"] > plan.workers["split"]


def test_fused_stages_share_workers_and_their_times_add_up() -> None:
    made = pipeline(stage("a", rate=3, returns=2, fuse=True), stage("b", rate=4, fuse=True))
    plan = dt.plan(made, "1x(4cpu)")
    (unit,) = plan.units
    assert (unit.name, unit.stages) == ("a+b", ("a", "b"))
    assert unit.rate == pytest.approx(1 / (1 / 3 + 2 / 4))
    assert plan.workers == {"a": 4, "b": 4}
    assert plan.seats["a"] == plan.seats["b"]
    assert plan.use["CPUs"].used == 4000


@pytest.mark.parametrize("mode", MODES)
def test_a_stage_that_gets_no_items_is_planned_in_every_mode(mode: str) -> None:
    made = pipeline(stage("drop", returns=0), stage("after"))
    plan = dt.plan(made, "1x(4cpu)", mode)
    assert plan.workers["after"] >= 1
    assert plan.rate is not None
    assert plan.rate > 0
    assert "Infinity" not in plan.to_json()
    assert plan.explain()


def test_gangs_on_every_node_get_all_their_ranks_or_are_refused() -> None:
    gang = pipeline(stage("train", cpus=1, gpus=1, ranks=2, workers_per_node=1))
    plan = dt.plan(gang, "2x(8cpu, 2xgpu:20GB)")
    assert Counter(seat.node for seat in plan.seats["train"]) == {"node-0": 2, "node-1": 2}
    error = refused(
        pipeline(stage("train", cpus=1, gpus=1, ranks=2, workers_per_node=2)), "2x(8cpu, 2xgpu:20GB)", "streaming"
    )
    assert error.codes == ("DT104",)
    cpus = pipeline(stage("reduce", cpus=3, ranks=3, workers_per_node=1))
    assert refused(cpus, "1x(4cpu)", "streaming").codes == ("DT104",)


def test_workers_per_node_that_do_not_fit_everywhere_are_refused_with_the_number_that_does() -> None:
    made = pipeline(stage("a", cpus=4, workers_per_node=3))
    error = refused(made, "2x(16cpu) + 1x(8cpu)", "auto")
    assert error.codes == ("DT104",)
    assert error.problems[0].fix_texts == ("workers_per_node=2",)
    fixed = dt.plan(pipeline(stage("a", cpus=4, workers_per_node=2)), "2x(16cpu) + 1x(8cpu)")
    assert fixed.workers == {"a": 6}


def test_idle_gpus_are_worth_a_warning() -> None:
    plan = dt.plan(pipeline(stage("a"), stage("b")), "8x(64cpu, 8xgpu:20GB)")
    assert plan.idle_gpus == 64
    (warning,) = plan.warnings
    assert "64 of 64 GPUs stay idle" in warning
    assert warning in plan.notes
    assert dt.plan(pipeline(stage("a", cpus=1, gpus=1)), "8x(64cpu, 8xgpu:20GB)").warnings == ()


def test_use_is_the_sum_of_the_seats() -> None:
    plan = dt.plan(dt.Pipeline.load(VIDEO), "2x(32cpu, 128GB, 2xL40S:48GB)")
    seats = [seat for name in plan.seats for seat in plan.seats[name]]
    assert plan.use["CPUs"].used == sum(seat.cpu_milli for seat in seats)
    assert plan.use["CPUs"].total == 64_000
    assert plan.use["GPUs"].used == sum(share.milli for seat in seats for share in seat.cards)
    assert plan.use["NVENCs"].used == sum(share.nvencs for seat in seats for share in seat.cards)


def test_every_stage_that_fits_nowhere_is_reported_at_once_in_every_mode() -> None:
    stages = (stage("a", gpus=1), stage("b", cpus=99), stage("c", nvencs=1), stage("d", cpus=1))
    for mode in MODES:
        messages = [problem.message for problem in refused(pipeline(*stages), "1x(8cpu)", mode).problems]
        assert [name for name in "abcd" if any(f"stage '{name}'" in line for line in messages)] == ["a", "b", "c"], mode


def test_items_beyond_any_number_are_a_mistake_of_the_pipeline() -> None:
    stages = [stage(f"s{number}", returns=1e9, fuse=False) for number in range(36)]
    with pytest.raises(dt.PipelineError, match="DT034"):
        dt.plan(pipeline(*stages), "1x(64cpu)")


def test_one_more_node_is_reported_with_the_rate_of_a_plan_on_it() -> None:
    fast = {"cpus": 1, "gpus": 1, "rate": 100.0}
    stages = (stage("a", **fast), stage("b", **fast), stage("c", **fast), stage("d", cpus=1, gpus=1, rate=1.0))
    made = dt.plan(pipeline(*stages), "3x(8cpu, 1xL4)")
    assert made.mode == "waves"
    rates = dict(rates_with_one_more(made))
    assert rates["node (8cpu, 1xL4)"] == dt.plan(pipeline(*stages), "4x(8cpu, 1xL4)").rate


def test_too_many_workers_per_node_together_are_reported_with_the_sums() -> None:
    stages = (stage("a", cpus=2, workers_per_node=3), stage("b", cpus=2, workers_per_node=2))
    (problem,) = refused(pipeline(*stages), "2x(8cpu)", "streaming").problems
    assert problem.code == "DT101"
    assert "20 CPUs" in problem.message


@pytest.mark.parametrize("mode", ["auto", "sequential"])
def test_a_plan_is_made_again_for_other_nodes_with_the_same_units_in_the_same_waves(mode: str) -> None:
    made = dt.Pipeline([dt.Stage("a", lambda items: items), dt.Stage("b", lambda items: items, dt.Resources(cpus=3))])
    before = dt.plan(made, dt.Cluster.of("4x(4cpu, 16GB)"), mode)
    cluster = dt.Cluster.of("1x(8cpu, 16GB)")
    found = plan_on_cluster(before, cluster)
    assert [(unit.name, unit.wave) for unit in found.units] == [(unit.name, unit.wave) for unit in before.units]
    assert found == dt.plan(made, cluster, mode)
    with pytest.raises(dt.InfeasibleError):
        plan_on_cluster(before, dt.Cluster.of("1x(2cpu, 16GB)"))


def test_stages_that_become_waves_for_lack_of_cpus_get_a_hint() -> None:
    light = [stage(name, rate=5.0) for name in "abcd"]
    plan = dt.plan(pipeline(*light), "1x(2cpu)")
    assert len(plan.waves) > 1
    assert "not all units fit at once (they need 4 CPUs of 2)" in plan.reason
    (hint,) = [note for note in plan.notes if "would run at once" in note]
    assert "more than 0.5 CPUs" in hint
    fewer = [stage(name, rate=5.0, cpus=0.5) for name in "abcd"]
    assert len(dt.plan(pipeline(*fewer), "1x(2cpu)").waves) == 1
    gpus = [stage(name, rate=5.0, gpus=1) for name in "ab"]
    assert not any("would run at once" in note for note in dt.plan(pipeline(*gpus), "1x(1cpu, 1xgpu:20GB)").notes)
