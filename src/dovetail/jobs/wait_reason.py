"""Why a ready job waits: pause, limit, reservation, share, or no room. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.jobs.admission import Admission, FreeCapacity
from dovetail.jobs.gang_placement import rooms_after
from dovetail.jobs.job import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.store import QueueStats, Reservation, WorkerInfo


def wait_reason(
    record: JobRecord,
    stats: Mapping[str, QueueStats],
    reservations: Sequence[Reservation],
    workers: Sequence[WorkerInfo],
    now_ms: int,
) -> str:
    """The reason as a phrase; empty if the job is not ready, or if a worker is about to take it. `stats`: by queue."""
    if record.state is not JobState.READY:
        return ""
    queue = record.spec.queue
    of_queue = stats.get(queue)
    if of_queue is not None and of_queue.paused:
        return f"paused: queue {queue}"
    if of_queue is not None and of_queue.max_running is not None:
        running = of_queue.counts.get(JobState.LEASED, 0)
        if running >= of_queue.max_running:
            return f"limit: {running} of {of_queue.max_running} jobs of queue {queue} run"
    own = next((one for one in reservations if one.job_id == record.id), None)
    if own is not None:
        return f"no room yet: worker {own.worker} is reserved for it"
    admission = Admission()
    offers = {
        worker.id: worker.offer
        for worker in workers
        if queue in worker.queues and worker.offer is not None and worker.offer.is_live(now_ms)
    }
    if offers and not any(offer.slots > 0 for offer in offers.values()):
        return "no free slot"
    if record.shape.ranks > 1:
        rank, rooms = record.shape.rank, [FreeCapacity(offer.slots, offer.free) for offer in offers.values()]
        fitting = sum(len(rooms_after(admission, rank, room, record.shape.ranks)) for room in rooms)
        if 0 < fitting < record.shape.ranks:
            return f"no room: {fitting} of {record.shape.ranks} ranks fit now"
    with_room = {
        worker
        for worker, offer in offers.items()
        if offer.slots > 0 and admission.take(record.shape, offer.free) is not None
    }
    if not with_room:
        return "no room" if offers else "no live worker"
    reserved = {one.worker: one.job_id for one in reservations}
    if with_room <= reserved.keys():
        worker = min(with_room)
        return f"reservation: worker {worker} is kept free for job {reserved[worker]}"
    if any(one.weight is not None for one in stats.values()):
        return f"share: other queues than {queue} are next"
    return ""
