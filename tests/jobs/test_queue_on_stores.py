"""dt.Queue by the URL of a durable store: SQLite and Redis. The common part is in test_queue.py."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.jobs.job import JobSpec, JobState
from dovetail.jobs.job_id import new_job_id
from jobs import queue_functions
from jobs.queue_aids import QueueScene
from jobs.queue_functions import add, fail, note
from jobs.test_memory_store import ManualClock
from jobs.worker_aids import running_worker, wait_for_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["sqlite", "redis"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QueueScene]:
    queue_functions.calls.clear()
    if request.param == "sqlite":
        queue = dt.Queue(f"sqlite:///{tmp_path}/jobs.db")
    else:
        server = request.getfixturevalue("redis_server")
        queue = dt.Queue(server.url, files=tmp_path / "jobs.db.files")
        with server.client() as client:
            client.flushall()
    with queue:
        yield QueueScene(queue, ManualClock())


def test_jobs_are_submitted_run_awaited_and_purged(scene: QueueScene, tmp_path: Path) -> None:
    queue = scene.queue
    first = queue.submit(note, "x" * 1_000_000, key="once")
    second = queue.submit(add, 1, after=first)
    failing = queue.submit(fail, "broken", retries=0, priority="low")
    assert queue.submit(note, 5, key="once") == first
    assert [job.id for job in queue.list(limit=2)] == [failing.id, second.id]

    async def main() -> list[Any]:
        results = asyncio.gather(first, second, failing.aresult(), return_exceptions=True)
        await asyncio.sleep(0)
        await asyncio.to_thread(scene.run)
        return list(await results)

    text, number, error = asyncio.run(main())
    assert (len(text), number) == (1_000_000, 1)
    assert isinstance(error, dt.JobError)
    assert "raise ValueError(message)" in error.traceback
    assert queue.purge(state="succeeded").jobs == 2
    assert [path for path in (tmp_path / "jobs.db.files").rglob("*") if path.is_file()] == []
    assert [job.status for job in queue.list()] == [JobState.FAILED]


def test_what_was_written_into_the_store_past_the_queue_is_refused_and_never_imported(scene: QueueScene) -> None:
    ids = [new_job_id(), new_job_id()]
    functions = [("os:system", b'[["touch /x"],{}]'), ("antigravity:geohash", b"[[],{}]")]
    scene.queue.store.submit(
        [JobSpec(job, function, call) for job, (function, call) in zip(ids, functions, strict=True)]
    )
    with running_worker(scene.queue):
        for job, (function, _) in zip(ids, functions, strict=True):
            wait_for_state(scene.queue.get(job), JobState.FAILED)
            assert f"does not run '{function}'" in scene.queue.get(job).record().error
    assert "antigravity" not in sys.modules


def test_concurrent_submissions_of_one_key_are_one_job(scene: QueueScene) -> None:
    with ThreadPoolExecutor(4) as pool:
        jobs = list(pool.map(lambda _: scene.queue.submit(add, 1, key="nightly"), range(40)))
    assert len({job.id for job in jobs}) == 1
    assert [job.created for job in jobs].count(True) == 1


def test_many_jobs_schedules_and_pauses(scene: QueueScene) -> None:
    queue = scene.queue
    jobs = queue.submit_many(note, range(1_050), timeout="1h", retries={"error": 1}, resources=dt.Resources(cpus=1))
    queue.pause()
    assert scene.run() == 0
    queue.resume()
    assert scene.run(jobs=30) == 30
    assert queue_functions.calls == list(range(30))
    assert jobs[29].result() == 29
    assert queue.cancel(jobs[30:]) == [JobState.CANCELLED] * 1_020
    schedule = queue.submit(note, "report", cron="@daily", timezone="Europe/Berlin")
    assert queue.submit(note, "report", cron="@daily", timezone="Europe/Berlin").next_time == schedule.next_time
    assert [one.function for one in queue.schedules()] == ["jobs.queue_functions:note"]
    assert schedule.remove()
