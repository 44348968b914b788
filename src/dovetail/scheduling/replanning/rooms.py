"""Who sits on which node, and which nodes are alike?

A room is a node without its name: what is free, who sits there, and who was told to leave. Nodes that are alike are in
the same room and are replanned as one, so that the work depends on how many different rooms there are.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.resources.free import Free
    from dovetail.resources.seat import Seat, Seats


class Hold(Enum):
    """What keeps a worker where it is."""

    OLD = "sits there, and may be asked to leave"
    FIXED = "sits there, and must not be touched"
    DRAINING = "leaves anyway"
    OUTGROWN = "its seat no longer suits its unit"
    TAKEN_BACK = "was draining, and stays"
    NEW = "is to be started"

    __hash__ = object.__hash__  # looked up for every sitter; members are single objects


OTHERS = -2
"""The unit of those who are not of this run: what they hold is no part of the nodes that are ours."""
LEAVING = frozenset((Hold.DRAINING, Hold.OUTGROWN))
"""Those who do not count as workers of their unit."""


class Sitter:
    """All workers of one unit that sit in the same way in nodes; made once by `House.sitter`."""

    __slots__ = ("cards", "cpu_milli", "gpu_milli", "hold", "number", "seats", "unit")

    def __init__(self, number: int, unit: int, seats: Seats, hold: Hold) -> None:
        self.number = number
        self.unit = unit
        self.seats = seats
        self.hold = hold
        self.cpu_milli = sum(seat.cpu_milli for seat in seats)
        self.gpu_milli = sum(share.milli for seat in seats for share in seat.cards)
        self.cards = tuple(sorted({share.card for seat in seats for share in seat.cards}))


class Room:
    """A node without its name; made once by `House.room`, so that alike nodes are in the same one."""

    __slots__ = ("answers", "free", "gone", "has", "present")

    def __init__(self, free: Free, present: tuple[Sitter, ...], gone: tuple[Sitter, ...]) -> None:
        self.free = free
        self.present = present
        self.gone = gone
        self.has: dict[int, int] = {}
        """Unit -> workers that may be asked to leave."""
        for sitter in present:
            if sitter.hold is Hold.OLD:
                self.has[sitter.unit] = self.has.get(sitter.unit, 0) + 1
        self.answers: dict[object, Any] = {}
        """What others worked out about it."""


class House:
    """Makes sitters and rooms, each once."""

    def __init__(self) -> None:
        self._sitters: dict[tuple[object, ...], Sitter] = {}
        self._rooms: dict[tuple[Free, tuple[int, ...], tuple[int, ...]], Room] = {}

    def sitter(self, unit: int, seats: Sequence[Seat], hold: Hold) -> Sitter:
        key = (unit, hold, *[seat[1:] for seat in seats])
        found = self._sitters.get(key)
        if found is None:
            local = tuple(seat._replace(node="") for seat in seats)
            found = self._sitters[key] = Sitter(len(self._sitters), unit, local, hold)
        return found

    def room(self, free: Free, present: Iterable[Sitter], gone: Iterable[Sitter]) -> Room:
        here = tuple(sorted(present, key=_number))
        left = tuple(sorted(gone, key=_number))
        key = (free, tuple(map(_number, here)), tuple(map(_number, left)))
        found = self._rooms.get(key)
        if found is None:
            found = self._rooms[key] = Room(free, here, left)
        return found

    def changed(self, room: Room, leave: Iterable[Sitter] = (), come: Iterable[Sitter] = ()) -> Room:
        """The room once some have left and then others have come. A new one that leaves was never there."""
        present, gone, free = list(room.present), list(room.gone), room.free
        for sitter in leave:
            present.remove(sitter)
            free = without_sitter(free, sitter)
            if sitter.hold is not Hold.NEW:
                gone.append(sitter)
        for sitter in come:
            present.append(sitter)
            if sitter in gone:
                gone.remove(sitter)
            then = with_sitter(free, sitter)
            assert then is not None, (sitter.seats, free)
            free = then
        return self.room(free, present, gone)

    def renamed(self, room: Room, sitter: Sitter, other: Sitter) -> Room:
        """The room with one sitter, in the same seat, held by something else."""
        present = list(room.present)
        present[present.index(sitter)] = other
        return self.room(room.free, present, room.gone)


def _number(sitter: Sitter) -> int:
    return sitter.number


def with_sitter(free: Free, sitter: Sitter) -> Free | None:
    """What is free once it sits there; None if there is no such room."""
    then: Free | None = free
    for seat in sitter.seats:
        then = then.taken(seat) if then is not None else None
    return then


def without_sitter(free: Free, sitter: Sitter) -> Free:
    """What is free once it has left."""
    for seat in sitter.seats:
        free = free.given_back(seat)
    return free


def workers_in(room: Room, unit: int) -> int:
    """How many workers of a unit sit there, or are to, and will stay."""
    return sum(sitter.unit == unit and sitter.hold not in LEAVING for sitter in room.present)


class Gang(NamedTuple):
    """A new worker on several nodes."""

    unit: int
    seats: tuple[tuple[int, Seat], ...]
    """(Position of the node, seat there) of each rank."""


class Floor:
    """All nodes by the room they are in now, and how many workers each unit has."""

    __slots__ = ("counts", "gangs", "house", "rooms")

    def __init__(self, house: House, rooms: dict[Room, list[int]], counts: list[int], gangs: list[Gang]) -> None:
        self.house = house
        self.rooms = rooms
        self.counts = counts
        self.gangs = gangs

    def copy(self) -> Floor:
        return Floor(self.house, dict(self.rooms), list(self.counts), list(self.gangs))

    def one(self, room: Room, units: int) -> Floor:
        """A floor of one such node alone."""
        return Floor(self.house, {room: [0]}, [workers_in(room, unit) for unit in range(units)], [])

    def settled(self) -> Floor:
        """The same floor as if all who are told to leave had left, and all who are to be started were there."""
        floor = Floor(self.house, {}, list(self.counts), [])
        for room, positions in self.rooms.items():
            present = [
                self.house.sitter(sitter.unit, sitter.seats, Hold.OLD) if sitter.hold is Hold.NEW else sitter
                for sitter in room.present
            ]
            floor._join(self.house.room(room.free, present, ()), positions)
        return floor

    def move(self, room: Room, nodes: int, then: Room) -> None:
        """The first `nodes` of the nodes in a room are in another from now on. Lists are never changed in place,
        because copies of the floor share them."""
        positions = self.rooms.pop(room)
        if nodes < len(positions):
            self.rooms[room] = positions[nodes:]
        self._join(then, positions[:nodes])

    def move_one(self, room: Room, position: int, then: Room) -> None:
        """One particular node is in another room from now on."""
        left = [other for other in self.rooms.pop(room) if other != position]
        if left:
            self.rooms[room] = left
        self._join(then, [position])

    def _join(self, room: Room, positions: list[int]) -> None:
        joined = self.rooms.get(room)
        self.rooms[room] = positions if joined is None else sorted([*joined, *positions])

    def count(self, hold: Hold, *, gone: bool = False) -> int:
        """Workers that are so, or were and are told to leave."""
        return sum(
            len(positions) * sum(sitter.hold is hold for sitter in (room.gone if gone else room.present))
            for room, positions in self.rooms.items()
        )

    @property
    def changes(self) -> int:
        """Starts and stops so far. A worker that drains needs no stop."""
        return len(self.gangs) + sum(
            len(positions)
            * (
                sum(sitter.hold is Hold.NEW for sitter in room.present)
                + sum(sitter.hold is not Hold.DRAINING for sitter in room.gone)
            )
            for room, positions in self.rooms.items()
        )
