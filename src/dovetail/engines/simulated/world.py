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
"""A source number, and the child numbers of an item that was fanned out."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Every call takes its mean time."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Factors with mean 1 and a long tail; sigma is the standard deviation of their logarithm."""

    sigma: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Measured factors, one per call of the unit in the order of their beginning, and again from the start."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.factors, "a trace needs at least one factor"


Spread = Constant | Lognormal | Trace


@dataclass(frozen=True, slots=True)
class Gives:
    """n = 1: the item itself goes on; otherwise n children, and none of them drops it."""

    n: int = 1


@dataclass(frozen=True, slots=True)
class Raises:
    """The call raises; `text` is type and message."""

    text: str = "ValueError: simulated"


@dataclass(frozen=True, slots=True)
class Kills:
    """The worker dies in the call, by a signal or with an exit code."""

    cause: LossCause = LossCause.SIGNAL
    code: int = 9

    @property
    def detail(self) -> str:
        return f"{'exit code' if self.cause is LossCause.EXIT else 'signal'} {self.code}"


@dataclass(frozen=True, slots=True)
class Hangs:
    """The call never ends."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The item goes on, and takes so many times as long."""

    factor: float


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The call needs more memory than there is; `Behaviour.oom` says how that shows."""


ItemOutcome = Gives | Raises | Kills | Hangs | Slow | OutOfMemory


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How workers of one unit behave."""

    seconds_per_item: float = 1.0
    seconds_per_batch: float = 0.0
    spread: Spread = Constant()
    """Multiplies the time of a call."""
    returns: float = 1.0
    """Items out per item in: the sum over all messages is exact, rounded down."""
    bytes_out: int = 0
    """Of one item."""
    setup_s: float | tuple[float, float] = 0.0
    """Until a worker is ready: seconds, or the mean and sigma of a lognormal."""
    setup_failures: float = 0.0
    """The share of starts that fail, after their setup time."""
    setup_error: str = "RuntimeError: simulated setup failure"
    deaths_per_hour: float = 0.0
    """Of one worker, from when it is ready."""
    stragglers: tuple[float, float] = (0.0, 1.0)
    """This share of the workers takes so many times as long."""
    memory_items: int | None = None
    """A call with more items than this runs out of memory."""
    oom: Literal["death", "raise"] = "death"
    peak_bytes: int = 0
    """Host memory that a worker is seen to use."""
    item: Callable[[Key, int], ItemOutcome] | None = None
    """Of a tracked run: what an item does at this attempt of the unit, counted from 1."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Of the unit's workers in the order of their start; nothing happens if there are not so many."""

    unit: str
    nth: int = 0


@dataclass(frozen=True, slots=True)
class LoseNode:
    name: str


@dataclass(frozen=True, slots=True)
class JoinNode:
    node: Node


@dataclass(frozen=True, slots=True)
class SlowDown:
    """Calls of the unit that begin until then take so many times as long."""

    unit: str
    factor: float
    until_s: float


@dataclass(frozen=True, slots=True)
class PostEvent:
    """As if it were posted at that time."""

    event: Event


@dataclass(frozen=True, slots=True)
class ScriptedEvent:
    time_s: float
    action: KillWorker | LoseNode | JoinNode | SlowDown | PostEvent


@dataclass(frozen=True, slots=True)
class World:
    behaviours: Mapping[str, Behaviour]
    """By the name of the hosted object, which is the unit's."""
    seed: int = 0
    hop_s: float = 0.001
    """What every message and every call takes besides the user's code."""
    script: tuple[ScriptedEvent, ...] = ()
    node_losses_per_hour: float = 0.0
    """Of one node."""
    breadcrumb_share: float = 1.0
    """The share of deaths in a call after which it is known which call it was; True and False will do."""
    inexact_share: float = 0.0
    """The share of crumbs that name only the message."""
    tracked: bool = False
    """Whether items have keys and fates of their own (`Behaviour.item`); otherwise they are only counted."""

    def behaviour_of(self, unit: str) -> Behaviour:
        found = self.behaviours.get(unit)
        if found is None:
            raise LookupError(f"the simulated world does not say how {unit!r} behaves, only {sorted(self.behaviours)}")
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
    """Workers that are as fast as the stages say (1 item/s where they do not), or as `rates` and `returns` do.

    `every` are fields of Behaviour for all units, `units` for single ones; what else is given goes to World.
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
