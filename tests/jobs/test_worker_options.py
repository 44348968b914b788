"""Options of workers: arguments, environment variables, sizing tables, and everything that is wrong at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dovetail.errors import ConfigError
from dovetail.jobs.application import Application
from dovetail.jobs.job import NO_RESOURCES, JobSpec
from dovetail.jobs.workers.isolation import isolation_of
from dovetail.jobs.workers.worker_capacity import WorkerCapacity, auto_slots, node_amounts
from dovetail.jobs.workers.worker_options import chosen_cards, worker_node, worker_options
from dovetail.resources.cluster import Cluster, Gpu
from dovetail.resources.resources import Resources
from jobs.worker_app import APP

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape

GB = 1 << 30


def test_the_variables_of_the_guide_set_what_is_not_given() -> None:
    variables = {
        "MAX_CONCURRENT_JOBS": "3",
        "USE_GPU": "true",
        "GPU_DEVICE": "1",
        "JOB_TIMEOUT": "3600",
        "WORKER_ID": "gpu-worker-1",
    }
    found = worker_options({"slots": "auto"}, variables)
    assert (found.slots, found.use_gpu, found.gpu_device) == (3, True, "1")
    assert (found.job_timeout_s, found.worker_id) == (3600.0, "gpu-worker-1")


def test_an_argument_wins_over_its_variable() -> None:
    found = worker_options({"slots": 2, "job_timeout_s": None}, {"MAX_CONCURRENT_JOBS": "9", "JOB_TIMEOUT": "5m"})
    assert (found.slots, found.job_timeout_s) == (2, None)


def test_the_placement_delay_is_a_duration_of_at_most_10_seconds() -> None:
    assert worker_options({}, {}).placement_delay_ms == 50
    assert worker_options({"placement_delay_ms": "2s"}, {}).placement_delay_ms == 2_000
    assert worker_options({"placement_delay_ms": 0}, {}).placement_delay_ms == 0
    with pytest.raises(ConfigError, match="placement_delay"):
        worker_options({"placement_delay_ms": "11s"}, {})


def test_use_gpu_false_ignores_the_device() -> None:
    found = worker_options({}, {"USE_GPU": "false", "GPU_DEVICE": "0"})
    assert (found.use_gpu, found.gpu_device) == (False, None)


def test_empty_variables_are_not_set() -> None:
    found = worker_options({}, {"MAX_CONCURRENT_JOBS": "", "WORKER_ID": " "})
    assert found.slots is None
    assert found.worker_id


def test_two_workers_of_one_process_have_different_ids() -> None:
    assert worker_options({}, {}).worker_id != worker_options({}, {}).worker_id


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("MAX_CONCURRENT_JOBS", "0"),
        ("MAX_CONCURRENT_JOBS", "many"),
        ("MAX_CONCURRENT_JOBS", "1000000"),
        ("USE_GPU", "maybe"),
        ("GPU_DEVICE", "0,,1"),
        ("JOB_TIMEOUT", "-1"),
        ("JOB_TIMEOUT", "soon"),
        ("WORKER_ID", "a b"),
    ],
)
def test_a_bad_variable_is_an_error_that_names_it(variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        worker_options({}, {variable: text})
    [problem] = caught.value.problems
    assert problem.code == "DT621"
    assert str(problem.message).startswith(f"{variable}={text} ")
    assert problem.fix_texts[0].startswith(f"export {variable}=")


def test_all_mistakes_are_reported_at_once() -> None:
    given = {"slots": 0, "lease_ms": "1ms", "isolation": "container", "queues": [], "recycle_bytes": "much"}
    with pytest.raises(ConfigError) as caught:
        worker_options(given, {"USE_GPU": "2"})
    assert len(caught.value.problems) == 6


def test_a_worker_of_threads_cannot_have_a_job_timeout() -> None:
    with pytest.raises(ConfigError, match="a thread cannot be interrupted"):
        worker_options({"isolation": "thread"}, {"JOB_TIMEOUT": "60"})


@pytest.mark.parametrize(("cpus", "jobs"), [(1, 1), (2, 1), (3, 1), (4, 2), (7, 2), (8, 4), (64, 4)])
def test_cpu_slots_are_the_lower_end_of_the_guides_table(cpus: int, jobs: int) -> None:
    assert auto_slots(1000 * cpus, ()) == jobs


@pytest.mark.parametrize(
    ("memory", "jobs"), [(4 * GB, 1), (8 * GB, 1), (15 * GB, 1), (15.7 * GB, 2), (16 * GB, 2), (80 * GB, 2)]
)
def test_gpu_slots_are_the_lower_end_of_the_guides_table(memory: float, jobs: int) -> None:
    assert auto_slots(64_000, [Gpu("gpu", int(memory))]) == jobs


def test_the_resources_of_a_worker_are_a_specification_or_an_object() -> None:
    node, is_given = worker_node("8cpu, 32GB, 2xA100, licence=2")
    assert is_given
    assert (node.cpu_milli, len(node.gpus), node.custom) == (8000, 2, (("licence", 2000),))
    node, _ = worker_node(Resources(cpus=2, memory="4GB"))
    assert (node.cpu_milli, node.memory_bytes) == (2000, 4 * GB)


@pytest.mark.parametrize("resources", ["2x(4cpu)", "no such thing", 3])
def test_bad_resources_of_a_worker_are_errors(resources: Any) -> None:
    with pytest.raises(ConfigError):
        worker_node(resources)


def test_the_device_is_an_index_or_the_start_of_a_uuid() -> None:
    cards = (Gpu("A100", 40 * GB, uuid="GPU-aaa1"), Gpu("A100", 40 * GB, uuid="GPU-bbb2"))
    node = Cluster.parse("4cpu").nodes[0].__class__("n", 4000, gpus=cards)
    for device, position in (("1", 1), ("GPU-b", 1), ("GPU-aaa1", 0)):
        assert chosen_cards(node, worker_options({"use_gpu": True, "gpu_device": device}, {})) == (position,)
    assert chosen_cards(node, worker_options({"use_gpu": True}, {})) == (0, 1)
    assert chosen_cards(node, worker_options({}, {})) is None
    with pytest.raises(ConfigError, match=r'there is no such GPU(.|\n)*fix  gpu_device="0"'):
        chosen_cards(node, worker_options({"gpu_device": "2"}, {}))


def test_a_gpu_worker_on_a_machine_without_gpus_is_an_error() -> None:
    node = Cluster.parse("4cpu").nodes[0]
    with pytest.raises(ConfigError, match=r"this machine has no usable one(.|\n)*fix  use_gpu=False"):
        chosen_cards(node, worker_options({}, {"USE_GPU": "1"}))


# --- isolation


def isolation(function: str, shape: Shape = NO_RESOURCES, default: str | None = None, **spec: Any) -> str:
    found = Application.load([APP]).find(f"{APP}:{function}")
    options = worker_options({"isolation": default}, {})
    return isolation_of(JobSpec("1", f"{APP}:{function}", **spec), shape, found, options)


def test_a_job_runs_in_a_process_unless_it_is_a_coroutine() -> None:
    assert isolation("noop") == "process"
    assert isolation("async_add") == "async"


def test_the_default_of_the_worker_applies_to_jobs_that_need_nothing() -> None:
    assert isolation("noop", default="thread") == "thread"
    assert isolation("async_add", default="thread") == "thread"
    assert isolation("noop", default="async") == "process"


def test_what_only_a_process_can_keep_needs_a_process() -> None:
    assert isolation("noop", Resources(gpus=0.5).shape(), default="thread") == "process"
    assert isolation("noop", Resources(memory="1GB").shape(), default="thread") == "process"
    assert isolation("noop", default="thread", timeout_ms=1000) == "process"
    assert isolation("async_add", timeout_ms=1000) == "async"
    assert isolation("noop", Resources(cpus=2).shape(), default="thread") == "thread"


def test_what_the_job_says_counts() -> None:
    assert isolation("noop", Resources(gpus=1).shape(), isolation="thread") == "thread"
    assert isolation("async_add", isolation="process") == "process"
    with pytest.raises(ConfigError, match="not a coroutine function"):
        isolation("noop", isolation="async")
    with pytest.raises(ConfigError, match="cannot keep a timeout of 2 s"):
        isolation("noop", isolation="thread", timeout_ms=2000)


# --- capacity


def capacity(resources: str, slots: int | None = None, cards: tuple[int, ...] = ()) -> WorkerCapacity:
    node = Cluster.parse(resources).nodes[0]
    found = WorkerCapacity(node, slots, cards)
    found.set_limit(node_amounts(node))
    return found


def test_slots_limit_all_jobs() -> None:
    found = capacity("8cpu", 2)
    assert found.free_slots() == 2
    assert found.try_take(NO_RESOURCES) == (True, None)
    fits, seat = found.try_take(Resources(cpus=1).shape())
    assert fits
    assert found.free_slots() == 0
    found.release(seat)
    assert found.free_slots() == 1


def test_auto_slots_limit_only_jobs_without_resources() -> None:
    found = capacity("4cpu")
    assert found.free_slots() == 2
    for _ in range(3):
        assert found.try_take(Resources(cpus=1).shape())[0]
        assert found.free_slots() == 2
    for left in (1, 0):
        found.try_take(NO_RESOURCES)
        assert found.free_slots() == left


def test_seats_are_taken_and_given_back() -> None:
    found = capacity("4cpu, 8GB, 2xA100")
    one = Resources(cpus=1, gpus=1).shape()
    seats = [found.try_take(one)[1] for _ in range(2)]
    assert [seat.gpus for seat in seats if seat] == [(0,), (1,)]
    assert found.try_take(one) == (False, None)
    found.release(seats[0])
    fits, seat = found.try_take(one)
    assert fits
    assert seat is not None
    assert seat.gpus == (0,)
    assert found.free().cpu_milli == 2000


def test_a_smaller_limit_applies_to_what_is_free() -> None:
    found = capacity("4cpu")
    fits, seat = found.try_take(Resources(cpus=3).shape())
    assert fits
    node = found.node
    found.set_limit({(node.name, -1, "cpu_milli"): 2000})
    assert found.free().cpu_milli == 0
    found.release(seat)
    assert found.free().cpu_milli == 2000


def test_the_environment_of_a_job_has_its_cards_and_threads() -> None:
    found = capacity("8cpu, 2xA100", 2)
    _, seat = found.try_take(Resources(cpus=3, gpus=1).shape())
    variables = found.environment({"HOME": "/root", "CUDA_VISIBLE_DEVICES": "5"}, seat)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["OMP_NUM_THREADS"]) == ("0", "3")
    plain = found.environment({}, None)
    assert (plain["CUDA_VISIBLE_DEVICES"], plain["OMP_NUM_THREADS"]) == ("", "4")


def test_jobs_without_resources_see_the_cards_of_a_gpu_worker() -> None:
    found = capacity("8cpu, 2xA100", 2, (1,))
    assert found.environment({}, None)["CUDA_VISIBLE_DEVICES"] == "1"
