"""Who has to leave a node so that one more worker of a unit fits there, with the fewest changes?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.scheduling.replanning.rooms import LEAVING, Hold, with_sitter, without_sitter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dovetail.resources.free import Free
    from dovetail.scheduling.packing import Filler
    from dovetail.scheduling.replanning.rooms import Room, Sitter

SURPLUS = 1.0
MOVED = 2.0
"""One stop, and one start elsewhere."""
LEAVES_ANYWAY = 0.25
"""Costs no change, but the seat is free only later: so after seats that are free now."""


class Way(NamedTuple):
    """Who leaves, and what that costs."""

    cost: float
    idle_milli: int
    cpu_milli: int
    leave: tuple[Sitter, ...]

    def uses(self, spare: Mapping[int, int]) -> dict[int, int]:
        """Unit -> how many of its spare workers leave."""
        used: dict[int, int] = {}
        for sitter in self.leave:
            if sitter.hold is Hold.OLD and used.get(sitter.unit, 0) < spare.get(sitter.unit, 0):
                used[sitter.unit] = used.get(sitter.unit, 0) + 1
        return used


class Price(NamedTuple):
    """Whom a unit may ask to leave."""

    spare: Mapping[int, int]
    """Unit -> workers of this room above what it needs."""
    movable: frozenset[int]
    """Units whose workers may sit elsewhere instead."""

    def of(self, sitter: Sitter) -> float | None:
        if sitter.hold in LEAVING:
            return LEAVES_ANYWAY
        if sitter.hold is not Hold.OLD:
            return None
        if self.spare.get(sitter.unit, 0) > 0:
            return SURPLUS
        return MOVED if sitter.unit in self.movable else None

    def of_all(self, leave: Iterable[Sitter]) -> float:
        asked: dict[int, int] = {}
        cost = 0.0
        for sitter in leave:
            if sitter.hold in LEAVING:
                cost += LEAVES_ANYWAY
                continue
            asked[sitter.unit] = asked.get(sitter.unit, 0) + 1
            cost += SURPLUS if asked[sitter.unit] <= self.spare.get(sitter.unit, 0) else MOVED
        return cost

    def allows(self, sitter: Sitter, asked: Mapping[int, int]) -> bool:
        """Whether one more of its unit may leave; those who drain or have to go always may."""
        unit = sitter.unit
        return sitter.hold in LEAVING or unit in self.movable or asked.get(unit, 0) < self.spare.get(unit, 0)


def cheapest_way(room: Room, filler: Filler, price: Price) -> Way | None:
    """The fewest who must leave so that one worker fits, or None; of several the one that leaves the least idle."""
    costs = {sitter: cost for sitter in set(room.present) if (cost := price.of(sitter)) is not None}
    asked = [sitter for sitter in room.present if sitter in costs]
    if not asked or filler.room(room.free.cards.kind.untouched()) < filler.shape.ranks:
        return None
    best: Way | None = None
    for order in _orders(room, filler, asked, costs):
        leave = _leave_in(order, room.free, filler, price, costs)
        if leave is None:
            continue
        free = room.free
        for sitter in leave:
            free = without_sitter(free, sitter)
        then = filler.fill(free, filler.shape.ranks).free
        way = Way(price.of_all(leave), then.cards.idle_milli, then.cpu_milli, tuple(leave))
        if best is None or way[:3] < best[:3]:
            best = way
    return best


def _orders(room: Room, filler: Filler, asked: list[Sitter], costs: Mapping[Sitter, float]) -> Iterator[list[Sitter]]:
    """In which order workers may be asked. Card by card, starting with each in turn, because a share needs room on one
    card and a whole card must be empty; beside that, those with the most CPUs first."""

    def by_cpus(sitter: Sitter) -> tuple[float, ...]:
        return (costs[sitter], sitter.gpu_milli, -sitter.cpu_milli, sitter.number)

    if not filler.shape.cards:
        yield sorted(asked, key=by_cpus)
        yield sorted(asked, key=lambda sitter: (costs[sitter], -sitter.cpu_milli, sitter.gpu_milli, sitter.number))
        return
    on_card: dict[int, list[Sitter]] = {}
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


def _leave_in(
    order: list[Sitter], free: Free, filler: Filler, price: Price, costs: Mapping[Sitter, float]
) -> list[Sitter] | None:
    """The first of them until there is room, without those whose leaving turns out not to matter."""
    ranks, room_in = filler.shape.ranks, filler.room
    left = _counted(order)
    asked: dict[int, int] = {}
    leave: list[Sitter] = []
    for sitter in order:
        if not left[sitter] or not price.allows(sitter, asked):
            continue
        left[sitter] -= 1
        free = without_sitter(free, sitter)
        leave.append(sitter)
        if sitter.hold is Hold.OLD:
            asked[sitter.unit] = asked.get(sitter.unit, 0) + 1
        if room_in(free) >= ranks:
            break
    else:
        return None
    for sitter in sorted(leave[:-1], key=lambda sitter: (-costs[sitter], -sitter.gpu_milli, -sitter.cpu_milli)):
        then = with_sitter(free, sitter)
        if then is not None and room_in(then) >= ranks:
            free = then
            leave.remove(sitter)
    return leave


def _counted(order: list[Sitter]) -> dict[Sitter, int]:
    """How often each may be asked: one on two cards is listed under both and still only one worker."""
    times: dict[Sitter, int] = {}
    for sitter in order:
        times[sitter] = times.get(sitter, 0) + 1
    return {sitter: count // max(1, len(sitter.cards)) for sitter, count in times.items()}
