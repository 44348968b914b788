"""Demand of a unit (shape, rate per worker, worker limits) and stage rates: given, measured or assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.shape import Shape

MAX_SPEED = 1e12
"""Of a worker that hardly gets items, or none: as good as endless, and still a number that can be written."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What sizing knows of a unit."""

    name: str
    shape: Shape
    rate: float
    """Items per second that one worker takes in."""
    per_source: float = 1.0
    """Items it gets per item of the source."""
    low: int = 1
    high: int | None = None
    per_node: int | None = None
    """So many on every node that may seat it; then `low` and `high` do not count."""

    @property
    def speed(self) -> float:
        """Source items per second that one worker sustains."""
        return min(self.rate / self.per_source, MAX_SPEED) if self.per_source else MAX_SPEED


def pipeline_rate(demands: Sequence[Demand], counts: Sequence[int]) -> float:
    """Source items per second: the slowest unit decides."""
    return min(count * demand.speed for demand, count in zip(demands, counts, strict=True))


def workers_needed(demand: Demand, rate: float) -> int:
    """Workers of a unit for this many source items per second; a hair less than a whole worker is none."""
    exact = rate / demand.speed
    return max(demand.low, math.ceil(exact - 1e-9 * max(1.0, exact)))


GIVEN, MEASURED, ASSUMED = "given", "measured", "assumed"


@dataclass(frozen=True, slots=True)
class Profile:
    """What an earlier run measured of a stage."""

    rate: float
    """Items per second that one worker took in."""
    returns: float = 1.0
    """Items out per item in."""
    setup_s: float | None = None
    """Of one worker; None: not seen."""
    peak_bytes: int | None = None
    """The most memory that one worker had; None: nobody measured."""
    items: int = 0
    """That were seen; 0: not known."""
    when: float = 0.0
    """Of the last run that measured it: seconds since 1970."""
    origin_text: str = ""
    """Where it comes from, in words: "in 3 runs, the last 2 h ago"."""


@dataclass(frozen=True, slots=True)
class StageRates:
    """Per stage: items per second and worker, items out per item in, and where the rate comes from."""

    rate: Mapping[str, float]
    returns: Mapping[str, float]
    source: Mapping[str, str]
    origin_text: Mapping[str, str] = field(default_factory=dict)
    """Of those that were measured, where and when."""

    def assumptions(self) -> list[str]:
        """What was assumed and what was measured, in sentences for people."""
        return [*self._assumed(), *self._measured()]

    def _measured(self) -> list[str]:
        by_words: dict[str, list[str]] = {}
        for name, words in self.origin_text.items():
            by_words.setdefault(words, []).append(name)
        return [f"the speed of {', '.join(names)} was measured {words}" for words, names in by_words.items()]

    def _assumed(self) -> list[str]:
        assumed = [name for name, source in self.source.items() if source == ASSUMED]
        if not assumed:
            return []
        named = ", ".join(assumed)
        value = self.rate[assumed[0]]
        how = f"{value:g} items/s per worker" if len(assumed) < len(self.source) else "equal"
        return [f"the speed of {named} is not known and assumed {how}: give rate= or run it once"]


def stage_rates(pipeline: Pipeline, profiles: Mapping[str, Profile] | None = None) -> StageRates:
    """What the author gave, else what a profile says, else what the others have in the middle (1 if none is known)."""
    profiles = profiles or {}
    rate: dict[str, float] = {}
    source: dict[str, str] = {}
    for stage in pipeline.order:
        if stage.rate is not None:
            rate[stage.name], source[stage.name] = float(stage.rate), GIVEN
        elif stage.name in profiles:
            rate[stage.name], source[stage.name] = profiles[stage.name].rate, MEASURED
    middle = _median(list(rate.values())) if rate else 1.0
    for stage in pipeline.order:
        rate.setdefault(stage.name, middle)
        source.setdefault(stage.name, ASSUMED)
    returns = {
        stage.name: float(stage.returns)
        if stage.returns is not None
        else profiles[stage.name].returns
        if stage.name in profiles
        else 1.0
        for stage in pipeline.order
    }
    measured = {
        name: profiles[name].origin_text
        for name, said in source.items()
        if said == MEASURED and profiles[name].origin_text
    }
    return StageRates(rate, returns, source, measured)


def _median(values: list[float]) -> float:
    """Here, because importing `statistics` costs more than a plan of some stages."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
