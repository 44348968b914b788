"""The job functions of runs, in the process of the test: results, resume, drain, and what may not run."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.control.lifecycle import RunState
from dovetail.errors import ConfigError, Problem, RunError
from dovetail.job_runs import functions
from dovetail.jobs.job import Outcome
from dovetail.jobs.job_function import JobFunction
from dovetail.jobs.job_id import new_job_id, time_ms_of
from dovetail.jobs.payload_codec import NO_CALL, PayloadCodec
from dovetail.jobs.run_submission import FOLDERS_VARIABLE
from dovetail.jobs.workers.current_job import CurrentJob, JobPreempted, running_job
from dovetail.jobs.workers.job_call import FinalError, JobStopped, call_job
from dovetail.machine.job_seat import SEAT_VARIABLE, JobSeat
from dovetail.observe.run_folder import RunFolder, runs_folder
from dovetail.runtime.run_handle import Run, active_runs
from dovetail.runtime.run_lock import RunLock
from job_runs.run_scenes import MODULE, ROWS, RunScene
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.time_limit(120)

SEAT = JobSeat(2000, 4 << 30)


@dataclass
class JobHere:
    """A job whose attempts run in this process."""

    scene: RunScene
    id: str = field(default_factory=new_job_id)
    attempt: int = 0
    is_cancelled: bool = False
    is_preempted: bool = False
    reports: list[tuple[float | None, str | None]] = field(default_factory=list)

    def run(self, kind: str, **arguments: Any) -> dict[str, Any]:
        """The next attempt."""
        self.attempt += 1
        current = CurrentJob(
            *(self.id, self.attempt, self.attempt, "default", "w1"),
            lambda fraction, text: self.reports.append((fraction, text)),
            lambda: self.is_cancelled,
            lambda: self.is_preempted,
        )
        with running_job(current):
            found: dict[str, Any] = functions.run.function(self.scene.file(kind), **arguments)
            return found

    def folder(self, kind: str) -> RunFolder:
        return RunFolder(runs_folder() / functions.run_id_of_job(self.id, self.scene.file(kind)))

    def then(self, action: Any) -> threading.Thread:
        """Call a function when the run is in the middle of its work, and then release it."""

        def act() -> None:
            until(self.scene.is_held, "it is in the middle")
            action()
            self.scene.release()

        thread = threading.Thread(target=act)
        thread.start()
        return thread


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunScene]:
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DOVETAIL_INSIDE", "1")
    monkeypatch.setenv(SEAT_VARIABLE, SEAT.to_text())
    monkeypatch.setenv(FOLDERS_VARIABLE, json.dumps([str((tmp_path / "files").resolve())]))
    yield RunScene(tmp_path / "files")
    sys.modules.pop(MODULE, None)


@pytest.fixture
def job(scene: RunScene) -> JobHere:
    return JobHere(scene)


def message_of(job: JobHere, kind: str, **arguments: Any) -> str:
    """Why it can never run."""
    with pytest.raises(FinalError) as caught:
        job.run(kind, **arguments)
    return str(caught.value)


def test_the_result_of_a_job_has_the_figures_of_its_run(job: JobHere, scene: RunScene) -> None:
    scene.release()
    result = job.run("pipeline")
    folder = job.folder("pipeline")
    assert (result["run"], result["folder"]) == (folder.id, str(folder.path))
    assert (result["status"], result["items"], result["failed"]) == ("finished", ROWS, 0)
    assert result["outputs"] == [str(scene.folder / "out.jsonl")]
    scene.check_output("pipeline")
    assert job.reports[-1] == (1.0, f"{ROWS:,} of {ROWS:,} items")


def test_a_run_uses_the_resources_of_its_job(job: JobHere, scene: RunScene) -> None:
    scene.release()
    job.run("pipeline")
    assert json.loads(job.folder("pipeline").header.read_text())["cluster"] == "1x(2cpu, 4GB)"
    (scene.folder / "large.yaml").write_text(
        f"source: in.jsonl\nsink: large.jsonl\nstages: [{{name: d, run: '{MODULE}:double', resources: {{cpus: 64}}}}]"
    )
    assert "64" in message_of(JobHere(scene), "large")


def test_source_sink_and_limit_of_a_job_replace_those_of_the_file(job: JobHere, scene: RunScene) -> None:
    scene.release()
    rows = scene.folder / "in.jsonl"
    for name, text in (("one.jsonl", rows.read_text()), ("two.jsonl", rows.read_text())):
        (scene.folder / name).write_text(text)
    sources = [str(scene.folder / name) for name in ("one.jsonl", "two.jsonl")]
    result = job.run("pipeline", source=sources, sink=str(scene.folder / "new.jsonl"), limit=ROWS + 10)
    assert result["items"] == ROWS + 10
    assert len(scene.output("new.jsonl")) == ROWS + 10
    assert JobHere(scene).run("recipe", limit=20)["items"] == 20


def test_an_attempt_after_a_lost_completion_answers_without_computing_again(job: JobHere, scene: RunScene) -> None:
    scene.release()
    first = job.run("pipeline")
    calls = len(scene.calls())
    assert job.run("pipeline") == first
    assert len(scene.calls()) == calls


@pytest.mark.parametrize(
    ("kind", "reason", "raised"),
    [("pipeline", "is_cancelled", JobStopped), ("recipe", "is_preempted", JobPreempted)],
)
def test_a_job_that_is_to_end_drains_its_run_and_the_next_attempt_resumes_it(
    job: JobHere, scene: RunScene, kind: str, reason: str, raised: type[BaseException]
) -> None:
    def cancel() -> None:
        setattr(job, reason, True)
        until(lambda: any(run._active.state is RunState.DRAINING for run in runs_here()), "it drains")

    acting = job.then(cancel)
    with pytest.raises(raised):
        job.run(kind)
    acting.join()
    assert not (scene.folder / "out.jsonl").exists()
    assert 0 < len(scene.calls()) < ROWS
    setattr(job, reason, False)
    assert job.run(kind)["status"] == "finished"
    scene.check_output(kind)
    assert len(scene.calls()) == ROWS


def drain_runs() -> None:
    for run in runs_here():
        run.drain()


def runs_here() -> list[Run]:
    return [run for run in active_runs() if isinstance(run, Run)]


def test_a_run_that_another_command_drains_ends_its_job_for_good(job: JobHere) -> None:
    acting = job.then(drain_runs)
    assert "drained before its end" in message_of(job, "pipeline")
    acting.join()
    assert job.run("pipeline")["status"] == "finished"


def test_a_stage_that_fails_is_an_error_that_is_retried(job: JobHere) -> None:
    with pytest.raises(RunError, match="cannot do that"):
        job.run("failing")


def test_an_attempt_waits_for_the_driver_of_the_earlier_one(
    job: JobHere, scene: RunScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting = job.then(drain_runs)
    message_of(job, "pipeline")
    acting.join()
    lock = RunLock(job.folder("pipeline"))
    monkeypatch.setattr(functions, "LOCK_WAIT_S", 0.1)
    with pytest.raises(ConfigError, match="still running"):
        job.run("pipeline")
    lock.release()
    job.run("pipeline")
    scene.check_output("pipeline")


def test_an_attempt_without_the_folder_of_the_earlier_one_reports_that_it_starts_from_the_beginning(
    job: JobHere, scene: RunScene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.release()
    job.attempt = 1
    job.run("pipeline")
    assert "starts from the beginning" in capsys.readouterr().err


def test_files_and_paths_outside_of_the_folders_are_refused(job: JobHere, scene: RunScene, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text((scene.folder / "pipeline.yaml").read_text())
    (scene.folder / "link.yaml").symlink_to(tmp_path / "p.yaml")
    assert "is not in a folder" in message_of(job, "link")
    assert "source /etc/passwd" in message_of(job, "pipeline", source="/etc/passwd")
    assert f"sink {tmp_path}/x.jsonl" in message_of(job, "pipeline", sink=f"{tmp_path}/x.jsonl")
    assert scene.calls() == []
    assert MODULE not in sys.modules


@pytest.mark.parametrize(
    "arguments",
    [
        {"source": {"run": "os:system"}},
        {"sink": {"run": "os:system"}},
        {"sink": "steps.py"},
        {"engine": "ray:evil:6379"},
        {"limit": "1"},
    ],
)
def test_arguments_that_no_client_sends_are_refused(job: JobHere, arguments: dict[str, Any]) -> None:
    assert next(iter(arguments)) in message_of(job, "pipeline", **arguments)


def test_a_run_that_cannot_begin_is_not_tried_again(job: JobHere, scene: RunScene) -> None:
    for name, text, part in (
        ("nowhere", f"source: in.jsonl\nstages: [{{name: d, run: '{MODULE}:double'}}]", "no sink"),
        ("nothing", f"sink: o.jsonl\nstages: [{{name: d, run: '{MODULE}:double'}}]", "no source"),
        ("misspelt", f"source: in.jsonl\nsink: o.jsonl\nstages: [{{name: d, run: '{MODULE}:doubel'}}]", "double"),
        ("broken", "stages: [", ""),
    ):
        (scene.folder / f"{name}.yaml").write_text(text)
        assert part in message_of(job, name)


def test_a_final_error_ends_a_job_with_all_its_problems() -> None:
    def end() -> None:
        raise FinalError([Problem("DT635", "one", fixes=("do this",)), Problem("DT636", "two", place="p.yaml:3")])

    ending = call_job(JobFunction(end, "m:end"), NO_CALL, "json", PayloadCodec(), CurrentJob("1", 1, 1, "q", "w"))
    assert (ending.outcome, ending.final) == (Outcome.ERROR, True)
    assert ending.error == "one\n  fix  do this\np.yaml:3: two"


def test_the_run_of_a_job_has_the_time_at_which_the_job_was_submitted() -> None:
    job_id = new_job_id()
    found = functions.run_id_of_job(job_id, "/data/My Pipeline.yaml")
    assert found == functions.run_id_of_job(job_id, "/data/My Pipeline.yaml")
    assert found.endswith("-my-pipeline")
    assert functions.run_id_of_job(new_job_id(), "/data/My Pipeline.yaml") != found
    assert 0 <= time_ms_of(new_job_id()) - time_ms_of(job_id) < 60_000
