"""Candidate layouts of a replan.

Four kinds of candidates: the current layout with what is missing; a faster one, with workers moved if necessary; a
slightly slower one with fewer changes; and a packing from empty, with workers kept where it matches.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.scheduling.demand import MAX_SPEED
from dovetail.scheduling.replan.cost_benefit import limiting_rate
from dovetail.scheduling.replan.layout import LEAVING_STATUSES, OccupantStatus, count_workers, free_without
from dovetail.scheduling.replan.seat_assignment import (
    AssignmentOptions,
    SeatAssignment,
    hardest_first,
    minimise_changes,
)
from dovetail.scheduling.sizing import MAX_RATE, rate_bound, size_units_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.seat import Seats
    from dovetail.scheduling.demand import Demand
    from dovetail.scheduling.packing import NodeGroups, Packing
    from dovetail.scheduling.replan.cost_benefit import ReplanRules
    from dovetail.scheduling.replan.layout import Layout, NodeState, Occupant
    from dovetail.scheduling.replan.targets import UnitTarget
    from dovetail.scheduling.sizing import Sizing

RATE_PRECISION = 2e-3
MAX_STATES_FOR_FULL_SEARCH = 200
"""With more different nodes, fewer candidates are tried: a replan is to take a second or two, not ten."""
COARSE_RATE_PRECISION = 1e-2
REPACK_BELOW_BOUND_SHARE = 0.99
"""All nodes are packed again only if the best rate without it is below this share of the bound."""
SLOWER_RATES_TRIED = 6
"""Rates below the best one that are tried, because they may need fewer changes."""
MAX_PAIRS_COMPARED = 20_000
"""Maximum number of pairs of node states and patterns that are compared to keep workers in place."""

SizingCache = dict[tuple[tuple["Demand", ...], tuple[tuple["FreeResources", tuple[int, ...]], ...]], "Sizing | None"]
"""Plans from empty of one replan: every round asks for the same ones."""
NodePattern = tuple[tuple[int, "Seats"], ...]
"""(Unit, seats) of each worker on one node."""


def candidate_layouts(
    start: Layout, empty: NodeGroups, targets: Sequence[UnitTarget], rules: ReplanRules, cache: SizingCache
) -> list[Layout]:
    """Layouts to compare, the one with the fewest changes first; empty if some unit does not get its minimum.

    `empty`: the nodes of the cluster without any worker.
    """
    search = _LayoutSearch(start, empty, targets, rules)
    bound = search.bound()
    rate_now = limiting_rate(targets, start.counts)
    low = min(rate_now if math.isfinite(rate_now) else 0.0, bound)
    now = search.layout_at(low)
    if now is None:
        low, now = 0.0, search.layout_at(0.0)
    is_stable = now is not None and not now.changes and low > 0
    if is_stable and search.layout_at(min(low * (1 + rules.min_gain), bound)) is None:
        best, low = now, low * (1 + rules.min_gain)
    else:
        best = search.fastest_layout(low, bound)
    candidates = [layout for layout in (now, best) if layout is not None]
    top = max(low, search.rate(best)) if best is not None else 0.0
    if best is not None and best is not now:
        candidates += search.slower_layouts(top)
    if top < bound * REPACK_BELOW_BOUND_SHARE and (search.is_full_search or best is None):
        repacked = search.packed_from_empty(cache)
        candidates += [repacked] if repacked is not None else []
    return candidates


class _LayoutSearch:
    """Layouts for given rates that start from one layout; each combination of counts is tried once."""

    def __init__(self, start: Layout, empty: NodeGroups, targets: Sequence[UnitTarget], rules: ReplanRules) -> None:
        self.start = start
        self.empty = empty
        self.targets = targets
        self.rules = rules
        self.is_full_search = len(start.groups) <= MAX_STATES_FOR_FULL_SEARCH
        self.precision = RATE_PRECISION if self.is_full_search else COARSE_RATE_PRECISION
        self.layouts_tried: dict[tuple[int, ...], Layout | None] = {}
        order = hardest_first(targets)
        self.assignment_options = [AssignmentOptions(order, may_move) for may_move in (False, True)]

    def bound(self) -> float:
        """Upper bound of the rate: the bound of the units on the empty cluster."""
        limiting = [target.demand for target in self.targets if target.limits_rate]
        return min(rate_bound(limiting, self.empty), MAX_RATE) if limiting else 0.0

    def counts_for(self, rate: float) -> tuple[int, ...] | None:
        needs = tuple(target.workers_for(rate) for target in self.targets)
        allowed = all(
            need <= target.max_workers for need, target in zip(needs, self.targets, strict=True) if target.limits_rate
        )
        return needs if allowed else None

    def layout_at(self, rate: float) -> Layout | None:
        """A layout that reaches this rate; None if none is found."""
        needs = self.counts_for(rate)
        if needs is None:
            return None
        if needs not in self.layouts_tried:
            self.layouts_tried[needs] = self._assign_counts(needs)
        return self.layouts_tried[needs]

    def _assign_counts(self, needs: tuple[int, ...]) -> Layout | None:
        best: Layout | None = None
        for options in self.assignment_options:
            layout = self.start.copy()
            if SeatAssignment(layout, self.targets, needs, options).assign_all():
                minimise_changes(layout, self.targets, needs)
                if best is None or layout.changes < best.changes:
                    best = layout
                if not self.is_full_search:
                    break
        return best

    def fastest_layout(self, low: float, high: float) -> Layout | None:
        """The fastest layout that is found between two rates."""
        best = self.layout_at(low)
        fastest = self.layout_at(high)
        if fastest is not None:
            return fastest
        while high - low > self.precision * high:
            middle = (low + high) / 2
            layout = self.layout_at(middle)
            if layout is not None:
                best = layout
                low = max(middle, self.rate(layout) * (1 + 1e-9))
            else:
                high = middle
        return best

    def slower_layouts(self, top: float) -> list[Layout]:
        """Layouts slightly slower than `top`."""
        steps = SLOWER_RATES_TRIED if self.is_full_search else 1
        rates = (top * (1 - self.rules.close_enough * step / steps) for step in range(1, steps + 1))
        return [layout for rate in rates if (layout := self.layout_at(rate)) is not None]

    def packed_from_empty(self, cache: SizingCache) -> Layout | None:
        """The layout of a plan from empty, with the workers kept that the plan has in the same place."""
        repack = _Repack(self.start, self.targets, self.assignment_options[-1])
        demands = [_remaining_demand(target, stay) for target, stay in zip(self.targets, repack.staying, strict=True)]
        key = (tuple(demands), tuple((free, tuple(nodes)) for free, nodes in repack.groups.items()))
        if key not in cache:
            cache[key] = size_units_on(demands, repack.groups) if demands else None
        sizing = cache[key]
        if sizing is None:
            return None
        needs = [count + stay for count, stay in zip(sizing.counts, repack.staying, strict=True)]
        return repack.layout(sizing.packing, needs)

    def rate(self, layout: Layout) -> float:
        return limiting_rate(self.targets, layout.counts)


def _remaining_demand(target: UnitTarget, staying: int) -> Demand:
    """Demand of a unit beside its workers that stay in any case."""
    demand = target.demand
    if target.limits_rate and not staying and demand.per_node is None:
        return demand
    low = max(0, demand.low - staying)
    return replace(demand, rate=MAX_SPEED, per_source=1.0, low=low, high=low, per_node=None)


class _Repack:
    """New packing of all nodes of a layout; workers stay in place where the packing matches."""

    def __init__(self, start: Layout, targets: Sequence[UnitTarget], options: AssignmentOptions) -> None:
        self.start = start
        self.targets = targets
        self.options = options
        self.state_of = {position: state for state, there in start.groups.items() for position in there}
        self.evictable = {state: _evictable_occupants(state, targets) for state in start.groups}
        self.free = {state: free_without(state.free, leaving) for state, leaving in self.evictable.items()}
        self.groups: NodeGroups = {}
        """Cleared nodes by their state: free of all workers that may leave."""
        self.staying = list(start.counts)
        """Workers per unit that may not leave."""
        for position in sorted(self.state_of):
            state = self.state_of[position]
            self.groups.setdefault(self.free[state], []).append(position)
            for occupant in self.evictable[state]:
                if occupant.status is OccupantStatus.RUNNING:
                    self.staying[occupant.unit] -= 1

    def layout(self, packing: Packing, needs: Sequence[int]) -> Layout | None:
        """The layout of a packing, each pattern on the node that already resembles it most."""
        if any(move.gang >= 0 for move in packing.fills):
            return None
        layout = self.start.copy()
        patterns = self._patterns(packing)
        for positions in self.groups.values():
            for chosen, pattern in self._match_patterns(positions, [patterns.get(p, ()) for p in positions]):
                self._apply_pattern(layout, chosen, pattern)
        if not SeatAssignment(layout, self.targets, needs, self.options).assign_all():
            return None
        minimise_changes(layout, self.targets, needs)
        return layout

    def _patterns(self, packing: Packing) -> dict[int, NodePattern]:
        patterns: dict[int, list[tuple[int, Seats]]] = {}
        for move in packing.fills:
            workers = self.targets[move.unit].filler.workers(move.free, move.processes)
            for position in move.positions:
                patterns.setdefault(position, []).extend((move.unit, seats) for seats in workers)
        return {position: tuple(sorted(workers)) for position, workers in patterns.items()}

    def _match_patterns(
        self, positions: list[int], patterns: list[NodePattern]
    ) -> Iterator[tuple[list[int], NodePattern]]:
        """Nodes and the pattern each gets, the pairs with the most workers in common first."""
        groups: dict[NodeState, list[int]] = {}
        for position in positions:
            groups.setdefault(self.state_of[position], []).append(position)
        left = Counter(patterns)
        if len(groups) * len(left) > MAX_PAIRS_COMPARED:
            yield from (([position], pattern) for position, pattern in zip(positions, patterns, strict=True))
            return
        pairs = sorted(
            (
                (-_count_in_common(state, pattern), there[0], pattern, state)
                for state, there in groups.items()
                for pattern in left
            ),
            key=lambda pair: pair[:3],
        )
        for _, _, pattern, state in pairs:
            nodes = min(left[pattern], len(groups[state]))
            if nodes:
                yield groups[state][:nodes], pattern
                groups[state] = groups[state][nodes:]
                left[pattern] -= nodes

    def _apply_pattern(self, layout: Layout, positions: list[int], pattern: NodePattern) -> None:
        """Give nodes in the same state a pattern with few changes."""
        state = self.state_of[positions[0]]
        leaving = self.evictable[state]
        needs = [count_workers(state, unit) for unit in range(len(self.targets))]
        for occupant in leaving:
            if occupant.status is OccupantStatus.RUNNING:
                needs[occupant.unit] -= 1
        for unit, _ in pattern:
            needs[unit] += 1
        then = self._state_with_pattern(state, needs, leaving, pattern)
        for position in positions:
            layout.move_node(state, position, then)
        for unit in range(len(self.targets)):
            layout.counts[unit] += len(positions) * (count_workers(then, unit) - count_workers(state, unit))

    def _state_with_pattern(
        self, state: NodeState, needs: list[int], leaving: list[Occupant], pattern: NodePattern
    ) -> NodeState:
        """The state with the counts of the pattern, on any seats of the node; if they do not fit, the exact pattern."""
        interner = self.start.interner
        alone = self.start.single_node(state, len(self.targets))
        if SeatAssignment(alone, self.targets, needs, self.options).assign_all() and not alone.gangs:
            return next(iter(alone.groups))
        left = Counter(leaving)
        arriving = []
        for unit, seats in pattern:
            old = interner.occupant(unit, seats, OccupantStatus.RUNNING)
            arriving.append(old if left[old] else interner.occupant(unit, seats, OccupantStatus.NEW))
            left[old] -= 1
        return interner.with_changes(state, leaving, arriving)


def _evictable_occupants(state: NodeState, targets: Sequence[UnitTarget]) -> list[Occupant]:
    """All occupants that may be asked to leave a node."""
    return [
        occupant
        for occupant in state.occupants
        if occupant.status in LEAVING_STATUSES
        or (
            occupant.status is OccupantStatus.RUNNING
            and targets[occupant.unit].can_release
            and targets[occupant.unit].demand.per_node is None
        )
    ]


def _count_in_common(state: NodeState, pattern: NodePattern) -> int:
    units = Counter(unit for unit, _ in pattern)
    return sum(min(state.evictable_counts.get(unit, 0), count) for unit, count in units.items())
