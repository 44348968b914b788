"""Gangs on two workers: their variables, their output, and that the end of one member ends all."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.errors import ConfigError
from dovetail.jobs.job import JobState, Outcome
from dovetail.resources.resources import Resources
from jobs.worker_aids import is_running, memory_queue, running_worker, wait_for_file, wait_for_state, write
from jobs.worker_app import APP
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.jobs.job_handle import Job
    from dovetail.jobs.queue import Queue

RANKS = 3
"""Two on the worker with two slots, and one on the other one."""


@pytest.fixture(scope="module")
def queue() -> Iterator[Queue]:
    with memory_queue() as found:
        options: dict[str, Any] = {"kill_grace": 0.5, "slots": 2}
        with running_worker(found, worker_id="w1", **options), running_worker(found, worker_id="w2", **options):
            until(lambda: {info.id for info in found.store.workers() if info.offer} == {"w1", "w2"}, "both offer slots")
            yield found


def submit(jobs: Queue, function: str, *args: Any, **options: Any) -> Job:
    found: Job = jobs.submit(f"{APP}:{function}", *args, **{"ranks": RANKS, **options})
    return found


def members(folder: Path, attempt: int, ranks: int = RANKS) -> list[dict[str, Any]]:
    """Text written by each rank of an attempt."""
    paths = [folder / f"{rank}.{attempt}" for rank in range(ranks)]
    for path in paths:
        wait_for_file(path)
    return [json.loads(path.read_text()) for path in paths]


def assert_nothing_runs(queue: Queue, processes: list[dict[str, Any]]) -> None:
    pids = [process["pid"] for process in processes]
    until(lambda: not any(map(is_running, pids)), f"{pids} have ended")
    until(lambda: all(info.offer and info.offer.slots == 2 for info in queue.store.workers()), "all slots are free")


def outcomes(job: Job) -> list[Outcome]:
    return [attempt.outcome for attempt in job.attempts]


def test_the_ranks_of_a_gang_have_the_variables_of_torchrun(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "gang_member", str(tmp_path))
    found = members(tmp_path, 1)
    workers = [one["worker"] for one in found]
    assert (workers[0], {*workers}) == (workers[1], {"w1", "w2"})
    assert [(one["RANK"], one["WORLD_SIZE"]) for one in found] == [("0", "3"), ("1", "3"), ("2", "3")]
    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in found] == [("0", "2"), ("1", "2"), ("0", "1")]
    [(host, port)] = {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found}
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    record = job.record()
    assert record.gang is not None
    assert (record.gang.workers, record.gang.address) == (tuple(workers), f"{host}:{port}")
    write(tmp_path / "go", "")
    assert job.result(PATIENCE_S)["RANK"] == "0"
    assert_nothing_runs(queue, found)
    assert [job.logs(rank=rank).split(" ", 1)[1] for rank in range(RANKS)] == [
        f"rank {rank} of 3\n" for rank in range(3)
    ]


def test_a_job_after_a_gang_has_none_of_its_variables(queue: Queue) -> None:
    for _ in range(2):
        ranks = [submit(queue, "environment", "RANK", "MASTER_PORT") for _ in range(2)]
        assert [job.result(PATIENCE_S)["RANK"] for job in ranks] == ["0", "0"]
        jobs = [submit(queue, "environment", "RANK", "MASTER_PORT", ranks=1) for _ in range(4)]
        assert [job.result(PATIENCE_S) for job in jobs] == [{"RANK": None, "MASTER_PORT": None}] * 4


def test_the_failure_of_a_rank_ends_all_and_they_are_retried_as_a_whole(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "gang_member", str(tmp_path), 1, retries={"error": 1, "backoff": "1ms"})
    first, second = members(tmp_path, 1), members(tmp_path, 2)
    until(lambda: not any(is_running(one["pid"]) for one in first), "the first attempt has ended")
    write(tmp_path / "go", "")
    job.result(PATIENCE_S)
    [failed, _] = job.attempts
    assert outcomes(job) == [Outcome.ERROR, Outcome.SUCCEEDED]
    assert failed.error == f"rank 1 on {first[1]['worker']}: ValueError: rank 1"
    assert_nothing_runs(queue, second)


def test_a_killed_rank_ends_all_and_they_are_retried_as_a_whole(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "gang_member", str(tmp_path))
    first = members(tmp_path, 1)
    os.kill(first[2]["pid"], signal.SIGKILL)
    second = members(tmp_path, 2)
    until(lambda: not any(is_running(one["pid"]) for one in first), "the first attempt has ended")
    write(tmp_path / "go", "")
    job.result(PATIENCE_S)
    assert outcomes(job) == [Outcome.LOST, Outcome.SUCCEEDED]
    assert_nothing_runs(queue, second)


def test_a_timeout_applies_to_all_ranks(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "gang_member", str(tmp_path), timeout=0.3, retries=0)
    assert job.wait(PATIENCE_S) is JobState.FAILED
    assert "it did not end within its timeout of 0.3 s" in job.error
    until(lambda: all(info.offer and info.offer.slots == 2 for info in queue.store.workers()), "all slots are free")


def test_the_cancellation_of_a_gang_ends_all_its_ranks(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "gang_member", str(tmp_path))
    found = members(tmp_path, 1)
    job.cancel()
    wait_for_state(job, JobState.CANCELLED)
    assert_nothing_runs(queue, found)


def test_a_gang_waits_until_all_its_ranks_fit(queue: Queue, tmp_path: Path) -> None:
    blocker = submit(queue, "wait_for_file", str(tmp_path / "free"), str(tmp_path / "blocks"), ranks=1)
    wait_for_file(tmp_path / "blocks")
    job = submit(queue, "gang_member", str(tmp_path), ranks=4)
    assert submit(queue, "add", 1, ranks=1, isolation="process").result(PATIENCE_S) == 1
    assert job.status is JobState.READY
    assert list(tmp_path.glob("*.1")) == []
    write(tmp_path / "free", "free")
    assert len(members(tmp_path, 1, 4)) == 4
    write(tmp_path / "go", "")
    job.result(PATIENCE_S)
    assert blocker.result(0) == "free"


def test_a_preempted_gang_resumes_from_the_checkpoints_of_its_ranks(queue: Queue, tmp_path: Path) -> None:
    job = submit(
        queue, "gang_with_checkpoints", str(tmp_path), preemptible=True, preemption_grace="10m", ranks=4, retries=0
    )
    for rank in range(4):
        wait_for_file(tmp_path / f"began{rank}")
    assert submit(queue, "add", 1, ranks=1, priority="high", isolation="process").result(PATIENCE_S) == 1
    assert job.result(PATIENCE_S) == 2
    assert outcomes(job) == [Outcome.PREEMPTED, Outcome.SUCCEEDED]


def test_the_ranks_of_a_gang_form_a_process_group_of_torch(queue: Queue) -> None:
    pytest.importorskip("torch")
    job = submit(queue, "sum_over_ranks", 1.0, ranks=2, resources=Resources(cpus=3))
    assert job.result(PATIENCE_S) == 1002.0


def test_a_gang_needs_processes(queue: Queue) -> None:
    with pytest.raises(ConfigError, match="isolation='thread' cannot run a gang"):
        submit(queue, "add", 1, isolation="thread")
