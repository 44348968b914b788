"""Input and output of a replan: Snapshot of units and workers, and the Replan with starts and stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats
    from dovetail.resources.shape import Shape


class WorkerPhase(Enum):
    """Phase of a worker's life, as far as replanning needs it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker that holds seats now. Workers on lost nodes are not listed."""

    worker: int
    unit: str
    seats: Seats
    phase: WorkerPhase = WorkerPhase.READY
    movable: bool = True
    """False while stopping it would lose more than it gains, for example while it runs a suspect item."""
    external: bool = False
    """The worker belongs to another run: it occupies its seats, and a replan neither counts nor moves it."""


@dataclass(frozen=True, slots=True)
class UnitSnapshot:
    """One unit of a running pipeline: its needs, its measured rate and its queue."""

    name: str
    shape: Shape
    rate: float | None = None
    """Items per second of one busy worker; None: neither given nor measured."""
    per_source: float = 1.0
    """Input items per item of the source."""
    low: int = 1
    high: int | None = None
    per_node: int | None = None
    confidence: float = 1.0
    """Certainty of the rate, from 0 (a guess, or given by the author) to 1 (many consistent measurements)."""
    queued: int = 0
    """Items in its input queue."""
    backlogged: bool = False
    """Its workers always had more input waiting, so this unit limits the rate and not the units before it."""
    starved_s: float = 0.0
    """Time since it last had work; 0 while it has work."""
    setup_s: float = 0.0
    """Time until a new worker is ready."""
    drain_s: float = 0.0
    """Time until a worker that is asked to stop has finished its work in flight."""
    finished: bool = False
    """It has no work left and will get none."""
    ancestors: frozenset[str] | None = None
    """Units whose output reaches it; None: all units before it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Complete input of a replan. Equal snapshots give equal replans."""

    cluster: Cluster
    """The nodes that are available now."""
    units: tuple[UnitSnapshot, ...]
    workers: tuple[WorkerSnapshot, ...]
    horizon_s: float = 600.0
    """Time within which a change must pay: the expected rest of the run if it is known, else a default."""


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """One worker to start. It waits while its seats are held by a worker that the same replan stops."""

    unit: str
    seats: Seats
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedStop:
    """One worker to drain and stop."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Replan:
    """The changes to make, their reasons, and the rates before and after."""

    starts: tuple[PlannedStart, ...] = ()
    stops: tuple[PlannedStop, ...] = ()
    cancelled_drains: tuple[int, ...] = ()
    """Draining workers that stay."""
    rate_before: float = 0.0
    """Source items per second of the current workers, without draining ones."""
    rate_after: float = 0.0
    bottleneck: str = ""
    """The slowest unit after the changes; empty if no rate is known."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Unit -> workers after the changes."""
    reasons: tuple[str, ...] = ()
    """The decision in sentences with numbers, also when nothing changes."""

    @property
    def changes(self) -> int:
        return len(self.starts) + len(self.stops)
