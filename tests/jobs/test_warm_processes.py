"""Warm processes: jobs one after another with models that stay, and what ends such a process. Memory store."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.errors import ConfigError, JobError
from dovetail.jobs.job import JobState, Outcome
from dovetail.jobs.job_function import job as declare
from dovetail.jobs.metrics import metrics_text
from dovetail.resources.resources import Resources
from jobs.worker_aids import is_running, memory_queue, running_worker, text_in, wait_for_file, wait_for_state, write
from jobs.worker_app import APP
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.jobs.job_handle import Job
    from dovetail.jobs.queue import Queue
    from dovetail.jobs.workers.worker import Worker

MB = 1 << 20
KILL_GRACE_S = 1.0

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def queue() -> Iterator[Queue]:
    with memory_queue() as found:
        yield found


@pytest.fixture(scope="module")
def worker(queue: Queue) -> Iterator[Worker]:
    with running_worker(queue, kill_grace=KILL_GRACE_S, slots=3) as found:
        yield found


@pytest.fixture(autouse=True)
def _used(worker: Worker) -> None:
    """All tests of this module share the worker, unless they start another one with a queue of its own."""


def submit(queue: Queue, function: str, *args: Any, **options: Any) -> Job:
    found: Job = queue.submit(f"{APP}:{function}", *args, **{"isolation": "warm_process"} | options)  # type: ignore[assignment]
    return found


def keys(worker: Worker) -> set[str]:
    return {model["key"] for model in worker.get_status()["models"]["models"]}


def test_jobs_one_after_another_share_a_process_and_its_model(queue: Queue) -> None:
    jobs: list[Job] = []
    results = []
    for _ in range(4):
        jobs.append(submit(queue, "use_model", "shared"))
        results.append(jobs[-1].result(60))
    assert [result["uses"] for result in results] == [1, 2, 3, 4]
    assert len({result["pid"] for result in results}) == 1
    assert {job.record().attempts[0].exit_code for job in jobs} == {0}
    assert [line.split(" ", 1)[1] for line in jobs[2].logs().splitlines()] == ["using shared"]


def test_an_exception_leaves_the_process_and_its_models(queue: Queue) -> None:
    first = submit(queue, "use_model", "survivor").result(60)
    with pytest.raises(JobError, match="no such model"):
        submit(queue, "fail", "no such model", retries=0).result(60)
    assert submit(queue, "use_model", "survivor").result(60) == first | {"uses": 2}


def test_a_job_goes_to_the_process_that_holds_its_model(queue: Queue, tmp_path: Path) -> None:
    names = ["left", "right"]
    go = tmp_path / "go"
    jobs = [submit(queue, "use_model", name, MB, str(tmp_path / name), str(go)) for name in names]
    for name in names:
        wait_for_file(tmp_path / name)  # both run at the same time
    go.touch()
    pids = {name: job.result(60)["pid"] for name, job in zip(names, jobs, strict=True)}
    assert len(set(pids.values())) == 2
    for name in [*names, *reversed(names)]:
        assert submit(queue, "use_model", name).result(60)["pid"] == pids[name]


def test_a_killed_process_is_a_lost_attempt_and_its_bytes_are_free(
    queue: Queue, worker: Worker, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    other = submit(queue, "use_model", "other", MB, str(tmp_path / "other"), str(go))
    job = submit(queue, "use_model", "victim", MB, str(tmp_path / "began"), str(go))
    wait_for_file(tmp_path / "other")
    pid = int(text_in(tmp_path / "began"))
    (tmp_path / "began").unlink()
    os.kill(pid, signal.SIGKILL)
    wait_for_file(tmp_path / "began")
    status = worker.get_status()
    models = status["models"]["models"]
    assert status["used"]["memory_bytes"] == sum(model["bytes"] for model in models)
    assert pid not in [model["pid"] for model in models]
    assert [model["key"] for model in models].count("victim") == 1
    go.touch()
    assert job.result(60)["uses"] == 1
    assert [attempt.outcome for attempt in job.record().attempts] == [Outcome.LOST, Outcome.SUCCEEDED]
    assert [attempt.outcome for attempt in (other.result(60) and other.record().attempts)] == [Outcome.SUCCEEDED]


def test_a_timeout_ends_the_process_and_frees_its_models(queue: Queue, worker: Worker, tmp_path: Path) -> None:
    job = submit(
        queue, "use_model", "late", MB, str(tmp_path / "began"), str(tmp_path / "never"), timeout="2s", retries=0
    )
    wait_for_state(job, JobState.FAILED)
    assert job.record().attempts[0].outcome is Outcome.TIMEOUT
    assert not is_running(int(text_in(tmp_path / "began")))
    assert "late" not in keys(worker)


def test_the_timeout_of_an_earlier_job_does_not_end_a_later_one(queue: Queue, tmp_path: Path) -> None:
    first = submit(queue, "use_model", "timed", timeout="2s").result(60)
    later = submit(queue, "use_model", "timed", MB, str(tmp_path / "began"), str(tmp_path / "go"), timeout="1h")
    assert int(text_in(tmp_path / "began")) == first["pid"]
    submit(queue, "sleep", str(tmp_path / "slept"), 2.1, isolation="process").result(60)  # until the first is over
    (tmp_path / "go").touch()
    assert later.result(60) == first | {"uses": 2}


def test_a_cancelled_job_that_ends_by_itself_keeps_the_process(queue: Queue, tmp_path: Path) -> None:
    pid = submit(queue, "who_am_i").result(60)["pid"]
    job = submit(queue, "until_cancelled", str(tmp_path / "began"), str(tmp_path / "ended"))
    assert int(text_in(tmp_path / "began")) == pid
    job.cancel()
    assert job.result(60) == "cancelled"
    assert submit(queue, "who_am_i").result(60)["pid"] == pid


def test_a_job_that_leaves_a_process_ends_its_own(queue: Queue, tmp_path: Path) -> None:
    pid = submit(queue, "who_am_i").result(60)["pid"]
    submit(queue, "leave_a_process", str(tmp_path)).result(60)
    [left] = [int(path.name) for path in tmp_path.iterdir()]
    until(lambda: not is_running(left) and not is_running(pid))


def test_memory_of_earlier_jobs_and_models_is_not_that_of_a_job(queue: Queue) -> None:
    resources = Resources(cpus=0, memory="64MB")
    for _ in range(2):
        assert submit(queue, "keep_bytes", 48 * MB, resources=resources, retries=0).result(60)
    with pytest.raises(JobError, match="had requested 64MB"):
        submit(queue, "allocate", 256 * MB, resources=resources, retries=0).result(60)


def test_an_idle_model_of_another_process_is_evicted_for_a_load(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with memory_queue() as queue, running_worker(queue, resources="4cpu, 1GB") as worker:
        size = 600 * MB
        held = submit(queue, "use_model", "idle", size).result(60)
        blocker = submit(queue, "wait_for_file", str(go), str(tmp_path / "began"))  # takes the process with the model
        assert int(text_in(tmp_path / "began")) == held["pid"]
        assert submit(queue, "use_model", "new", size).result(60)["pid"] != held["pid"]
        assert keys(worker) == {"new"}
        write(go, "x")
        blocker.result(60)
        status = worker.get_status()
        assert (status["models"]["evictions"], status["used"]["memory_bytes"]) == (1, size)
        text = metrics_text(status, None)
        assert 'dovetail_worker_model_evictions_total{worker="' in text
        assert f'device="host"}} {size}' in text


def test_a_job_gets_the_memory_of_idle_models() -> None:
    with memory_queue() as queue, running_worker(queue, resources="4cpu, 1GB") as worker:
        submit(queue, "use_model", "idle", 800 * MB).result(60)
        submit(queue, "noop", resources=Resources(cpus=1, memory="512MB"), isolation="process").result(60)
        assert keys(worker) == set()
        assert worker.get_status()["totals"] == {"succeeded": 2}


def test_a_process_is_replaced_after_a_number_of_jobs() -> None:
    with memory_queue() as queue, running_worker(queue, recycle_jobs=2, slots=1):
        found = [submit(queue, "use_model", "m").result(60) for _ in range(5)]
    assert [one["uses"] for one in found] == [1, 2, 1, 2, 1]


def test_models_need_no_more_than_the_worker_has(queue: Queue) -> None:
    with pytest.raises(JobError, match="the worker may use 4GB"):
        submit(queue, "use_model", "huge", 1 << 40, retries=0).result(60)
    with pytest.raises(JobError, match='isolation="warm_process"'):
        submit(queue, "use_model", "m", isolation="process", retries=0).result(60)


def test_threads_share_the_models_of_the_worker(queue: Queue, worker: Worker) -> None:
    found = [submit(queue, "use_model", "threads", isolation="thread").result(60) for _ in range(2)]
    assert [one["uses"] for one in found] == [1, 2]
    assert found[0]["pid"] == os.getpid()
    model = worker.models.get("threads", lambda: None, bytes=1)
    assert id(model) == found[0]["model"]
    worker.models.release("threads")


def test_no_process_is_left_when_the_worker_ends() -> None:
    with memory_queue() as queue, running_worker(queue) as worker:
        pid = submit(queue, "use_model", "m").result(60)["pid"]
        worker.stop()
        assert not is_running(pid)


def test_a_model_parameter_that_the_function_does_not_have_is_refused() -> None:
    def infer(name: str) -> None: ...

    with pytest.raises(ConfigError, match="is not a parameter of infer") as caught:
        declare(model="nam")(infer)
    assert caught.value.problems[0].fix_texts == ('model="name"',)
