"""Seconds of work that wait in queues, by resource class and by kind of worker."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dovetail.jobs import work_signal
from dovetail.jobs.job import Attempt, JobRecord, JobSpec, JobState, Outcome
from dovetail.jobs.metrics import render, work_families
from dovetail.jobs.store import QueueStats, WorkerInfo
from dovetail.jobs.work_signal import WorkReader, mean_seconds, queued_work, resource_class, worker_kind
from dovetail.resources.resources import Resources
from jobs.worker_aids import memory_queue, running_worker
from jobs.worker_app import APP

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape

CPU, GPU = Resources(cpus=2).shape(), Resources(cpus=1, gpus=1).shape()
CPU_WORKER = WorkerInfo("c", ("q",), 4, {"resources": "(8cpu, 16GB)"})
GPU_WORKER = WorkerInfo("g", ("q",), 4, {"resources": "(8cpu, 16GB, 2xA100:40GB)"})


def record(function: str = "m:f", shape: Shape = CPU, *attempts: tuple[int, Outcome]) -> JobRecord:
    """A job of the queue q; attempts by their milliseconds."""
    ended = tuple(Attempt(1, 1, "w", 1000, 1000 + took, outcome) for took, outcome in attempts)
    spec = JobSpec("1", function, queue="q", shape=shape)
    return JobRecord(spec, JobState.READY, shape, 0, 0, attempts=ended)


def stats(cpu: int = 0, gpu: int = 0) -> QueueStats:
    shapes = {shape: count for shape, count in ((CPU, cpu), (GPU, gpu)) if count}
    return QueueStats("q", {JobState.READY: cpu + gpu}, False, None, shapes)


def test_the_time_of_a_function_is_the_mean_of_attempts_that_succeeded() -> None:
    ok, error = Outcome.SUCCEEDED, Outcome.ERROR
    found = mean_seconds(
        [record("m:f", CPU, (90_000, error), (1000, ok)), record("m:f", CPU, (3000, ok)), record("m:g")]
    )
    assert found == {"m:f": 2.0}


def test_work_is_queued_jobs_times_the_time_of_their_functions_by_class() -> None:
    ready = [record("m:f"), record("m:f"), record("m:g", GPU)]
    found = queued_work(ready, [stats(cpu=2, gpu=1)], {"m:f": 2.0, "m:g": 60.0}, ())
    assert found.seconds == {("q", "cpu"): 4.0, ("q", "1 GPU"): 60.0}
    assert found.unmeasured == {}


def test_jobs_of_functions_that_were_not_measured_are_counted_apart() -> None:
    found = queued_work([record("m:f"), record("m:new")], [stats(cpu=2)], {"m:f": 2.0}, [CPU_WORKER])
    assert found.seconds == {("q", "cpu"): 2.0}
    assert found.unmeasured == {("q", "cpu"): 1}
    assert (found.kind_seconds, found.kind_unmeasured) == ({"cpu": 2.0}, {"cpu": 1})


def test_jobs_that_were_not_read_are_counted_apart() -> None:
    found = queued_work([record("m:f")], [stats(cpu=1000)], {"m:f": 2.0}, ())
    assert (found.seconds, found.unmeasured) == ({("q", "cpu"): 2.0}, {("q", "cpu"): 999})


def test_jobs_that_were_claimed_meanwhile_do_not_count() -> None:
    found = queued_work([record("m:f")] * 3, [stats(cpu=2)], {"m:f": 2.0}, ())
    assert found.seconds == {("q", "cpu"): 4.0}


def test_a_paused_queue_needs_no_workers() -> None:
    found = queued_work([record("m:f")], [replace(stats(cpu=1), paused=True)], {"m:f": 2.0}, [CPU_WORKER])
    assert (found.seconds, found.unmeasured, found.kind_seconds) == ({}, {}, {"cpu": 0.0})


def test_work_counts_for_the_kind_of_worker_that_runs_it() -> None:
    ready, means = [record("m:f"), record("m:g", GPU)], {"m:f": 2.0, "m:g": 60.0}
    counts = [stats(cpu=1, gpu=1)]
    both = queued_work(ready, counts, means, [CPU_WORKER, GPU_WORKER]).kind_seconds
    assert both == {"cpu": 2.0, "2xA100": 60.0}
    assert queued_work(ready, counts, means, [GPU_WORKER]).kind_seconds == {"2xA100": 62.0}
    assert queued_work(ready, counts, means, [CPU_WORKER]).kind_seconds == {"cpu": 2.0, "none": 60.0}


def test_classes_and_kinds_have_names() -> None:
    assert resource_class(Resources(cpus=64, memory="1GB").shape()) == "cpu"
    assert resource_class(Resources(cpus=64, gpus=0.25).shape()) == "0.25 GPU"
    assert resource_class(Resources(gpu_memory="6GB").shape()) == "6GB of a GPU"
    assert worker_kind(WorkerInfo("w")) == "cpu"
    assert worker_kind(replace(GPU_WORKER, details={**GPU_WORKER.details, "gpu_enabled": False})) == "cpu"


def test_the_metrics_have_the_work() -> None:
    found = queued_work([record("m:f"), record("m:g")], [stats(cpu=2)], {"m:f": 2.5}, [CPU_WORKER])
    lines = render(work_families(found)).splitlines()
    for line in (
        'dovetail_queue_work_seconds{queue="q",class="cpu"} 2.5',
        'dovetail_queue_unmeasured_jobs{queue="q",class="cpu"} 1',
        'dovetail_worker_kind_work_seconds{kind="cpu"} 2.5',
        'dovetail_worker_kind_unmeasured_jobs{kind="cpu"} 1',
        'dovetail_function_seconds{function="m:f"} 2.5',
    ):
        assert line in lines


def test_the_work_of_a_store_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_signal, "PAGE", 2)
    with memory_queue() as queue:
        with running_worker(queue):
            queue.submit(f"{APP}:add", 1, isolation="thread").result(60)
        queue.submit_many(f"{APP}:add", [1, 2, 3, 4, 5])
        queue.submit(f"{APP}:noop")
        reader = WorkReader(queue.store)
        work = reader.read()
        assert work.seconds[("default", "cpu")] == pytest.approx(5 * work.function_seconds[f"{APP}:add"])
        assert work.unmeasured == {("default", "cpu"): 1}
        queue.submit(f"{APP}:noop")
        assert reader.read() is work
