"""Why does a recipe not fit, on which lines, and what would? Every change that is offered was tried."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, InfeasibleError, Problem
from dovetail.recipes.changes import with_sets
from dovetail.recipes.needs import WORDS
from dovetail.recipes.reading import written
from dovetail.scheduling.planner import plan as make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.pipeline.stage import Stage
    from dovetail.recipes.reading import Step
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.cluster import Cluster

SHARES = (0.5, 0.33, 0.25, 0.2, 0.125, 0.1, 0.05, 0.02, 0.01)
MOST_LINES = 20
MOST_FIXES = 4
COUNTS, GPUS, CPUS = ("num_proc", "workers"), ("num_gpus", "gpu_required"), ("num_cpus", "cpu_required")
_STAGE = re.compile(r"stage '([^']+)'")
_PAIR = re.compile(r"\b(\w+)=(\"[^\"]*\"|[^\s,]+)")


def told(recipe: Recipe, cluster: Cluster, mode: str | None, error: InfeasibleError) -> InfeasibleError:
    """The same in the words of a recipe, with its lines; all operators at once come as one sum."""
    stages = list(recipe.pipeline(cluster))
    alone = [problem for problem in error.problems if _never(problem)]
    sums = _sums(stages, cluster)
    if not alone and (mode or recipe.mode) == "streaming" and sums:
        return InfeasibleError(_at_once(recipe, stages, cluster, mode, sums))
    return InfeasibleError(_translated(problem, recipe) for problem in error.problems)


def _never(problem: Problem) -> bool:
    """Whether it is about one operator, which does not fit even alone."""
    return problem.code not in ("DT101", "DT102")


def _sums(stages: Sequence[Stage], cluster: Cluster) -> list[tuple[str, float, float]]:
    """(what, asked for, there) of everything of which more is asked for than there is."""
    asked = {"CPUs": sum(_cpus(stage) for stage in stages), "GPUs": sum(_gpus(stage) for stage in stages)}
    there = {
        "CPUs": sum(node.cpu_milli for node in cluster.nodes) / 1000,
        "GPUs": float(sum(len(node.gpus) for node in cluster.nodes)),
    }
    return [(what, asked[what], there[what]) for what in asked if asked[what] > there[what]]


def _least(stage: Stage) -> int:
    workers = stage.workers
    return workers[0] if isinstance(workers, tuple) else workers if isinstance(workers, int) else 1


def _cpus(stage: Stage) -> float:
    return _least(stage) * stage.shape.cpu_milli / 1000


def _gpus(stage: Stage) -> float:
    return _least(stage) * stage.shape.cards * stage.shape.gpu_milli / 1000


def _at_once(
    recipe: Recipe,
    stages: Sequence[Stage],
    cluster: Cluster,
    mode: str | None,
    sums: list[tuple[str, float, float]],
) -> Problem:
    asked = " and ".join(f"{need:.1f} {what}" for what, need, _ in sums)
    there = " and ".join(f"{have:.1f} {what}" for what, _, have in sums)
    message = f"{len(recipe.steps)} operators at once need {asked}; the cluster has {there}"
    steps = {step.name: step for step in recipe.steps}
    evidence = []
    for stage in stages:
        step = steps.get(stage.name)
        if step is None:
            continue
        place = recipe.document.place(("process", step.number, step.op))
        each = f"{stage.resources.cpus:g} CPU" + (f" + {_gpus(stage) / _least(stage):g} GPU" if _gpus(stage) else "")
        total = f"{_cpus(stage):.1f} CPUs" + (f", {_gpus(stage):.1f} GPUs" if _gpus(stage) else "")
        evidence.append(f"{place}  {step.op}: {_least(stage)} x ({each}) = {total}")
    if len(evidence) > MOST_LINES:
        evidence[MOST_LINES:] = [f"... and {len(evidence) - MOST_LINES} more"]
    fixes = tuple(_fixes(recipe, cluster, mode))
    return Problem("DT101", message, tuple(evidence), fixes, recipe.document.place(("process",)))


# --- what would fit


def _fixes(recipe: Recipe, cluster: Cluster, mode: str | None) -> Iterator[str]:
    """As they are typed behind `dovetail plan FILE` or `dovetail run FILE`."""
    seen: set[tuple[str, ...]] = {()}
    found = 0
    for family in _candidates(recipe):
        fitting = (one for one in family if one not in seen and _fits(recipe, cluster, mode, one))
        first = next(fitting, None) if found < MOST_FIXES - 2 else None
        seen.update(family)
        if first is not None:
            found += 1
            yield " ".join(f"--set {_quoted(text)}" for text in first)
    for other in ("auto", "sequential"):
        if _fits(recipe, cluster, other, ()):
            yield f"--mode {other}" if mode is not None else f"--set mode={other}"


def _candidates(recipe: Recipe) -> Iterator[list[tuple[str, ...]]]:
    """Families of changes to the operators; within one, those of which most is left first."""
    counts = [f"process.*.{key}={'auto' if key == 'workers' else -1}" for key in _said(recipe, COUNTS)]
    cpus = [f"process.*.{key}=1" for key in _said(recipe, CPUS)]
    gpus = _said(recipe, GPUS)
    shares = [[f"process.*.{key}={share}" for key in gpus] for share in SHARES if gpus]
    yield [(*counts, *(f"process.*.{key}=null" for key in gpus))]
    yield [tuple(counts)]
    yield [tuple(share) for share in shares]
    yield [(*counts, *share) for share in shares if counts]
    yield [(*counts, *share, *cpus) for share in shares or [[]] if cpus]


def _said(recipe: Recipe, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if any(step.given.get(key) is not None for step in recipe.steps)]


def _fits(recipe: Recipe, cluster: Cluster, mode: str | None, sets: Sequence[str]) -> bool:
    try:
        other = variant(recipe, sets)
        make_plan(other.pipeline(cluster), cluster, mode=mode or other.mode)
    except (InfeasibleError, ConfigError):
        return False
    return True


def variant(recipe: Recipe, sets: Sequence[str]) -> Recipe:
    """The same recipe with some values changed."""
    document = with_sets(recipe.document, sets, ())
    found = written(document, recipe.file.parent)
    if found.problems:
        raise ConfigError(found.problems)
    return replace(recipe, document=document, top=found.top, steps=found.steps)


def _quoted(text: str) -> str:
    return f"'{text}'" if "*" in text else text


# --- what the planner said


def _translated(problem: Problem, recipe: Recipe) -> Problem:
    named = _STAGE.match(problem.message)
    step = next((step for step in recipe.steps if named and step.name == named[1]), None)
    message = problem.message.replace(f"stage '{step.name}'", step.op, 1) if step else problem.message
    path: tuple[Any, ...] = ("process",) if step is None else ("process", step.number, step.op)
    fixes = tuple(_fix(fix, step) for fix in problem.fixes)
    return replace(problem, message=message, fixes=fixes, place=recipe.document.place(path))


def _fix(fix: str, step: Step | None) -> str:
    """`gpu_memory="20GB"` as it is typed for this operator."""
    lead = "or " if fix.startswith("or ") else ""
    text = fix.removeprefix("or ")
    pair = _PAIR.fullmatch(text)
    if pair and pair[1] == "mode":
        return f"{lead}--mode {pair[2].strip(chr(34))}"
    if pair and step is not None:
        return f"{lead}--set process.{step.number}.{WORDS.get(pair[1], pair[1])}={pair[2].strip(chr(34))}"
    return lead + _PAIR.sub(lambda found: f"{WORDS.get(found[1], found[1])}: {found[2].strip(chr(34))}", text)
