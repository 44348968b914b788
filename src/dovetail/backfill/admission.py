"""How many workers of a function fit, and what is said if that is fewer than asked for, or none?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.backfill.filling import Filler
from dovetail.engines.ray.where import is_ray
from dovetail.errors import InfeasibleError, Problem
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage import Stage
from dovetail.resources.cluster import Cluster
from dovetail.resources.sizes import about_size
from dovetail.scheduling.planner import plan as make_plan

if TYPE_CHECKING:
    from dovetail.backfill.asking import Asked
    from dovetail.backfill.job import FillJob
    from dovetail.backfill.udf import Udf
    from dovetail.scheduling.plan import Plan

NEVER = "DT439"
STAGE = "fill"
DEATHS = 1000
"""A row that kills workers is found by those who go through its range again, each time in smaller steps."""


def stage_of(job: FillJob, udf: Udf, asked: Asked) -> Stage:
    """The one stage of a backfill. As many workers as asked for, if they fit."""
    workers = (1, asked.workers) if isinstance(asked.workers, int) else asked.workers
    slots = None if udf.is_async else asked.slots or udf.slots
    return Stage(STAGE, Filler(job, udf), udf.resources, workers=workers, slots=slots, retries=DEATHS)


def check_fits(udf: Udf, asked: Asked) -> None:
    """InfeasibleError: not one worker ever fits. Where a Ray has to be asked, that is found when the run starts."""
    if is_ray(asked.engine):
        return
    try:
        make_plan(Pipeline([Stage(STAGE, _nothing, udf.resources)], name="backfill"), asked.cluster)
    except InfeasibleError as error:
        raise told_infeasible(udf, asked, error) from None


def _nothing(items: list[object]) -> list[object]:
    return items


def clamp_note(udf: Udf, asked: Asked, plan: Plan) -> str:
    """One line, if there are fewer than asked for."""
    wanted = asked.workers[1] if isinstance(asked.workers, tuple) else asked.workers
    there = plan.units[0].workers
    if wanted == "auto" or there >= wanted:
        return ""
    short = _short_of(udf, wanted, plan.cluster)
    return f"running {there} of {wanted} workers: {short or 'no more fit on the nodes that there are'}"


def _short_of(udf: Udf, wanted: int, cluster: Cluster) -> str:
    """'8 need 8.0 CPUs, there are 2.0', for what there is too little of."""
    needs = udf.resources
    shape = needs.shape()
    cpus = sum(node.cpu_milli for node in cluster.nodes)
    memory = sum(node.memory_bytes for node in cluster.nodes)
    gpus = sum(len(node.gpus) for node in cluster.nodes)
    if wanted * shape.cpu_milli > cpus:
        return f"{wanted} need {wanted * shape.cpu_milli / 1000:.1f} CPUs, there are {cpus / 1000:.1f}"
    if wanted * needs.gpus > gpus:
        return f"{wanted} need {wanted * needs.gpus:.1f} GPUs, there are {gpus:.1f}"
    if wanted * shape.memory_bytes > memory:
        return f"{wanted} need {about_size(wanted * shape.memory_bytes)} of memory, there are {about_size(memory)}"
    return ""


def told_infeasible(udf: Udf, asked: Asked, error: InfeasibleError) -> InfeasibleError:
    """What can never start, in the words of who wrote the function: which parameter is too large."""
    found = list(error.problems)
    needs = udf.resources
    if not is_ray(asked.engine):
        nodes = Cluster.of(asked.cluster).nodes
        largest = max((node.cpu_milli for node in nodes), default=0) / 1000
        if needs.cpus > largest:
            message = f"{udf.name}: cpus={needs.cpus:g} is more than any node has: the largest has {largest:g} CPUs"
            fix = f"@dt.udf(cpus={largest:g})  or less"
            found.insert(0, Problem(NEVER, message, fixes=(fix,)))
    return InfeasibleError(found)
