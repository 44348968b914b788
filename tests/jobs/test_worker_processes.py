"""Jobs in processes: results, limits, signals, and that nothing of a job is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.errors import JobError
from dovetail.jobs.job import JobSpec, JobState, Outcome
from dovetail.jobs.job_id import new_job_id
from dovetail.jobs.job_logs import JobLogs
from dovetail.jobs.payload_files import log_name
from dovetail.resources.resources import Resources
from jobs.worker_aids import (
    is_running,
    make_worker,
    memory_queue,
    pids_in,
    running_worker,
    text_in,
    wait_for_file,
    wait_for_state,
    write,
)
from jobs.worker_app import APP
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.jobs.job_handle import Job
    from dovetail.jobs.queue import Queue
    from dovetail.jobs.workers.worker import Worker

KILL_GRACE_S = 0.5
MARGIN_S = 1.0
"""Acceptance: gone within the grace and one second, of a machine that has a CPU for it."""
SLOW_MACHINE_S = 10.0


@pytest.fixture(scope="module")
def shared_queue() -> Iterator[Queue]:
    with memory_queue() as found:
        yield found


@pytest.fixture(scope="module")
def shared_worker(shared_queue: Queue) -> Iterator[Worker]:
    """One worker with a warm fork server for all tests that need no other one."""
    with running_worker(shared_queue, kill_grace=KILL_GRACE_S, lease="1s") as worker:
        yield worker


@pytest.fixture
def queue(shared_queue: Queue, shared_worker: Worker) -> Queue:
    assert shared_worker.get_status()["state"] in ("starting", "running")
    return shared_queue


def submit(jobs: Queue, function: str, *args: Any, **options: Any) -> Job:
    found: Job = jobs.submit(f"{APP}:{function}", *args, **{"isolation": "process"} | options)  # type: ignore[assignment]
    return found


def gone_within(pids: list[int], seconds: float) -> float:
    """Seconds until none of these processes runs."""
    began = time.monotonic()
    until(lambda: not any(map(is_running, pids)), f"{pids} have ended", timeout_s=seconds)
    return time.monotonic() - began


# --- results


def test_a_job_runs_in_a_process_and_session_of_its_own(queue: Queue, shared_worker: Worker) -> None:
    job = submit(queue, "who_am_i")
    found = job.result(60)
    assert found["pid"] == found["session"] != os.getpid()
    assert (found["id"], found["attempt"], found["token"], found["worker"]) == (job.id, 1, 1, shared_worker.id)
    attempt = job.record().attempts[0]
    assert (attempt.outcome, attempt.exit_code) == (Outcome.SUCCEEDED, 0)
    assert attempt.peak_memory_bytes
    assert attempt.peak_memory_bytes > 1 << 20


def test_each_job_has_a_fresh_process(queue: Queue) -> None:
    jobs = [submit(queue, "who_am_i") for _ in range(6)]
    assert len({job.result(60)["pid"] for job in jobs}) == 6


def test_a_coroutine_function_runs_in_a_process_too(queue: Queue) -> None:
    assert submit(queue, "async_add", 1, other=2).result(60) == 3


def test_a_large_result_arrives_whole(queue: Queue) -> None:
    assert len(submit(queue, "return_bytes", 3_000_000).result(60)) == 3_000_000


def test_an_exception_has_the_users_traceback(queue: Queue) -> None:
    job = submit(queue, "fail", "no such model", retries=0)
    with pytest.raises(JobError, match="no such model"):
        job.result(60)
    attempt = job.record().attempts[0]
    assert (attempt.outcome, attempt.error) == (Outcome.ERROR, "ValueError: no such model")
    assert "worker_app.py" in attempt.traceback
    assert "job_process.py" not in attempt.traceback


def test_cpu_seconds_are_recorded(queue: Queue) -> None:
    job = submit(queue, "burn_cpu", 0.2)
    job.result(60)
    cpu_ms = job.record().attempts[0].cpu_ms
    assert cpu_ms is not None
    assert 190 <= cpu_ms < 2000


def test_progress_of_a_process_reaches_the_store(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "report", str(tmp_path / "go"), *[step / 1000 for step in range(1001)])
    until(lambda: job.record().progress == 1.0, "the last report is in the store")
    assert job.record().message == "step 1"
    (tmp_path / "go").touch()
    job.result(60)


def test_a_refused_function_is_no_process(queue: Queue) -> None:
    job_id = new_job_id()
    queue.store.submit([JobSpec(job_id, "os:system", b'[["exit 3"],{}]')])
    wait_for_state(queue.get(job_id), JobState.FAILED)
    assert "os:system" in queue.get(job_id).record().error


# --- environment


def test_a_job_has_the_variables_of_its_seat(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DOVETAIL_INSIDE")
    assert submit(queue, "environment", *names).result(60) == dict(zip(names, ("", "1", "1"), strict=True))
    job = submit(queue, "environment", *names, resources=Resources(cpus=3))
    assert job.result(60) == dict(zip(names, ("", "3", "1"), strict=True))
    assert submit(queue, "environment", "OMP_NUM_THREADS").result(60) == {"OMP_NUM_THREADS": "1"}


def test_jobs_with_gpus_see_their_cards_only(tmp_path: Path) -> None:
    with memory_queue() as queue, running_worker(queue, resources="4cpu, 4GB, 2xA100"):
        go = str(tmp_path / "go")
        gpu = Resources(gpus=1)
        first = submit(queue, "wait_for_file", go, str(tmp_path / "began"), resources=gpu, isolation="process")
        wait_for_file(tmp_path / "began")
        second = submit(queue, "environment", "CUDA_VISIBLE_DEVICES", resources=gpu)
        assert second.result(60) == {"CUDA_VISIBLE_DEVICES": "1"}
        Path(go).touch()
        first.result(60)


# --- output


def test_the_output_of_a_job_is_kept(queue: Queue) -> None:
    job = submit(queue, "print_lines", 3)
    job.result(60)
    lines = job.logs().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["line 0", "line 1", "line 2"]


def test_output_is_visible_while_the_job_runs(queue: Queue, tmp_path: Path) -> None:
    job = queue.submit(f"{APP}:print_and_wait", str(tmp_path / "go"), isolation="process")
    until(lambda: "working" in job.logs(), "the output is visible")
    (tmp_path / "go").touch()
    job.result(60)


def test_output_has_a_limit_that_keeps_begin_and_end(tmp_path: Path) -> None:
    with memory_queue() as queue, running_worker(queue) as worker:
        worker.logs._limit_bytes = 4000
        job = submit(queue, "print_lines", 5000)
        job.result(60)
        text = job.logs()
    assert len(text) <= 4000
    assert "line 0\n" in text
    assert text.endswith("line 4999\n")
    assert "of output omitted]" in text


def test_an_empty_file_is_used_again_unless_a_process_may_write_to_it(tmp_path: Path) -> None:
    logs = JobLogs(None, tmp_path)
    silent = logs.open([log_name("silent", 1)])
    inode = os.fstat(silent.fd).st_ino
    logs.close(silent, has_writers=False)
    loud = logs.open([log_name("loud", 1)])
    assert os.fstat(loud.fd).st_ino == inode
    os.write(loud.fd, b"text\n")
    logs.close(loud, has_writers=False)
    left_open = logs.open([log_name("left", 1)])
    writer = os.dup(left_open.fd)
    logs.close(left_open)
    later = logs.open([log_name("later", 1)])
    os.write(writer, b"of another job\n")
    os.write(later.fd, b"its own\n")
    logs.close(later, has_writers=False)
    os.close(writer)
    found = {name: logs.read(name, 1) for name in ("silent", "loud", "left", "later")}
    assert found == {"silent": "", "loud": "text\n", "left": "", "later": "its own\n"}


# --- ends


@pytest.mark.parametrize(("number", "text"), [(signal.SIGKILL, "signal 9 (SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
def test_a_job_whose_process_is_killed_is_lost_and_runs_again(queue: Queue, number: int, text: str) -> None:
    job = submit(queue, "kill_itself", int(number), retries={"lost": 2})
    wait_for_state(job, JobState.DEAD)
    attempts = job.record().attempts
    assert [attempt.outcome for attempt in attempts] == [Outcome.LOST] * 3
    assert text in attempts[0].error
    assert attempts[0].exit_code == -number


def test_an_exit_without_a_result_is_a_loss_with_its_code(queue: Queue) -> None:
    job = submit(queue, "leave", 3, retries=0)
    wait_for_state(job, JobState.FAILED)
    attempt = job.record().attempts[0]
    assert (attempt.outcome, attempt.exit_code) == (Outcome.LOST, 3)
    assert "exit code 3" in attempt.error


def test_sys_exit_is_an_error(queue: Queue) -> None:
    job = submit(queue, "system_exit", 3, retries=0)
    wait_for_state(job, JobState.FAILED)
    assert job.record().error == "SystemExit: 3"


# --- limits


@pytest.mark.parametrize("function", ["sleep", "hold_the_gil"])
def test_a_timeout_ends_any_code_within_the_grace(queue: Queue, tmp_path: Path, function: str) -> None:
    began = tmp_path / "began"
    job = submit(queue, function, str(began), timeout="700ms", retries=0)
    pid = int(text_in(began))
    waited = time.monotonic()
    wait_for_state(job, JobState.FAILED)
    took = time.monotonic() - waited
    assert not is_running(pid)
    record = job.record()
    assert (record.attempts[0].outcome, record.error) == (Outcome.TIMEOUT, "it did not end within its timeout of 0.7 s")
    assert took <= 0.7 + KILL_GRACE_S + (MARGIN_S if LONG else SLOW_MACHINE_S)


def test_a_timeout_ends_a_tree_of_processes_in_several_sessions(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "start_a_tree", str(tmp_path), timeout="60s", retries=0)
    until(lambda: len(pids_in(tmp_path)) == 5, "the tree is complete")
    pids = pids_in(tmp_path)
    assert all(map(is_running, pids))
    queue.cancel(job)
    took = gone_within(pids, KILL_GRACE_S + SLOW_MACHINE_S)
    assert took <= KILL_GRACE_S + (MARGIN_S if LONG else SLOW_MACHINE_S)
    wait_for_state(job, JobState.CANCELLED)


def test_processes_that_a_finished_job_has_left_are_killed(queue: Queue, tmp_path: Path) -> None:
    submit(queue, "leave_a_process", str(tmp_path)).result(60)
    [pid] = pids_in(tmp_path)
    gone_within([pid], SLOW_MACHINE_S)


def test_a_job_can_clean_up_at_its_timeout(queue: Queue, tmp_path: Path) -> None:
    job = submit(
        queue, "sleep_with_clean_up", str(tmp_path / "began"), str(tmp_path / "cleaned"), timeout="1s", retries=0
    )
    wait_for_state(job, JobState.FAILED)
    assert text_in(tmp_path / "cleaned") == "cleaned up"
    assert job.record().attempts[0].outcome is Outcome.TIMEOUT


def test_the_timeout_of_the_worker_applies_to_jobs_without_one(tmp_path: Path) -> None:
    with memory_queue() as queue, running_worker(queue, job_timeout="300ms", kill_grace=0.1):
        job = submit(queue, "sleep", str(tmp_path / "began"), retries=0)
        wait_for_state(job, JobState.FAILED)
    assert job.record().attempts[0].outcome is Outcome.TIMEOUT


def test_a_process_sees_that_it_was_cancelled(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "until_cancelled", str(tmp_path / "began"), str(tmp_path / "ended"))
    wait_for_file(tmp_path / "began")
    job.cancel()
    assert job.result(60) == "cancelled"  # it has returned a result, which counts
    assert text_in(tmp_path / "ended") == "saw it"


def test_a_job_that_does_not_check_for_cancellation_is_ended_at_once_and_can_clean_up(tmp_path: Path) -> None:
    with memory_queue() as queue, running_worker(queue, kill_grace="1h"):  # nothing waits for the grace
        job = submit(queue, "sleep_with_clean_up", str(tmp_path / "began"), str(tmp_path / "cleaned"))
        wait_for_file(tmp_path / "began")
        job.cancel()
        wait_for_state(job, JobState.CANCELLED)
    assert text_in(tmp_path / "cleaned") == "cleaned up"


def test_a_job_above_its_memory_is_ended_and_gets_more_the_next_time(queue: Queue) -> None:
    job = submit(queue, "allocate", 256 << 20, resources=Resources(cpus=0, memory="64MB"), retries={"out_of_memory": 0})
    wait_for_state(job, JobState.FAILED)
    attempt = job.record().attempts[0]
    assert attempt.outcome is Outcome.OUT_OF_MEMORY
    assert "had requested 64" in attempt.error
    assert attempt.peak_memory_bytes is not None
    assert attempt.peak_memory_bytes > 64 << 20


def test_memory_grows_until_a_job_fits(queue: Queue, tmp_path: Path) -> None:
    began = tmp_path / "began"
    retries = {"out_of_memory": 2, "backoff": 0}
    job = submit(queue, "allocate", 160 << 20, str(began), resources=Resources(cpus=0, memory="64MB"), retries=retries)
    until(lambda: job.record().shape.memory_bytes >= 160 << 20 and began.exists(), "it has enough memory")
    until(lambda: job.record().state is JobState.LEASED)
    outcomes = [attempt.outcome for attempt in job.record().attempts]
    assert outcomes in ([Outcome.OUT_OF_MEMORY], [Outcome.OUT_OF_MEMORY] * 2)
    queue.cancel(job)
    wait_for_state(job, JobState.CANCELLED)


# --- the end of the worker


def test_stopping_terminates_processes_after_the_grace_without_a_charge(tmp_path: Path) -> None:
    with memory_queue() as queue:
        job = submit(queue, "sleep_with_clean_up", str(tmp_path / "began"), str(tmp_path / "cleaned"), retries=0)
        worker = make_worker(queue, kill_grace=30).start()
        pid = int(text_in(tmp_path / "began"))
        worker.stop(grace=0)
        assert not is_running(pid)
        record = job.record()
        assert record.state is JobState.READY
        assert [attempt.outcome for attempt in record.attempts] == [Outcome.PREEMPTED]
        assert (tmp_path / "cleaned").exists()


def test_a_second_signal_kills_processes_at_once(tmp_path: Path) -> None:
    with memory_queue() as queue:
        job = submit(queue, "hold_the_gil", str(tmp_path / "began"), retries=0)
        worker = make_worker(queue, grace="1h", kill_grace="1h").start()
        pid = int(text_in(tmp_path / "began"))
        worker.stop_now()
        assert not is_running(pid)
        assert job.record().state is JobState.READY


def test_jobs_continue_after_the_fork_server_was_killed(tmp_path: Path) -> None:
    with memory_queue() as queue, running_worker(queue) as worker:
        job = submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / "began"))
        pid = int(text_in(tmp_path / "began"))
        fork_server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        (tmp_path / "began").unlink()
        os.kill(fork_server, signal.SIGKILL)
        wait_for_file(tmp_path / "began")
        write(tmp_path / "go", "go")
        assert job.result(60) == "go"
        assert [attempt.outcome for attempt in job.record().attempts] == [Outcome.LOST, Outcome.SUCCEEDED]
        assert worker.get_status()["totals"] == {"lost": 1, "succeeded": 1}


def test_the_fork_server_is_replaced_after_a_number_of_jobs() -> None:
    with memory_queue() as queue, running_worker(queue, recycle_jobs=2):
        parents = [submit(queue, "parent").result(60) for _ in range(5)]
    assert [parents.index(parent) for parent in parents] == [0, 0, 2, 2, 4]


def test_an_application_that_starts_threads_gets_new_interpreters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threaded_app.py").write_text(
        "import threading, time\n"
        "import dovetail.jobs.job_function as f\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "@f.job\n"
        "def add(a, b):\n"
        "    return a + b\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with memory_queue() as queue, running_worker(queue, app=["threaded_app"]):
        assert queue.submit("threaded_app:add", 1, 2, isolation="process").result(60) == 3


def test_a_library_that_the_fork_server_has_loaded_gets_the_threads_of_the_seat_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blas_app.py").write_text(
        "import ctypes\n"
        "import numpy\n"
        "import dovetail as dt\n"
        "with open('/proc/self/maps') as maps:\n"
        "    paths = {line.split(maxsplit=5)[5].strip() for line in maps if 'openblas' in line}\n"
        "names = [f'{kind}openblas_get_num_threads{bits}' for kind in ('', 'scipy_') for bits in ('', '64_')]\n"
        "found = [(path, name) for path in paths for name in names if hasattr(ctypes.CDLL(path), name)]\n"
        "@dt.job\n"
        "def threads():\n"
        "    return [getattr(ctypes.CDLL(path), name)() for path, name in found]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with memory_queue() as queue, running_worker(queue, app=["blas_app"], isolation="process"):
        for cpus in (1, 2):
            counts = queue.submit("blas_app:threads", resources={"cpus": cpus}).result(60)
            if not counts:
                pytest.skip("this NumPy does not use OpenBLAS")
            assert set(counts) == {min(cpus, len(os.sched_getaffinity(0)))}


def test_descriptors_are_not_leaked(queue: Queue, shared_worker: Worker) -> None:
    submit(queue, "noop").result(60)
    before = _descriptors()
    for job in [submit(queue, "noop") for _ in range(20)]:
        job.result(60)
    # each slot may keep an empty file for its next job
    until(lambda: _descriptors() <= before + shared_worker.get_status()["max_concurrent_jobs"])


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
