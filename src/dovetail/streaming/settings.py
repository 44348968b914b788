"""Settings of a stream (StreamOptions) and of each of its units (UnitSpec, built from the pipeline and the plan)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.control.commands import HostedObject
from dovetail.scheduling.demand import ASSUMED
from dovetail.scheduling.replan.snapshot import ReplanRules

if TYPE_CHECKING:
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.plan import Plan, UnitPlan


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Numbers in seconds, items and bytes. The defaults are for a finite run on any cluster."""

    ordered: bool = False
    """Deliver epochs in the order of their input; see `control.commands.Deliver`."""
    ordered_batches: bool = False
    """Whoever is called with several items gets neighbours, in the order of the source: `ordered` implies it."""
    eager: bool = False
    """Deliver results at once instead of with their epoch: for serving, and where no payload can be lost."""
    serving: bool = False
    """The source has no end: an epoch is closed by age too."""
    max_wait_s: float | None = None
    """A batch that is not full goes after this long; None: only at the end of its epoch."""
    max_failed_items: int | float | None = None
    """A count, or a share of the source items (float below 1)."""
    """More items set aside than this fail the run."""
    follow_plan: bool = False
    """Start with the plan's workers even where their speed was only assumed."""
    replan: bool = True
    replan_every_s: float = 5.0
    first_replan_s: float | None = None
    """Sooner than that, where workers start at once and short runs count."""
    byte_budget: int = 4 << 30
    """What may wait in queues, in bytes."""
    queued_messages_per_slot: float = 2.0
    """Messages that may wait per slot of the workers in front of which they wait."""
    min_queued_messages: int = 8
    """Messages that may wait however few workers there are: chance must not starve a unit that is just fast enough."""
    target_message_s: float = 0.004
    """Work per message; a batch that takes longer is a message of its own."""
    max_message_items: int = 1024
    """The most items per message, unless a batch is larger."""
    max_message_bytes: int = 4 << 20
    """The most a message should bring or give, unless one batch is more."""
    max_queue_bytes: int = 32 << 20
    """What may wait in front of a unit, in bytes, unless its workers' next messages are more."""
    drain_finishes_waves: bool = False
    """A drain finishes all that was read, later waves included: for runs that nobody resumes."""
    payloads_survive: bool = False
    """Nothing that a worker gave can be lost with a node: then nobody needs to keep an epoch's input."""
    hop_s: float = 0.001
    """How long a message travels; a worker gets a second one in advance where that matters."""
    target_epoch_s: float = 0.5
    """Source work per epoch."""
    target_epoch_batches: int = 20
    """Full batches of the slowest unit per epoch, at least."""
    max_epoch_s: float = 60.0
    """However many batches of a late unit that is: an epoch is no more than so much source work, if it has a few."""
    max_open_epochs: int = 64
    """With ordered output: no more are begun while so many wait."""
    teardown_timeout_s: float = 30.0
    """A worker that does not stop within this time is killed."""
    max_setup_failure_share: float = 0.3
    """The share of starts that may fail once three did."""
    rules: ReplanRules = field(default_factory=ReplanRules)

    def __post_init__(self) -> None:
        assert not (self.ordered and self.eager), "what is delivered at once cannot be in order"


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit's settings."""

    name: str
    shape: Shape
    hosted: HostedObject
    stages: tuple[str, ...] = ()
    """By name; several, if they are fused."""
    parents: tuple[str, ...] = ()
    """Units; none: it gets source items."""
    wave: int = 0
    batch_size: int = 1
    slots: int = 1
    low: int = 1
    high: int | None = None
    per_node: int | None = None
    retries: int = 3
    skip_failed: bool = False
    """Whether an item that cannot be done is set aside, instead of failing the run."""
    retries_in_worker: bool = False
    """Workers retry calls that raise (`dt.Retry`); the controller then only isolates the items that keep failing."""
    timeout_s: float | None = None
    """Time limit of a call, for all stages of the unit together."""
    retry_s: float = 0.0
    """Time that the retries of one call may take in its worker."""
    setup_timeout_s: float | None = None
    recycle_batches: int | None = None
    recycle_s: float | None = None
    barrier: bool = False
    rate: float | None = None
    """Items per second and worker, if somebody said so."""
    returns: float | None = None
    """Items out per item in, if somebody said so."""


def unit_specs(pipeline: Pipeline, plan: Plan) -> tuple[UnitSpec, ...]:
    """Parents before children. A barrier has a wave to itself: what comes after it is cut into epochs again."""
    unit_of = {stage: unit.name for unit in plan.units for stage in unit.stages}
    waves = _assign_waves(plan)
    position = {stage.name: index for index, stage in enumerate(pipeline.order)}
    units = sorted(plan.units, key=lambda unit: position[unit.stages[0]])
    return tuple(_unit_spec(pipeline, unit, unit_of, waves[unit.name]) for unit in units)


def _assign_waves(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    wave = 0
    for planned in range(len(plan.waves)):
        members = [unit for unit in plan.units if unit.wave == planned]
        barriers = [unit.name for unit in members if unit.barrier]
        others = [unit.name for unit in members if not unit.barrier]
        for names in filter(None, (barriers, others)):
            found |= dict.fromkeys(names, wave)
            wave += 1
    return found


def _unit_spec(pipeline: Pipeline, unit: UnitPlan, unit_of: dict[str, str], wave: int) -> UnitSpec:
    stages = tuple(pipeline.stage(name) for name in unit.stages)
    head = stages[0]
    given = [stage.returns for stage in stages if stage.returns is not None]
    timeout_s, policy = head.timeout_s, head.error_policy
    slots = head.slots or 1
    return UnitSpec(
        name=unit.name,
        shape=unit.shape,
        hosted=HostedObject(unit.name, stages, slots),
        stages=unit.stages,
        parents=tuple(dict.fromkeys(unit_of[name] for name in pipeline.parents(head.name))),
        wave=wave,
        batch_size=head.batch_size,
        slots=slots,
        low=1 if unit.barrier else unit.low,
        high=1 if unit.barrier else unit.high,
        per_node=unit.per_node,
        retries=head.retries,
        skip_failed=policy.then == "skip",
        retries_in_worker=bool(policy.retry),
        retry_s=policy.times * (timeout_s or 0.0) + policy.max_wait_s if policy.retry else 0.0,
        timeout_s=None if timeout_s is None else timeout_s * len(stages),
        setup_timeout_s=head.setup_timeout_s,
        recycle_batches=head.recycle_batches,
        recycle_s=head.recycle_s,
        barrier=unit.barrier,
        rate=None if unit.rate_source == ASSUMED else unit.rate,
        returns=math.prod(given) if len(given) == len(stages) else None,
    )
