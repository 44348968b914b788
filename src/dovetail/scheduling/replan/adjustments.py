"""Adjustments to a layout: undo needless moves, keep spare workers, place minimums when space is scarce, ramp up
unmeasured units."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.resources.shape import ShapeKind
from dovetail.scheduling.demand import workers_needed
from dovetail.scheduling.placement import tightness
from dovetail.scheduling.replan.layout import OccupantStatus, free_with_occupant, free_without_occupant
from dovetail.scheduling.replan.seat_assignment import AssignmentOptions, SeatAssignment, hardest_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.placement import FragmentationScore
    from dovetail.scheduling.replan.layout import Layout, NodeState, Occupant
    from dovetail.scheduling.replan.snapshot import ReplanRules
    from dovetail.scheduling.replan.targets import UnitTarget

MAX_UNDO_PASSES = 3


def undo_needless_moves(floor: Layout) -> None:
    """A worker that was told to leave, and whose seat is free after all, stays instead of one that is to be started."""
    units = {sitter.unit for room in floor.groups for sitter in room.evicted if sitter.status is OccupantStatus.RUNNING}
    for unit in sorted(units):
        for _ in range(MAX_UNDO_PASSES):
            if not _undo_on_nodes(floor, unit) and not _undo_between_nodes(floor, unit):
                break


def _undo_on_nodes(floor: Layout, unit: int) -> bool:
    """Where one leaves and another of the same unit comes to the same node; whether any such move was undone."""
    undone = False
    for start in [room for room in floor.groups if any(_is_new(sitter, unit) for sitter in room.occupants)]:
        room = start
        for sitter in start.evicted:
            if sitter.unit != unit or sitter.status is not OccupantStatus.RUNNING:
                continue
            for new in dict.fromkeys(s for s in room.occupants if _is_new(s, unit)):
                if free_with_occupant(free_without_occupant(room.free, new), sitter) is not None:
                    then = floor.interner.with_changes(room, (new,), (sitter,))
                    floor.move_nodes(room, len(floor.groups[room]), then)
                    room, undone = then, True
                    break
    return undone


def _undo_between_nodes(floor: Layout, unit: int) -> bool:
    """Where one leaves, its seat is free, and another of its unit comes to another node; whether any was undone."""
    started = [room for room in floor.groups if any(_is_new(sitter, unit) for sitter in room.occupants)]
    undone = False
    for start in [room for room in floor.groups if any(sitter.unit == unit for sitter in room.evicted)]:
        if start in started:
            continue
        room = start
        for sitter in start.evicted:
            if (
                sitter.unit != unit
                or sitter.status is not OccupantStatus.RUNNING
                or free_with_occupant(room.free, sitter) is None
            ):
                continue
            while started and room in floor.groups:
                other = started[-1]
                nodes = min(len(floor.groups[room]), len(floor.groups[other]))
                whole, all_of_other = nodes == len(floor.groups[room]), nodes == len(floor.groups[other])
                then = floor.interner.with_changes(room, (), (sitter,))
                floor.move_nodes(room, nodes, then)
                new = next(s for s in other.occupants if _is_new(s, unit))
                fewer = floor.interner.with_changes(other, (new,), ())
                floor.move_nodes(other, nodes, fewer)
                undone = True
                if all_of_other:
                    started.pop()
                if any(_is_new(s, unit) for s in fewer.occupants) and fewer not in started:
                    started.insert(0, fewer)
                if whole:
                    room = then
                    break
    return undone


def _is_new(sitter: Occupant, unit: int) -> bool:
    return sitter.unit == unit and sitter.status is OccupantStatus.NEW


def keep_spare_workers(floor: Layout, most: Sequence[float]) -> None:
    """Those who were told to leave and whose seat nobody took stay, as far as their unit may have them."""
    for room in list(floor.groups):
        now = room
        for sitter in room.evicted:
            if (
                sitter.status is not OccupantStatus.RUNNING
                or now not in floor.groups
                or free_with_occupant(now.free, sitter) is None
            ):
                continue
            nodes = len(floor.groups[now])
            if floor.counts[sitter.unit] + nodes > most[sitter.unit]:
                nodes = max(0, int(most[sitter.unit]) - floor.counts[sitter.unit])
            if not nodes:
                continue
            whole = nodes == len(floor.groups[now])
            then = floor.interner.with_changes(now, (), (sitter,))
            floor.move_nodes(now, nodes, then)
            floor.counts[sitter.unit] += nodes
            if whole:
                now = then


def stop_excess_workers(layout: Layout, most: Sequence[float], targets: Sequence[UnitTarget]) -> None:
    """Stop the workers above the maximum of their unit, one at a time, where fragmentation falls most."""
    for unit, limit in enumerate(most):
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
            key = (score.change([(state.free, then.free)]), tightness(state.free), positions[-1])
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
    occupants = [s for s in dict.fromkeys(state.occupants) if s.unit == unit and s.status is OccupantStatus.RUNNING]
    chosen = max(
        occupants, key=lambda s: (score.change([(state.free, free_without_occupant(state.free, s))]), s.number)
    )
    return layout.interner.with_changes(state, (chosen,), ())


def place_minimums(start: Layout, wants: Sequence[UnitTarget], rules: ReplanRules) -> Layout:
    """As many units as possible with at least one worker, the hardest first; then as much of their least as fits."""
    order = hardest_first(wants) if rules.reserve else tuple(range(len(wants)))
    all_at_once = [want.demand.per_node is not None or not rules.reserve for want in wants]
    ones = [
        want.demand.low if all_of else min(1, want.demand.low) for want, all_of in zip(wants, all_at_once, strict=True)
    ]
    tries = []
    for moves in (False, True) if rules.reserve else (False,):
        floor = start.copy()
        seating = SeatAssignment(floor, wants, ones, AssignmentOptions(order, moves, rules.take_back))
        for unit in order:
            seating.assign(unit, ones[unit])
        tries.append(floor)
    best = max(tries, key=lambda floor: (_count_staffed_units(floor), -floor.changes))
    needs = list(ones)
    for unit in order:
        for need in range(ones[unit] + 1, wants[unit].demand.low + 1):
            floor = best.copy()
            needs[unit] = need
            if not SeatAssignment(
                floor, wants, needs, AssignmentOptions(order, may_move=False, take_back=rules.take_back)
            ).assign(unit, need):
                needs[unit] = need - 1
                break
            best = floor
    undo_needless_moves(best)
    most = [want.max_workers for want in wants]
    if rules.spares:
        keep_spare_workers(best, most)
    stop_excess_workers(best, most, wants)
    return best


def _count_staffed_units(floor: Layout) -> int:
    return sum(count > 0 for count in floor.counts)


def place_per_node_units(floor: Layout, wants: list[UnitTarget], rules: ReplanRules) -> list[UnitTarget]:
    """Seats units with a number of workers per node, whoever has to leave for that; they then have a fixed count."""
    settled = list(wants)
    for unit in hardest_first(wants):
        want = wants[unit]
        if want.demand.per_node is None:
            continue
        _place_on_eligible_nodes(floor, settled, unit, want.demand.per_node, rules)
        count = floor.counts[unit]
        settled[unit] = replace(want, demand=replace(want.demand, low=count, high=count))
    return settled


def _place_on_eligible_nodes(
    floor: Layout, wants: Sequence[UnitTarget], unit: int, each: int, rules: ReplanRules
) -> None:
    """Brings every node that could seat this unit to `each` of its workers."""
    filler = wants[unit].filler
    order = (unit, *(other for other in hardest_first(wants) if other != unit))
    manner = AssignmentOptions(order, may_move=True, take_back=rules.take_back)
    for room in list(floor.groups):
        if not filler.capacity(room.free.cards.kind.untouched()):
            continue
        positions = floor.groups[room]
        alone = floor.single_node(room, len(wants))
        before = list(alone.counts)
        needs = [min(have, want.demand.per_node or 0) for want, have in zip(wants, before, strict=True)]
        needs[unit] = each
        SeatAssignment(alone, wants, needs, manner).assign(unit, each)
        stop_excess_workers(alone, [each if other == unit else float("inf") for other in range(len(wants))], wants)
        then = next(iter(alone.groups))
        if then is room or alone.gangs:
            continue
        floor.move_nodes(room, len(positions), then)
        for other in range(len(wants)):
            floor.counts[other] += len(positions) * (alone.counts[other] - before[other])


RATE_SHARES_TRIED = (1.0, 0.75, 0.5)
WHOLE_GPU_KINDS = (ShapeKind.WHOLE_NUMBERED_GPU, ShapeKind.ENTIRE_GPU)


def ramp_unmeasured_units(
    floor: Layout, wants: Sequence[UnitTarget], rate: float, rules: ReplanRules
) -> tuple[Layout, list[str]]:
    """One more worker for every ramping unit that can have it from what is free or spare, and why others cannot."""
    words = []
    for unit in hardest_first(wants):
        want = wants[unit]
        if not want.is_ramping:
            continue
        count = floor.counts[unit] + 1
        then = _add_one_worker(floor, wants, unit, rate, rules)
        if then is None:
            words.append(f"{want.unit.name} is backlogged and not measured yet, but there is no room for one more")
        elif rules.reserve and (whole := _unit_without_card(floor, then, wants, unit, rate, rules)):
            words.append(f"{want.unit.name} is not measured yet: the last free whole card stays for {whole}")
        else:
            words.append(f"{want.unit.name} is backlogged and not measured yet: one more worker, {count} in all")
            floor = then
    return floor, words


def _add_one_worker(
    floor: Layout, wants: Sequence[UnitTarget], unit: int, rate: float, rules: ReplanRules
) -> Layout | None:
    """One more worker of a unit, from what is free, else from what others can spare for as little of the rate as need
    be: with a backlogged unit of unknown speed, that rate is a guess."""
    for share in RATE_SHARES_TRIED:
        then = floor.copy()
        needs = [min(other.workers_for(rate * share), have) for other, have in zip(wants, floor.counts, strict=True)]
        needs[unit] = floor.counts[unit] + 1
        manner = AssignmentOptions(hardest_first(wants), may_move=False, take_back=rules.take_back)
        if SeatAssignment(then, wants, needs, manner).assign(unit, needs[unit]):
            return then
    return None


def _unit_without_card(
    before: Layout, after: Layout, wants: Sequence[UnitTarget], unit: int, rate: float, rules: ReplanRules
) -> str:
    """The name of a whole-GPU unit that may soon need a card and could have had one, had this one not come."""
    if wants[unit].unit.shape.kind in WHOLE_GPU_KINDS:
        return ""
    for number, want in enumerate(wants):
        if (
            want.unit.shape.kind not in WHOLE_GPU_KINDS
            or want.unit.finished
            or after.counts[number] >= want.max_workers
        ):
            continue
        slowest = want.limits_rate and after.counts[number] * want.demand.speed <= rate * (1 + 1e-9)
        growing = not want.limits_rate or want.unit.confidence < rules.unsure_below or slowest
        if growing and _has_space(before, want) and not _has_space(after, want):
            return want.unit.name
    return ""


def _has_space(floor: Layout, want: UnitTarget) -> bool:
    return any(want.filler.capacity(room.free) >= want.unit.shape.ranks for room in floor.groups)


def add_headroom_workers(floor: Layout, wants: Sequence[UnitTarget], rate: float, factor: float) -> Layout:
    """More workers, from what is free, for measured units below `factor` times the slowest; the slowest first."""
    floor = floor.copy()
    seating = SeatAssignment(floor, wants, floor.counts, AssignmentOptions(hardest_first(wants), may_move=False))
    for unit in sorted(range(len(wants)), key=lambda unit: (floor.counts[unit] * wants[unit].demand.speed, unit)):
        want = wants[unit]
        if want.limits_rate and want.demand.per_node is None:
            seating.use_free_space(unit, int(min(workers_needed(want.demand, rate * factor), want.max_workers)))
    return floor
