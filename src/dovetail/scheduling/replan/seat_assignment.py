"""Seat assignment of worker counts to a running layout with few changes: free space first, then evictions.

The hardest to seat come first. Each sits where there is room, else where the fewest have to leave: spare workers of
other units, or workers that are easier to seat, which then are seated elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from dovetail.scheduling.placement import deal_ranks, is_whole_node, tightness
from dovetail.scheduling.replan.layout import (
    LEAVING_STATUSES,
    OTHER_RUN,
    UNMANAGED,
    NewGang,
    OccupantStatus,
    free_with_occupant,
    free_without_occupant,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.scheduling.packing import NodeFiller
    from dovetail.scheduling.placement import GroupPlacer
    from dovetail.scheduling.replan.layout import Interner, Layout, NodeState, Occupant
    from dovetail.scheduling.replan.targets import UnitTarget

SURPLUS_COST = 1.0
MOVE_COST = 2.0
"""One stop, and one start elsewhere."""
LEAVING_COST = 0.25
"""Costs no change, but the seat is free only later: so after seats that are free now."""


class Eviction(NamedTuple):
    """Who leaves, and what that costs."""

    cost: float
    negative_score: int
    """Minus the fragmentation score of the change."""
    tie: int
    evicted: tuple[Occupant, ...]

    def count_spare_used(self, spare: Mapping[int, int]) -> dict[int, int]:
        """Unit -> how many of its spare workers leave."""
        used: dict[int, int] = {}
        for sitter in self.evicted:
            if sitter.status is OccupantStatus.RUNNING and used.get(sitter.unit, 0) < spare.get(sitter.unit, 0):
                used[sitter.unit] = used.get(sitter.unit, 0) + 1
        return used


class EvictionPrices(NamedTuple):
    """Whom a unit may ask to leave."""

    spare: Mapping[int, int]
    """Unit -> workers of this room above what it needs."""
    movable: frozenset[int]
    """Units whose workers may sit elsewhere instead."""

    def cost_of(self, sitter: Occupant) -> float | None:
        if sitter.status in LEAVING_STATUSES:
            return LEAVING_COST
        if sitter.status is not OccupantStatus.RUNNING:
            return None
        if self.spare.get(sitter.unit, 0) > 0:
            return SURPLUS_COST
        return MOVE_COST if sitter.unit in self.movable else None

    def total_cost(self, leave: Iterable[Occupant]) -> float:
        asked: dict[int, int] = {}
        cost = 0.0
        for sitter in leave:
            if sitter.status in LEAVING_STATUSES:
                cost += LEAVING_COST
                continue
            asked[sitter.unit] = asked.get(sitter.unit, 0) + 1
            cost += SURPLUS_COST if asked[sitter.unit] <= self.spare.get(sitter.unit, 0) else MOVE_COST
        return cost

    def can_evict(self, sitter: Occupant, asked: Mapping[int, int]) -> bool:
        """Whether one more of its unit may leave; those who drain or have to go always may."""
        unit = sitter.unit
        return sitter.status in LEAVING_STATUSES or unit in self.movable or asked.get(unit, 0) < self.spare.get(unit, 0)


def cheapest_eviction(
    room: NodeState, filler: NodeFiller, placer: GroupPlacer, price: EvictionPrices
) -> Eviction | None:
    """The cheapest set of workers to stop so that one worker fits, or None; of several the one that fragments least."""
    costs = {sitter: cost for sitter in set(room.occupants) if (cost := price.cost_of(sitter)) is not None}
    asked = [sitter for sitter in room.occupants if sitter in costs]
    if not asked or filler.capacity(room.free.cards.kind.untouched()) < filler.shape.ranks:
        return None
    best: Eviction | None = None
    for order in _eviction_orders(room, filler, asked, costs):
        leave = _evict_in_order(order, room.free, filler, price, costs)
        if leave is None:
            continue
        free = room.free
        for sitter in leave:
            free = free_without_occupant(free, sitter)
        then = placer.free_after_one(free)
        if then is None:
            continue
        score = placer.score.change([(room.free, then)])
        way = Eviction(price.total_cost(leave), -score, tightness(then), tuple(leave))
        if best is None or way[:3] < best[:3]:
            best = way
    return best


def _eviction_orders(
    room: NodeState, filler: NodeFiller, asked: list[Occupant], costs: Mapping[Occupant, float]
) -> Iterator[list[Occupant]]:
    """In which order workers may be asked. Card by card, starting with each in turn, because a share needs room on one
    card and a whole card must be empty; beside that, those with the most CPUs first."""

    def by_cpus(sitter: Occupant) -> tuple[float, ...]:
        return (costs[sitter], sitter.gpu_milli, -sitter.cpu_milli, sitter.number)

    if not filler.shape.cards:
        yield sorted(asked, key=by_cpus)
        yield sorted(asked, key=lambda sitter: (costs[sitter], -sitter.cpu_milli, sitter.gpu_milli, sitter.number))
        return
    on_card: dict[int, list[Occupant]] = {}
    for sitter in asked:
        for card in sitter.cards:
            on_card.setdefault(card, []).append(sitter)
    clearing = {card: (sum(costs[sitter] for sitter in there), card) for card, there in on_card.items()}
    cards = sorted(on_card, key=clearing.__getitem__)
    without_cards = sorted((sitter for sitter in asked if not sitter.cards), key=by_cpus)
    seen = set()
    for first in cards:
        alike = (room.free.cards.free[first], tuple(sitter.number for sitter in on_card[first]))
        if alike in seen:
            continue
        seen.add(alike)
        here = sorted(on_card[first], key=lambda sitter: (costs[sitter], -sitter.gpu_milli, sitter.number))
        others = [sitter for card in cards if card != first for sitter in on_card[card]]
        yield [*here, *without_cards, *others] if filler.shape.cards == 1 else [*here, *others, *without_cards]
        if filler.shape.cards > 1 and len(cards) == filler.shape.cards:
            return
    yield [*without_cards, *(sitter for card in cards for sitter in on_card[card])]


def _evict_in_order(
    order: list[Occupant],
    free: FreeResources,
    filler: NodeFiller,
    price: EvictionPrices,
    costs: Mapping[Occupant, float],
) -> list[Occupant] | None:
    """The first of them until there is room, without those whose leaving turns out not to matter."""
    ranks, room_in = filler.shape.ranks, filler.capacity
    left = _count_occupants(order)
    asked: dict[int, int] = {}
    leave: list[Occupant] = []
    for sitter in order:
        if not left[sitter] or not price.can_evict(sitter, asked):
            continue
        left[sitter] -= 1
        free = free_without_occupant(free, sitter)
        leave.append(sitter)
        if sitter.status is OccupantStatus.RUNNING:
            asked[sitter.unit] = asked.get(sitter.unit, 0) + 1
        if room_in(free) >= ranks:
            break
    else:
        return None
    for sitter in sorted(leave[:-1], key=lambda sitter: (-costs[sitter], -sitter.gpu_milli, -sitter.cpu_milli)):
        then = free_with_occupant(free, sitter)
        if then is not None and room_in(then) >= ranks:
            free = then
            leave.remove(sitter)
    return leave


def _count_occupants(order: list[Occupant]) -> dict[Occupant, int]:
    """How often each may be asked: one on two cards is listed under both and still only one worker."""
    times: dict[Occupant, int] = {}
    for sitter in order:
        times[sitter] = times.get(sitter, 0) + 1
    return {sitter: count // max(1, len(sitter.cards)) for sitter, count in times.items()}


STATES_PER_STEP = 128


@dataclass(frozen=True, slots=True)
class AssignmentOptions:
    """One way of seating: which unit first, and whether workers may be moved."""

    order: tuple[int, ...]
    may_move: bool = True
    take_back: bool = True


def hardest_first(wants: Sequence[UnitTarget]) -> tuple[int, ...]:
    """The units, those that are hardest to seat first."""
    return tuple(sorted(range(len(wants)), key=lambda unit: ([-part for part in wants[unit].difficulty], unit)))


class SeatAssignment:
    """Seats counts on a floor that it changes."""

    def __init__(
        self, floor: Layout, wants: Sequence[UnitTarget], needs: Sequence[int], manner: AssignmentOptions
    ) -> None:
        self.layout = floor
        self.interner: Interner = floor.interner
        self.targets = wants
        self.needs = needs
        self.options = manner
        self.rank = {unit: number for number, unit in enumerate(manner.order)}

    def assign_all(self) -> bool:
        """Whether every unit has what it needs; stops at the first that has not."""
        seated = all(self.assign(unit, self.needs[unit]) for unit in self.options.order)
        return seated and all(have >= need for have, need in zip(self.layout.counts, self.needs, strict=True))

    def assign(self, unit: int, need: int) -> bool:
        """Brings a unit up to so many workers, as far as that goes; whether it went all the way."""
        if self.options.take_back:
            self._cancel_drains(unit, need)
        self.use_free_space(unit, need)
        if self.layout.counts[unit] < need:
            self._evict_for(unit, need)
        if self.targets[unit].unit.shape.ranks > 1:
            while self.layout.counts[unit] < need and self._assign_gang(unit):
                pass
        return self.layout.counts[unit] >= need

    def _cancel_drains(self, unit: int, need: int) -> None:
        floor, house = self.layout, self.interner
        for room in list(floor.groups):
            draining = [s for s in room.occupants if s.unit == unit and s.status is OccupantStatus.DRAINING]
            for sitter in draining:
                nodes = min(len(floor.groups.get(room, ())), need - floor.counts[unit])
                if nodes <= 0:
                    break
                then = house.with_status(
                    room, sitter, house.occupant(unit, sitter.seats, OccupantStatus.DRAIN_CANCELLED)
                )
                whole = nodes == len(floor.groups[room])
                floor.move_nodes(room, nodes, then)
                floor.counts[unit] += nodes
                if not whole:
                    break
                room = then

    def use_free_space(self, unit: int, need: int) -> None:
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
        """The state with the first workers of its run."""
        key = ("more", unit, workers)
        found: NodeState | None = state.cache.get(key)
        if found is None:
            run = self.targets[unit].placer.run(state.free)
            assert run is not None
            new = [self.interner.occupant(unit, seats, OccupantStatus.NEW) for seats in run.workers[:workers]]
            found = state.cache[key] = self.interner.with_changes(state, (), new)
        return found

    def _evict_for(self, unit: int, need: int) -> None:
        """Worker by worker on the nodes where it costs the fewest changes.

        What a node costs only rises while others give workers, so an entry of the heap that still holds is the best.
        Further nodes are looked at only when no node is left that costs as little as the cheapest so far.
        """
        floor = self.layout
        heap: list[tuple[float, int, int, int, int, NodeState]] = []
        serial = count()

        def push(room: NodeState) -> None:
            way = self._cheapest_eviction(room, unit)
            if way is not None:
                heappush(heap, (*way[:3], floor.groups[room][0], next(serial), room))

        unseen = iter(list(floor.groups))
        cheapest = math.inf
        while floor.counts[unit] < need:
            while (not heap or heap[0][0] > cheapest) and (some := list(islice(unseen, STATES_PER_STEP))):
                for room in some:
                    push(room)
                cheapest = min(cheapest, heap[0][0]) if heap else cheapest
            if not heap:
                return
            *key, _, _, room = heappop(heap)
            way = self._cheapest_eviction(room, unit) if room in floor.groups else None
            if way is not None and key == [*way[:3]]:
                push(self._apply_eviction(room, way, unit, need))
            if room in floor.groups:
                push(room)

    def _apply_eviction(self, room: NodeState, way: Eviction, unit: int, need: int) -> NodeState:
        """One worker on as many alike nodes as the spare workers of others allow."""
        floor = self.layout
        nodes = min(len(floor.groups[room]), need - floor.counts[unit])
        for other, used in way.count_spare_used(self._spare_workers(room)).items():
            nodes = min(nodes, (floor.counts[other] - self.needs[other]) // used)
        nodes = max(1, nodes)
        run = self.targets[unit].placer.run(_free_after(room, way))
        assert run is not None
        new = self.interner.occupant(unit, run.workers[0], OccupantStatus.NEW)
        then = self.interner.with_changes(room, way.evicted, (new,))
        floor.move_nodes(room, nodes, then)
        for sitter in way.evicted:
            if sitter.status not in LEAVING_STATUSES:
                floor.counts[sitter.unit] -= nodes
        floor.counts[unit] += nodes
        return then

    def _spare_workers(self, room: NodeState) -> dict[int, int]:
        floor, wants, needs = self.layout, self.targets, self.needs
        return {
            unit: spare
            for unit, here in room.evictable_counts.items()
            if wants[unit].can_release and (spare := min(here, floor.counts[unit] - needs[unit])) > 0
        }

    def _movable_units(self, room: NodeState, unit: int) -> frozenset[int]:
        """The units there that come later, and so can be seated elsewhere afterwards."""
        if not self.options.may_move:
            return frozenset()
        return frozenset(
            other
            for other in room.evictable_counts
            if self.rank[other] > self.rank[unit]
            and self.targets[other].can_release
            and self.targets[other].demand.per_node is None
        )

    def _cheapest_eviction(self, room: NodeState, unit: int) -> Eviction | None:
        spare = self._spare_workers(room)
        key = ("way", unit, tuple(spare.items()), self.options.may_move, self.options.order)
        if key not in room.cache:
            target = self.targets[unit]
            run = target.placer.run(room.free)
            room.cache[key] = (
                Eviction(0.0, -run.score, run.tie, ())
                if run is not None
                else cheapest_eviction(
                    room, target.filler, target.placer, EvictionPrices(spare, self._movable_units(room, unit))
                )
            )
        found: Eviction | None = room.cache[key]
        return found

    def _assign_gang(self, unit: int) -> bool:
        """One gang over several nodes, which others leave if they must."""
        floor, filler = self.layout, self.targets[unit].filler
        shape = filler.shape
        cleared: list[tuple[float, int, int, NodeState, Eviction]] = []
        for room, positions in floor.groups.items():
            way = self._node_eviction(room, filler, unit)
            if way is None:
                continue
            room_for = min(filler.capacity(_free_after(room, way)), shape.ranks)
            cleared += [(way.cost, -room_for, position, room, way) for position in positions if room_for]
        cleared.sort(key=lambda item: item[:3])
        for most in range(1, len(cleared) + 1):
            chosen = deal_ranks(shape.ranks, sorted((item[1], item[2]) for item in cleared[:most]))
            if chosen:
                by_position = {item[2]: item for item in cleared[:most]}
                self._apply_gang(unit, [(by_position[position], ranks) for position, ranks in chosen])
                return True
        return False

    def _node_eviction(self, room: NodeState, filler: NodeFiller, unit: int) -> Eviction | None:
        """All who must leave so that the node is whole, but for what others than this run hold; only spare ones may,
        and those easier to seat."""
        others = [sitter for sitter in room.occupants if sitter.unit == OTHER_RUN]
        if is_whole_node(_free_without(room.free, others), filler.shape):
            return Eviction(0.0, 0, 0, ())
        spare = self._spare_workers(room)
        price = EvictionPrices(spare, self._movable_units(room, unit))
        ours = [sitter for sitter in room.occupants if sitter.unit != OTHER_RUN]
        leave = [sitter for sitter in ours if sitter.gpu_milli or not filler.shape.computes_on_gpu]
        asked: dict[int, int] = {}
        for sitter in leave:
            if price.cost_of(sitter) is None or not price.can_evict(sitter, asked):
                return None
            asked[sitter.unit] = asked.get(sitter.unit, 0) + 1
        way = Eviction(price.total_cost(leave), 0, 0, tuple(leave))
        return way if is_whole_node(_free_without(_free_after(room, way), others), filler.shape) else None

    def _apply_gang(self, unit: int, chosen: list[tuple[tuple[float, int, int, NodeState, Eviction], int]]) -> None:
        floor, filler = self.layout, self.targets[unit].filler
        seats = []
        for (_, _, position, room, way), ranks in chosen:
            parts = gang_parts(self.interner, filler, _free_after(room, way), ranks)
            seats += [(position, part.seats[0]) for part in parts]
            floor.move_node(room, position, self.interner.with_changes(room, way.evicted, parts))
            for sitter in way.evicted:
                if sitter.status not in LEAVING_STATUSES:
                    floor.counts[sitter.unit] -= 1
        floor.gangs.append(NewGang(unit, tuple(seats)))
        floor.counts[unit] += 1


def _free_after(room: NodeState, way: Eviction) -> FreeResources:
    return _free_without(room.free, way.evicted)


def _free_without(free: FreeResources, sitters: Iterable[Occupant]) -> FreeResources:
    for sitter in sitters:
        free = free_without_occupant(free, sitter)
    return free


def gang_parts(interner: Interner, filler: NodeFiller, free: FreeResources, ranks: int) -> list[Occupant]:
    """Occupants for some ranks of a gang that runs on several nodes."""
    ways = [way for way, times in filler.fill(free, ranks).assignments for _ in range(times)]
    return [interner.occupant(UNMANAGED, (filler.fit.seat("", way),), OccupantStatus.FIXED) for way in ways]
