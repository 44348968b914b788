"""A pipeline runs: which workers should start and stop now, and why?

Snapshot -> who is there (present) -> how many each unit should have (wants) -> seatings (candidates) -> the one that
pays (pays) -> starts and stops (differences). Pure: same snapshot, same replan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dovetail.scheduling.demand import SPEED_LIMIT
from dovetail.scheduling.replanning.candidates import candidates, rate_of
from dovetail.scheduling.replanning.differences import Differences
from dovetail.scheduling.replanning.pays import best_of, worth_of
from dovetail.scheduling.replanning.present import present
from dovetail.scheduling.replanning.ramp import one_more_each, with_headroom
from dovetail.scheduling.replanning.scarcity import as_many_as_fit, on_every_node
from dovetail.scheduling.replanning.wants import wants_of
from dovetail.scheduling.rules import Rules
from dovetail.scheduling.snapshot import Replan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.replanning.candidates import Sized
    from dovetail.scheduling.replanning.pays import Worth
    from dovetail.scheduling.replanning.present import Present
    from dovetail.scheduling.replanning.rooms import Floor, Gang
    from dovetail.scheduling.replanning.wants import Want
    from dovetail.scheduling.snapshot import Snapshot

__all__ = ["Rules", "replan"]

ROUNDS = 4
"""A seating is improved until a further look at it changes nothing, so that the next replan changes nothing either."""
AS_THEY_ARE = Rules()


def replan(snapshot: Snapshot, rules: Rules = AS_THEY_ARE) -> Replan:
    """What to start and stop. Never raises for a snapshot whose workers sit where they can."""
    return _Decision(snapshot, rules).made()


class _Decision:
    def __init__(self, snapshot: Snapshot, rules: Rules) -> None:
        self.snapshot = snapshot
        self.rules = rules
        self.words: list[str] = []
        self.gangs: list[Gang] = []
        self.sized: Sized = {}
        self.here, self.wants, self.start, self.options = self._beginning()

    def _beginning(self) -> tuple[Present, list[Want], Floor, list[Floor]]:
        """The first of several views of who can stay under which every unit gets its least; else the last."""
        gone: frozenset[int] = frozenset()
        protecting = True
        while True:
            here = present(self.snapshot, gone, protecting=protecting)
            wants = wants_of(self.snapshot, here.floor.counts, self.rules)
            start = here.floor.copy()
            wants = on_every_node(start, wants, self.rules)
            options = candidates(start, here.empty, wants, self.rules, self.sized)
            if options:
                return here, wants, start, options
            if protecting:
                protecting = False
                continue
            spare = _spare_gang(here, wants)
            if spare is None:
                return here, wants, start, []
            gone |= {spare}

    def made(self) -> Replan:
        before = rate_of(self.wants, self.here.floor.counts)
        floor = self._settled()
        rate = rate_of(self.wants, floor.counts)
        fresh = not any(self.here.floor.counts)
        if fresh and self.rules.headroom > 1 and math.isfinite(rate):
            floor = with_headroom(floor, self.wants, rate, self.rules.headroom)
        floor, words = one_more_each(floor, self.wants, rate if math.isfinite(rate) else 0.0, self.rules)
        rate = rate_of(self.wants, floor.counts)
        self.gangs += floor.gangs
        differences = Differences(self.here, self.wants, floor, self.gangs, rate)
        slowest = _slowest(self.wants, floor.counts)
        return Replan(
            starts=tuple(differences.starts()),
            stops=tuple(differences.stops()),
            keeps=tuple(differences.keeps()),
            rate_before=before if math.isfinite(before) else 0.0,
            rate_after=rate if math.isfinite(rate) else 0.0,
            bottleneck=slowest,
            counts={want.unit.name: count for want, count in zip(self.wants, floor.counts, strict=True)},
            reasons=(*self._summary(before, rate, slowest), *self.words, *words, *self._missing(floor)),
        )

    def _settled(self) -> Floor:
        """The seating that is chosen, looked at again until it stays as it is."""
        floor, options = self.start, self.options
        if not options:
            return self._scarcely(floor)
        before = rate_of(self.wants, self.here.floor.counts)
        workers = len(self.snapshot.workers)
        for number in range(ROUNDS):
            worths = [worth_of(option, self.wants, before, self.snapshot.horizon_s, self.rules) for option in options]
            chosen = best_of(worths, workers, self.rules)
            self.words += [] if number else [_tried(len(options), worths, chosen.changes)]
            if number and not chosen.changes:
                return floor
            self.gangs += chosen.floor.gangs
            floor = chosen.floor.settled()
            before = rate_of(self.wants, floor.counts)
            options = candidates(floor, self.here.empty, self.wants, self.rules, self.sized)
            if not options:
                return floor
        return floor

    def _scarcely(self, floor: Floor) -> Floor:
        for _ in range(ROUNDS):
            then = as_many_as_fit(floor, self.wants, self.rules)
            self.gangs += then.gangs
            floor, changes = then.settled(), then.changes
            if not changes:
                break
        return floor

    def _summary(self, before: float, rate: float, slowest: str) -> list[str]:
        if not math.isfinite(rate):
            return ["no unit has a rate yet"]
        start = before if math.isfinite(before) else 0.0
        told = f"{slowest} limits the pipeline" if slowest else "nothing limits the pipeline"
        return [f"{told}: {start:.4g} -> {rate:.4g} items/s"]

    def _missing(self, floor: Floor) -> list[str]:
        words = []
        for want, count in zip(self.wants, floor.counts, strict=True):
            low = want.demand.low
            if count < low:
                shape = want.unit.shape.describe()
                words.append(f"{want.unit.name} has {count} of at least {low} workers: no room for ({shape})")
        return words


def _tried(options: int, worths: Sequence[Worth], changes: int) -> str:
    best = max(worth.rate for worth in worths)
    fastest = f", the fastest with {best:.4g} items/s" if best < SPEED_LIMIT else ""
    what = "nothing brings enough to change"
    if changes:
        what = f"{changes} workers change" if changes > 1 else "1 worker changes"
    return f"{options} seatings were compared{fastest}; {what}"


def _slowest(wants: Sequence[Want], counts: Sequence[int]) -> str:
    limiting = [
        (count * want.demand.speed, number)
        for number, (want, count) in enumerate(zip(wants, counts, strict=True))
        if want.limits
    ]
    return wants[min(limiting)[1]].unit.name if limiting else ""


def _spare_gang(here: Present, wants: Sequence[Want]) -> int | None:
    """A worker on several nodes that its unit can do without, the newest of the largest; None if there is none."""
    numbers = {want.unit.name: number for number, want in enumerate(wants)}
    spare = [
        (len(gang.seats), gang.worker)
        for gang in here.gangs
        if gang.moveable
        and wants[numbers[gang.unit]].gives
        and here.floor.counts[numbers[gang.unit]] > wants[numbers[gang.unit]].demand.low
    ]
    return max(spare)[1] if spare else None
