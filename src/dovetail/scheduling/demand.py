"""What does sizing know of a unit, and what rate do so many workers of each give?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.resources.shape import Shape

SPEED_LIMIT = 1e12
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
        return min(self.rate / self.per_source, SPEED_LIMIT) if self.per_source else SPEED_LIMIT


def rate_of(demands: Sequence[Demand], counts: Sequence[int]) -> float:
    """Source items per second: the slowest unit decides."""
    return min(count * demand.speed for demand, count in zip(demands, counts, strict=True))


def needed(demand: Demand, rate: float) -> int:
    """Workers of a unit for this many source items per second; a hair less than a whole worker is none."""
    exact = rate / demand.speed
    return max(demand.low, math.ceil(exact - 1e-9 * max(1.0, exact)))
