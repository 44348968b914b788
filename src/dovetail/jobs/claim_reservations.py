"""Reservations: after how long a job that does not fit gets a worker kept free, and which one (decision 024).

The reserved worker then takes jobs behind that one only if they do not delay it (EASY backfill): `WorkerReservation`.
`ClaimReservations` applies this during one claim. `redis_functions/reservation.lua` mirrors it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.jobs.job import JobState
from dovetail.jobs.ordering import order_of
from dovetail.jobs.store import Reservation
from dovetail.resources.shape import ShapeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dovetail.jobs.admission import Admission
    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.job_table import JobTable
    from dovetail.jobs.queue_shares import QueueShares
    from dovetail.jobs.store import Claim, OfferingWorker
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape

RESERVE_AFTER_MS = 30_000
"""Minimum age of the order key of a job that does not fit, for a reservation."""
RESERVE_AGAIN_MS = 1_000
"""Pause of a queue after no worker could be reserved for its jobs."""
MAX_RESERVE_TRIES = 4
"""Number of jobs of a queue for which one claim tries to reserve a worker."""


class ClaimReservations:
    """Reservations of a store, as one claim sees and changes them."""

    def __init__(
        self,
        table: JobTable,
        admission: Admission,
        now_ms: int,
        worker: str,
        claim: Claim,
        others: Callable[[], Sequence[OfferingWorker]],
    ) -> None:
        """`others`: other workers with a live offer."""
        self._table, self._admission, self._others = table, admission, others
        self._now_ms, self._worker, self._claim = now_ms, worker, claim
        self._ends_ms = None if claim.ends_in_ms is None else now_ms + claim.ends_in_ms
        self._reserved = dict(table.reservations())
        """Reservations by queue."""
        self._tries: dict[str, int] = {}
        self._hold: WorkerReservation | None = None
        self.woken: set[str] = set()
        """Workers whose reservation this claim has removed. The worker that claims may have passed over jobs before the
        reserved one, and claims again."""

    def hold(self, queues: Sequence[str], shares: QueueShares) -> None:
        """Respect the reservation of this worker, if its job waits and could be taken by this claim."""
        found = next((one for one in self._reserved.values() if one.worker == self._worker), None)
        if found is None or found.queue not in queues or shares.is_full(found.queue):
            return
        record = self._table.get(found.job_id)
        if record is None or record.state is not JobState.READY:
            self._delete(found)
            return
        is_idle = self._claim.ends_in_ms == 0
        if is_idle and self._admission.take(record.shape, self._claim.free) is None:
            self._put(Reservation(found.queue, "", "", self._now_ms))
            return
        self._hold = WorkerReservation(record.id, order_of(record), record.shape, self._ends_ms)

    def may_take(self, record: JobRecord, free: FreeResources, slots: int) -> bool:
        """Whether a job that fits delays no reserved job."""
        return self._hold is None or self._hold.may_pass(record, free, slots, self._now_ms)

    def may_take_gang(self, record: JobRecord) -> bool:
        """Whether a gang takes nothing that is kept free for a job before it."""
        return self._hold is None or order_of(record) <= self._hold.order

    def reserved_workers(self) -> set[str]:
        return {one.worker for one in self._reserved.values()}

    def is_held_for(self, record: JobRecord) -> bool:
        return self._hold is not None and self._hold.job_id == record.id

    def on_taken(self, record: JobRecord) -> None:
        """Remove the reservation of a job that was claimed."""
        found = self._reserved.get(record.spec.queue)
        if found is not None and found.job_id == record.id:
            self._delete(found)
            self.woken.add(found.worker)

    def on_unfit(self, record: JobRecord) -> None:
        """Reserve a worker for a job that does not fit, if it has waited for long and its queue has no reservation."""
        if order_of(record)[0] > self._now_ms - RESERVE_AFTER_MS:
            return
        queue = record.spec.queue
        tries = self._tries.get(queue, 0)
        if tries >= MAX_RESERVE_TRIES or not self._needs_worker(queue, tries):
            return
        self._tries[queue] = tries + 1
        chosen = worker_to_reserve(record.shape, self._candidates(queue), self._admission, self._now_ms)
        if chosen is None:
            self._put(Reservation(queue, "", "", self._now_ms))
            return
        self._put(Reservation(queue, record.id, chosen.id, self._now_ms))
        if chosen.id == self._worker:
            self._hold = WorkerReservation(record.id, order_of(record), record.shape, self._ends_ms)

    def _needs_worker(self, queue: str, tries: int) -> bool:
        found = self._reserved.get(queue)
        if found is None:
            return True
        if found.job_id:
            return found.worker != self._worker and all(one.id != found.worker for one in self._others())
        return tries > 0 or found.tried_ms <= self._now_ms - RESERVE_AGAIN_MS

    def _candidates(self, queue: str) -> list[ReservableWorker]:
        """Workers of a queue that are not reserved for another queue."""
        taken = {one.worker for one in self._reserved.values() if one.queue != queue}
        found = [
            ReservableWorker(one.id, one.offer.free, one.offer.ends_ms)
            for one in self._others()
            if queue in one.queues and one.id not in taken
        ]
        if self._worker not in taken:
            found.append(ReservableWorker(self._worker, self._claim.free, self._ends_ms))
        return found

    def _put(self, reservation: Reservation) -> None:
        self._reserved[reservation.queue] = reservation
        self._table.put_reservation(reservation)

    def _delete(self, reservation: Reservation) -> None:
        """Remove the reservation of a job that no longer waits; the next claim may reserve the worker for another
        job."""
        del self._reserved[reservation.queue]
        self._tries[reservation.queue] = MAX_RESERVE_TRIES
        self._table.delete_reservation(reservation.queue)
        if reservation.worker == self._worker:
            self._hold = None
        else:
            self.woken.add(reservation.worker)


class WorkerReservation(NamedTuple):
    """Reservation that holds the claiming worker: jobs behind the reserved one must not delay it."""

    job_id: str
    order: tuple[int, str]
    shape: Shape
    start_ms: int | None
    """Latest start of the reserved job; None if it is not known."""

    def may_pass(self, record: JobRecord, free: FreeResources, slots: int, now_ms: int) -> bool:
        """Whether a job that fits may start: it is before the reserved one, or ends before it starts, or fits beside
        it. `slots`: free slots, with that of the job."""
        if order_of(record) <= self.order:
            return True
        timeout_ms = record.spec.timeout_ms
        if timeout_ms is not None and self.start_ms is not None and now_ms + timeout_ms <= self.start_ms:
            return True
        return slots > 1 and _fit_together(self.shape, record.shape, free)


def _fit_together(reserved: Shape, shape: Shape, free: FreeResources) -> bool:
    """Whether a job leaves the reserved job the free resources that it needs; two jobs with GPUs never fit together."""
    uses_cards = ShapeKind.CPU_ONLY not in (reserved.kind, shape.kind)
    needed, have = dict(reserved.custom), dict(free.custom)
    return (
        not uses_cards
        and _leaves(reserved.cpu_milli, shape.cpu_milli, free.cpu_milli)
        and _leaves(reserved.memory_bytes, shape.memory_bytes, free.memory_bytes)
        and all(_leaves(needed.get(name, 0), amount, have.get(name, 0)) for name, amount in shape.custom)
    )


def _leaves(needed: int, taken: int, free: int) -> bool:
    return needed == 0 or taken == 0 or free - taken >= needed


class ReservableWorker(NamedTuple):
    """A worker that could be reserved."""

    id: str
    free: FreeResources
    ends_ms: int | None


def worker_to_reserve(
    shape: Shape, candidates: Iterable[ReservableWorker], admission: Admission, now_ms: int
) -> ReservableWorker | None:
    """The worker whose running jobs end first, of those on which the job fits when they are empty; None if there is
    none."""
    found: list[tuple[bool, int, str, ReservableWorker]] = []
    for one in candidates:
        if admission.take(shape, one.free.cards.kind.untouched()) is None:
            continue
        is_idle = one.ends_ms is not None and one.ends_ms <= now_ms
        if is_idle and admission.take(shape, one.free) is None:
            continue  # another program uses its machine
        found.append((one.ends_ms is None, one.ends_ms or 0, one.id, one))
    return min(found)[3] if found else None
