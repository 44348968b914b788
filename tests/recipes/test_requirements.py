"""Requirements of operators: num_proc, num_cpus, num_gpus, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from recipes.recipe_aids import load, wrong

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.recipes.requirements import OperatorRequirements

GB, MB = 1024**3, 1024**2
CPU_OPERATOR, GPU_OPERATOR = "text_length_filter", "image_maniqa_filter"


def needs(folder: Path, parameters: str, operator: str = CPU_OPERATOR) -> OperatorRequirements:
    return load(folder, f"process: [{{{operator}: {{{parameters}}}}}]").steps[0].requirements


def message(folder: Path, parameters: str, operator: str = CPU_OPERATOR) -> tuple[str, tuple[str, ...]]:
    (problem,) = wrong(folder, f"process: [{{{operator}: {{{parameters}}}}}]")
    return problem.message.removeprefix(f"{operator}: "), problem.fix_texts


# --- memory


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1.5GB", 3 * GB // 2),
        ("'1500MB'", 1500 * MB),
        ("2g", 2 * GB),
        ("500m", 500 * MB),
        ("2GiB", 2 * GB),
        ("2 gb", 2 * GB),
        ("0.25TB", 256 * GB),
        ("64KiB", 65536),
    ],
)
def test_sizes_are_parsed(tmp_path: Path, written: str, size: int) -> None:
    for key in ("memory", "mem_required"):
        shape = needs(tmp_path, f"{key}: {written}").resources.shape()
        assert (shape.memory_bytes, shape.gpu_memory_bytes) == (size, 0)
        shape = needs(tmp_path, f"{key}: {written}", GPU_OPERATOR).resources.shape()
        assert (shape.memory_bytes, shape.gpu_memory_bytes) == (0, size)


@pytest.mark.parametrize(
    ("written", "words", "fix"),
    [
        ("-2GB", "is negative", "2GB"),
        ("1500", "has no unit", "1500MB"),
        ("'1500'", "has no unit", "1500MB"),
        ("1.5", "has no unit", "1.5MB"),
        ("true", "has no unit", "2MB"),
        ("lots", "is not a size", "2MB"),
        ("'1,5GB'", "is not a size", "1.5GB"),
        ("99999999999TB", "more than the limit", "2GB"),
        ("[2GB]", "has no unit", "2GB"),
        (".nan", "has no unit", "2MB"),
    ],
)
def test_invalid_sizes_are_refused_with_a_valid_one(tmp_path: Path, written: str, words: str, fix: str) -> None:
    for key in ("memory", "mem_required"):
        text, fixes = message(tmp_path, f"{key}: {written}")
        assert text.startswith(f"{key}: ")
        assert words in text
        assert fixes == (f"{key}: {fix}",)
        assert needs(tmp_path, fixes[0]).resources.shape().memory_bytes > 0


def test_memory_is_gpu_memory_for_gpu_operators_and_host_memory_for_others(tmp_path: Path) -> None:
    for parameters, operator, on_gpu in (
        ("memory: 2GB", CPU_OPERATOR, False),
        ("memory: 2GB, accelerator: cuda", CPU_OPERATOR, True),
        ("memory: 2GB, num_gpus: 0.5", CPU_OPERATOR, True),
        ("memory: 2GB", GPU_OPERATOR, True),
        ("memory: 2GB, accelerator: cpu", GPU_OPERATOR, False),
        ("memory: 2GB, num_gpus: 0", GPU_OPERATOR, False),
    ):
        found = needs(tmp_path, parameters, operator)
        shape = found.resources.shape()
        assert found.cuda is on_gpu, parameters
        assert (shape.gpu_memory_bytes, shape.memory_bytes) == ((2 * GB, 0) if on_gpu else (0, 2 * GB)), parameters


# --- deprecated names


def test_deprecated_names_have_the_same_meaning(tmp_path: Path) -> None:
    old = needs(tmp_path, "cpu_required: 2, gpu_required: 0.5, mem_required: 1GB", GPU_OPERATOR)
    assert old == needs(tmp_path, "num_cpus: 2, num_gpus: 0.5, memory: 1GB", GPU_OPERATOR)


@pytest.mark.parametrize(
    ("new", "old", "value"), [("num_cpus", "cpu_required", "2"), ("memory", "mem_required", "1GB")]
)
def test_both_names_are_reported_with_a_fix_that_removes_the_old_one(
    tmp_path: Path, new: str, old: str, value: str
) -> None:
    for first, second in ((new, old), (old, new)):
        text, fixes = message(tmp_path, f"{first}: {value}, {second}: {value}")
        assert text == f"{first} and {second} set the same value"
        assert fixes == (f"remove {old}",)
    text, _ = message(tmp_path, f"{new}: null, {old}: -1{value}")
    assert text.startswith(f"{old}")


def test_both_names_are_reported_even_if_one_value_is_invalid(tmp_path: Path) -> None:
    found = wrong(tmp_path, "process: [{text_length_filter: {memory: -2GB, mem_required: 1GB}}]")
    assert [("negative" in problem.message, "set the same value" in problem.message) for problem in found] == [
        (True, False),
        (False, True),
    ]


# --- workers


@pytest.mark.parametrize(
    ("written", "workers"),
    [("-1", "auto"), ("auto", "auto"), ("1", 1), ("16", 16), ("[2, 8]", (2, 8)), ("[3, 3]", (3, 3)), ("null", None)],
)
def test_workers_are_a_number_a_range_or_auto(tmp_path: Path, written: str, workers: Any) -> None:
    assert needs(tmp_path, f"num_proc: {written}").workers == workers
    assert needs(tmp_path, f"workers: {written}").workers == workers


@pytest.mark.parametrize(
    "written", ["0", "-2", "'4'", "[4, 2]", "[0, 2]", "[4]", "[1, 2, 3]", "4.0", "true", "[true, 2]", "many", "1.5"]
)
def test_invalid_numbers_of_workers_are_reported(tmp_path: Path, written: str) -> None:
    for key in ("num_proc", "workers"):
        text, fixes = message(tmp_path, f"{key}: {written}")
        assert text.startswith(f"{key} should be -1 (auto), a number of workers, or [minimum, maximum], not ")
        assert needs(tmp_path, fixes[0]).workers == 4


def test_num_proc_and_workers_together_are_reported(tmp_path: Path) -> None:
    assert "set the same value" in message(tmp_path, "num_proc: 2, workers: 2")[0]


# --- resources


def test_resources_are_as_in_a_pipeline(tmp_path: Path) -> None:
    found = needs(tmp_path, "resources: {cpus: 2, gpus: 0.5, gpu_memory: 4GB, memory: 1GB}")
    assert found.cuda
    assert found.cuda_required
    shape = found.resources.shape()
    assert (shape.cpu_milli, shape.gpu_milli, shape.gpu_memory_bytes, shape.memory_bytes) == (2000, 500, 4 * GB, GB)
    assert not needs(tmp_path, "resources: {cpus: 2}", GPU_OPERATOR).cuda


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("resources: 3", "should be a mapping, not 3"),
        ("resources: {gpu: 1}", "did you mean 'gpus'?"),
        ("resources: {gpus: 1.5}", "above one card"),
        ("resources: {cpus: -1}", "cpus"),
        ("resources: {cpus: 1}, num_cpus: 1", "set the same value"),
        ("resources: {cpus: 1}, mem_required: 1GB", "resources and mem_required set the same value"),
    ],
)
def test_invalid_resources_are_reported(tmp_path: Path, parameters: str, words: str) -> None:
    assert words in message(tmp_path, parameters)[0]


# --- GPUs


def test_an_operator_needs_a_gpu_only_by_default_or_by_the_file(tmp_path: Path) -> None:
    for parameters, operator, cuda, required in (
        ("", CPU_OPERATOR, False, False),
        ("", GPU_OPERATOR, True, False),
        ("num_gpus: 0", GPU_OPERATOR, False, False),
        ("accelerator: cpu", GPU_OPERATOR, False, False),
        ("accelerator: cuda", GPU_OPERATOR, True, True),
        ("num_gpus: 0.5", GPU_OPERATOR, True, True),
        ("accelerator: cuda", CPU_OPERATOR, True, True),
        ("accelerator: cpu, num_gpus: 0", GPU_OPERATOR, False, False),
    ):
        found = needs(tmp_path, parameters, operator)
        assert (found.cuda, found.cuda_required) == (cuda, required), (parameters, operator)
        assert bool(found.resources.shape().cards) is cuda, (parameters, operator)


@pytest.mark.parametrize(
    ("parameters", "words", "fixes"),
    [
        (
            "accelerator: cpu, num_gpus: 1",
            "would reserve an unused GPU",
            ("accelerator: cuda", "num_gpus: 0"),
        ),
        ("accelerator: cuda, num_gpus: 0", "no GPU to run on", ("num_gpus: 1", "accelerator: cpu")),
        ("num_gpus: 1.5", "num_gpus: 1.5 is a fraction: above one card only whole cards", ("num_gpus: 2",)),
        ("num_gpus: -1", "a number from 0 on, not -1", ("num_gpus: 0.25",)),
        ("num_gpus: '1'", "a number from 0 on, not '1'", ("num_gpus: 0.25",)),
        ("num_gpus: .nan", "a number from 0 on, not nan", ("num_gpus: 0.25",)),
        ("num_gpus: 0.00001", "num_gpus: 1e-05 is below the smallest share", ()),
        ("num_cpus: -1", "a number from 0 on, not -1", ("num_cpus: 1",)),
        ("num_cpus: true", "a number from 0 on, not True", ("num_cpus: 1",)),
        ("num_cpus: 1e9", "num_cpus: 1000000000.0 is more than one worker can have", ()),
        ("accelerator: gpu", "accelerator should be cpu or cuda, not 'gpu'", ("accelerator: cpu",)),
        ("batch_size: 0", "batch_size should be a whole number from 1 on, not 0", ("batch_size: 16",)),
        ("adapter: datajuicer", "adapter should be data_juicer", ("adapter: data_juicer",)),
    ],
)
def test_invalid_requests_are_reported_with_the_keys_of_the_file(
    tmp_path: Path, parameters: str, words: str, fixes: tuple[str, ...]
) -> None:
    text, given = message(tmp_path, parameters, GPU_OPERATOR)
    assert words in text
    assert given[: len(fixes)] == fixes


def test_an_operator_without_settings_gets_a_card_and_one_with_memory_a_share(tmp_path: Path) -> None:
    assert needs(tmp_path, "", GPU_OPERATOR).resources.shape().gpu_milli == 1000
    shape = needs(tmp_path, "memory: 2GB", GPU_OPERATOR).resources.shape()
    assert (shape.gpu_milli, shape.gpu_memory_bytes) == (0, 2 * GB)


# --- settings of failures


def settings(folder: Path, text: str) -> Any:
    return load(folder, text).steps[0].requirements.settings


def stage(folder: Path, text: str) -> Any:
    return load(folder, text).pipeline().stages[0]


def test_an_operator_has_the_settings_of_failures_of_a_stage(tmp_path: Path) -> None:
    given = "retries: 1, on_error: fail, on_death: skip, on_failure: {MyError: restart}, max_setup_failures: 2"
    found = stage(tmp_path, f"process: [{{{CPU_OPERATOR}: {{{given}, call_timeout: 5}}}}]")
    assert (found.retries, found.on_error, found.on_death, found.max_setup_failures) == (1, "fail", "skip", 2)
    assert (found.on_failure, found.timeout_s) == ({"MyError": "restart"}, 5)


def test_a_recipe_has_settings_of_failures_for_all_operators(tmp_path: Path) -> None:
    text = f"""
defaults: {{retries: 2, on_error: {{retry: [ConnectionError], times: 5, backoff: 1s, then: skip}}, on_death: skip}}
process:
- {CPU_OPERATOR}:
- {CPU_OPERATOR}: {{retries: 0, on_error: fail}}
- {CPU_OPERATOR}: {{skip_op_error: true}}
"""
    first, second, third = load(tmp_path, text).pipeline().stages
    assert first.on_error == dt.Retry(ConnectionError, times=5, backoff="1s", then="skip")
    assert (first.retries, first.on_death) == (2, "skip")
    assert (second.retries, second.on_error, second.on_death) == (0, "fail", "skip")
    assert (third.retries, third.on_error) == (2, "skip")


def test_the_barrier_of_a_deduplicator_skips_nothing(tmp_path: Path) -> None:
    text = "defaults: {on_error: skip, on_death: skip, retries: 1}\nprocess: [document_deduplicator: ]"
    first, barrier = load(tmp_path, text).pipeline().stages
    assert (first.on_error, first.on_death) == ("skip", "skip")
    assert (barrier.barrier, barrier.on_error, barrier.on_death, barrier.retries) == (True, "fail", None, 1)


def test_mistakes_in_settings_of_failures_have_a_place_and_a_fix(tmp_path: Path) -> None:
    text = f"""
skip_op_error: true
defaults: {{on_deth: skip, retries: -1, on_error: skip, on_failure: restrt}}
process:
- {CPU_OPERATOR}: {{on_error: {{retry: [ConnectionError], tmes: 3}}, skip_op_error: false}}
"""
    found = {problem.place.rpartition("/")[2]: problem.message for problem in wrong(tmp_path, text)}
    text = "\n".join(f"{place} {message}" for place, message in sorted(found.items()))
    for word in ("on_deth", "retries: -1", "skip_op_error and on_error", "restrt", "tmes"):
        assert word in text, text
    (problem,) = wrong(tmp_path, f"defaults: 3\nprocess: [{CPU_OPERATOR}]")
    assert (problem.place, problem.code) == ("recipe.yaml:1:1", "DT013")
