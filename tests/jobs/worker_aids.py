"""Workers for tests: in this process, without a claim of the machine, with short leases."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.jobs.application import Application
from dovetail.jobs.queue import Queue
from dovetail.jobs.workers.worker import Worker
from jobs.worker_app import APP
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.jobs.job import JobState
    from dovetail.jobs.job_handle import Job

RESOURCES = "4cpu, 4GB"


def application() -> Application:
    return Application.load([APP])


def make_worker(queue: Any, **options: Any) -> Worker:
    given: dict[str, Any] = {"app": application(), "slots": 4, "resources": RESOURCES, "say": lambda _: None}
    return Worker(queue, **given | options)


@contextmanager
def running_worker(queue: Any, **options: Any) -> Iterator[Worker]:
    worker = make_worker(queue, **options)
    try:
        yield worker.start()
    finally:
        worker.stop_now()
        if worker.error is not None:  # what waited for the worker has failed without the reason
            raise worker.error


def memory_queue() -> Queue:
    return Queue("memory:", if_no_worker="ignore")


def state_of(job: Job) -> JobState:
    return job.record().state


def wait_for_state(job: Job, *states: JobState) -> None:
    until(lambda: state_of(job) in states, f"job {job.id} is {' or '.join(states)}")


def wait_for_file(path: Path) -> None:
    until(path.exists, f"{path.name} exists")


def text_in(path: Path) -> str:
    """The text that another process writes to a file."""
    until(lambda: path.exists() and path.read_text(), f"{path.name} has text")
    return path.read_text()


def write(path: Path, text: str) -> None:
    """Write a file that appears with its text."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    unfinished.rename(path)


def is_running(pid: int) -> bool:
    """Whether a process exists that is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]
