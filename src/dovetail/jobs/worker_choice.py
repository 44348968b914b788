"""Choice of the worker: which worker should rather run a job that fits the one that claims (decision 023). Pure.

`redis_functions/placement.lua` mirrors it.

A claim passes over a job that another live worker, which serves its queue and has a free slot and room, should rather
run:

- a job without GPUs: one without GPUs;
- of workers with GPUs, the one on which the job strands least GPU: idle GPU for which the free CPUs are too few, at the
  CPUs per GPU of the worker. Then the one with the least idle GPU, so that whole GPUs stay free on others for large
  jobs, and then with the fewest free CPUs. A job that needs neither CPUs nor GPUs has no preference among them.

Of equal workers the one that claims takes the job. Of several better ones of the same rank, the one with the most free
slots gets it (the least loaded), then the one that has claimed longest ago (they take turns), then the smallest id. A
worker that passes over a job wakes the better one, and asks again after the placement delay. From then on, any worker
takes the job: no job waits longer than that for a better worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.jobs.offer_groups import turn_of
from dovetail.resources.free_resources import WHOLE_CARD_MILLI
from dovetail.resources.shape import ShapeKind

if TYPE_CHECKING:
    from dovetail.jobs.admission import Admission
    from dovetail.jobs.offer_groups import OfferGroups, Turn
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape

PlacementRank = tuple[int, int, int]
NO_CARDS: PlacementRank = (-1, 0, 0)
"""Rank of a worker without GPUs."""
DEFERRAL_KEPT_MS = 10_000
"""Time for which a store remembers that a job was passed over; a job that waits longer can be passed over again."""


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
