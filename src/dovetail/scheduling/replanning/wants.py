"""How many workers should each unit have, and which of them may be asked to give some?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.scheduling.demand import SPEED_LIMIT, Demand, needed
from dovetail.scheduling.packing import Filler
from dovetail.scheduling.snapshot import Standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.rules import Rules
    from dovetail.scheduling.snapshot import Snapshot, UnitNow

UNSURE_GROWTH = 2
GUESS = 1.0
"""Items per second of an unmeasured unit, for those who switch the rule off that avoids guessing."""


@dataclass(frozen=True, slots=True)
class Want:
    """One unit: its counts, how fast its workers are taken to be, and what it may give."""

    unit: UnitNow
    demand: Demand
    """With the counts and the speed that the rules leave of what the snapshot says."""
    filler: Filler
    hardness: tuple[int, ...]
    """Units with more of this are seated first."""
    limits: bool = True
    """Whether the pipeline's rate depends on it: not while it is unmeasured, starved or finished."""
    gives: bool = True
    follows: bool = False
    """Does not limit the rate, but gives no more than the rate leaves it."""
    ramps: bool = False
    """Whether this replan tries one more worker of it without a rate."""

    def count(self, rate: float) -> int:
        """Workers for this many source items per second."""
        if self.limits:
            return needed(self.demand, rate)
        return min(needed(self.demand, rate), int(self.most)) if self.follows else self.demand.low

    @property
    def most(self) -> float:
        return math.inf if self.demand.high is None else self.demand.high


def wants_of(snapshot: Snapshot, counts: Sequence[int], rules: Rules) -> list[Want]:
    """One per unit, in the order of the snapshot. `counts`: workers that are there and suit it.

    While some unit is unmeasured, nobody knows what the others need beside it, and so those at most double, too.
    """
    fresh = not any(counts)
    guessing = any(not unit.finished and not _is_measured(unit) for unit in snapshot.units)
    wants = []
    for unit, count in zip(snapshot.units, counts, strict=True):
        damped = rules.ramp and (guessing or (unit.sure < rules.unsure_below and not fresh))
        wants.append(_want(snapshot, unit, count, rules, damped=damped))
    return _by_queues(wants, counts) if rules.queues else wants


def _is_measured(unit: UnitNow) -> bool:
    return unit.rate is not None and unit.rate > 0


def _want(snapshot: Snapshot, unit: UnitNow, count: int, rules: Rules, *, damped: bool) -> Want:
    low, high = (0, 0) if unit.finished else (unit.low, unit.high)
    if high is not None:
        high = max(high, low)
    measured = _is_measured(unit) or not rules.ramp
    ramps = False
    if not measured and not unit.finished:
        low, ramps = _unmeasured(snapshot, unit, count)
        high = max(low, unit.high) if unit.high is not None else None
    elif damped and not unit.finished:
        most = max(low, UNSURE_GROWTH * count, 1)
        high = most if high is None else min(high, most)
    waited = unit.starved_s < unit.setup_s + unit.drain_s
    rate = (unit.rate or GUESS) if measured else SPEED_LIMIT
    return Want(
        unit=unit,
        demand=Demand(
            unit.name, unit.shape, rate, unit.per_source, low, high, None if unit.finished else unit.per_node
        ),
        filler=Filler(unit.shape),
        hardness=hardness(unit),
        limits=measured and not unit.finished,
        gives=not (rules.lull and unit.starved_s > 0 and waited),
        ramps=ramps,
    )


def hardness(unit: UnitNow) -> tuple[int, ...]:
    shape = unit.shape
    return (shape.ranks * shape.cards, shape.gpu_milli, shape.gpu_memory_bytes, shape.cpu_milli, shape.memory_bytes)


def _unmeasured(snapshot: Snapshot, unit: UnitNow, count: int) -> tuple[int, bool]:
    """The workers a unit without a rate should have at least, and whether one more is tried."""
    low = max(unit.low, 1) if unit.high != 0 else 0
    mine = [worker for worker in snapshot.workers if worker.unit == unit.name]
    settled = count > 0 and all(worker.standing is Standing.READY for worker in mine)
    may_grow = unit.high is None or count < unit.high
    return max(low, min(count, unit.high or count)), bool(
        settled and unit.backlogged and may_grow and unit.per_node is None
    )


def _by_queues(wants: list[Want], counts: Sequence[int]) -> list[Want]:
    """What waits corrects what speeds say.

    A unit that starves behind a backlogged one is not what limits the pipeline, however slow it is said to be: it
    neither grows nor counts. The last backlogged unit, in the order of the pipeline, sets the pace, because those
    before it may only be held up by it. If its speed says otherwise, its workers are taken to be no faster than the
    pipeline, and it at most doubles: by how much its speed is wrong is not known.
    """
    last = max((i for i, want in enumerate(wants) if want.unit.backlogged and want.limits), default=None)
    if last is None or not counts[last]:
        return wants
    pace = min(
        (count * want.demand.speed for want, count in zip(wants, counts, strict=True) if want.limits and count),
        default=math.inf,
    )
    judged = [
        _not_limiting(want, count)
        if number > last and want.limits and want.unit.starved_s > 0 and not want.unit.queued
        else want
        for number, (want, count) in enumerate(zip(wants, counts, strict=True))
    ]
    if counts[last] * wants[last].demand.speed > pace * (1 + 1e-9):
        judged[last] = _at_pace(wants[last], pace, counts[last])
    return judged


def _not_limiting(want: Want, count: int) -> Want:
    most = max(want.demand.low, count)
    high = most if want.demand.high is None else min(most, want.demand.high)
    return replace(want, demand=replace(want.demand, high=high), limits=False, follows=True)


def _at_pace(want: Want, pace: float, count: int) -> Want:
    per_source = want.demand.per_source or 1.0
    most = max(want.demand.low, UNSURE_GROWTH * count)
    high = most if want.demand.high is None else min(most, want.demand.high)
    return replace(want, demand=replace(want.demand, rate=pace / count * per_source, per_source=per_source, high=high))
