"""Job store in the memory of one process: the reference implementation of the store port."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeVar

from dovetail.jobs.admission import Admission
from dovetail.jobs.job import JobState
from dovetail.jobs.offer_groups import OfferGroups
from dovetail.jobs.ordering import order_of
from dovetail.jobs.store import (
    PLAIN_QUEUE,
    Exchange,
    JobFilter,
    Offer,
    OfferingWorker,
    Page,
    Purged,
    QueueSettings,
    QueueStats,
    Receipt,
    Reply,
    Reservation,
    Schedule,
    WorkerInfo,
    is_accepted,
    purgeable_states,
)
from dovetail.jobs.transaction import Effects, Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from dovetail.jobs.job import JobRecord, JobSpec
    from dovetail.jobs.job_table import Bucket
    from dovetail.resources.shape import Shape

T = TypeVar("T")
ALL = ""
"""Stands for all queues in place of the name of one."""


def unix_clock() -> Callable[[], int]:
    """A clock that counts like Unix time from now on, and that no change of the system's clock moves."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (time.monotonic_ns() + offset_ns) // 1_000_000


class MemoryStore:
    """Jobs in the memory of one process."""

    def __init__(self, clock_ms: Callable[[], int] | None = None) -> None:
        self._clock_ms = clock_ms or unix_clock()
        self._lock = threading.RLock()
        self._finished = threading.Condition(self._lock)
        self._table = MemoryTable()
        self._admission = Admission()
        self._news = threading.Condition(self._lock)
        self._news_of_queues: Counter[str] = Counter()
        """How often workers of a queue were woken; under ALL those of all queues."""
        self._news_seen: dict[str, int] = {}
        """Wake-ups that each worker has seen: thus waking thousands of workers is one addition."""
        self._woken: set[str] = set()
        """Workers that were woken by their names."""
        self._closed = False

    # --- jobs

    def submit(self, specs: Sequence[JobSpec]) -> list[Receipt]:
        return self._step(lambda step: step.submit(specs))

    def cancel(self, ids: Sequence[str], reason: str = "") -> list[JobState | None]:
        return self._step(lambda step: step.cancel(ids, reason))

    def requeue(self, ids: Sequence[str]) -> list[JobState | None]:
        return self._step(lambda step: step.requeue(ids))

    def purge(self, chosen: JobFilter, limit: int = 10_000, keep_bytes: int | None = None) -> Purged:
        return self._step(lambda step: step.purge(chosen, limit, keep_bytes))

    def get(self, ids: Sequence[str]) -> list[JobRecord | None]:
        with self._lock:
            return [self._table.get(job_id) for job_id in ids]

    def find(self, chosen: JobFilter, limit: int = 100, before: str | None = None) -> Page:
        with self._lock:
            found = [record for record in self._table.records() if is_accepted(chosen, record)]
        found = sorted((record for record in found if before is None or record.id < before), key=_id, reverse=True)
        jobs = [without_contents(record) for record in found[:limit]]
        return Page(jobs, jobs[-1].id if len(found) > limit else None)

    def id_of_key(self, key: str) -> str | None:
        with self._lock:
            return self._table.id_of_key(key)

    def wait_finished(self, ids: Sequence[str], timeout_s: float) -> list[str]:
        with self._finished:
            self._finished.wait_for(lambda: self._closed or self._finished_of(ids), timeout_s)
            return self._finished_of(ids)

    def _finished_of(self, ids: Sequence[str]) -> list[str]:
        records = [(job_id, self._table.get(job_id)) for job_id in ids]
        return [job_id for job_id, record in records if record is None or record.state.is_finished]

    # --- workers

    def register_worker(self, worker: WorkerInfo) -> None:
        with self._lock:
            if self._take_news(worker.id):
                self._woken.add(worker.id)
            self._step(lambda step: step.register_worker(worker))
            self._news_seen[worker.id] = self._news_for(worker.id)

    def remove_worker(self, worker: str) -> None:
        with self._lock:
            self._table.delete_worker(worker)
            self._news_seen.pop(worker, None)
            self.wake(worker)

    def workers(self) -> list[WorkerInfo]:
        with self._lock:
            return self._table.workers()

    def exchange(self, request: Exchange) -> Reply:
        return self._step(lambda step: step.exchange(request), but=request.worker)

    def wait(self, worker: str, timeout_s: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._closed or self._take_news(worker), timeout_s)

    def wait_and_exchange(self, request: Exchange, timeout_s: float) -> Reply | None:
        self.wait(request.worker, timeout_s)
        return None

    def wake(self, worker: str) -> None:
        with self._news:
            self._woken.add(worker)
            self._news.notify_all()

    # --- queues and schedules

    def set_paused(self, queue: str, paused: bool) -> None:
        self._step(lambda step: step.set_paused(queue, paused))

    def set_limits(self, queue: str, weight: int | None, max_running: int | None) -> None:
        self._step(lambda step: step.set_limits(queue, weight, max_running))

    def stats(self) -> list[QueueStats]:
        with self._lock:
            return queue_stats(self._table.records(), self._table.queue_settings())

    def reservations(self) -> list[Reservation]:
        with self._lock:
            return sorted(one for one in self._table.reservations().values() if one.job_id)

    def put_schedule(self, schedule: Schedule) -> None:
        self._step(lambda step: step.put_schedule(schedule))

    def remove_schedule(self, name: str) -> bool:
        return self._step(lambda step: step.remove_schedule(name))

    def schedules(self) -> list[Schedule]:
        with self._lock:
            return self._table.schedules()

    def fire(self, name: str, fire_ms: int, next_ms: int, spec: JobSpec) -> Receipt | None:
        return self._step(lambda step: step.fire(name, fire_ms, next_ms, spec))

    # --- the store itself

    def now_ms(self) -> int:
        return self._clock_ms()

    def local_host(self) -> str:
        return "127.0.0.1"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._news.notify_all()
            self._finished.notify_all()

    def _step(self, act: Callable[[Transaction], T], but: str = "") -> T:
        """Run one step and wake the others that wait for its effects."""
        with self._lock:
            step = Transaction(self._table, self._clock_ms(), self._admission)
            answer = act(step)
            self._wake(step.effects, but)
            return answer

    def _wake(self, effects: Effects, but: str) -> None:
        if effects.finished:
            self._finished.notify_all()
        if not (effects.queues or effects.workers or effects.all_workers):
            return
        self._woken |= effects.workers
        for queue in effects.queues:
            self._news_of_queues[queue] += 1
            if but in self._news_seen and queue in self._table.queues_of(but):
                self._news_seen[but] += 1
        self._news_of_queues[ALL] += effects.all_workers
        self._news.notify_all()

    def _news_for(self, worker: str) -> int:
        news = self._news_of_queues
        return news[ALL] + sum(news[queue] for queue in self._table.queues_of(worker))

    def _take_news(self, worker: str) -> bool:
        """Whether a worker was woken since the last time."""
        seen, self._news_seen[worker] = self._news_seen.get(worker, 0), self._news_for(worker)
        if worker in self._woken:
            self._woken.remove(worker)
            return True
        return worker in self._table.worker_ids and self._news_seen[worker] > seen


class MemoryTable:
    """Rows in dictionaries. Indexes by time and order are heaps whose outdated entries are skipped."""

    def __init__(self) -> None:
        self._records: dict[str, JobRecord] = {}
        self._ids_by_key: dict[str, str] = {}
        self._dependants: dict[str, set[str]] = {}
        self._times: list[tuple[int, str]] = []
        self._buckets: dict[str, dict[Shape, MemoryBucket]] = {}
        self._queue_settings: dict[str, QueueSettings] = {}
        self._reservations: dict[str, Reservation] = {}
        self._leased: dict[str, int] = {}
        """Leased jobs by queue."""
        self._workers: dict[str, WorkerInfo] = {}
        self._offers = OfferGroups()
        self._leases: dict[str, int] = {}
        self._deferrals: dict[str, int] = {}
        """Job id -> when a worker left the job to a better one, oldest first."""
        self._assigned: dict[str, set[str]] = {}
        self._schedules: dict[str, Schedule] = {}

    def records(self) -> Iterable[JobRecord]:
        return self._records.values()

    def prefetch(self, ids: Iterable[str]) -> None:
        pass

    def get(self, job_id: str) -> JobRecord | None:
        return self._records.get(job_id)

    def payload(self, record: JobRecord) -> bytes:
        return record.spec.payload

    def put(self, record: JobRecord) -> None:
        job_id = record.spec.id
        before = self._records.get(job_id)
        self._records[job_id] = record
        if before is None and record.spec.key is not None:
            self._ids_by_key[record.spec.key] = job_id
        if record.due_ms is not None and (before is None or before.due_ms != record.due_ms):
            heappush(self._times, (record.due_ms, job_id))
        self._count_leases(before, record)
        if record.gang is not None or (before is not None and before.gang is not None):
            self._index_members(before, record)
        if record.state is JobState.READY:
            bucket = self._buckets.setdefault(record.spec.queue, {}).get(record.shape)
            if bucket is None:
                bucket = self._buckets[record.spec.queue][record.shape] = MemoryBucket(record.shape, self._records)
            bucket.add(record)
        if record.state is JobState.BLOCKED or (before is not None and before.state is JobState.BLOCKED):
            self._index_dependencies(before, record)

    def delete(self, record: JobRecord) -> None:
        del self._records[record.id]
        if record.spec.key is not None:
            del self._ids_by_key[record.spec.key]

    def id_of_key(self, key: str) -> str | None:
        return self._ids_by_key.get(key)

    def dependants(self, job_id: str) -> list[JobRecord]:
        return [self._records[other] for other in sorted(self._dependants.get(job_id, ()))]

    def assigned(self, worker: str) -> list[str]:
        return sorted(self._assigned.get(worker, ()))

    def due(self, now_ms: int, limit: int) -> list[JobRecord]:
        found: dict[str, JobRecord] = {}
        while len(found) < limit and (record := self._first_due()) is not None:
            if record.due_ms is None or record.due_ms > now_ms:
                break
            found[record.id] = record
            heappop(self._times)
        return list(found.values())

    def next_due_ms(self) -> int | None:
        record = self._first_due()
        return None if record is None else record.due_ms

    def _first_due(self) -> JobRecord | None:
        while self._times:
            due_ms, job_id = self._times[0]
            record = self._records.get(job_id)
            if record is not None and record.due_ms == due_ms:
                return record
            heappop(self._times)
        return None

    def buckets(self, queues: Sequence[str], limit: int) -> list[Bucket]:
        del limit
        found: list[Bucket] = []
        for queue in queues:
            by_shape = self._buckets.get(queue, {})
            for shape in [shape for shape, bucket in by_shape.items() if bucket.peek() is None]:
                del by_shape[shape]
            found += by_shape.values()
        return found

    def finished(self, chosen: JobFilter) -> Iterator[tuple[str, int]]:
        records = sorted(self._purgeable(chosen), key=lambda record: (record.finished_ms or 0, record.id))
        return iter([(record.id, content_bytes(record)) for record in records])

    def finished_bytes(self, chosen: JobFilter) -> int:
        return sum(map(content_bytes, self._purgeable(chosen)))

    def _purgeable(self, chosen: JobFilter) -> Iterator[JobRecord]:
        states = purgeable_states(chosen)
        return (record for record in self._records.values() if record.state in states and is_accepted(chosen, record))

    def queue_settings(self) -> Mapping[str, QueueSettings]:
        return self._queue_settings

    def put_queue_settings(self, queue: str, settings: QueueSettings) -> None:
        self._queue_settings.pop(queue, None)
        if settings != PLAIN_QUEUE:
            self._queue_settings[queue] = settings

    def reservations(self) -> Mapping[str, Reservation]:
        return self._reservations

    def put_reservation(self, reservation: Reservation) -> None:
        self._reservations[reservation.queue] = reservation

    def delete_reservation(self, queue: str) -> None:
        del self._reservations[queue]

    def leased_jobs(self, queue: str) -> int:
        return self._leased.get(queue, 0)

    def workers(self) -> list[WorkerInfo]:
        found = (self._workers[worker] for worker in sorted(self._workers))
        return [replace(worker, leases=self._leases.get(worker.id, 0)) for worker in found]

    @property
    def worker_ids(self) -> Collection[str]:
        return self._workers.keys()

    def queues_of(self, worker: str) -> Collection[str]:
        """Queues that a registered worker serves."""
        known = self._workers.get(worker)
        return () if known is None else set(known.queues)

    def put_worker(self, worker: WorkerInfo) -> None:
        self._workers[worker.id] = worker
        self._offers.remove(worker.id)

    def delete_worker(self, worker: str) -> None:
        self._workers.pop(worker, None)
        self._offers.remove(worker)

    def heartbeat(self, worker: str, now_ms: int, offer: Offer | None) -> bool:
        known = self._workers.get(worker)
        if known is None:
            return False
        self._workers[worker] = replace(known, heartbeat_ms=now_ms, offer=offer or known.offer)
        if offer is not None:
            self._offers.put(OfferingWorker(worker, known.queues, offer))
        return True

    def put_offer(self, worker: str, offer: Offer) -> None:
        known = self._workers.get(worker)
        if known is not None:
            self._workers[worker] = replace(known, offer=offer)
            self._offers.put(OfferingWorker(worker, known.queues, offer))

    def offer_groups(self, now_ms: int) -> OfferGroups:
        self._offers.expire(now_ms)
        return self._offers

    def offering_workers(self, now_ms: int) -> list[OfferingWorker]:
        return [
            OfferingWorker(name, worker.queues, worker.offer)
            for name, worker in sorted(self._workers.items())
            if worker.offer is not None and worker.offer.is_live(now_ms)
        ]

    def deferred_ms(self, job_id: str) -> int | None:
        return self._deferrals.get(job_id)

    def put_deferral(self, job_id: str, now_ms: int, before_ms: int) -> None:
        self._deferrals.pop(job_id, None)
        self._deferrals[job_id] = now_ms
        while self._deferrals[oldest := next(iter(self._deferrals))] < before_ms:
            del self._deferrals[oldest]

    def schedules(self) -> list[Schedule]:
        return [self._schedules[name] for name in sorted(self._schedules)]

    def put_schedule(self, schedule: Schedule) -> None:
        self._schedules[schedule.name] = schedule

    def delete_schedule(self, name: str) -> None:
        self._schedules.pop(name, None)

    def _count_leases(self, before: JobRecord | None, after: JobRecord) -> None:
        for record, change in ((before, -1), (after, +1)):
            if record is None or record.worker is None:
                continue
            self._leased[record.spec.queue] = self._leased.get(record.spec.queue, 0) + change
            count = self._leases.get(record.worker, 0) + change
            if count:
                self._leases[record.worker] = count
            else:
                del self._leases[record.worker]

    def _index_members(self, before: JobRecord | None, after: JobRecord) -> None:
        for worker in unsent_workers(before):
            self._assigned[worker].discard(after.id)
            if not self._assigned[worker]:
                del self._assigned[worker]
        for worker in unsent_workers(after):
            self._assigned.setdefault(worker, set()).add(after.id)

    def _index_dependencies(self, before: JobRecord | None, after: JobRecord) -> None:
        old = set(before.unmet) if before is not None and before.state is JobState.BLOCKED else set()
        new = set(after.unmet) if after.state is JobState.BLOCKED else set()
        for other in old - new:
            self._dependants[other].discard(after.id)
            if not self._dependants[other]:
                del self._dependants[other]
        for other in new - old:
            self._dependants.setdefault(other, set()).add(after.id)


class MemoryBucket:
    """Ready jobs of one queue and shape: a heap by order, whose outdated entries are skipped."""

    __slots__ = ("_heap", "_records", "_shape")

    def __init__(self, shape: Shape, records: dict[str, JobRecord]) -> None:
        self._heap: list[tuple[int, str]] = []
        self._shape = shape
        self._records = records

    def add(self, record: JobRecord) -> None:
        heappush(self._heap, order_of(record))

    def peek(self) -> JobRecord | None:
        while self._heap:
            record = self._records.get(self._heap[0][1])
            if record is not None and self._is_current(record):
                return record
            heappop(self._heap)
        return None

    def pop(self) -> None:
        heappop(self._heap)

    def _is_current(self, record: JobRecord) -> bool:
        ready_here = record.state is JobState.READY and record.shape == self._shape
        return ready_here and order_of(record) == self._heap[0]


def unsent_workers(record: JobRecord | None) -> set[str]:
    """Workers that have not received their members of a gang yet."""
    if record is None or record.gang is None:
        return set()
    return {member.worker for member in record.gang.members if not member.is_sent}


def content_bytes(record: JobRecord) -> int:
    """Bytes of the payload and the result."""
    return len(record.spec.payload) + len(record.result or b"")


def without_contents(record: JobRecord) -> JobRecord:
    """The record as lists show it: without payload, result and tracebacks."""
    spec = replace(record.spec, payload=b"") if record.spec.payload else record.spec
    attempts = tuple(replace(item, traceback="") if item.traceback else item for item in record.attempts)
    return replace(record, spec=spec, attempts=attempts, result=None)


def queue_stats(records: Iterable[JobRecord], settings: Mapping[str, QueueSettings]) -> list[QueueStats]:
    """Counts per queue."""
    counts: dict[str, dict[JobState, int]] = {queue: {} for queue in settings}
    oldest: dict[str, int] = {}
    shapes: dict[str, dict[Shape, int]] = {}
    for record in records:
        queue = record.spec.queue
        of_queue = counts.setdefault(queue, {})
        of_queue[record.state] = of_queue.get(record.state, 0) + 1
        if record.state is JobState.READY:
            oldest[queue] = min(oldest.get(queue, record.enqueued_ms), record.enqueued_ms)
            ready = shapes.setdefault(queue, {})
            ready[record.shape] = ready.get(record.shape, 0) + 1
    return stats_of(counts, settings, oldest, shapes)


def stats_of(
    counts: Mapping[str, Mapping[JobState, int]],
    settings: Mapping[str, QueueSettings],
    oldest: Mapping[str, int],
    shapes: Mapping[str, Mapping[Shape, int]],
) -> list[QueueStats]:
    """Statistics of the queues in `counts`, by name."""
    found = []
    for queue in sorted(counts):
        paused, weight, max_running = settings.get(queue, PLAIN_QUEUE)
        waiting = oldest.get(queue), shapes.get(queue, {})
        found.append(QueueStats(queue, counts[queue], paused, *waiting, weight, max_running))
    return found


def _id(record: JobRecord) -> str:
    return record.id
