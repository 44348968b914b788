"""Worker of a simulation: capacity and exchanges as those of a real one, and jobs that take virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.jobs.batch import unmarked_shape
from dovetail.jobs.store import BatchRoom, Claim, Exchange, Renewal, WorkerInfo
from dovetail.jobs.workers.job_batches import DEADLINE_SHARE
from dovetail.jobs.workers.worker_capacity import WorkerCapacity, node_amounts
from dovetail.resources.cluster import Cluster
from dovetail.resources.free_resources import NodeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.jobs.store import ClaimedJob, Completion
    from dovetail.resources.cluster import Node
    from dovetail.resources.seat import Seat
    from dovetail.resources.shape import Shape

NEVER_MS = 100 * 366 * 86_400_000
"""Lease of simulated attempts, which need no renewals. The death of a worker shortens it."""


class Machine:
    """Settings of equal workers."""

    def __init__(self, node: Node, queues: Iterable[str], slots: int | None) -> None:
        self.node = node
        self.node_kind = NodeKind(node)
        self.amounts = node_amounts(node)
        self.queues = tuple(queues)
        self.slots = slots
        self.details = {"resources": Cluster((node,)).to_dict()}


class RunningJob(NamedTuple):
    """A running attempt, or one that waits for its call."""

    job: ClaimedJob
    seat: Seat | None
    started_ms: int
    batch: SimulatedBatch | None = None
    """The batch that it is in, which has its slot and seat."""


class SimulatedBatch:
    """Jobs that share a call: while it collects jobs, and while the call runs. As `JobBatch` of a real worker."""

    __slots__ = ("_size", "called_ms", "flush_at_ms", "items", "key", "seat", "started_ms", "unended", "was_asked")

    def __init__(self, key: tuple[str, Shape], size: int, seat: Seat | None, now_ms: int, wait_ms: int) -> None:
        """`key`: queue and shape of its jobs."""
        self.key = key
        self.seat = seat
        self.started_ms = now_ms
        self.flush_at_ms = now_ms + wait_ms
        self.called_ms: int | None = None
        """Start of the call; None: it collects jobs."""
        self.items: list[RunningJob] = []
        self.unended = 0
        self.was_asked = False
        """Whether the store was asked for more jobs."""
        self._size = size

    def add(self, item: RunningJob) -> None:
        self.items.append(item)
        self.unended += 1
        timeout_ms = item.job.spec.timeout_ms
        if timeout_ms is not None:
            self.flush_at_ms = min(self.flush_at_ms, item.started_ms + round(DEADLINE_SHARE * timeout_ms))

    @property
    def room(self) -> BatchRoom | None:
        """What it can take; None: nothing."""
        jobs = self._size - len(self.items)
        return BatchRoom(*self.key, jobs) if jobs > 0 else None


class SimulatedWorker:
    """One worker process, from its start to its death."""

    def __init__(self, position: int, name: str, kind: str, machine: Machine, started_ms: int) -> None:
        self.position = position
        self.name = name
        self.kind = kind
        self.queues = machine.queues
        self.started_ms = started_ms
        self.capacity = WorkerCapacity(machine.node, machine.slots, kind=machine.node_kind)
        self.capacity.set_limit(machine.amounts)
        self.running: dict[str, RunningJob] = {}
        self.collecting: list[SimulatedBatch] = []
        self.is_alive = True
        self._details = machine.details
        self._outbox: list[Completion] = []

    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.queues, self.capacity.plain_slots, self._details)

    @property
    def has_completions(self) -> bool:
        return bool(self._outbox)

    def start(self, job: ClaimedJob, now_ms: int) -> RunningJob:
        fits, seat = self.capacity.try_take(job.shape)
        assert fits, f"{self.name} was given job {job.spec.id}, which does not fit: {job.shape}"
        found = self.running[job.spec.id] = RunningJob(job, seat, now_ms)
        return found

    def start_in_batch(self, job: ClaimedJob, size: int, wait_ms: int, now_ms: int) -> SimulatedBatch:
        """A job joins the batch that collects such jobs, or begins one. Retries have a call of their own."""
        key = job.spec.queue, job.shape
        is_alone = job.lease.attempt > 1
        batch = None if is_alone else next((one for one in self.collecting if one.key == key), None)
        if batch is None:
            fits, seat = self.capacity.try_take(unmarked_shape(job.shape))
            assert fits, f"{self.name} was given job {job.spec.id}, which does not fit: {job.shape}"
            batch = SimulatedBatch(key, 1 if is_alone else size, seat, now_ms, wait_ms)
            self.collecting.append(batch)
        item = self.running[job.spec.id] = RunningJob(job, None, now_ms, batch)
        batch.add(item)
        return batch

    def call(self, batch: SimulatedBatch, now_ms: int) -> None:
        """The call for a batch begins."""
        batch.called_ms = now_ms
        self.collecting.remove(batch)

    def has_room(self, key: tuple[str, Shape]) -> bool:
        """Whether a batch collects jobs of this queue and shape."""
        return any(batch.key == key for batch in self.collecting)

    @property
    def has_new_batch(self) -> bool:
        """Whether the store was not asked yet for jobs of some batch."""
        return any(not batch.was_asked for batch in self.collecting)

    def end(self, completion: Completion) -> RunningJob:
        """Handle the end of an attempt: its resources are free, and the next exchange completes it."""
        found = self.running.pop(completion.job_id)
        batch = found.batch
        if batch is None:
            self.capacity.release(found.seat)
        else:
            batch.unended -= 1
            if not batch.unended:
                self.capacity.release(batch.seat)
        self._outbox.append(completion)
        return found

    def exchange(self, *, claims: bool = True) -> Exchange:
        """The exchange that the worker sends now."""
        completions, self._outbox = self._outbox, []
        claim = None
        if claims:
            rooms = tuple(room for batch in self.collecting if (room := batch.room) is not None)
            claim = Claim(self.capacity.free_slots(), self.capacity.free(), self.queues, batches=rooms)
            for batch in self.collecting:
                batch.was_asked = True
        return Exchange(self.name, completions, (), claim, NEVER_MS)

    def last_renewal(self, lease_ms: int) -> Exchange:
        """The last exchange, at the death of the worker: the leases of its jobs expire after this time."""
        self.is_alive = False
        self.collecting.clear()
        renewals = [Renewal(running.job.lease.job_id, running.job.lease.token) for running in self.running.values()]
        return Exchange(self.name, (), renewals, None, lease_ms)
