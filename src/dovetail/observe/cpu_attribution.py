"""Attribution of a unit's measured CPU time and memory to its stages over time.

Views of a run are recorded about once per second, with the seconds that each stage spent in its code; CPU time of
processes every five seconds. The CPU time between two such samples is distributed over views and stages in proportion
to their seconds, so that the sum is the measured CPU time, including the start of workers. The last sample of a process
is up to a second old when it ends, so that up to a second of CPU time per worker is missing.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dovetail.observe.run_folder import number_field

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.observe.history import RunHistory, ViewRecord

MIN_SLICE_S = 0.5
"""Views at shorter intervals are merged."""
MIN_MEASURED_S = 2.5
"""In a shorter run, the missing last second would be most of the CPU time."""


@dataclass(slots=True)
class TimeSlice:
    """One unit between two views."""

    t: float
    """The end, on the run's clock."""
    length_s: float
    workers: float
    """Average number of workers."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Stage -> seconds in its code, of all workers."""
    cpu_s: float = 0.0
    memory_bytes: int | None = None
    """Sum over all workers; None: not measured."""

    @property
    def spent_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class UnitTimeline:
    """One unit over the whole run."""

    name: str
    stages: tuple[str, ...]
    slices: list[TimeSlice]
    measured: bool
    """Whether `cpu_s` was measured; otherwise it is the time in code."""

    def stage_cpu_s(self, stage: str) -> list[float]:
        """CPU seconds of a stage per slice. In slices without time in code (setup, waiting), the share of the whole run
        applies."""
        totals = {name: sum(one.seconds.get(name, 0.0) for one in self.slices) for name in self.stages}
        whole = sum(totals.values())
        usual = totals[stage] / whole if whole else 1 / len(self.stages)
        return [
            one.cpu_s * (one.seconds.get(stage, 0.0) / one.spent_s if one.spent_s else usual) for one in self.slices
        ]


def spaced_ticks(history: RunHistory) -> list[ViewRecord]:
    """Views at least MIN_SLICE_S apart; always the first and the last."""
    found: list[ViewRecord] = []
    for tick in history.ticks:
        if not found or tick.t - found[-1].t >= MIN_SLICE_S:
            found.append(tick)
    if found and found[-1] is not history.ticks[-1]:
        if len(found) > 1:
            found.pop()
        found.append(history.ticks[-1])
    return found


def unit_timeline(history: RunHistory, unit: str) -> UnitTimeline:
    recorded = history.units.get(unit, {}).get("stages")
    stages = (
        tuple(str(one[0]) for one in recorded) if isinstance(recorded, list) and recorded else tuple(unit.split("+"))
    )
    slices = list(_slices(spaced_ticks(history), unit, stages, history.seconds))
    _shift_overflow(slices)
    uses = history.unit_uses.get(unit, [])
    measured = _attribute_cpu(slices, uses)
    _set_memory(slices, uses)
    return UnitTimeline(unit, stages, slices, measured)


def _slices(ticks: Sequence[ViewRecord], unit: str, stages: Sequence[str], seconds: float) -> Iterator[TimeSlice]:
    if len(ticks) == 1:  # the run ended before the second view
        now = ticks[0].units.get(unit, {})
        yield TimeSlice(ticks[0].t, max(seconds, 1e-3), max(1.0, _workers(now)), _stage_seconds(now))
    for before, after in pairwise(ticks):
        old, new = before.units.get(unit, {}), after.units.get(unit, {})
        earlier, later = _stage_seconds(old), _stage_seconds(new)
        # a resumed run starts its counts at 0
        grown = {name: _growth(earlier.get(name, 0.0), later.get(name, 0.0)) for name in stages}
        yield TimeSlice(after.t, max(1e-6, after.t - before.t), (_workers(old) + _workers(new)) / 2, grown)


def _growth(before: float, after: float) -> float:
    return after - before if after >= before else after


def _workers(unit: Mapping[str, Any]) -> float:
    return number_field(unit, "ready") + number_field(unit, "draining") + number_field(unit, "starting")


def _stage_seconds(unit: Mapping[str, Any]) -> dict[str, float]:
    recorded = unit.get("stages")
    good = [one for one in recorded if isinstance(one, list) and len(one) == 4] if isinstance(recorded, list) else []
    return {str(one[0]): float(one[3]) for one in good if isinstance(one[3], int | float)}


def _shift_overflow(slices: Sequence[TimeSlice]) -> None:
    """Move time that exceeds a slice to earlier slices, because a call is counted when it ends."""
    carried: dict[str, float] = {}
    for place in range(len(slices) - 1, -1, -1):
        one = slices[place]
        for name, seconds in carried.items():
            one.seconds[name] = one.seconds.get(name, 0.0) + seconds
        room = one.length_s * max(1.0, one.workers)
        over = 1 - room / one.spent_s if one.spent_s > room and place else 0.0
        carried = {name: seconds * over for name, seconds in one.seconds.items()} if over else {}
        for name, seconds in carried.items():
            one.seconds[name] -= seconds


def _attribute_cpu(slices: Sequence[TimeSlice], uses: Sequence[Mapping[str, Any]]) -> bool:
    """Distribute measured CPU time over the slices; False if there was none."""
    # the first sample of a process has no CPU time
    good = [use for use in uses if "cpus_now" in use]
    if not good or number_field(good[-1], "t") < MIN_MEASURED_S:
        for one in slices:
            one.cpu_s = one.spent_s
        return False
    total, waiting, begin = 0.0, 0.0, 0
    for use in good:
        waiting += _growth(total, number_field(use, "cpu_s_total"))
        total = number_field(use, "cpu_s_total")
        end = begin
        while end < len(slices) and slices[end].t <= number_field(use, "t") + 1e-6:
            end += 1
        if end > begin:
            _spread_cpu(slices[begin:end], waiting)
            waiting, begin = 0.0, end
    if begin < len(slices):  # no later samples: the same ratio as before, if there is one
        spent = sum(one.spent_s for one in slices[:begin])
        ratio = sum(one.cpu_s for one in slices[:begin]) / spent if spent else 1.0
        for one in slices[begin:]:
            one.cpu_s = ratio * one.spent_s
    return True


def _spread_cpu(slices: Sequence[TimeSlice], cpu_s: float) -> None:
    spent = sum(one.spent_s for one in slices)
    length = sum(one.length_s for one in slices)
    for one in slices:
        one.cpu_s = cpu_s * (one.spent_s / spent if spent else one.length_s / length)


def _set_memory(slices: Sequence[TimeSlice], uses: Sequence[Mapping[str, Any]]) -> None:
    """Set the memory of each slice from the nearest sample."""
    there = NearestSample([use for use in uses if number_field(use, "workers")])
    for one in slices:
        if (use := there.at(one.t)) is not None:
            one.memory_bytes = int(number_field(use, "uss_bytes"))


class NearestSample:
    """Search for the sample nearest to a time."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._lines = lines
        self._times = [number_field(line, "t") for line in lines]

    def at(self, t: float) -> Mapping[str, Any] | None:
        if not self._lines:
            return None
        place = min(bisect(self._times, t), len(self._times) - 1)
        if place and t - self._times[place - 1] <= abs(self._times[place] - t):
            place -= 1
        return self._lines[place]
