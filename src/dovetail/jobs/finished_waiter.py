"""Waiting for many jobs from asyncio: one thread per queue asks the store for all jobs that are awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from dovetail.jobs.store import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.jobs.store import Store

SLICE_S = 0.1
"""Longest time until a job that is awaited later is included in the wait."""
RECONNECT_S = 60.0
"""How long a wait survives a store that cannot be reached."""
RETRY_S = 0.5


class Reconnecting:
    """`Store.wait_finished` that tolerates a store that cannot be reached, for a limited time."""

    def __init__(self, wait_finished: Callable[[Sequence[str], float], list[str]]) -> None:
        self._wait_finished = wait_finished
        self._lost_at: float | None = None

    def __call__(self, ids: Sequence[str], timeout_s: float) -> list[str]:
        try:
            found = self._wait_finished(ids, timeout_s)
        except StoreUnavailableError:
            now = time.monotonic()
            self._lost_at = now if self._lost_at is None else self._lost_at
            if now > self._lost_at + RECONNECT_S:
                raise
            time.sleep(min(RETRY_S, timeout_s))
            return []
        self._lost_at = None
        return found


class FinishedWaiter:
    """Futures that are done when their job is finished. The thread runs only while something is awaited."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._awaited: dict[str, list[asyncio.Future[None]]] = {}
        self._process = 0
        """Id of the process in which the thread runs; 0 if it does not run. A forked child has no thread."""

    def future(self, job_id: str) -> asyncio.Future[None]:
        """A future of the running loop."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._awaited.setdefault(job_id, []).append(future)
            if self._process != os.getpid():
                self._process = os.getpid()
                threading.Thread(target=self._run, name="dovetail-awaited-jobs", daemon=True).start()
        return future

    def _run(self) -> None:
        wait = Reconnecting(self._store.wait_finished)
        while True:
            with self._lock:
                self._drop_cancelled()
                ids = list(self._awaited)
                if not ids:
                    self._process = 0
                    return
            try:
                finished, error = wait(ids, SLICE_S), None
            except Exception as raised:  # raised where the job is awaited
                finished, error = ids, raised
            with self._lock:
                done = [future for job_id in finished for future in self._awaited.pop(job_id, ())]
            for future in done:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    future.get_loop().call_soon_threadsafe(_finish, future, error)

    def _drop_cancelled(self) -> None:
        for job_id, futures in list(self._awaited.items()):
            self._awaited[job_id] = kept = [one for one in futures if not one.done() and not one.get_loop().is_closed()]
            if not kept:
                del self._awaited[job_id]


def _finish(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
