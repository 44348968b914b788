"""What can be seen of a running stream? Plain values, taken when an observer asks, never kept by the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class UnitView:
    """One unit at one moment. Everything that ends in `_total` only grows."""

    name: str
    wave: int
    queued: int
    """Items that wait for it."""
    queued_bytes: int
    in_flight: int
    """Items that are with its workers."""
    taken_total: int
    """Items it has dealt with: done, dropped or set aside."""
    given_total: int
    """Items it has given on."""
    batches_total: int
    busy_s_total: float
    """Seconds that its workers spent in the user's code."""
    aside_total: int
    retries_total: int
    starting: int
    ready: int
    draining: int
    """Or stopping."""
    started_total: int
    stopped_total: int
    lost_total: int
    setup_s_total: float
    """Worker-seconds that went into setting workers up."""
    rate: float | None
    """Items per second that one worker takes in while it has work, as measured (or given, before that)."""
    returns: float
    """Items out per item in."""
    backlogged: bool
    finished: bool
    stages: tuple[tuple[str, int, int, float], ...] = ()
    """Of real runs, per stage: its name, items in, items out, seconds in its code. Fused stages are several."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment."""

    worker: int
    unit: str
    node: str
    gpus: tuple[int, ...]
    state: str
    in_flight: int
    """Messages."""
    batches_total: int
    busy_s_total: float


@dataclass(frozen=True, slots=True)
class View:
    """A run at one moment."""

    now: float
    state: str
    """As in control.lifecycle.RunState."""
    wave: int
    waves: int
    read: int
    """Source items read."""
    total: int | None
    """Source items there are, once that is known."""
    finished: int
    """Source items whose epochs are delivered."""
    delivered: int
    """Items that have left the run."""
    aside: int
    bottleneck: str
    predicted: float
    """Source items per second that the last plan expects; 0: not known."""
    replans: int
    error: str
    """Why it failed; empty otherwise."""
    units: tuple[UnitView, ...]
    use: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Resource -> (taken by seats, there in all), in the resource's own integers, as in scheduling.plan.Use."""
    expected: int | None = None
    """Source items there will be, about; None: nobody knows."""
