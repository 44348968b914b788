"""Policy of claims: which queue is next, which worker runs a job, and which one is kept free for a large job. Pure.

`redis_functions/shares.lua`, `placement.lua` and `reservation.lua` mirror it.

**Fair share.** The queue with the fewest running jobs per weight is next. Queues without a weight are one queue, with
weight 1.

**Reservation** (EASY backfill). A job that does not fit for a long time gets a worker reserved, which then takes jobs
behind it only if they do not delay it: see `WorkerReservation`.

**Choice of worker.** A claim passes over a job that another live worker, which serves its queue and has a free slot and
room, should rather run:

- a job without GPUs: one without GPUs;
- of workers with GPUs, the one on which the job strands least GPU: idle GPU for which the free CPUs are too few, at the
  CPUs per GPU of the worker. Then the one with the least idle GPU, so that whole GPUs stay free on others for large
  jobs, and then with the fewest free CPUs. A job that needs neither CPUs nor GPUs has no preference among them.

Of equal workers the one that claims takes the job. Of several better ones of the same rank, the one with the most free
slots gets it (the least loaded), then the one that has claimed longest ago (they take turns), then the smallest id. A
worker that passes over a job wakes the better one, and asks again
after the placement delay. From then on, any worker takes the job: no job waits longer than that for a better worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.jobs.offer_groups import turn_of
from dovetail.jobs.ordering import order_of
from dovetail.jobs.store import PLAIN_QUEUE
from dovetail.resources.free_resources import WHOLE_CARD_MILLI
from dovetail.resources.shape import ShapeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dovetail.jobs.admission import Admission
    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.offer_groups import OfferGroups, Turn
    from dovetail.jobs.store import QueueSettings
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape

RESERVE_AFTER_MS = 30_000
"""Minimum age of the order key of a job that does not fit, for a reservation."""
RESERVE_AGAIN_MS = 1_000
"""Pause of a queue after no worker could be reserved for its jobs."""
MAX_RESERVE_TRIES = 4
"""Number of jobs of a queue for which one claim tries to reserve a worker."""
PlacementRank = tuple[int, int, int]
NO_CARDS: PlacementRank = (-1, 0, 0)
"""Rank of a worker without GPUs."""
UNWEIGHTED = ""
"""Group of the queues without a weight."""
DEFERRAL_KEPT_MS = 10_000
"""Time for which a store remembers that a job was passed over; a job that waits longer can be passed over again."""


class QueueShares:
    """Running jobs of queues during one claim, against their limits and weights."""

    def __init__(
        self, queues: Iterable[str], settings: Mapping[str, QueueSettings], leased_jobs: Callable[[str], int]
    ) -> None:
        """`queues`: names of the queues that the claim serves."""
        queues = list(queues)
        given = {queue: settings.get(queue, PLAIN_QUEUE) for queue in queues}
        self._has_weights = any(one.weight is not None for one in given.values())
        self._limits = {queue: one.max_running for queue, one in given.items() if one.max_running is not None}
        self._running = {queue: leased_jobs(queue) for queue in (queues if self._has_weights else self._limits)}
        self._weights = {queue: one.weight for queue, one in given.items() if one.weight is not None}
        self._running_by_group: dict[str, int] = {}
        for queue, running in self._running.items():
            group = self.group_of(queue)
            self._running_by_group[group] = self._running_by_group.get(group, 0) + running

    def group_of(self, queue: str) -> str:
        """Queues of one group are served in the order of their jobs."""
        return queue if queue in self._weights else UNWEIGHTED

    def is_full(self, queue: str) -> bool:
        return queue in self._limits and self._running[queue] >= self._limits[queue]

    def next_group(self, groups: Mapping[str, Sequence[tuple[tuple[int, str], int]]]) -> str:
        """The group to serve: group -> its first jobs, as a heap of (order, ...)."""
        if len(groups) == 1:
            return next(iter(groups))
        return min(groups, key=lambda group: (self._use(group), groups[group][0]))

    def count(self, queue: str) -> None:
        """A job of the queue is claimed."""
        if queue in self._running:
            self._running[queue] += 1
            self._running_by_group[self.group_of(queue)] += 1

    def _use(self, group: str) -> float:
        return self._running_by_group.get(group, 0) / self._weights.get(group, 1)


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


class PlacementState:
    """What is free on a worker, as far as its rank depends on it."""

    __slots__ = ("_cards_milli", "_cpu_milli", "_idle_milli", "_of_cpu_milli", "_stranded_milli")

    def __init__(self, free: FreeResources) -> None:
        self._idle_milli, self._cpu_milli = free.cards.idle_milli, free.cpu_milli
        self._cards_milli = WHOLE_CARD_MILLI * len(free.cards.free)
        self._of_cpu_milli = max(1, free.cards.kind.cpu_milli)
        self._stranded_milli = self._stranded(self._idle_milli, self._cpu_milli)

    def rank(self, shape: Shape) -> PlacementRank:
        """For a job that fits: the worker with the lowest rank should run it."""
        if not self._cards_milli:
            return NO_CARDS
        if shape.kind is ShapeKind.CPU_ONLY and not shape.cpu_milli:
            return 0, 0, 0
        idle_milli, cpu_milli = self._idle_milli, self._cpu_milli
        stranded_milli = self._stranded(idle_milli - shape.cards * shape.gpu_milli, cpu_milli - shape.cpu_milli)
        return stranded_milli - self._stranded_milli, idle_milli, cpu_milli

    def _stranded(self, idle_milli: int, cpu_milli: int) -> int:
        stranded_milli = idle_milli - cpu_milli * self._cards_milli // self._of_cpu_milli
        return max(0, stranded_milli)


def placement_rank(shape: Shape, free: FreeResources) -> PlacementRank:
    """Rank of a worker for a job that fits: the lowest one should run it."""
    return PlacementState(free).rank(shape)


class OtherWorkers:
    """Offers of the other workers during one claim, less the jobs that the claim has left to them."""

    def __init__(self, groups: OfferGroups, worker: str, admission: Admission) -> None:
        """`worker`: the one that claims."""
        self._groups = groups
        self._own = worker
        self._left: dict[str, tuple[tuple[str, ...], int, int, FreeResources]] = {}
        """Queues, remaining slots, time of the latest claim and free resources of workers to which this claim has left
        jobs."""
        self._admission = admission

    def best_before(self, rank: PlacementRank, queue: str, shape: Shape) -> str | None:
        """The worker with the lowest rank, then the first `Turn`, for a job that fits it; None: none is below
        `rank`."""
        found: Turn | None = None
        card_milli, cpu_milli, needed_milli = shape.gpu_milli, shape.cpu_milli, shape.cards * shape.gpu_milli
        for idle_milli, free_cpu_milli, _, group in self._groups.with_idle(needed_milli, cpu_milli):
            if idle_milli > rank[1] and rank[0] <= -needed_milli:
                break  # a job strands at least minus its own GPUs: the other groups, with more idle GPU, rank higher
            if free_cpu_milli < cpu_milli or group.free.cards.most_milli < card_milli or queue not in group.queues:
                continue
            state = group.placement
            if state is None:
                state = group.placement = PlacementState(group.free)
            other = state.rank(shape)
            if other > rank or (other == rank and found is None):
                continue
            turn = group.first_but(self._own, self._left)
            is_better = turn is not None and (other < rank or found is None or turn < found)
            if is_better and self._admission.take(shape, group.free) is not None:
                rank, found = other, turn
        for worker, (queues, slots, offered_ms, free) in self._left.items():
            if slots > 0 and queue in queues:
                other, turn = placement_rank(shape, free), turn_of(worker, slots, offered_ms)
                is_better = other < rank or (other == rank and found is not None and turn < found)
                if is_better and self._admission.take(shape, free) is not None:
                    rank, found = other, turn
        return None if found is None else found[2]

    def leave(self, worker: str, shape: Shape) -> None:
        """Subtract a job that is left to a worker from that worker's offer."""
        if worker not in self._left:
            _, queues, offer = self._groups.worker(worker)
            self._left[worker] = queues, offer.slots, offer.offered_ms, offer.free
        queues, slots, offered_ms, free = self._left[worker]
        self._left[worker] = queues, slots - 1, offered_ms, self._admission.take(shape, free) or free
