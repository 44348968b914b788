"""Input and output of a replan: Snapshot of units and workers, ReplanRules, and the Replan with starts and stops."""

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
    """How far a worker is, as far as replanning cares."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker that holds seats now. Workers of lost nodes are not among them."""

    worker: int
    unit: str
    seats: Seats
    phase: WorkerPhase = WorkerPhase.READY
    movable: bool = True
    """False while stopping it would lose more than it gives, for example while it runs a suspect."""
    external: bool = False
    """It belongs to another run: it takes room, and a replan neither counts nor moves it."""


@dataclass(frozen=True, slots=True)
class UnitSnapshot:
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
    confidence: float = 1.0
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
    units: tuple[UnitSnapshot, ...]
    workers: tuple[WorkerSnapshot, ...]
    horizon_s: float = 600.0
    """For how long a change can pay: the rest of the run as far as it is known, else a default."""


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """One worker to start. Its seats may still be held by a worker that the same replan stops: then it waits."""

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
    """What to change, why, and what that brings."""

    starts: tuple[PlannedStart, ...] = ()
    stops: tuple[PlannedStop, ...] = ()
    cancelled_drains: tuple[int, ...] = ()
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


@dataclass(frozen=True, slots=True)
class ReplanRules:
    """Each rule can be switched off alone; the numbers say how far it goes."""

    queues: bool = True
    """What waits decides which unit is the bottleneck; speed only says how many workers that takes."""
    lull: bool = True
    """A unit without work keeps its workers until bringing them back would have cost less than the wait."""
    ramp: bool = True
    """An unmeasured unit grows by one worker at a time, one with an unsure rate at most to twice its size."""
    reserve: bool = True
    """The least of every unit is seated first, hardest first and tightly, whoever has to move for it; ramping shares
    leave whole cards to whole-GPU units. Off: in the order of the pipeline, and no worker moves."""
    pays: bool = True
    """A change must bring more items within the horizon than starting and stopping costs."""
    spares: bool = True
    """A worker above need whose seat nobody wants stays."""
    take_back: bool = True
    """A draining worker whose unit needs one more is kept instead of starting another."""
    min_gain: float = 0.03
    """A running pipeline is left alone for less than this share of its rate."""
    close_enough: float = 0.02
    """Of all plans this close to the best, the one with the fewest changes is taken."""
    change_cost: float = 0.03
    """Share of the rate that must be won by changing as many workers as there are; decides between close plans."""
    headroom: float = 1.0
    """At a plan from empty, measured units may have up to so many times the slowest's rate from what is left over."""
    unsure_below: float = 0.5
    """Below this certainty of a rate a unit at most doubles."""
