"""Submission of runs: arguments, resources, and what is reported before a worker sees the job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.errors import ConfigError
from dovetail.jobs.job import JobState
from dovetail.jobs.payload_codec import PayloadCodec, decode_call
from dovetail.jobs.run_submission import BACKFILL_FUNCTION, RUN_FUNCTION, resolved_folders
from jobs.worker_aids import make_worker, memory_queue, running_worker, wait_for_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.jobs.job_handle import Job
    from dovetail.jobs.queue import Queue


@pytest.fixture
def queue() -> Iterator[Queue]:
    with memory_queue() as found:
        yield found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text("stages: [{name: a, run: 'does_not_exist:a'}]")
    return tmp_path


def call_of(job: Job) -> dict[str, Any]:
    args, kwargs = decode_call(job.record().spec.payload, "json", PayloadCodec())
    assert args == ()
    return kwargs


def problems_of(action: Any, *args: Any, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        action(*args, **options)
    return [str(problem.message) for problem in caught.value.problems]


def test_a_run_is_a_job_with_absolute_paths_and_one_cpu(queue: Queue, folder: Path) -> None:
    job = queue.submit_run("p.yaml", source="data/*.jsonl", sink="out.jsonl", limit=10)
    spec = job.record().spec
    assert (spec.function, spec.isolation, spec.shape.cpu_milli) == (RUN_FUNCTION, "process", 1000)
    paths = {name: str(folder / path) for name, path in {"file": "p.yaml", "sink": "out.jsonl"}.items()}
    assert call_of(job) == {**paths, "source": str(folder / "data/*.jsonl"), "limit": 10}


def test_a_run_takes_the_options_of_a_job(queue: Queue) -> None:
    job = queue.submit_run("p.yaml", resources={"cpus": 4, "gpus": 1}, queue="runs", timeout="1h", key="nightly")
    spec = job.record().spec
    assert (spec.queue, spec.timeout_ms, spec.key, spec.shape.cpu_milli) == ("runs", 3_600_000, "nightly", 4000)


def test_a_backfill_is_a_job(queue: Queue, folder: Path) -> None:
    job = queue.submit_backfill("t.lance", "length", "functions:length", where="id > 3", row_timeout=5, timeout="2h")
    assert job.record().spec.function == BACKFILL_FUNCTION
    assert job.record().spec.timeout_ms == 7_200_000
    assert call_of(job) == {
        "table": str(folder / "t.lance"),
        "columns": ["length"],
        "udf": "functions:length",
        "folder": str(folder),
        "options": {"where": "id > 3", "row_timeout": 5},
    }


def test_all_mistakes_of_a_run_are_reported_at_once(queue: Queue) -> None:
    found = problems_of(queue.submit_run, "q.yaml", sink="stages.py", limit=-1, engine="ray:evil:6379")
    assert len(found) == 4
    for part, message in zip(("sink", "limit", "engine", "no file q.yaml"), found, strict=True):
        assert part in message


def test_a_file_that_only_workers_have_is_named_by_its_absolute_path(queue: Queue) -> None:
    assert call_of(queue.submit_run("/data/only-there.yaml"))["file"] == "/data/only-there.yaml"


def test_a_file_with_mistakes_is_not_submitted(queue: Queue) -> None:
    Path("broken.yaml").write_text("stages: [")
    Path("text.yaml").write_text("hello")
    Path("out.jsonl").write_text("{}")
    for name in ("broken.yaml", "text.yaml", "out.jsonl"):
        assert len(problems_of(queue.submit_run, name)) == 1
    assert list(queue.list()) == []


def test_a_backfill_names_no_other_code_or_cluster(queue: Queue) -> None:
    found = problems_of(
        queue.submit_backfill, "t.lance", "n", "length", trust_table=True, cluster="64cpu", workers=[1], engine="x"
    )
    assert [message.partition(" ")[0] for message in found] == ["udf='length'", "engine='x'", "a", "a", "workers=[1]"]


def test_a_run_has_a_process_of_its_own(queue: Queue) -> None:
    [message] = problems_of(queue.submit_run, "p.yaml", isolation="thread")
    assert "a process of its own" in message


def test_a_worker_without_folders_refuses_runs(queue: Queue) -> None:
    job = queue.submit_run("p.yaml")
    with running_worker(queue):
        wait_for_state(job, JobState.FAILED)
    assert "this worker runs no pipelines" in job.record().error
    assert "dovetail worker --runs FOLDER" in job.record().error


def test_the_folders_of_a_worker_exist(queue: Queue, folder: Path) -> None:
    Path("data").mkdir()
    Path("link").symlink_to("data")
    assert resolved_folders(["link", "data", "s3://bucket/x"]) == (str(folder / "data"), "s3://bucket/x")
    [message] = problems_of(make_worker, queue, runs=["missing"])
    assert "missing" in message
