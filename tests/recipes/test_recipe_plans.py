"""Plans of recipes: workers per operator; no card and no node is overcommitted."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.recipes.operator_tables import plan_table
from dovetail.recipes.recipe_plan import plan_notes
from recipes.recipe_aids import FAILING, GPU_CLUSTER, GPU_FILTERS, MANUAL, OPTIMIZED, load, seven

if TYPE_CHECKING:
    from pathlib import Path

GB = 1024**3


def workers(plan: dt.Plan) -> dict[str, int]:
    return {stage: unit.workers for unit in plan.units for stage in unit.stages}


def check_cards(plan: dt.Plan) -> None:
    """Within each wave no card above what it has, by the values that are used; no node above its CPUs and memory."""
    nodes = {node.name: node for node in plan.cluster.nodes}
    for wave in range(len(plan.waves)):
        milli: Counter[tuple[str, int]] = Counter()
        memory: Counter[tuple[str, int]] = Counter()
        cpus: Counter[str] = Counter()
        host: Counter[str] = Counter()
        for unit in plan.units:
            if unit.wave != wave:
                continue
            seats = plan.seats[unit.stages[0]]
            assert len(seats) == unit.workers
            for seat in seats:
                cpus[seat.node] += unit.shape.cpu_milli
                host[seat.node] += unit.shape.memory_bytes
                for card in seat.gpus:
                    milli[seat.node, card] += unit.shape.gpu_milli
                    memory[seat.node, card] += unit.shape.gpu_memory_bytes
        assert all(used <= 1000 for used in milli.values())
        assert all(used <= nodes[node].gpus[card].memory_bytes for (node, card), used in memory.items())
        assert all(used <= nodes[node].cpu_milli for node, used in cpus.items())
        assert all(used <= nodes[node].memory_bytes for node, used in host.items())


# --- seven GPU filters


def test_with_memory_only_all_seven_filters_share_both_cards(tmp_path: Path) -> None:
    for text in (OPTIMIZED, f"mode: streaming\n{OPTIMIZED}"):
        plan = load(tmp_path, text).plan(GPU_CLUSTER)
        assert plan.mode == "streaming"
        found = workers(plan)
        assert set(found) == set(GPU_FILTERS)
        assert all(count >= 1 for count in found.values())
        assert sum(found.values()) * 1500 <= 2 * 20 * 1024
        assert {card for seats in plan.seats.values() for seat in seats for card in seat.gpus} == {0, 1}
        check_cards(plan)


def test_given_shares_never_exceed_the_two_cards(tmp_path: Path) -> None:
    for share in ("0.08", "0.07", "0.25", "0.13"):
        plan = load(tmp_path, seven(f"memory: '1500MB', num_gpus: {share}")).plan(GPU_CLUSTER)
        used = sum(unit.workers * unit.shape.gpu_milli for unit in plan.units)
        assert 0 < used <= 2000
        check_cards(plan)


@pytest.mark.parametrize("text", [FAILING, MANUAL])
def test_operators_that_do_not_fit_at_once_are_planned_in_waves(tmp_path: Path, text: str) -> None:
    recipe = load(tmp_path, text)
    assert len(recipe.plan(GPU_CLUSTER, "sequential").waves) == len(recipe.steps)
    for mode in ("sequential", "auto", "waves"):
        recipe = load(tmp_path, text.replace("mode: streaming", f"mode: {mode}"))
        plan = recipe.plan(GPU_CLUSTER)
        assert plan.mode == {"auto": "waves"}.get(mode, mode)
        for step in recipe.steps:
            assert workers(plan)[step.name] == step.parameters["num_proc"]
        check_cards(plan)


def test_fractions_of_gpus_are_placed_evenly(tmp_path: Path) -> None:
    text = "process: [{image_maniqa_filter: {memory: 1500MB, num_gpus: 0.25, num_proc: 8, num_cpus: 2}}]"
    plan = load(tmp_path, text).plan(GPU_CLUSTER)
    assert Counter(seat.gpus for seat in plan.seats["image_maniqa_filter"]) == {(0,): 4, (1,): 4}


# --- differences from Data-Juicer


@pytest.mark.parametrize("parameters", ["memory: 25GB", "memory: 25GB, num_proc: 1", "memory: 25GB, num_gpus: 1"])
def test_an_operator_larger_than_every_card_is_refused(tmp_path: Path, parameters: str) -> None:
    with pytest.raises(dt.InfeasibleError, match="image_maniqa_filter"):
        load(tmp_path, f"process: [{{image_maniqa_filter: {{{parameters}}}}}]").plan(GPU_CLUSTER)


def test_two_cards_of_20_gb_hold_four_workers_of_8_gb_not_five(tmp_path: Path) -> None:
    text = "process: [{image_maniqa_filter: {memory: 8GB, num_proc: %s}}]"
    with pytest.raises(dt.InfeasibleError, match=r"5 workers .* are requested, 4 fit"):
        load(tmp_path, text % 5).plan(GPU_CLUSTER)
    for count in ("4", "-1", "[2, 8]"):
        plan = load(tmp_path, text % count).plan(GPU_CLUSTER)
        assert workers(plan) == {"image_maniqa_filter": 4}
        check_cards(plan)


def test_memory_is_not_added_over_nodes(tmp_path: Path) -> None:
    text = "process: [{text_length_filter: {memory: %s}}]"
    with pytest.raises(dt.InfeasibleError, match=r"text_length_filter .* fits on 0 of 4 nodes"):
        load(tmp_path, text % "30GB").plan("4x(16cpu, 16GB)")
    assert workers(load(tmp_path, text % "16GB").plan("4x(16cpu, 16GB)")) == {"text_length_filter": 4}


def test_operators_on_cpus_are_planned_too(tmp_path: Path) -> None:
    text = "process: [{text_length_filter: {num_cpus: 4, memory: 10GB}}, {clean_links_mapper: {num_proc: 3}}]"
    plan = load(tmp_path, text).plan("2x(16cpu, 32GB)")
    assert workers(plan)["clean_links_mapper"] == 3
    assert 1 <= workers(plan)["text_length_filter"] <= 6
    check_cards(plan)


def mixed(count: int) -> str:
    """CPU and GPU operators, fused and not, with barriers."""
    lines = []
    for number in range(count):
        match number % 6:
            case 0:
                lines.append("text_length_filter: {min_len: 5}")
            case 1:
                lines.append("clean_links_mapper: {num_cpus: 0.5}")
            case 2:
                lines.append(f"{GPU_FILTERS[number % 7]}: {{memory: 1500MB}}")
            case 3:
                lines.append("words_num_filter: {num_proc: 2}")
            case 4:
                lines.append("document_deduplicator: {}" if number % 12 == 4 else "alphanumeric_filter: {}")
            case _:
                lines.append(f"{GPU_FILTERS[number % 7]}: {{num_gpus: 0.1}}")
    return "process:\n" + "".join(f"  - {line}\n" for line in lines)


def test_a_plan_for_60_operators_takes_less_than_a_second(tmp_path: Path) -> None:
    text = mixed(60)
    load(tmp_path, text).plan("1x(2cpu, 4GB, 1xgpu:20GB)", "sequential")  # imports are not timed
    began = time.process_time()
    plan = load(tmp_path, text).plan("4x(128cpu, 512GB, 8xgpu:80GB)")
    assert time.process_time() - began < 1
    assert len(workers(plan)) == 65
    check_cards(plan)


def test_a_barrier_has_one_worker(tmp_path: Path) -> None:
    plan = load(tmp_path, "process: [document_deduplicator, {random_selector: {select_num: 5}}]").plan("1x(8cpu, 8GB)")
    assert (workers(plan)["document_deduplicator"], workers(plan)["random_selector"]) == (1, 1)
    assert workers(plan)["document_deduplicator_hash"] > 1


# --- number of workers


def test_without_auto_op_parallelism_only_num_proc_and_np_apply(tmp_path: Path) -> None:
    text = "auto_op_parallelism: false\n%sprocess: [text_length_filter, {clean_links_mapper: {num_proc: 5}}]"
    cluster = "1x(32cpu, 32GB)"
    plan = load(tmp_path, text % "np: 3\n").plan(cluster)
    assert workers(plan) == {"text_length_filter": 3, "clean_links_mapper": 5}
    plan = load(tmp_path, text % "").plan(cluster)
    assert workers(plan) == {"text_length_filter": 1, "clean_links_mapper": 5}
    with pytest.raises(dt.InfeasibleError, match="99 workers"):
        load(tmp_path, text % "np: 99\n").plan(cluster)


def test_np_without_effect_is_noted(tmp_path: Path) -> None:
    recipe = load(tmp_path, "np: 3\nprocess: [text_length_filter]")
    cluster = dt.Cluster.of("1x(32cpu, 32GB)")
    assert workers(recipe.plan(cluster)) == {"text_length_filter": 32}
    assert any(note.startswith("np: 3 has no effect") for note in plan_notes(recipe, cluster))
    recipe = load(tmp_path, "np: 3\nauto_op_parallelism: false\nprocess: [text_length_filter]")
    assert plan_notes(recipe, cluster) == []


# --- without GPUs


def test_an_operator_that_prefers_a_gpu_runs_on_cpus_without_gpus(tmp_path: Path) -> None:
    recipe = load(tmp_path, "process: [{image_text_similarity_filter: {memory: 3GB}}, text_length_filter]")
    cluster = dt.Cluster.of("1x(8cpu, 8GB)")
    plan = recipe.plan(cluster)
    assert 1 <= workers(plan)["image_text_similarity_filter"] <= 2  # on CPUs, `memory` is host memory
    assert any(
        "the cluster has no GPU: image_text_similarity_filter runs on CPUs" in note
        for note in plan_notes(recipe, cluster)
    )
    with_gpus = dt.Cluster.of(GPU_CLUSTER)
    assert not any("no GPU" in note for note in plan_notes(recipe, with_gpus))
    assert all(seat.gpus for seat in recipe.plan(with_gpus).seats["image_text_similarity_filter"])


@pytest.mark.parametrize("parameters", ["accelerator: cuda", "num_gpus: 1", "num_gpus: 0.1", "gpu_required: 1"])
def test_an_operator_that_requires_a_gpu_does_not_fit_without_one(tmp_path: Path, parameters: str) -> None:
    recipe = load(tmp_path, f"process: [{{image_text_similarity_filter: {{{parameters}}}}}]")
    with pytest.raises(dt.InfeasibleError, match="no GPU"):
        recipe.plan("1x(8cpu, 8GB)")


def test_a_whole_card_per_worker_is_noted_with_the_setting_that_shares_it(tmp_path: Path) -> None:
    cluster = dt.Cluster.of(GPU_CLUSTER)
    recipe = load(tmp_path, "process: [image_maniqa_filter]")
    assert any("memory: '2GB', several share one" in note for note in plan_notes(recipe, cluster))
    recipe = load(tmp_path, "process: [{image_maniqa_filter: {memory: 2GB}}]")
    assert not any("several share a card" in note for note in plan_notes(recipe, cluster))


def test_operators_that_cannot_run_here_are_planned_with_a_note(tmp_path: Path) -> None:
    recipe = load(tmp_path, OPTIMIZED)
    (note,) = (note for note in plan_notes(recipe, dt.Cluster.of(GPU_CLUSTER)) if "cannot run on this machine" in note)
    assert "image_aesthetics_filter" in note
    assert "image_aesthetics_filter" in "".join(problem.message for problem in recipe.unready())


# --- table


def test_the_table_has_a_line_per_operator_with_its_cards(tmp_path: Path) -> None:
    recipe = load(tmp_path, seven("memory: 1500MB", "text_length_filter", "words_num_filter"))
    lines = plan_table(recipe, recipe.plan(GPU_CLUSTER))
    assert len(lines) == 11
    assert lines[1].startswith("image_text_similarity_filter")
    assert " + " in lines[1]
    assert lines[9].split()[:2] == ["words_num_filter", "same"]
    sequential = plan_table(recipe, recipe.plan(GPU_CLUSTER, "sequential"))
    assert sequential[0].startswith("wave")


# --- engine


@pytest.mark.parametrize(
    ("head", "engine"),
    [
        ("", "local"),
        ("executor_type: default", "local"),
        ("executor_type: local", "local"),
        ("executor_type: ray", "ray"),
        ("executor_type: ray_partitioned", "ray"),
        ("executor_type: ray\nray_address: auto", "ray:auto"),
        ("executor_type: ray\nray_address: 10.0.0.1:6379", "ray:10.0.0.1:6379"),
        ("ray_address: auto", "local"),
    ],
)
def test_executor_type_sets_the_engine(tmp_path: Path, head: str, engine: str) -> None:
    from dovetail.engines.ray.address import RayAddress, is_ray_engine

    found = load(tmp_path, f"{head}\nprocess: [text_length_filter]").engine
    assert found == engine
    if is_ray_engine(found):
        RayAddress.parse(found)
