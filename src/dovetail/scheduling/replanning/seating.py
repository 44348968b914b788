"""So many workers of each unit: can they be had from those who sit there, with few changes?

The hardest to seat come first. Each sits where there is room, else where the fewest have to leave: spare workers of
other units, or workers that are easier to seat, which then are seated elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING

from dovetail.scheduling.gangs import dealt, is_whole
from dovetail.scheduling.replanning.eviction import Price, Way, cheapest_way
from dovetail.scheduling.replanning.rooms import LEAVING, OTHERS, Gang, Hold, without_sitter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.resources.free import Free
    from dovetail.scheduling.packing import Filler
    from dovetail.scheduling.replanning.rooms import Floor, House, Room, Sitter
    from dovetail.scheduling.replanning.wants import Want


ROOMS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Manner:
    """One way of seating: which unit first, who may be moved, which nodes first."""

    order: tuple[int, ...]
    moves: bool = True
    nodes_first: str = "tight"
    take_back: bool = True


def order_of(wants: Sequence[Want]) -> tuple[int, ...]:
    """The units, those that are hardest to seat first."""
    return tuple(sorted(range(len(wants)), key=lambda unit: ([-part for part in wants[unit].hardness], unit)))


class Seating:
    """Seats counts on a floor that it changes."""

    def __init__(self, floor: Floor, wants: Sequence[Want], needs: Sequence[int], manner: Manner) -> None:
        self.floor = floor
        self.house: House = floor.house
        self.wants = wants
        self.needs = needs
        self.manner = manner
        self.rank = {unit: number for number, unit in enumerate(manner.order)}

    def all(self) -> bool:
        """Whether every unit has what it needs; stops at the first that has not."""
        seated = all(self.seat(unit, self.needs[unit]) for unit in self.manner.order)
        return seated and all(have >= need for have, need in zip(self.floor.counts, self.needs, strict=True))

    def seat(self, unit: int, need: int) -> bool:
        """Brings a unit up to so many workers, as far as that goes; whether it went all the way."""
        if self.manner.take_back:
            self._take_back(unit, need)
        self.where_there_is_room(unit, need)
        if self.floor.counts[unit] < need:
            self._where_others_leave(unit, need)
        if self.wants[unit].unit.shape.ranks > 1:
            while self.floor.counts[unit] < need and self._gang_on_whole_nodes(unit):
                pass
        return self.floor.counts[unit] >= need

    def _take_back(self, unit: int, need: int) -> None:
        floor, house = self.floor, self.house
        for room in list(floor.rooms):
            draining = [s for s in room.present if s.unit == unit and s.hold is Hold.DRAINING]
            for sitter in draining:
                nodes = min(len(floor.rooms.get(room, ())), need - floor.counts[unit])
                if nodes <= 0:
                    break
                then = house.renamed(room, sitter, house.sitter(unit, sitter.seats, Hold.TAKEN_BACK))
                whole = nodes == len(floor.rooms[room])
                floor.move(room, nodes, then)
                floor.counts[unit] += nodes
                if not whole:
                    break
                room = then

    def where_there_is_room(self, unit: int, need: int) -> None:
        floor, filler = self.floor, self.wants[unit].filler
        missing = need - floor.counts[unit]
        if missing <= 0:
            return
        ranked = filler.ranked(self.manner.nodes_first)
        able = [
            (rank[1], floor.rooms[room][0], rank[0], room) for room in floor.rooms if (rank := ranked[room.free])[0]
        ]
        for _, _, most, room in sorted(able, key=lambda item: item[:2]):
            nodes = len(floor.rooms[room])
            full = min(nodes, missing // most)
            rest = min(missing - full * most, most) if full < nodes else 0
            if full:
                floor.move(room, full, self._with_more(room, unit, most))
            if rest:
                floor.move(room, 1, self._with_more(room, unit, rest))
            floor.counts[unit] += full * most + rest
            missing -= full * most + rest
            if not missing:
                return

    def _with_more(self, room: Room, unit: int, workers: int) -> Room:
        key = ("more", unit, workers)
        found: Room | None = room.answers.get(key)
        if found is None:
            come = new_sitters(self.house, unit, self.wants[unit].filler, room.free, workers)
            found = room.answers[key] = self.house.changed(room, (), come)
        return found

    def _where_others_leave(self, unit: int, need: int) -> None:
        """Worker by worker on the nodes where it costs the fewest changes.

        What a node costs only rises while others give workers, so an entry of the heap that still holds is the best.
        Further nodes are looked at only when no node is left that costs as little as the cheapest so far.
        """
        floor = self.floor
        heap: list[tuple[float, int, int, int, int, Room]] = []
        serial = count()

        def push(room: Room) -> None:
            way = self._way(room, unit)
            if way is not None:
                heappush(heap, (way.cost, way.idle_milli, way.cpu_milli, floor.rooms[room][0], next(serial), room))

        unseen = iter(list(floor.rooms))
        cheapest = math.inf
        while floor.counts[unit] < need:
            while (not heap or heap[0][0] > cheapest) and (some := list(islice(unseen, ROOMS_AT_ONCE))):
                for room in some:
                    push(room)
                cheapest = min(cheapest, heap[0][0]) if heap else cheapest
            if not heap:
                return
            *key, _, _, room = heappop(heap)
            way = self._way(room, unit) if room in floor.rooms else None
            if way is not None and key == [*way[:3]]:
                push(self._apply(room, way, unit, need))
            if room in floor.rooms:
                push(room)

    def _apply(self, room: Room, way: Way, unit: int, need: int) -> Room:
        """One worker on as many alike nodes as the spare workers of others allow."""
        floor = self.floor
        nodes = min(len(floor.rooms[room]), need - floor.counts[unit])
        for other, used in way.uses(self._spare(room)).items():
            nodes = min(nodes, (floor.counts[other] - self.needs[other]) // used)
        nodes = max(1, nodes)
        come = new_sitters(self.house, unit, self.wants[unit].filler, _freed(room, way), 1)
        then = self.house.changed(room, way.leave, come)
        floor.move(room, nodes, then)
        for sitter in way.leave:
            if sitter.hold not in LEAVING:
                floor.counts[sitter.unit] -= nodes
        floor.counts[unit] += nodes
        return then

    def _spare(self, room: Room) -> dict[int, int]:
        floor, wants, needs = self.floor, self.wants, self.needs
        return {
            unit: spare
            for unit, here in room.has.items()
            if wants[unit].gives and (spare := min(here, floor.counts[unit] - needs[unit])) > 0
        }

    def _movable(self, room: Room, unit: int) -> frozenset[int]:
        """The units there that come later, and so can be seated elsewhere afterwards."""
        if not self.manner.moves:
            return frozenset()
        return frozenset(
            other
            for other in room.has
            if self.rank[other] > self.rank[unit]
            and self.wants[other].gives
            and self.wants[other].demand.per_node is None
        )

    def _way(self, room: Room, unit: int) -> Way | None:
        spare = self._spare(room)
        key = ("way", unit, tuple(spare.items()), self.manner.moves, self.manner.order)
        if key not in room.answers:
            filler = self.wants[unit].filler
            room.answers[key] = (
                Way(0.0, room.free.cards.idle_milli, room.free.cpu_milli, ())
                if filler.room(room.free) >= filler.shape.ranks
                else cheapest_way(room, filler, Price(spare, self._movable(room, unit)))
            )
        found: Way | None = room.answers[key]
        return found

    def _gang_on_whole_nodes(self, unit: int) -> bool:
        """One gang over several nodes, which others leave if they must."""
        floor, filler = self.floor, self.wants[unit].filler
        shape = filler.shape
        cleared: list[tuple[float, int, int, Room, Way]] = []
        for room, positions in floor.rooms.items():
            way = self._clearing(room, filler, unit)
            if way is None:
                continue
            room_for = min(filler.room(_freed(room, way)), shape.ranks)
            cleared += [(way.cost, -room_for, position, room, way) for position in positions if room_for]
        cleared.sort(key=lambda item: item[:3])
        for most in range(1, len(cleared) + 1):
            chosen = dealt(shape.ranks, sorted((item[1], item[2]) for item in cleared[:most]))
            if chosen:
                by_position = {item[2]: item for item in cleared[:most]}
                self._seat_gang(unit, [(by_position[position], ranks) for position, ranks in chosen])
                return True
        return False

    def _clearing(self, room: Room, filler: Filler, unit: int) -> Way | None:
        """All who must leave so that the node is whole, but for what others than this run hold; only spare ones may,
        and those easier to seat."""
        others = [sitter for sitter in room.present if sitter.unit == OTHERS]
        if is_whole(_without(room.free, others), filler.shape):
            return Way(0.0, 0, 0, ())
        spare = self._spare(room)
        price = Price(spare, self._movable(room, unit))
        ours = [sitter for sitter in room.present if sitter.unit != OTHERS]
        leave = [sitter for sitter in ours if sitter.gpu_milli or not filler.shape.computes_on_gpu]
        asked: dict[int, int] = {}
        for sitter in leave:
            if price.of(sitter) is None or not price.allows(sitter, asked):
                return None
            asked[sitter.unit] = asked.get(sitter.unit, 0) + 1
        way = Way(price.of_all(leave), 0, 0, tuple(leave))
        return way if is_whole(_without(_freed(room, way), others), filler.shape) else None

    def _seat_gang(self, unit: int, chosen: list[tuple[tuple[float, int, int, Room, Way], int]]) -> None:
        floor, filler = self.floor, self.wants[unit].filler
        seats = []
        for (_, _, position, room, way), ranks in chosen:
            parts = new_sitters(self.house, unit, filler, _freed(room, way), ranks, each=1, part=True)
            seats += [(position, part.seats[0]) for part in parts]
            floor.move_one(room, position, self.house.changed(room, way.leave, parts))
            for sitter in way.leave:
                if sitter.hold not in LEAVING:
                    floor.counts[sitter.unit] -= 1
        floor.gangs.append(Gang(unit, tuple(seats)))
        floor.counts[unit] += 1


def _freed(room: Room, way: Way) -> Free:
    return _without(room.free, way.leave)


def _without(free: Free, sitters: Iterable[Sitter]) -> Free:
    for sitter in sitters:
        free = without_sitter(free, sitter)
    return free


def new_sitters(
    house: House, unit: int, filler: Filler, free: Free, workers: int, *, each: int = 0, part: bool = False
) -> list[Sitter]:
    """So many workers of a unit where there is room for them; as parts of a gang, so many of its ranks."""
    ranks = each or filler.shape.ranks
    ways = [way for way, times in filler.fill(free, workers * ranks).ways for _ in range(times)]
    seats = [filler.fit.seat("", way) for way in ways]
    hold = Hold.FIXED if part else Hold.NEW
    return [house.sitter(-1 if part else unit, seats[i : i + ranks], hold) for i in range(0, len(seats), ranks)]
