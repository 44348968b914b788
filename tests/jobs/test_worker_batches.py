"""Batches in workers: one call for many jobs, each with its own lease, result and error. Memory store, threads."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.errors import ConfigError, JobError
from dovetail.jobs.application import Application
from dovetail.jobs.batch import Batch, is_marked, mark_of, marked_shape, unmarked_shape
from dovetail.jobs.job import NO_RESOURCES, JobSpec, JobState, Lease, Outcome, Retries
from dovetail.jobs.job_function import job
from dovetail.jobs.job_handle import Job
from dovetail.jobs.job_logs import JobLogs
from dovetail.jobs.payload_files import log_name, open_files
from dovetail.jobs.queue import Queue
from dovetail.jobs.store import ClaimedJob, Exchange, JobFilter, Reply
from dovetail.jobs.submission import prepare
from dovetail.jobs.workers.batch_call import BatchCall
from dovetail.jobs.workers.job_batches import JobBatch
from dovetail.jobs.workers.running_attempt import RunningAttempt
from dovetail.resources.resources import Resources
from jobs import batch_app
from jobs.batch_app import APP, double, double_async, hold, in_process, lengths, too_few
from jobs.worker_aids import memory_queue, running_worker, state_of, text_in, wait_for_file, wait_for_state, write
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from dovetail.jobs.workers.worker import Worker

APPLICATION = Application.load([APP])


@pytest.fixture
def queue() -> Iterator[Queue]:
    with memory_queue() as found:
        yield found


@pytest.fixture
def calls(tmp_path: Path) -> str:
    """A file with the sizes of calls."""
    return str(tmp_path / "calls")


def working(queue: Queue, **options: Any) -> AbstractContextManager[Worker]:
    return running_worker(queue, **{"app": APPLICATION, "slots": 1} | options)


def sizes(path: str) -> list[int]:
    return [int(line) for line in Path(path).read_text().splitlines()]


def states(jobs: Sequence[Job]) -> list[JobState]:
    return [state_of(one) for one in jobs]


# --- which jobs share a call


def test_a_call_is_made_when_the_batch_is_full(queue: Queue, calls: str) -> None:
    jobs = queue.submit_many(double, [(calls, number) for number in range(1, 11)])
    with working(queue):
        assert [one.result(60) for one in jobs[:8]] == [2, 4, 6, 8, 10, 12, 14, 16]
        until(lambda: states(jobs[8:]) == [JobState.LEASED] * 2, "two jobs wait for others")
        jobs += queue.submit_many(double, [(calls, 11), (calls, 12)])
        assert [one.result(60) for one in jobs[8:]] == [18, 20, 22, 24]
    assert sizes(calls) == [4, 4, 4]
    assert [[attempt.outcome for attempt in one.attempts] for one in jobs] == [[Outcome.SUCCEEDED]] * 12


def test_a_call_is_made_when_the_first_job_has_waited(queue: Queue, calls: str) -> None:
    jobs = queue.submit_many(double_async, [(calls, number) for number in (1, 2, 3)])
    with working(queue):
        assert [one.result(60) for one in jobs] == [2, 4, 6]
    assert sizes(calls) == [3]


def test_a_call_is_made_when_the_arguments_have_the_size(queue: Queue) -> None:
    jobs = queue.submit_many(lengths, ["x" * 400] * 6)
    with working(queue):
        assert [one.result(60) for one in jobs] == [{"chars": 400, "jobs": 3}] * 6


def test_half_of_the_timeout_of_a_job_is_left_for_its_call() -> None:
    batch = JobBatch(Batch(wait="1h"), "default", NO_RESOURCES, "async", None, claimed=time.monotonic())
    later = batch.flush_at
    for number, timeout_s in enumerate((None, 60.0, 10.0, 600.0)):
        claimed = ClaimedJob(JobSpec(f"j{number}", "m:f"), NO_RESOURCES, Lease(f"j{number}", 1, 1, 0))
        attempt = RunningAttempt(claimed, None, double, "async", timeout_s)
        batch.add(attempt)
        assert batch.flush_at == later if timeout_s is None else batch.flush_at <= attempt.started + timeout_s / 2
    assert batch.flush_at == batch.items[2].started + 5


def test_a_call_is_made_early_by_the_duration_of_an_exchange_and_at_most_by_half_of_the_wait() -> None:
    batch = JobBatch(Batch(wait="10ms"), "default", NO_RESOURCES, "async", None, claimed=100.0)
    assert [round(batch.due_at(early_s), 6) for early_s in (0.0, 0.002, 60.0)] == [100.01, 100.008, 100.005]


def test_only_jobs_with_the_same_key_and_needs_share_a_call(queue: Queue, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a", "b")]
    jobs = queue.submit_many(double, [(files[number % 2], number) for number in range(1, 9)])
    large = queue.submit_many(double, [(files[0], number) for number in range(1, 5)], resources={"cpus": 2})
    with working(queue, slots=3):
        assert [one.result(60) for one in jobs] == [2 * number for number in range(1, 9)]
        assert [one.result(60) for one in large] == [2, 4, 6, 8]
    assert [sizes(path) for path in files] == [[4, 4], [4]]


def test_a_batch_takes_one_slot_and_the_resources_of_one_job(queue: Queue, tmp_path: Path) -> None:
    done, began = str(tmp_path / "done"), str(tmp_path / "began")
    jobs = queue.submit_many(hold, [(done, began)] * 4, resources={"cpus": 3})
    with working(queue, slots=2) as worker:
        assert text_in(tmp_path / "began") == jobs[0].id
        status = worker.get_status()
        assert (status["active_jobs"], status["available_slots"], status["used"]["cpus"]) == (4, 1, 3.0)
        write(tmp_path / "done", "")
        assert [one.result(60) for one in jobs] == ["4 jobs"] * 4
        until(lambda: worker.get_status()["used"]["cpus"] == 0)
        assert worker.get_status()["available_slots"] == 2


def test_a_job_of_a_submitter_that_does_not_know_the_function_has_its_own_call(queue: Queue, calls: str) -> None:
    spec = JobSpec("unmarked", f"{APP}:double", f'[["{calls}",21],{{}}]'.encode())
    queue.store.submit([spec])
    with working(queue):
        assert queue.get("unmarked").result(60) == 42
    assert sizes(calls) == [1]


# --- failures


@pytest.mark.parametrize("function", [double, double_async])
def test_a_job_that_makes_the_call_raise_fails_alone(queue: Queue, calls: str, function: Any) -> None:
    jobs = queue.submit_many(function, [(calls, number) for number in (1, -2, 3, 4)], retries=0)
    with working(queue):
        assert [one.result(60) for one in (jobs[0], *jobs[2:])] == [2, 6, 8]
        with pytest.raises(JobError, match="ValueError: negative"):
            jobs[1].result(60)
    assert sizes(calls) == [4, 2, 1, 1, 2]
    assert [len(one.attempts) for one in jobs] == [1] * 4
    assert "batch_app.py" in jobs[1].attempts[0].traceback


def test_an_exception_in_the_place_of_a_result_fails_its_job_which_is_retried_alone(queue: Queue, calls: str) -> None:
    retries = {"error": 1, "backoff": "1ms"}
    jobs = queue.submit_many(double, [(calls, number) for number in (1, 0, 3, 4)], retries=retries)
    with working(queue):
        assert [one.result(60) for one in (jobs[0], *jobs[2:])] == [2, 6, 8]
        with pytest.raises(JobError, match="ZeroDivisionError: nothing to double"):
            jobs[1].result(60)
    assert sizes(calls) == [4, 1]
    assert [attempt.outcome for attempt in jobs[1].attempts] == [Outcome.ERROR] * 2


def test_a_result_is_needed_for_each_job(queue: Queue) -> None:
    jobs = queue.submit_many(too_few, [1, 2])
    with working(queue):
        for one in jobs:
            with pytest.raises(JobError, match=r"too_few\(\) returned 1 results for 2 jobs"):
                one.result(60)
    assert states(jobs) == [JobState.FAILED] * 2


@pytest.mark.parametrize("function", [double, double_async])
def test_a_call_that_cannot_be_prepared_is_a_failure_of_its_jobs(
    queue: Queue, calls: str, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("no room for the arguments")

    monkeypatch.setattr(BatchCall, "__init__", refuse)
    jobs = queue.submit_many(function, [(calls, number) for number in (1, 2, 3, 4)], retries=0)
    with working(queue):
        for one in jobs:
            with pytest.raises(JobError, match="no room for the arguments"):
                one.result(60)


# --- cancellation and drain


def test_a_job_that_waits_for_others_can_be_cancelled(queue: Queue, calls: str) -> None:
    jobs = queue.submit_many(double, [(calls, number) for number in (1, 2, 3)])
    with working(queue) as worker:
        until(lambda: states(jobs) == [JobState.LEASED] * 3)
        jobs[1].cancel()
        wait_for_state(jobs[1], JobState.CANCELLED)
        jobs += queue.submit_many(double, [(calls, 4), (calls, 5)])
        assert [one.result(60) for one in (jobs[0], *jobs[2:])] == [2, 6, 8, 10]
        until(lambda: worker.get_status()["available_slots"] == 1)
    assert sizes(calls) == [4]


def test_the_slot_is_free_when_all_waiting_jobs_were_cancelled(queue: Queue, calls: str) -> None:
    jobs = queue.submit_many(double, [(calls, number) for number in (1, 2, 3)])
    with working(queue) as worker:
        until(lambda: states(jobs) == [JobState.LEASED] * 3)
        for one in jobs:
            one.cancel()
        until(lambda: states(jobs) == [JobState.CANCELLED] * 3)
        until(lambda: worker.get_status()["available_slots"] == 1)
        others = queue.submit_many(double, [(calls, number) for number in (4, 5, 6, 7)])
        assert [one.result(60) for one in others] == [8, 10, 12, 14]


def test_a_call_ends_early_when_all_of_its_jobs_are_cancelled(queue: Queue, tmp_path: Path) -> None:
    done, began = str(tmp_path / "done"), str(tmp_path / "began")
    jobs = queue.submit_many(hold, [(done, began)] * 4)
    with working(queue):
        wait_for_file(tmp_path / "began")
        for one in jobs:
            one.cancel()
        for one in jobs:
            wait_for_state(one, JobState.CANCELLED)


def test_the_result_of_a_cancelled_job_counts_if_its_call_returns(queue: Queue, tmp_path: Path) -> None:
    done, began = str(tmp_path / "done"), str(tmp_path / "began")
    jobs = queue.submit_many(hold, [(done, began)] * 4)
    with working(queue) as worker:
        wait_for_file(tmp_path / "began")
        jobs[2].cancel()
        until(lambda: [one["stopping"] for one in worker.get_status()["jobs"]].count("cancelled") == 1)
        write(tmp_path / "done", "")
        assert [one.result(60) for one in jobs] == ["4 jobs"] * 4


def test_a_worker_that_drains_gives_back_jobs_that_wait_for_others(queue: Queue, calls: str) -> None:
    jobs = queue.submit_many(double, [(calls, number) for number in (1, 2, 3)])
    with working(queue) as worker:
        until(lambda: states(jobs) == [JobState.LEASED] * 3)
        worker.stop()
    assert states(jobs) == [JobState.READY] * 3
    assert [one.record().attempt for one in jobs] == [0] * 3


# --- processes


@pytest.mark.processes
def test_jobs_of_a_call_whose_process_dies_are_retried_alone(queue: Queue, tmp_path: Path) -> None:
    folder = str(tmp_path)
    retries = {"lost": 1, "backoff": "1ms"}
    jobs = queue.submit_many(in_process, [(folder, name) for name in ("a", "kill", "b")], retries=retries)
    with working(queue, slots=2):
        found = [one.result(60) for one in (jobs[0], jobs[2])]
        assert [one["jobs"] for one in found] == [1, 1]
        with pytest.raises(JobError, match="the process of the job ended without a result"):
            jobs[1].result(60)
        again = queue.submit_many(in_process, [(folder, name) for name in ("c", "d", "e", "f")])
        results = [one.result(60) for one in again]
        assert [one["jobs"] for one in results] == [4] * 4
        assert len({one["pid"] for one in results}) == 1
    assert [attempt.outcome for attempt in jobs[0].attempts] == [Outcome.LOST, Outcome.SUCCEEDED]
    assert [attempt.outcome for attempt in jobs[1].attempts] == [Outcome.LOST, Outcome.LOST]


@pytest.mark.processes
def test_a_call_that_exceeds_the_timeout_of_a_job_ends_for_all(queue: Queue, tmp_path: Path) -> None:
    options: dict[str, Any] = {"isolation": "warm_process", "timeout": "1s"}
    short = queue.submit(in_process, str(tmp_path), "a", retries={"timeout": 100, "backoff": "1ms"}, **options)
    long = queue.submit(in_process, str(tmp_path), "sleep", retries={"timeout": 1, "backoff": "1ms"}, **options)
    assert isinstance(short, Job)
    assert isinstance(long, Job)
    with working(queue, slots=2, kill_grace="100ms"):
        assert short.result(60)["jobs"] == 1
        with pytest.raises(JobError, match="the call for 1 jobs did not end within the timeout of 1 s"):
            long.result(60)
    first, *_, last = short.attempts
    assert (first.outcome, last.outcome) == (Outcome.TIMEOUT, Outcome.SUCCEEDED)
    assert "the call for 2 jobs" in first.error
    assert [attempt.outcome for attempt in long.attempts] == [Outcome.TIMEOUT] * 2


# --- output


@pytest.mark.processes
def test_each_job_shows_the_output_of_its_call_also_without_the_others(tmp_path: Path) -> None:
    with Queue(f"sqlite:///{tmp_path}/jobs.db", if_no_worker="ignore") as queue:
        jobs = queue.submit_many(in_process, [(str(tmp_path), name) for name in "abcd"])
        with working(queue, slots=2):
            for one in jobs:
                one.result(60)
            output = jobs[0].logs()
            assert output.endswith("call for 4 jobs\n")
            assert [one.logs() for one in jobs] == [output] * 4
        queue.store.purge(JobFilter(), limit=1)
        assert queue.files is not None
        queue.files.delete_of([jobs[0].id])
        assert [one.logs() for one in jobs[1:]] == [output] * 3


def written(logs: JobLogs, names: list[str], text: bytes) -> None:
    log = logs.open(names)
    os.write(log.fd, text)
    logs.close(log, has_writers=False)


def test_large_output_of_a_call_is_uploaded_once_and_the_other_jobs_name_the_command_that_prints_it(
    tmp_path: Path,
) -> None:
    files = open_files(f"memory://{tmp_path.name}/files/")
    logs = JobLogs(files, tmp_path, limit_bytes=100)
    small, large = ([log_name(f"{job}{size}", 1) for job in "ab"] for size in ("small", "large"))
    written(logs, small, b"x" * 50)
    written(logs, large, b"x" * 51)
    assert [files.read(name) for name in small] == [b"x" * 50] * 2
    reference = b"[dovetail: one call for 2 jobs; its output: dovetail jobs logs alarge --attempt 1]\n"
    assert [files.read(name) for name in large] == [b"x" * 51, reference]


def test_jobs_name_the_command_that_prints_their_output_where_a_file_has_only_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_once(source: str, path: Path, **options: Any) -> None:
        if list(tmp_path.glob("*/*/*.log")):
            raise PermissionError("no hard links here")
        link(source, path, **options)

    monkeypatch.setattr(os, "link", link_once)
    logs = JobLogs(None, tmp_path)
    written(logs, [log_name(job, 1) for job in ("first", "second")], b"text\n")
    assert logs.read("first", 1) == "text\n"
    assert "2 jobs; its output: dovetail jobs logs first --attempt 1]" in logs.read("second", 1)


# --- figures


def jobs_per_s(function: Any, count: int) -> float:
    with memory_queue() as queue:
        jobs = queue.submit_many(function, range(count))
        began = time.perf_counter()
        with working(queue):
            for one in jobs:
                one.result(60)
            return count / (time.perf_counter() - began)


@pytest.mark.bar
def test_a_function_with_a_fixed_cost_of_10_ms_runs_five_times_as_many_jobs() -> None:
    assert jobs_per_s(batch_app.with_fixed_cost, 1_600) >= 5 * jobs_per_s(batch_app.alone_with_fixed_cost, 100)


WAIT_MS = 10
RESOLUTION_MS, THREADS_MS = 1, 1
"""Of the times in the store; for the threads that wake each other at the start and the end of a call."""


def percentile_95(values: Iterable[float]) -> float:
    found = sorted(values)
    return found[len(found) * 95 // 100]


@pytest.mark.bar
@pytest.mark.parametrize("store", ["memory", "sqlite", "redis"])
def test_95_percent_of_jobs_end_within_the_wait_one_call_and_two_exchanges_with_the_store(
    store: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/jobs.db"}
    url = urls[store] if store in urls else request.getfixturevalue("redis_server").url
    exchanges_ms: list[float] = []
    calls_ms: list[float] = []
    random = Random(1)
    with Queue(url, if_no_worker="ignore") as queue:
        exchange = queue.store.exchange

        def timed(given: Exchange) -> Reply:
            began = time.perf_counter()
            reply = exchange(given)
            exchanges_ms.append(1000 * (time.perf_counter() - began))
            return reply

        monkeypatch.setattr(queue.store, "exchange", timed)
        with working(queue, slots=4):
            queue.submit_many(batch_app.with_fixed_cost, [0])[0].result(60)
            jobs: list[Job] = []
            for number in range(600):
                jobs += queue.submit_many(batch_app.with_fixed_cost, [number])
                time.sleep(random.expovariate(200))
            calls_ms += [one.result(60) for one in jobs]
            records = [one.record() for one in jobs]
    took_ms = percentile_95((record.finished_ms or 0) - record.attempts[0].started_ms for record in records)
    bound_ms = WAIT_MS + percentile_95(calls_ms) + 2 * percentile_95(exchanges_ms) + RESOLUTION_MS + THREADS_MS
    assert took_ms <= bound_ms


# --- declarations


def plain(number: list[int]) -> list[int]:
    return number


def starred(*numbers: list[int]) -> list[int]:
    return numbers[0]


@pytest.mark.parametrize(
    ("options", "function", "message"),
    [
        ({"batch": 32}, plain, "batch=32 is not a dt.Batch"),
        ({"batch": Batch(size=0)}, plain, "size=0"),
        ({"batch": Batch(size=8, wait="soon")}, plain, "wait='soon'"),
        ({"batch": Batch(bytes=0)}, plain, "bytes=0"),
        ({"batch": Batch(key="model")}, plain, "key='model' is not a parameter of plain"),
        ({"batch": Batch()}, starred, "starred has the parameter"),
        ({"batch": Batch(), "ranks": 2}, plain, "ranks and batch exclude each other"),
        ({"batch": Batch(), "preemptible": True}, plain, "preemptible and batch exclude each other"),
    ],
)
def test_mistakes_in_batches_are_refused_at_the_declaration(
    options: dict[str, Any], function: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        job(**options)(function)
    assert message in str(error.value)


@pytest.mark.parametrize("option", [{"ranks": 2}, {"preemptible": True}])
def test_jobs_of_batches_are_neither_gangs_nor_preemptible(queue: Queue, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not for functions with batches"):
        queue.submit(batch_app.with_fixed_cost, 1, **option)


def test_a_function_with_batches_can_be_called_and_submitted_like_any_other(queue: Queue, calls: str) -> None:
    assert double(calls, [1, 2]) == [2, 4]
    with pytest.raises(ConfigError, match="missing a required argument: 'number'"):
        queue.submit(double, calls)


def test_a_foreign_message_that_does_not_fit_the_function_is_a_job_that_fails(queue: Queue) -> None:
    submission, _ = prepare(double, {}, {})
    specs = [replace(submission.spec(["a message"], {}, queue.codec), retries=Retries(error=0)) for _ in range(4)]
    assert all(is_marked(spec.shape) for spec in specs)
    queue.store.submit(specs)
    with working(queue):
        for spec in specs:
            with pytest.raises(JobError, match="missing a required argument: 'number'"):
                queue.get(spec.id).result(60)


def test_marks_separate_functions_and_keys_and_nothing_else() -> None:
    shape = Resources(cpus=1, custom={"licence": 1}).shape()
    marks = [mark_of("m:f", None, {}), mark_of("m:f", "k", {"k": 1}), mark_of("m:f", "k", {"k": "1"})]
    assert len(set(marks)) == 3
    for mark in marks:
        marked = marked_shape(shape, mark)
        assert is_marked(marked)
        assert unmarked_shape(marked) == shape
    assert not is_marked(shape)
