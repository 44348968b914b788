"""Replan in numbered steps: initial layout, unit targets, candidate layouts, selection, starts and stops.

Snapshot -> who is there (present) -> how many each unit should have (wants) -> seatings (candidates) -> the one that
pays (pays) -> starts and stops (differences). Pure: same snapshot, same replan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dovetail.scheduling.demand import MAX_SPEED
from dovetail.scheduling.replan.adjustments import (
    add_headroom_workers,
    place_minimums,
    place_per_node_units,
    ramp_unmeasured_units,
)
from dovetail.scheduling.replan.candidates import candidate_layouts, limiting_rate, score_layout, select_layout
from dovetail.scheduling.replan.diff import LayoutDiff
from dovetail.scheduling.replan.layout import layout_from_snapshot
from dovetail.scheduling.replan.snapshot import Replan, ReplanRules
from dovetail.scheduling.replan.targets import unit_targets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.replan.candidates import ScoredLayout, SizingCache
    from dovetail.scheduling.replan.layout import InitialLayout, Layout, NewGang
    from dovetail.scheduling.replan.snapshot import Snapshot
    from dovetail.scheduling.replan.targets import UnitTarget

__all__ = ["ReplanRules", "replan"]

MAX_IMPROVEMENT_ROUNDS = 4
"""A seating is improved until a further look at it changes nothing, so that the next replan changes nothing either."""
DEFAULT_RULES = ReplanRules()


def replan(snapshot: Snapshot, rules: ReplanRules = DEFAULT_RULES) -> Replan:
    """What to start and stop. Never raises for a snapshot whose workers sit where they can."""
    return _Decision(snapshot, rules).decide()


class _Decision:
    def __init__(self, snapshot: Snapshot, rules: ReplanRules) -> None:
        self.snapshot = snapshot
        self.rules = rules
        self.reasons: list[str] = []
        self.gangs: list[NewGang] = []
        self.sizing_cache: SizingCache = {}
        self.initial, self.targets, self.start, self.options = self._find_start()

    def _find_start(self) -> tuple[InitialLayout, list[UnitTarget], Layout, list[Layout]]:
        """The first of several views of who can stay under which every unit gets its least; else the last."""
        gone: frozenset[int] = frozenset()
        protecting = True
        while True:
            here = layout_from_snapshot(self.snapshot, gone, protecting=protecting)
            wants = unit_targets(self.snapshot, here.layout.counts, self.rules)
            start = here.layout.copy()
            wants = place_per_node_units(start, wants, self.rules)
            options = candidate_layouts(start, here.empty_ledger, wants, self.rules, self.sizing_cache)
            if options:
                return here, wants, start, options
            if protecting:
                protecting = False
                continue
            spare = _spare_gang(here, wants)
            if spare is None:
                return here, wants, start, []
            gone |= {spare}

    def decide(self) -> Replan:
        before = limiting_rate(self.targets, self.initial.layout.counts)
        floor = self._improve()
        rate = limiting_rate(self.targets, floor.counts)
        fresh = not any(self.initial.layout.counts)
        if fresh and self.rules.headroom > 1 and math.isfinite(rate):
            floor = add_headroom_workers(floor, self.targets, rate, self.rules.headroom)
        floor, words = ramp_unmeasured_units(floor, self.targets, rate if math.isfinite(rate) else 0.0, self.rules)
        rate = limiting_rate(self.targets, floor.counts)
        self.gangs += floor.gangs
        differences = LayoutDiff(self.initial, self.targets, floor, self.gangs, rate)
        slowest = _slowest_unit(self.targets, floor.counts)
        return Replan(
            starts=tuple(differences.starts()),
            stops=tuple(differences.stops()),
            cancelled_drains=tuple(differences.cancelled_drains()),
            rate_before=before if math.isfinite(before) else 0.0,
            rate_after=rate if math.isfinite(rate) else 0.0,
            bottleneck=slowest,
            counts={want.unit.name: count for want, count in zip(self.targets, floor.counts, strict=True)},
            reasons=(
                *self._summary_lines(before, rate, slowest),
                *self.reasons,
                *words,
                *self._missing_worker_lines(floor),
            ),
        )

    def _improve(self) -> Layout:
        """The seating that is chosen, looked at again until it stays as it is."""
        floor, options = self.start, self.options
        if not options:
            return self._place_scarce(floor)
        before = limiting_rate(self.targets, self.initial.layout.counts)
        workers = len(self.snapshot.workers)
        for number in range(MAX_IMPROVEMENT_ROUNDS):
            worths = [
                score_layout(option, self.targets, before, self.snapshot.horizon_s, self.rules) for option in options
            ]
            chosen = select_layout(worths, workers, self.rules)
            self.reasons += [] if number else [_comparison_text(len(options), worths, chosen.changes)]
            if number and not chosen.changes:
                return floor
            self.gangs += chosen.layout.gangs
            floor = chosen.layout.as_applied()
            before = limiting_rate(self.targets, floor.counts)
            options = candidate_layouts(floor, self.initial.empty_ledger, self.targets, self.rules, self.sizing_cache)
            if not options:
                return floor
        return floor

    def _place_scarce(self, floor: Layout) -> Layout:
        for _ in range(MAX_IMPROVEMENT_ROUNDS):
            then = place_minimums(floor, self.targets, self.rules)
            self.gangs += then.gangs
            floor, changes = then.as_applied(), then.changes
            if not changes:
                break
        return floor

    def _summary_lines(self, before: float, rate: float, slowest: str) -> list[str]:
        if not math.isfinite(rate):
            return ["no unit has a rate yet"]
        start = before if math.isfinite(before) else 0.0
        told = f"{slowest} limits the pipeline" if slowest else "nothing limits the pipeline"
        return [f"{told}: {start:.4g} -> {rate:.4g} items/s"]

    def _missing_worker_lines(self, floor: Layout) -> list[str]:
        words = []
        for want, count in zip(self.targets, floor.counts, strict=True):
            low = want.demand.low
            if count < low:
                shape = want.unit.shape.describe()
                words.append(f"{want.unit.name} has {count} of at least {low} workers: no room for ({shape})")
        return words


def _comparison_text(options: int, worths: Sequence[ScoredLayout], changes: int) -> str:
    best = max(worth.rate for worth in worths)
    fastest = f", the fastest with {best:.4g} items/s" if best < MAX_SPEED else ""
    what = "nothing brings enough to change"
    if changes:
        what = f"{changes} workers change" if changes > 1 else "1 worker changes"
    return f"{options} seatings were compared{fastest}; {what}"


def _slowest_unit(wants: Sequence[UnitTarget], counts: Sequence[int]) -> str:
    limiting = [
        (count * want.demand.speed, number)
        for number, (want, count) in enumerate(zip(wants, counts, strict=True))
        if want.limits_rate
    ]
    return wants[min(limiting)[1]].unit.name if limiting else ""


def _spare_gang(here: InitialLayout, wants: Sequence[UnitTarget]) -> int | None:
    """A worker on several nodes that its unit can do without, the newest of the largest; None if there is none."""
    numbers = {want.unit.name: number for number, want in enumerate(wants)}
    spare = [
        (len(gang.seats), gang.worker)
        for gang in here.gangs
        if gang.movable
        and wants[numbers[gang.unit]].can_release
        and here.layout.counts[numbers[gang.unit]] > wants[numbers[gang.unit]].demand.low
    ]
    return max(spare)[1] if spare else None
