"""Sizing: the number of workers per unit that gives the highest rate on a cluster, and upper bounds on that rate.

Four phases: units with a number of workers per node; the minimum of each unit; throughput (bisect the rate: a rate
gives whole worker counts, and packing tests whether they fit); headroom from the remaining capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.amounts import RESOURCES, total_free
from dovetail.resources.fit import Fit
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
    from dovetail.resources.shape import Shape

MAX_NODES_FOR_MIXES = 64
MAX_NODES_FOR_PREFIXES = 64
CLOSE_TO_BOUND_SHARE = 0.9995
MAX_RATE = 1e15
CARD_ROUNDING_STEPS = (1, 2, 3, 4, 5)


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
    if not start.fills and not _can_hold_minimum(demands, start.groups):
        return None
    best = _size_on_nodes(demands, fillers, start, rate_bound(demands, start.groups))
    nodes = sum(map(len, groups.values()))
    if nodes > MAX_NODES_FOR_PREFIXES or start.fills:
        return best
    for count in range(nodes - 1, 0, -1):
        first = _first_nodes(start.groups, count)
        if not _can_hold_minimum(demands, first):
            break
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


def _can_hold_minimum(demands: Sequence[Demand], groups: NodeGroups) -> bool:
    """Whether the minimum of all units passes every test that needs no packing; if not, neither do fewer nodes."""
    return _CountTests(demands, groups).can_reach(0.0)


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


# --- upper bounds


class Limit(NamedTuple):
    """An upper bound of the rate in source items per second, and the resource that sets it."""

    rate: float
    resource: str


def resource_limits(demands: Sequence[Demand], groups: NodeGroups) -> list[Limit]:
    """Bounds by resource: the amount available over the need of one source item, the lowest first."""
    limits = []
    for name, (have, needs) in _totals(demands, groups).items():
        per_item = sum(need / demand.speed for demand, need in zip(demands, needs, strict=True))
        if per_item > 0:
            limits.append(Limit(have / per_item, name))
    limits += [
        Limit(demand.high * demand.speed, f"the {demand.high} worker{'s' * (demand.high > 1)} of {demand.name}")
        for demand in demands
        if demand.high is not None
    ]
    return sorted(limits, key=lambda limit: float(f"{limit.rate:.9g}"))


def rate_bound(demands: Sequence[Demand], groups: NodeGroups) -> float:
    """The highest rate whose whole worker counts pass every test that needs no packing.

    Never below the rate that packing reaches, and usually closer to it than `resource_limits`.
    """
    limits = resource_limits(demands, groups)
    high = limits[0].rate if limits else math.inf
    tests = _CountTests(demands, groups)
    if not math.isfinite(high):
        return high
    if tests.can_reach(high):
        return high
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if tests.can_reach(middle):
            low = middle
        else:
            high = middle
        if high - low <= 1e-9 * high:
            break
    return high


class _CountTests:
    """Necessary conditions for worker counts: totals of the cluster, capacity for each unit alone, and rounded shares.

    Rounded shares are the dual feasible functions of Fekete and Schepers: if x is the share of a card and (k+1)x is not
    whole, x may be replaced by floor((k+1)x)/k, and still no card holds more than 1. With k=1, no two shares above one
    half fit on a card.
    """

    def __init__(self, demands: Sequence[Demand], groups: NodeGroups) -> None:
        self.demands = demands
        self.totals = _totals(demands, groups)
        self.max_alone = [
            sum(fit.capacity(free) // demand.shape.ranks * len(nodes) for free, nodes in groups.items())
            if demand.shape.ranks == 1
            else None
            for demand, fit in ((demand, Fit(demand.shape.rank)) for demand in demands)
        ]
        untouched = all(card.milli in (0, 1000) for free in groups for card in free.cards.free)
        self.cards = (
            sum(len(nodes) * sum(card.milli == 1000 for card in free.cards.free) for free, nodes in groups.items())
            if untouched
            else None
        )

    def can_reach(self, rate: float) -> bool:
        counts = [workers_needed(demand, rate) for demand in self.demands]
        if any(d.high is not None and count > d.high for d, count in zip(self.demands, counts, strict=True)):
            return False
        if any(most is not None and count > most for most, count in zip(self.max_alone, counts, strict=True)):
            return False
        for have, needs in self.totals.values():
            if sum(count * need for count, need in zip(counts, needs, strict=True)) > have:
                return False
        return self.cards is None or all(self._has_enough_cards(counts, k, self.cards) for k in CARD_ROUNDING_STEPS)

    def _has_enough_cards(self, counts: list[int], k: int, cards: int) -> bool:
        shares = self.totals["GPUs"][1]
        asked = 0
        for count, demand, share in zip(counts, self.demands, shares, strict=True):
            each = share // (demand.shape.ranks * demand.shape.cards) if demand.shape.cards else 0
            rounded = (k + 1) * each // 1000 * 1000 if (k + 1) * each % 1000 else k * each
            asked += count * demand.shape.ranks * demand.shape.cards * rounded
        return asked <= k * 1000 * cards


def _totals(demands: Sequence[Demand], groups: NodeGroups) -> dict[str, tuple[int, list[int]]]:
    """Resource -> (amount available, least need of one worker of each unit)."""
    have = total_free({free: len(positions) for free, positions in groups.items()})
    asked = {name for demand in demands for name, _ in demand.shape.custom}
    have = {name: have[name] for name in RESOURCES} | {f"custom {name}": have.get(name, 0) for name in sorted(asked)}
    return {
        name: (amount, [_min_need(demand.shape, name, groups) for demand in demands]) for name, amount in have.items()
    }


def _min_need(shape: Shape, name: str, groups: NodeGroups) -> int:
    """Need of one worker with all its ranks, on the cards where it is smallest."""
    host = {"CPUs": shape.cpu_milli, "memory": shape.memory_bytes, "NVDECs": shape.nvdecs, "NVENCs": shape.nvencs}
    if name in host:
        return shape.ranks * host[name]
    if name.startswith("custom "):
        return shape.ranks * dict(shape.custom).get(name.removeprefix("custom "), 0)
    if not shape.computes_on_gpu:
        return 0
    fit = Fit(shape.rank)
    kinds = {free.cards.kind for free in groups}
    column = 1 if name == "GPUs" else 2
    shares = [share[column] for kind in kinds for share in fit.shares(kind) or () if share is not None]
    return shape.ranks * shape.cards * min(shares, default=0)
