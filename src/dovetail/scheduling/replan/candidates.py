"""Candidate layouts of a replan, their score over the horizon, and the selection of the best one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.scheduling.bounds import rate_bound
from dovetail.scheduling.demand import MAX_SPEED
from dovetail.scheduling.packing import group_nodes
from dovetail.scheduling.replan.adjustments import keep_spare_workers, stop_excess_workers, undo_needless_moves
from dovetail.scheduling.replan.layout import OccupantStatus
from dovetail.scheduling.replan.repack import Repack, evictable_occupants
from dovetail.scheduling.replan.seat_assignment import AssignmentOptions, SeatAssignment, hardest_first
from dovetail.scheduling.sizing import MAX_RATE, size_units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.ledger import Ledger
    from dovetail.scheduling.demand import Demand
    from dovetail.scheduling.packing import Packing
    from dovetail.scheduling.replan.layout import Layout
    from dovetail.scheduling.replan.snapshot import ReplanRules
    from dovetail.scheduling.replan.targets import UnitTarget
    from dovetail.scheduling.sizing import Sizing

RATE_PRECISION = 2e-3
MAX_STATES_FOR_FULL_SEARCH = 200
"""Where more nodes than this are all different, less is tried: a replan is to take a second or two, not ten."""
COARSE_RATE_PRECISION = 1e-2
REPACK_BELOW_BOUND_SHARE = 0.99
"""Share of the bound from which on nodes are not cleared."""
SLOWER_RATES_TRIED = 6
"""Rates below the best that are tried because they may need fewer changes."""


SizingCache = dict[tuple[tuple["Demand", ...], tuple["FreeResources", ...]], "Sizing | None"]
"""Plans from empty that were made before; the same is asked for once a round."""


def limiting_rate(wants: Sequence[UnitTarget], counts: Sequence[int]) -> float:
    """Source items per second of these workers; endless if nothing limits them."""
    return min(
        (count * want.demand.speed for want, count in zip(wants, counts, strict=True) if want.limits_rate),
        default=math.inf,
    )


class LayoutSearch:
    """Tries rates on one floor, and remembers what came of them."""

    def __init__(self, start: Layout, empty: Ledger, wants: Sequence[UnitTarget], rules: ReplanRules) -> None:
        self.start = start
        self.empty_ledger = empty
        self.targets = wants
        self.rules = rules
        self.is_full_search = len(start.groups) <= MAX_STATES_FOR_FULL_SEARCH
        self.precision = RATE_PRECISION if self.is_full_search else COARSE_RATE_PRECISION
        self.layouts_tried: dict[tuple[int, ...], Layout | None] = {}
        order = hardest_first(wants) if rules.reserve else tuple(range(len(wants)))
        ways = (False, True) if rules.reserve else (False,)
        self.assignment_options = [AssignmentOptions(order, moves, rules.take_back) for moves in ways]

    def bound(self) -> float:
        """No seating is faster: what the units could have on an empty cluster."""
        limiting = [want.demand for want in self.targets if want.limits_rate]
        return min(rate_bound(limiting, group_nodes(self.empty_ledger)), MAX_RATE) if limiting else 0.0

    def counts_for(self, rate: float) -> tuple[int, ...] | None:
        needs = tuple(want.workers_for(rate) for want in self.targets)
        allowed = all(
            need <= want.max_workers for need, want in zip(needs, self.targets, strict=True) if want.limits_rate
        )
        return needs if allowed else None

    def layout_at(self, rate: float) -> Layout | None:
        """A seating for this rate."""
        needs = self.counts_for(rate)
        if needs is None:
            return None
        if needs not in self.layouts_tried:
            self.layouts_tried[needs] = self._assign_counts(needs)
        return self.layouts_tried[needs]

    def _assign_counts(self, needs: tuple[int, ...]) -> Layout | None:
        best: Layout | None = None
        for manner in self.assignment_options:
            floor = self.start.copy()
            if SeatAssignment(floor, self.targets, needs, manner).assign_all():
                self._minimise_changes(floor, needs)
                if best is None or floor.changes < best.changes:
                    best = floor
                if not self.is_full_search:
                    break
        return best

    def _minimise_changes(self, floor: Layout, needs: Sequence[int]) -> None:
        minimise_changes(floor, self.targets, needs, self.rules)

    def fastest_layout(self, low: float, high: float) -> Layout | None:
        """The fastest seating that is found between two rates."""
        best = self.layout_at(low)
        found = self.layout_at(high)
        if found is not None:
            return found
        while high - low > self.precision * high:
            middle = (low + high) / 2
            floor = self.layout_at(middle)
            if floor is not None:
                best = floor
                low = max(middle, self.rate(floor) * (1 + 1e-9))
            else:
                high = middle
        return best

    def slower_layouts(self, top: float) -> list[Layout]:
        """Seatings that are a little slower."""
        steps = SLOWER_RATES_TRIED if self.is_full_search else 1
        rates = (top * (1 - self.rules.close_enough * step / steps) for step in range(1, steps + 1))
        return [floor for rate in rates if (floor := self.layout_at(rate)) is not None]

    def packed_from_empty(self, sized: SizingCache) -> Layout | None:
        """What a plan from empty gives, with everybody kept who would sit there anyway."""
        ledger = self._cleared_ledger()
        everywhere = [position for positions in self.start.groups.values() for position in positions]
        repacking = Repack(self.start, self.targets, everywhere, self.assignment_options[-1])
        demands = [_remaining_demand(want, stay) for want, stay in zip(self.targets, repacking.staying, strict=True)]
        asked = (tuple(demands), tuple(ledger.free))
        if asked not in sized:
            sized[asked] = size_units(demands, ledger) if demands else None
        sizing = sized[asked]
        if sizing is None:
            return None
        needs = [count + stay for count, stay in zip(sizing.counts, repacking.staying, strict=True)]
        floor = repacking.layout(sizing.packing, needs)
        if floor is not None:
            self._minimise_changes(floor, needs)
        return floor

    def _cleared_ledger(self) -> Ledger:
        ledger = self.empty_ledger.copy()
        names = [node.name for node in self.empty_ledger.cluster.nodes]
        for room, positions in self.start.groups.items():
            stay = Counter(room.occupants)
            stay.subtract(evictable_occupants(room, self.targets))
            seats = [seat for sitter in stay.elements() for seat in sitter.seats]
            for position in positions:
                for seat in seats:
                    ledger.take(seat._replace(node=names[position]))
        return ledger

    def repacked_on(self, positions: list[int], low: float, high: float) -> Layout | None:
        """The fastest seating above `low` that clearing these nodes allows."""
        repacking = Repack(self.start, self.targets, positions, self.assignment_options[-1])
        best: tuple[Packing, tuple[int, ...]] | None = None
        low *= 1 + self.precision
        middle = low
        while high - low > self.precision * high:
            needs = self.counts_for(middle)
            packing = repacking.pack(needs) if needs is not None else None
            if needs is not None and packing is not None:
                best, low = (packing, needs), middle
            elif best is None:
                return None
            else:
                high = middle
            middle = (low + high) / 2
        if best is None:
            return None
        floor = repacking.layout(*best)
        if floor is not None:
            self._minimise_changes(floor, best[1])
        return floor

    def rate(self, floor: Layout) -> float:
        return limiting_rate(self.targets, floor.counts)


def _remaining_demand(want: UnitTarget, stay: int) -> Demand:
    """What a unit asks for where some of its workers stay in any case."""
    demand = want.demand
    if want.limits_rate and not stay and demand.per_node is None:
        return demand
    low = max(0, demand.low - stay)
    return replace(demand, rate=MAX_SPEED, per_source=1.0, low=low, high=low, per_node=None)


def minimise_changes(floor: Layout, wants: Sequence[UnitTarget], needs: Sequence[int], rules: ReplanRules) -> None:
    """Undoes what was not needed, keeps spares, and stops what is above its limit."""
    undo_needless_moves(floor)
    most = [want.max_workers if want.unit.per_node is None else need for want, need in zip(wants, needs, strict=True)]
    if rules.spares:
        keep_spare_workers(floor, most)
        stop_excess_workers(floor, most, wants)
    else:
        limits = [need if want.can_release else high for need, want, high in zip(needs, wants, most, strict=True)]
        stop_excess_workers(floor, limits, wants)


def candidate_layouts(
    start: Layout, empty: Ledger, wants: Sequence[UnitTarget], rules: ReplanRules, sized: SizingCache | None = None
) -> list[Layout]:
    """Seatings worth comparing, the one with the fewest changes first; none if not every unit gets its least."""
    sized = {} if sized is None else sized
    search = LayoutSearch(start, empty, wants, rules)
    bound = search.bound()
    rate_now = limiting_rate(wants, start.counts)
    low = min(rate_now if math.isfinite(rate_now) else 0.0, bound)
    now = search.layout_at(low)
    if now is None:
        low, now = 0.0, search.layout_at(0.0)
    calm = now is not None and not now.changes and low > 0
    if calm and search.layout_at(min(low * (1 + rules.min_gain), bound)) is None:
        best, low = now, low * (1 + rules.min_gain)
    else:
        best = search.fastest_layout(low, bound)
    found = [floor for floor in (now, best) if floor is not None]
    top = max(low, search.rate(best)) if best is not None else 0.0
    if best is not None and best is not now:
        found += search.slower_layouts(top)
    if rules.reserve and top < bound * REPACK_BELOW_BOUND_SHARE and (search.is_full_search or best is None):
        anew = search.packed_from_empty(sized)
        found += [anew] if anew is not None else []
        found += [
            floor
            for positions in node_sets_to_clear(start)
            if (floor := search.repacked_on(positions, top, bound)) is not None
        ]
    return found


def node_sets_to_clear(floor: Layout) -> list[list[int]]:
    """The one node with the most free, a quarter, half, and all of them."""
    by_free = []
    for room, positions in floor.groups.items():
        kind = room.free.cards.kind
        share = room.free.cpu_milli / (kind.cpu_milli or 1)
        share += room.free.cards.idle_milli / (1000 * len(kind.gpus)) if kind.gpus else 0.0
        by_free += [(-share, position) for position in positions]
    ordered = [position for _, position in sorted(by_free)]
    sizes = dict.fromkeys((1, 2, len(ordered) // 4, len(ordered) // 2, len(ordered)))
    return [ordered[:size] for size in sizes if size]


UNLIMITED_RATE = 1e15
"""The rate of a pipeline that nothing limits."""


@dataclass(frozen=True, slots=True)
class ScoredLayout:
    """What a seating brings within the horizon."""

    layout: Layout
    rate: float
    items: float
    """Source items within the horizon, with what starting and stopping costs taken off."""
    changes: int


def score_layout(
    floor: Layout, wants: Sequence[UnitTarget], rate_before: float, horizon_s: float, rules: ReplanRules
) -> ScoredLayout:
    """Until the last new worker is ready, the pipeline runs at the rate of those who stay; a stopped worker that
    nobody needs costs nothing by that. A pipeline that stands still has nothing to lose."""
    rate = min(limiting_rate(wants, floor.counts), UNLIMITED_RATE)
    horizon_s = max(horizon_s, 1e-9)
    items = rate * horizon_s
    if rules.pays and rate_before > 0:
        started = _count_started(floor, len(wants))
        stayed = [count - new for count, new in zip(floor.counts, started, strict=True)]
        wait_s = min(_startup_s(floor, wants, started), horizon_s)
        items = min(limiting_rate(wants, stayed), rate) * wait_s + rate * (horizon_s - wait_s)
    return ScoredLayout(floor, rate, items, floor.changes)


def _count_started(floor: Layout, units: int) -> list[int]:
    started = [0] * units
    for room, positions in floor.groups.items():
        for sitter in room.occupants:
            if sitter.status is OccupantStatus.NEW:
                started[sitter.unit] += len(positions)
    for gang in floor.gangs:
        started[gang.unit] += 1
    return started


def _startup_s(floor: Layout, wants: Sequence[UnitTarget], started: Sequence[int]) -> float:
    """Until the last of the new workers is ready: those who sit there now drain first."""
    drains = [wants[s.unit].unit.drain_s for room in floor.groups for s in room.evicted if s.unit >= 0]
    setups = [want.unit.setup_s for want, new in zip(wants, started, strict=True) if new]
    changed = drains + setups
    return max(drains, default=0.0) + max(setups, default=0.0) if changed else 0.0


def select_layout(worths: Sequence[ScoredLayout], workers: int, rules: ReplanRules) -> ScoredLayout:
    """Of those close to the best, the one whose changes bring the most; the running state if nothing brings much."""
    most = max(worth.items for worth in worths)
    nearly = most * (1 - rules.close_enough)
    calm = min(worths, key=lambda worth: (worth.changes, -worth.items))
    if calm.changes == 0 and calm.items * (1 + rules.min_gain) >= most:
        return calm

    def score(worth: ScoredLayout) -> tuple[float, int]:
        share = worth.items / most if most else 1.0
        everyone = max(workers, sum(worth.layout.counts), 1)
        return (share - rules.change_cost * worth.changes / everyone, -worth.changes)

    return max((worth for worth in worths if worth.items >= nearly), key=score)
