"""Layout of workers on nodes during a replan: alike nodes share one NodeState; built from a Snapshot.

A room is a node without its name: what is free, who sits there, and who was told to leave. Nodes that are alike are in
the same room and are replanned as one, so that the work depends on how many different rooms there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.resources.ledger import Ledger
from dovetail.scheduling.packing import NodeFiller
from dovetail.scheduling.replan.snapshot import WorkerPhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.seat import CardShare, Seat, Seats
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.replan.snapshot import Snapshot, WorkerSnapshot


class OccupantStatus(Enum):
    """What keeps a worker where it is."""

    RUNNING = "sits there, and may be asked to leave"
    FIXED = "sits there, and must not be touched"
    DRAINING = "leaves anyway"
    MISFIT = "its seat no longer suits its unit"
    DRAIN_CANCELLED = "was draining, and stays"
    NEW = "is to be started"

    __hash__ = object.__hash__  # looked up for every sitter; members are single objects


OTHER_RUN = -2
"""The unit of those who are not of this run: what they hold is no part of the nodes that are ours."""
LEAVING_STATUSES = frozenset((OccupantStatus.DRAINING, OccupantStatus.MISFIT))
"""Those who do not count as workers of their unit."""


class Occupant:
    """All workers of one unit that sit in the same way in nodes; made once by `House.sitter`."""

    __slots__ = ("cards", "cpu_milli", "gpu_milli", "number", "seats", "status", "unit")

    def __init__(self, number: int, unit: int, seats: Seats, hold: OccupantStatus) -> None:
        self.number = number
        self.unit = unit
        self.seats = seats
        self.status = hold
        self.cpu_milli = sum(seat.cpu_milli for seat in seats)
        self.gpu_milli = sum(share.milli for seat in seats for share in seat.cards)
        self.cards = tuple(sorted({share.card for seat in seats for share in seat.cards}))


class NodeState:
    """A node without its name; made once by `House.room`, so that alike nodes are in the same one."""

    __slots__ = ("cache", "evictable_counts", "evicted", "free", "occupants")

    def __init__(self, free: FreeResources, present: tuple[Occupant, ...], gone: tuple[Occupant, ...]) -> None:
        self.free = free
        self.occupants = present
        self.evicted = gone
        self.evictable_counts: dict[int, int] = {}
        """Unit -> workers that may be asked to leave."""
        for sitter in present:
            if sitter.status is OccupantStatus.RUNNING:
                self.evictable_counts[sitter.unit] = self.evictable_counts.get(sitter.unit, 0) + 1
        self.cache: dict[object, Any] = {}
        """What others worked out about it."""


class Interner:
    """Makes sitters and rooms, each once."""

    def __init__(self) -> None:
        self._occupants: dict[tuple[object, ...], Occupant] = {}
        self._node_states: dict[tuple[FreeResources, tuple[int, ...], tuple[int, ...]], NodeState] = {}

    def occupant(self, unit: int, seats: Sequence[Seat], hold: OccupantStatus) -> Occupant:
        key = (unit, hold, *[seat[1:] for seat in seats])
        found = self._occupants.get(key)
        if found is None:
            local = tuple(seat._replace(node="") for seat in seats)
            found = self._occupants[key] = Occupant(len(self._occupants), unit, local, hold)
        return found

    def node_state(self, free: FreeResources, present: Iterable[Occupant], gone: Iterable[Occupant]) -> NodeState:
        here = tuple(sorted(present, key=_number))
        left = tuple(sorted(gone, key=_number))
        key = (free, tuple(map(_number, here)), tuple(map(_number, left)))
        found = self._node_states.get(key)
        if found is None:
            found = self._node_states[key] = NodeState(free, here, left)
        return found

    def with_changes(self, room: NodeState, leave: Iterable[Occupant] = (), come: Iterable[Occupant] = ()) -> NodeState:
        """The room once some have left and then others have come. A new one that leaves was never there."""
        present, gone, free = list(room.occupants), list(room.evicted), room.free
        for sitter in leave:
            present.remove(sitter)
            free = free_without_occupant(free, sitter)
            if sitter.status is not OccupantStatus.NEW:
                gone.append(sitter)
        for sitter in come:
            present.append(sitter)
            if sitter in gone:
                gone.remove(sitter)
            then = free_with_occupant(free, sitter)
            assert then is not None, (sitter.seats, free)
            free = then
        return self.node_state(free, present, gone)

    def with_status(self, room: NodeState, sitter: Occupant, other: Occupant) -> NodeState:
        """The room with one sitter, in the same seat, held by something else."""
        present = list(room.occupants)
        present[present.index(sitter)] = other
        return self.node_state(room.free, present, room.evicted)


def _number(sitter: Occupant) -> int:
    return sitter.number


def free_with_occupant(free: FreeResources, sitter: Occupant) -> FreeResources | None:
    """What is free once it sits there; None if there is no such room."""
    then: FreeResources | None = free
    for seat in sitter.seats:
        then = then.taken(seat) if then is not None else None
    return then


def free_without_occupant(free: FreeResources, sitter: Occupant) -> FreeResources:
    """What is free once it has left."""
    for seat in sitter.seats:
        free = free.given_back(seat)
    return free


def count_workers(room: NodeState, unit: int) -> int:
    """How many workers of a unit sit there, or are to, and will stay."""
    return sum(sitter.unit == unit and sitter.status not in LEAVING_STATUSES for sitter in room.occupants)


class NewGang(NamedTuple):
    """A new worker on several nodes."""

    unit: int
    seats: tuple[tuple[int, Seat], ...]
    """(Position of the node, seat there) of each rank."""


class Layout:
    """All nodes by the room they are in now, and how many workers each unit has."""

    __slots__ = ("counts", "gangs", "groups", "interner")

    def __init__(
        self, house: Interner, rooms: dict[NodeState, list[int]], counts: list[int], gangs: list[NewGang]
    ) -> None:
        self.interner = house
        self.groups = rooms
        self.counts = counts
        self.gangs = gangs

    def copy(self) -> Layout:
        return Layout(self.interner, dict(self.groups), list(self.counts), list(self.gangs))

    def single_node(self, room: NodeState, units: int) -> Layout:
        """A floor of one such node alone."""
        return Layout(self.interner, {room: [0]}, [count_workers(room, unit) for unit in range(units)], [])

    def as_applied(self) -> Layout:
        """The same floor as if all who are told to leave had left, and all who are to be started were there."""
        floor = Layout(self.interner, {}, list(self.counts), [])
        for room, positions in self.groups.items():
            present = [
                self.interner.occupant(sitter.unit, sitter.seats, OccupantStatus.RUNNING)
                if sitter.status is OccupantStatus.NEW
                else sitter
                for sitter in room.occupants
            ]
            floor._add_to_group(self.interner.node_state(room.free, present, ()), positions)
        return floor

    def move_nodes(self, room: NodeState, nodes: int, then: NodeState) -> None:
        """The first `nodes` of the nodes in a room are in another from now on. Lists are never changed in place,
        because copies of the floor share them."""
        positions = self.groups.pop(room)
        if nodes < len(positions):
            self.groups[room] = positions[nodes:]
        self._add_to_group(then, positions[:nodes])

    def move_node(self, room: NodeState, position: int, then: NodeState) -> None:
        """One particular node is in another room from now on."""
        left = [other for other in self.groups.pop(room) if other != position]
        if left:
            self.groups[room] = left
        self._add_to_group(then, [position])

    def _add_to_group(self, room: NodeState, positions: list[int]) -> None:
        joined = self.groups.get(room)
        self.groups[room] = positions if joined is None else sorted([*joined, *positions])

    def count(self, hold: OccupantStatus, *, gone: bool = False) -> int:
        """Workers that are so, or were and are told to leave."""
        return sum(
            len(positions) * sum(sitter.status is hold for sitter in (room.evicted if gone else room.occupants))
            for room, positions in self.groups.items()
        )

    @property
    def changes(self) -> int:
        """Starts and stops so far. A worker that drains needs no stop."""
        return len(self.gangs) + sum(
            len(positions)
            * (
                sum(sitter.status is OccupantStatus.NEW for sitter in room.occupants)
                + sum(sitter.status is not OccupantStatus.DRAINING for sitter in room.evicted)
            )
            for room, positions in self.groups.items()
        )


UNMANAGED = -1
"""The unit of those who hold seats and are none of this replan's business."""


@dataclass(slots=True)
class InitialLayout:
    """The floor as it is, and which workers its sitters are."""

    snapshot: Snapshot
    layout: Layout
    empty_ledger: Ledger
    """The cluster with nobody on it."""
    workers: dict[tuple[int, Occupant], list[int]] = field(default_factory=dict)
    """(Position of the node, sitter) -> the workers that sit so."""
    must_stop: dict[int, str] = field(default_factory=dict)
    """Worker -> why it is stopped whatever is decided."""
    gangs: list[WorkerSnapshot] = field(default_factory=list)
    """Workers on several nodes, which stay or are stopped as a whole."""


def layout_from_snapshot(
    snapshot: Snapshot, without: frozenset[int] = frozenset(), *, protecting: bool = True
) -> InitialLayout:
    """The floor without the workers in `without`, who are stopped. `protecting`: a unit whose workers all have to be
    replaced keeps one meanwhile."""
    return _LayoutBuilder(snapshot, without, protecting=protecting).build()


class _LayoutBuilder:
    def __init__(self, snapshot: Snapshot, without: frozenset[int], *, protecting: bool) -> None:
        self.snapshot = snapshot
        self.to_stop = without
        self.ledger = Ledger(snapshot.cluster)
        self.free: list[FreeResources] = list(self.ledger.free)
        self.index = {node.name: position for position, node in enumerate(snapshot.cluster.nodes)}
        self.units = {unit.name: number for number, unit in enumerate(snapshot.units)}
        self.fits = [NodeFiller(unit.shape).fit for unit in snapshot.units]
        self.sufficient: dict[object, bool] = {}
        self.interner = Interner()
        self.occupants: list[list[Occupant]] = [[] for _ in self.free]
        self.counts = [0] * len(snapshot.units)
        self.protected = self._last_ready_workers() if protecting else frozenset()
        self.initial = InitialLayout(snapshot, Layout(self.interner, {}, self.counts, []), self.ledger)

    def build(self) -> InitialLayout:
        # those who drain last: where a seat was promised to two, it is the other's
        for worker in sorted(self.snapshot.workers, key=lambda w: (w.phase is WorkerPhase.DRAINING, w.worker)):
            self._add_worker(worker)
        rooms = self.initial.layout.groups
        for position, free in enumerate(self.free):
            room = self.interner.node_state(free, self.occupants[position], ())
            rooms.setdefault(room, []).append(position)
        return self.initial

    def _add_worker(self, worker: WorkerSnapshot) -> None:
        there = [seat for seat in worker.seats if seat.node in self.index]
        leaves = worker.phase is WorkerPhase.DRAINING
        if not there:
            return
        unit = self.units.get(worker.unit, UNMANAGED)
        why = self._stop_reason(worker, unit, len(there))
        if why and worker.movable and not leaves:
            self.initial.must_stop[worker.worker] = why
            return
        if not self._try_take(there):
            if not leaves:
                self.initial.must_stop[worker.worker] = "its seat is no longer there"
            return
        suits = unit != UNMANAGED and len(there) == len(worker.seats) and self._is_sufficient(worker, unit)
        if len({seat.node for seat in there}) > 1:
            self._add_gang(worker, unit, there, counts=suits and not leaves)
        else:
            self._add_occupant(worker, unit, there, suits=suits)

    def _stop_reason(self, worker: WorkerSnapshot, unit: int, seats: int) -> str:
        if worker.worker in self.to_stop:
            return "its seats on several nodes are needed"
        if unit != UNMANAGED and self.snapshot.units[unit].finished:
            return f"{worker.unit} is finished"
        return "a part of it was on a node that is lost" if seats < len(worker.seats) else ""

    def _try_take(self, seats: list[Seat]) -> bool:
        then = {position: self.free[position] for position in {self.index[seat.node] for seat in seats}}
        for seat in seats:
            free = then[self.index[seat.node]].taken(seat)
            if free is None:
                return False
            then[self.index[seat.node]] = free
        for position, free in then.items():
            self.free[position] = free
        return True

    def _add_occupant(self, worker: WorkerSnapshot, unit: int, seats: list[Seat], *, suits: bool) -> None:
        drains = worker.phase is WorkerPhase.DRAINING
        counts = suits and not drains
        if unit == UNMANAGED or not worker.movable or worker.worker in self.protected or (drains and not suits):
            hold = OccupantStatus.FIXED
        else:
            hold = OccupantStatus.DRAINING if drains else OccupantStatus.RUNNING if suits else OccupantStatus.MISFIT
        if counts:
            self.counts[unit] += 1
        position = self.index[seats[0].node]
        if hold is OccupantStatus.FIXED and not counts:
            unit = OTHER_RUN if worker.external else UNMANAGED
        sitter = self.interner.occupant(unit, seats, hold)
        self.occupants[position].append(sitter)
        self.initial.workers.setdefault((position, sitter), []).append(worker.worker)

    def _last_ready_workers(self) -> frozenset[int]:
        """One of each unit whose ready workers all have seats that no longer suit it: it works until another does."""
        ready: dict[str, list[tuple[bool, int]]] = {}
        for worker in self.snapshot.workers:
            known = worker.unit in self.units and all(seat.node in self.index for seat in worker.seats)
            if known and worker.phase is WorkerPhase.READY:
                suits = self._is_sufficient(worker, self.units[worker.unit])
                ready.setdefault(worker.unit, []).append((not suits, worker.worker))
        return frozenset(min(mine)[1] for mine in ready.values() if min(mine)[0])

    def _add_gang(self, worker: WorkerSnapshot, unit: int, seats: list[Seat], *, counts: bool) -> None:
        if unit != UNMANAGED and worker.movable and worker.phase is not WorkerPhase.DRAINING and not counts:
            self.initial.must_stop[worker.worker] = "its seats no longer suit its unit"
            for seat in seats:
                position = self.index[seat.node]
                self.free[position] = self.free[position].given_back(seat)
            return
        for seat in seats:
            self.occupants[self.index[seat.node]].append(
                self.interner.occupant(UNMANAGED, (seat,), OccupantStatus.FIXED)
            )
        if counts:
            self.counts[unit] += 1
            self.initial.gangs.append(worker)

    def _is_sufficient(self, worker: WorkerSnapshot, unit: int) -> bool:
        return len(worker.seats) == self.snapshot.units[unit].shape.ranks and all(
            self._is_seat_sufficient_for(seat, unit) for seat in worker.seats
        )

    def _is_seat_sufficient_for(self, seat: Seat, unit: int) -> bool:
        kind = self.free[self.index[seat.node]].cards.kind
        key = (unit, kind, seat[1:])
        found = self.sufficient.get(key)
        if found is None:
            shape = self.snapshot.units[unit].shape
            found = self.sufficient[key] = _is_seat_sufficient(seat, shape, self.fits[unit].shares(kind))
        return found


def _is_seat_sufficient(seat: Seat, shape: Shape, shares: tuple[CardShare | None, ...] | None) -> bool:
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
