"""Settings of a stream (StreamOptions) and of each of its units (UnitSpec, built from the pipeline and the plan)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.control.commands import HostedObject
from dovetail.scheduling.replan.cost_benefit import ReplanRules
from dovetail.scheduling.stage_rates import ASSUMED

if TYPE_CHECKING:
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.scheduling.plan import Plan, UnitPlan

FIRST_REPLAN_S = 1.0
"""`first_replan_s` of runs and services."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a stream, in seconds, items and bytes. The defaults suit a finite run on any cluster."""

    ordered: bool = False
    """Deliver epochs in the order of their input; see `control.commands.Deliver`."""
    ordered_batches: bool = False
    """Batches contain neighbouring items, in the order of the source; implied by `ordered`."""
    eager: bool = False
    """Deliver results immediately instead of with their epoch: for serving, and if no payload can be lost."""
    serving: bool = False
    """The source has no end: epochs are also closed by age."""
    max_wait_s: float | None = None
    """An incomplete batch is sent after this time; None: only at the end of its epoch."""
    max_failed_items: int | float | None = None
    """The run fails when more items than this fail: a count, or a share of the source items (float below
    1)."""
    follow_plan: bool = False
    """Start with the workers of the plan even if their rates were only assumed."""
    replan: bool = True
    replan_every_s: float = 5.0
    first_replan_s: float | None = None
    """Time of the first replan, if it differs: for workers that start immediately and for short runs."""
    byte_budget: int = 4 << 30
    """Bytes that may wait in all queues together."""
    queued_messages_per_slot: float = 2.0
    """Messages that may wait in front of a unit per slot of its workers."""
    min_queued_messages: int = 8
    """Messages that may wait in any case, so that variance does not starve a unit that is just fast enough."""
    target_message_s: float = 0.004
    """Work per message; a batch that takes longer is a message by itself."""
    max_message_items: int = 1024
    """Maximum items per message, unless a batch is larger."""
    drain_finishes_input: bool = False
    """A drain processes everything that was read, including later waves: for runs that cannot be resumed. Otherwise it
    finishes the epochs that workers have begun."""
    payloads_survive: bool = False
    """No result of a worker can be lost with a node, so the input of an epoch need not be kept."""
    hop_s: float = 0.001
    """Transport time of a message; if it matters, workers get a message in advance."""
    target_epoch_s: float = 0.5
    """Source work per epoch."""
    target_epoch_batches: int = 20
    """Minimum full batches of every unit per epoch."""
    max_epoch_s: float = 60.0
    """Maximum source work per epoch, as long as it contains a few batches of every unit."""
    max_open_epochs: int = 64
    """With ordered output: maximum number of epochs that are open or wait for an earlier one."""
    max_setup_failure_share: float = 0.3
    """Maximum share of failed setups, once three have failed."""
    rules: ReplanRules = field(default_factory=ReplanRules)

    def __post_init__(self) -> None:
        assert not (self.ordered and self.eager), "results that are delivered immediately cannot be ordered"


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Settings of one unit: its part of the plan, what its workers host, and how its items are processed."""

    plan: UnitPlan
    """Name, stages, wave, resources per worker and limits of the number of workers."""
    hosted: HostedObject
    parents: tuple[str, ...] = ()
    """Parent units; none: the unit gets source items."""
    batch_size: int = 1
    partial_in_epoch: bool = False
    """A batch ends with its epoch, also if results need no order."""
    retries: int = 3
    skip_failed: bool = False
    """Record items that failed with an exception and continue, instead of failing the run."""
    death_retries: int = 3
    """Retries of items whose worker died."""
    skip_deaths: bool = False
    """Record items whose worker died and continue, instead of failing the run."""
    death_backoff_s: float = 0.0
    """Wait before the first retry after a death; it doubles with every further death."""
    retries_in_worker: bool = False
    """Workers retry calls that raise (`dt.Retry`); the controller then only isolates the items that keep failing."""
    timeout_s: float | None = None
    """Time limit of a call, for all stages of the unit together."""
    retry_s: float = 0.0
    """Time that the retries of one call may take in its worker."""
    setup_timeout_s: float | None = None
    max_setup_failures: int | None = None
    """Consecutive failed setups that do not fail the run; None: a share of all setups may fail."""
    recycle_batches: int | None = None
    recycle_s: float | None = None
    returns: float | None = None
    """Items out per item in, if configured."""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of its stages; several if they are fused."""
        return self.plan.stages

    @property
    def wave(self) -> int:
        return self.plan.wave

    @property
    def barrier(self) -> bool:
        return self.plan.barrier

    @property
    def slots(self) -> int:
        """Calls that a worker runs at the same time."""
        return self.hosted.slots

    @property
    def rate(self) -> float | None:
        """Items per second of one worker, if configured or known from earlier runs."""
        return None if self.plan.rate_source == ASSUMED else self.plan.rate


def unit_specs(pipeline: Pipeline, plan: Plan) -> tuple[UnitSpec, ...]:
    """Settings of all units, parents before children."""
    unit_of = {stage: unit.name for unit in plan.units for stage in unit.stages}
    position = {stage.name: index for index, stage in enumerate(pipeline.order)}
    units = sorted(plan.units, key=lambda unit: position[unit.stages[0]])
    return tuple(_unit_spec(pipeline, unit, unit_of) for unit in units)


def _unit_spec(pipeline: Pipeline, unit: UnitPlan, unit_of: dict[str, str]) -> UnitSpec:
    stages = tuple(pipeline.stage(name) for name in unit.stages)
    head = stages[0]
    given = [stage.returns for stage in stages if stage.returns is not None]
    timeout_s, policy, death_policy = head.timeout_s, head.error_policy, head.death_policy
    return UnitSpec(
        plan=unit,
        hosted=HostedObject(unit.name, tuple(stage.code() for stage in stages), head.slots or 1),
        parents=tuple(dict.fromkeys(unit_of[name] for name in pipeline.parents(head.name))),
        batch_size=head.batch_size,
        partial_in_epoch=head.partial_batches == "epoch",
        retries=head.retries,
        skip_failed=policy.then == "skip",
        death_retries=death_policy.times if death_policy.retry else head.retries,
        skip_deaths=death_policy.then == "skip",
        death_backoff_s=death_policy.backoff_s if death_policy.retry else 0.0,
        retries_in_worker=bool(policy.retry),
        retry_s=policy.times * (timeout_s or 0.0) + policy.max_wait_s if policy.retry else 0.0,
        timeout_s=None if timeout_s is None else timeout_s * len(stages),
        setup_timeout_s=head.setup_timeout_s,
        max_setup_failures=head.max_setup_failures,
        recycle_batches=head.recycle_batches,
        recycle_s=head.recycle_s,
        returns=math.prod(given) if len(given) == len(stages) else None,
    )
