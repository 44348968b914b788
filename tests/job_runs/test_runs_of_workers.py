"""Runs as jobs of workers in processes of their own: resume after a kill, cancellation, refusal."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from dovetail.data.commit_log import read_commit_log
from dovetail.job_runs.functions import run_id_of_job
from dovetail.jobs.job import JobState, Outcome
from dovetail.observe.run_folder import RunFolder, runs_folder
from job_runs.run_scenes import ROWS, RunScene
from jobs.crash_suite import Fleet
from jobs.worker_aids import wait_for_state
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.jobs.job_handle import Job

pytestmark = [pytest.mark.processes, pytest.mark.time_limit(600 if LONG else 180)]

KILLS = 10 if LONG else 1
KINDS = ("pipeline", "recipe", "backfill")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunScene:
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path / "files")
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    return RunScene(tmp_path / "files")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(f"sqlite:///{tmp_path / 'jobs.db'}")
    try:
        yield fleet
    finally:
        fleet.close()


def start(fleet: Fleet, scene: RunScene, count: int = 1, **options: Any) -> None:
    fleet.start(count, **{"app": [], "runs": [str(scene.folder)], "resources": "2cpu, 4GB", "slots": 1} | options)


def folder_of(job: Job, scene: RunScene, kind: str) -> RunFolder:
    return RunFolder(runs_folder() / run_id_of_job(job.id, scene.file(kind)))


def wait_for_saved_work(job: Job, scene: RunScene, kind: str) -> None:
    """Until a part of the work is saved, and the rest is held."""
    until(scene.is_held, "the run is in the middle of its work")
    if kind == "backfill":
        import lance

        table = str(scene.folder / "table.lance")
        until(lambda: lance.dataset(table).to_table(filter="n IS NOT NULL").num_rows >= 100, "a fragment is committed")
    else:
        log = folder_of(job, scene, kind).commit_log
        until(lambda: read_commit_log(log).entries, "an epoch is committed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_worker_is_killed_is_resumed_by_another_one(fleet: Fleet, scene: RunScene, kind: str) -> None:
    start(fleet, scene, 2)
    job = scene.submit(fleet.queue, kind, retries={"lost": 100})
    wait_for_saved_work(job, scene, kind)
    for attempt in range(2, KILLS + 2):
        if attempt > 2:
            start(fleet, scene)
        holder = fleet.holder(job)
        before = psutil.Process(holder.process.pid).children(recursive=True)
        holder.kill()
        until(lambda attempt=attempt: job.record().attempt == attempt, "it runs again")  # type: ignore[misc]
        assert job.record().worker != holder.name
        until(lambda before=before: not any(one.is_running() for one in before), "nothing of the attempt is left")  # type: ignore[misc]
        (scene.folder / "held").unlink()
        until(scene.is_held, "the next attempt is in the middle of its work")
    scene.release()
    result = job.result(PATIENCE_S)
    assert result["status"] == "finished"
    outcomes = [one.outcome for one in job.record().attempts]
    assert outcomes == [Outcome.LOST] * KILLS + [Outcome.SUCCEEDED]
    scene.check_output(kind)
    # what was saved is not computed again
    assert len(scene.calls()) < ROWS + (KILLS * ROWS) // 2
    fleet.check_nothing_is_left()


def test_a_cancelled_job_drains_its_run_which_a_requeue_resumes(fleet: Fleet, scene: RunScene) -> None:
    start(fleet, scene, kill_grace=PATIENCE_S)
    job = scene.submit(fleet.queue, "pipeline")
    wait_for_saved_work(job, scene, "pipeline")
    job.cancel("not now")
    until(lambda: job.record().cancel_requested, "it is cancelled")
    header = folder_of(job, scene, "pipeline").header
    until(lambda: _is_draining(job, scene), "it drains")
    scene.release()  # the work in flight can end
    wait_for_state(job, JobState.CANCELLED)
    assert '"drained"' in header.read_text()
    assert not (scene.folder / "out.jsonl").exists()
    calls = len(scene.calls())
    assert calls < ROWS
    job.requeue()
    assert job.result(PATIENCE_S)["run"] == header.parent.name
    scene.check_output("pipeline")
    assert len(scene.calls()) == ROWS


def _is_draining(job: Job, scene: RunScene) -> bool:
    """Whether the run has recorded that it drains."""
    log = folder_of(job, scene, "pipeline").events
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
    return any(line.get("k") == "run" and line.get("state") == "draining" for line in lines)


@pytest.mark.long
def test_a_cancelled_run_that_does_not_end_is_killed_after_the_graces(fleet: Fleet, scene: RunScene) -> None:
    start(fleet, scene, kill_grace=0.3)
    job = scene.submit(fleet.queue, "pipeline")
    until(scene.is_held, "the run is in the middle of its work")
    worker = psutil.Process(fleet.holder(job).process.pid)
    job.cancel()
    wait_for_state(job, JobState.CANCELLED)
    assert not (scene.folder / "out.jsonl").exists()
    until(lambda: not _run_processes(worker), "its processes have ended")


def _run_processes(worker: psutil.Process) -> list[psutil.Process]:
    """Processes of runs: guards of local engines, and everything below them, apart from those of the worker."""
    found = []
    for process in worker.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if len(process.parents()) >= 5 + len(worker.parents()):
                found.append(process)
    return found


def test_an_actor_system_runs_until_its_job_is_cancelled(fleet: Fleet, scene: RunScene) -> None:
    start(fleet, scene, kill_grace=PATIENCE_S)
    job = scene.submit(fleet.queue, "actors")
    until(lambda: "is ready" in (job.record().message or ""), "the system is ready")
    job.cancel()
    wait_for_state(job, JobState.CANCELLED)
    [folder] = [one for one in runs_folder().iterdir() if (one / "run.json").exists()]
    assert '"running"' not in (folder / "run.json").read_text()
