"""Replan of a running pipeline in numbered steps. Pure: equal snapshots give equal replans.

Snapshot ─▶ current layout ─▶ unit targets ─▶ candidate layouts ─▶ selected layout ─▶ starts and stops
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.shape import ShapeKind
from dovetail.scheduling.demand import MAX_SPEED
from dovetail.scheduling.replan.candidates import candidate_layouts
from dovetail.scheduling.replan.cost_benefit import ReplanRules, limiting_rate, score_layout, select_layout
from dovetail.scheduling.replan.layout import LayoutDiff, layout_from_snapshot
from dovetail.scheduling.replan.seat_assignment import (
    AssignmentOptions,
    SeatAssignment,
    hardest_first,
    minimise_changes,
    stop_excess_workers,
)
from dovetail.scheduling.replan.snapshot import Replan
from dovetail.scheduling.replan.targets import unit_targets
from dovetail.text_format import format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.packing import NodeGroups
    from dovetail.scheduling.replan.candidates import SizingCache
    from dovetail.scheduling.replan.cost_benefit import ScoredLayout
    from dovetail.scheduling.replan.layout import InitialLayout, Layout, NewGang
    from dovetail.scheduling.replan.snapshot import Snapshot
    from dovetail.scheduling.replan.targets import UnitTarget

__all__ = ["ReplanRules", "replan"]

MAX_IMPROVEMENT_ROUNDS = 4
"""The selected layout is improved until nothing changes, so that the next replan changes nothing either."""
RATE_SHARES_TRIED = (1.0, 0.75, 0.5)
"""Shares of the rate that other units must still reach when one of them gives a worker to an unmeasured unit."""
WHOLE_GPU_KINDS = (ShapeKind.WHOLE_NUMBERED_GPU, ShapeKind.ENTIRE_GPU)
DEFAULT_RULES = ReplanRules()


def replan(snapshot: Snapshot, rules: ReplanRules = DEFAULT_RULES) -> Replan:
    """Decide which workers to start and to stop.

    1. Read the current layout from the snapshot.
    2. Derive the targets of each unit, worker limits and speed, from its rate and its queue.
    3. Place the units that have a fixed number of workers on every node.
    4. Collect candidate layouts in which every unit has its minimum. If there is none, repeat 1 to 4 without the
       workers that were kept in step 1, then without gangs that can be spared.
    5. Select the candidate that pays within the horizon and improve it until nothing changes. Without a candidate,
       place as many minimums as fit.
    6. Add one worker to each backlogged unit without a rate.
    7. Compare the result with the current layout: starts, stops and cancelled drains.

    Never raises for a snapshot whose workers fit on their nodes.
    """
    cache: SizingCache = {}
    keep_last_workers = True
    stopped_gangs: frozenset[int] = frozenset()
    while True:
        initial = layout_from_snapshot(snapshot, stopped_gangs, keep_last_workers=keep_last_workers)
        targets = unit_targets(snapshot, initial.layout.counts, rules)
        start, targets = place_per_node_units(initial.layout, targets)
        candidates = candidate_layouts(start, initial.empty, targets, rules, cache)
        spare_gang = _spare_gang(initial, targets)
        if candidates or not (keep_last_workers or spare_gang):
            break
        if not keep_last_workers:
            stopped_gangs |= spare_gang
        keep_last_workers = False
    rate_before = limiting_rate(targets, initial.layout.counts)
    if candidates:
        selected = select_and_improve(candidates, initial.empty, targets, rate_before, snapshot, rules, cache)
    else:
        selected = place_minimums(start, targets)
    layout, ramp_lines = ramp_unmeasured_units(selected.layout, targets, rules)
    rate_after = limiting_rate(targets, layout.counts)
    diff = LayoutDiff(initial, targets, layout, [*selected.gangs, *layout.gangs], rate_after)
    bottleneck = _slowest_unit(targets, layout.counts)
    return Replan(
        starts=tuple(diff.starts()),
        stops=tuple(diff.stops()),
        cancelled_drains=tuple(diff.cancelled_drains()),
        rate_before=rate_before if math.isfinite(rate_before) else 0.0,
        rate_after=rate_after if math.isfinite(rate_after) else 0.0,
        bottleneck=bottleneck,
        counts={target.unit.name: count for target, count in zip(targets, layout.counts, strict=True)},
        reasons=(
            _summary_text(rate_before, rate_after, bottleneck),
            *selected.reasons,
            *ramp_lines,
            *_missing_worker_lines(targets, layout),
        ),
    )


# --- 3. units with a fixed number of workers on every node


def place_per_node_units(layout: Layout, targets: list[UnitTarget]) -> tuple[Layout, list[UnitTarget]]:
    """Place units with a number of workers per node, evicting others if necessary; their count is fixed then."""
    layout = layout.copy()
    placed = list(targets)
    for unit in hardest_first(targets):
        target = targets[unit]
        if target.demand.per_node is None:
            continue
        _place_on_eligible_nodes(layout, placed, unit, target.demand.per_node)
        count = layout.counts[unit]
        placed[unit] = replace(target, demand=replace(target.demand, low=count, high=count))
    return layout, placed


def _place_on_eligible_nodes(layout: Layout, targets: Sequence[UnitTarget], unit: int, per_node: int) -> None:
    """Give the unit `per_node` workers on every node where a worker would fit if the node were empty."""
    filler = targets[unit].filler
    order = (unit, *(other for other in hardest_first(targets) if other != unit))
    for state in list(layout.groups):
        if not filler.capacity(state.free.cards.kind.untouched()):
            continue
        positions = layout.groups[state]
        alone = layout.single_node(state, len(targets))
        before = list(alone.counts)
        needs = [min(have, target.demand.per_node or 0) for target, have in zip(targets, before, strict=True)]
        needs[unit] = per_node
        SeatAssignment(alone, targets, needs, AssignmentOptions(order, may_move=True)).assign(unit, per_node)
        limits = [per_node if other == unit else math.inf for other in range(len(targets))]
        stop_excess_workers(alone, limits, targets)
        then = next(iter(alone.groups))
        if then is state or alone.gangs:
            continue
        layout.move_nodes(state, len(positions), then)
        for other in range(len(targets)):
            layout.counts[other] += len(positions) * (alone.counts[other] - before[other])


# --- 4. repetition if no candidate gives every unit its minimum


def _spare_gang(initial: InitialLayout, targets: Sequence[UnitTarget]) -> frozenset[int]:
    """The gang on several nodes that its unit can spare, the newest of the largest; empty if there is none."""
    numbers = {target.unit.name: number for number, target in enumerate(targets)}
    spare = [
        (len(gang.seats), gang.worker)
        for gang in initial.gangs
        if gang.movable
        and targets[numbers[gang.unit]].can_release
        and initial.layout.counts[numbers[gang.unit]] > targets[numbers[gang.unit]].demand.low
    ]
    return frozenset({max(spare)[1]}) if spare else frozenset()


# --- 5. selection


class Selection(NamedTuple):
    """The layout of a decision as if it were carried out, the gangs that start for it, and its reasons."""

    layout: Layout
    gangs: list[NewGang]
    reasons: list[str]


def select_and_improve(
    candidates: list[Layout],
    empty: NodeGroups,
    targets: Sequence[UnitTarget],
    rate_before: float,
    snapshot: Snapshot,
    rules: ReplanRules,
    cache: SizingCache,
) -> Selection:
    """Select a layout, and repeat with the candidates that start from it until nothing changes."""
    scored = [score_layout(layout, targets, rate_before, snapshot.horizon_s) for layout in candidates]
    chosen = select_layout(scored, len(snapshot.workers), rules)
    reason = _comparison_text(scored, chosen.changes)
    gangs = list(chosen.layout.gangs)
    layout = chosen.layout.as_applied()
    for _ in range(MAX_IMPROVEMENT_ROUNDS - 1):
        rate = limiting_rate(targets, layout.counts)
        candidates = candidate_layouts(layout, empty, targets, rules, cache)
        scored = [score_layout(candidate, targets, rate, snapshot.horizon_s) for candidate in candidates]
        if not scored:
            break
        chosen = select_layout(scored, len(snapshot.workers), rules)
        if not chosen.changes:
            break
        gangs += chosen.layout.gangs
        layout = chosen.layout.as_applied()
    return Selection(layout, gangs, [reason])


def place_minimums(start: Layout, targets: Sequence[UnitTarget]) -> Selection:
    """Place the minimums of as many units as possible where not all of them fit."""
    layout = start
    gangs: list[NewGang] = []
    for _ in range(MAX_IMPROVEMENT_ROUNDS):
        improved = _place_minimums_once(layout, targets)
        gangs += improved.gangs
        layout = improved.as_applied()
        if not improved.changes:
            break
    return Selection(layout, gangs, [])


def _place_minimums_once(start: Layout, targets: Sequence[UnitTarget]) -> Layout:
    """Give as many units as possible one worker, the hardest first; then as much of their minimums as fits."""
    order = hardest_first(targets)
    first = [
        target.demand.low if target.demand.per_node is not None else min(1, target.demand.low) for target in targets
    ]
    tried = []
    for may_move in (False, True):
        layout = start.copy()
        assignment = SeatAssignment(layout, targets, first, AssignmentOptions(order, may_move))
        for unit in order:
            assignment.assign(unit, first[unit])
        tried.append(layout)
    best = max(tried, key=lambda layout: (sum(count > 0 for count in layout.counts), -layout.changes))
    needs = list(first)
    for unit in order:
        for need in range(first[unit] + 1, targets[unit].demand.low + 1):
            layout = best.copy()
            needs[unit] = need
            options = AssignmentOptions(order, may_move=False)
            if not SeatAssignment(layout, targets, needs, options).assign(unit, need):
                needs[unit] = need - 1
                break
            best = layout
    minimise_changes(best, targets, needs)
    return best


# --- 6. units without a rate


def ramp_unmeasured_units(
    layout: Layout, targets: Sequence[UnitTarget], rules: ReplanRules
) -> tuple[Layout, list[str]]:
    """Add one worker to every ramping unit for which free or spare capacity is found; the lines give the reasons."""
    rate = limiting_rate(targets, layout.counts)
    rate = rate if math.isfinite(rate) else 0.0
    lines = []
    for unit in hardest_first(targets):
        name = targets[unit].unit.name
        if not targets[unit].is_ramping:
            continue
        count = layout.counts[unit] + 1
        then = _add_one_worker(layout, targets, unit, rate)
        if then is None:
            lines.append(f"{name} is backlogged and not measured yet, but one more worker does not fit")
        elif whole := _unit_without_card(layout, then, targets, unit, rate, rules):
            lines.append(f"{name} is not measured yet: the last free whole card stays for {whole}")
        else:
            lines.append(f"{name} is backlogged and not measured yet: one more worker, {count} in all")
            layout = then
    return layout, lines


def _add_one_worker(layout: Layout, targets: Sequence[UnitTarget], unit: int, rate: float) -> Layout | None:
    """One more worker of a unit on free capacity, else on capacity that others can spare at a lower rate: beside a
    backlogged unit of unknown speed, the rate is a guess."""
    for share in RATE_SHARES_TRIED:
        then = layout.copy()
        needs = [
            min(target.workers_for(rate * share), have) for target, have in zip(targets, layout.counts, strict=True)
        ]
        needs[unit] = layout.counts[unit] + 1
        options = AssignmentOptions(hardest_first(targets), may_move=False)
        if SeatAssignment(then, targets, needs, options).assign(unit, needs[unit]):
            return then
    return None


def _unit_without_card(
    before: Layout, after: Layout, targets: Sequence[UnitTarget], unit: int, rate: float, rules: ReplanRules
) -> str:
    """Name of a whole-GPU unit that may soon need a card and for which the new worker takes the last one; or empty."""
    if targets[unit].unit.shape.kind in WHOLE_GPU_KINDS:
        return ""
    for number, target in enumerate(targets):
        if (
            target.unit.shape.kind not in WHOLE_GPU_KINDS
            or target.unit.finished
            or after.counts[number] >= target.max_workers
        ):
            continue
        is_slowest = target.limits_rate and after.counts[number] * target.demand.speed <= rate * (1 + 1e-9)
        may_grow = not target.limits_rate or target.unit.confidence < rules.unsure_below or is_slowest
        if may_grow and _has_space(before, target) and not _has_space(after, target):
            return target.unit.name
    return ""


def _has_space(layout: Layout, target: UnitTarget) -> bool:
    return any(target.filler.capacity(state.free) >= target.unit.shape.ranks for state in layout.groups)


# --- reasons


def _comparison_text(scored: Sequence[ScoredLayout], changes: int) -> str:
    best = max(one.rate for one in scored)
    fastest = f", the fastest with {format_number(best)} items/s" if best < MAX_SPEED else ""
    result = "no change gains enough"
    if changes:
        result = f"{changes} workers change" if changes > 1 else "1 worker changes"
    return f"{len(scored)} layouts were compared{fastest}; {result}"


def _slowest_unit(targets: Sequence[UnitTarget], counts: Sequence[int]) -> str:
    limiting = [
        (count * target.demand.speed, number)
        for number, (target, count) in enumerate(zip(targets, counts, strict=True))
        if target.limits_rate
    ]
    return targets[min(limiting)[1]].unit.name if limiting else ""


def _summary_text(rate_before: float, rate_after: float, bottleneck: str) -> str:
    if not math.isfinite(rate_after):
        return "no unit has a rate yet"
    before = rate_before if math.isfinite(rate_before) else 0.0
    return f"{bottleneck} limits the pipeline: {format_number(before)} -> {format_number(rate_after)} items/s"


def _missing_worker_lines(targets: Sequence[UnitTarget], layout: Layout) -> list[str]:
    return [
        f"{target.unit.name} has {count} of at least {target.demand.low} workers: "
        f"no space for ({target.unit.shape.describe()})"
        for target, count in zip(targets, layout.counts, strict=True)
        if count < target.demand.low
    ]
