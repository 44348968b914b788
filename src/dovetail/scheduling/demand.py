"""Demand of a unit: shape, rate per worker and worker limits; the workers that a rate needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.resources.shape import Shape

MAX_SPEED = 1e12
"""Speed of a worker that gets no items: practically unlimited, and still a number that JSON can hold."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of one unit: shape, speed and worker limits."""

    name: str
    shape: Shape
    rate: float
    """Items per second of one worker."""
    per_source: float = 1.0
    """Input items per item of the source."""
    low: int = 1
    high: int | None = None
    per_node: int | None = None
    """Workers on every eligible node; `low` and `high` are ignored then."""

    @property
    def speed(self) -> float:
        """Source items per second that one worker sustains."""
        return min(self.rate / self.per_source, MAX_SPEED) if self.per_source else MAX_SPEED


def pipeline_rate(demands: Sequence[Demand], counts: Sequence[int]) -> float:
    """Source items per second of the slowest unit."""
    return min(count * demand.speed for demand, count in zip(demands, counts, strict=True))


def workers_needed(demand: Demand, rate: float) -> int:
    """Workers needed for this many source items per second; rounding errors do not add a worker."""
    exact = rate / demand.speed
    return max(demand.low, math.ceil(exact - 1e-9 * max(1.0, exact)))
