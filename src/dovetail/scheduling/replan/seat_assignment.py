"""Assignment of worker counts to a running layout with few changes.

Units that are hardest to place come first. A worker goes into free space, else to the node where the fewest workers
have to leave: workers that other units can spare, or workers of easier units, which are then placed elsewhere.
`minimise_changes` then undoes the moves that turned out not to be necessary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from dovetail.scheduling.placement import deal_ranks, is_whole_node, stop_rank, tightness
from dovetail.scheduling.replan.layout import (
    LEAVING_STATUSES,
    NewGang,
    OccupantStatus,
    free_with_occupant,
    free_without,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.scheduling.packing import NodeFiller
    from dovetail.scheduling.placement import FragmentationScore, GroupPlacer
    from dovetail.scheduling.replan.layout import Interner, Layout, NodeState, Occupant
    from dovetail.scheduling.replan.targets import UnitTarget

STATES_PER_STEP = 128
"""Node states that are examined at once for evictions."""
MAX_UNDO_PASSES = 3
SURPLUS_COST = 1.0
MOVE_COST = 2.0
"""A stop, and a start elsewhere."""
LEAVING_COST = 0.25
"""A leaving worker costs no change, but its seat is free only later, so seats that are free now come first."""


class Eviction(NamedTuple):
    """Occupants that leave a node, and the cost."""

    cost: float
    negative_score: int
    """Negative fragmentation score of the change."""
    tie: int
    evicted: tuple[Occupant, ...]

    def count_spare_used(self, spare: Mapping[int, int]) -> dict[int, int]:
        """Unit -> number of its spare workers that leave."""
        used: dict[int, int] = {}
        for occupant in self.evicted:
            if occupant.status is OccupantStatus.RUNNING and used.get(occupant.unit, 0) < spare.get(occupant.unit, 0):
                used[occupant.unit] = used.get(occupant.unit, 0) + 1
        return used


class EvictionPrices(NamedTuple):
    """Cost of evicting each occupant of a node."""

    spare: Mapping[int, int]
    """Unit -> workers on the node that the unit can spare."""
    movable: frozenset[int]
    """Units whose workers may move elsewhere."""

    def cost_of(self, occupant: Occupant) -> float | None:
        if occupant.status in LEAVING_STATUSES:
            return LEAVING_COST
        if occupant.status is not OccupantStatus.RUNNING:
            return None
        if self.spare.get(occupant.unit, 0) > 0:
            return SURPLUS_COST
        return MOVE_COST if occupant.unit in self.movable else None

    def total_cost(self, leaving: Iterable[Occupant]) -> float:
        asked: dict[int, int] = {}
        cost = 0.0
        for occupant in leaving:
            if occupant.status in LEAVING_STATUSES:
                cost += LEAVING_COST
                continue
            asked[occupant.unit] = asked.get(occupant.unit, 0) + 1
            cost += SURPLUS_COST if asked[occupant.unit] <= self.spare.get(occupant.unit, 0) else MOVE_COST
        return cost

    def can_evict(self, occupant: Occupant, asked: Mapping[int, int]) -> bool:
        """Whether one more worker of its unit may leave; leaving workers always may."""
        unit = occupant.unit
        return (
            occupant.status in LEAVING_STATUSES or unit in self.movable or asked.get(unit, 0) < self.spare.get(unit, 0)
        )


def cheapest_eviction(
    state: NodeState, filler: NodeFiller, placer: GroupPlacer, price: EvictionPrices
) -> Eviction | None:
    """The cheapest set of occupants to evict so that one worker fits, or None; ties go to the least fragmentation."""
    costs = {occupant: cost for occupant in set(state.occupants) if (cost := price.cost_of(occupant)) is not None}
    asked = [occupant for occupant in state.occupants if occupant in costs]
    if not asked or filler.capacity(state.free.cards.kind.untouched()) < filler.shape.ranks:
        return None
    best: Eviction | None = None
    for order in _eviction_orders(state, filler, asked, costs):
        leaving = _evict_in_order(order, state.free, filler, price, costs)
        if leaving is None:
            continue
        then = placer.free_after_one(free_without(state.free, leaving))
        if then is None:
            continue
        score = placer.score.change([(state.free, then)])
        eviction = Eviction(price.total_cost(leaving), -score, tightness(then), tuple(leaving))
        if best is None or eviction[:3] < best[:3]:
            best = eviction
    return best


def _eviction_orders(
    state: NodeState, filler: NodeFiller, asked: list[Occupant], costs: Mapping[Occupant, float]
) -> Iterator[list[Occupant]]:
    """Orders in which occupants may be evicted: card by card, starting with each card in turn, because a share needs
    space on one card and a whole card must be empty; occupants without cards by CPUs, largest first."""

    def by_cpus(occupant: Occupant) -> tuple[float, ...]:
        return (costs[occupant], occupant.gpu_milli, -occupant.cpu_milli, occupant.number)

    if not filler.shape.cards:
        yield sorted(asked, key=by_cpus)
        yield sorted(
            asked, key=lambda occupant: (costs[occupant], -occupant.cpu_milli, occupant.gpu_milli, occupant.number)
        )
        return
    on_card: dict[int, list[Occupant]] = {}
    for occupant in asked:
        for card in occupant.cards:
            on_card.setdefault(card, []).append(occupant)
    clearing = {card: (sum(costs[occupant] for occupant in there), card) for card, there in on_card.items()}
    cards = sorted(on_card, key=clearing.__getitem__)
    without_cards = sorted((occupant for occupant in asked if not occupant.cards), key=by_cpus)
    seen = set()
    for first in cards:
        same = (state.free.cards.free[first], tuple(occupant.number for occupant in on_card[first]))
        if same in seen:
            continue
        seen.add(same)
        here = sorted(on_card[first], key=lambda occupant: (costs[occupant], -occupant.gpu_milli, occupant.number))
        others = [occupant for card in cards if card != first for occupant in on_card[card]]
        yield [*here, *without_cards, *others] if filler.shape.cards == 1 else [*here, *others, *without_cards]
        if filler.shape.cards > 1 and len(cards) == filler.shape.cards:
            return
    yield [*without_cards, *(occupant for card in cards for occupant in on_card[card])]


def _evict_in_order(
    order: list[Occupant],
    free: FreeResources,
    filler: NodeFiller,
    price: EvictionPrices,
    costs: Mapping[Occupant, float],
) -> list[Occupant] | None:
    """The first occupants of the order until a worker fits, without those whose eviction turns out not to be needed."""
    ranks, capacity = filler.shape.ranks, filler.capacity
    left = _count_occupants(order)
    asked: dict[int, int] = {}
    leaving: list[Occupant] = []
    for occupant in order:
        if not left[occupant] or not price.can_evict(occupant, asked):
            continue
        left[occupant] -= 1
        free = free_without(free, (occupant,))
        leaving.append(occupant)
        if occupant.status is OccupantStatus.RUNNING:
            asked[occupant.unit] = asked.get(occupant.unit, 0) + 1
        if capacity(free) >= ranks:
            break
    else:
        return None
    for occupant in sorted(
        leaving[:-1], key=lambda occupant: (-costs[occupant], -occupant.gpu_milli, -occupant.cpu_milli)
    ):
        then = free_with_occupant(free, occupant)
        if then is not None and capacity(then) >= ranks:
            free = then
            leaving.remove(occupant)
    return leaving


def _count_occupants(order: list[Occupant]) -> dict[Occupant, int]:
    """Occupant -> how often it may be evicted: a worker on two cards is listed under both."""
    times: dict[Occupant, int] = {}
    for occupant in order:
        times[occupant] = times.get(occupant, 0) + 1
    return {occupant: count // max(1, len(occupant.cards)) for occupant, count in times.items()}


@dataclass(frozen=True, slots=True)
class AssignmentOptions:
    """Order of the units, and whether running workers may be moved."""

    order: tuple[int, ...]
    may_move: bool


def hardest_first(targets: Sequence[UnitTarget]) -> tuple[int, ...]:
    """Unit numbers, the units that are hardest to place first."""
    return tuple(sorted(range(len(targets)), key=lambda unit: ([-part for part in targets[unit].difficulty], unit)))


class SeatAssignment:
    """Assigns worker counts to a layout, which it changes."""

    def __init__(
        self, layout: Layout, targets: Sequence[UnitTarget], needs: Sequence[int], options: AssignmentOptions
    ) -> None:
        self.layout = layout
        self.interner: Interner = layout.interner
        self.targets = targets
        self.needs = needs
        self.options = options
        self.rank = {unit: number for number, unit in enumerate(options.order)}

    def assign_all(self) -> bool:
        """Assign all units; stop and return False at the first one that does not get its count."""
        seated = all(self.assign(unit, self.needs[unit]) for unit in self.options.order)
        return seated and all(have >= need for have, need in zip(self.layout.counts, self.needs, strict=True))

    def assign(self, unit: int, need: int) -> bool:
        """Give a unit up to `need` workers; return whether it has them."""
        self._cancel_drains(unit, need)
        self._use_free_space(unit, need)
        if self.layout.counts[unit] < need:
            self._evict_for(unit, need)
        if self.targets[unit].unit.shape.ranks > 1:
            while self.layout.counts[unit] < need and self._assign_gang(unit):
                pass
        return self.layout.counts[unit] >= need

    def _cancel_drains(self, unit: int, need: int) -> None:
        layout, interner = self.layout, self.interner
        for state in list(layout.groups):
            draining = [one for one in state.occupants if one.unit == unit and one.status is OccupantStatus.DRAINING]
            for occupant in draining:
                nodes = min(len(layout.groups.get(state, ())), need - layout.counts[unit])
                if nodes <= 0:
                    break
                kept = interner.occupant(unit, occupant.seats, OccupantStatus.DRAIN_CANCELLED)
                then = interner.with_replacement(state, occupant, kept)
                whole = nodes == len(layout.groups[state])
                layout.move_nodes(state, nodes, then)
                layout.counts[unit] += nodes
                if not whole:
                    break
                state = then

    def _use_free_space(self, unit: int, need: int) -> None:
        layout, placer = self.layout, self.targets[unit].placer
        missing = need - layout.counts[unit]
        if missing <= 0:
            return
        heap: list[tuple[int, int, int, int, NodeState]] = []
        serial = count()

        def push(state: NodeState) -> None:
            run = placer.run(state.free)
            if run is not None:
                heappush(heap, (-run.score, run.tie, layout.groups[state][0], next(serial), state))

        for state in layout.groups:
            push(state)
        while missing and heap:
            state = heappop(heap)[-1]
            if state not in layout.groups:
                continue
            run = placer.run(state.free)
            assert run is not None
            each, nodes = run.extend(missing), len(layout.groups[state])
            full = min(nodes, missing // each)
            rest = missing - full * each if full < nodes else 0
            if full:
                then = self._state_with_more(state, unit, each)
                layout.move_nodes(state, full, then)
                push(then)
            if rest:
                layout.move_nodes(state, 1, self._state_with_more(state, unit, rest))
            layout.counts[unit] += full * each + rest
            missing -= full * each + rest

    def _state_with_more(self, state: NodeState, unit: int, workers: int) -> NodeState:
        """The state with the first workers of its placement run."""
        key = ("more", unit, workers)
        found: NodeState | None = state.cache.get(key)
        if found is None:
            run = self.targets[unit].placer.run(state.free)
            assert run is not None
            new = [self.interner.occupant(unit, seats, OccupantStatus.NEW) for seats in run.workers[:workers]]
            found = state.cache[key] = self.interner.with_changes(state, (), new)
        return found

    def _evict_for(self, unit: int, need: int) -> None:
        """Place workers one at a time on the node with the cheapest eviction.

        The cost of a node only rises while others lose workers, so a heap entry that is still valid is the best one.
        More nodes are examined only when no examined node is as cheap as the cheapest so far.
        """
        layout = self.layout
        heap: list[tuple[float, int, int, int, int, NodeState]] = []
        serial = count()

        def push(state: NodeState) -> None:
            eviction = self._cheapest_eviction(state, unit)
            if eviction is not None:
                heappush(heap, (*eviction[:3], layout.groups[state][0], next(serial), state))

        unexamined = iter(list(layout.groups))
        cheapest = math.inf
        while layout.counts[unit] < need:
            while (not heap or heap[0][0] > cheapest) and (some := list(islice(unexamined, STATES_PER_STEP))):
                for state in some:
                    push(state)
                cheapest = min(cheapest, heap[0][0]) if heap else cheapest
            if not heap:
                return
            *key, _, _, state = heappop(heap)
            eviction = self._cheapest_eviction(state, unit) if state in layout.groups else None
            if eviction is not None and key == [*eviction[:3]]:
                push(self._apply_eviction(state, eviction, unit, need))
            if state in layout.groups:
                push(state)

    def _apply_eviction(self, state: NodeState, eviction: Eviction, unit: int, need: int) -> NodeState:
        """Place one worker on each of as many nodes in this state as the spare workers of other units allow."""
        layout = self.layout
        nodes = min(len(layout.groups[state]), need - layout.counts[unit])
        for other, used in eviction.count_spare_used(self._spare_workers(state)).items():
            nodes = min(nodes, (layout.counts[other] - self.needs[other]) // used)
        nodes = max(1, nodes)
        run = self.targets[unit].placer.run(_free_after(state, eviction))
        assert run is not None
        new = self.interner.occupant(unit, run.workers[0], OccupantStatus.NEW)
        then = self.interner.with_changes(state, eviction.evicted, (new,))
        layout.move_nodes(state, nodes, then)
        for occupant in eviction.evicted:
            if occupant.status not in LEAVING_STATUSES:
                layout.counts[occupant.unit] -= nodes
        layout.counts[unit] += nodes
        return then

    def _spare_workers(self, state: NodeState) -> dict[int, int]:
        layout, targets, needs = self.layout, self.targets, self.needs
        return {
            unit: spare
            for unit, here in state.evictable_counts.items()
            if targets[unit].can_release and (spare := min(here, layout.counts[unit] - needs[unit])) > 0
        }

    def _movable_units(self, state: NodeState, unit: int) -> frozenset[int]:
        """Units on the node that come later in the order, so they can be placed elsewhere afterwards."""
        if not self.options.may_move:
            return frozenset()
        return frozenset(
            other
            for other in state.evictable_counts
            if self.rank[other] > self.rank[unit]
            and self.targets[other].can_release
            and self.targets[other].demand.per_node is None
        )

    def _cheapest_eviction(self, state: NodeState, unit: int) -> Eviction | None:
        spare = self._spare_workers(state)
        key = ("way", unit, tuple(spare.items()), self.options.may_move, self.options.order)
        if key not in state.cache:
            target = self.targets[unit]
            run = target.placer.run(state.free)
            state.cache[key] = (
                Eviction(0.0, -run.score, run.tie, ())
                if run is not None
                else cheapest_eviction(
                    state, target.filler, target.placer, EvictionPrices(spare, self._movable_units(state, unit))
                )
            )
        found: Eviction | None = state.cache[key]
        return found

    def _assign_gang(self, unit: int) -> bool:
        """Place one gang on several nodes, which other workers leave if necessary; return whether it fits."""
        layout, filler = self.layout, self.targets[unit].filler
        shape = filler.shape
        cleared: list[tuple[float, int, int, NodeState, Eviction]] = []
        for state, positions in layout.groups.items():
            eviction = self._node_eviction(state, filler, unit)
            if eviction is None:
                continue
            capacity = min(filler.capacity(_free_after(state, eviction)), shape.ranks)
            cleared += [(eviction.cost, -capacity, position, state, eviction) for position in positions if capacity]
        cleared.sort(key=lambda item: item[:3])
        for most in range(1, len(cleared) + 1):
            chosen = deal_ranks(shape.ranks, sorted((item[1], item[2]) for item in cleared[:most]))
            if chosen:
                by_position = {item[2]: item for item in cleared[:most]}
                self._apply_gang(unit, [(by_position[position], ranks) for position, ranks in chosen])
                return True
        return False

    def _node_eviction(self, state: NodeState, filler: NodeFiller, unit: int) -> Eviction | None:
        """Occupants that must leave so that the node is whole, apart from the seats of other runs; None if one of them
        may not leave."""
        others = [one for one in state.occupants if one.status is OccupantStatus.OTHER_RUN]
        if is_whole_node(free_without(state.free, others), filler.shape):
            return Eviction(0.0, 0, 0, ())
        spare = self._spare_workers(state)
        price = EvictionPrices(spare, self._movable_units(state, unit))
        ours = [one for one in state.occupants if one.status is not OccupantStatus.OTHER_RUN]
        leaving = [occupant for occupant in ours if occupant.gpu_milli or not filler.shape.computes_on_gpu]
        asked: dict[int, int] = {}
        for occupant in leaving:
            if price.cost_of(occupant) is None or not price.can_evict(occupant, asked):
                return None
            asked[occupant.unit] = asked.get(occupant.unit, 0) + 1
        eviction = Eviction(price.total_cost(leaving), 0, 0, tuple(leaving))
        return eviction if is_whole_node(free_without(_free_after(state, eviction), others), filler.shape) else None

    def _apply_gang(self, unit: int, chosen: list[tuple[tuple[float, int, int, NodeState, Eviction], int]]) -> None:
        layout, filler = self.layout, self.targets[unit].filler
        seats = []
        for (_, _, position, state, eviction), ranks in chosen:
            parts = _gang_parts(self.interner, filler, unit, _free_after(state, eviction), ranks)
            seats += [(position, part.seats[0]) for part in parts]
            layout.move_node(state, position, self.interner.with_changes(state, eviction.evicted, parts))
            for occupant in eviction.evicted:
                if occupant.status not in LEAVING_STATUSES:
                    layout.counts[occupant.unit] -= 1
        layout.gangs.append(NewGang(unit, tuple(seats)))
        layout.counts[unit] += 1


def _free_after(state: NodeState, eviction: Eviction) -> FreeResources:
    return free_without(state.free, eviction.evicted)


def _gang_parts(interner: Interner, filler: NodeFiller, unit: int, free: FreeResources, ranks: int) -> list[Occupant]:
    """Occupants for some ranks of a gang that runs on several nodes."""
    seats = filler.seats(free, ranks)
    return [interner.occupant(unit, (seat,), OccupantStatus.UNCOUNTED) for seat in seats]


def minimise_changes(layout: Layout, targets: Sequence[UnitTarget], needs: Sequence[int]) -> None:
    """Undo moves that are not needed, keep spare workers whose seats stay free, and stop workers above the limit."""
    _undo_needless_moves(layout)
    limits = [
        target.max_workers if target.unit.per_node is None else need
        for target, need in zip(targets, needs, strict=True)
    ]
    _keep_spare_workers(layout, limits)
    stop_excess_workers(layout, limits, targets)


def _undo_needless_moves(layout: Layout) -> None:
    """Let an evicted worker stay instead of a new one of its unit, where its seats are free after all."""
    units = {
        occupant.unit
        for state in layout.groups
        for occupant in state.evicted
        if occupant.status is OccupantStatus.RUNNING
    }
    for unit in sorted(units):
        for _ in range(MAX_UNDO_PASSES):
            if not _undo_on_nodes(layout, unit):
                break


def _undo_on_nodes(layout: Layout, unit: int) -> bool:
    """Undo moves within a node; return whether there were any."""
    undone = False
    for start in [state for state in layout.groups if any(_is_new(occupant, unit) for occupant in state.occupants)]:
        state = start
        for occupant in start.evicted:
            if occupant.unit != unit or occupant.status is not OccupantStatus.RUNNING:
                continue
            for new in dict.fromkeys(one for one in state.occupants if _is_new(one, unit)):
                if free_with_occupant(free_without(state.free, (new,)), occupant) is not None:
                    then = layout.interner.with_changes(state, (new,), (occupant,))
                    layout.move_nodes(state, len(layout.groups[state]), then)
                    state, undone = then, True
                    break
    return undone


def _is_new(occupant: Occupant, unit: int) -> bool:
    return occupant.unit == unit and occupant.status is OccupantStatus.NEW


def _keep_spare_workers(layout: Layout, limits: Sequence[float]) -> None:
    """Let evicted workers stay whose seats stay free, up to the limits of their units."""
    for state in list(layout.groups):
        now = state
        for occupant in state.evicted:
            if (
                occupant.status is not OccupantStatus.RUNNING
                or now not in layout.groups
                or free_with_occupant(now.free, occupant) is None
            ):
                continue
            nodes = len(layout.groups[now])
            if layout.counts[occupant.unit] + nodes > limits[occupant.unit]:
                nodes = max(0, int(limits[occupant.unit]) - layout.counts[occupant.unit])
            if not nodes:
                continue
            all_nodes = nodes == len(layout.groups[now])
            then = layout.interner.with_changes(now, (), (occupant,))
            layout.move_nodes(now, nodes, then)
            layout.counts[occupant.unit] += nodes
            if all_nodes:
                now = then


def stop_excess_workers(layout: Layout, limits: Sequence[float], targets: Sequence[UnitTarget]) -> None:
    """Stop the workers above the maximum of their unit, one at a time, where fragmentation falls most."""
    for unit, limit in enumerate(limits):
        while (excess := layout.counts[unit] - limit) > 0:
            choice = _stop_choice(layout, unit, targets[unit], int(excess))
            if choice is None:
                break
            state, then, stopped = choice
            nodes = min(len(layout.groups[state]), int(excess) // stopped)
            layout.move_nodes(state, nodes, then)
            layout.counts[unit] -= nodes * stopped


def _stop_choice(layout: Layout, unit: int, target: UnitTarget, excess: int) -> tuple[NodeState, NodeState, int] | None:
    """The state of nodes to stop workers of the unit in, the state afterwards, and the number stopped on each node.

    Workers of one node are stopped for as long as the score is not below the first one: until then no other node has
    a better score.
    """
    score = target.placer.score
    best: tuple[tuple[int, ...], NodeState, NodeState] | None = None
    for state, positions in layout.groups.items():
        then = _stop_one(layout, state, unit, score)
        if then is not None:
            key = (*stop_rank(score, state.free, then.free), positions[-1])
            if best is None or key > best[0]:
                best = (key, state, then)
    if best is None:
        return None
    (first, *_), state, now = best
    stopped = 1
    while stopped < excess:
        then = _stop_one(layout, now, unit, score)
        if then is None or score.change([(now.free, then.free)]) < first:
            break
        now, stopped = then, stopped + 1
    return state, now, stopped


def _stop_one(layout: Layout, state: NodeState, unit: int, score: FragmentationScore) -> NodeState | None:
    """The state without the worker of a unit whose removal lowers fragmentation most; None if none may stop."""
    if unit not in state.evictable_counts:
        return None
    occupants = [
        one for one in dict.fromkeys(state.occupants) if one.unit == unit and one.status is OccupantStatus.RUNNING
    ]
    chosen = max(
        occupants, key=lambda one: (score.change([(state.free, free_without(state.free, (one,)))]), one.number)
    )
    return layout.interner.with_changes(state, (chosen,), ())
