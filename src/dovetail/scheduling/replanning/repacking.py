"""What if some nodes were cleared and packed anew, keeping there whoever would sit there anyway?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dovetail.scheduling.packing import Packing, Strategy, pack
from dovetail.scheduling.replanning.rooms import LEAVING, Hold, without_sitter, workers_in
from dovetail.scheduling.replanning.seating import Seating

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.resources.free import Free
    from dovetail.resources.seat import Seats
    from dovetail.scheduling.packing import Groups
    from dovetail.scheduling.replanning.rooms import Floor, Room, Sitter
    from dovetail.scheduling.replanning.seating import Manner
    from dovetail.scheduling.replanning.wants import Want

PAIRS_LIMIT = 20_000
"""Rooms times patterns that are compared to find who may stay."""
NODES_FIRST = ("tight", "first", "least waste", "roomy")
Pattern = tuple[tuple[int, "Seats"], ...]
"""(Unit, seats) of each worker on one node."""


def leavers(room: Room, wants: Sequence[Want]) -> list[Sitter]:
    """All who may be asked to leave a node."""
    return [
        sitter
        for sitter in room.present
        if sitter.hold in LEAVING
        or (sitter.hold is Hold.OLD and wants[sitter.unit].gives and wants[sitter.unit].demand.per_node is None)
    ]


def cleared(room: Room, wants: Sequence[Want]) -> Free:
    """What is free on a node once all who may be asked to leave have left."""
    free = room.free
    for sitter in leavers(room, wants):
        free = without_sitter(free, sitter)
    return free


class Repacking:
    """Some nodes of a floor, cleared."""

    def __init__(self, start: Floor, wants: Sequence[Want], positions: Sequence[int], manner: Manner) -> None:
        self.start = start
        self.wants = wants
        self.manner = manner
        self.cleared = set(positions)
        self.room_of = {position: room for room, there in start.rooms.items() for position in there}
        self.free = {room: cleared(room, wants) for room in start.rooms}
        self.groups: Groups = {}
        self.staying = list(start.counts)
        for position in sorted(self.room_of):
            room = self.room_of[position]
            free = self.free[room] if position in self.cleared else room.free
            self.groups.setdefault(free, []).append(position)
            if position in self.cleared:
                for sitter in leavers(room, wants):
                    if sitter.hold is Hold.OLD:
                        self.staying[sitter.unit] -= 1

    def pack(self, needs: Sequence[int]) -> Packing | None:
        """A packing of what is missing beside those who were not cleared."""
        missing = [max(0, need - have) for need, have in zip(needs, self.staying, strict=True)]
        fillers = [want.filler for want in self.wants]
        for nodes_first in NODES_FIRST:
            packing = pack(Packing([], self.groups), fillers, missing, Strategy(self.manner.order, nodes_first))
            if packing is not None:
                return packing
        return None

    def floor(self, packing: Packing, needs: Sequence[int]) -> Floor | None:
        """The packing on the floor, each pattern on a node that comes nearest to it already."""
        if any(move.gang >= 0 for move in packing.moves):
            return None
        floor = self.start.copy()
        patterns = self._patterns(packing)
        for position in sorted(set(patterns) - self.cleared):
            self._settle(floor, [position], patterns[position])
        alike: dict[Free, list[int]] = {}
        for position in sorted(self.cleared):
            alike.setdefault(self.free[self.room_of[position]], []).append(position)
        for positions in alike.values():
            for chosen, pattern in self._assigned(positions, [patterns.get(p, ()) for p in positions]):
                self._settle(floor, chosen, pattern)
        return floor if Seating(floor, self.wants, needs, self.manner).all() else None

    def _patterns(self, packing: Packing) -> dict[int, Pattern]:
        patterns: dict[int, list[tuple[int, Seats]]] = {}
        for move in packing.moves:
            filler = self.wants[move.unit].filler
            ranks = filler.shape.ranks
            ways = [way for way, times in filler.fill(move.free, move.processes).ways for _ in range(times)]
            seats = [filler.fit.seat("", way) for way in ways]
            workers = [(move.unit, tuple(seats[i : i + ranks])) for i in range(0, len(seats), ranks)]
            for position in move.positions:
                patterns.setdefault(position, []).extend(workers)
        return {position: tuple(sorted(workers)) for position, workers in patterns.items()}

    def _assigned(self, positions: list[int], patterns: list[Pattern]) -> Iterator[tuple[list[int], Pattern]]:
        """Nodes and the pattern each gets: those that agree the most first."""
        rooms: dict[Room, list[int]] = {}
        for position in positions:
            rooms.setdefault(self.room_of[position], []).append(position)
        left = Counter(patterns)
        if len(rooms) * len(left) > PAIRS_LIMIT:
            yield from (([position], pattern) for position, pattern in zip(positions, patterns, strict=True))
            return
        pairs = sorted(
            (
                (-_agreement(room, pattern), there[0], pattern, room)
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

    def _settle(self, floor: Floor, positions: list[int], pattern: Pattern) -> None:
        """Turns alike nodes into this pattern with few changes; on nodes that were not cleared, adds it."""
        room = self.room_of[positions[0]]
        leave = leavers(room, self.wants) if positions[0] in self.cleared else []
        needs = [workers_in(room, unit) for unit in range(len(self.wants))]
        for sitter in leave:
            if sitter.hold is Hold.OLD:
                needs[sitter.unit] -= 1
        for unit, _ in pattern:
            needs[unit] += 1
        then = self._turned(room, needs, leave, pattern)
        for position in positions:
            floor.move_one(room, position, then)
        for unit in range(len(self.wants)):
            floor.counts[unit] += len(positions) * (workers_in(then, unit) - workers_in(room, unit))

    def _turned(self, room: Room, needs: list[int], leave: list[Sitter], pattern: Pattern) -> Room:
        """The room with as many of each unit, wherever they sit in it; if that cannot be, just as it was packed."""
        house = self.start.house
        alone = self.start.one(room, len(self.wants))
        if Seating(alone, self.wants, needs, self.manner).all() and not alone.gangs:
            return next(iter(alone.rooms))
        left = Counter(leave)
        come = []
        for unit, seats in pattern:
            old = house.sitter(unit, seats, Hold.OLD)
            come.append(old if left[old] else house.sitter(unit, seats, Hold.NEW))
            left[old] -= 1
        return house.changed(room, leave, come)


def _agreement(room: Room, pattern: Pattern) -> int:
    units = Counter(unit for unit, _ in pattern)
    return sum(min(room.has.get(unit, 0), count) for unit, count in units.items())
