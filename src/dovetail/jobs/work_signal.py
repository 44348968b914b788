"""Seconds of work that wait in queues: ready jobs times the measured time of their functions.

The time of a function is the mean of its latest succeeded attempts. Ready jobs whose function has not been measured,
or that were not read because there are very many, are counted apart: their time is not known. Only `WorkReader` reaches
outside.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from dovetail.jobs.job import JobState, Outcome
from dovetail.jobs.placement_problem import placement_problem, worker_node
from dovetail.jobs.store import JobFilter
from dovetail.jobs.worker_liveness import live_workers
from dovetail.resources.shape import ShapeKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.store import QueueStats, Store, WorkerInfo
    from dovetail.resources.shape import Shape

READ_INTERVAL_S = 15.0
MEASURED_JOBS = 1_000
"""Number of latest succeeded jobs from which the times of functions are computed."""
READ_JOBS = 10_000
"""Maximum number of ready jobs that are read."""
PAGE = 1_000
NO_WORKER = "none"
"""Kind of worker of jobs that no live worker can run."""

WorkKey = tuple[str, str]
"""(queue, resource class)."""


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """Work of ready jobs."""

    seconds: Mapping[WorkKey, float] = field(default_factory=dict)
    unmeasured: Mapping[WorkKey, int] = field(default_factory=dict)
    """Number of jobs whose time is not known."""
    kind_seconds: Mapping[str, float] = field(default_factory=dict)
    """Work by the kind of worker that can run it."""
    kind_unmeasured: Mapping[str, int] = field(default_factory=dict)
    function_seconds: Mapping[str, float] = field(default_factory=dict)
    """Mean time of each measured function."""


def resource_class(shape: Shape) -> str:
    """'cpu', or what a job needs of GPUs: '1 GPU', '0.25 GPU', '6GB of a GPU'."""
    return "cpu" if shape.kind is ShapeKind.CPU_ONLY else shape.on_cards.describe()


def worker_kind(worker: WorkerInfo) -> str:
    """'cpu', or the GPUs of a worker: '2xA100'."""
    node = worker_node(worker.details)
    if node is None or not node.gpus or worker.details.get("gpu_enabled") is False:
        return "cpu"
    counts = Counter(card.spec() for card in node.gpus)
    return ", ".join(f"{count}x{spec}" for spec, count in counts.items())


def mean_seconds(succeeded: Iterable[JobRecord]) -> dict[str, float]:
    """Function -> mean time of its attempts that succeeded."""
    totals: dict[str, list[float]] = {}
    for record in succeeded:
        for attempt in record.attempts:
            if attempt.outcome is Outcome.SUCCEEDED:
                total = totals.setdefault(record.spec.function, [0.0, 0])
                total[0] += max(0, attempt.ended_ms - attempt.started_ms) / 1000
                total[1] += 1
    return {function: seconds / count for function, (seconds, count) in totals.items()}


def queued_work(
    ready: Iterable[JobRecord], stats: Sequence[QueueStats], means: Mapping[str, float], workers: Sequence[WorkerInfo]
) -> QueuedWork:
    """The work of ready jobs in queues that are not paused. `ready`: the jobs that were read; of others that `stats`
    counts, the time is not known."""
    kinds = _KindFinder(workers)
    seconds: defaultdict[WorkKey, float] = defaultdict(float)
    unmeasured: Counter[WorkKey] = Counter()
    kind_seconds: defaultdict[str, float] = defaultdict(float, dict.fromkeys(kinds.all, 0.0))
    kind_unmeasured: Counter[str] = Counter()
    unread: Counter[tuple[str, Shape]] = Counter()
    for one in stats:
        for shape, count in one.ready_by_shape.items() if not one.paused else ():
            unread[one.queue, shape] += count
            seconds[one.queue, resource_class(shape)] += 0.0  # a class without measured jobs gets a sample, too
    for record in ready:
        queue, shape = record.spec.queue, record.shape
        mean = means.get(record.spec.function)
        if mean is None or unread[queue, shape] <= 0:  # it was submitted after the counts were read
            continue
        unread[queue, shape] -= 1
        seconds[queue, resource_class(shape)] += mean
        for kind in kinds.of(queue, shape):
            kind_seconds[kind] += mean
    for (queue, shape), count in unread.items():
        if count > 0:
            unmeasured[queue, resource_class(shape)] += count
            for kind in kinds.of(queue, shape):
                kind_unmeasured[kind] += count
    return QueuedWork(dict(seconds), dict(unmeasured), dict(kind_seconds), dict(kind_unmeasured), dict(means))


class _KindFinder:
    """Which kinds of live workers can run a job. One that needs no GPU counts for workers without GPUs if any can run
    it, so that it does not start GPU workers."""

    def __init__(self, workers: Sequence[WorkerInfo]) -> None:
        self._by_kind: dict[str, list[WorkerInfo]] = {}
        for worker in workers:
            self._by_kind.setdefault(worker_kind(worker), []).append(worker)
        self._found: dict[tuple[str, Shape], tuple[str, ...]] = {}
        self.all = tuple(self._by_kind)

    def of(self, queue: str, shape: Shape) -> tuple[str, ...]:
        found = self._found.get((queue, shape))
        if found is None:
            found = self._found[queue, shape] = tuple(self._kinds(queue, shape)) or (NO_WORKER,)
        return found

    def _kinds(self, queue: str, shape: Shape) -> Iterator[str]:
        able = [kind for kind, some in self._by_kind.items() if placement_problem(queue, shape, some) is None]
        yield from ["cpu"] if "cpu" in able and resource_class(shape) == "cpu" else able


class WorkReader:
    """Reads the work of a store, at most every `READ_INTERVAL_S`. Thread: any."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = Lock()
        self._work = QueuedWork()
        self._read_at: float | None = None

    def read(self) -> QueuedWork:
        """Read the work. Raises StoreUnavailableError if the store cannot be reached."""
        with self._lock:
            if self._read_at is None or time.monotonic() - self._read_at >= READ_INTERVAL_S:
                store = self._store
                ready = list(self._records(JobState.READY, READ_JOBS))
                means = mean_seconds(self._records(JobState.SUCCEEDED, MEASURED_JOBS))
                workers = live_workers(store.workers(), store.now_ms())
                self._work = queued_work(ready, store.stats(), means, workers)
                self._read_at = time.monotonic()
            return self._work

    def _records(self, state: JobState, limit: int) -> Iterator[JobRecord]:
        """The latest jobs in a state."""
        chosen = JobFilter(states=frozenset({state}))
        before: str | None = None
        while limit > 0:
            page = self._store.find(chosen, min(PAGE, limit), before)
            yield from page.jobs
            limit -= len(page.jobs)
            before = page.next_id
            if before is None:
                return
