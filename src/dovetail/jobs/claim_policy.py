"""Policy of claims: whether another worker should rather run a job. Pure; `redis_functions/placement.lua` mirrors it.

**Choice of worker.** A claim passes over a job that another live worker, which serves its queue and has a free slot and
room, should rather run:

- a job that uses GPUs: the one with the least idle GPU, then with the fewest free CPUs, so that whole GPUs stay free on
  others for large jobs;
- a job without GPUs: one without GPUs.

Of equal workers the one that claims takes the job. A worker that passes over a job wakes the better one, and asks again
after the placement delay. From then on, any worker takes the job: no job waits longer than that for a better worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.shape import ShapeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.jobs.admission import Admission
    from dovetail.jobs.store import OfferingWorker
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape

PASS_KEPT_MS = 10_000
"""A job that was passed over longer ago than this, and still waits, can be passed over again."""


def placement_rank(shape: Shape, free: FreeResources) -> tuple[int, int]:
    """Rank of a worker for a job that fits: the lowest one should run it."""
    if shape.kind is ShapeKind.CPU_ONLY:
        return (1 if free.cards.free else 0), 0
    return free.cards.idle_milli, free.cpu_milli


class OtherWorkers:
    """Offers of the other workers during one claim, less the jobs that the claim has left to them."""

    def __init__(self, workers: Iterable[OfferingWorker], admission: Admission) -> None:
        self._offers = {worker.id: (worker.offer.slots, worker.offer.free) for worker in workers}
        self._queues = {worker.id: worker.queues for worker in workers}
        self._admission = admission

    def best_before(self, rank: tuple[int, int], queue: str, shape: Shape) -> str | None:
        """The worker with the lowest rank, then the smallest id, for a job that fits it; None: none is below `rank`."""
        found: str | None = None
        for worker, (slots, free) in self._offers.items():
            if slots <= 0 or queue not in self._queues[worker]:
                continue
            other = placement_rank(shape, free)
            is_better = other < rank or (other == rank and found is not None and worker < found)
            if is_better and self._admission.take(shape, free) is not None:
                rank, found = other, worker
        return found

    def leave(self, worker: str, shape: Shape) -> None:
        """Count a job that is left to a worker, which it fits."""
        slots, free = self._offers[worker]
        self._offers[worker] = slots - 1, self._admission.take(shape, free) or free
