"""Rate of every stage for a plan: given, measured by earlier runs, or assumed as the median of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.pipeline.pipeline import Pipeline


GIVEN, MEASURED, ASSUMED = "given", "measured", "assumed"
HOW_TO_MEASURE = "a run measures it, or `dovetail plan FILE --probe`"


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of a stage by earlier runs."""

    rate: float
    """Items per second of one worker."""
    returns: float = 1.0
    """Items out per item in."""
    setup_s: float | None = None
    """Setup time of one worker; None: not measured."""
    peak_bytes: int | None = None
    """Peak memory of one worker; None: not measured."""
    cpu_s: float | None = None
    """CPU seconds per item; None: not measured."""
    standard_error: float | None = None
    """Standard error of the rate, as a share of it, if a probe measured it."""
    source_rate: float | None = None
    """Items per second that the source of this stage delivered; None: not measured, or it reads no source."""
    items: int = 0
    """Items measured; 0: unknown."""
    when: float = 0.0
    """Time of the last run that measured it: seconds since 1970."""
    origin_text: str = ""
    """Origin as text: "in 3 runs, the last 2 h ago"."""


@dataclass(frozen=True, slots=True)
class StageRates:
    """Per stage: items per second and worker, items out per item in, and the origin of the rate."""

    rate: Mapping[str, float]
    returns: Mapping[str, float]
    source: Mapping[str, str]
    origin_text: Mapping[str, str] = field(default_factory=dict)
    """Origin of the measured ones."""
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds per item, where they were measured."""
    source_rate: float | None = None
    """Items per second of the source; None: not measured."""

    def unit_cpu_s(self, stages: Sequence[str]) -> float | None:
        """CPU seconds of fused stages per item of the first; None: not measured."""
        if not any(name in self.cpu_s for name in stages):
            return None
        total, items = 0.0, 1.0
        for name in stages:
            total += items * self.cpu_s.get(name, 0.0)
            items *= self.returns[name]
        return total

    def assumptions(self) -> list[str]:
        """Sentences about assumed and measured rates."""
        return [*self._assumed(), *self._measured()]

    def _measured(self) -> list[str]:
        by_origin: dict[str, list[str]] = {}
        for name, origin in self.origin_text.items():
            by_origin.setdefault(origin, []).append(name)
        return [f"the speed of {', '.join(names)} was measured {origin}" for origin, names in by_origin.items()]

    def _assumed(self) -> list[str]:
        assumed = [name for name, source in self.source.items() if source == ASSUMED]
        if not assumed:
            return []
        if len(assumed) == len(self.source):
            return [f"no speed is known: workers are allocated as if all stages were equally fast; {HOW_TO_MEASURE}"]
        what = f"the speed of {', '.join(assumed)} is unknown"
        return [f"{what}: workers are allocated as if it were the median of the others; {HOW_TO_MEASURE}"]


def stage_rates(pipeline: Pipeline, profiles: Mapping[str, Profile] | None = None) -> StageRates:
    """Rates given by the author, else from a profile, else the median of the other stages (1 if none is known)."""
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
        for name, origin in source.items()
        if origin == MEASURED and profiles[name].origin_text
    }
    known = [(stage.name, profiles[stage.name]) for stage in pipeline.order if stage.name in profiles]
    cpu_s = {name: profile.cpu_s for name, profile in known if profile.cpu_s is not None}
    sources = [profile.source_rate for _, profile in known if profile.source_rate is not None]
    return StageRates(rate, returns, source, measured, cpu_s, min(sources, default=None))


def _median(values: list[float]) -> float:
    """Median; importing `statistics` costs more than a small plan."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
