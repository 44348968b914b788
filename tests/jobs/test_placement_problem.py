"""Whether any worker can run a job, and what is shown if none can."""

from __future__ import annotations

import dovetail as dt
from dovetail.jobs.job import NO_RESOURCES
from dovetail.jobs.placement_problem import placement_problem
from dovetail.jobs.store import WorkerInfo
from dovetail.jobs.worker_liveness import live_workers

CPU = WorkerInfo("cpu-1", ("default",), 4, {"resources": "(8cpu, 32GB)"}, heartbeat_ms=100_000)
GPU = WorkerInfo("gpu-1", ("default", "gpu"), 4, {"resources": "(16cpu, 64GB, 2xA100:40GB)"}, heartbeat_ms=30_000)
UNLIMITED = WorkerInfo("any-1", ("default",), 4, {})


def needs(**resources: object) -> dt.Shape:
    return dt.Resources(**resources).shape()  # type: ignore[arg-type]


def test_a_job_that_fits_on_one_worker_has_no_problem() -> None:
    assert placement_problem("default", needs(cpus=8), [CPU, GPU]) is None
    assert placement_problem("default", needs(gpus=2), [CPU, GPU]) is None
    assert placement_problem("default", NO_RESOURCES, [CPU]) is None
    assert placement_problem("default", needs(cpus=1000), [CPU, UNLIMITED]) is None
    newer = WorkerInfo("new-1", ("default",), 4, {"resources": "written by a later version"})
    assert placement_problem("default", needs(cpus=1000), [newer]) is None


def test_a_job_for_more_than_any_worker_has_shows_what_it_needs_and_what_they_have() -> None:
    problem = placement_problem("default", needs(cpus=2, gpus=4), [CPU, GPU])
    assert problem is not None
    assert problem.code == "DT616"
    assert problem.message == "no worker can run this: it needs 4 GPUs, 2 CPUs"
    assert problem.evidence == (
        "cpu-1 has (8cpu, 32GB): no GPU",
        "gpu-1 has (16cpu, 64GB, 2xA100): 2 GPUs in all, 4 needed",
    )


def test_a_queue_that_no_worker_serves_is_named_with_the_nearest_one() -> None:
    problem = placement_problem("gpus", NO_RESOURCES, [CPU, GPU])
    assert problem is not None
    assert problem.message == "no worker can run this: none serves the queue 'gpus' (did you mean 'gpu'?)"
    assert problem.evidence == ("queues with workers: default, gpu",)
    assert "no worker is running" in str(placement_problem("gpu", NO_RESOURCES, []))


def test_many_workers_are_summarised_and_silent_ones_do_not_count() -> None:
    workers = [WorkerInfo(f"w{number}", ("default",), 1, {"resources": "(1cpu, 1GB)"}) for number in range(20)]
    problem = placement_problem("default", needs(cpus=2), workers)
    assert problem is not None
    assert (len(problem.evidence), problem.evidence[-1]) == (6, "and 15 more workers")
    assert live_workers([CPU, GPU], 100_001) == [CPU]


def test_resources_of_a_worker_are_a_specification_or_the_data_of_a_cluster() -> None:
    data = dt.Cluster.of("1x(8cpu, 32GB)").to_dict()
    for resources in ("(8cpu, 32GB)", data):
        worker = WorkerInfo("w", ("default",), 4, {"resources": resources})
        found = placement_problem("default", needs(gpus=1), [worker])
        assert found is not None
        assert "no GPU" in found.evidence[0]
        assert placement_problem("default", needs(cpus=8), [worker]) is None
    unreadable = WorkerInfo("w", ("default",), 4, {"resources": {"format": "later"}})
    assert placement_problem("default", needs(gpus=1), [unreadable]) is None, "not limited, as far as is known"
