"""Reading of a plan.json and its check against the pipeline and the cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, Problem
from dovetail.pipeline.units import fuse_stages
from dovetail.scheduling.plan import Plan

if TYPE_CHECKING:
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster


def read_plan(file: str, pipeline: Pipeline, cluster: Cluster, again: str) -> Plan:
    """The plan in a file, or a ConfigError with every difference; `again`: the command that makes a new plan."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(Problem("DT010", f"cannot be read: {reason}", fixes=(again,), place=file)) from None
    try:
        plan = Plan.from_json(text)
    except ConfigError as error:
        raise ConfigError(replace(one, place=file, fixes=(again,)) for one in error.problems) from None
    problems = []
    try:
        plan.require_cluster(cluster)
    except ConfigError as error:
        problems += [replace(one, place=file, fixes=(again,)) for one in error.problems]
    differences = _differences(plan, pipeline)
    if differences:
        message = "the plan does not match the stages of the file"
        problems.append(Problem("DT338", message, tuple(differences), (again,), file))
    if problems:
        raise ConfigError(problems)
    return plan


def _differences(plan: Plan, pipeline: Pipeline) -> list[str]:
    """Differences as sentences; empty if all units exist and need the same resources."""
    planned = {name: unit for unit in plan.units for name in unit.stages}
    units = {name: unit for unit in fuse_stages(pipeline) for name in unit.stages}
    found = [f"stage {name!r} is in the plan but not in the file" for name in planned if name not in units]
    found += [f"stage {name!r} is in the file but not in the plan" for name in units if name not in planned]
    for name in units.keys() & planned.keys():
        before, now = planned[name], units[name]
        if before.shape != now.shape:
            there, here = before.shape.describe(), now.shape.describe()
            found.append(f"stage {name!r}: a worker needs {there} in the plan, {here} in the file")
        elif before.stages != now.stages and not found:
            found.append(f"{'+'.join(before.stages)} share workers in the plan, {'+'.join(now.stages)} in the file")
    return sorted(found)
