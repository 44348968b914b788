"""Worker of a simulation: capacity and exchanges as those of a real one, and jobs that take virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.jobs.store import Claim, Exchange, Renewal, WorkerInfo
from dovetail.jobs.workers.worker_capacity import WorkerCapacity, node_amounts
from dovetail.resources.cluster import Cluster
from dovetail.resources.free_resources import NodeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.jobs.store import ClaimedJob, Completion
    from dovetail.resources.cluster import Node
    from dovetail.resources.seat import Seat

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
    """A running attempt."""

    job: ClaimedJob
    seat: Seat | None
    started_ms: int


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

    def end(self, completion: Completion) -> RunningJob:
        """Handle the end of an attempt: its resources are free, and the next exchange completes it."""
        found = self.running.pop(completion.job_id)
        self.capacity.release(found.seat)
        self._outbox.append(completion)
        return found

    def exchange(self, *, claims: bool = True) -> Exchange:
        """The exchange that the worker sends now."""
        completions, self._outbox = self._outbox, []
        claim = Claim(self.capacity.free_slots(), self.capacity.free(), self.queues) if claims else None
        return Exchange(self.name, completions, (), claim, NEVER_MS)

    def last_renewal(self, lease_ms: int) -> Exchange:
        """The last exchange, at the death of the worker: the leases of its jobs expire after this time."""
        self.is_alive = False
        renewals = [Renewal(running.job.lease.job_id, running.job.lease.token) for running in self.running.values()]
        return Exchange(self.name, (), renewals, None, lease_ms)
