"""dt.Queue and dt.Job: submission, results, lists, changes, purge, dependencies, schedules, the current queue."""

from __future__ import annotations

import asyncio
import datetime
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.jobs.job import DependencyPolicy, JobState, Retries
from dovetail.jobs.payload_files import log_name
from dovetail.jobs.store import StoreUnavailableError
from jobs import queue_functions
from jobs.queue_aids import QueueScene, make_scene
from jobs.queue_functions import add, fail, note, square, train

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.jobs.job import JobSpec
    from dovetail.jobs.store import Receipt

DAY_MS = 86_400_000


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[QueueScene]:
    queue_functions.calls.clear()
    scene = make_scene(files=tmp_path / "files")
    yield scene
    scene.queue.close()


# --- results


def test_the_result_of_a_job_is_that_of_its_function(scene: QueueScene) -> None:
    job = scene.queue.submit(add, 1, b=2)
    assert job.status is JobState.READY
    assert scene.run() == 1
    assert (job.result(), job.status, job.progress, job.created) == (3, JobState.SUCCEEDED, 1.0, True)
    assert [(attempt.number, attempt.worker) for attempt in job.attempts] == [(1, "w1")]


def test_a_failed_job_raises_with_the_traceback_of_the_worker(scene: QueueScene) -> None:
    job = scene.queue.submit(fail, "no such model", retries=0)
    scene.run()
    with pytest.raises(dt.JobError, match="no such model") as caught:
        job.result()
    assert caught.value.job_id == job.id
    assert caught.value.state == "failed"
    assert "raise ValueError(message)" in caught.value.traceback
    assert job.error == "ValueError: no such model"


def test_a_dead_letter_and_a_cancelled_job_raise(scene: QueueScene) -> None:
    dead = scene.queue.submit(fail, "always", retries={"error": 1, "backoff": 0})
    scene.run()
    with pytest.raises(dt.JobError, match=r"all retries are used up.*always"):
        dead.result()
    cancelled = scene.queue.submit(add, 1)
    assert cancelled.cancel("not needed") is JobState.CANCELLED
    with pytest.raises(dt.JobError, match="was cancelled: not needed"):
        cancelled.result()
    assert [job.id for job in scene.queue.dead()] == [dead.id]


def test_a_result_that_does_not_come_in_time_is_a_timeout_and_says_why(scene: QueueScene) -> None:
    job = scene.queue.submit(add, 1)
    with pytest.raises(TimeoutError, match="no worker is running for the queue 'default'") as caught:
        job.result(timeout=0)
    assert isinstance(caught.value, dt.JobTimeoutError)
    assert job.wait(timeout=0) is JobState.READY


@pytest.mark.parametrize("timeout", [-1, "1h", float("nan"), float("inf"), True])
def test_a_timeout_of_result_is_a_number_of_seconds(scene: QueueScene, timeout: object) -> None:
    with pytest.raises(dt.ConfigError, match="is not a number of seconds"):
        scene.queue.submit(add, 1).result(timeout=timeout)  # type: ignore[arg-type]


def test_a_thread_that_waits_gets_the_result_when_the_job_is_completed(scene: QueueScene) -> None:
    job = scene.queue.submit(add, 20, 22)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.result, 60)
        scene.run()
        assert waiting.result(60) == 42


def test_many_results_are_awaited_without_blocking_the_loop(scene: QueueScene) -> None:
    jobs = scene.queue.submit_many(add, [(number, 1) for number in range(100)])

    async def main() -> list[object]:
        results = asyncio.gather(*jobs)
        await asyncio.sleep(0)
        await asyncio.to_thread(scene.run)
        return list(await results)

    assert asyncio.run(main()) == [number + 1 for number in range(100)]


def test_awaiting_raises_as_result_does(scene: QueueScene) -> None:
    failing = scene.queue.submit(fail, "x", retries=0)
    scene.run()
    waiting = scene.queue.submit(add, 1)

    async def main() -> None:
        with pytest.raises(dt.JobError, match="x"):
            await failing
        with pytest.raises(dt.JobTimeoutError):
            await waiting.aresult(timeout=0.01)

    asyncio.run(main())


def test_a_wait_survives_a_store_that_is_away_for_a_moment(scene: QueueScene, monkeypatch: pytest.MonkeyPatch) -> None:
    job = scene.queue.submit(add, 1)
    scene.run()
    wait_finished, failures = scene.queue.store.wait_finished, iter(range(3))

    def away(ids: Sequence[str], timeout_s: float) -> list[str]:
        if next(failures, None) is not None:
            raise StoreUnavailableError(dt.Problem("DT660", "the store is away"))
        return wait_finished(ids, timeout_s)

    monkeypatch.setattr(scene.queue.store, "wait_finished", away)
    monkeypatch.setattr("dovetail.jobs.finished_waiter.RETRY_S", 0)
    assert job.result() == 1
    failures = iter(range(1_000_000_000))
    monkeypatch.setattr("dovetail.jobs.finished_waiter.RECONNECT_S", 0)
    with pytest.raises(dt.EngineError, match="the store is away"):
        job.result()


# --- options


def test_every_option_reaches_the_job(scene: QueueScene) -> None:
    other = scene.queue.submit(add, 1)
    at = datetime.datetime(2030, 1, 31, 8, tzinfo=datetime.UTC)
    job = scene.queue.submit(
        add,
        1,
        resources=dt.Resources(cpus=2, memory="1GB"),
        queue="gpu",
        priority="low",
        timeout="90s",
        retries={"error": 5, "lost": 1, "backoff": "10s"},
        key="once",
        after=[other],
        if_dependency_fails="block",
        at=at,
        isolation="thread",
    )
    spec = job.record().spec
    assert spec.shape == dt.Resources(cpus=2, memory="1GB").shape()
    assert (spec.queue, spec.priority, spec.timeout_ms, spec.key, spec.isolation) == (
        "gpu",
        -10,
        90_000,
        "once",
        "thread",
    )
    assert spec.retries == Retries(error=5, lost=1, backoff_ms=10_000)
    assert (spec.after, spec.if_dependency_fails) == ((other.id,), DependencyPolicy.BLOCK)
    assert spec.at_ms == at.timestamp() * 1000


def test_options_that_are_not_given_are_those_of_the_declaration(scene: QueueScene) -> None:
    spec = scene.queue.submit(train, {}).record().spec
    assert spec.shape == dt.Resources(cpus=2, gpus=1).shape()
    assert (spec.queue, spec.priority, spec.timeout_ms, spec.isolation) == ("gpu", 10, 3_600_000, "process")
    assert spec.retries == Retries(0, 0, 0, 0)
    own = scene.queue.submit(train, {}, kwargs={}, timeout="2h", priority=3, resources={"cpus": 1}).record().spec
    assert (own.priority, own.timeout_ms, own.shape.cards) == (3, 7_200_000, 0)


def test_a_name_has_the_options_of_the_declaration_if_its_module_is_imported(scene: QueueScene) -> None:
    assert scene.queue.submit("jobs.queue_functions:train", {}).record().spec.queue == "gpu"
    unknown = scene.queue.submit("not_installed.here:train", {"lr": 0.1}).record().spec
    assert (unknown.function, unknown.queue, unknown.timeout_ms) == ("not_installed.here:train", "default", None)


def test_a_queue_has_a_default_for_the_name_of_the_queue() -> None:
    scene = make_scene(queue="light")
    assert scene.queue.submit(add, 1).record().spec.queue == "light"
    assert scene.queue.submit(train, {}).record().spec.queue == "gpu"


def test_a_local_time_and_unix_seconds_are_the_same_as_a_time_with_a_zone(scene: QueueScene) -> None:
    aware = datetime.datetime(2030, 1, 31, 8, tzinfo=datetime.UTC)
    local = aware.astimezone().replace(tzinfo=None)
    times: list[Any] = [aware, local, aware.isoformat(), aware.timestamp()]
    assert {scene.queue.submit(add, 1, at=time).record().spec.at_ms for time in times} == {1_896_076_800_000}


def test_a_delayed_job_runs_after_its_delay(scene: QueueScene) -> None:
    job = scene.queue.submit(add, 1, delay="10s")
    assert (job.status, scene.run()) == (JobState.SCHEDULED, 0)
    scene.clock.advance(10_000)
    assert scene.run() == 1


def test_arguments_with_names_of_options_are_passed_by_kwargs(scene: QueueScene) -> None:
    with pytest.raises(dt.ConfigError, match="timeout=5 is ambiguous") as caught:
        scene.queue.submit(train, {}, timeout=5)
    assert caught.value.codes == ("DT604",)
    argument = scene.queue.submit(train, {}, kwargs={"timeout": 5.0, "epochs": 2})
    both = scene.queue.submit(train, {}, timeout="2h", kwargs={"timeout": 7.0})
    assert (argument.record().spec.timeout_ms, both.record().spec.timeout_ms) == (3_600_000, 7_200_000)
    scene.run()
    assert argument.result() == {"timeout": 5.0, "epochs": 2}
    assert both.result() == {"timeout": 7.0, "epochs": 1}


def test_a_declared_lambda_is_submitted_by_its_name_in_the_module(scene: QueueScene) -> None:
    job = scene.queue.submit(square, 7)
    scene.run()
    assert (job.result(), job.snapshot.spec.function) == (49, "jobs.queue_functions:square")


# --- keys, many


def test_a_thousand_concurrent_submissions_of_one_key_are_one_job(scene: QueueScene) -> None:
    start = threading.Barrier(8)

    def submit(_: int) -> list[dt.Job]:
        start.wait(60)
        return [scene.queue.submit(add, 1, key="nightly") for _ in range(125)]

    with ThreadPoolExecutor(8) as pool:
        jobs = [job for found in pool.map(submit, range(8)) for job in found]
    assert len({job.id for job in jobs}) == 1
    assert [job.created for job in jobs].count(True) == 1
    assert len(scene.queue.list()) == 1
    assert scene.queue.find_key("nightly") == jobs[0]
    assert scene.queue.find_key("daily") is None


def test_items_are_positional_arguments_if_they_are_tuples(scene: QueueScene) -> None:
    jobs = [*scene.queue.submit_many(add, [(1, 2), 3]), *scene.queue.submit_many(add, [4], kwargs={"b": 5})]
    scene.run()
    assert [job.result() for job in jobs] == [3, 3, 9]


def test_many_jobs_are_submitted_in_one_step_per_thousand_and_claimed_in_order(
    scene: QueueScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    submit = scene.queue.store.submit

    def counted(specs: Sequence[JobSpec]) -> list[Receipt]:
        sizes.append(len(specs))
        return submit(specs)

    monkeypatch.setattr(scene.queue.store, "submit", counted)
    jobs = scene.queue.submit_many(note, iter(range(2_500)), priority="low")
    assert sizes == [1000, 1000, 500]
    scene.run(jobs=20)
    assert queue_functions.calls == list(range(20))
    assert jobs[0].snapshot.spec.priority == -10


def test_many_jobs_can_have_keys(scene: QueueScene) -> None:
    first = scene.queue.submit_many(add, [1, 2], keys=["a", "b"])
    again = scene.queue.submit_many(add, [2, 3], keys=["b", "c"])
    assert (again[0], again[0].created, again[1].created) == (first[1], False, True)
    for keys, message in ((["a"], "1 entries for 2 items"), (["a", ""], "is not a text of 1 to 500")):
        with pytest.raises(dt.ConfigError, match=message):
            scene.queue.submit_many(add, [1, 2], keys=keys)


# --- dependencies


def test_a_graph_of_200_jobs_runs_in_order(scene: QueueScene) -> None:
    jobs: list[dt.Job] = []
    parents: list[list[int]] = []
    for number in range(200):
        mine = sorted({number * 7 % number, number // 2, number - 1}) if number else []
        jobs.append(scene.queue.submit(note, number, after=[jobs[parent] for parent in mine], priority=number))
        parents.append(mine)
    assert scene.run() == 200
    position = {number: at for at, number in enumerate(queue_functions.calls)}
    assert all(position[parent] < position[number] for number in range(200) for parent in parents[number])
    assert {job.status for job in jobs} == {JobState.SUCCEEDED}


def test_a_failed_job_cancels_or_blocks_the_jobs_that_wait_for_it(scene: QueueScene) -> None:
    failing = scene.queue.submit(fail, "x", retries=0)
    cancelled = scene.queue.submit(add, 1, after=failing)
    transitive = scene.queue.submit(add, 1, after=cancelled.id)
    blocked = scene.queue.submit(add, 1, after=[failing], if_dependency_fails="block")
    scene.run()
    assert [job.status for job in (cancelled, transitive, blocked)] == ["cancelled", "cancelled", "blocked"]
    assert failing.id in cancelled.error
    assert failing.requeue() is JobState.READY


def test_a_job_cannot_wait_for_an_unknown_one(scene: QueueScene) -> None:
    with pytest.raises(dt.ConfigError, match="the queue has no job 0123abc") as caught:
        scene.queue.submit(add, 1, after=["0123abc"])
    assert caught.value.codes == ("DT611",)
    assert len(scene.queue.list()) == 0


def test_a_job_is_not_an_argument_but_something_to_wait_for(scene: QueueScene) -> None:
    job = scene.queue.submit(add, 1)
    with pytest.raises(dt.ConfigError, match=r"pass value\.id, with after=value"):
        scene.queue.submit(note, job)


# --- lists and changes


def test_lists_have_pages_and_filters(scene: QueueScene) -> None:
    ids = [job.id for job in scene.queue.submit_many(add, range(25))]
    scene.queue.submit(train, {})
    found: list[str] = []
    page = scene.queue.list(queue="default", limit=10)
    while True:
        found += [job.id for job in page]
        if page.next_id is None:
            break
        page = scene.queue.list(queue="default", limit=10, before=page.next_id)
    assert found == ids[::-1]
    assert len(scene.queue.list(function="jobs.queue_functions:train")) == len(scene.queue.list(function=train)) == 1
    assert len(scene.queue.list(state=["ready", "dead"])) == 26
    assert len(scene.queue.list(state="succeeded")) == 0
    assert scene.queue.list(limit=1)[0].snapshot.spec.queue == "gpu"


def test_unknown_jobs_are_named(scene: QueueScene) -> None:
    job = scene.queue.submit(add, 1)
    assert scene.queue.get(job.id) == job
    for act in (scene.queue.get, scene.queue.cancel, scene.queue.requeue):
        with pytest.raises(dt.ConfigError, match=r"no job .*0123abc") as caught:
            act("0123abc")
        assert caught.value.codes == ("DT612",)
    with pytest.raises(dt.ConfigError, match="no job"):
        scene.queue.get("x" * 10_000_000)


def test_a_running_job_is_asked_to_stop(scene: QueueScene) -> None:
    jobs = scene.queue.submit_many(add, [1, 2])
    scene.claim()
    assert scene.queue.cancel(jobs) == [JobState.LEASED, JobState.CANCELLED]
    assert jobs[0].record().cancel_requested


def test_a_paused_queue_gives_no_jobs(scene: QueueScene) -> None:
    scene.queue.pause()
    scene.queue.submit(add, 1)
    assert scene.run() == 0
    [stats] = scene.queue.stats()
    assert (stats.queue, stats.paused, stats.counts) == ("default", True, {JobState.READY: 1})
    scene.queue.resume("default")
    assert scene.run() == 1


def test_a_queue_is_configured_with_limits(scene: QueueScene) -> None:
    scene.queue.configure("a", weight=2, max_running=10)
    scene.queue.configure("a", max_running=None)
    [stats] = scene.queue.stats()
    assert (stats.queue, stats.weight, stats.max_running) == ("a", 2, None)
    scene.queue.configure("a", weight=None)
    assert scene.queue.stats() == []
    for wrong in (0, 1.5, "2", True):
        with pytest.raises(dt.ConfigError, match="weight"):
            scene.queue.configure(weight=wrong)


# --- purge and files


def test_large_data_goes_to_files_and_is_purged_with_its_job(scene: QueueScene, tmp_path: Path) -> None:
    large = ["x" * 1000] * 1000
    jobs = [scene.queue.submit(note, large), scene.queue.submit(note, large)]
    scene.run()
    assert jobs[0].result() == large
    record = jobs[0].record()
    assert (record.spec.encoding, record.result_encoding, len(record.spec.payload) < 100) == (
        "json+file",
        "json+file",
        True,
    )
    assert scene.queue.files is not None
    scene.queue.files.put(log_name(jobs[0].id, 1), b"epoch 1\n")
    assert jobs[0].logs() == jobs[0].logs(attempt=1) == "epoch 1\n"
    files = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    assert (len(files), {path.stat().st_mode & 0o777 for path in files}) == (5, {0o600})
    waiting = scene.queue.submit(note, large)
    assert scene.queue.purge(state="succeeded").jobs == 2
    [kept] = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    assert waiting.id in str(kept)
    with pytest.raises(dt.ConfigError, match="was purged"):
        jobs[0].result()


def test_a_purge_takes_what_is_old_or_large(scene: QueueScene) -> None:
    old = scene.queue.submit(add, 1)
    scene.run()
    scene.clock.advance(2 * DAY_MS)
    new = scene.queue.submit_many(note, ["x" * 600] * 4)
    scene.run()
    assert scene.queue.purge(older_than="1d").jobs == 1
    with pytest.raises(dt.ConfigError, match="was purged"):
        old.record()
    assert scene.queue.purge(keep_bytes="3KB").jobs == 2
    assert [job.id for job in scene.queue.list()] == [job.id for job in new[:1:-1]]
    assert scene.queue.purge(older_than=0).jobs == 2


def test_results_expire_by_age_and_size_and_dead_letters_stay(tmp_path: Path) -> None:
    scene = make_scene(result_ttl="1d", result_bytes="2KB", files=tmp_path)
    dead = scene.queue.submit(fail, "x", retries={"error": 1, "backoff": 0})
    scene.queue.submit(add, 1)
    scene.run()
    scene.clock.advance(DAY_MS)
    scene.queue.submit_many(note, ["x" * 600] * 4)
    scene.run()
    assert scene.queue.expire_results().jobs == 1 + 3
    assert [job.status for job in scene.queue.list(limit=10)] == ["succeeded", "dead"]
    assert dead.status is JobState.DEAD


def test_files_of_a_submission_that_is_not_stored_are_deleted(scene: QueueScene, tmp_path: Path) -> None:
    large = "x" * 1_000_000
    first = scene.queue.submit(note, large, key="once")
    assert scene.queue.submit(note, large, key="once") == first
    with pytest.raises(dt.ConfigError, match="DT611"):
        scene.queue.submit(note, large, after="0123abc")
    with pytest.raises(dt.ConfigError, match="DT605"):
        scene.queue.submit_many(note, [large, large, {1}])
    with pytest.raises(dt.ConfigError, match="DT618"):
        scene.queue.submit(note, large, cron="@daily")
    assert len([path for path in (tmp_path / "files").rglob("*") if path.is_file()]) == 1


# --- schedules


def test_a_schedule_submits_its_job_at_its_times(scene: QueueScene) -> None:
    schedule = scene.queue.submit(note, "report", cron="0 3 * * *", timezone="Europe/Berlin", priority="high")
    assert [one.name for one in scene.queue.schedules()] == [schedule.name] == ["jobs.queue_functions:note"]
    assert scene.run() == 0
    for _ in range(3):
        scene.clock.advance(DAY_MS)
        scene.claim(slots=0)
    jobs = schedule.jobs()
    assert [job.snapshot.spec.priority for job in jobs] == [10, 10, 10]
    assert scene.run() == 3
    assert queue_functions.calls == ["report"] * 3
    assert (schedule.remove(), schedule.remove(), len(schedule.jobs())) == (True, False, 3)


def test_declaring_a_schedule_again_keeps_its_next_time_unless_it_changed(scene: QueueScene) -> None:
    first = scene.queue.submit(note, 1, cron="0 3 * * *")
    scene.clock.advance(DAY_MS * 2)
    assert scene.queue.submit(note, 1, cron="0 3 * * *").next_time == first.next_time
    changed = scene.queue.submit(note, 1, cron="0 4 * * *")
    assert (len(scene.queue.schedules()), changed.next_time > first.next_time) == (1, True)
    scene.queue.submit(note, 2, cron="0 4 * * *", key="another")
    assert len(scene.queue.schedules()) == 2


def test_after_a_downtime_a_schedule_is_caught_up_once(scene: QueueScene) -> None:
    schedule = scene.queue.submit(note, 1, cron="*/5 * * * *")
    scene.clock.advance(30 * DAY_MS)
    scene.claim("w1", 0)
    scene.claim("w2", 0)
    assert len(schedule.jobs()) == 1


# --- workers


def test_a_job_that_no_running_worker_can_run_is_shown_or_refused(scene: QueueScene) -> None:
    scene.register("w1", "default", resources="(8cpu, 32GB)")
    with pytest.warns(dt.NoWorkerWarning, match="none serves the queue 'gpu'"):
        scene.queue.submit(train, {})
    with pytest.warns(dt.NoWorkerWarning, match="needs 16 CPUs"):
        job = scene.queue.submit(add, 1, resources=dt.Resources(cpus=16))
    scene.queue.submit(add, 2, resources=dt.Resources(cpus=16))  # said once
    scene.queue.submit(add, 3, resources=dt.Resources(cpus=8))
    problem = job.problem()
    assert problem is not None
    assert problem.evidence == ("w1 has (8cpu, 32GB): 8 CPUs in all, 16 needed",)
    strict = dt.Queue(scene.queue.store, if_no_worker="refuse")
    with pytest.raises(dt.InfeasibleError, match="no worker can run this"):
        strict.submit(add, 1, resources=dt.Resources(cpus=16))


# --- the current queue


def test_a_function_is_submitted_to_the_current_queue(
    scene: QueueScene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dovetail.jobs.queue._used_queue", None)
    monkeypatch.delenv("DOVETAIL_QUEUE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dt.ConfigError, match="no queue is given") as caught:
        add.submit(1)
    assert caught.value.codes == ("DT617",)
    monkeypatch.setenv("DOVETAIL_QUEUE", "memory:")
    configured = add.submit(1)
    assert add.submit(2, priority="high") in configured._queue.list()
    scene.queue.use()
    assert add.submit(3) in scene.queue.list()
    with dt.Queue("memory:") as inner:
        assert add.submit(4) in inner.list()
    assert add.submit(5) in scene.queue.list()


def test_a_queue_shows_its_url_without_the_password() -> None:
    from dovetail.jobs.stores.store_url import shown_url

    assert repr(dt.Queue("memory:")) == "<queue memory:>"
    assert shown_url("redis://me:secret@host:6379/0") == "redis://me:***@host:6379/0"
    assert shown_url("redis://:secret@host:6379/0") == "redis://:***@host:6379/0"


def test_the_examples_of_the_page_on_submitting_run(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "submitting-jobs.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "submit.py"]
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout == "ready 5\n"
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True).stdout == "ready 9\n"
    with dt.Queue(f"sqlite:///{tmp_path}/jobs.db") as queue:
        assert [job.snapshot.spec.function for job in queue.list(state="blocked")] == ["tasks:report"] * 2
        assert [schedule.name for schedule in queue.schedules()] == ["tasks:report"]
