"""How many workers of each operator, and where? The plan of a recipe, and what else has to be known about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.errors import InfeasibleError
from dovetail.recipes.compiling import needs_here
from dovetail.resources.cluster import Cluster
from dovetail.scheduling.planner import plan as make_plan

if TYPE_CHECKING:
    from dovetail.recipes.recipe import Recipe
    from dovetail.scheduling.plan import Plan


def plan(recipe: Recipe, cluster: Cluster | str = "auto", mode: str | None = None, **how: Any) -> Plan:
    """As `dt.plan`; what does not fit is told with the file's lines."""
    there = Cluster.of(cluster)
    try:
        return make_plan(recipe.pipeline(there), there, mode=mode or recipe.mode, **how)
    except InfeasibleError as error:
        from dovetail.recipes.infeasible import told

        raise told(recipe, there, mode, error) from None


def notes(recipe: Recipe, cluster: Cluster) -> list[str]:
    """What the reader of a plan would not guess."""
    how = recipe.how(cluster)
    found = list(recipe.notes)
    if recipe.top.get("np") is not None and how.auto:
        found.append(
            f"np: {recipe.top['np']} is not used: workers are set by speed; auto_op_parallelism: false makes it count"
        )
    on_cpu = [step.op for step in recipe.steps if step.needs.cuda and not needs_here(step, how).cuda]
    if on_cpu:
        found.append(f"there is no GPU: {', '.join(dict.fromkeys(on_cpu))} would run on CPUs")
    alone = [
        step.op
        for step in recipe.steps
        if needs_here(step, how).cuda and not {"num_gpus", "gpu_required", "resources"} & step.given.keys()
        if step.needs.resources.gpu_memory is None
    ]
    if alone:
        found.append(
            f"a card for each worker of {', '.join(dict.fromkeys(alone))}: they say no memory; "
            "with memory: '2GB' several share a card"
        )
    elsewhere = [step.op for step in recipe.steps if step.unready is not None]
    if elsewhere:
        found.append(f"planned, but cannot run here: {', '.join(dict.fromkeys(elsewhere))}; dovetail run says why")
    return found
