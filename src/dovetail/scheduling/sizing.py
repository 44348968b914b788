"""Sizing: the number of workers per unit that gives the highest rate on a cluster.

Four phases: units with a number of workers per node; the minimum of each unit; throughput (bisect the rate: a rate
gives whole worker counts, and packing tests whether they fit); headroom from the remaining capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
    placement_difficulty,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.ledger import Ledger

MAX_NODES_FOR_MIXES = 64
MAX_NODES_FOR_PREFIXES = 64
CLOSE_TO_BOUND_SHARE = 0.9995
MAX_RATE = 1e15


@dataclass(frozen=True, slots=True)
class Sizing:
    """Worker counts per unit, the rate they reach, and their packing."""

    counts: tuple[int, ...]
    rate: float
    packing: Packing


def size_units(demands: Sequence[Demand], ledger: Ledger) -> Sizing | None:
    """The sizing with the highest rate that is found, or None if some unit does not get its minimum."""
    return size_units_on(demands, group_nodes(ledger))


def size_units_on(demands: Sequence[Demand], groups: NodeGroups) -> Sizing | None:
    """The same for nodes grouped by state.

    More nodes never make it slower: the first nodes alone are tried too, where their bound is higher.
    """
    fillers = [NodeFiller(demand.shape) for demand in demands]
    placed = _place_per_node_units(demands, fillers, groups)
    if placed is None:
        return None
    demands, start = placed
    best = _size_on_nodes(demands, fillers, start, rate_bound(demands, start.groups))
    nodes = sum(map(len, groups.values()))
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
    """Place units with a number of workers per node; their count is fixed then."""
    packing = Packing([], dict(groups))
    fixed = list(demands)
    for unit, demand in enumerate(demands):
        if demand.per_node is None:
            continue
        able = eligible_nodes(demand, packing.groups)
        if not able or any(fillers[unit].capacity(free) // demand.shape.ranks < demand.per_node for free in able):
            return None
        # take all nodes out first: a filled node may reach a state in which other nodes start
        for free, positions in [(free, packing.groups.pop(free)) for free in able]:
            apply_fill(packing, GroupFill(unit, free, positions, demand.per_node * demand.shape.ranks), fillers[unit])
        count = sum(len(fill.positions) for fill in packing.fills if fill.unit == unit) * demand.per_node
        fixed[unit] = replace(demand, low=count, high=count)
    return fixed, packing


def eligible_nodes(demand: Demand, groups: NodeGroups) -> list[FreeResources]:
    """States of the nodes on which a worker of this unit would fit if they were empty."""
    fit = NodeFiller(demand.shape)
    return [free for free in groups if fit.capacity(free.cards.kind.untouched())]


def add_headroom(demands: Sequence[Demand], fillers: Sequence[NodeFiller], sizing: Sizing, factor: float) -> Sizing:
    """Add workers on free capacity to units below `factor` times the rate, the slowest first."""
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
    """Search for the highest rate whose workers fit."""

    def __init__(self, demands: Sequence[Demand], fillers: Sequence[NodeFiller], start: Packing, bound: float) -> None:
        self.demands = demands
        self.fillers = fillers
        self.start = start
        self.bound = min(bound, MAX_RATE)
        self.best: Sizing | None = None

    def attempt(self, rate: float, order: PackingOrder) -> bool:
        """Try a rate with one packing order; keep the sizing if it is the best so far."""
        counts = []
        for demand in self.demands:
            count = workers_needed(demand, rate)
            if demand.high is not None and count > demand.high:
                return False
            counts.append(count)
        to_pack = [0 if d.per_node is not None else count for d, count in zip(self.demands, counts, strict=True)]
        packing = pack(self.start, self.fillers, to_pack, order)
        if packing is None:
            return False
        reached = pipeline_rate(self.demands, counts)
        if self.best is None or reached > self.best.rate:
            self.best = Sizing(tuple(counts), reached, packing)
        return True

    def next_rate(self) -> float:
        """The lowest rate above the best one that needs one more worker."""
        return self.best.rate * (1 + 1e-7) if self.best is not None else 0.0

    def bisect(self, order: PackingOrder) -> None:
        """Raise the best rate as far as this packing order allows."""
        if not self.attempt(self.next_rate(), order):
            return
        low, high = self.next_rate(), self.bound
        if self.attempt(high, order):
            return
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            if self.attempt(middle, order):
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
        for node_order in NODE_ORDERS:
            if search.is_done():
                return search.best
            search.bisect(PackingOrder(order, node_order))
    nodes = sum(map(len, start.groups.values()))
    if search.best is not None and (search.best.rate >= bound * CLOSE_TO_BOUND_SHARE or nodes > MAX_NODES_FOR_MIXES):
        return search.best
    for packing_order in _mixed_packing_orders(orders, nodes):
        if search.is_done():
            break
        search.bisect(packing_order)
    return search.best


def _unit_orders(demands: Sequence[Demand], fillers: Sequence[NodeFiller], groups: NodeGroups) -> list[tuple[int, ...]]:
    """Orders of the units, the hardest to place first, by several measures of difficulty."""
    units = range(len(demands))
    capacity = [sum(filler.capacity(free) * len(nodes) for free, nodes in groups.items()) for filler in fillers]

    def by_difficulty(unit: int) -> tuple[int, ...]:
        return (*(-part for part in placement_difficulty(demands[unit].shape)), unit)

    def by_capacity(unit: int) -> tuple[int, ...]:
        return (capacity[unit], unit)

    def by_cpus(unit: int) -> tuple[int, ...]:
        shape = demands[unit].shape
        return (-shape.cpu_milli, -shape.cards, unit)

    def by_cpus_per_gpu(unit: int) -> tuple[float, ...]:
        shape = demands[unit].shape
        share = shape.cards * shape.gpu_milli
        return (not share, -shape.cpu_milli / share if share else -shape.cpu_milli, unit)

    orders = [tuple(sorted(units, key=key)) for key in (by_difficulty, by_capacity, by_cpus, by_cpus_per_gpu)]
    return list(dict.fromkeys(orders))


def _mixed_packing_orders(orders: list[tuple[int, ...]], nodes: int) -> Iterator[PackingOrder]:
    """The same orders in several rounds, which put the same mix of units on every node."""
    for rounds in dict.fromkeys((nodes, 2 * nodes, 3)):
        for order in orders:
            for node_order in NODE_ORDERS:
                yield PackingOrder(order, node_order, rounds)
