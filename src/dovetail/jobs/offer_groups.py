"""Offers of workers, grouped by queues and free resources: a claim compares states instead of workers.

Most workers of a large fleet are in few states: untouched, or full. The memory store keeps its groups from step to
step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from dovetail.jobs.store import OfferingWorker
    from dovetail.jobs.worker_choice import PlacementState
    from dovetail.resources.free_resources import FreeResources


Turn = tuple[int, int, str]
"""Order of equally good workers: minus the free slots, the time of the latest claim, the id. So the least loaded worker
is first, and of several the one that has asked longest ago, so that they take turns."""


def turn_of(worker: str, slots: int, offered_ms: int) -> Turn:
    return -slots, offered_ms, worker


class OfferGroup:
    """Workers that serve the same queues and have the same free resources, and a slot."""

    __slots__ = ("free", "number", "placement", "queues", "turns")

    def __init__(self, number: int, queues: tuple[str, ...], free: FreeResources) -> None:
        self.number = number
        self.queues = queues
        self.free = free
        self.turns: list[Turn] = []
        """Sorted."""
        self.placement: PlacementState | None = None
        """Kept by `worker_choice`."""

    def first_but(self, worker: str, others: Container[str]) -> Turn | None:
        """The first worker, leaving out this one and others."""
        for turn in self.turns:
            if turn[2] != worker and turn[2] not in others:
                return turn
        return None


OrderedGroup = tuple[int, int, int, OfferGroup]
"""(Idle GPU, free CPU, number of the group, group)."""


class OfferGroups:
    """Offers of registered workers by worker, and their groups."""

    def __init__(self, workers: Iterable[OfferingWorker] = ()) -> None:
        self._workers: dict[str, OfferingWorker] = {}
        self._groups: dict[tuple[tuple[str, ...], FreeResources], OfferGroup] = {}
        self._ordered: list[OrderedGroup] = []
        """Sorted, so that a job for GPUs skips the many workers whose cards are full."""
        self._numbers = 0
        self._times: list[tuple[int, str]] = []
        """A heap of (last time at which an offer is live, worker), whose outdated entries are skipped."""
        for worker in workers:
            self.put(worker)

    def with_idle(self, milli: int, cpu_milli: int) -> Sequence[OrderedGroup]:
        """Groups with at least this much idle GPU, the least first; of those with exactly this much, only the ones with
        enough free CPUs."""
        return self._ordered[bisect_left(self._ordered, (milli, cpu_milli)) :]

    def worker(self, worker: str) -> OfferingWorker:
        return self._workers[worker]

    def put(self, worker: OfferingWorker) -> None:
        """Replace the offer of a worker."""
        before = self._workers.get(worker.id)
        self._workers[worker.id] = worker
        offer = worker.offer
        until_ms = offer.offered_ms + offer.lease_ms
        if before is None or before.offer.offered_ms + before.offer.lease_ms != until_ms:
            heappush(self._times, (until_ms, worker.id))
        had, has = before is not None and before.offer.slots > 0, offer.slots > 0
        turn = turn_of(worker.id, offer.slots, offer.offered_ms)
        if before is not None and had and has and before.queues == worker.queues and before.offer.free is offer.free:
            turns = self._groups[worker.queues, offer.free].turns
            del turns[bisect_left(turns, _turn(before))]
            insort(turns, turn)
            return
        if before is not None and had:
            self._leave_group(before)
        if has:
            key = worker.queues, offer.free
            group = self._groups.get(key)
            if group is None:
                self._numbers += 1
                group = self._groups[key] = OfferGroup(self._numbers, *key)
                insort(self._ordered, _ordered(group))
            insort(group.turns, turn)

    def remove(self, worker: str) -> None:
        found = self._workers.pop(worker, None)
        if found is not None and found.offer.slots > 0:
            self._leave_group(found)

    def expire(self, now_ms: int) -> None:
        """Remove offers that are not live any more."""
        while self._times and self._times[0][0] < now_ms:
            _, worker = heappop(self._times)
            found = self._workers.get(worker)
            if found is not None and not found.offer.is_live(now_ms):
                self.remove(worker)

    def _leave_group(self, worker: OfferingWorker) -> None:
        key = worker.queues, worker.offer.free
        group = self._groups[key]
        del group.turns[bisect_left(group.turns, _turn(worker))]
        if not group.turns:
            del self._groups[key]
            del self._ordered[bisect_left(self._ordered, _ordered(group))]


def _turn(worker: OfferingWorker) -> Turn:
    return turn_of(worker.id, worker.offer.slots, worker.offer.offered_ms)


def _ordered(group: OfferGroup) -> OrderedGroup:
    return group.free.cards.idle_milli, group.free.cpu_milli, group.number, group
