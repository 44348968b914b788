"""Capacity of our nodes that is reserved for other runs, and the workers to release for it.

What is reserved is no part of the ledger, which knows only our own workers: it is what must stay free. While workers of
ours still sit on some of it, nobody else of ours can take what they leave.
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

EXTERNAL_UNIT = ""
"""The unit of those who are not ours."""
RELEASE_REASON = "given back: another run gets it"


@dataclass(frozen=True, slots=True)
class StayingWorker:
    """A worker that would stay, and what it takes."""

    worker: int
    unit: str
    amounts: Amounts


class ReservedCapacity:
    """What must stay free for others. Nodes that are not there are passed over."""

    def __init__(self, seats: Iterable[Seat] = ()) -> None:
        self.amounts = sum_seats(seats)
        self._nodes = {node for node, _, _ in self.amounts}

    def allows(self, free: FreeResources, seat: Seat) -> bool:
        """Whether enough of everything that the seat takes is left for others."""
        if seat.node not in self._nodes:
            return True
        left, kept = free_amounts(seat.node, free), self.amounts
        return all(left.get(key, 0) - amount >= kept.get(key, 0) for key, amount in sum_seats((seat,)).items())

    def allows_all(self, cluster: Cluster, seats: Iterable[Seat]) -> bool:
        """Whether these can sit beside what others hold, if nobody else of ours does."""
        return not self._nodes or not self.excess(cluster, sum_seats(seats))

    def excess(self, cluster: Cluster, taken: Amounts) -> Amounts:
        """By how much both together are more than there is."""
        capacity = cluster_capacity(cluster)
        return subtract_amounts(
            add_amounts(min_amounts(self.amounts, capacity), min_amounts(taken, capacity)), capacity
        )

    def external_workers(self, cluster: Cluster, staying: Iterable[Seat]) -> tuple[WorkerSnapshot, ...]:
        """What others hold as a replan sees it: sitters that it cannot move. Where ours stay although it is too much,
        the others have what is left."""
        if not self._nodes:
            return ()
        seats = seats_from_amounts(
            min_amounts(self.amounts, subtract_amounts(cluster_capacity(cluster), sum_seats(staying)))
        )
        return tuple(_external_worker(-number, seat) for number, seat in enumerate(seats, start=1))

    def apply_to(self, snapshot: Snapshot) -> Snapshot:
        """The same with all that others hold, and whoever sits on it with what is left of its seats: for a replan its
        seats do not suit it any more, and it works until another does."""
        capacity = cluster_capacity(snapshot.cluster)
        ours = [worker for worker in snapshot.workers if worker.unit != EXTERNAL_UNIT]
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
    return WorkerSnapshot(number, EXTERNAL_UNIT, (seat,), movable=False)


def is_staying(worker: Worker) -> bool:
    """Whether it, or one that takes its seats when it is gone, will be there."""
    return worker.state in (WorkerState.STARTING, WorkerState.READY) or worker.will_be_replaced


def workers_to_release(board: StreamState, cluster: Cluster, reserve: ReservedCapacity) -> tuple[list[Worker], bool]:
    """Those who cannot stay beside what others hold, and whether it is too much even without them."""
    staying = [
        StayingWorker(worker.id, worker.unit, sum_seats(worker.seats))
        for worker in board.workers.values()
        if is_staying(worker)
    ]
    taken: Amounts = {}
    for sitting in staying:
        taken = add_amounts(taken, sitting.amounts)
    lows = {lane.name: max(1, lane.low) for lane in board.all_units}
    going = [board.workers[number] for number in select_released(staying, lows, reserve.excess(cluster, taken))]
    freed = sum_seats(seat for worker in going for seat in worker.seats)
    return going, bool(reserve.excess(cluster, subtract_amounts(taken, freed)))


def select_released(staying: Sequence[StayingWorker], lows: Mapping[str, int], over: Amounts) -> list[int]:
    """As few as possible: those that free most of what is too much, of units with most to spare, the newest first. Not
    the last of a unit, even if it is too much then."""
    counts = Counter(sitting.unit for sitting in staying)
    left = {sitting.worker: sitting for sitting in staying if not over.keys().isdisjoint(sitting.amounts)}
    going: list[StayingWorker] = []
    too_much = over

    def good(sitting: StayingWorker) -> tuple[bool, float, int, int]:
        spare = counts[sitting.unit] - lows[sitting.unit]
        freed = sum(min(sitting.amounts.get(key, 0), amount) / amount for key, amount in too_much.items())
        return spare > 0, freed, spare, sitting.worker

    while too_much:
        able = [it for it in left.values() if counts[it.unit] > 1 and not too_much.keys().isdisjoint(it.amounts)]
        if not able:
            break
        best = max(able, key=good)
        del left[best.worker]
        counts[best.unit] -= 1
        going.append(best)
        too_much = subtract_amounts(too_much, best.amounts)
    return [sitting.worker for sitting in _without_redundant(going, over, too_much)]


def _without_redundant(going: list[StayingWorker], over: Amounts, rest: Amounts) -> list[StayingWorker]:
    """Without those who turn out to free nothing that the others do not free too."""
    needed = list(going)
    for sitting in going:
        freed: Amounts = {}
        for other in needed:
            if other is not sitting:
                freed = add_amounts(freed, other.amounts)
        if fits_within(subtract_amounts(over, freed), rest):
            needed.remove(sitting)
    return needed
