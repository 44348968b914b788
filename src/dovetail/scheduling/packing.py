"""Do so many workers of each unit fit together, and on which nodes?

Nodes in the same state are packed as one group, so the work depends on how many different states there are and hardly
on how many nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.fit import ROOM_LIMIT, Fit
from dovetail.resources.free import Free
from dovetail.resources.seat import CardShare, Seat, Seats
from dovetail.resources.shape import Shape, ShapeKind
from dovetail.scheduling.gangs import dealt, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.resources.fit import Way
    from dovetail.resources.ledger import Ledger

Groups = dict[Free, list[int]]
"""State -> positions of the nodes that are in it."""


class Filled(NamedTuple):
    """A node's state once some workers of one shape sit there, and what each took of its cards."""

    free: Free
    ways: tuple[tuple[Way, int], ...]
    """(way, how many workers sit just so), in order."""


class Filler:
    """Fills nodes with workers of one shape, each sitting on the tightest cards that have room."""

    __slots__ = ("_filled", "_ranked", "_room", "fit", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.fit = Fit(shape.rank)
        self._room: dict[Free, int] = {}
        self._filled: dict[tuple[Free, int], Filled] = {}
        self._ranked: dict[str, _Ranked] = {}

    def ranked(self, nodes_first: str) -> _Ranked:
        """State -> (room for workers, how early such nodes are filled), each worked out once."""
        found = self._ranked.get(nodes_first)
        if found is None:
            found = self._ranked[nodes_first] = _Ranked(self, nodes_first)
        return found

    def room(self, free: Free) -> int:
        """How many processes fit on a node in this state."""
        found = self._room.get(free)
        if found is None:
            found = self._room[free] = self.fit.room(free)
        return found

    def fill(self, free: Free, count: int) -> Filled:
        """The state once `count` processes, for which there is room, sit there."""
        key = (free, count)
        found = self._filled.get(key)
        if found is None:
            found = self._filled[key] = self._fill(free, count)
        return found

    def _fill(self, free: Free, count: int) -> Filled:
        shape = self.shape
        ways: list[tuple[Way, int]] = []
        cards = free.cards
        if shape.kind is ShapeKind.CPU_ONLY:
            ways.append(((), count))
        elif shape.kind in (ShapeKind.CODEC, ShapeKind.FRACTIONAL_GPU):
            ways = self._shares(free, count)
        else:
            for _ in range(count):
                way = self.fit.ways_on_cards(cards)[0]
                ways.append((way, 1))
                then = cards.after(way)
                assert then is not None, (shape, cards.free, way)
                cards = then
        for way, times in ways if shape.kind in (ShapeKind.CODEC, ShapeKind.FRACTIONAL_GPU) else ():
            then = cards.after(tuple(_multiplied(share, times) for share in way))
            assert then is not None, (shape, cards.free, way, times)
            cards = then
        custom = free.custom
        if shape.custom:
            left = free.custom_left(tuple((name, amount * count) for name, amount in shape.custom))
            assert left is not None, (shape, free, count)
            custom = left
        host = (free.cpu_milli - count * shape.cpu_milli, free.memory_bytes - count * shape.memory_bytes)
        return Filled(Free(*host, cards, custom), tuple(ways))

    def _shares(self, free: Free, count: int) -> list[tuple[Way, int]]:
        """Card by card, those with the least left first."""
        cards = free.cards
        shares = [share for share in self.fit.shares(cards.kind) or () if share is not None]
        shares.sort(key=lambda share: (cards.free[share.card].milli, cards.free[share.card].memory_bytes, share.card))
        ways: list[tuple[Way, int]] = []
        for share in shares:
            have = cards.free[share.card]
            times = min(have[i] // share[i + 1] for i in range(4) if share[i + 1])
            if times and count:
                ways.append(((share,), min(times, count)))
                count -= min(times, count)
        return ways


class _Ranked(dict[Free, tuple[int, tuple[int, ...]]]):
    def __init__(self, filler: Filler, nodes_first: str) -> None:
        super().__init__()
        self.filler = filler
        self.rank = _RANKS[nodes_first]

    def __missing__(self, free: Free) -> tuple[int, tuple[int, ...]]:
        room = self.filler.room(free) // self.filler.shape.ranks
        found = self[free] = (room, self.rank(free, self.filler) if room else ())
        return found


def _multiplied(share: CardShare, times: int) -> CardShare:
    return CardShare(share.card, *(amount * times for amount in share[1:]))


class Move(NamedTuple):
    """On each of these nodes, which are all in one state, so many processes of a unit."""

    unit: int
    free: Free
    positions: list[int]
    processes: int
    gang: int = -1
    """Moves with the same number, if not negative, are one gang over several nodes."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Workers on nodes: what was moved where, and what is left."""

    moves: list[Move]
    groups: Groups


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way of packing: which unit first, which nodes first, and in how many rounds."""

    order: tuple[int, ...]
    nodes_first: str = "first"
    rounds: int = 1


def groups_of(ledger: Ledger) -> Groups:
    groups: Groups = {}
    for position, free in enumerate(ledger.free):
        groups.setdefault(free, []).append(position)
    return groups


def pack(start: Packing, fillers: Sequence[Filler], counts: Sequence[int], strategy: Strategy) -> Packing | None:
    """All of these workers beside those who sit there, or None; `start` stays as it is."""
    packing = Packing(list(start.moves), dict(start.groups))
    for number in range(strategy.rounds):
        for unit in strategy.order:
            part = counts[unit] * (number + 1) // strategy.rounds - counts[unit] * number // strategy.rounds
            if part and not _add(packing, unit, fillers[unit], part, strategy.nodes_first):
                return None
    return packing


def add_some(packing: Packing, unit: int, filler: Filler, count: int, nodes_first: str = "tight") -> int:
    """As many more workers of a unit as fit, `count` at most; how many were added."""
    ranks = filler.shape.ranks
    room = sum(filler.room(free) // ranks * len(positions) for free, positions in packing.groups.items())
    count = min(count, room)
    fitted = _add(packing, unit, filler, count, nodes_first) if count else True
    assert fitted, f"there was room for {count} more of {filler.shape}"
    return count


def _add(packing: Packing, unit: int, filler: Filler, count: int, nodes_first: str) -> bool:
    """Adds workers to a packing that it changes; False, and a packing of no use, if they do not all fit."""
    ranks = filler.shape.ranks
    groups = packing.groups
    ranked = filler.ranked(nodes_first)
    able = sorted([(rank[1], groups[free][0], rank[0], free) for free in groups if (rank := ranked[free])[0]])
    for _, _, room, free in able:
        positions = groups.pop(free)
        full = min(len(positions), count // room)
        rest = min(count - full * room, room) if full < len(positions) else 0
        if full:
            add_to(packing, Move(unit, free, positions[:full], room * ranks), filler)
        if rest:
            add_to(packing, Move(unit, free, positions[full : full + 1], rest * ranks), filler)
        untouched = positions[full + (1 if rest else 0) :]
        if untouched:
            groups[free] = untouched
        count -= full * room + rest
        if not count:
            return True
    return all(_add_gang(packing, unit, filler) for _ in range(count)) if ranks > 1 else False


def add_to(packing: Packing, move: Move, filler: Filler) -> None:
    """Makes a move whose nodes were taken out of their group, and puts them where they belong now."""
    packing.moves.append(move)
    then = filler.fill(move.free, move.processes).free
    joined = packing.groups.get(then)
    packing.groups[then] = move.positions if joined is None else [*joined, *move.positions]


def _add_gang(packing: Packing, unit: int, filler: Filler) -> bool:
    """One gang on the fewest whole nodes."""
    groups, ranks = packing.groups, filler.shape.ranks
    whole = [
        (-min(filler.room(free), ranks), position)
        for free, positions in groups.items()
        if is_whole(free, filler.shape) and filler.room(free)
        for position in positions
    ]
    state_of = {position: free for free, positions in groups.items() for position in positions}
    chosen = dealt(ranks, sorted(whole))
    gang = len(packing.moves)
    for position, processes in chosen:
        free = state_of[position]
        left = [other for other in groups.pop(free) if other != position]
        if left:
            groups[free] = left
        add_to(packing, Move(unit, free, [position], processes, gang), filler)
    return bool(chosen)


def _in_order(_free: Free, _filler: Filler) -> tuple[int, ...]:
    return ()


def _tightest(free: Free, _filler: Filler) -> tuple[int, ...]:
    """For those without cards: where no GPU waits for CPUs; for the others: where the fewest cards are left."""
    return (free.cards.idle_milli, free.cpu_milli)


def _least_waste(free: Free, filler: Filler) -> tuple[int, ...]:
    """Where what is left once the node is full of this unit is the least."""
    then = filler.fill(free, filler.room(free)).free if filler.room(free) < ROOM_LIMIT else free
    return (then.cards.idle_milli, then.cpu_milli)


def _roomiest(free: Free, _filler: Filler) -> tuple[int, ...]:
    return (-free.cards.idle_milli, -free.cpu_milli)


_RANKS: dict[str, Callable[[Free, Filler], tuple[int, ...]]] = {
    "first": _in_order,
    "tight": _tightest,
    "least waste": _least_waste,
    "roomy": _roomiest,
}
NODES_FIRST = tuple(_RANKS)


def seats_of(packing: Packing, ledger: Ledger, fillers: Sequence[Filler]) -> list[list[Seats]]:
    """For each unit its workers, each with one seat per rank, in a fixed order."""
    workers: list[list[Seats]] = [[] for _ in fillers]
    gangs: dict[int, list[Seat]] = {}
    nodes = ledger.cluster.nodes
    for move in packing.moves:
        filler = fillers[move.unit]
        ranks = filler.shape.ranks
        ways = [way for way, times in filler.fill(move.free, move.processes).ways for _ in range(times)]
        for position in move.positions:
            name = nodes[position].name
            seats = [filler.fit.seat(name, way) for way in ways]
            if move.gang >= 0:
                if move.gang not in gangs:
                    gangs[move.gang] = []
                gangs[move.gang] += seats
                if len(gangs[move.gang]) == ranks:
                    workers[move.unit].append(tuple(gangs.pop(move.gang)))
            elif ranks == 1:
                workers[move.unit] += [(seat,) for seat in seats]
            else:
                workers[move.unit] += [tuple(seats[i : i + ranks]) for i in range(0, len(seats), ranks)]
    assert not gangs, "a gang is incomplete"
    return workers
