"""Job store in a SQLite file: any number of processes and threads of one machine.

Behaviour comes from `transaction.py`, over the rows of `sqlite_table.py`. A step is one write transaction; steps of
concurrent threads share one (`group_commit.py`). What a submitter or a worker relies on survives a power failure when
the method returns: submissions, claims, completions, cancellations, requeues and schedules. Heartbeats, renewals and
purges survive the end of the process, and after a power failure some of the latest may be lost, which harms nothing.

Waiting threads are woken through FIFOs beside the database (`file_wakeup.py`), after the commit. A process that is
killed between its commit and the wake-up sends none; so workers ask again within a third of their lease, and
`wait_finished` looks again every few seconds.

Time is that of `boot_clock.py`. The store records it every few seconds, so that it does not go back at a reboot.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dovetail.jobs.admission import Admission
from dovetail.jobs.store import StoreUnavailableError
from dovetail.jobs.stores import sqlite_queries
from dovetail.jobs.stores.boot_clock import BootClock
from dovetail.jobs.stores.file_wakeup import WakeupFolder
from dovetail.jobs.stores.sqlite_database import SqliteDatabase, closed_error, store_error
from dovetail.jobs.stores.sqlite_table import SqliteTable, read_reservations, read_schedules
from dovetail.jobs.stores.sqlite_workers import read_workers
from dovetail.jobs.transaction import Transaction

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Sequence

    from dovetail.jobs.job import JobRecord, JobSpec, JobState
    from dovetail.jobs.store import (
        Exchange,
        JobFilter,
        Page,
        Purged,
        QueueStats,
        Receipt,
        Reply,
        Reservation,
        Schedule,
        WorkerInfo,
    )
    from dovetail.jobs.stores.file_wakeup import Waiter
    from dovetail.jobs.transaction import Effects

T = TypeVar("T")
LOOK_AGAIN_S = 5.0
"""Interval at which `wait_finished` checks without a wake-up: the process that would have sent it may have been
killed."""
LATEST_EVERY_MS = 5_000
"""Interval at which the store's time is recorded."""
AWAITED_IDS = 256
"""A thread that waits for more jobs than this is woken when any job finishes."""
AWAITED_PAUSE_S = 0.02
"""Pause after such a wake-up."""
IDLE_WAITERS = 8
"""Maximum number of FIFOs that are kept for the next `wait_finished`."""


class SqliteStore:
    """Jobs in a file on a local disk."""

    def __init__(self, path: str | Path, *, clock_ms: Callable[[], int] | None = None) -> None:
        self.path = Path(os.path.realpath(path))
        self._given_clock = clock_ms
        self._admission = Admission()
        self._closed = False
        self._reset()
        self._database = SqliteDatabase(
            self.path, self._on_connected, self._on_begin, self._on_committed, on_forked=self._on_forked
        )

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._wakeups = WakeupFolder(self.path.with_name(f"{self.path.name}-wakeup"))
        self._open_waiters: dict[str, Waiter] = {}
        """Waiters by address."""
        self._waiters: dict[str, Waiter] = {}
        """Waiters by worker."""
        self._bound: set[str] = set()
        """Workers whose waiter the database knows."""
        self._idle_waiters: list[Waiter] = []
        self._to_notify: set[str] = set()
        self._gone: set[str] = set()
        self._topology = -1
        self._is_committed = True
        self._worker_waiters: list[tuple[str, frozenset[str], str]] = []
        self._recorded_ms = self._recording_ms = 0
        # files of waiters are removed when the process ends, and when the store is forgotten
        self._finalizer = weakref.finalize(self, _close_waiters, os.getpid(), self._open_waiters)

    # --- jobs

    def submit(self, specs: Sequence[JobSpec]) -> list[Receipt]:
        return self._step(lambda step: step.submit(specs))

    def cancel(self, ids: Sequence[str], reason: str = "") -> list[JobState | None]:
        return self._step(lambda step: step.cancel(ids, reason))

    def requeue(self, ids: Sequence[str]) -> list[JobState | None]:
        return self._step(lambda step: step.requeue(ids))

    def purge(self, chosen: JobFilter, limit: int = 10_000, keep_bytes: int | None = None) -> Purged:
        def act(step: Transaction) -> Purged:
            removed = step.purge(chosen, limit, keep_bytes)
            self._table.flush()
            self._table.delete_unused_buckets()
            return removed

        return self._step(act, is_durable=_is_never_durable)

    def get(self, ids: Sequence[str]) -> list[JobRecord | None]:
        return self._database.read(lambda db: sqlite_queries.read_jobs(db, ids))

    def find(self, chosen: JobFilter, limit: int = 100, before: str | None = None) -> Page:
        return self._database.read(lambda db: sqlite_queries.find_jobs(db, chosen, limit, before))

    def id_of_key(self, key: str) -> str | None:
        return self._database.read(lambda db: sqlite_queries.id_of_key(db, key))

    def wait_finished(self, ids: Sequence[str], timeout_s: float) -> list[str]:
        found = self._finished_of(ids)
        if found or timeout_s <= 0:
            return found
        try:
            return self._await(ids, time.monotonic() + timeout_s)
        except StoreUnavailableError:
            if self._closed:
                return []
            raise

    def _await(self, ids: Sequence[str], deadline: float) -> list[str]:
        found: list[str] = []
        waiter = self._borrow_waiter()
        named = list(dict.fromkeys(ids)) if len(ids) <= AWAITED_IDS else [""]
        try:
            while not self._closed:
                self._plain_step(lambda: self._table.await_jobs(named, waiter.address))
                found = self._finished_of(ids)
                remaining_s = deadline - time.monotonic()
                if found or remaining_s <= 0:
                    break
                if waiter.wait(min(remaining_s, LOOK_AGAIN_S)) and named == [""]:
                    time.sleep(min(AWAITED_PAUSE_S, max(0.0, deadline - time.monotonic())))
        finally:
            self._return_waiter(waiter, named)
        return found

    def _finished_of(self, ids: Sequence[str]) -> list[str]:
        return self._database.read(lambda db: sqlite_queries.finished_of(db, ids))

    # --- workers

    def register_worker(self, worker: WorkerInfo) -> None:
        address = self._waiter(worker.id).address

        def act(step: Transaction) -> None:
            step.register_worker(worker)
            self._table.bind_worker(worker.id, address)

        self._step(act)
        self._bound.add(worker.id)

    def remove_worker(self, worker: str) -> None:
        self._plain_step(lambda: self._table.delete_worker(worker))
        with self._lock:
            self._bound.discard(worker)
            waiter = self._waiters.pop(worker, None)
        if waiter is not None:
            self._close_waiter(waiter)

    def workers(self) -> list[WorkerInfo]:
        return self._database.read(read_workers)

    def exchange(self, request: Exchange) -> Reply:
        def is_durable(reply: Reply) -> bool:
            return bool(request.completions or reply.claimed)

        return self._step(lambda step: step.exchange(request), but=request.worker, is_durable=is_durable)

    def wait(self, worker: str, timeout_s: float) -> bool:
        if self._closed:
            return False
        waiter = self._waiter(worker)
        if worker not in self._bound:
            # registered by another process or before a fork: what has happened meanwhile is not known
            self._plain_step(lambda: self._table.bind_worker(worker, waiter.address))
            self._bound.add(worker)
            return True
        if waiter.wait(timeout_s):
            return True
        if not waiter.is_reachable:
            with self._lock:
                self._bound.discard(worker)
                self._waiters.pop(worker, None)
            self._close_waiter(waiter)
        return False

    def wait_and_exchange(self, request: Exchange, timeout_s: float) -> Reply | None:
        self.wait(request.worker, timeout_s)
        return None

    def wake(self, worker: str) -> None:
        if not self._closed:
            self._waiter(worker).wake()

    # --- queues and schedules

    def set_paused(self, queue: str, paused: bool) -> None:
        self._step(lambda step: step.set_paused(queue, paused), is_durable=_is_durable)

    def set_limits(self, queue: str, weight: int | None, max_running: int | None) -> None:
        self._step(lambda step: step.set_limits(queue, weight, max_running), is_durable=_is_durable)

    def stats(self) -> list[QueueStats]:
        return self._database.read(sqlite_queries.queue_stats)

    def reservations(self) -> list[Reservation]:
        found = self._database.read(read_reservations)
        return sorted(one for one in found.values() if one.job_id)

    def put_schedule(self, schedule: Schedule) -> None:
        self._step(lambda step: step.put_schedule(schedule), is_durable=_is_durable)

    def remove_schedule(self, name: str) -> bool:
        return self._step(lambda step: step.remove_schedule(name))

    def schedules(self) -> list[Schedule]:
        return self._database.read(read_schedules)

    def fire(self, name: str, fire_ms: int, next_ms: int, spec: JobSpec) -> Receipt | None:
        return self._step(lambda step: step.fire(name, fire_ms, next_ms, spec))

    # --- the store itself

    def now_ms(self) -> int:
        if self._given_clock is not None:
            return self._given_clock()
        offset_ms = self._database.clock_offset_ms
        assert offset_ms is not None
        return BootClock(offset_ms)()

    def local_host(self) -> str:
        return "127.0.0.1"

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._finalizer()
        self._database.close()
        self._wakeups.close()

    # --- steps

    def _step(self, act: Callable[[Transaction], T], but: str = "", is_durable: Callable[[T], bool] = bool) -> T:
        """Run one step, and wake the others that wait for its effects."""

        def run() -> T:
            step = Transaction(self._table, self.now_ms(), self._admission)
            answer = act(step)
            self._table.flush()
            self._to_notify |= self._concerned(step.effects, but)
            return answer

        return self._database.write(run, is_durable)

    def _plain_step(self, act: Callable[[], None]) -> None:
        """Run a change that concerns neither jobs nor schedules, and need not survive a power failure."""
        self._database.write(act)

    def _on_connected(self, db: sqlite3.Connection) -> None:
        self._table = SqliteTable(db)
        self._gone.update(self._wakeups.remove_stale())

    def _on_begin(self) -> None:
        self._table.begin()
        self._to_notify.clear()
        if not self._is_committed:
            self._topology = -1  # of a transaction that was rolled back
        self._is_committed = False
        if self._gone:
            self._table.forget_waiters(self._gone)
            self._gone = set()
        now_ms = self.now_ms()
        if self._given_clock is None and now_ms > self._recorded_ms - LATEST_EVERY_MS:
            self._recording_ms = now_ms + 2 * LATEST_EVERY_MS
            self._table.keep_latest_ms(self._recording_ms)

    def _concerned(self, effects: Effects, but: str) -> set[str]:
        """Waiters to wake."""
        found = self._table.take_waiters(effects.finished) if effects.finished else set()
        if not (effects.queues or effects.workers or effects.all_workers):
            return found
        topology = self._table.topology()
        if topology != self._topology:
            self._worker_waiters, self._topology = self._table.worker_waiters(), topology
        for worker, queues, waiter in self._worker_waiters:
            concerned = effects.all_workers or worker in effects.workers
            if concerned or (worker != but and not effects.queues.isdisjoint(queues)):
                found.add(waiter)
        return found

    def _on_committed(self) -> None:
        self._is_committed = True
        self._recorded_ms = self._recording_ms
        addresses, self._to_notify = self._to_notify, set()
        if addresses:
            self._gone.update(self._wakeups.notify(addresses))

    # --- waiters

    def _waiter(self, worker: str) -> Waiter:
        with self._lock:
            waiter = self._waiters.get(worker)
            if waiter is None:
                waiter = self._waiters[worker] = self._open_waiter()
            return waiter

    def _borrow_waiter(self) -> Waiter:
        with self._lock:
            while self._idle_waiters:
                waiter = self._idle_waiters.pop()
                if waiter.is_reachable:
                    return waiter
                self._close_waiter(waiter)
            return self._open_waiter()

    def _return_waiter(self, waiter: Waiter, ids: Iterable[str]) -> None:
        named = list(ids)
        if not self._closed:
            self._plain_step(lambda: self._table.await_no_jobs(named, waiter.address))
        waiter.wait(0.0)  # forget wake-ups for jobs that the caller has seen
        with self._lock:
            if not self._closed and len(self._idle_waiters) < IDLE_WAITERS:
                self._idle_waiters.append(waiter)
                return
        self._close_waiter(waiter)

    def _open_waiter(self) -> Waiter:
        """Open a new waiter. The caller holds the lock."""
        if self._closed:
            raise closed_error(self.path)
        try:
            waiter = self._wakeups.open_waiter()
        except OSError as error:
            raise store_error(self._wakeups.path, error) from error
        self._open_waiters[waiter.address] = waiter
        return waiter

    def _close_waiter(self, waiter: Waiter) -> None:
        self._open_waiters.pop(waiter.address, None)
        waiter.close()

    def _on_forked(self) -> None:
        """In a forked child: the waiters are the parent's."""
        self._finalizer.detach()
        self._wakeups.abandon()
        for waiter in self._open_waiters.values():
            waiter.abandon()
        self._reset()


def _is_durable(answer: object) -> bool:
    del answer
    return True


def _is_never_durable(answer: object) -> bool:
    del answer
    return False


def _close_waiters(pid: int, waiters: dict[str, Waiter]) -> None:
    if pid == os.getpid():
        for waiter in list(waiters.values()):
            waiter.close()
