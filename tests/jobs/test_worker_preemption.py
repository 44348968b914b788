"""Preemption in workers: the notice, the grace, and the room that goes to the other job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dovetail.jobs.job import JobState, Outcome
from dovetail.resources.resources import Resources
from jobs.worker_aids import (
    is_running,
    memory_queue,
    running_worker,
    text_in,
    wait_for_file,
    wait_for_state,
)
from jobs.worker_app import APP
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.jobs.job_handle import Job
    from dovetail.jobs.queue import Queue
    from dovetail.jobs.workers.worker import Worker

ALL_CPUS = Resources(cpus=4)
LONG_GRACE, NO_GRACE = "10m", "1ms"


@pytest.fixture(scope="module")
def shared_queue() -> Iterator[Queue]:
    with memory_queue() as found:
        yield found


@pytest.fixture(scope="module")
def shared_worker(shared_queue: Queue) -> Iterator[Worker]:
    with running_worker(shared_queue, kill_grace="10m", lease="10m") as worker:
        yield worker


@pytest.fixture
def queue(shared_queue: Queue, shared_worker: Worker) -> Queue:
    assert shared_worker.get_status()["state"] in ("starting", "running")
    return shared_queue


def submit(jobs: Queue, function: str, *args: Any, **options: Any) -> Job:
    given: dict[str, Any] = {"isolation": "process", "resources": ALL_CPUS, "preemption_grace": LONG_GRACE}
    found: Job = jobs.submit(f"{APP}:{function}", *map(str, args), **given | options)
    return found


def outcomes(job: Job) -> list[Outcome]:
    return [attempt.outcome for attempt in job.attempts]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_preempted_job_resumes_from_its_checkpoint(queue: Queue, tmp_path: Path, isolation: str) -> None:
    job = submit(
        *(queue, "count_with_checkpoint", tmp_path / "checkpoint", tmp_path / "began"),
        preemptible=True,
        isolation=isolation,
        retries=0,
    )
    for _ in range(3):
        wait_for_file(tmp_path / "began")
        (tmp_path / "began").unlink()
        assert submit(queue, "noop", priority="high").result(60) is None
    assert job.result(60) == {"steps": 3, "attempt": 4}
    assert outcomes(job) == [*[Outcome.PREEMPTED] * 3, Outcome.SUCCEEDED]
    assert job.attempts[0].error == "it made room for a job of higher priority; this attempt does not count"


def test_a_preempted_coroutine_resumes_from_its_checkpoint(queue: Queue, tmp_path: Path) -> None:
    job = submit(
        *(queue, "count_with_checkpoint_async", tmp_path / "checkpoint", tmp_path / "began"),
        preemptible=True,
        isolation="async",
    )
    wait_for_file(tmp_path / "began")
    assert submit(queue, "noop", priority="high").result(60) is None
    assert job.result(60) == "saved"


def test_a_job_that_does_not_check_for_preemption_gets_sigterm_at_once(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "save_on_sigterm", tmp_path / "began", tmp_path / "saved", preemptible=True)
    wait_for_file(tmp_path / "began")
    assert submit(queue, "noop", priority="high").result(60) is None
    assert job.result(60) == "saved"
    assert outcomes(job) == [Outcome.PREEMPTED, Outcome.SUCCEEDED]


def test_a_job_that_ignores_the_request_is_ended_after_the_grace(queue: Queue, tmp_path: Path) -> None:
    job = submit(
        queue, "ignore_checkpoint_request", tmp_path / "began", preemptible=True, preemption_grace=NO_GRACE, retries=0
    )
    pid = int(text_in(tmp_path / "began"))
    assert submit(queue, "noop", priority="high").result(60) is None
    until(lambda: not is_running(pid), f"{pid} has ended")
    assert outcomes(job)[:1] == [Outcome.PREEMPTED]
    job.cancel()
    wait_for_state(job, JobState.CANCELLED)


def test_a_job_that_is_not_preemptible_keeps_its_room(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "wait_for_file", tmp_path / "go", tmp_path / "began")
    wait_for_file(tmp_path / "began")
    high = submit(queue, "noop", priority="high")
    (tmp_path / "go").write_text("done")
    assert (job.result(60), high.result(60)) == ("done", None)
    assert outcomes(job) == [Outcome.SUCCEEDED]


def test_a_job_that_was_not_asked_cannot_end_as_preempted(queue: Queue) -> None:
    job = submit(queue, "raise_preempted", preemptible=True, retries=0)
    assert job.wait(60) is JobState.FAILED
    assert job.error == "JobPreempted was raised, but dt.current_job().checkpoint_requested was not true"


def test_a_job_that_makes_room_can_be_cancelled_at_once(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "ignore_checkpoint_request", tmp_path / "began", preemptible=True)
    wait_for_file(tmp_path / "began")
    high = submit(queue, "noop", priority="high")
    until(lambda: job.record().preempted_for == high.id, "its preemption is requested")
    job.cancel()
    wait_for_state(job, JobState.CANCELLED)
    assert high.result(60) is None
