"""Which of several seatings is worth its changes?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.scheduling.replanning.candidates import rate_of
from dovetail.scheduling.replanning.rooms import Hold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.replanning.rooms import Floor
    from dovetail.scheduling.replanning.wants import Want
    from dovetail.scheduling.rules import Rules

UNLIMITED = 1e15
"""The rate of a pipeline that nothing limits."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What a seating brings within the horizon."""

    floor: Floor
    rate: float
    items: float
    """Source items within the horizon, with what starting and stopping costs taken off."""
    changes: int


def worth_of(floor: Floor, wants: Sequence[Want], rate_before: float, horizon_s: float, rules: Rules) -> Worth:
    """Until the last new worker is ready, the pipeline runs at the rate of those who stay; a stopped worker that
    nobody needs costs nothing by that. A pipeline that stands still has nothing to lose."""
    rate = min(rate_of(wants, floor.counts), UNLIMITED)
    horizon_s = max(horizon_s, 1e-9)
    items = rate * horizon_s
    if rules.pays and rate_before > 0:
        started = _new(floor, len(wants))
        stayed = [count - new for count, new in zip(floor.counts, started, strict=True)]
        wait_s = min(_wait_s(floor, wants, started), horizon_s)
        items = min(rate_of(wants, stayed), rate) * wait_s + rate * (horizon_s - wait_s)
    return Worth(floor, rate, items, floor.changes)


def _new(floor: Floor, units: int) -> list[int]:
    started = [0] * units
    for room, positions in floor.rooms.items():
        for sitter in room.present:
            if sitter.hold is Hold.NEW:
                started[sitter.unit] += len(positions)
    for gang in floor.gangs:
        started[gang.unit] += 1
    return started


def _wait_s(floor: Floor, wants: Sequence[Want], started: Sequence[int]) -> float:
    """Until the last of the new workers is ready: those who sit there now drain first."""
    drains = [wants[s.unit].unit.drain_s for room in floor.rooms for s in room.gone if s.unit >= 0]
    setups = [want.unit.setup_s for want, new in zip(wants, started, strict=True) if new]
    changed = drains + setups
    return max(drains, default=0.0) + max(setups, default=0.0) if changed else 0.0


def best_of(worths: Sequence[Worth], workers: int, rules: Rules) -> Worth:
    """Of those close to the best, the one whose changes bring the most; the running state if nothing brings much."""
    most = max(worth.items for worth in worths)
    nearly = most * (1 - rules.close_enough)
    calm = min(worths, key=lambda worth: (worth.changes, -worth.items))
    if calm.changes == 0 and calm.items * (1 + rules.min_gain) >= most:
        return calm

    def score(worth: Worth) -> tuple[float, int]:
        share = worth.items / most if most else 1.0
        everyone = max(workers, sum(worth.floor.counts), 1)
        return (share - rules.change_cost * worth.changes / everyone, -worth.changes)

    return max((worth for worth in worths if worth.items >= nearly), key=score)
