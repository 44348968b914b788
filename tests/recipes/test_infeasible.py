"""Recipes that do not fit: sums, lines of the file, and fixes that work as printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from recipes.recipe_aids import FAILING, GPU_CLUSTER, MANUAL, fix_works, load, seven

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = "4x(16cpu, 16GB)"


def problems_of(folder: Path, text: str, cluster: str = GPU_CLUSTER, mode: str | None = None) -> list[dt.Problem]:
    with pytest.raises(dt.InfeasibleError) as raised:
        load(folder, text).plan(cluster, mode)
    assert raised.value.exit_code == 3
    return list(raised.value.problems)


@pytest.mark.parametrize("mode", [None, "streaming"])
@pytest.mark.parametrize(
    ("text", "needed", "line"),
    [
        (FAILING, "8 operators at once need 92.0 CPUs and 14.0 GPUs", "2 x (6 CPU + 1 GPU) = 12.0 CPUs, 2.0 GPUs"),
        (MANUAL, "7 operators at once need 112.0 CPUs and 14.0 GPUs", "8 x (2 CPU + 0.25 GPU) = 16.0 CPUs, 2.0 GPUs"),
    ],
)
def test_a_recipe_that_does_not_fit_is_reported_with_the_sum_the_lines_and_fixes_that_work(
    tmp_path: Path, text: str, needed: str, line: str, mode: str | None
) -> None:
    (problem,) = problems_of(tmp_path, text, mode=mode)
    assert problem.message == f"{needed}; the cluster has 32.0 CPUs and 2.0 GPUs"
    assert problem.place == f"{tmp_path}/recipe.yaml:2:1"
    assert problem.evidence[0] == f"{tmp_path}/recipe.yaml:3:5  image_text_similarity_filter: {line}"
    assert len(problem.evidence) == text.count("\n  - ")
    assert 2 <= len(problem.fix_texts) <= 4
    for fix in problem.fix_texts:
        assert fix_works(tmp_path, text, GPU_CLUSTER, fix, mode).units
    kept = [fix for fix in problem.fix_texts if "mode" not in fix]
    assert kept
    for fix in kept:
        assert fix_works(tmp_path, text, GPU_CLUSTER, fix, mode).mode == "streaming"


def test_the_sum_includes_cpu_operators(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, FAILING)
    assert problem.evidence[-1].endswith("recipe.yaml:10:5  text_length_filter: 8 x (1 CPU) = 8.0 CPUs")


def test_only_operators_between_two_barriers_are_summed(tmp_path: Path) -> None:
    text = "mode: streaming\nprocess: [{document_deduplicator: {num_cpus: 10}}, {text_length_filter: {num_cpus: 9}}]"
    assert load(tmp_path, text).plan("1x(16cpu, 16GB)").mode == "streaming"
    text = text.replace("[", "[{words_num_filter: {num_cpus: 9}}, ")
    problems = problems_of(tmp_path, text, "1x(16cpu, 16GB)")
    assert problems[0].message.startswith("2 operators at once need 19.0 CPUs")
    assert [line.rpartition(" = ")[2] for line in problems[0].evidence] == ["9.0 CPUs", "10.0 CPUs"]
    for fix in problems[0].fix_texts:
        assert fix_works(tmp_path, text, "1x(16cpu, 16GB)", fix).units


@pytest.mark.parametrize(
    ("entry", "cluster", "fixes"),
    [
        ("image_maniqa_filter: {memory: 25GB}", GPU_CLUSTER, 2),
        ("image_maniqa_filter: {mem_required: 25GB}", GPU_CLUSTER, 2),
        ("image_maniqa_filter: {resources: {gpu_memory: 25GB}}", GPU_CLUSTER, 2),
        ("image_maniqa_filter: {memory: 8GB, num_proc: 5}", GPU_CLUSTER, 1),
        ("image_maniqa_filter: {memory: 8GB, num_proc: [5, 8]}", GPU_CLUSTER, 1),
        ("image_maniqa_filter: {memory: 8GB, workers: 5}", GPU_CLUSTER, 1),
        ("image_maniqa_filter: {num_gpus: 0.3, num_proc: 7}", GPU_CLUSTER, 2),
        ("image_maniqa_filter: {num_gpus: 3}", GPU_CLUSTER, 2),
        ("image_maniqa_filter: {gpu_required: 3}", GPU_CLUSTER, 2),
        ("image_maniqa_filter: {cpu_required: 64}", GPU_CLUSTER, 1),
        ("image_maniqa_filter: {resources: {cpus: 64}}", GPU_CLUSTER, 1),
        ("text_length_filter: {memory: 30GB}", HOSTS, 1),
        ("text_length_filter: {mem_required: 30GB, num_proc: 2}", HOSTS, 1),
        ("text_length_filter: {num_proc: 99}", HOSTS, 1),
        ("document_deduplicator: {num_cpus: 20}", HOSTS, 1),
        ("random_selector: {num_cpus: 20, select_num: 3}", HOSTS, 1),
        ("image_text_similarity_filter: {accelerator: cuda}", HOSTS, 1),
        ("image_text_similarity_filter: {accelerator: cuda, num_gpus: 1}", HOSTS, 1),
        ("image_text_similarity_filter: {gpu_required: 1, memory: 2GB}", HOSTS, 1),
        ("image_text_similarity_filter: {memory: 30GB}", HOSTS, 1),
    ],
)
def test_every_set_fix_for_one_operator_works_as_printed(tmp_path: Path, entry: str, cluster: str, fixes: int) -> None:
    text = f"process:\n  - clean_links_mapper\n  - {entry}\n"
    (problem,) = problems_of(tmp_path, text, cluster)
    assert problem.place == f"{tmp_path}/recipe.yaml:3:5"
    assert problem.message.startswith(entry.partition(":")[0])
    assert "stage" not in problem.message
    typed = [fix for fix in problem.fix_texts if "--" in fix]
    assert len(typed) == fixes
    for fix in typed:
        assert fix_works(tmp_path, text, cluster, fix).units, fix
    assert all("node" in fix for fix in problem.fix_texts if "--" not in fix)


@pytest.mark.parametrize(
    ("parameters", "cluster"),
    [
        ("num_proc: 2, memory: 8GB, accelerator: cpu", "1x(2cpu, 4GB)"),
        ("workers: 6, memory: 25GB", GPU_CLUSTER),
        ("num_proc: 3, num_cpus: 40", GPU_CLUSTER),
        ("num_proc: 4, num_cpus: 40, memory: 200GB, accelerator: cpu", HOSTS),
    ],
)
def test_a_fix_that_fits_one_worker_also_limits_the_number_of_workers(
    tmp_path: Path, parameters: str, cluster: str
) -> None:
    text = f"process: [{{image_maniqa_filter: {{{parameters}}}}}]"
    (problem,) = problems_of(tmp_path, text, cluster)
    typed = [fix for fix in problem.fix_texts if "--" in fix]
    assert typed
    for fix in typed:
        assert fix_works(tmp_path, text, cluster, fix).units, fix


def test_several_operators_that_do_not_fit_are_reported_at_once(tmp_path: Path) -> None:
    text = seven("memory: 25GB", "text_length_filter: {num_cpus: 99}")
    problems = problems_of(tmp_path, text)
    assert [problem.place.rpartition("recipe.yaml:")[2] for problem in problems] == [
        f"{line}:5" for line in range(3, 11)
    ]


def test_the_sum_of_gpu_memory_is_reported_with_fixes_that_work(tmp_path: Path) -> None:
    text = seven("memory: 15GB")
    problems = problems_of(tmp_path, text)
    assert problems[0].fix_texts
    for problem in problems:
        for fix in problem.fix_texts:
            assert fix_works(tmp_path, text, GPU_CLUSTER, fix).units, fix
    assert load(tmp_path, seven("memory: 15GB", head="")).plan(GPU_CLUSTER).mode == "waves"


def test_a_value_from_the_command_line_is_reported_as_it_was_typed(tmp_path: Path) -> None:
    recipe = load(tmp_path, "process: [text_length_filter]", ["process.0.num_proc=99"])
    with pytest.raises(dt.InfeasibleError) as raised:
        recipe.plan(HOSTS)
    (problem,) = raised.value.problems
    assert "99 workers" in problem.message
    assert problem.place.endswith("recipe.yaml:1:11")


def test_operators_that_share_workers_are_reported_together_and_count_once(tmp_path: Path) -> None:
    text = "process: [{text_length_filter: {memory: 30GB}}, {words_num_filter: {mem_required: 30GB}}]"
    (problem,) = problems_of(tmp_path, text, HOSTS)
    assert problem.message.startswith("text_length_filter+words_num_filter (1 CPU, 30GB memory) fits on 0 of 4 nodes")
    assert problem.fix_texts[0] == "--set process.0.memory=16GB --set process.1.mem_required=16GB"
    assert fix_works(tmp_path, text, HOSTS, problem.fix_texts[0]).units
    text = "mode: streaming\nprocess: [text_length_filter, words_num_filter, {clean_links_mapper: {num_proc: 2}}]"
    (problem,) = problems_of(tmp_path, text, "1x(2cpu, 4GB)")
    assert problem.message == "3 operators at once need 3.0 CPUs; the cluster has 2.0 CPUs"
    assert len(problem.evidence) == 2
    for fix in problem.fix_texts:
        assert fix_works(tmp_path, text, "1x(2cpu, 4GB)", fix).units
