"""Repacking of cleared nodes that keeps workers in place where the new packing matches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dovetail.scheduling.packing import Packing, PackingOrder, pack
from dovetail.scheduling.replan.layout import LEAVING_STATUSES, OccupantStatus, count_workers, free_without_occupant
from dovetail.scheduling.replan.seat_assignment import SeatAssignment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.seat import Seats
    from dovetail.scheduling.packing import NodeGroups
    from dovetail.scheduling.replan.layout import Layout, NodeState, Occupant
    from dovetail.scheduling.replan.seat_assignment import AssignmentOptions
    from dovetail.scheduling.replan.targets import UnitTarget

MAX_PAIRS_COMPARED = 20_000
"""Rooms times patterns that are compared to find who may stay."""
REPACK_NODE_ORDERS = ("tight", "first", "least waste", "roomy")
NodePattern = tuple[tuple[int, "Seats"], ...]
"""(Unit, seats) of each worker on one node."""


def evictable_occupants(room: NodeState, wants: Sequence[UnitTarget]) -> list[Occupant]:
    """All who may be asked to leave a node."""
    return [
        sitter
        for sitter in room.occupants
        if sitter.status in LEAVING_STATUSES
        or (
            sitter.status is OccupantStatus.RUNNING
            and wants[sitter.unit].can_release
            and wants[sitter.unit].demand.per_node is None
        )
    ]


def free_when_cleared(room: NodeState, wants: Sequence[UnitTarget]) -> FreeResources:
    """What is free on a node once all who may be asked to leave have left."""
    free = room.free
    for sitter in evictable_occupants(room, wants):
        free = free_without_occupant(free, sitter)
    return free


class Repack:
    """Some nodes of a floor, cleared."""

    def __init__(
        self, start: Layout, wants: Sequence[UnitTarget], positions: Sequence[int], manner: AssignmentOptions
    ) -> None:
        self.start = start
        self.targets = wants
        self.options = manner
        self.cleared_positions = set(positions)
        self.state_of = {position: room for room, there in start.groups.items() for position in there}
        self.free = {room: free_when_cleared(room, wants) for room in start.groups}
        self.groups: NodeGroups = {}
        self.staying = list(start.counts)
        for position in sorted(self.state_of):
            room = self.state_of[position]
            free = self.free[room] if position in self.cleared_positions else room.free
            self.groups.setdefault(free, []).append(position)
            if position in self.cleared_positions:
                for sitter in evictable_occupants(room, wants):
                    if sitter.status is OccupantStatus.RUNNING:
                        self.staying[sitter.unit] -= 1

    def pack(self, needs: Sequence[int]) -> Packing | None:
        """A packing of what is missing beside those who were not cleared."""
        missing = [max(0, need - have) for need, have in zip(needs, self.staying, strict=True)]
        fillers = [want.filler for want in self.targets]
        for nodes_first in REPACK_NODE_ORDERS:
            packing = pack(Packing([], self.groups), fillers, missing, PackingOrder(self.options.order, nodes_first))
            if packing is not None:
                return packing
        return None

    def layout(self, packing: Packing, needs: Sequence[int]) -> Layout | None:
        """The packing on the floor, each pattern on a node that comes nearest to it already."""
        if any(move.gang >= 0 for move in packing.fills):
            return None
        floor = self.start.copy()
        patterns = self._patterns(packing)
        for position in sorted(set(patterns) - self.cleared_positions):
            self._apply_pattern(floor, [position], patterns[position])
        alike: dict[FreeResources, list[int]] = {}
        for position in sorted(self.cleared_positions):
            alike.setdefault(self.free[self.state_of[position]], []).append(position)
        for positions in alike.values():
            for chosen, pattern in self._match_patterns(positions, [patterns.get(p, ()) for p in positions]):
                self._apply_pattern(floor, chosen, pattern)
        return floor if SeatAssignment(floor, self.targets, needs, self.options).assign_all() else None

    def _patterns(self, packing: Packing) -> dict[int, NodePattern]:
        patterns: dict[int, list[tuple[int, Seats]]] = {}
        for move in packing.fills:
            filler = self.targets[move.unit].filler
            ranks = filler.shape.ranks
            ways = [way for way, times in filler.fill(move.free, move.processes).assignments for _ in range(times)]
            seats = [filler.fit.seat("", way) for way in ways]
            workers = [(move.unit, tuple(seats[i : i + ranks])) for i in range(0, len(seats), ranks)]
            for position in move.positions:
                patterns.setdefault(position, []).extend(workers)
        return {position: tuple(sorted(workers)) for position, workers in patterns.items()}

    def _match_patterns(
        self, positions: list[int], patterns: list[NodePattern]
    ) -> Iterator[tuple[list[int], NodePattern]]:
        """Nodes and the pattern each gets: those that agree the most first."""
        rooms: dict[NodeState, list[int]] = {}
        for position in positions:
            rooms.setdefault(self.state_of[position], []).append(position)
        left = Counter(patterns)
        if len(rooms) * len(left) > MAX_PAIRS_COMPARED:
            yield from (([position], pattern) for position, pattern in zip(positions, patterns, strict=True))
            return
        pairs = sorted(
            (
                (-_count_in_common(room, pattern), there[0], pattern, room)
                for room, there in rooms.items()
                for pattern in left
            ),
            key=lambda pair: pair[:3],
        )
        for _, _, pattern, room in pairs:
            nodes = min(left[pattern], len(rooms[room]))
            if nodes:
                yield rooms[room][:nodes], pattern
                rooms[room] = rooms[room][nodes:]
                left[pattern] -= nodes

    def _apply_pattern(self, floor: Layout, positions: list[int], pattern: NodePattern) -> None:
        """Turns alike nodes into this pattern with few changes; on nodes that were not cleared, adds it."""
        room = self.state_of[positions[0]]
        leave = evictable_occupants(room, self.targets) if positions[0] in self.cleared_positions else []
        needs = [count_workers(room, unit) for unit in range(len(self.targets))]
        for sitter in leave:
            if sitter.status is OccupantStatus.RUNNING:
                needs[sitter.unit] -= 1
        for unit, _ in pattern:
            needs[unit] += 1
        then = self._state_with_pattern(room, needs, leave, pattern)
        for position in positions:
            floor.move_node(room, position, then)
        for unit in range(len(self.targets)):
            floor.counts[unit] += len(positions) * (count_workers(then, unit) - count_workers(room, unit))

    def _state_with_pattern(
        self, room: NodeState, needs: list[int], leave: list[Occupant], pattern: NodePattern
    ) -> NodeState:
        """The room with as many of each unit, wherever they sit in it; if that cannot be, just as it was packed."""
        house = self.start.interner
        alone = self.start.single_node(room, len(self.targets))
        if SeatAssignment(alone, self.targets, needs, self.options).assign_all() and not alone.gangs:
            return next(iter(alone.groups))
        left = Counter(leave)
        come = []
        for unit, seats in pattern:
            old = house.occupant(unit, seats, OccupantStatus.RUNNING)
            come.append(old if left[old] else house.occupant(unit, seats, OccupantStatus.NEW))
            left[old] -= 1
        return house.with_changes(room, leave, come)


def _count_in_common(room: NodeState, pattern: NodePattern) -> int:
    units = Counter(unit for unit, _ in pattern)
    return sum(min(room.evictable_counts.get(unit, 0), count) for unit, count in units.items())
