"""The table port: indexed rows of jobs, workers and schedules, on which `Transaction` decides. Pure.

A store that runs its steps in Python (memory, SQLite) implements this port and gets its behaviour from `Transaction`.
The Redis store implements the steps themselves, in Lua.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.offer_groups import OfferGroups
    from dovetail.jobs.store import (
        JobFilter,
        Offer,
        OfferingWorker,
        QueueSettings,
        Reservation,
        Schedule,
        WorkerInfo,
    )


class Bucket(Protocol):
    """Ready jobs of one queue and shape, in order."""

    def peek(self) -> JobRecord | None:
        """The first job; None if the bucket is empty."""

    def pop(self) -> None:
        """Remove the first job from the bucket: it has been claimed."""


class JobTable(Protocol):
    """Rows of one store, inside one atomic step."""

    def prefetch(self, ids: Iterable[str]) -> None:
        """Announce jobs that `get` will request, so that they are read together."""

    def get(self, job_id: str) -> JobRecord | None: ...

    def payload(self, record: JobRecord) -> bytes:
        """Payload of a job, which the record of `get` may lack."""

    def put(self, record: JobRecord) -> None:
        """Insert or replace a job, in all indexes."""

    def delete(self, record: JobRecord) -> None: ...

    def id_of_key(self, key: str) -> str | None: ...

    def dependants(self, job_id: str) -> list[JobRecord]:
        """Blocked jobs whose `unmet` has this job, by id."""

    def assigned(self, worker: str) -> list[str]:
        """Gangs whose members have not been sent to this worker yet, by id."""

    def due(self, now_ms: int, limit: int) -> list[JobRecord]:
        """Scheduled and leased jobs with `due_ms <= now_ms`, by (due_ms, id)."""

    def next_due_ms(self) -> int | None:
        """The smallest `due_ms` of all jobs."""

    def buckets(self, queues: Sequence[str], limit: int) -> list[Bucket]:
        """Buckets of these queues that are not empty. At most `limit` jobs will be taken from them."""

    def finished(self, chosen: JobFilter) -> Iterator[tuple[str, int]]:
        """Finished jobs that the filter accepts, by (finished_ms, id): id, and bytes of payload and result."""

    def finished_bytes(self, chosen: JobFilter) -> int:
        """Bytes of payloads and results of finished jobs that the filter accepts."""

    def queue_settings(self) -> Mapping[str, QueueSettings]:
        """Settings of the queues that have any."""

    def put_queue_settings(self, queue: str, settings: QueueSettings) -> None: ...

    def reservations(self) -> Mapping[str, Reservation]:
        """Reservations by queue."""

    def put_reservation(self, reservation: Reservation) -> None: ...

    def delete_reservation(self, queue: str) -> None: ...

    def leased_jobs(self, queue: str) -> int:
        """Number of jobs of a queue that are leased."""

    def workers(self) -> list[WorkerInfo]: ...

    def put_worker(self, worker: WorkerInfo) -> None: ...

    def delete_worker(self, worker: str) -> None: ...

    def heartbeat(self, worker: str, now_ms: int, offer: Offer | None) -> bool:
        """Set the heartbeat of a worker, and its offer unless that is None; False if it is not registered."""

    def put_offer(self, worker: str, offer: Offer) -> None:
        """Replace the offer of a registered worker."""

    def offering_workers(self, now_ms: int) -> list[OfferingWorker]:
        """Workers with a live offer, by id."""

    def offer_groups(self, now_ms: int) -> OfferGroups:
        """The same, grouped by what is free."""

    def deferred_ms(self, job_id: str) -> int | None:
        """Time at which a worker left this job to a better one; None if none did."""

    def put_deferral(self, job_id: str, now_ms: int, before_ms: int) -> None:
        """Record the time at which a job was left to a better worker, and drop times before `before_ms`."""

    def schedules(self) -> list[Schedule]:
        """All schedules, in the order of their names."""

    def put_schedule(self, schedule: Schedule) -> None: ...

    def delete_schedule(self, name: str) -> None: ...
