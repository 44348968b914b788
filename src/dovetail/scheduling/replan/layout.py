"""Layout of workers on nodes during a replan: built from a Snapshot, compared with another layout at the end.

A NodeState is a node without its name: its free resources, its occupants, and the occupants that are to leave. Nodes in
the same state are replanned as one group, so the cost depends on the number of different states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.resources.ledger import Ledger
from dovetail.scheduling.packing import NodeFiller, group_nodes
from dovetail.scheduling.replan.snapshot import PlannedStart, PlannedStop, WorkerPhase
from dovetail.text_format import format_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.seat import CardShare, Seat, Seats
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.packing import NodeGroups
    from dovetail.scheduling.replan.snapshot import Snapshot, WorkerSnapshot
    from dovetail.scheduling.replan.targets import UnitTarget


class OccupantStatus(Enum):
    """Why an occupant holds its seats, and whether it may leave them."""

    RUNNING = "counts for its unit, and may be stopped"
    FIXED = "counts for its unit, and may not be stopped"
    DRAINING = "leaves in any case"
    MISFIT = "leaves in any case: its seats no longer suit its unit"
    DRAIN_CANCELLED = "was draining, and stays"
    NEW = "is to be started"
    UNCOUNTED = "must stay and is not counted on its node: a rank of a gang, or a worker without suitable seats"
    OTHER_RUN = "belongs to another run: its seats are not part of the capacity of this run"

    __hash__ = object.__hash__  # looked up for every occupant; members are single objects


LEAVING_STATUSES = frozenset((OccupantStatus.DRAINING, OccupantStatus.MISFIT))
UNCOUNTED_STATUSES = LEAVING_STATUSES | {OccupantStatus.UNCOUNTED, OccupantStatus.OTHER_RUN}
NO_UNIT = -1
"""Unit number of workers that belong to no unit of the snapshot."""


class Occupant:
    """Workers of one unit with the same status on the same seats, on any node; made once by `Interner.occupant`."""

    __slots__ = ("cards", "cpu_milli", "gpu_milli", "number", "seats", "status", "unit")

    def __init__(self, number: int, unit: int, seats: Seats, status: OccupantStatus) -> None:
        self.number = number
        self.unit = unit
        self.seats = seats
        self.status = status
        self.cpu_milli = sum(seat.cpu_milli for seat in seats)
        self.gpu_milli = sum(share.milli for seat in seats for share in seat.cards)
        self.cards = tuple(sorted({share.card for seat in seats for share in seat.cards}))


class NodeState:
    """State of a node, without its name; made once by `Interner.node_state`, so that equal states are one object."""

    __slots__ = ("cache", "evictable_counts", "evicted", "free", "occupants")

    def __init__(self, free: FreeResources, occupants: tuple[Occupant, ...], evicted: tuple[Occupant, ...]) -> None:
        self.free = free
        self.occupants = occupants
        self.evicted = evicted
        self.evictable_counts: dict[int, int] = {}
        """Unit -> workers that may be asked to leave (RUNNING)."""
        for occupant in occupants:
            if occupant.status is OccupantStatus.RUNNING:
                self.evictable_counts[occupant.unit] = self.evictable_counts.get(occupant.unit, 0) + 1
        self.cache: dict[object, Any] = {}
        """Results that other modules derived from this state."""


class Interner:
    """Factory of occupants and node states that makes each of them once."""

    def __init__(self) -> None:
        self._occupants: dict[tuple[object, ...], Occupant] = {}
        self._node_states: dict[tuple[FreeResources, tuple[int, ...], tuple[int, ...]], NodeState] = {}

    def occupant(self, unit: int, seats: Sequence[Seat], status: OccupantStatus) -> Occupant:
        key = (unit, status, *[seat[1:] for seat in seats])
        found = self._occupants.get(key)
        if found is None:
            local = tuple(seat._replace(node="") for seat in seats)
            found = self._occupants[key] = Occupant(len(self._occupants), unit, local, status)
        return found

    def node_state(self, free: FreeResources, occupants: Iterable[Occupant], evicted: Iterable[Occupant]) -> NodeState:
        here = tuple(sorted(occupants, key=_number))
        left = tuple(sorted(evicted, key=_number))
        key = (free, tuple(map(_number, here)), tuple(map(_number, left)))
        found = self._node_states.get(key)
        if found is None:
            found = self._node_states[key] = NodeState(free, here, left)
        return found

    def with_changes(
        self, state: NodeState, leaving: Iterable[Occupant] = (), arriving: Iterable[Occupant] = ()
    ) -> NodeState:
        """The state after some occupants left and then others arrived. A NEW occupant that leaves is forgotten."""
        occupants, evicted, free = list(state.occupants), list(state.evicted), state.free
        for occupant in leaving:
            occupants.remove(occupant)
            free = free_without(free, (occupant,))
            if occupant.status is not OccupantStatus.NEW:
                evicted.append(occupant)
        for occupant in arriving:
            occupants.append(occupant)
            if occupant in evicted:
                evicted.remove(occupant)
            then = free_with_occupant(free, occupant)
            assert then is not None, (occupant.seats, free)
            free = then
        return self.node_state(free, occupants, evicted)

    def with_replacement(self, state: NodeState, occupant: Occupant, other: Occupant) -> NodeState:
        """The state with one occupant replaced by another one on the same seats."""
        occupants = list(state.occupants)
        occupants[occupants.index(occupant)] = other
        return self.node_state(state.free, occupants, state.evicted)


def _number(occupant: Occupant) -> int:
    return occupant.number


def free_with_occupant(free: FreeResources, occupant: Occupant) -> FreeResources | None:
    """Free resources after the occupant arrived; None if its seats are taken."""
    then: FreeResources | None = free
    for seat in occupant.seats:
        then = then.taken(seat) if then is not None else None
    return then


def free_without(free: FreeResources, occupants: Iterable[Occupant]) -> FreeResources:
    """Free resources after these occupants left."""
    for occupant in occupants:
        for seat in occupant.seats:
            free = free.given_back(seat)
    return free


def count_workers(state: NodeState, unit: int) -> int:
    """Number of workers of a unit that stay or start on nodes in this state."""
    return sum(occupant.unit == unit and occupant.status not in UNCOUNTED_STATUSES for occupant in state.occupants)


class NewGang(NamedTuple):
    """A new worker with ranks on several nodes."""

    unit: int
    seats: tuple[tuple[int, Seat], ...]
    """(Position of the node, seat) of each rank."""


class Layout:
    """All nodes grouped by state, and the number of workers per unit."""

    __slots__ = ("counts", "gangs", "groups", "interner")

    def __init__(
        self, interner: Interner, groups: dict[NodeState, list[int]], counts: list[int], gangs: list[NewGang]
    ) -> None:
        self.interner = interner
        self.groups = groups
        self.counts = counts
        self.gangs = gangs

    def copy(self) -> Layout:
        return Layout(self.interner, dict(self.groups), list(self.counts), list(self.gangs))

    def single_node(self, state: NodeState, units: int) -> Layout:
        """A layout of a single node in this state."""
        return Layout(self.interner, {state: [0]}, [count_workers(state, unit) for unit in range(units)], [])

    def as_applied(self) -> Layout:
        """The layout after its starts and stops are carried out."""
        layout = Layout(self.interner, {}, list(self.counts), [])
        for state, positions in self.groups.items():
            occupants = [
                self.interner.occupant(occupant.unit, occupant.seats, OccupantStatus.RUNNING)
                if occupant.status is OccupantStatus.NEW
                else occupant
                for occupant in state.occupants
            ]
            layout._add_to_group(self.interner.node_state(state.free, occupants, ()), positions)
        return layout

    def move_nodes(self, state: NodeState, nodes: int, then: NodeState) -> None:
        """Move the first `nodes` nodes of a group to another state. Lists of positions are never changed in place:
        copies of the layout share them."""
        positions = self.groups.pop(state)
        if nodes < len(positions):
            self.groups[state] = positions[nodes:]
        self._add_to_group(then, positions[:nodes])

    def move_node(self, state: NodeState, position: int, then: NodeState) -> None:
        """Move one node to another state."""
        left = [other for other in self.groups.pop(state) if other != position]
        if left:
            self.groups[state] = left
        self._add_to_group(then, [position])

    def _add_to_group(self, state: NodeState, positions: list[int]) -> None:
        joined = self.groups.get(state)
        self.groups[state] = positions if joined is None else sorted([*joined, *positions])

    @property
    def changes(self) -> int:
        """Number of starts and stops so far. A draining worker needs no stop."""
        return len(self.gangs) + sum(
            len(positions)
            * (
                sum(occupant.status is OccupantStatus.NEW for occupant in state.occupants)
                + sum(occupant.status is not OccupantStatus.DRAINING for occupant in state.evicted)
            )
            for state, positions in self.groups.items()
        )


@dataclass(slots=True)
class InitialLayout:
    """Layout at the start of a replan, with the workers behind its occupants."""

    snapshot: Snapshot
    layout: Layout
    empty: NodeGroups
    """The nodes of the cluster without any worker."""
    workers: dict[tuple[int, Occupant], list[int]] = field(default_factory=dict)
    """(Position of the node, occupant) -> workers."""
    must_stop: dict[int, str] = field(default_factory=dict)
    """Worker -> reason, for workers that stop in any case."""
    gangs: list[WorkerSnapshot] = field(default_factory=list)
    """Workers with ranks on several nodes, which stay or stop as a whole."""


def layout_from_snapshot(
    snapshot: Snapshot, stopped: frozenset[int] = frozenset(), *, keep_last_workers: bool = True
) -> InitialLayout:
    """The current layout without the workers in `stopped`.

    `keep_last_workers`: a unit whose workers all have to be replaced keeps one of them meanwhile.
    """
    return _LayoutBuilder(snapshot, stopped, keep_last_workers=keep_last_workers).build()


class _LayoutBuilder:
    def __init__(self, snapshot: Snapshot, stopped: frozenset[int], *, keep_last_workers: bool) -> None:
        self.snapshot = snapshot
        self.stopped = stopped
        ledger = Ledger(snapshot.cluster)
        self.free: list[FreeResources] = list(ledger.free)
        self.index = {node.name: position for position, node in enumerate(snapshot.cluster.nodes)}
        self.units = {unit.name: number for number, unit in enumerate(snapshot.units)}
        self.fits = [NodeFiller(unit.shape).fit for unit in snapshot.units]
        self.sufficient: dict[object, bool] = {}
        self.interner = Interner()
        self.occupants: list[list[Occupant]] = [[] for _ in self.free]
        self.counts = [0] * len(snapshot.units)
        self.kept_workers = self._last_ready_workers() if keep_last_workers else frozenset()
        self.initial = InitialLayout(snapshot, Layout(self.interner, {}, self.counts, []), group_nodes(ledger))

    def build(self) -> InitialLayout:
        # draining workers last: if a seat was promised to two workers, the one that stays has it
        for worker in sorted(self.snapshot.workers, key=lambda w: (w.phase is WorkerPhase.DRAINING, w.worker)):
            self._add_worker(worker)
        groups = self.initial.layout.groups
        for position, free in enumerate(self.free):
            state = self.interner.node_state(free, self.occupants[position], ())
            groups.setdefault(state, []).append(position)
        return self.initial

    def _add_worker(self, worker: WorkerSnapshot) -> None:
        there = [seat for seat in worker.seats if seat.node in self.index]
        is_draining = worker.phase is WorkerPhase.DRAINING
        if not there:
            return
        unit = self.units.get(worker.unit, NO_UNIT)
        reason = self._stop_reason(worker, unit, len(there))
        if reason and worker.movable and not is_draining:
            self.initial.must_stop[worker.worker] = reason
            return
        if not self._try_take(there):
            if not is_draining:
                self.initial.must_stop[worker.worker] = "its seat no longer exists"
            return
        suits = unit != NO_UNIT and len(there) == len(worker.seats) and self._is_sufficient(worker, unit)
        if len({seat.node for seat in there}) > 1:
            self._add_gang(worker, unit, there, counts=suits and not is_draining)
        else:
            self._add_occupant(worker, unit, there, suits=suits)

    def _stop_reason(self, worker: WorkerSnapshot, unit: int, seats: int) -> str:
        if worker.worker in self.stopped:
            return "its seats on several nodes are needed"
        if unit != NO_UNIT and self.snapshot.units[unit].finished:
            return f"{worker.unit} is finished"
        return "one of its ranks was on a lost node" if seats < len(worker.seats) else ""

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
        status = self._status(worker, unit, suits=suits)
        if status not in UNCOUNTED_STATUSES:
            self.counts[unit] += 1
        position = self.index[seats[0].node]
        occupant = self.interner.occupant(unit, seats, status)
        self.occupants[position].append(occupant)
        self.initial.workers.setdefault((position, occupant), []).append(worker.worker)

    def _status(self, worker: WorkerSnapshot, unit: int, *, suits: bool) -> OccupantStatus:
        if worker.external:
            return OccupantStatus.OTHER_RUN
        is_draining = worker.phase is WorkerPhase.DRAINING
        is_fixed = unit == NO_UNIT or not worker.movable or worker.worker in self.kept_workers
        if is_fixed or (is_draining and not suits):
            return OccupantStatus.FIXED if suits and not is_draining else OccupantStatus.UNCOUNTED
        if is_draining:
            return OccupantStatus.DRAINING
        return OccupantStatus.RUNNING if suits else OccupantStatus.MISFIT

    def _last_ready_workers(self) -> frozenset[int]:
        """One worker of each unit whose ready workers all have unsuitable seats: it works until another is ready."""
        ready: dict[str, list[tuple[bool, int]]] = {}
        for worker in self.snapshot.workers:
            known = worker.unit in self.units and all(seat.node in self.index for seat in worker.seats)
            if known and worker.phase is WorkerPhase.READY:
                suits = self._is_sufficient(worker, self.units[worker.unit])
                ready.setdefault(worker.unit, []).append((not suits, worker.worker))
        return frozenset(min(mine)[1] for mine in ready.values() if min(mine)[0])

    def _add_gang(self, worker: WorkerSnapshot, unit: int, seats: list[Seat], *, counts: bool) -> None:
        if unit != NO_UNIT and worker.movable and worker.phase is not WorkerPhase.DRAINING and not counts:
            self.initial.must_stop[worker.worker] = "its seats no longer suit its unit"
            for seat in seats:
                position = self.index[seat.node]
                self.free[position] = self.free[position].given_back(seat)
            return
        for seat in seats:
            self.occupants[self.index[seat.node]].append(
                self.interner.occupant(unit, (seat,), OccupantStatus.UNCOUNTED)
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
    """Whether a seat has everything that the shape needs, on suitable cards."""
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


class LayoutDiff:
    """Starts, stops and cancelled drains that lead from the initial layout to the chosen one, each with its reason.

    Occupants are compared by seat, so a worker that stops and one that starts on the same seats cancel out.
    """

    def __init__(
        self,
        initial: InitialLayout,
        targets: Sequence[UnitTarget],
        layout: Layout,
        gangs: Sequence[NewGang],
        rate: float,
    ) -> None:
        self.initial = initial
        self.targets = targets
        self.counts = layout.counts
        self.gangs = gangs
        self.rate = rate
        self.names = [node.name for node in initial.snapshot.cluster.nodes]
        self.unmatched = {key: list(workers) for key, workers in initial.workers.items()}
        """(Position, occupant) -> workers that were not found in the chosen layout."""
        self.drains_cancelled: list[int] = []
        self.started: list[tuple[int, Occupant]] = []
        interner = layout.interner
        for position, occupants in sorted(
            (p, state.occupants) for state, there in layout.groups.items() for p in there
        ):
            for occupant in occupants:
                self._match_occupant(
                    position, occupant, interner.occupant(occupant.unit, occupant.seats, _initial_status(occupant))
                )
        self.starting_units = self._units_starting_by_node()

    def _match_occupant(self, position: int, occupant: Occupant, was: Occupant) -> None:
        same = self.unmatched.get((position, was), [])
        if occupant.status is OccupantStatus.MISFIT:
            return  # it stops even if its seat stays free
        if same:
            worker = same.pop(0)
            if occupant.status is OccupantStatus.DRAIN_CANCELLED:
                self.drains_cancelled.append(worker)
        elif was.status is OccupantStatus.RUNNING:
            self.started.append((position, occupant))

    def _units_starting_by_node(self) -> dict[str, list[str]]:
        """Node -> units that get a new worker there."""
        starting: dict[str, list[str]] = {}
        for position, occupant in self.started:
            starting.setdefault(self.names[position], []).append(self.targets[occupant.unit].unit.name)
        for gang in self.gangs:
            for position, _ in gang.seats:
                starting.setdefault(self.names[position], []).append(self.targets[gang.unit].unit.name)
        return starting

    def starts(self) -> Iterator[PlannedStart]:
        for position, occupant in self.started:
            seats = tuple(seat._replace(node=self.names[position]) for seat in occupant.seats)
            yield PlannedStart(self.targets[occupant.unit].unit.name, seats, self._start_reason(occupant.unit))
        for gang in self.gangs:
            seats = tuple(seat._replace(node=self.names[position]) for position, seat in gang.seats)
            yield PlannedStart(self.targets[gang.unit].unit.name, seats, self._start_reason(gang.unit))

    def _start_reason(self, unit: int) -> str:
        target, before, after = self.targets[unit], self.initial.layout.counts[unit], self.counts[unit]
        if after <= before:
            return f"{target.unit.name} keeps {after} workers: one moves here"
        if not target.limits_rate:
            return f"{target.unit.name} goes from {before} to {after} workers without a rate"
        speed = f"{format_number(target.demand.speed)} items/s"
        rate = f"{format_number(self.rate)} items/s"
        return f"{target.unit.name} goes from {before} to {after} workers of {speed} for {rate}"

    def stops(self) -> Iterator[PlannedStop]:
        found = dict(self.initial.must_stop)
        for (position, occupant), workers in self.unmatched.items():
            if occupant.status in (OccupantStatus.RUNNING, OccupantStatus.MISFIT):
                found |= {worker: self._stop_reason(position, occupant) for worker in workers}
        yield from (PlannedStop(worker, found[worker]) for worker in sorted(found))

    def _stop_reason(self, position: int, occupant: Occupant) -> str:
        target = self.targets[occupant.unit]
        name, node = target.unit.name, self.names[position]
        if occupant.status is OccupantStatus.MISFIT:
            return f"its seat on {node} no longer suits {name} ({target.unit.shape.describe()})"
        before, after = self.initial.layout.counts[occupant.unit], self.counts[occupant.unit]
        starting = sorted(set(self.starting_units.get(node, ())))
        if after >= target.max_workers and before > after:
            return f"{name} may have {after} workers and has {before}"
        if not starting:
            return f"{name} goes from {before} to {after} workers"
        if after >= before:
            return f"one of {name} moves away from {node} for {', '.join(starting)}"
        return f"{name} needs only {after} of {before} workers; its seat on {node} goes to {', '.join(starting)}"

    def cancelled_drains(self) -> Iterator[int]:
        yield from sorted(self.drains_cancelled)


def _initial_status(occupant: Occupant) -> OccupantStatus:
    """The status of the occupant when the replan began, if it was there."""
    match occupant.status:
        case OccupantStatus.NEW:
            return OccupantStatus.RUNNING
        case OccupantStatus.DRAIN_CANCELLED:
            return OccupantStatus.DRAINING
        case other:
            return other
