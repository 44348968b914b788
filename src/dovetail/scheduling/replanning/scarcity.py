"""Not every unit can have its least: who is seated?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.scheduling.replanning.seating import Manner, Seating, order_of
from dovetail.scheduling.replanning.upkeep import keep_spares, trim, undo_moves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.replanning.rooms import Floor
    from dovetail.scheduling.replanning.wants import Want
    from dovetail.scheduling.rules import Rules


def as_many_as_fit(start: Floor, wants: Sequence[Want], rules: Rules) -> Floor:
    """As many units as possible with at least one worker, the hardest first; then as much of their least as fits."""
    order, nodes_first = (order_of(wants), "tight") if rules.reserve else (tuple(range(len(wants))), "roomy")
    all_at_once = [want.demand.per_node is not None or not rules.reserve for want in wants]
    ones = [
        want.demand.low if all_of else min(1, want.demand.low) for want, all_of in zip(wants, all_at_once, strict=True)
    ]
    tries = []
    for moves in (False, True) if rules.reserve else (False,):
        floor = start.copy()
        seating = Seating(floor, wants, ones, Manner(order, moves, nodes_first, rules.take_back))
        for unit in order:
            seating.seat(unit, ones[unit])
        tries.append(floor)
    best = max(tries, key=lambda floor: (_seated(floor), -floor.changes))
    needs = list(ones)
    for unit in order:
        for need in range(ones[unit] + 1, wants[unit].demand.low + 1):
            floor = best.copy()
            needs[unit] = need
            if not Seating(floor, wants, needs, Manner(order, moves=False, take_back=rules.take_back)).seat(unit, need):
                needs[unit] = need - 1
                break
            best = floor
    undo_moves(best)
    most = [want.most for want in wants]
    if rules.spares:
        keep_spares(best, most)
    trim(best, most)
    return best


def _seated(floor: Floor) -> int:
    return sum(count > 0 for count in floor.counts)


def on_every_node(floor: Floor, wants: list[Want], rules: Rules) -> list[Want]:
    """Seats units with a number of workers per node, whoever has to leave for that; they then have a fixed count."""
    settled = list(wants)
    for unit in order_of(wants):
        want = wants[unit]
        if want.demand.per_node is None:
            continue
        _on_able_nodes(floor, settled, unit, want.demand.per_node, rules)
        count = floor.counts[unit]
        settled[unit] = replace(want, demand=replace(want.demand, low=count, high=count))
    return settled


def _on_able_nodes(floor: Floor, wants: Sequence[Want], unit: int, each: int, rules: Rules) -> None:
    """Brings every node that could seat this unit to `each` of its workers."""
    filler = wants[unit].filler
    order = (unit, *(other for other in order_of(wants) if other != unit))
    manner = Manner(order, moves=True, take_back=rules.take_back)
    for room in list(floor.rooms):
        if not filler.room(room.free.cards.kind.untouched()):
            continue
        positions = floor.rooms[room]
        alone = floor.one(room, len(wants))
        before = list(alone.counts)
        needs = [min(have, want.demand.per_node or 0) for want, have in zip(wants, before, strict=True)]
        needs[unit] = each
        Seating(alone, wants, needs, manner).seat(unit, each)
        trim(alone, [each if other == unit else float("inf") for other in range(len(wants))])
        then = next(iter(alone.rooms))
        if then is room or alone.gangs:
            continue
        floor.move(room, len(positions), then)
        for other in range(len(wants)):
            floor.counts[other] += len(positions) * (alone.counts[other] - before[other])
