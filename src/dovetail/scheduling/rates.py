"""How fast is one worker of each stage, and who says so?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Rates:
    """Per stage: items per second and worker, items out per item in, and where the rate comes from."""

    rate: Mapping[str, float]
    returns: Mapping[str, float]
    source: Mapping[str, str]

    def assumptions(self) -> list[str]:
        """What was assumed, in sentences for people."""
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
    middle = statistics.median(rate.values()) if rate else 1.0
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
    return Rates(rate, returns, source)
