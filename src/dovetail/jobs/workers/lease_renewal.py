"""Renewal of the leases of a worker, on a thread of its own: once per third of a lease, one exchange for all attempts.

So a job that keeps the loop or the interpreter busy does not lose its lease, and one that ends is not renewed again.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from dovetail.jobs.store import Exchange, Renewal, StoreUnavailableError
from dovetail.jobs.workers.running_attempt import StopReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.jobs.store import Reply, Store
    from dovetail.jobs.workers.attempt_table import AttemptTable
    from dovetail.jobs.workers.running_attempt import RunningAttempt

    Stop = Callable[[RunningAttempt, StopReason, str], None]

LEASE_LOST = "the lease was lost: the worker was stopped or cut off for longer than a lease"
MIN_INTERVAL_S = 0.2
"""Minimum time between early renewals, which are made when a cancellation may have been requested."""
RETRY_S = 0.25
"""Delay after a failed renewal. Short, because the leases may be about to expire."""


class LeaseRenewal:
    """The thread, and the renewals that the loop adds to its exchanges."""

    def __init__(
        self,
        store: Store,
        worker: str,
        lease_ms: int,
        table: AttemptTable,
        stop: Stop,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`stop`: ends an attempt. `on_tick`: called once per third of a lease."""
        self._store = store
        self._worker = worker
        self._lease_ms = lease_ms
        self._table = table
        self._stop = stop
        self._on_tick = on_tick
        self._interval_s = lease_ms / 3000
        self._renewed_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dovetail-lease-renewal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(self._interval_s)

    def _run(self) -> None:
        delay_s = self._interval_s
        while not self._closing.wait(delay_s):
            delay_s = self._interval_s
            self._on_tick()
            renewals = self.collect()
            if renewals:
                try:
                    reply = self._store.exchange(Exchange(self._worker, (), renewals, None, self._lease_ms))
                except StoreUnavailableError:
                    self.give_back(renewals)
                    delay_s = min(RETRY_S, self._interval_s)
                else:
                    self.apply(reply)

    # --- also called by the loop

    def early_in_s(self) -> float:
        """Seconds until the loop may renew, before it is due."""
        return self._renewed_at + MIN_INTERVAL_S - time.monotonic()

    def collect(self) -> list[Renewal]:
        """A renewal for every running attempt, with its progress if that has changed; of a gang, that of rank 0."""
        self._renewed_at = time.monotonic()
        found = []
        for attempt in list(self._table.running.values()):
            job_id, token, _ = attempt.key
            if attempt.reported or attempt.key.rank:
                found.append(Renewal(job_id, token))
            else:
                attempt.reported = True  # before it is read: a report in between is sent again
                found.append(Renewal(job_id, token, attempt.progress, attempt.message))
        return found

    def give_back(self, renewals: Sequence[Renewal]) -> None:
        """Handle renewals that were not sent: their progress is sent with the next ones."""
        for renewal in renewals:
            if renewal.progress is not None or renewal.message is not None:
                for attempt in self._table.of_lease(renewal.job_id, renewal.token):
                    attempt.reported = False

    def apply(self, reply: Reply) -> None:
        """Stop attempts that were cancelled or preempted, and those whose lease is lost. An attempt that has just ended
        is not running any more: its refused renewal means nothing."""
        running = self._table.running
        for key in reply.refused:
            for attempt in self._table.of_lease(key.job_id, key.token):
                self._stop(attempt, StopReason.LEASE_LOST, LEASE_LOST)
        for ids, reason in ((reply.cancelled, StopReason.CANCELLED), (reply.preempted, StopReason.PREEMPTED)):
            if ids:
                chosen = set(ids)
                for attempt in list(running.values()):
                    if attempt.key[0] in chosen:
                        self._stop(attempt, reason, "")
