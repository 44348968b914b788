"""Capacity of this run's nodes that is reserved for other runs, and the workers to release for it.

Reserved capacity is not part of the ledger, which contains only workers of this run: it is what must stay free. While
workers of this run still use some of it, no other worker of this run can take the seats that they leave.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState
from dovetail.resources.amounts import (
    add_amounts,
    cluster_capacity,
    fits_within,
    free_amounts,
    min_amounts,
    seats_from_amounts,
    subtract_amounts,
    sum_seats,
)
from dovetail.resources.seat import Seat
from dovetail.scheduling.replan.snapshot import WorkerPhase, WorkerSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.free_resources import FreeResources
    from dovetail.scheduling.replan.snapshot import Snapshot
    from dovetail.streaming.state import StreamState
    from dovetail.streaming.worker_pool import Worker

RELEASE_REASON = "released for another run"


@dataclass(frozen=True, slots=True)
class StayingWorker:
    """A worker that would stay, and the amounts it uses."""

    worker: int
    unit: str
    amounts: Amounts


class ReservedCapacity:
    """Amounts that must stay free for other runs. Amounts on unknown nodes are ignored."""

    def __init__(self, seats: Iterable[Seat] = ()) -> None:
        self.amounts = sum_seats(seats)
        self._nodes = {node for node, _, _ in self.amounts}

    def allows(self, free: FreeResources, seat: Seat) -> bool:
        """Whether taking this seat leaves the reserved amounts free."""
        if seat.node not in self._nodes:
            return True
        left, kept = free_amounts(seat.node, free), self.amounts
        return all(left.get(key, 0) - amount >= kept.get(key, 0) for key, amount in sum_seats((seat,)).items())

    def allows_all(self, cluster: Cluster, seats: Iterable[Seat]) -> bool:
        """Whether these seats and the reserved amounts fit into the cluster together."""
        return not self._nodes or not self.excess(cluster, sum_seats(seats))

    def excess(self, cluster: Cluster, taken: Amounts) -> Amounts:
        """Amounts by which the reserved amounts and `taken` together exceed the capacity."""
        capacity = cluster_capacity(cluster)
        return subtract_amounts(
            add_amounts(min_amounts(self.amounts, capacity), min_amounts(taken, capacity)), capacity
        )

    def external_workers(self, cluster: Cluster, staying: Iterable[Seat]) -> tuple[WorkerSnapshot, ...]:
        """Return the reserved amounts as immovable workers of other runs, for a replan. Where workers of this run stay
        on reserved capacity, the other runs get the rest."""
        if not self._nodes:
            return ()
        seats = seats_from_amounts(
            min_amounts(self.amounts, subtract_amounts(cluster_capacity(cluster), sum_seats(staying)))
        )
        return tuple(_external_worker(-number, seat) for number, seat in enumerate(seats, start=1))

    def apply_to(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with all reserved amounts taken by other runs. Workers of this run on reserved capacity
        keep only the rest of their seats: their seats no longer fit, so a replan moves them, and they work until
        then."""
        capacity = cluster_capacity(snapshot.cluster)
        ours = [worker for worker in snapshot.workers if not worker.external]
        staying = [seat for worker in ours if worker.phase is not WorkerPhase.DRAINING for seat in worker.seats]
        over = self.excess(snapshot.cluster, sum_seats(staying))
        workers = [
            _external_worker(-number, seat)
            for number, seat in enumerate(seats_from_amounts(min_amounts(self.amounts, capacity)), start=1)
        ]
        for worker in ours:
            seats = []
            for seat in worker.seats:
                takes = {} if worker.phase is WorkerPhase.DRAINING else sum_seats((seat,))
                cut = min_amounts(takes, over)
                over = subtract_amounts(over, cut)
                left = seats_from_amounts(subtract_amounts(takes, cut)) or (Seat(seat.node),)
                seats.append(left[0] if cut else seat)
            workers.append(replace(worker, seats=tuple(seats)))
        return replace(snapshot, workers=tuple(workers))


def _external_worker(number: int, seat: Seat) -> WorkerSnapshot:
    return WorkerSnapshot(number, "", (seat,), movable=False, external=True)


def is_staying(worker: Worker) -> bool:
    """Whether the worker, or a replacement on its seats, will keep its seats."""
    return worker.state in (WorkerState.STARTING, WorkerState.READY) or worker.will_be_replaced


def workers_to_release(state: StreamState, cluster: Cluster, reserved: ReservedCapacity) -> tuple[list[Worker], bool]:
    """Return the workers to release for the reserved amounts, and whether too much is used even without them."""
    staying = [
        StayingWorker(worker.id, worker.unit, sum_seats(worker.seats))
        for worker in state.workers.values()
        if is_staying(worker)
    ]
    taken: Amounts = {}
    for worker in staying:
        taken = add_amounts(taken, worker.amounts)
    lows = {unit.name: max(1, unit.low) for unit in state.all_units}
    going = [state.workers[number] for number in select_released(staying, lows, reserved.excess(cluster, taken))]
    freed = sum_seats(seat for worker in going for seat in worker.seats)
    return going, bool(reserved.excess(cluster, subtract_amounts(taken, freed)))


def select_released(staying: Sequence[StayingWorker], lows: Mapping[str, int], over: Amounts) -> list[int]:
    """Select as few workers as possible to release: those that free most of the excess, of units with the most workers
    above their minimum, newest first. The last worker of a unit is never released, even if an excess remains."""
    counts = Counter(worker.unit for worker in staying)
    left = {worker.worker: worker for worker in staying if not over.keys().isdisjoint(worker.amounts)}
    going: list[StayingWorker] = []
    excess = over

    def rank(worker: StayingWorker) -> tuple[bool, float, int, int]:
        spare = counts[worker.unit] - lows[worker.unit]
        freed = sum(min(worker.amounts.get(key, 0), amount) / amount for key, amount in excess.items())
        return spare > 0, freed, spare, worker.worker

    while excess:
        able = [one for one in left.values() if counts[one.unit] > 1 and not excess.keys().isdisjoint(one.amounts)]
        if not able:
            break
        best = max(able, key=rank)
        del left[best.worker]
        counts[best.unit] -= 1
        going.append(best)
        excess = subtract_amounts(excess, best.amounts)
    return [worker.worker for worker in _without_redundant(going, over, excess)]


def _without_redundant(going: list[StayingWorker], over: Amounts, rest: Amounts) -> list[StayingWorker]:
    """Drop workers that free nothing that the others do not free as well."""
    needed = list(going)
    for worker in going:
        freed: Amounts = {}
        for other in needed:
            if other is not worker:
                freed = add_amounts(freed, other.amounts)
        if fits_within(subtract_amounts(over, freed), rest):
            needed.remove(worker)
    return needed
