"""Waiting for conditions, and time limits of tests that could hang."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, Protocol

from dovetail.runtime.run_handle import _ACTIVE_RUNS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LONG = bool(os.environ.get("DOVETAIL_TEST_LONG"))
PATIENCE_S = 60.0
"""Timeout of a single wait: long enough for a busy machine."""


def until(condition: Callable[[], object], what: str = "the condition holds", timeout_s: float = PATIENCE_S) -> float:
    """Wait until the condition is true, and return the seconds that it took.

    A condition that takes long to evaluate is evaluated less often: it would take the CPU from what it waits for.
    """
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        if condition():
            return time.monotonic() - began
        now = time.monotonic()
        assert now - began < timeout_s, f"after {timeout_s:g} s it is still not true that {what}"
        time.sleep(min(max(0.005, 5 * (now - asked)), 0.5))


@contextmanager
def time_limit(seconds: float = 2 * PATIENCE_S) -> Iterator[None]:
    """Fail a test that hangs, and cancel the runs that it leaves; `pytest.mark.time_limit(seconds)` applies it."""

    def expire(*_: object) -> NoReturn:
        raise AssertionError(f"the test did not finish within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for run in list(_ACTIVE_RUNS):  # left by a failed test; a later test must not share the machine with them
            run.cancel("the test that started it has ended")
            run._over.wait(PATIENCE_S)


class WorkerEngine(Protocol):
    """An engine whose workers are processes."""

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]: ...


def knows_pids(engine: WorkerEngine, worker: int, ranks: int = 1) -> bool:
    """Whether the pids of a worker are known, or it has ended. They come from the fork server, so a worker may be ready
    before."""
    name_and_pids = engine.processes().get(worker)
    return name_and_pids is None or len(name_and_pids[1]) >= ranks
