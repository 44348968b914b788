"""`dovetail jobs metrics`. It runs in a process in `tests/export/test_exported_commands.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from command import run_command
from dovetail.cli.jobs_metrics import QueueSource
from dovetail.jobs.metrics import metrics_text
from dovetail.jobs.store import StoreUnavailableError, WorkerInfo
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.jobs.workers.readiness import readiness_problem

if TYPE_CHECKING:
    from pathlib import Path


class FailingStore(MemoryStore):
    is_away = False

    def workers(self) -> Any:
        if self.is_away:
            raise StoreUnavailableError(dt.Problem("DT660", "no connection"))
        return super().workers()


class CountdownEvent:
    """Event that is set after `count` waits."""

    def __init__(self, count: int) -> None:
        self.count = count

    def wait(self, timeout: float) -> bool:
        self.count -= 1
        return self.count < 0


def test_the_status_has_the_sums_over_all_workers() -> None:
    store = FailingStore()
    store.register_worker(WorkerInfo("a", slots=4))
    store.register_worker(WorkerInfo("b", slots=2))
    source = QueueSource(store)
    assert readiness_problem(source.get_status()) is not None, "it has read nothing yet"
    source.read()
    status = source.get_status()
    assert (status["workers"], status["active_jobs"], status["available_slots"]) == (2, 0, 6)
    assert readiness_problem(status) is None
    assert "dovetail_worker_" not in metrics_text(status, store.stats(), store.workers(), store.now_ms())


def test_it_is_ready_while_the_store_answers() -> None:
    store = FailingStore()
    source = QueueSource(store)
    source.read()
    store.is_away = True
    source.read_until(CountdownEvent(1))
    assert "cannot be reached" in str(readiness_problem(source.get_status()))
    store.is_away = False
    source.read_until(CountdownEvent(1))
    assert readiness_problem(source.get_status()) is None


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--host", "0.0.0.0"), 2, "fix  export DOVETAIL_TOKEN="),
        (("--queue-url", "redis://127.0.0.1:1/0"), 5, "error[DT660]"),
        ((), 2, "no queue: "),
    ],
)
def test_what_is_wrong_is_one_clear_error(tmp_path: Path, words: tuple[str, ...], code: int, text: str) -> None:
    done = run_command("jobs", "metrics", *words, cwd=tmp_path, DOVETAIL_QUEUE="", DOVETAIL_TOKEN="")
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
