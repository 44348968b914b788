"""Workers that claim and run jobs of a store in simulated time.

A worker claims when the store wakes it, when one of its jobs ends, at the time that the store has named, and at least
once per third of its lease, as `worker_loop.py` does. Jobs run for the time that they were submitted with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from dovetail.jobs.job import JobState, Outcome
from dovetail.jobs.store import Claim, Completion, Exchange, JobFilter, WorkerInfo
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.jobs.wait_reason import wait_reason
from dovetail.resources.fit import Fit
from dovetail.resources.free_resources import NodeKind
from jobs.store_traces import TraceClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.jobs.job import JobSpec
    from dovetail.jobs.store import ClaimedJob, Store
    from dovetail.resources.cluster import Node
    from dovetail.resources.seat import Seat

LEASE_MS = 10**9
"""So that leases need no renewals."""
CLAIM_EVERY_MS = 5_000
PLACEMENT_DELAY_MS = 50


class Start(NamedTuple):
    """A job that a worker has started."""

    time_ms: int
    worker: str
    spec: JobSpec


@dataclass
class SimulatedWorker:
    id: str
    node: Node
    slots: int
    queues: tuple[str, ...] = ("default",)
    running: dict[str, tuple[ClaimedJob, Seat, int | None]] = field(default_factory=dict)
    """Job -> (job, seat, when it ends by its timeout)."""
    ended: list[Completion] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = NodeKind(self.node).untouched()

    def start(self, job: ClaimedJob, now_ms: int) -> None:
        """AssertionError if the job does not fit."""
        fit = Fit(job.shape)
        ways = fit.assignments(self.free)
        assert ways, f"{job.spec.id} does not fit on {self.id}: {self.free}"
        seat = fit.seat(self.id, ways[0])
        free = self.free.taken(seat)
        assert free is not None
        assert len(self.running) < self.slots
        self.free = free
        timeout_ms = job.spec.timeout_ms
        self.running[job.spec.id] = (job, seat, None if timeout_ms is None else now_ms + timeout_ms)

    def end(self, job_id: str) -> None:
        job, seat, _ = self.running.pop(job_id)
        self.free = self.free.given_back(seat)
        self.ended.append(Completion(job_id, job.lease.token, Outcome.SUCCEEDED))

    def ends_in_ms(self, now_ms: int) -> int | None:
        ends = [end_ms for _, _, end_ms in self.running.values()]
        known = [end_ms for end_ms in ends if end_ms is not None]
        return None if len(known) < len(ends) else max([now_ms, *known]) - now_ms


class Simulation:
    """A fleet of workers on one store."""

    def __init__(self, *workers: SimulatedWorker, make_store: Callable[[TraceClock], Store] = MemoryStore) -> None:
        self.clock = TraceClock()
        self.began_ms = self.clock.now_ms
        self.store = make_store(self.clock)
        self.workers = {worker.id: worker for worker in workers}
        self.starts: list[Start] = []
        self.ends: dict[str, int] = {}
        self.durations: dict[str, int] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._waiting = 0
        """Jobs that are submitted and not started."""
        self._claims_at = {worker.id: self.began_ms for worker in workers}
        for worker in workers:
            self.store.register_worker(WorkerInfo(worker.id, worker.queues, worker.slots))
            self._at(self.began_ms, partial(self._claim_again, worker.id, self.began_ms))

    @property
    def now_ms(self) -> int:
        """Since the beginning."""
        return self.clock.now_ms - self.began_ms

    def submit(self, time_ms: int, spec: JobSpec, duration_ms: int) -> None:
        """Submit a job at this time after the beginning."""
        self.durations[spec.id] = duration_ms
        self._at(self.began_ms + time_ms, lambda: self._submit(spec))

    def run(self, until_ms: int, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called whenever nothing happens for longer than the placement delay."""
        while self._events and self._events[0][0] <= self.began_ms + until_ms:
            time_ms, _, act = heappop(self._events)
            self.clock.now_ms = max(self.clock.now_ms, time_ms)
            act()
            self._wake()
            if not self._events or self._events[0][0] > self.clock.now_ms + PLACEMENT_DELAY_MS:
                check()

    def unexplained(self) -> list[str]:
        """Ready jobs that no reservation, limit or pause keeps waiting, and that fit on a worker."""
        now_ms = self.store.now_ms()
        stats = {one.queue: one for one in self.store.stats()}
        reservations, workers = self.store.reservations(), self.store.workers()
        found = []
        for record in self.store.find(JobFilter(frozenset({JobState.READY})), 10_000).jobs:
            reason = wait_reason(record, stats, reservations, workers, now_ms)
            if not reason or reason.startswith("share"):
                found.append(record.id)
        return found

    def start_of(self, job_id: str) -> Start:
        return next(start for start in self.starts if start.spec.id == job_id)

    def _submit(self, spec: JobSpec) -> None:
        self.store.submit([spec])
        self._waiting += 1

    def _end(self, worker: str, job_id: str) -> None:
        self.workers[worker].end(job_id)
        self.ends[job_id] = self.now_ms
        self._claim(worker)

    def _claim_again(self, worker: str, time_ms: int) -> None:
        if self._claims_at[worker] == time_ms:  # it has not claimed since
            self._claim(worker)

    def _wake(self) -> None:
        woken = True
        while woken:
            woken = False
            for worker in self.workers:
                if self.store.wait(worker, 0.0):
                    self._claim(worker)
                    woken = True

    def _claim(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        completions, worker.ended = worker.ended, []
        slots = worker.slots - len(worker.running)
        ends_in_ms = worker.ends_in_ms(self.clock.now_ms)
        claim = Claim(slots, worker.free, worker.queues, PLACEMENT_DELAY_MS, ends_in_ms=ends_in_ms)
        reply = self.store.exchange(Exchange(worker_id, completions, (), claim, LEASE_MS))
        assert not reply.refused
        for job in reply.claimed:
            worker.start(job, self.clock.now_ms)
            self._waiting -= 1
            self.starts.append(Start(self.now_ms, worker_id, job.spec))
            self._at(self.clock.now_ms + self.durations[job.spec.id], partial(self._end, worker_id, job.spec.id))
        again_ms = self.clock.now_ms + CLAIM_EVERY_MS
        if reply.next_ms is not None:
            again_ms = min(again_ms, max(reply.next_ms, self.clock.now_ms + 1))
        self._claims_at[worker_id] = again_ms
        if self._waiting:
            self._at(again_ms, partial(self._claim_again, worker_id, again_ms))

    def _at(self, time_ms: int, act: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._events, (time_ms, self._number, act))
