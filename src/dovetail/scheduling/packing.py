"""Bin packing of workers onto groups of nodes in the same state.

Nodes in the same state are packed as one group, so the cost depends on the number of different states and hardly on
the number of nodes.
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
"""State -> positions of the nodes in this state."""


class FilledNode(NamedTuple):
    """State of a node after workers of one shape were added, and the card assignment of each."""

    free: FreeResources
    assignments: tuple[tuple[CardAssignment, int], ...]
    """(Card assignment, number of workers), in order."""


class NodeFiller:
    """Fills nodes with workers of one shape, each on the fullest cards that it fits on."""

    __slots__ = ("_capacity", "_filled", "_rankings", "fit", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.fit = Fit(shape.rank)
        self._capacity: dict[FreeResources, int] = {}
        self._filled: dict[tuple[FreeResources, int], FilledNode] = {}
        self._rankings: dict[str, _NodeRanking] = {}

    def node_ranking(self, node_order: str) -> _NodeRanking:
        """State -> (capacity in workers, sort key of such nodes), each computed once."""
        found = self._rankings.get(node_order)
        if found is None:
            found = self._rankings[node_order] = _NodeRanking(self, node_order)
        return found

    def capacity(self, free: FreeResources) -> int:
        """Number of processes that fit on a node in this state."""
        found = self._capacity.get(free)
        if found is None:
            found = self._capacity[free] = self.fit.capacity(free)
        return found

    def fill(self, free: FreeResources, count: int) -> FilledNode:
        """The state after `count` processes, which must fit, were added."""
        key = (free, count)
        found = self._filled.get(key)
        if found is None:
            found = self._filled[key] = self._fill(free, count)
        return found

    def seats(self, free: FreeResources, processes: int, node: str = "") -> list[Seat]:
        """Seats of the processes that fill a node in this state."""
        assignments = self.fill(free, processes).assignments
        return [self.fit.seat(node, assignment) for assignment, times in assignments for _ in range(times)]

    def workers(self, free: FreeResources, processes: int, node: str = "") -> list[Seats]:
        """The same seats by worker, one seat per rank."""
        seats, ranks = self.seats(free, processes, node), self.shape.ranks
        return [tuple(seats[i : i + ranks]) for i in range(0, len(seats), ranks)]

    def _fill(self, free: FreeResources, count: int) -> FilledNode:
        shape = self.shape
        assignments: list[tuple[CardAssignment, int]] = []
        cards = free.cards
        if shape.kind is ShapeKind.CPU_ONLY:
            assignments.append(((), count))
        elif shape.kind in (ShapeKind.CODEC, ShapeKind.FRACTIONAL_GPU):
            assignments = self._shares(free, count)
        else:
            for _ in range(count):
                assignment = self.fit.card_assignments(cards)[0]
                assignments.append((assignment, 1))
                then = cards.after(assignment)
                assert then is not None, (shape, cards.free, assignment)
                cards = then
        for assignment, times in assignments if shape.kind in (ShapeKind.CODEC, ShapeKind.FRACTIONAL_GPU) else ():
            then = cards.after(tuple(_scaled(share, times) for share in assignment))
            assert then is not None, (shape, cards.free, assignment, times)
            cards = then
        custom = free.custom
        if shape.custom:
            left = free.custom_after(tuple((name, amount * count) for name, amount in shape.custom))
            assert left is not None, (shape, free, count)
            custom = left
        host = (free.cpu_milli - count * shape.cpu_milli, free.memory_bytes - count * shape.memory_bytes)
        return FilledNode(FreeResources(*host, cards, custom), tuple(assignments))

    def _shares(self, free: FreeResources, count: int) -> list[tuple[CardAssignment, int]]:
        """Card by card, the fullest first."""
        cards = free.cards
        shares = [share for share in self.fit.shares(cards.kind) or () if share is not None]
        shares.sort(key=lambda share: (cards.free[share.card].milli, cards.free[share.card].memory_bytes, share.card))
        assignments: list[tuple[CardAssignment, int]] = []
        for share in shares:
            have = cards.free[share.card]
            times = min(have[i] // share[i + 1] for i in range(4) if share[i + 1])
            if times and count:
                assignments.append(((share,), min(times, count)))
                count -= min(times, count)
        return assignments


class _NodeRanking(dict[FreeResources, tuple[int, tuple[int, ...]]]):
    def __init__(self, filler: NodeFiller, node_order: str) -> None:
        super().__init__()
        self.filler = filler
        self.rank = _NODE_ORDER_KEYS[node_order]

    def __missing__(self, free: FreeResources) -> tuple[int, tuple[int, ...]]:
        capacity = self.filler.capacity(free) // self.filler.shape.ranks
        found = self[free] = (capacity, self.rank(free, self.filler) if capacity else ())
        return found


def _scaled(share: CardShare, times: int) -> CardShare:
    return CardShare(share.card, *(amount * times for amount in share[1:]))


class GroupFill(NamedTuple):
    """The same number of processes of a unit on each of some nodes in the same state."""

    unit: int
    free: FreeResources
    positions: list[int]
    processes: int
    gang: int = -1
    """Fills with the same number, if not negative, are one gang on several nodes."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Workers on nodes: the fills so far, and the remaining states."""

    fills: list[GroupFill]
    groups: NodeGroups


@dataclass(frozen=True, slots=True)
class PackingOrder:
    """Order of units and nodes, and the number of rounds in which the workers are dealt."""

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
    """Add all of these workers to a packing, or return None; `start` is not changed."""
    packing = Packing(list(start.fills), dict(start.groups))
    for number in range(strategy.rounds):
        for unit in strategy.order:
            part = counts[unit] * (number + 1) // strategy.rounds - counts[unit] * number // strategy.rounds
            if part and not _add_workers(packing, unit, fillers[unit], part, strategy.node_order):
                return None
    return packing


def add_up_to(packing: Packing, unit: int, filler: NodeFiller, count: int, node_order: str = "tight") -> int:
    """Add as many workers of a unit as fit, `count` at most; return how many were added."""
    ranks = filler.shape.ranks
    capacity = sum(filler.capacity(free) // ranks * len(positions) for free, positions in packing.groups.items())
    count = min(count, capacity)
    fitted = _add_workers(packing, unit, filler, count, node_order) if count else True
    assert fitted, f"{count} more of {filler.shape} must fit"
    return count


def _add_workers(packing: Packing, unit: int, filler: NodeFiller, count: int, node_order: str) -> bool:
    """Add workers to a packing; if they do not all fit, return False and leave the packing incomplete."""
    ranks = filler.shape.ranks
    groups = packing.groups
    ranked = filler.node_ranking(node_order)
    able = sorted([(rank[1], groups[free][0], rank[0], free) for free in groups if (rank := ranked[free])[0]])
    for _, _, capacity, free in able:
        positions = groups.pop(free)
        full = min(len(positions), count // capacity)
        rest = min(count - full * capacity, capacity) if full < len(positions) else 0
        if full:
            apply_fill(packing, GroupFill(unit, free, positions[:full], capacity * ranks), filler)
        if rest:
            apply_fill(packing, GroupFill(unit, free, positions[full : full + 1], rest * ranks), filler)
        untouched = positions[full + (1 if rest else 0) :]
        if untouched:
            groups[free] = untouched
        count -= full * capacity + rest
        if not count:
            return True
    return all(_add_gang(packing, unit, filler) for _ in range(count)) if ranks > 1 else False


def apply_fill(packing: Packing, fill: GroupFill, filler: NodeFiller) -> None:
    """Apply a fill whose nodes were taken out of their group, and add them to their new group."""
    packing.fills.append(fill)
    then = filler.fill(fill.free, fill.processes).free
    joined = packing.groups.get(then)
    packing.groups[then] = fill.positions if joined is None else [*joined, *fill.positions]


def _add_gang(packing: Packing, unit: int, filler: NodeFiller) -> bool:
    """Add one gang on the fewest whole nodes; return whether it fits."""
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
    """Nodes with the least idle GPU first, so that workers without GPUs leave CPUs to idle GPUs."""
    return (free.cards.idle_milli, free.cpu_milli)


def _least_waste(free: FreeResources, filler: NodeFiller) -> tuple[int, ...]:
    """Nodes with the least left after they were filled with this unit."""
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


def placement_difficulty(shape: Shape) -> tuple[int, ...]:
    """Sort key of shapes: a higher value is harder to place."""
    return (shape.ranks * shape.cards, shape.gpu_milli, shape.gpu_memory_bytes, shape.cpu_milli, shape.memory_bytes)


def seats_by_unit(packing: Packing, ledger: Ledger, fillers: Sequence[NodeFiller]) -> list[list[Seats]]:
    """Workers of each unit, each with one seat per rank, in a fixed order."""
    workers: list[list[Seats]] = [[] for _ in fillers]
    gangs: dict[int, list[Seat]] = {}
    for fill in packing.fills:
        filler = fillers[fill.unit]
        for position in fill.positions:
            node = ledger.cluster.nodes[position].name
            if fill.gang < 0:
                workers[fill.unit] += filler.workers(fill.free, fill.processes, node)
                continue
            seats = gangs.setdefault(fill.gang, [])
            seats += filler.seats(fill.free, fill.processes, node)
            if len(seats) == filler.shape.ranks:
                workers[fill.unit].append(tuple(gangs.pop(fill.gang)))
    assert not gangs, "a gang is incomplete"
    return workers
