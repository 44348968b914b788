"""What does a stream know of each unit before anything has run?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.control.commands import Hosted
from dovetail.scheduling.rates import ASSUMED

if TYPE_CHECKING:
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.plan import Plan, UnitPlan


@dataclass(frozen=True, slots=True)
class Work:
    """A unit's settings."""

    name: str
    shape: Shape
    hosted: Hosted
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
    skips: bool = False
    """Whether an item that cannot be done is set aside, instead of failing the run."""
    deadline_s: float | None = None
    setup_deadline_s: float | None = None
    recycle_batches: int | None = None
    recycle_s: float | None = None
    barrier: bool = False
    rate: float | None = None
    """Items per second and worker, if somebody said so."""
    returns: float | None = None
    """Items out per item in, if somebody said so."""


def works_of(pipeline: Pipeline, plan: Plan) -> tuple[Work, ...]:
    """Parents before children. A barrier has a wave to itself: what comes after it is cut into epochs again."""
    unit_of = {stage: unit.name for unit in plan.units for stage in unit.stages}
    waves = _waves(plan)
    position = {stage.name: index for index, stage in enumerate(pipeline.order)}
    units = sorted(plan.units, key=lambda unit: position[unit.stages[0]])
    return tuple(_work(pipeline, unit, unit_of, waves[unit.name]) for unit in units)


def _waves(plan: Plan) -> dict[str, int]:
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


def _work(pipeline: Pipeline, unit: UnitPlan, unit_of: dict[str, str], wave: int) -> Work:
    stages = tuple(pipeline.stage(name) for name in unit.stages)
    head = stages[0]
    given = [stage.returns for stage in stages if stage.returns is not None]
    deadline_s = head.deadline_s
    slots = head.slots or 1
    return Work(
        name=unit.name,
        shape=unit.shape,
        hosted=Hosted(unit.name, stages, slots),
        stages=unit.stages,
        parents=tuple(dict.fromkeys(unit_of[name] for name in pipeline.parents(head.name))),
        wave=wave,
        batch_size=head.batch_size,
        slots=slots,
        low=1 if unit.barrier else unit.low,
        high=1 if unit.barrier else unit.high,
        per_node=unit.per_node,
        retries=head.retries,
        skips=head.on_error == "skip",
        deadline_s=None if deadline_s is None else deadline_s * len(stages),
        setup_deadline_s=head.setup_deadline_s,
        recycle_batches=head.recycle_batches,
        recycle_s=head.recycle_s,
        barrier=unit.barrier,
        rate=None if unit.rate_source == ASSUMED else unit.rate,
        returns=math.prod(given) if len(given) == len(stages) else None,
    )
