"""Workers on the memory store, with jobs in threads and in an event loop: what needs no process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.claims.owner import this_process
from dovetail.errors import ConfigError, EngineError, JobError, Problem
from dovetail.jobs.job import JobSpec, JobState, Outcome
from dovetail.jobs.job_id import new_job_id
from dovetail.jobs.queue import Queue
from dovetail.jobs.store import Claim, Completion, Exchange, JobFilter, Reply, StoreUnavailableError, WorkerInfo
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.resources.cluster import Cluster
from dovetail.resources.free_resources import NodeKind
from dovetail.resources.resources import Resources
from jobs.worker_aids import (
    make_worker,
    memory_queue,
    running_worker,
    state_of,
    wait_for_file,
    wait_for_state,
    write,
)
from jobs.worker_app import APP
from jobs.worker_app import __name__ as app_module
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.jobs.job_handle import Job

FREE = NodeKind(Cluster.parse("64cpu").nodes[0]).untouched()


@pytest.fixture
def queue() -> Iterator[Queue]:
    with memory_queue() as found:
        yield found


def submit(jobs: Queue, function: str, *args: Any, **options: Any) -> Job:
    found: Job = jobs.submit(f"{APP}:{function}", *args, **{"isolation": "thread"} | options)  # type: ignore[assignment]
    return found


def test_the_module_is_imported_under_the_name_that_jobs_use() -> None:
    assert app_module == APP


# --- admission


def test_labels_and_tokens_of_jobs_are_those_of_the_resources_of_a_worker(queue: Queue, tmp_path: Path) -> None:
    needs = Resources(labels={"pool": "render"}, custom={"licence": 1})
    go, began = tmp_path / "go", [tmp_path / f"began{number}" for number in range(2)]
    jobs = [submit(queue, "wait_for_file", str(go), str(file), resources=needs) for file in began]
    render = "(4cpu, 4GB, licence=1){pool=render}"
    with running_worker(queue, worker_id="plain"), running_worker(queue, worker_id="render", resources=render):
        wait_for_file(began[0])
        assert submit(queue, "add", 1).result(30) == 1
        assert state_of(jobs[1]) is JobState.READY, "there is one licence, and it is in use"
        write(go, "done")
        for job in jobs:
            assert job.result(30) == "done"
    attempts = [job.attempts[0] for job in jobs]
    assert [attempt.worker for attempt in attempts] == ["render"] * 2
    assert attempts[1].started_ms >= attempts[0].ended_ms


# --- results and errors


@pytest.mark.parametrize(
    ("function", "isolation"), [("add", "thread"), ("async_add", "async"), ("async_add", "thread")]
)
def test_the_result_of_a_job_is_stored(queue: Queue, function: str, isolation: str) -> None:
    job = submit(queue, function, 2, other=3, isolation=isolation)
    with running_worker(queue):
        assert job.result(30) == 5


def test_a_job_knows_itself(queue: Queue) -> None:
    job = submit(queue, "who_am_i")
    with running_worker(queue, worker_id="w-1"):
        found = job.result(30)
    assert (found["id"], found["attempt"], found["token"]) == (job.id, 1, 1)
    assert (found["queue"], found["worker"], found["pid"]) == ("default", "w-1", os.getpid())


def test_an_exception_is_retried_and_then_final(queue: Queue) -> None:
    job = submit(queue, "fail", "no such model", retries={"error": 2, "backoff": "10ms"})
    with running_worker(queue), pytest.raises(JobError, match="ValueError: no such model"):
        job.result(30)
    record = job.record()
    assert record.state is JobState.DEAD
    assert [attempt.outcome for attempt in record.attempts] == [Outcome.ERROR] * 3
    assert "in fail\n" in record.attempts[0].traceback
    assert "job_call.py" not in record.attempts[0].traceback


def test_a_function_outside_of_the_application_is_refused_and_never_imported(queue: Queue) -> None:
    ids = [new_job_id() for _ in range(3)]
    functions = ["os:system", f"{APP}:plain_function", f"{APP}:nothing"]
    queue.store.submit(
        [JobSpec(job_id, function, b'[["touch /x"],{}]') for job_id, function in zip(ids, functions, strict=True)]
    )
    queue.store.submit([JobSpec(new_job_id(), "antigravity:geohash")])
    with running_worker(queue):
        jobs = [queue.get(job_id) for job_id in ids]
        for job, function in zip(jobs, functions, strict=True):
            wait_for_state(job, JobState.FAILED)
            assert function in job.record().error
        until(lambda: all(job.state.is_finished for job in queue.store.find(JobFilter()).jobs))
    assert "--app os" in jobs[0].record().error
    assert len(jobs[0].record().attempts) == 1
    assert "antigravity" not in sys.modules


def test_arguments_that_cannot_be_decoded_are_a_final_error(queue: Queue) -> None:
    ids = [new_job_id() for _ in range(3)]
    payloads = [(b"{not json", "json"), (b"\x80\x05N.", "pickle"), (b"[[1],{}]", "xml")]
    queue.store.submit(
        [
            JobSpec(job_id, f"{APP}:add", *payload, isolation="thread")
            for job_id, payload in zip(ids, payloads, strict=True)
        ]
    )
    with running_worker(queue):
        for job_id in ids:
            wait_for_state(queue.get(job_id), JobState.FAILED)
            assert "its arguments cannot be decoded" in queue.get(job_id).record().error


def test_a_result_that_is_not_json_is_a_final_error_with_its_path(queue: Queue) -> None:
    job = submit(queue, "not_json")
    with running_worker(queue):
        wait_for_state(job, JobState.FAILED)
    assert "result.model[1]" in job.record().error


def test_a_thread_refuses_a_timeout(queue: Queue) -> None:
    job_id = new_job_id()
    queue.store.submit([JobSpec(job_id, f"{APP}:noop", b"[[],{}]", isolation="thread", timeout_ms=1000)])
    with running_worker(queue):
        wait_for_state(queue.get(job_id), JobState.FAILED)
    assert "a thread cannot be interrupted" in queue.get(job_id).record().error


def test_many_jobs_all_run_once(queue: Queue) -> None:
    jobs = [submit(queue, "add", number, 1) for number in range(300)]
    with running_worker(queue, slots=8) as worker:
        assert [job.result(60) for job in jobs] == list(range(1, 301))
        until(lambda: worker.get_status()["totals"] == {"succeeded": 300})


def test_cpu_time_of_a_thread_is_recorded(queue: Queue) -> None:
    job = submit(queue, "burn_cpu", 0.1)
    with running_worker(queue):
        job.result(30)
    cpu_ms = job.record().attempts[0].cpu_ms
    assert cpu_ms is not None
    assert 50 <= cpu_ms < 1000


# --- slots and resources


def test_no_more_jobs_run_than_slots(queue: Queue, tmp_path: Path) -> None:
    jobs = [submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / str(number))) for number in range(5)]
    with running_worker(queue, slots=2) as worker:
        until(lambda: worker.get_status()["active_jobs"] == 2)
        assert len(list(tmp_path.iterdir())) <= 2
        assert worker.get_status()["available_slots"] == 0
        assert queue.stats()
        (tmp_path / "go").touch()
        for job in jobs:
            job.result(30)


def test_jobs_share_the_resources_of_the_worker(queue: Queue, tmp_path: Path) -> None:
    go = tmp_path / "go"
    big = submit(queue, "wait_for_file", str(go), str(tmp_path / "big"), resources=Resources(cpus=3))
    wait = submit(queue, "wait_for_file", str(go), str(tmp_path / "wait"), resources=Resources(cpus=2))
    small = submit(queue, "wait_for_file", str(go), str(tmp_path / "small"), resources=Resources(cpus=1))
    with running_worker(queue, slots=4, resources="4cpu") as worker:
        wait_for_file(tmp_path / "big")
        wait_for_file(tmp_path / "small")
        status = worker.get_status()
        assert (status["used"]["cpus"], status["active_jobs"]) == (4.0, 2)
        assert wait.record().state is JobState.READY
        go.touch()
        for job in (big, wait, small):
            job.result(30)


def test_a_worker_takes_jobs_of_its_queues_only(queue: Queue) -> None:
    other = submit(queue, "noop", queue="other")
    mine = submit(queue, "noop", queue="gpu")
    with running_worker(queue, queues=["cpu", "gpu"]):
        mine.result(30)
        assert other.record().state is JobState.READY


# --- progress and cancellation


def test_progress_is_stored_with_a_renewal(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "report", str(tmp_path / "go"), 0.1, 0.4)
    with running_worker(queue, lease="300ms") as worker:
        until(lambda: job.record().progress == 0.4, "the progress is in the store")
        assert job.record().message == "step 0.4"
        assert worker.get_status()["jobs"][0]["progress"] == 0.4
        (tmp_path / "go").touch()
        job.result(30)


def test_a_job_in_a_thread_sees_that_it_was_cancelled(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "until_cancelled", str(tmp_path / "began"), str(tmp_path / "ended"))
    with running_worker(queue, lease="60s"):
        wait_for_file(tmp_path / "began")
        job.cancel()
        wait_for_state(job, JobState.SUCCEEDED)  # it has returned a result, which counts
    assert (tmp_path / "ended").exists()


def test_a_cancelled_coroutine_is_ended_where_it_awaits(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "wait_for_file_async", "/nowhere", str(tmp_path / "began"), isolation="async")
    with running_worker(queue, lease="60s"):
        wait_for_file(tmp_path / "began")
        job.cancel("not needed")
        wait_for_state(job, JobState.CANCELLED)
    assert job.record().error == "not needed"


def test_a_coroutine_ends_at_its_timeout(queue: Queue, tmp_path: Path) -> None:
    job = submit(
        queue, "wait_for_file_async", "/nowhere", str(tmp_path / "began"), isolation="async", timeout="50ms", retries=0
    )
    with running_worker(queue):
        wait_for_state(job, JobState.FAILED)
    assert job.record().attempts[0].outcome is Outcome.TIMEOUT
    assert "timeout of 0.05 s" in job.record().error


def test_a_coroutine_that_cannot_be_interrupted_is_given_up_and_keeps_its_slot(queue: Queue, tmp_path: Path) -> None:
    job = submit(
        queue,
        "ignore_cancellation",
        str(tmp_path / "go"),
        str(tmp_path / "began"),
        isolation="async",
        timeout="50ms",
        retries=0,
    )
    with running_worker(queue, slots=1, lease="3s", kill_grace=0.1) as worker:
        wait_for_state(job, JobState.FAILED)
        assert job.record().attempts[0].outcome is Outcome.TIMEOUT
        status = worker.get_status()
        assert (len(status["abandoned"]), status["available_slots"]) == (1, 0)
        (tmp_path / "go").touch()
        until(lambda: worker.get_status()["available_slots"] == 1)
        assert job.record().state is JobState.FAILED


# --- leases


class ScriptedStore(MemoryStore):
    """A memory store that can be away, and that can change replies."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.refused = 0
        self.exchanges: list[Exchange] = []
        self.registrations = 0
        self.forget_worker = False

    def _check(self) -> None:
        if self.is_away:
            self.refused += 1
            raise StoreUnavailableError(Problem("DT660", "the store is away", fixes=("start it",)))

    def exchange(self, request: Exchange) -> Reply:
        self._check()
        self.exchanges.append(request)
        reply = super().exchange(request)
        if self.forget_worker:
            self.forget_worker = False
            return replace(reply, known=False)
        return reply

    def wait(self, worker: str, timeout_s: float) -> bool:
        self._check()
        return super().wait(worker, timeout_s)

    def register_worker(self, worker: Any) -> None:
        self._check()
        self.registrations += 1
        super().register_worker(worker)


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


def test_a_running_job_keeps_its_lease(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "wait_for_file", str(tmp_path / "go"))
    with running_worker(queue, lease="3s"):  # long enough for a busy machine
        until(lambda: job.record().state is JobState.LEASED)
        first = job.record().due_ms
        assert first is not None
        until(lambda: (job.record().due_ms or 0) > first + 1500, "it was renewed twice")
        assert job.record().attempt == 1
        (tmp_path / "go").touch()
        job.result(30)


def test_completions_are_kept_while_the_store_is_away(store: ScriptedStore, tmp_path: Path) -> None:
    queue = Queue(store, if_no_worker="ignore")
    messages: list[str] = []
    jobs = [submit(queue, "wait_for_file", str(tmp_path / "go")) for _ in range(3)]
    with running_worker(queue, say=messages.append) as worker:
        until(lambda: worker.get_status()["active_jobs"] == 3)
        store.is_away = True
        write(tmp_path / "go", "x")
        until(lambda: worker.get_status()["active_jobs"] == 0 and store.refused >= 3)
        assert not worker.get_status()["store_available"]
        store.is_away = False
        assert [job.result(30) for job in jobs] == ["x"] * 3
        assert worker.get_status()["store_available"]
    assert [line.splitlines()[0] for line in messages] == [
        "error[DT660] the store is away",
        "the store of jobs can be reached again",
    ]


def test_a_worker_waits_for_a_store_that_is_away_at_its_start(store: ScriptedStore) -> None:
    store.is_away = True
    queue = Queue(store, if_no_worker="ignore")
    with running_worker(queue) as worker:
        until(lambda: store.refused >= 2)
        assert worker.get_status()["state"] == "starting"
        store.is_away = False
        assert submit(queue, "add", 1).result(30) == 1


def test_a_worker_that_the_store_has_forgotten_registers_again(store: ScriptedStore) -> None:
    queue = Queue(store, if_no_worker="ignore")
    with running_worker(queue, lease="300ms"):
        until(lambda: store.registrations == 1)
        store.forget_worker = True
        until(lambda: store.registrations == 2)


def register(store: ScriptedStore, **details: Any) -> None:
    store.register_worker(WorkerInfo("worker-1", details={"host": "elsewhere", "pid": 7, **details}))


def test_the_id_of_a_live_worker_is_refused(store: ScriptedStore) -> None:
    register(store)
    worker = make_worker(Queue(store), worker_id="worker-1", lease="1s").start()

    def is_refused() -> bool:
        MemoryStore.exchange(store, Exchange("worker-1"))  # the heartbeat of the other one
        return worker.wait(0)

    until(is_refused, "it was refused")
    with pytest.raises(
        ConfigError, match="another worker runs under the id 'worker-1': process 7 on elsewhere"
    ) as caught:
        worker.run()
    assert caught.value.problems[0].fix_texts == ('worker_id="worker-1-2"', "unset WORKER_ID")


def test_the_id_of_a_silent_worker_is_taken_over_after_a_lease(store: ScriptedStore) -> None:
    register(store)
    with running_worker(Queue(store, if_no_worker="ignore"), worker_id="worker-1", lease="300ms") as worker:
        until(lambda: worker.get_status()["state"] == "running")
        assert store.workers()[0].details["pid"] == os.getpid()


def test_the_id_of_a_worker_whose_process_has_ended_is_taken_over_at_once(store: ScriptedStore) -> None:
    ended = this_process()._replace(born="1.00")
    register(store, process=list(ended))
    with running_worker(Queue(store, if_no_worker="ignore"), worker_id="worker-1", lease="1h") as worker:
        until(lambda: worker.get_status()["state"] == "running")


def test_a_job_whose_lease_was_lost_is_stopped_and_its_result_dropped(store: ScriptedStore, tmp_path: Path) -> None:
    queue = Queue(store, if_no_worker="ignore")
    job = submit(queue, "until_cancelled", str(tmp_path / "began"), str(tmp_path / "ended"), retries=0)
    with running_worker(queue, lease="600ms", slots=1) as worker:
        wait_for_file(tmp_path / "began")
        # as if the lease had expired and another worker had run the job
        store.exchange(Exchange("thief", [Completion(job.id, 1, Outcome.ERROR, final=True, error="elsewhere")]))
        wait_for_file(tmp_path / "ended")
        until(lambda: worker.get_status()["active_jobs"] == 0)
        assert submit(queue, "add", 1).result(30) == 1
        assert worker.get_status()["totals"] == {"succeeded": 1}
    assert job.record().error == "elsewhere"


def test_a_completion_whose_lease_was_lost_is_refused(store: ScriptedStore, tmp_path: Path) -> None:
    queue = Queue(store, if_no_worker="ignore")
    job = submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / "began"), retries=0)
    with running_worker(queue, lease="600s") as worker:
        wait_for_file(tmp_path / "began")
        store.exchange(Exchange("thief", [Completion(job.id, 1, Outcome.ERROR, final=True, error="elsewhere")]))
        (tmp_path / "go").touch()
        until(lambda: worker.get_status()["totals"] == {"refused": 1})
    assert job.record().state is JobState.FAILED


def test_an_idle_worker_asks_once_per_third_of_its_lease(store: ScriptedStore) -> None:
    queue = Queue(store, if_no_worker="ignore")
    with running_worker(queue, lease="60s"):
        until(lambda: len(store.exchanges) >= 1)
        assert submit(queue, "add", 1).result(30) == 1
        threading.Event().wait(0.2)
        assert len(store.exchanges) <= 4


def test_expired_leases_are_found_when_all_slots_are_taken(store: ScriptedStore, tmp_path: Path) -> None:
    queue = Queue(store, if_no_worker="ignore")
    job = submit(queue, "wait_for_file", str(tmp_path / "go"))
    lost = submit(queue, "noop", retries={"lost": 0})
    with running_worker(queue, lease="300ms", slots=1) as worker:
        until(lambda: worker.get_status()["active_jobs"] == 1)
        reply = store.exchange(Exchange("other", claim=Claim(1, FREE), lease_ms=100))
        assert [one.spec.id for one in reply.claimed] == [lost.id]
        wait_for_state(lost, JobState.FAILED)
        (tmp_path / "go").touch()
        job.result(30)


# --- schedules


def test_a_schedule_is_fired(queue: Queue) -> None:
    queue.submit(f"{APP}:add", 1, cron="* * * * *", isolation="thread")
    [found] = queue.store.schedules()
    # as if the minute had passed
    queue.store.remove_schedule(found.name)
    queue.store.put_schedule(replace(found, next_ms=queue.store.now_ms() - 1))
    with running_worker(queue):
        until(lambda: queue.store.find(JobFilter()).jobs, "the schedule has submitted a job")
        [job] = queue.store.find(JobFilter()).jobs
        assert queue.get(job.id).result(30) == 1
        assert queue.store.schedules()[0].next_ms > queue.store.now_ms()


# --- the end


def test_stopping_lets_running_jobs_end(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / "began"))
    worker = make_worker(queue).start()
    wait_for_file(tmp_path / "began")
    worker.request_stop()
    until(lambda: worker.get_status()["state"] == "draining")
    later = submit(queue, "noop")
    write(tmp_path / "go", "done")
    assert worker.wait(30)
    assert job.result(0) == "done"
    assert later.record().state is JobState.READY
    assert worker.get_status()["state"] == "ended"
    assert queue.store.workers() == []


def test_what_does_not_end_within_the_grace_is_not_charged(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / "began"), retries=0)
    coroutine = submit(queue, "wait_for_file_async", "/nowhere", str(tmp_path / "async"), isolation="async", retries=0)
    worker = make_worker(queue, kill_grace=0).start()
    wait_for_file(tmp_path / "began")
    wait_for_file(tmp_path / "async")
    worker.stop(grace=0.05)
    for one in (job, coroutine):
        record = one.record()
        assert record.state is JobState.READY
        assert [attempt.outcome for attempt in record.attempts] == [Outcome.PREEMPTED]
    (tmp_path / "go").touch()


def test_a_worker_that_ends_now_waits_for_nothing(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / "began"))
    worker = make_worker(queue, grace="1h", kill_grace="1h").start()
    wait_for_file(tmp_path / "began")
    worker.stop_now()
    assert job.record().state is JobState.READY
    (tmp_path / "go").touch()


def test_signals_drain_a_worker_and_then_end_it(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / "began"))
    messages: list[str] = []
    worker = make_worker(queue, grace="1h", say=messages.append)

    def send() -> None:
        wait_for_file(tmp_path / "began")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: worker.get_status()["state"] == "draining")
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGTERM)
    sender = threading.Thread(target=send)
    sender.start()
    worker.run(handle_signals=True)
    sender.join()
    assert messages == [
        "SIGTERM: waiting up to 3600 s for running jobs (1); a second signal ends them now",
        "SIGINT: ending now",
    ]
    assert signal.getsignal(signal.SIGTERM) is before
    assert job.record().state is JobState.READY
    (tmp_path / "go").touch()


def test_a_claimed_job_that_has_not_begun_is_given_back(store: ScriptedStore, tmp_path: Path) -> None:
    """The claim is answered after the drain was requested."""
    queue = Queue(store, if_no_worker="ignore")
    worker = make_worker(queue)
    reached, go = threading.Event(), threading.Event()
    exchange = store.exchange

    def held(request: Exchange) -> Reply:
        reply = exchange(request)
        if reply.claimed:
            reached.set()
            go.wait(30)
        return reply

    store.exchange = held  # type: ignore[method-assign]
    worker.start()
    job = submit(queue, "wait_for_file", str(tmp_path / "go"))
    assert reached.wait(30)
    worker.request_stop()
    go.set()
    assert worker.wait(30)
    record = job.record()
    assert (record.state, record.attempt, record.attempts) == (JobState.READY, 0, ())


def test_a_worker_is_recycled_after_a_number_of_jobs(queue: Queue) -> None:
    for number in range(20):
        submit(queue, "add", number)
    worker = make_worker(queue, slots=2, recycle_jobs=5, lease="300ms")
    worker.run()
    assert worker.is_recycled
    assert 5 <= worker.get_status()["totals"]["succeeded"] <= 20


def test_a_worker_is_recycled_above_a_size(queue: Queue) -> None:
    worker = make_worker(queue, recycle_bytes=1, lease="300ms")
    worker.run()
    assert worker.is_recycled


def test_an_error_of_the_store_ends_the_worker_with_that_error(store: ScriptedStore) -> None:
    def broken(_: Exchange) -> Reply:
        raise EngineError(Problem("DT661", "a bug", fixes=("report it",)))

    store.exchange = broken  # type: ignore[method-assign, assignment]
    worker = make_worker(Queue(store))
    with pytest.raises(EngineError, match="a bug"):
        worker.run()
    assert worker.get_status()["state"] == "ended"


def test_an_error_beside_a_worker_that_has_ended_with_one_names_it(store: ScriptedStore) -> None:
    def broken(_: Exchange) -> Reply:
        raise EngineError(Problem("DT661", "a bug", fixes=("report it",)))

    store.exchange = broken  # type: ignore[method-assign, assignment]

    def wait_for_a_result() -> None:
        with make_worker(Queue(store), worker_id="w1") as worker:
            worker.wait(60)
            raise TimeoutError("no result")

    with pytest.raises(TimeoutError) as error:
        wait_for_a_result()
    [note] = error.value.__notes__
    assert note.startswith("the worker w1 had ended with EngineError(")


# --- several workers


def test_jobs_without_gpus_go_to_the_worker_without_gpus_while_it_has_a_slot(queue: Queue, tmp_path: Path) -> None:
    gpus = {"resources": "4cpu, 4GB, 1xA100", "placement_delay": "10s", "worker_id": "gpu"}
    with running_worker(queue, slots=1, worker_id="cpu"), running_worker(queue, **gpus):
        until(lambda: [info.id for info in queue.store.workers() if info.offer] == ["cpu", "gpu"])
        for _ in range(3):
            job = submit(queue, "who_am_i")
            assert job.result(timeout=60)["worker"] == "cpu"
        waiting = submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / "began"))
        wait_for_file(tmp_path / "began")
        assert waiting.record().worker == "cpu"
        assert submit(queue, "who_am_i").result(timeout=60)["worker"] == "gpu"
        (tmp_path / "go").touch()
        wait_for_state(waiting, JobState.SUCCEEDED)


def test_a_worker_that_drains_offers_nothing(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / "began"))
    with running_worker(queue, worker_id="worker-1") as worker:
        wait_for_file(tmp_path / "began")
        worker.request_stop()
        until(lambda: (offer := queue.store.workers()[0].offer) is not None and offer.slots == 0)
        (tmp_path / "go").touch()
        wait_for_state(job, JobState.SUCCEEDED)


def test_a_worker_says_when_its_jobs_will_have_ended(queue: Queue, tmp_path: Path) -> None:
    def ends_in_ms() -> int | None:
        offers = [info.offer for info in queue.store.workers()]
        ends = [offer.ends_ms - offer.offered_ms for offer in offers if offer is not None and offer.ends_ms is not None]
        return ends[0] if ends else None

    with running_worker(queue, worker_id="worker-1", isolation="async", job_timeout="1h", kill_grace="1s"):
        until(lambda: ends_in_ms() == 0)
        paths = str(tmp_path / "go"), str(tmp_path / "began")
        job: Any = queue.submit(f"{APP}:wait_for_file_async", *paths)
        wait_for_file(tmp_path / "began")
        queue.store.wake("worker-1")
        until(lambda: 3_000_000 < (ends_in_ms() or 0) <= 3_601_000)
        (tmp_path / "go").touch()
        wait_for_state(job, JobState.SUCCEEDED)


# --- status


def test_the_status_has_the_fields_of_the_guide(queue: Queue, tmp_path: Path) -> None:
    job = submit(queue, "wait_for_file", str(tmp_path / "go"), str(tmp_path / "began"))
    with running_worker(queue, slots=3, worker_id="worker-1") as worker:
        wait_for_file(tmp_path / "began")
        status = worker.get_status()
        assert (status["active_jobs"], status["available_slots"], status["max_concurrent_jobs"]) == (1, 2, 3)
        assert (status["gpu_enabled"], status["gpu_device"], status["worker_id"]) == (False, None, "worker-1")
        [running] = status["jobs"]
        assert (running["id"], running["function"], running["isolation"]) == (job.id, f"{APP}:wait_for_file", "thread")
        assert (status["state"], status["resources"]["cpus"]) == ("running", 4.0)
        (tmp_path / "go").touch()


def test_a_worker_registers_what_it_has(queue: Queue) -> None:
    with running_worker(queue, queues=["a", "b"], slots=3, worker_id="worker-1", resources="4cpu, 2xA100"):
        until(queue.store.workers)
        [info] = queue.store.workers()
    assert (info.id, info.queues, info.slots) == ("worker-1", ("a", "b"), 3)
    assert (info.details["pid"], info.details["modules"]) == (os.getpid(), [APP])
    resources: Any = info.details["resources"]
    assert Cluster.from_dict(resources).nodes[0].gpus[1].model == "A100"
