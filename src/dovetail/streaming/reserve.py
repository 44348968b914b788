"""What do others hold of our nodes, and what does a run that shares them give back?

What is reserved is no part of the ledger, which knows only our own workers: it is what must stay free. While workers of
ours still sit on some of it, nobody else of ours can take what they leave.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState
from dovetail.resources.amounts import amounts_of, capacity_of, free_on, least, minus, plus, seats_of, within
from dovetail.resources.seat import Seat
from dovetail.scheduling.snapshot import Seated, Standing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.free import Free
    from dovetail.scheduling.snapshot import Snapshot
    from dovetail.streaming.board import Board
    from dovetail.streaming.workers import Worker

NOBODY = ""
"""The unit of those who are not ours."""
WHY = "given back: another run gets it"


@dataclass(frozen=True, slots=True)
class Sitting:
    """A worker that would stay, and what it takes."""

    worker: int
    unit: str
    takes: Amounts


class Reserve:
    """What must stay free for others. Nodes that are not there are passed over."""

    def __init__(self, seats: Iterable[Seat] = ()) -> None:
        self.amounts = amounts_of(seats)
        self._nodes = {node for node, _, _ in self.amounts}

    def leaves(self, free: Free, seat: Seat) -> bool:
        """Whether enough of everything that the seat takes is left for others."""
        if seat.node not in self._nodes:
            return True
        left, kept = free_on(seat.node, free), self.amounts
        return all(left.get(key, 0) - amount >= kept.get(key, 0) for key, amount in amounts_of((seat,)).items())

    def leaves_all(self, cluster: Cluster, seats: Iterable[Seat]) -> bool:
        """Whether these can sit beside what others hold, if nobody else of ours does."""
        return not self._nodes or not self.over(cluster, amounts_of(seats))

    def over(self, cluster: Cluster, taken: Amounts) -> Amounts:
        """By how much both together are more than there is."""
        capacity = capacity_of(cluster)
        return minus(plus(least(self.amounts, capacity), least(taken, capacity)), capacity)

    def strangers(self, cluster: Cluster, staying: Iterable[Seat]) -> tuple[Seated, ...]:
        """What others hold as a replan sees it: sitters that it cannot move. Where ours stay although it is too much,
        the others have what is left."""
        if not self._nodes:
            return ()
        seats = seats_of(least(self.amounts, minus(capacity_of(cluster), amounts_of(staying))))
        return tuple(_sat(-number, seat) for number, seat in enumerate(seats, start=1))

    def squeezed(self, snapshot: Snapshot) -> Snapshot:
        """The same with all that others hold, and whoever sits on it with what is left of its seats: for a replan its
        seats do not suit it any more, and it works until another does."""
        capacity = capacity_of(snapshot.cluster)
        ours = [worker for worker in snapshot.workers if worker.unit != NOBODY]
        staying = [seat for worker in ours if worker.standing is not Standing.DRAINING for seat in worker.seats]
        over = self.over(snapshot.cluster, amounts_of(staying))
        workers = [_sat(-number, seat) for number, seat in enumerate(seats_of(least(self.amounts, capacity)), start=1)]
        for worker in ours:
            seats = []
            for seat in worker.seats:
                takes = {} if worker.standing is Standing.DRAINING else amounts_of((seat,))
                cut = least(takes, over)
                over = minus(over, cut)
                left = seats_of(minus(takes, cut)) or (Seat(seat.node),)
                seats.append(left[0] if cut else seat)
            workers.append(replace(worker, seats=tuple(seats)))
        return replace(snapshot, workers=tuple(workers))


def _sat(number: int, seat: Seat) -> Seated:
    return Seated(number, NOBODY, (seat,), moveable=False)


def stays(worker: Worker) -> bool:
    """Whether it, or one that takes its seats when it is gone, will be there."""
    return worker.state in (WorkerState.STARTING, WorkerState.READY) or worker.replaced


def to_give_back(board: Board, cluster: Cluster, reserve: Reserve) -> tuple[list[Worker], bool]:
    """Those who cannot stay beside what others hold, and whether it is too much even without them."""
    staying = [
        Sitting(worker.id, worker.unit, amounts_of(worker.seats)) for worker in board.workers.values() if stays(worker)
    ]
    taken: Amounts = {}
    for sitting in staying:
        taken = plus(taken, sitting.takes)
    lows = {lane.name: max(1, lane.low) for lane in board.all_lanes}
    going = [board.workers[number] for number in who_goes(staying, lows, reserve.over(cluster, taken))]
    freed = amounts_of(seat for worker in going for seat in worker.seats)
    return going, bool(reserve.over(cluster, minus(taken, freed)))


def who_goes(staying: Sequence[Sitting], lows: Mapping[str, int], over: Amounts) -> list[int]:
    """As few as possible: those that free most of what is too much, of units with most to spare, the newest first. Not
    the last of a unit, even if it is too much then."""
    counts = Counter(sitting.unit for sitting in staying)
    left = {sitting.worker: sitting for sitting in staying if not over.keys().isdisjoint(sitting.takes)}
    going: list[Sitting] = []
    too_much = over

    def good(sitting: Sitting) -> tuple[bool, float, int, int]:
        spare = counts[sitting.unit] - lows[sitting.unit]
        freed = sum(min(sitting.takes.get(key, 0), amount) / amount for key, amount in too_much.items())
        return spare > 0, freed, spare, sitting.worker

    while too_much:
        able = [it for it in left.values() if counts[it.unit] > 1 and not too_much.keys().isdisjoint(it.takes)]
        if not able:
            break
        best = max(able, key=good)
        del left[best.worker]
        counts[best.unit] -= 1
        going.append(best)
        too_much = minus(too_much, best.takes)
    return [sitting.worker for sitting in _needed(going, over, too_much)]


def _needed(going: list[Sitting], over: Amounts, rest: Amounts) -> list[Sitting]:
    """Without those who turn out to free nothing that the others do not free too."""
    needed = list(going)
    for sitting in going:
        freed: Amounts = {}
        for other in needed:
            if other is not sitting:
                freed = plus(freed, other.takes)
        if within(minus(over, freed), rest):
            needed.remove(sitting)
    return needed
