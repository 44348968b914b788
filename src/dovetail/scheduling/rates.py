"""How fast is one worker of each stage, and who says so?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.pipeline.pipeline import Pipeline

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
    told: str = ""
    """Where it comes from, in words: "in 3 runs, the last 2 h ago"."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Per stage: items per second and worker, items out per item in, and where the rate comes from."""

    rate: Mapping[str, float]
    returns: Mapping[str, float]
    source: Mapping[str, str]
    told: Mapping[str, str] = field(default_factory=dict)
    """Of those that were measured, where and when."""

    def assumptions(self) -> list[str]:
        """What was assumed and what was measured, in sentences for people."""
        return [*self._assumed(), *self._measured()]

    def _measured(self) -> list[str]:
        by_words: dict[str, list[str]] = {}
        for name, words in self.told.items():
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


def rates_of(pipeline: Pipeline, profiles: Mapping[str, Profile] | None = None) -> Rates:
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
    measured = {name: profiles[name].told for name, said in source.items() if said == MEASURED and profiles[name].told}
    return Rates(rate, returns, source, measured)


def _median(values: list[float]) -> float:
    """Here, because importing `statistics` costs more than a plan of some stages."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
