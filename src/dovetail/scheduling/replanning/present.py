"""Who sits where when a replan begins, and who cannot stay whatever is decided?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.resources.ledger import Ledger
from dovetail.scheduling.packing import Filler
from dovetail.scheduling.replanning.rooms import OTHERS, Floor, Hold, House
from dovetail.scheduling.snapshot import Standing

if TYPE_CHECKING:
    from dovetail.resources.free import Free
    from dovetail.resources.seat import CardShare, Seat
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.replanning.rooms import Sitter
    from dovetail.scheduling.snapshot import Seated, Snapshot

STRANGER = -1
"""The unit of those who hold seats and are none of this replan's business."""


@dataclass(slots=True)
class Present:
    """The floor as it is, and which workers its sitters are."""

    snapshot: Snapshot
    floor: Floor
    empty: Ledger
    """The cluster with nobody on it."""
    workers: dict[tuple[int, Sitter], list[int]] = field(default_factory=dict)
    """(Position of the node, sitter) -> the workers that sit so."""
    must_stop: dict[int, str] = field(default_factory=dict)
    """Worker -> why it is stopped whatever is decided."""
    gangs: list[Seated] = field(default_factory=list)
    """Workers on several nodes, which stay or are stopped as a whole."""


def present(snapshot: Snapshot, without: frozenset[int] = frozenset(), *, protecting: bool = True) -> Present:
    """The floor without the workers in `without`, who are stopped. `protecting`: a unit whose workers all have to be
    replaced keeps one meanwhile."""
    return _Arrival(snapshot, without, protecting=protecting).result()


class _Arrival:
    def __init__(self, snapshot: Snapshot, without: frozenset[int], *, protecting: bool) -> None:
        self.snapshot = snapshot
        self.without = without
        self.ledger = Ledger(snapshot.cluster)
        self.free: list[Free] = list(self.ledger.free)
        self.index = {node.name: position for position, node in enumerate(snapshot.cluster.nodes)}
        self.units = {unit.name: number for number, unit in enumerate(snapshot.units)}
        self.fits = [Filler(unit.shape).fit for unit in snapshot.units]
        self.suited: dict[object, bool] = {}
        self.house = House()
        self.here: list[list[Sitter]] = [[] for _ in self.free]
        self.counts = [0] * len(snapshot.units)
        self.protected = self._last_of_their_unit() if protecting else frozenset()
        self.found = Present(snapshot, Floor(self.house, {}, self.counts, []), self.ledger)

    def result(self) -> Present:
        # those who drain last: where a seat was promised to two, it is the other's
        for worker in sorted(self.snapshot.workers, key=lambda w: (w.standing is Standing.DRAINING, w.worker)):
            self._arrives(worker)
        rooms = self.found.floor.rooms
        for position, free in enumerate(self.free):
            room = self.house.room(free, self.here[position], ())
            rooms.setdefault(room, []).append(position)
        return self.found

    def _arrives(self, worker: Seated) -> None:
        there = [seat for seat in worker.seats if seat.node in self.index]
        leaves = worker.standing is Standing.DRAINING
        if not there:
            return
        unit = self.units.get(worker.unit, STRANGER)
        why = self._why_not(worker, unit, len(there))
        if why and worker.moveable and not leaves:
            self.found.must_stop[worker.worker] = why
            return
        if not self._taken(there):
            if not leaves:
                self.found.must_stop[worker.worker] = "its seat is no longer there"
            return
        suits = unit != STRANGER and len(there) == len(worker.seats) and self._suits(worker, unit)
        if len({seat.node for seat in there}) > 1:
            self._gang(worker, unit, there, counts=suits and not leaves)
        else:
            self._sits(worker, unit, there, suits=suits)

    def _why_not(self, worker: Seated, unit: int, seats: int) -> str:
        if worker.worker in self.without:
            return "its seats on several nodes are needed"
        if unit != STRANGER and self.snapshot.units[unit].finished:
            return f"{worker.unit} is finished"
        return "a part of it was on a node that is lost" if seats < len(worker.seats) else ""

    def _taken(self, seats: list[Seat]) -> bool:
        then = {position: self.free[position] for position in {self.index[seat.node] for seat in seats}}
        for seat in seats:
            free = then[self.index[seat.node]].taken(seat)
            if free is None:
                return False
            then[self.index[seat.node]] = free
        for position, free in then.items():
            self.free[position] = free
        return True

    def _sits(self, worker: Seated, unit: int, seats: list[Seat], *, suits: bool) -> None:
        drains = worker.standing is Standing.DRAINING
        counts = suits and not drains
        if unit == STRANGER or not worker.moveable or worker.worker in self.protected or (drains and not suits):
            hold = Hold.FIXED
        else:
            hold = Hold.DRAINING if drains else Hold.OLD if suits else Hold.OUTGROWN
        if counts:
            self.counts[unit] += 1
        position = self.index[seats[0].node]
        if hold is Hold.FIXED and not counts:
            unit = STRANGER if worker.unit else OTHERS
        sitter = self.house.sitter(unit, seats, hold)
        self.here[position].append(sitter)
        self.found.workers.setdefault((position, sitter), []).append(worker.worker)

    def _last_of_their_unit(self) -> frozenset[int]:
        """One of each unit whose ready workers all have seats that no longer suit it: it works until another does."""
        ready: dict[str, list[tuple[bool, int]]] = {}
        for worker in self.snapshot.workers:
            known = worker.unit in self.units and all(seat.node in self.index for seat in worker.seats)
            if known and worker.standing is Standing.READY:
                suits = self._suits(worker, self.units[worker.unit])
                ready.setdefault(worker.unit, []).append((not suits, worker.worker))
        return frozenset(min(mine)[1] for mine in ready.values() if min(mine)[0])

    def _gang(self, worker: Seated, unit: int, seats: list[Seat], *, counts: bool) -> None:
        if unit != STRANGER and worker.moveable and worker.standing is not Standing.DRAINING and not counts:
            self.found.must_stop[worker.worker] = "its seats no longer suit its unit"
            for seat in seats:
                position = self.index[seat.node]
                self.free[position] = self.free[position].given_back(seat)
            return
        for seat in seats:
            self.here[self.index[seat.node]].append(self.house.sitter(STRANGER, (seat,), Hold.FIXED))
        if counts:
            self.counts[unit] += 1
            self.found.gangs.append(worker)

    def _suits(self, worker: Seated, unit: int) -> bool:
        return len(worker.seats) == self.snapshot.units[unit].shape.ranks and all(
            self._seat_suits(seat, unit) for seat in worker.seats
        )

    def _seat_suits(self, seat: Seat, unit: int) -> bool:
        kind = self.free[self.index[seat.node]].cards.kind
        key = (unit, kind, seat[1:])
        found = self.suited.get(key)
        if found is None:
            shape = self.snapshot.units[unit].shape
            found = self.suited[key] = _suits(seat, shape, self.fits[unit].shares(kind))
        return found


def _suits(seat: Seat, shape: Shape, shares: tuple[CardShare | None, ...] | None) -> bool:
    """Whether a seat has all that the shape asks for, on cards that will do."""
    if shares is None or len(seat.cards) != shape.cards:
        return False
    custom = dict(seat.custom)
    if seat.cpu_milli < shape.cpu_milli or seat.memory_bytes < shape.memory_bytes:
        return False
    if any(custom.get(name, 0) < amount for name, amount in shape.custom):
        return False
    for share in seat.cards:
        asked = shares[share.card] if share.card < len(shares) else None
        if asked is None or share.milli < asked.milli or share.memory_bytes < asked.memory_bytes:
            return False
    nvdecs, nvencs = sum(share.nvdecs for share in seat.cards), sum(share.nvencs for share in seat.cards)
    return nvdecs >= shape.nvdecs and nvencs >= shape.nvencs
