"""Predicted rate of sized waves: limited by their slowest unit, by the CPU time of all units, and by the source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduling.plan import UnitPlan

SOURCE = "source"
"""Name of the bottleneck if the source is slower than all units."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Source items per second, and what limits them: a unit, or the source."""

    rate: float
    bottleneck: str


def predict_rate(waves: Sequence[Sequence[UnitPlan]], cpu_milli: int, source_rate: float | None) -> RateLimit:
    """The rate over all waves, whose times add up, and the bottleneck of the slowest wave. Units have workers."""
    limits = [_wave_limit(wave, cpu_milli) for wave in waves]
    if source_rate is not None:
        limits[0] = min(limits[0], RateLimit(source_rate, SOURCE), key=lambda limit: limit.rate)
    slowest = min(limits, key=lambda limit: limit.rate)
    rate = slowest.rate if len(limits) == 1 else 1 / sum(1 / limit.rate for limit in limits)
    return RateLimit(rate, slowest.bottleneck)


def _wave_limit(units: Sequence[UnitPlan], cpu_milli: int) -> RateLimit:
    slowest = min(units, key=lambda unit: unit.throughput)
    busiest = max(units, key=lambda unit: unit.cpu_s_per_source_item)
    cpu_s = sum(unit.cpu_s_per_source_item for unit in units)
    by_cpu = cpu_milli / 1000 / cpu_s if cpu_s else math.inf
    if by_cpu < slowest.throughput:
        return RateLimit(by_cpu, busiest.name)
    return RateLimit(slowest.throughput, slowest.name)
