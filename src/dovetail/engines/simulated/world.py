"""Description of a simulated world: behaviour of units and items, scripted events, node losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dovetail.control.events import LossCause
from dovetail.pipeline.units import fuse_stages, rate_of_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.control.events import Event
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Node

Key = tuple[int, ...]
"""A source number, followed by child numbers for an item that was fanned out."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Every call takes its mean duration."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Factors with mean 1 and a long tail; sigma is the standard deviation of their logarithm."""

    sigma: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Measured factors, one per call of the unit in start order, repeated cyclically."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.factors, "a trace needs at least one factor"


Spread = Constant | Lognormal | Trace


@dataclass(frozen=True, slots=True)
class Gives:
    """n = 1: the item passes unchanged; otherwise n children; n = 0 drops the item."""

    n: int = 1


@dataclass(frozen=True, slots=True)
class Raises:
    """The call raises; `text` is type and message."""

    text: str = "ValueError: simulated"
    worker_broken: bool = False
    """See `CallFailure`."""


@dataclass(frozen=True, slots=True)
class Kills:
    """The worker dies during the call, by a signal or with an exit code."""

    cause: LossCause = LossCause.SIGNAL
    code: int = 9

    @property
    def detail(self) -> str:
        return f"{'exit code' if self.cause is LossCause.EXIT else 'signal'} {self.code}"


@dataclass(frozen=True, slots=True)
class Hangs:
    """The call never returns."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The item passes, and takes this many times as long."""

    factor: float


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The call runs out of memory; `Behaviour.oom` specifies the symptom."""


ItemOutcome = Gives | Raises | Kills | Hangs | Slow | OutOfMemory


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Behaviour of the workers of one unit."""

    seconds_per_item: float = 1.0
    seconds_per_batch: float = 0.0
    spread: Spread = Constant()
    """Multiplies the duration of a call."""
    returns: float = 1.0
    """Outputs per input; the sum over all messages is exact, rounded down."""
    bytes_out: int = 0
    """Size of one item."""
    setup_s: float | tuple[float, float] = 0.0
    """Time until a worker is ready: seconds, or mean and sigma of a lognormal."""
    setup_failures: float = 0.0
    """Share of starts that fail, after their setup time."""
    setup_error: str = "RuntimeError: simulated setup failure"
    deaths_per_hour: float = 0.0
    """Mean lifetime of one worker, from when it is ready."""
    stragglers: tuple[float, float] = (0.0, 1.0)
    """Share of slow workers, and their slowdown factor."""
    memory_items: int | None = None
    """A call with more items than this runs out of memory."""
    oom: Literal["death", "raise"] = "death"
    peak_bytes: int = 0
    """Host memory that a worker reports."""
    poison: frozenset[Key] = frozenset()
    """Items that raise, in a tracked run, and leave their worker raising for every later item."""
    item: Callable[[Key, int], ItemOutcome] | None = None
    """Outcome of an item, in a tracked run, at this attempt of the unit, counted from 1."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kills workers of the unit in start order; ignored beyond the number of workers."""

    unit: str
    nth: int = 0


@dataclass(frozen=True, slots=True)
class LoseNode:
    """A node leaves the cluster."""

    name: str


@dataclass(frozen=True, slots=True)
class JoinNode:
    node: Node


@dataclass(frozen=True, slots=True)
class SlowDown:
    """Calls of a unit take a multiple of their time until a point of virtual time."""

    unit: str
    factor: float
    until_s: float


@dataclass(frozen=True, slots=True)
class PostEvent:
    """An event posted at that time."""

    event: Event


@dataclass(frozen=True, slots=True)
class ScriptedEvent:
    """An action at a point of virtual time: `dt.LoseNode`, `dt.SlowDown`, ..."""

    time_s: float
    action: KillWorker | LoseNode | JoinNode | SlowDown | PostEvent


@dataclass(frozen=True, slots=True)
class World:
    """Description of simulated workers and nodes: speed, crashes, node losses and scripted events."""

    behaviours: Mapping[str, Behaviour]
    """Behaviour by name of the hosted object, which is that of the unit."""
    seed: int = 0
    hop_s: float = 0.001
    """Overhead of every message and every call."""
    script: tuple[ScriptedEvent, ...] = ()
    node_losses_per_hour: float = 0.0
    """Expected losses of one node per hour."""
    breadcrumb_share: float = 1.0
    """Share of deaths that leave a breadcrumb; a bool is accepted."""
    inexact_share: float = 0.0
    """Share of breadcrumbs that name only the message."""
    tracked: bool = False
    """Whether items have individual keys and outcomes (`Behaviour.item`); otherwise they are only counted."""

    def behaviour_of(self, unit: str) -> Behaviour:
        found = self.behaviours.get(unit)
        if found is None:
            raise LookupError(f"the simulated world has no behaviour for {unit!r}, only for {sorted(self.behaviours)}")
        return found


def world_from_pipeline(
    pipeline: Pipeline,
    *,
    rates: Mapping[str, float] | None = None,
    returns: Mapping[str, float] | None = None,
    every: Mapping[str, Any] | None = None,
    units: Mapping[str, Mapping[str, Any]] | None = None,
    **world: Any,
) -> World:
    """A world whose workers are as fast as the stages specify (default 1 item/s), or as `rates` and `returns` do.

    `every` sets fields of Behaviour for all units, `units` for single ones; other keywords are passed to World.
    """
    rate_of = {stage.name: stage.rate or 1.0 for stage in pipeline.order} | dict(rates or {})
    returns_of = {stage.name: 1.0 if stage.returns is None else stage.returns for stage in pipeline.order}
    returns_of |= returns or {}
    behaviours = {}
    for unit in fuse_stages(pipeline):
        out = 1.0
        for name in unit.stages:
            out *= returns_of[name]
        fields = {"seconds_per_item": 1 / rate_of_unit(unit.stages, rate_of, returns_of), "returns": out}
        behaviours[unit.name] = Behaviour(**(fields | dict(every or {}) | dict((units or {}).get(unit.name, {}))))
    return World(behaviours, **world)
