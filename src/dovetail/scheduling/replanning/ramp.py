"""Which units get a worker although no measured rate asks for it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.shape import ShapeKind
from dovetail.scheduling.demand import needed
from dovetail.scheduling.replanning.seating import Manner, Seating, order_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.replanning.rooms import Floor
    from dovetail.scheduling.replanning.wants import Want
    from dovetail.scheduling.rules import Rules

GIVEN_UP = (1.0, 0.75, 0.5)
WHOLE = (ShapeKind.WHOLE_NUMBERED_GPU, ShapeKind.ENTIRE_GPU)


def one_more_each(floor: Floor, wants: Sequence[Want], rate: float, rules: Rules) -> tuple[Floor, list[str]]:
    """One more worker for every ramping unit that can have it from what is free or spare, and why others cannot."""
    words = []
    for unit in order_of(wants):
        want = wants[unit]
        if not want.ramps:
            continue
        count = floor.counts[unit] + 1
        then = _one_more(floor, wants, unit, rate, rules)
        if then is None:
            words.append(f"{want.unit.name} is backlogged and not measured yet, but there is no room for one more")
        elif rules.reserve and (whole := _left_without_card(floor, then, wants, unit, rate, rules)):
            words.append(f"{want.unit.name} is not measured yet: the last free whole card stays for {whole}")
        else:
            words.append(f"{want.unit.name} is backlogged and not measured yet: one more worker, {count} in all")
            floor = then
    return floor, words


def _one_more(floor: Floor, wants: Sequence[Want], unit: int, rate: float, rules: Rules) -> Floor | None:
    """One more worker of a unit, from what is free, else from what others can spare for as little of the rate as need
    be: with a backlogged unit of unknown speed, that rate is a guess."""
    for share in GIVEN_UP:
        then = floor.copy()
        needs = [min(other.count(rate * share), have) for other, have in zip(wants, floor.counts, strict=True)]
        needs[unit] = floor.counts[unit] + 1
        manner = Manner(order_of(wants), moves=False, take_back=rules.take_back)
        if Seating(then, wants, needs, manner).seat(unit, needs[unit]):
            return then
    return None


def _left_without_card(before: Floor, after: Floor, wants: Sequence[Want], unit: int, rate: float, rules: Rules) -> str:
    """The name of a whole-GPU unit that may soon need a card and could have had one, had this one not come."""
    if wants[unit].unit.shape.kind in WHOLE:
        return ""
    for number, want in enumerate(wants):
        if want.unit.shape.kind not in WHOLE or want.unit.finished or after.counts[number] >= want.most:
            continue
        slowest = want.limits and after.counts[number] * want.demand.speed <= rate * (1 + 1e-9)
        growing = not want.limits or want.unit.sure < rules.unsure_below or slowest
        if growing and _has_room(before, want) and not _has_room(after, want):
            return want.unit.name
    return ""


def _has_room(floor: Floor, want: Want) -> bool:
    return any(want.filler.room(room.free) >= want.unit.shape.ranks for room in floor.rooms)


def with_headroom(floor: Floor, wants: Sequence[Want], rate: float, factor: float) -> Floor:
    """More workers, from what is free, for measured units below `factor` times the slowest; the slowest first."""
    floor = floor.copy()
    seating = Seating(floor, wants, floor.counts, Manner(order_of(wants), moves=False))
    for unit in sorted(range(len(wants)), key=lambda unit: (floor.counts[unit] * wants[unit].demand.speed, unit)):
        want = wants[unit]
        if want.limits and want.demand.per_node is None:
            seating.where_there_is_room(unit, int(min(needed(want.demand, rate * factor), want.most)))
    return floor
