"""Bin packing of workers onto groups of nodes in the same state.

Nodes in the same state are packed as one group, so the work depends on how many different states there are and hardly
on how many nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.fit import CAPACITY_LIMIT, Fit
from dovetail.resources.free_resources import FreeResources
from dovetail.resources.seat import CardShare, Seat, Seats
from dovetail.resources.shape import Shape, ShapeKind
from dovetail.scheduling.placement import deal_ranks, is_whole_node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.resources.fit import CardAssignment
    from dovetail.resources.ledger import Ledger

NodeGroups = dict[FreeResources, list[int]]
"""State -> positions of the nodes that are in it."""


class FilledNode(NamedTuple):
    """A node's state once some workers of one shape sit there, and what each took of its cards."""

    free: FreeResources
    assignments: tuple[tuple[CardAssignment, int], ...]
    """(way, how many workers sit just so), in order."""


class NodeFiller:
    """Fills nodes with workers of one shape, each sitting on the tightest cards that have room."""

    __slots__ = ("_capacity", "_filled", "_rankings", "fit", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.fit = Fit(shape.rank)
        self._capacity: dict[FreeResources, int] = {}
        self._filled: dict[tuple[FreeResources, int], FilledNode] = {}
        self._rankings: dict[str, _NodeRanking] = {}

    def node_ranking(self, nodes_first: str) -> _NodeRanking:
        """State -> (room for workers, how early such nodes are filled), each worked out once."""
        found = self._rankings.get(nodes_first)
        if found is None:
            found = self._rankings[nodes_first] = _NodeRanking(self, nodes_first)
        return found

    def capacity(self, free: FreeResources) -> int:
        """How many processes fit on a node in this state."""
        found = self._capacity.get(free)
        if found is None:
            found = self._capacity[free] = self.fit.capacity(free)
        return found

    def fill(self, free: FreeResources, count: int) -> FilledNode:
        """The state once `count` processes, for which there is room, sit there."""
        key = (free, count)
        found = self._filled.get(key)
        if found is None:
            found = self._filled[key] = self._fill(free, count)
        return found

    def _fill(self, free: FreeResources, count: int) -> FilledNode:
        shape = self.shape
        ways: list[tuple[CardAssignment, int]] = []
        cards = free.cards
        if shape.kind is ShapeKind.CPU_ONLY:
            ways.append(((), count))
        elif shape.kind in (ShapeKind.CODEC, ShapeKind.FRACTIONAL_GPU):
            ways = self._shares(free, count)
        else:
            for _ in range(count):
                way = self.fit.card_assignments(cards)[0]
                ways.append((way, 1))
                then = cards.after(way)
                assert then is not None, (shape, cards.free, way)
                cards = then
        for way, times in ways if shape.kind in (ShapeKind.CODEC, ShapeKind.FRACTIONAL_GPU) else ():
            then = cards.after(tuple(_scaled(share, times) for share in way))
            assert then is not None, (shape, cards.free, way, times)
            cards = then
        custom = free.custom
        if shape.custom:
            left = free.custom_after(tuple((name, amount * count) for name, amount in shape.custom))
            assert left is not None, (shape, free, count)
            custom = left
        host = (free.cpu_milli - count * shape.cpu_milli, free.memory_bytes - count * shape.memory_bytes)
        return FilledNode(FreeResources(*host, cards, custom), tuple(ways))

    def _shares(self, free: FreeResources, count: int) -> list[tuple[CardAssignment, int]]:
        """Card by card, those with the least left first."""
        cards = free.cards
        shares = [share for share in self.fit.shares(cards.kind) or () if share is not None]
        shares.sort(key=lambda share: (cards.free[share.card].milli, cards.free[share.card].memory_bytes, share.card))
        ways: list[tuple[CardAssignment, int]] = []
        for share in shares:
            have = cards.free[share.card]
            times = min(have[i] // share[i + 1] for i in range(4) if share[i + 1])
            if times and count:
                ways.append(((share,), min(times, count)))
                count -= min(times, count)
        return ways


class _NodeRanking(dict[FreeResources, tuple[int, tuple[int, ...]]]):
    def __init__(self, filler: NodeFiller, nodes_first: str) -> None:
        super().__init__()
        self.filler = filler
        self.rank = _NODE_ORDER_KEYS[nodes_first]

    def __missing__(self, free: FreeResources) -> tuple[int, tuple[int, ...]]:
        room = self.filler.capacity(free) // self.filler.shape.ranks
        found = self[free] = (room, self.rank(free, self.filler) if room else ())
        return found


def _scaled(share: CardShare, times: int) -> CardShare:
    return CardShare(share.card, *(amount * times for amount in share[1:]))


class GroupFill(NamedTuple):
    """On each of these nodes, which are all in one state, so many processes of a unit."""

    unit: int
    free: FreeResources
    positions: list[int]
    processes: int
    gang: int = -1
    """Moves with the same number, if not negative, are one gang over several nodes."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Workers on nodes: what was moved where, and what is left."""

    fills: list[GroupFill]
    groups: NodeGroups


@dataclass(frozen=True, slots=True)
class PackingOrder:
    """One way of packing: which unit first, which nodes first, and in how many rounds."""

    order: tuple[int, ...]
    node_order: str = "first"
    rounds: int = 1


def group_nodes(ledger: Ledger) -> NodeGroups:
    groups: NodeGroups = {}
    for position, free in enumerate(ledger.free):
        groups.setdefault(free, []).append(position)
    return groups


def pack(
    start: Packing, fillers: Sequence[NodeFiller], counts: Sequence[int], strategy: PackingOrder
) -> Packing | None:
    """All of these workers beside those who sit there, or None; `start` stays as it is."""
    packing = Packing(list(start.fills), dict(start.groups))
    for number in range(strategy.rounds):
        for unit in strategy.order:
            part = counts[unit] * (number + 1) // strategy.rounds - counts[unit] * number // strategy.rounds
            if part and not _add_workers(packing, unit, fillers[unit], part, strategy.node_order):
                return None
    return packing


def add_up_to(packing: Packing, unit: int, filler: NodeFiller, count: int, nodes_first: str = "tight") -> int:
    """As many more workers of a unit as fit, `count` at most; how many were added."""
    ranks = filler.shape.ranks
    room = sum(filler.capacity(free) // ranks * len(positions) for free, positions in packing.groups.items())
    count = min(count, room)
    fitted = _add_workers(packing, unit, filler, count, nodes_first) if count else True
    assert fitted, f"there was room for {count} more of {filler.shape}"
    return count


def _add_workers(packing: Packing, unit: int, filler: NodeFiller, count: int, nodes_first: str) -> bool:
    """Adds workers to a packing that it changes; False, and a packing of no use, if they do not all fit."""
    ranks = filler.shape.ranks
    groups = packing.groups
    ranked = filler.node_ranking(nodes_first)
    able = sorted([(rank[1], groups[free][0], rank[0], free) for free in groups if (rank := ranked[free])[0]])
    for _, _, room, free in able:
        positions = groups.pop(free)
        full = min(len(positions), count // room)
        rest = min(count - full * room, room) if full < len(positions) else 0
        if full:
            apply_fill(packing, GroupFill(unit, free, positions[:full], room * ranks), filler)
        if rest:
            apply_fill(packing, GroupFill(unit, free, positions[full : full + 1], rest * ranks), filler)
        untouched = positions[full + (1 if rest else 0) :]
        if untouched:
            groups[free] = untouched
        count -= full * room + rest
        if not count:
            return True
    return all(_add_gang(packing, unit, filler) for _ in range(count)) if ranks > 1 else False


def apply_fill(packing: Packing, move: GroupFill, filler: NodeFiller) -> None:
    """Makes a move whose nodes were taken out of their group, and puts them where they belong now."""
    packing.fills.append(move)
    then = filler.fill(move.free, move.processes).free
    joined = packing.groups.get(then)
    packing.groups[then] = move.positions if joined is None else [*joined, *move.positions]


def _add_gang(packing: Packing, unit: int, filler: NodeFiller) -> bool:
    """One gang on the fewest whole nodes."""
    groups, ranks = packing.groups, filler.shape.ranks
    whole = [
        (-min(filler.capacity(free), ranks), position)
        for free, positions in groups.items()
        if is_whole_node(free, filler.shape) and filler.capacity(free)
        for position in positions
    ]
    state_of = {position: free for free, positions in groups.items() for position in positions}
    chosen = deal_ranks(ranks, sorted(whole))
    gang = len(packing.fills)
    for position, processes in chosen:
        free = state_of[position]
        left = [other for other in groups.pop(free) if other != position]
        if left:
            groups[free] = left
        apply_fill(packing, GroupFill(unit, free, [position], processes, gang), filler)
    return bool(chosen)


def _in_order(_free: FreeResources, _filler: NodeFiller) -> tuple[int, ...]:
    return ()


def _tightest(free: FreeResources, _filler: NodeFiller) -> tuple[int, ...]:
    """For those without cards: where no GPU waits for CPUs; for the others: where the fewest cards are left."""
    return (free.cards.idle_milli, free.cpu_milli)


def _least_waste(free: FreeResources, filler: NodeFiller) -> tuple[int, ...]:
    """Where what is left once the node is full of this unit is the least."""
    then = filler.fill(free, filler.capacity(free)).free if filler.capacity(free) < CAPACITY_LIMIT else free
    return (then.cards.idle_milli, then.cpu_milli)


def _roomiest(free: FreeResources, _filler: NodeFiller) -> tuple[int, ...]:
    return (-free.cards.idle_milli, -free.cpu_milli)


_NODE_ORDER_KEYS: dict[str, Callable[[FreeResources, NodeFiller], tuple[int, ...]]] = {
    "first": _in_order,
    "tight": _tightest,
    "least waste": _least_waste,
    "roomy": _roomiest,
}
NODE_ORDERS = tuple(_NODE_ORDER_KEYS)


def seats_by_unit(packing: Packing, ledger: Ledger, fillers: Sequence[NodeFiller]) -> list[list[Seats]]:
    """For each unit its workers, each with one seat per rank, in a fixed order."""
    workers: list[list[Seats]] = [[] for _ in fillers]
    gangs: dict[int, list[Seat]] = {}
    nodes = ledger.cluster.nodes
    for move in packing.fills:
        filler = fillers[move.unit]
        ranks = filler.shape.ranks
        ways = [way for way, times in filler.fill(move.free, move.processes).assignments for _ in range(times)]
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
