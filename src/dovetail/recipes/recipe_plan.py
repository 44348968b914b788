"""Plan of a recipe; if it does not fit, the lines that request too much, and `--set` changes that were tried."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.yaml_writer import yaml_literal
from dovetail.errors import UNSET, ConfigError, InfeasibleError, Problem, Renderer, with_note
from dovetail.pipeline.option_renderer import STAGE_SETTINGS, OptionRenderer
from dovetail.pipeline.units import fuse_stages
from dovetail.recipes.compiler import HASH_STAGE_SUFFIX, effective_requirements
from dovetail.recipes.file_keys import DEPRECATED_NAMES
from dovetail.recipes.overrides import apply_recipe_overrides
from dovetail.recipes.recipe_file import parse_recipe
from dovetail.recipes.requirements import RECIPE_RESOURCE_NAMES
from dovetail.resources.cluster import Cluster
from dovetail.scheduling.modes import split_at_barriers
from dovetail.scheduling.planner import plan as make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dovetail.errors import AddNodes, Change, Subject
    from dovetail.pipeline.units import Unit
    from dovetail.recipes.recipe import Recipe
    from dovetail.recipes.recipe_file import RecipeStep
    from dovetail.scheduling.plan import Plan

CANDIDATE_GPU_SHARES = (0.5, 0.33, 0.25, 0.2, 0.125, 0.1, 0.05, 0.02, 0.01)
MAX_EVIDENCE_LINES = 20
MAX_FIXES = 4
MAX_FIX_SEARCH_S = 2.0
"""Time for the search of fixes; each trial plans the recipe."""
WORKER_COUNT_KEYS, GPU_KEYS, CPU_KEYS = (
    ("num_proc", "workers"),
    ("num_gpus", "gpu_required"),
    ("num_cpus", "cpu_required"),
)
AUTO_VALUES = {"num_proc": -1, "workers": "auto"}


def explain_infeasible(
    recipe: Recipe,
    cluster: Cluster,
    mode: str | None,
    error: InfeasibleError,
    clock: Callable[[], float] = time.monotonic,
) -> InfeasibleError:
    """The same error in the terms of the recipe, with its lines; all operators that run at once are one sum."""
    trials = _FixTrials(recipe, cluster, clock)
    alone = [problem for problem in error.problems if _never_fits(problem)]
    if not alone and (mode or recipe.mode) == "streaming":
        parts = split_at_barriers(fuse_stages(recipe.pipeline(cluster)))
        short = [part for part in parts if _shortages(part, cluster)]
        if short:
            return InfeasibleError(_concurrency_problem(trials, short[0], mode))
    tried = () if alone else tuple(_tried_fixes(trials, mode))
    found: dict[tuple[str, str], Problem] = {}
    renderer = RecipeRenderer(recipe, cluster)
    for problem in error.problems:
        one = _problem_for_recipe(problem, renderer)
        without = _cpu_only_fix(trials, mode, _steps_in_problem(problem, recipe))
        # the two stages of a deduplicator have the same requirements
        found.setdefault((one.code, one.place), replace(one, fixes=(*without, *(tried or one.fixes))))
    return InfeasibleError(found.values())


def _never_fits(problem: Problem) -> bool:
    """Whether a single operator does not fit, even alone."""
    return problem.code not in ("DT101", "DT102")


def _shortages(units: Sequence[Unit], cluster: Cluster) -> list[tuple[str, float, float]]:
    """(resource, required, available) of each resource that is short."""
    asked = {
        "CPUs": sum(_total_cpu_milli(unit) for unit in units),
        "GPUs": sum(_total_gpu_milli(unit) for unit in units),
    }
    there = {
        "CPUs": sum(node.cpu_milli for node in cluster.nodes),
        "GPUs": 1000 * sum(len(node.gpus) for node in cluster.nodes),
    }
    return [(what, asked[what] / 1000, there[what] / 1000) for what in asked if asked[what] > there[what]]


def _min_workers(unit: Unit) -> int:
    workers = unit.workers
    return workers[0] if isinstance(workers, tuple) else workers if isinstance(workers, int) else 1


def _total_cpu_milli(unit: Unit) -> int:
    return _min_workers(unit) * unit.shape.cpu_milli


def _total_gpu_milli(unit: Unit) -> int:
    return _min_workers(unit) * unit.shape.cards * unit.shape.gpu_milli


def _concurrency_problem(trials: _FixTrials, units: Sequence[Unit], mode: str | None) -> Problem:
    recipe, cluster = trials.recipe, trials.cluster
    sums = _shortages(units, cluster)
    asked = " and ".join(f"{need:.1f} {what}" for what, need, _ in sums)
    there = " and ".join(f"{have:.1f} {what}" for what, _, have in sums)
    evidence = []
    count = 0
    for unit in units:
        steps = _steps_named(unit.stages, recipe)
        count += len(steps)
        if not steps:
            continue
        place = recipe.document.place(("process", steps[0].number, steps[0].op))
        least, gpus = _min_workers(unit), _total_gpu_milli(unit) / 1000
        each = f"{unit.shape.cpu_milli / 1000:g} CPU" + (f" + {gpus / least:g} GPU" if gpus else "")
        total = f"{_total_cpu_milli(unit) / 1000:.1f} CPUs" + (f", {gpus:.1f} GPUs" if gpus else "")
        evidence.append(f"{place}  {'+'.join(step.op for step in steps)}: {least} x ({each}) = {total}")
    if len(evidence) > MAX_EVIDENCE_LINES:
        evidence[MAX_EVIDENCE_LINES:] = [f"... and {len(evidence) - MAX_EVIDENCE_LINES} more"]
    message = f"{count} operators at once need {asked}; the cluster has {there}"
    fixes = tuple(_tried_fixes(trials, mode))
    return Problem("DT101", message, tuple(evidence), fixes, recipe.document.place(("process",)))


# --- fixes


class _FixTrials:
    """Trials of changes to a recipe, for a limited time: a change that was not tried is not offered."""

    def __init__(self, recipe: Recipe, cluster: Cluster, clock: Callable[[], float]) -> None:
        self.recipe, self.cluster = recipe, cluster
        self._clock, self._end = clock, clock() + MAX_FIX_SEARCH_S

    def fits(self, mode: str | None, sets: Sequence[str]) -> bool:
        return self._clock() < self._end and _fits(self.recipe, self.cluster, mode, sets)


def _tried_fixes(trials: _FixTrials, mode: str | None) -> Iterator[str]:
    """Options to append to `dovetail plan FILE` or `dovetail run FILE`; each was tried."""
    seen: set[tuple[str, ...]] = {()}
    found = 0
    for family in _candidate_overrides(trials.recipe):
        fitting = (one for one in family if one not in seen and trials.fits(mode, one))
        first = next(fitting, None) if found < MAX_FIXES - 2 else None
        seen.update(family)
        if first is not None:
            found += 1
            yield set_options(first)
    for other in ("auto", "sequential"):
        if trials.fits(other, ()):
            yield f"--mode {other}" if mode is not None else f"--set mode={other}"


def _candidate_overrides(recipe: Recipe) -> Iterator[list[tuple[str, ...]]]:
    """Families of changes to the operators; within a family, smaller changes come first."""
    counts = [f"process.*.{key}={AUTO_VALUES[key]}" for key in _used_keys(recipe, WORKER_COUNT_KEYS)]
    cpus = [f"process.*.{key}=1" for key in _used_keys(recipe, CPU_KEYS)]
    gpus = _used_keys(recipe, GPU_KEYS)
    shares = [[f"process.*.{key}={share}" for key in gpus] for share in CANDIDATE_GPU_SHARES if gpus]
    yield [(*counts, *(f"process.*.{key}=null" for key in gpus))]
    yield [tuple(counts)]
    yield [tuple(share) for share in shares]
    yield [(*counts, *share) for share in shares if counts]
    yield [(*counts, *share, *cpus) for share in shares or [[]] if cpus]


def _used_keys(recipe: Recipe, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if any(step.parameters.get(key) is not None for step in recipe.steps)]


def _fits(
    recipe: Recipe, cluster: Cluster, mode: str | None, sets: Sequence[str], only: Sequence[RecipeStep] = ()
) -> bool:
    """Whether the recipe fits with these changes; with `only`, whether these operators fit alone."""
    try:
        other = with_overrides(recipe, sets)
        if only:
            numbers = {step.number for step in only}
            other = replace(other, steps=tuple(step for step in other.steps if step.number in numbers))
        pipeline, how = other.pipeline(cluster), mode or other.mode
        if how == "streaming" and any(_shortages(part, cluster) for part in split_at_barriers(fuse_stages(pipeline))):
            return False  # faster than a plan that fails
        make_plan(pipeline, cluster, mode=how)
    except (InfeasibleError, ConfigError):
        return False
    return True


def with_overrides(recipe: Recipe, sets: Sequence[str]) -> Recipe:
    """The same recipe with some values changed."""
    document = apply_recipe_overrides(recipe.document, sets, ())
    found = parse_recipe(document, recipe.file.parent)
    if found.problems:
        raise ConfigError(found.problems)
    return replace(recipe, document=document, settings=found.settings, steps=found.steps)


def _cpu_only_fix(trials: _FixTrials, mode: str | None, steps: Sequence[RecipeStep]) -> tuple[str, ...]:
    """On a cluster without GPUs: options that run the operators on CPUs, if that fits."""
    if any(node.gpus for node in trials.cluster.nodes):
        return ()
    sets = []
    for step in steps:
        place = f"process.{step.number}"
        sets += [f"{place}.{key}=0" for key in GPU_KEYS if step.parameters.get(key) is not None]
        sets += [f"{place}.accelerator=cpu"] if step.parameters.get("accelerator") == "cuda" else []
    return (set_options(sets),) if sets and trials.fits(mode, sets) else ()


# --- problems of the planner in the terms of the recipe


class RecipeRenderer(OptionRenderer):
    """Fixes of a plan as options: `--set process.3.num_gpus=0.5`, `--mode sequential`."""

    def __init__(self, recipe: Recipe, planned_on: Cluster) -> None:
        super().__init__()
        self.recipe = recipe
        self.planned_on = planned_on

    def add_nodes(self, fix: AddNodes) -> str:
        return Renderer.add_nodes(self, fix)

    def change(self, fix: Change, subject: Subject | None) -> str:
        steps = _steps_of(fix.subjects or ((subject,) if subject is not None else ()), self.recipe)
        if not steps or not any(name in STAGE_SETTINGS for name in fix.values):
            return super().change(fix, None)
        overrides = [
            f"process.{step.number}.{_recipe_key(name, step)}={_recipe_value(name, value, step)}"
            for step in steps
            for name, value in fix.values.items()
        ]
        overrides = self._with_auto_workers(overrides, steps)
        return with_note(set_options(overrides), fix.note) if overrides else ""

    def subject(self, subject: Subject) -> str:
        """The operators of a stage."""
        steps = _steps_of((subject,), self.recipe)
        return "+".join(step.op for step in steps) if steps else super().subject(subject)

    def _with_auto_workers(self, overrides: list[str], steps: Sequence[RecipeStep]) -> list[str]:
        """The change, with automatic worker counts if those of the recipe do not fit; empty if it does not fit then."""
        if _fits(self.recipe, self.planned_on, "sequential", overrides, steps):
            return overrides
        counts = [
            f"process.{step.number}.{key}={AUTO_VALUES[key]}"
            for step in steps
            for key in WORKER_COUNT_KEYS
            if step.parameters.get(key)
        ]
        both = [*overrides, *(text for text in counts if text not in overrides)]
        return both if counts and _fits(self.recipe, self.planned_on, "sequential", both, steps) else []


def set_options(overrides: Sequence[str]) -> str:
    """Overrides as options of `dovetail plan FILE` or `dovetail run FILE`."""
    return " ".join(f"--set {shlex.quote(text)}" for text in overrides)


def _problem_for_recipe(problem: Problem, renderer: RecipeRenderer) -> Problem:
    recipe = renderer.recipe
    steps = _steps_in_problem(problem, recipe)
    path: tuple[Any, ...] = ("process", steps[0].number, steps[0].op) if steps else ("process",)
    return replace(renderer.problem(problem), place=recipe.document.place(path))


def _steps_in_problem(problem: Problem, recipe: Recipe) -> list[RecipeStep]:
    """The operators that the problem is about: several, if they share workers."""
    return _steps_of((problem.subject,) if problem.subject is not None else (), recipe)


def _steps_of(subjects: Sequence[Subject], recipe: Recipe) -> list[RecipeStep]:
    return _steps_named([name for one in subjects if one.kind == "stage" for name in one.names], recipe)


def _steps_named(stages: Sequence[str], recipe: Recipe) -> list[RecipeStep]:
    names = {*stages, *(stage.removesuffix(HASH_STAGE_SUFFIX) for stage in stages)}
    return [step for step in recipe.steps if step.name in names]


def _recipe_key(setting: str, step: RecipeStep) -> str:
    """The key that this operator uses for a setting, so that the recipe does not have it twice."""
    if setting == "workers":
        return "workers" if step.parameters.get("workers") is not None else "num_proc"
    if step.parameters.get("resources") is not None:
        return f"resources.{setting}"
    name = RECIPE_RESOURCE_NAMES.get(setting, setting)
    return next(
        (old for old in DEPRECATED_NAMES if DEPRECATED_NAMES[old] == name and step.parameters.get(old) is not None),
        name,
    )


def _recipe_value(setting: str, value: object, step: RecipeStep) -> str:
    if setting == "workers" and value == "auto":
        return str(AUTO_VALUES[_recipe_key(setting, step)])
    return "null" if value is UNSET else yaml_literal(value)


def plan_recipe(recipe: Recipe, cluster: Cluster | str = "auto", mode: str | None = None, **how: Any) -> Plan:
    """Plan as `dt.plan` does; InfeasibleError has the lines of the file."""
    there = Cluster.of(cluster)
    try:
        return make_plan(recipe.pipeline(there), there, mode=mode or recipe.mode, **how)
    except InfeasibleError as error:
        raise explain_infeasible(recipe, there, mode, error) from None


def plan_notes(recipe: Recipe, cluster: Cluster) -> list[str]:
    """Notes for the reader of a plan."""
    how = recipe.compile_options(cluster)
    found = list(recipe.notes)
    if recipe.settings.get("np") is not None and how.auto_workers:
        found.append(
            f"np: {recipe.settings['np']} has no effect while Dovetail sets the number of workers; to use it, set "
            "auto_op_parallelism: false"
        )
    on_cpu = [step.op for step in recipe.steps if step.requirements.cuda and not effective_requirements(step, how).cuda]
    if on_cpu:
        found.append(f"the cluster has no GPU: {', '.join(dict.fromkeys(on_cpu))} runs on CPUs")
    alone = [
        step.op
        for step in recipe.steps
        if effective_requirements(step, how).cuda
        and not {"num_gpus", "gpu_required", "resources"} & step.parameters.keys()
        if step.requirements.resources.gpu_memory is None
    ]
    if alone:
        found.append(
            f"each worker of {', '.join(dict.fromkeys(alone))} gets a whole GPU; with `memory`, such as "
            "memory: '2GB', several share one"
        )
    elsewhere = [step.op for step in recipe.steps if step.unready is not None]
    if elsewhere:
        found.append(
            f"cannot run on this machine: {', '.join(dict.fromkeys(elsewhere))}; dovetail run prints the reason"
        )
    return found
