"""Health checks of instances: their limits, their outcome, and what it means for the instance. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.pipeline.durations import parse_duration

if TYPE_CHECKING:
    from dovetail.actors.role import Health


class HealthLimits(NamedTuple):
    """`dt.Health` in seconds."""

    period_s: float
    timeout_s: float
    failure_threshold: int

    @classmethod
    def of(cls, health: Health) -> HealthLimits:
        return cls(parse_duration(health.period), parse_duration(health.timeout), health.failure_threshold)


class HealthChecked(NamedTuple):
    """Event: the outcome of a health check, or an instance that does not respond."""

    worker: int
    instance: tuple[str, int]
    problem: str
    """Problem of the instance; empty if it is healthy."""
    counts: bool = True
    """Whether the class has a method `health`. Without one, an instance that does not respond is degraded, but not
    restarted."""


class UnhealthyInstance(NamedTuple):
    """An instance whose last check failed."""

    problem: str
    since: float
    failures: int
    """Consecutive failed checks."""

    def restart_reason(self) -> str:
        return f"{self.problem}; {self.failures} health checks in succession failed"
