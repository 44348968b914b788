"""Cost and benefit of candidate layouts: items processed within the horizon, less what starts and stops cost, and the
least gain for which a running pipeline is changed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.scheduling.replan.layout import OccupantStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.replan.layout import Layout
    from dovetail.scheduling.replan.snapshot import Snapshot
    from dovetail.scheduling.replan.targets import UnitTarget

UNLIMITED_RATE = 1e15
"""Rate of a pipeline that no unit limits."""
MAX_NOISE_SHARE = 0.1
"""A gain above this share is never attributed to noise."""
MAX_RELEVANT_SPEED_FACTOR = 2.0
"""The uncertainty of a unit that is faster than this multiple of the slowest does not matter."""


@dataclass(frozen=True, slots=True)
class ReplanRules:
    """Thresholds of a replan."""

    min_gain: float = 0.03
    """Least gain, as a share of the current rate, for which a running pipeline is changed."""
    close_enough: float = 0.02
    """Layouts within this share of the best one are compared by their number of changes."""
    change_cost: float = 0.03
    """Share of the rate that a change of all workers must gain; decides between layouts that are close."""
    unsure_below: float = 0.5
    """Confidence below which a unit at most doubles its workers."""


def rules_above_noise(rules: ReplanRules, snapshot: Snapshot) -> ReplanRules:
    """Rules with a minimum gain above the uncertainty of the rates, so that noise does not move workers.

    Only the units near the slowest one count: one that is much faster, or that has no workers, may be uncertain.
    """
    workers = Counter(worker.unit for worker in snapshot.workers)
    known = [
        (workers[unit.name] * unit.rate / (unit.per_source or 1.0), unit.confidence)
        for unit in snapshot.units
        if unit.rate is not None and workers[unit.name]
    ]
    slowest = min((speed for speed, _ in known), default=0.0)
    sure = min((sure for speed, sure in known if speed <= MAX_RELEVANT_SPEED_FACTOR * slowest), default=1.0)
    noise = 2 - 2 * sure
    return replace(rules, min_gain=max(rules.min_gain, min(noise, MAX_NOISE_SHARE)))


def limiting_rate(targets: Sequence[UnitTarget], counts: Sequence[int]) -> float:
    """Source items per second of these workers; infinite if no unit limits it."""
    return min(
        (count * target.demand.speed for target, count in zip(targets, counts, strict=True) if target.limits_rate),
        default=math.inf,
    )


@dataclass(frozen=True, slots=True)
class ScoredLayout:
    """A layout and the work it does within the horizon."""

    layout: Layout
    rate: float
    items: float
    """Source items within the horizon; while new workers start, only the staying ones count."""
    changes: int


def score_layout(layout: Layout, targets: Sequence[UnitTarget], rate_before: float, horizon_s: float) -> ScoredLayout:
    """Score a layout by the source items that it processes within the horizon.

    Until the last new worker is ready, the pipeline runs at the rate of the workers that stay, so stopping a worker
    that is not needed costs nothing. A pipeline that stands still has nothing to lose.
    """
    rate = min(limiting_rate(targets, layout.counts), UNLIMITED_RATE)
    horizon_s = max(horizon_s, 1e-9)
    items = rate * horizon_s
    if rate_before > 0:
        started = _count_started(layout, len(targets))
        stayed = [count - new for count, new in zip(layout.counts, started, strict=True)]
        wait_s = min(_startup_s(layout, targets, started), horizon_s)
        items = min(limiting_rate(targets, stayed), rate) * wait_s + rate * (horizon_s - wait_s)
    return ScoredLayout(layout, rate, items, layout.changes)


def _count_started(layout: Layout, units: int) -> list[int]:
    started = [0] * units
    for state, positions in layout.groups.items():
        for occupant in state.occupants:
            if occupant.status is OccupantStatus.NEW:
                started[occupant.unit] += len(positions)
    for gang in layout.gangs:
        started[gang.unit] += 1
    return started


def _startup_s(layout: Layout, targets: Sequence[UnitTarget], started: Sequence[int]) -> float:
    """Time until the last new worker is ready: the workers on its seats drain first."""
    drains = [targets[occupant.unit].unit.drain_s for state in layout.groups for occupant in state.evicted]
    setups = [target.unit.setup_s for target, new in zip(targets, started, strict=True) if new]
    return max(drains, default=0.0) + max(setups, default=0.0)


def select_layout(scored: Sequence[ScoredLayout], workers: int, rules: ReplanRules) -> ScoredLayout:
    """Of the layouts close to the best, the one with the best ratio of gain to changes; the current layout if no other
    gains enough."""
    most_items = max(one.items for one in scored)
    fewest = min(scored, key=lambda one: (one.changes, -one.items))
    if fewest.changes == 0 and fewest.items * (1 + rules.min_gain) >= most_items:
        return fewest

    def value(one: ScoredLayout) -> tuple[float, int]:
        share = one.items / most_items if most_items else 1.0
        all_workers = max(workers, sum(one.layout.counts), 1)
        return (share - rules.change_cost * one.changes / all_workers, -one.changes)

    return max((one for one in scored if one.items >= most_items * (1 - rules.close_enough)), key=value)
