"""Sizing: the number of workers per unit that gives the highest rate on a cluster.

Four phases: counts that are pinned, at least one worker each, throughput (bisect the rate; for a rate the counts are
whole numbers, and packing says whether they fit), and headroom from what is left over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING

from dovetail.scheduling.bounds import rate_bound
from dovetail.scheduling.demand import Demand, pipeline_rate, workers_needed
from dovetail.scheduling.packing import (
    NODE_ORDERS,
    GroupFill,
    NodeFiller,
    NodeGroups,
    Packing,
    PackingOrder,
    add_up_to,
    apply_fill,
    group_nodes,
    pack,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.ledger import Ledger

MAX_PACKINGS_TRIED = 200
"""Packings that may be tried to get past what the first strategies reach; a number, so that the result is the same on
every machine."""
MAX_NODES_FOR_SEARCH = 64
MAX_NODES_FOR_PREFIXES = 64
CLOSE_TO_BOUND_SHARE = 0.9995
MAX_RATE = 1e15


@dataclass(frozen=True, slots=True)
class Sizing:
    """Counts per unit, the rate they reach, and how they are packed."""

    counts: tuple[int, ...]
    rate: float
    packing: Packing


def size_units(demands: Sequence[Demand], ledger: Ledger) -> Sizing | None:
    """The highest rate found, or None if not every unit gets its least.

    More nodes never make it slower: what the first of them reach alone is compared, where that could be more.
    """
    fillers = [NodeFiller(demand.shape) for demand in demands]
    seated = _place_per_node_units(demands, fillers, group_nodes(ledger))
    if seated is None:
        return None
    demands, start = seated
    best = _size_on_nodes(demands, fillers, start, rate_bound(demands, start.groups))
    nodes = len(ledger.free)
    if nodes > MAX_NODES_FOR_PREFIXES or start.fills:
        return best
    for count in range(nodes - 1, 0, -1):
        first = _first_nodes(start.groups, count)
        bound = rate_bound(demands, first)
        if best is not None and bound <= best.rate * (1 + 1e-12):
            break
        fewer = _size_on_nodes(demands, fillers, Packing([], first), bound)
        if fewer is not None and (best is None or fewer.rate > best.rate):
            rest = _first_nodes(start.groups, nodes, start=count)
            for free, positions in rest.items():
                fewer.packing.groups[free] = [*fewer.packing.groups.get(free, ()), *positions]
            best = fewer
    return best


def _first_nodes(groups: NodeGroups, count: int, start: int = 0) -> NodeGroups:
    cut = {free: [p for p in positions if start <= p < count] for free, positions in groups.items()}
    return {free: positions for free, positions in cut.items() if positions}


def _place_per_node_units(
    demands: Sequence[Demand], fillers: Sequence[NodeFiller], groups: NodeGroups
) -> tuple[list[Demand], Packing] | None:
    """Units with a number of workers on every node are seated first, and are then like units with a fixed count."""
    packing = Packing([], dict(groups))
    settled = list(demands)
    for unit, demand in enumerate(demands):
        if demand.per_node is None:
            continue
        able = eligible_nodes(demand, packing.groups)
        if not able or any(fillers[unit].capacity(free) // demand.shape.ranks < demand.per_node for free in able):
            return None
        # all out first: a node that was filled may then be in a state that others start from
        for free, positions in [(free, packing.groups.pop(free)) for free in able]:
            apply_fill(packing, GroupFill(unit, free, positions, demand.per_node * demand.shape.ranks), fillers[unit])
        count = sum(len(move.positions) for move in packing.fills if move.unit == unit) * demand.per_node
        settled[unit] = replace(demand, low=count, high=count)
    return settled, packing


def eligible_nodes(demand: Demand, groups: NodeGroups) -> list[FreeResources]:
    """The states of the nodes that could seat a worker of this unit if nobody else sat there."""
    fit = NodeFiller(demand.shape)
    return [free for free in groups if fit.capacity(free.cards.kind.untouched())]


def add_headroom(demands: Sequence[Demand], fillers: Sequence[NodeFiller], sizing: Sizing, factor: float) -> Sizing:
    """More workers, from what is free, for units that are below `factor` times the slowest; the slowest first."""
    counts = list(sizing.counts)
    target = sizing.rate * factor
    groups = {free: list(positions) for free, positions in sizing.packing.groups.items()}
    packing = Packing(list(sizing.packing.fills), groups)
    for unit in sorted(range(len(demands)), key=lambda unit: (counts[unit] * demands[unit].speed, unit)):
        demand = demands[unit]
        most = math.inf if demand.high is None else demand.high
        wanted = min(workers_needed(demand, target), most)
        if demand.per_node is None and wanted > counts[unit]:
            counts[unit] += add_up_to(packing, unit, fillers[unit], int(wanted) - counts[unit])
    return Sizing(tuple(counts), pipeline_rate(demands, counts), packing)


class _RateSearch:
    """Looks for the highest rate at which everything still fits."""

    def __init__(self, demands: Sequence[Demand], fillers: Sequence[NodeFiller], start: Packing, bound: float) -> None:
        self.demands = demands
        self.fillers = fillers
        self.start = start
        self.bound = min(bound, MAX_RATE)
        self.best: Sizing | None = None

    def attempt(self, rate: float, strategy: PackingOrder) -> bool:
        """Whether this rate can be reached this way; keeps the result if it is the best so far."""
        counts = []
        for demand in self.demands:
            count = workers_needed(demand, rate)
            if demand.high is not None and count > demand.high:
                return False
            counts.append(count)
        to_pack = [0 if d.per_node is not None else count for d, count in zip(self.demands, counts, strict=True)]
        packing = pack(self.start, self.fillers, to_pack, strategy)
        if packing is None:
            return False
        reached = pipeline_rate(self.demands, counts)
        if self.best is None or reached > self.best.rate:
            self.best = Sizing(tuple(counts), reached, packing)
        return True

    def next_rate(self) -> float:
        """Just above what is reached: the least that needs one more worker."""
        return self.best.rate * (1 + 1e-7) if self.best is not None else 0.0

    def bisect(self, strategy: PackingOrder) -> None:
        """Raises the best rate as far as this strategy goes."""
        if not self.attempt(self.next_rate(), strategy):
            return
        low, high = self.next_rate(), self.bound
        if self.attempt(high, strategy):
            return
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            if self.attempt(middle, strategy):
                low = max(middle, self.next_rate())
            else:
                high = middle

    def is_done(self) -> bool:
        return self.best is not None and self.best.rate >= self.bound * (1 - 1e-9)


def _size_on_nodes(
    demands: Sequence[Demand], fillers: Sequence[NodeFiller], start: Packing, bound: float
) -> Sizing | None:
    search = _RateSearch(demands, fillers, start, bound)
    orders = _unit_orders(demands, fillers, start.groups)
    for order in orders:
        for nodes_first in NODE_ORDERS:
            if search.is_done():
                return search.best
            search.bisect(PackingOrder(order, nodes_first))
    nodes = sum(map(len, start.groups.values()))
    if search.best is not None and (search.best.rate >= bound * CLOSE_TO_BOUND_SHARE or nodes > MAX_NODES_FOR_SEARCH):
        return search.best
    for strategy in _more_packing_orders(orders, nodes):
        if search.is_done():
            break
        search.bisect(strategy)
    return search.best


def _unit_orders(demands: Sequence[Demand], fillers: Sequence[NodeFiller], groups: NodeGroups) -> list[tuple[int, ...]]:
    """Sensible orders of the units: those that are hardest to seat first, in several meanings of hard."""
    units = range(len(demands))
    rooms = {unit: sum(fillers[unit].capacity(free) * len(nodes) for free, nodes in groups.items()) for unit in units}

    def by_cards(unit: int) -> tuple[int, ...]:
        shape = demands[unit].shape
        return (-shape.ranks * shape.cards, -shape.gpu_milli, -shape.gpu_memory_bytes, -shape.cpu_milli, unit)

    def by_room(unit: int) -> tuple[int, ...]:
        return (rooms[unit], unit)

    def by_cpus(unit: int) -> tuple[int, ...]:
        shape = demands[unit].shape
        return (-shape.cpu_milli, -shape.cards, unit)

    def by_cpus_per_gpu(unit: int) -> tuple[float, ...]:
        shape = demands[unit].shape
        share = shape.cards * shape.gpu_milli
        return (not share, -shape.cpu_milli / share if share else -shape.cpu_milli, unit)

    orders = [tuple(sorted(units, key=key)) for key in (by_cards, by_room, by_cpus, by_cpus_per_gpu)]
    return list(dict.fromkeys(orders))


def _more_packing_orders(orders: list[tuple[int, ...]], nodes: int) -> Iterator[PackingOrder]:
    """Mixed rounds, which put the same blend on every node, then other orders."""
    tries = 0
    for rounds in dict.fromkeys((nodes, 2 * nodes, 3)):
        for order in orders:
            for nodes_first in NODE_ORDERS:
                yield PackingOrder(order, nodes_first, rounds)
                tries += 1
    for order in permutations(orders[0]):
        for nodes_first in NODE_ORDERS:
            yield PackingOrder(order, nodes_first)
            tries += 1
            if tries >= MAX_PACKINGS_TRIED:
                return
