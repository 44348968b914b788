"""Improvements: changes of requests, or one more node, that raise the predicted rate of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.errors import PYTHON, AddNodes, Change, InfeasibleError, Subject
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage_function import is_async
from dovetail.resources.cluster import Cluster
from dovetail.resources.sizes import format_exact_size, format_size
from dovetail.scheduling.planner import plan as make_plan
from dovetail.text_format import format_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dovetail.errors import Renderer
    from dovetail.pipeline.stage import Stage
    from dovetail.scheduling.plan import Plan
    from dovetail.scheduling.stage_rates import Profile

MIN_GAIN = 0.05
"""Smaller gains of the rate are not worth a change."""
USE_MARGIN = 1.25
"""A request contains this multiple of the measured use."""
MAX_REQUEST_SHARE = 0.8
"""A request is lowered if less than this share of it remains."""
CPU_STEPS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
MEMORY_STEP_BYTES = 128 << 20
SLOTS_FACTOR, MAX_SLOTS = 4, 64
MAX_WAITING_CPUS = 0.3
"""A worker that uses fewer CPUs than this mostly waits."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """A change that pays, its reason, and the rate that the plan predicts with it."""

    change: Change | AddNodes
    reason: str
    rate: float
    gain: float
    """Increase of the rate as a share of it."""

    def __str__(self) -> str:
        return "\n".join(self.lines(PYTHON))

    def lines(self, renderer: Renderer) -> list[str]:
        rate = f"{format_number(self.rate)} items/s (+{100 * self.gain:.0f} %)"
        return [self.reason, f"  {renderer.fix(self.change)}  # {rate}"]

    def to_dict(self, renderer: Renderer) -> dict[str, object]:
        return {"reason": self.reason, "change": renderer.fix(self.change), "rate": self.rate, "gain": self.gain}


def find_improvements(
    pipeline: Pipeline, plan: Plan, profiles: Mapping[str, Profile], most: int = 2, *, nodes: bool = True
) -> list[Improvement]:
    """Find the changes of a plan with the largest gains, from measurements of earlier runs.

    One more node is offered only if there are not enough other changes, and not without `nodes`. Empty if a speed is
    unknown.
    """
    if plan.rate is None:
        return []
    found = [*_setting_improvements(pipeline, plan, profiles)]
    found = sorted(found, key=lambda one: -one.gain)[:most]
    if nodes and len(found) < most:
        found += sorted(_node_improvements(pipeline, plan, profiles), key=lambda one: -one.gain)[: most - len(found)]
    return found


def _setting_improvements(pipeline: Pipeline, plan: Plan, profiles: Mapping[str, Profile]) -> Iterator[Improvement]:
    for stage in pipeline:
        profile = profiles.get(stage.name)
        if profile is None:
            continue
        for change, reason, changed in _stage_changes(stage, profile):
            stages = [changed[0] if other.name == stage.name else other for other in pipeline]
            rate = _rate(Pipeline(stages, pipeline.name), plan, plan.cluster, {**profiles, stage.name: changed[1]})
            yield from _worthwhile(plan, change, reason, rate)


def _stage_changes(stage: Stage, profile: Profile) -> Iterator[tuple[Change, str, tuple[Stage, Profile]]]:
    """Changes of one stage, with the stage and its profile after them."""
    subject = (Subject("stage", stage.name),)
    resources = stage.resources
    cpus = None if profile.cpu_s is None else profile.cpu_s * profile.rate
    if cpus is not None and resources.cpus:
        less = next((step for step in CPU_STEPS if step >= USE_MARGIN * cpus), math.inf)
        if less <= MAX_REQUEST_SHARE * resources.cpus:
            plural = "" if resources.cpus == 1 else "s"
            reason = f"a worker of {stage.name} requests {resources.cpus:g} CPU{plural} and uses {cpus:.2g}"
            changed = replace(stage, resources=replace(resources, cpus=less))
            yield Change({"cpus": less}, subject), reason, (changed, profile)
    memory_bytes = stage.shape.memory_bytes
    if profile.peak_bytes and memory_bytes:
        enough = MEMORY_STEP_BYTES * math.ceil(USE_MARGIN * profile.peak_bytes / MEMORY_STEP_BYTES)
        if enough <= MAX_REQUEST_SHARE * memory_bytes:
            used = f"requests {format_size(memory_bytes)} memory and used at most {format_size(profile.peak_bytes)}"
            text = format_exact_size(enough)
            changed = replace(stage, resources=replace(resources, memory=text))
            yield Change({"memory": text}, subject), f"a worker of {stage.name} {used}", (changed, profile)
    if cpus is not None and cpus < MAX_WAITING_CPUS and is_async(stage.run) and (stage.slots or 1) < MAX_SLOTS:
        slots = min(MAX_SLOTS, SLOTS_FACTOR * (stage.slots or 1))
        faster = profile.rate * min(slots / (stage.slots or 1), 1 / max(cpus, 1e-9))
        reason = f"a worker of {stage.name} mostly waits, with {stage.slots or 1} calls at a time"
        yield Change({"slots": slots}, subject), reason, (replace(stage, slots=slots), replace(profile, rate=faster))


def _node_improvements(pipeline: Pipeline, plan: Plan, profiles: Mapping[str, Profile]) -> Iterator[Improvement]:
    kinds = {node.rounded().spec(): node for node in plan.cluster.nodes}
    for spec, node in kinds.items():
        larger = Cluster((*plan.cluster.nodes, replace(node, name=" one more")))
        rate = _rate(pipeline, plan, larger, profiles)
        yield from _worthwhile(plan, AddNodes(1, spec), "one more node", rate)


def _rate(pipeline: Pipeline, plan: Plan, cluster: Cluster, profiles: Mapping[str, Profile]) -> float | None:
    try:
        return make_plan(pipeline, cluster, plan.requested, headroom=plan.headroom, profiles=profiles).rate
    except InfeasibleError:
        return None


def _worthwhile(plan: Plan, change: Change | AddNodes, reason: str, rate: float | None) -> Iterator[Improvement]:
    if rate is not None and plan.rate and rate / plan.rate - 1 >= MIN_GAIN:
        yield Improvement(change, reason, rate, rate / plan.rate - 1)
