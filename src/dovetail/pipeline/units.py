"""Units: stages fused so that they share workers.

Linear neighbours are fused if separate workers gain nothing: equal resources and settings, no expensive setup, and no
function that would get smaller batches than its batch_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.pipeline.error_policy import Retry
from dovetail.pipeline.stage_function import Each, is_async, is_class
from dovetail.resources.shape import ShapeKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.pipeline.stage import Stage, Workers
    from dovetail.resources.shape import Shape

NAME_WIDTH = 60
"""Maximum length of the name of a unit in tables."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One stage, or several fused ones, whose workers run them one after another."""

    name: str
    """"a", or "a+b" for two fused stages."""
    stages: tuple[str, ...]
    shape: Shape
    workers: Workers
    workers_per_node: int | None
    batch_size: int
    parents: tuple[str, ...]
    """Names of units."""
    barrier: bool


def fuse_stages(pipeline: Pipeline) -> tuple[Unit, ...]:
    """Parents before children."""
    groups: list[list[Stage]] = []
    group_of: dict[str, list[Stage]] = {}
    for stage in pipeline.order:
        parents = pipeline.parents(stage.name)
        group = group_of[parents[0]] if len(parents) == 1 and len(pipeline.children(parents[0])) == 1 else []
        if not (group and _may_join(group, stage)):
            group = []
            groups.append(group)
        group.append(stage)
        group_of[stage.name] = group
    return tuple(_unit(group, pipeline, group_of) for group in groups)


def rate_of_unit(stages: Sequence[str], rates: Mapping[str, float], returns: Mapping[str, float]) -> float:
    """Items per second that one worker takes in, when it runs these stages one after another."""
    seconds, items = 0.0, 1.0
    for name in stages:
        seconds += items / rates[name]
        items *= returns.get(name, 1.0)
    return 1 / seconds


def multiplicity(pipeline: Pipeline, returns: Mapping[str, float]) -> dict[str, float]:
    """Items that each stage gets per item of the source; several parents add up."""
    items: dict[str, float] = {}
    for stage in pipeline.order:
        parents = pipeline.parents(stage.name)
        items[stage.name] = sum(items[name] * returns.get(name, 1.0) for name in parents) if parents else 1.0
    return items


def _unit(group: Sequence[Stage], pipeline: Pipeline, group_of: Mapping[str, Sequence[Stage]]) -> Unit:
    head = group[0]
    # no unit appears twice: of fused stages only the last has a child outside the unit
    parents = tuple(_name(group_of[parent]) for parent in pipeline.parents(head.name))
    return Unit(
        name=_name(group),
        stages=tuple(stage.name for stage in group),
        shape=head.shape,
        workers=head.workers,
        workers_per_node=head.workers_per_node,
        batch_size=head.batch_size,
        parents=parents,
        barrier=head.barrier,
    )


def _name(group: Sequence[Stage]) -> str:
    return "+".join(stage.name for stage in group)


def short_unit_name(unit: str) -> str:
    """A short name of a unit: the first and the last of many fused stages."""
    stages = unit.split("+")
    if len(stages) < 3 or len(unit) <= NAME_WIDTH:
        return unit
    return f"{stages[0]}+...+{stages[-1]} ({len(stages)} stages)"


def _may_join(group: Sequence[Stage], later: Stage) -> bool:
    head = group[0]
    if not (_may_fuse(head) and _may_fuse(later) and _settings(head) == _settings(later)):
        return False
    keeps_counts = all(stage.returns == 1 for stage in group)
    return later.batch_size == 1 or isinstance(later.run, Each) or keeps_counts


def _may_fuse(stage: Stage) -> bool:
    if not stage.fuse or stage.barrier or stage.ranks != 1 or is_async(stage.run):
        return False
    if stage.workers != "auto" or stage.workers_per_node is not None:
        return False
    if isinstance(stage.on_error, Retry):
        return False  # a retry repeats one call, and not those of the stages before it
    may_hold_a_model = is_class(stage.run) or isinstance(stage.run, str)
    shape = stage.shape
    return not (may_hold_a_model and (shape.kind is not ShapeKind.CPU_ONLY or shape.memory_bytes))


def _settings(stage: Stage) -> tuple[object, ...]:
    """Settings that stages of one unit must have in common; also retries, because a retry repeats the unit."""
    environment = (dict(stage.env or {}), dict(stage.runtime_env or {}))
    timeouts = (stage.timeout_s, stage.setup_timeout_s)
    recycle = (stage.recycle_batches, stage.recycle_s)
    failures = (stage.on_error, stage.retries, stage.on_death, stage.failure_rules, stage.max_setup_failures)
    return (stage.shape, stage.batch_size, stage.partial_batches, stage.slots, environment, timeouts, recycle, failures)
