"""Unit targets: worker counts and assumed speed per unit, derived from rates and queues."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.scheduling.demand import MAX_SPEED, Demand, workers_needed
from dovetail.scheduling.fragmentation import Workload
from dovetail.scheduling.packing import NodeFiller
from dovetail.scheduling.placement import FragmentationScore, GroupPlacer
from dovetail.scheduling.replan.snapshot import WorkerPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.replan.snapshot import ReplanRules, Snapshot, UnitSnapshot

MAX_UNCERTAIN_GROWTH_FACTOR = 2
WORKLOAD_SCALE = 100
"""Expected workers of the unit that needs the most of them; only proportions matter."""
GUESSED_RATE = 1.0
"""Items per second of an unmeasured unit, for those who switch the rule off that avoids guessing."""


@dataclass(frozen=True, slots=True)
class UnitTarget:
    """One unit: its counts, how fast its workers are taken to be, and what it may give."""

    unit: UnitSnapshot
    demand: Demand
    """With the counts and the speed that the rules leave of what the snapshot says."""
    filler: NodeFiller
    placer: GroupPlacer
    difficulty: tuple[int, ...]
    """Units with more of this are seated first."""
    limits_rate: bool = True
    """Whether the pipeline's rate depends on it: not while it is unmeasured, starved or finished."""
    can_release: bool = True
    follows_rate: bool = False
    """Does not limit the rate, but gives no more than the rate leaves it."""
    is_ramping: bool = False
    """Whether this replan tries one more worker of it without a rate."""

    def workers_for(self, rate: float) -> int:
        """Workers for this many source items per second."""
        if self.limits_rate:
            return workers_needed(self.demand, rate)
        return min(workers_needed(self.demand, rate), int(self.max_workers)) if self.follows_rate else self.demand.low

    @property
    def max_workers(self) -> float:
        return math.inf if self.demand.high is None else self.demand.high


def unit_targets(snapshot: Snapshot, counts: Sequence[int], rules: ReplanRules) -> list[UnitTarget]:
    """One per unit, in the order of the snapshot. `counts`: workers that are there and suit it.

    While some unit is unmeasured, nobody knows what the others need beside it, and so those at most double, too.
    """
    fresh = not any(counts)
    guessing = any(not unit.finished and not _is_measured(unit) for unit in snapshot.units)
    score = FragmentationScore(expected_workload(snapshot))
    wants = []
    for unit, count in zip(snapshot.units, counts, strict=True):
        damped = rules.ramp and (guessing or (unit.confidence < rules.unsure_below and not fresh))
        wants.append(_unit_target(snapshot, unit, count, rules, score, damped=damped))
    return _correct_by_queues(wants, counts) if rules.queues else wants


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
    snapshot: Snapshot, unit: UnitSnapshot, count: int, rules: ReplanRules, score: FragmentationScore, *, damped: bool
) -> UnitTarget:
    low, high = (0, 0) if unit.finished else (unit.low, unit.high)
    if high is not None:
        high = max(high, low)
    measured = _is_measured(unit) or not rules.ramp
    ramps = False
    if not measured and not unit.finished:
        low, ramps = _unmeasured_minimum(snapshot, unit, count)
        high = max(low, unit.high) if unit.high is not None else None
    elif damped and not unit.finished:
        most = max(low, MAX_UNCERTAIN_GROWTH_FACTOR * count, 1)
        high = most if high is None else min(high, most)
    waited = unit.starved_s < unit.setup_s + unit.drain_s
    rate = (unit.rate or GUESSED_RATE) if measured else MAX_SPEED
    return UnitTarget(
        unit=unit,
        demand=Demand(
            unit.name, unit.shape, rate, unit.per_source, low, high, None if unit.finished else unit.per_node
        ),
        filler=NodeFiller(unit.shape),
        placer=GroupPlacer(score, unit.shape),
        difficulty=placement_difficulty(unit),
        limits_rate=measured and not unit.finished,
        can_release=not (rules.lull and unit.starved_s > 0 and waited),
        is_ramping=ramps,
    )


def placement_difficulty(unit: UnitSnapshot) -> tuple[int, ...]:
    shape = unit.shape
    return (shape.ranks * shape.cards, shape.gpu_milli, shape.gpu_memory_bytes, shape.cpu_milli, shape.memory_bytes)


def _unmeasured_minimum(snapshot: Snapshot, unit: UnitSnapshot, count: int) -> tuple[int, bool]:
    """The workers a unit without a rate should have at least, and whether one more is tried."""
    low = max(unit.low, 1) if unit.high != 0 else 0
    mine = [worker for worker in snapshot.workers if worker.unit == unit.name]
    settled = count > 0 and all(worker.phase is WorkerPhase.READY for worker in mine)
    may_grow = unit.high is None or count < unit.high
    return max(low, min(count, unit.high or count)), bool(
        settled and unit.backlogged and may_grow and unit.per_node is None
    )


def _correct_by_queues(wants: list[UnitTarget], counts: Sequence[int]) -> list[UnitTarget]:
    """What waits corrects what speeds say.

    A unit that starves behind a backlogged one is not what limits the pipeline, however slow it is said to be: it
    neither grows nor counts. The last backlogged unit, in the order of the pipeline, sets the pace, because those
    before it may only be held up by it. If its speed says otherwise, its workers are taken to be no faster than the
    pipeline, and it at most doubles: by how much its speed is wrong is not known.
    """
    last = max((i for i, want in enumerate(wants) if want.unit.backlogged and want.limits_rate), default=None)
    if last is None or not counts[last]:
        return wants
    pace = min(
        (count * want.demand.speed for want, count in zip(wants, counts, strict=True) if want.limits_rate and count),
        default=math.inf,
    )
    judged = [
        _not_limiting(want, count)
        if number > last and want.limits_rate and want.unit.starved_s > 0 and not want.unit.queued
        else want
        for number, (want, count) in enumerate(zip(wants, counts, strict=True))
    ]
    if counts[last] * wants[last].demand.speed > pace * (1 + 1e-9):
        judged[last] = _slowed_to_pace(wants[last], pace, counts[last])
    return judged


def _not_limiting(want: UnitTarget, count: int) -> UnitTarget:
    most = max(want.demand.low, count)
    high = most if want.demand.high is None else min(most, want.demand.high)
    return replace(want, demand=replace(want.demand, high=high), limits_rate=False, follows_rate=True)


def _slowed_to_pace(want: UnitTarget, pace: float, count: int) -> UnitTarget:
    per_source = want.demand.per_source or 1.0
    most = max(want.demand.low, MAX_UNCERTAIN_GROWTH_FACTOR * count)
    high = most if want.demand.high is None else min(most, want.demand.high)
    return replace(want, demand=replace(want.demand, rate=pace / count * per_source, per_source=per_source, high=high))
