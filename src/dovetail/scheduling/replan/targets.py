"""Unit targets: worker counts and assumed speed per unit, derived from rates and queues."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.scheduling.demand import MAX_SPEED, Demand, workers_needed
from dovetail.scheduling.fragmentation import Workload
from dovetail.scheduling.packing import NodeFiller, placement_difficulty
from dovetail.scheduling.placement import FragmentationScore, GroupPlacer
from dovetail.scheduling.replan.snapshot import WorkerPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.replan.cost_benefit import ReplanRules
    from dovetail.scheduling.replan.snapshot import Snapshot, UnitSnapshot

MAX_UNCERTAIN_GROWTH_FACTOR = 2
REPLAN_SCORE_LEVELS = 9
"""Near zero, one level is 0.44 GPUs: smaller differences are packed. With 100 levels, runs that come and go on one
cluster allocate less than by packing alone (docs/decisions/002). Odd, so that no change is in the middle of a level."""
WORKLOAD_SCALE = 100
"""Expected workers of the unit that needs the most of them; only proportions matter."""


@dataclass(frozen=True, slots=True)
class UnitTarget:
    """Target of one unit: worker limits, assumed speed, and whether it may release workers."""

    unit: UnitSnapshot
    demand: Demand
    """Limits and speed after the rules were applied to the snapshot."""
    filler: NodeFiller
    placer: GroupPlacer
    difficulty: tuple[int, ...]
    """Units with a higher value are placed first."""
    limits_rate: bool = True
    """The rate of the pipeline depends on it: not while it is unmeasured, starved or finished."""
    can_release: bool = True
    follows_rate: bool = False
    """It does not limit the rate, but keeps the workers that the rate needs."""
    is_ramping: bool = False
    """It has no rate yet, and this replan adds one worker."""

    def workers_for(self, rate: float) -> int:
        """Workers needed for this many source items per second."""
        if self.limits_rate:
            return workers_needed(self.demand, rate)
        return min(workers_needed(self.demand, rate), int(self.max_workers)) if self.follows_rate else self.demand.low

    @property
    def max_workers(self) -> float:
        return math.inf if self.demand.high is None else self.demand.high


def unit_targets(snapshot: Snapshot, counts: Sequence[int], rules: ReplanRules) -> list[UnitTarget]:
    """One target per unit, in the order of the snapshot. `counts`: current workers on suitable seats.

    While one unit is unmeasured, the needs of the others beside it are unknown, so they at most double.
    """
    fresh = not any(counts)
    guessing = any(not unit.finished and not _is_measured(unit) for unit in snapshot.units)
    score = replan_score(expected_workload(snapshot))
    targets = []
    for unit, count in zip(snapshot.units, counts, strict=True):
        damped = guessing or (unit.confidence < rules.unsure_below and not fresh)
        targets.append(_unit_target(snapshot, unit, count, score, damped=damped))
    return _correct_by_queues(targets, counts)


def replan_score(workload: Workload) -> FragmentationScore:
    """The score by which replans place and stop workers."""
    return FragmentationScore(workload, REPLAN_SCORE_LEVELS, fullest_cards=True)


def expected_workload(snapshot: Snapshot) -> Workload:
    """The workers that the pipeline is expected to need, in the proportion of a balanced pipeline."""
    seconds = [
        unit.per_source / unit.rate if unit.rate is not None and unit.rate > 0 else 0.0 for unit in snapshot.units
    ]
    most = max(seconds, default=0.0) or 1.0
    return Workload(
        (unit.shape, max(unit.low, 1, round(WORKLOAD_SCALE * share / most)))
        for unit, share in zip(snapshot.units, seconds, strict=True)
        if not unit.finished
    )


def _is_measured(unit: UnitSnapshot) -> bool:
    return unit.rate is not None and unit.rate > 0


def _unit_target(
    snapshot: Snapshot, unit: UnitSnapshot, count: int, score: FragmentationScore, *, damped: bool
) -> UnitTarget:
    low, high = (0, 0) if unit.finished else (unit.low, unit.high)
    if high is not None:
        high = max(high, low)
    measured = _is_measured(unit)
    is_ramping = False
    if not measured and not unit.finished:
        low, is_ramping = _unmeasured_minimum(snapshot, unit, count)
        high = max(low, unit.high) if unit.high is not None else None
    elif damped and not unit.finished:
        most = max(low, MAX_UNCERTAIN_GROWTH_FACTOR * count, 1)
        high = most if high is None else min(high, most)
    # restarting its workers would take longer than it has been starved
    is_lull = 0 < unit.starved_s < unit.setup_s + unit.drain_s
    rate = unit.rate if unit.rate is not None and measured else MAX_SPEED
    return UnitTarget(
        unit=unit,
        demand=Demand(
            unit.name, unit.shape, rate, unit.per_source, low, high, None if unit.finished else unit.per_node
        ),
        filler=NodeFiller(unit.shape),
        placer=GroupPlacer(score, unit.shape),
        difficulty=placement_difficulty(unit.shape),
        limits_rate=measured and not unit.finished,
        can_release=not is_lull,
        is_ramping=is_ramping,
    )


def _unmeasured_minimum(snapshot: Snapshot, unit: UnitSnapshot, count: int) -> tuple[int, bool]:
    """Minimum of workers of a unit without a rate, and whether one more is tried."""
    low = max(unit.low, 1) if unit.high != 0 else 0
    workers = [worker for worker in snapshot.workers if worker.unit == unit.name]
    all_ready = count > 0 and all(worker.phase is WorkerPhase.READY for worker in workers)
    may_grow = unit.high is None or count < unit.high
    return max(low, min(count, unit.high or count)), bool(
        all_ready and unit.backlogged and may_grow and unit.per_node is None
    )


def _correct_by_queues(targets: list[UnitTarget], counts: Sequence[int]) -> list[UnitTarget]:
    """Correct the targets where queues contradict the rates.

    A unit that starves behind a backlogged one does not limit the pipeline, however low its rate: it does not grow. A
    backlogged unit without another one behind it is the bottleneck of its branch, because the backlog of the units
    before it may only be backpressure. If the rates name another bottleneck, the workers of the slowest of them are
    assumed to be no faster than the pipeline, and it at most doubles, because the error of its rate is unknown.
    """
    ancestors = _ancestors(targets)
    backlogged = {i for i, target in enumerate(targets) if target.unit.backlogged and target.limits_rate}
    ends = {i for i in backlogged if counts[i] and not any(i in ancestors[other] for other in backlogged)}
    if not ends:
        return targets
    pace = min(
        (
            count * target.demand.speed
            for target, count in zip(targets, counts, strict=True)
            if target.limits_rate and count
        ),
        default=math.inf,
    )
    corrected = [
        _not_limiting(target, count)
        if ends & ancestors[number] and target.limits_rate and target.unit.starved_s > 0 and not target.unit.queued
        else target
        for number, (target, count) in enumerate(zip(targets, counts, strict=True))
    ]
    slowest = min(ends, key=lambda number: (counts[number] * targets[number].demand.speed, number))
    if counts[slowest] * targets[slowest].demand.speed > pace * (1 + 1e-9):
        corrected[slowest] = _slowed_to_pace(targets[slowest], pace, counts[slowest])
    return corrected


def _ancestors(targets: Sequence[UnitTarget]) -> list[set[int]]:
    """Numbers of the units whose output reaches each unit."""
    number_of = {target.unit.name: number for number, target in enumerate(targets)}
    return [
        set(range(number))
        if target.unit.ancestors is None
        else {number_of[name] for name in target.unit.ancestors if name in number_of}
        for number, target in enumerate(targets)
    ]


def _not_limiting(target: UnitTarget, count: int) -> UnitTarget:
    most = max(target.demand.low, count)
    high = most if target.demand.high is None else min(most, target.demand.high)
    return replace(target, demand=replace(target.demand, high=high), limits_rate=False, follows_rate=True)


def _slowed_to_pace(target: UnitTarget, pace: float, count: int) -> UnitTarget:
    per_source = target.demand.per_source or 1.0
    most = max(target.demand.low, MAX_UNCERTAIN_GROWTH_FACTOR * count)
    high = most if target.demand.high is None else min(most, target.demand.high)
    return replace(
        target, demand=replace(target.demand, rate=pace / count * per_source, per_source=per_source, high=high)
    )
