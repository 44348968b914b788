"""What does a replan know of a running pipeline, and what does it say? Plain values on both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats
    from dovetail.resources.shape import Shape


class Standing(Enum):
    """How far a worker is, as far as replanning cares."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Seated:
    """A worker that holds seats now. Workers of lost nodes are not among them."""

    worker: int
    unit: str
    seats: Seats
    standing: Standing = Standing.READY
    moveable: bool = True
    """False while stopping it would lose more than it gives, for example while it runs a suspect."""


@dataclass(frozen=True, slots=True)
class UnitNow:
    """One unit of a running pipeline: what it needs, how fast it is, and what waits in front of it."""

    name: str
    shape: Shape
    rate: float | None = None
    """Items per second that one worker takes in while it has work; None: neither given nor measured."""
    per_source: float = 1.0
    """Items it gets per item of the source."""
    low: int = 1
    high: int | None = None
    per_node: int | None = None
    sure: float = 1.0
    """How certain the rate is, from 0 (a guess, or a value that its author gave) to 1 (many like measurements)."""
    queued: int = 0
    """Items that wait for it."""
    backlogged: bool = False
    """Whether more waits than its workers have in hand: it, not what is before it, sets the pace there."""
    starved_s: float = 0.0
    """For how long it has had nothing to do; 0 while it has."""
    setup_s: float = 0.0
    """Seconds until a new worker is ready."""
    drain_s: float = 0.0
    """Seconds until a worker that is told to stop has finished what it has."""
    finished: bool = False
    """Nothing will come to it any more and it has nothing in hand."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a replan looks at: same snapshot, same replan."""

    cluster: Cluster
    """The nodes that are there now."""
    units: tuple[UnitNow, ...]
    workers: tuple[Seated, ...]
    horizon_s: float = 600.0
    """For how long a change can pay: the rest of the run as far as it is known, else a default."""


@dataclass(frozen=True, slots=True)
class Start:
    """One worker to start. Its seats may still be held by a worker that the same replan stops: then it waits."""

    unit: str
    seats: Seats
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """One worker to drain and stop."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Replan:
    """What to change, why, and what that brings."""

    starts: tuple[Start, ...] = ()
    stops: tuple[Stop, ...] = ()
    keeps: tuple[int, ...] = ()
    """Draining workers whose drain is taken back."""
    rate_before: float = 0.0
    """Source items per second of the workers that are there (not those that drain)."""
    rate_after: float = 0.0
    bottleneck: str = ""
    """The slowest unit afterwards; empty if no rate is known."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Unit -> workers when all changes are done."""
    reasons: tuple[str, ...] = ()
    """The decision in words and numbers, also when nothing changes."""

    @property
    def changes(self) -> int:
        return len(self.starts) + len(self.stops)
