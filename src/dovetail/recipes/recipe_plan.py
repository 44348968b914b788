"""Plan of a recipe; if it does not fit, the lines that ask for too much and `--set` changes that were tried."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, InfeasibleError, Problem
from dovetail.pipeline.units import fuse_stages
from dovetail.recipes.compiler import HASH_STAGE_SUFFIX, effective_requirements
from dovetail.recipes.file_keys import DEPRECATED_NAMES
from dovetail.recipes.overrides import apply_recipe_overrides
from dovetail.recipes.recipe_file import parse_recipe
from dovetail.recipes.requirements import RECIPE_RESOURCE_NAMES
from dovetail.resources.cluster import Cluster
from dovetail.scheduling.planner import plan as make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.pipeline.units import Unit
    from dovetail.recipes.recipe import Recipe
    from dovetail.recipes.recipe_file import RecipeStep
    from dovetail.scheduling.plan import Plan

CANDIDATE_GPU_SHARES = (0.5, 0.33, 0.25, 0.2, 0.125, 0.1, 0.05, 0.02, 0.01)
MAX_EVIDENCE_LINES = 20
MAX_FIXES = 4
WORKER_COUNT_KEYS, GPU_KEYS, CPU_KEYS = (
    ("num_proc", "workers"),
    ("num_gpus", "gpu_required"),
    ("num_cpus", "cpu_required"),
)
AUTO_VALUES = {"num_proc": -1, "workers": "auto"}
SET_OPTION = "--set "
_STAGE_NAME = re.compile(r"stage '([^']+)'")
_INSTEAD_OF = re.compile(r"(\w+)=(\S+) instead of (\w+)")
_ASSIGNMENT = re.compile(r"\b(\w+)=(\"[^\"]*\"|[^\s,]+)")


def explain_infeasible(recipe: Recipe, cluster: Cluster, mode: str | None, error: InfeasibleError) -> InfeasibleError:
    """The same in the words of a recipe, with its lines; all operators at once come as one sum."""
    alone = [problem for problem in error.problems if _never_fits(problem)]
    if not alone and (mode or recipe.mode) == "streaming":
        short = [part for part in _concurrent_units(recipe.pipeline(cluster)) if _shortages(part, cluster)]
        if short:
            return InfeasibleError(_concurrency_problem(recipe, short[0], cluster, mode))
    tried = () if alone else tuple(_tried_fixes(recipe, cluster, mode))
    found: dict[tuple[str, str], Problem] = {}
    for problem in error.problems:
        one = _translate_problem(problem, recipe, cluster)
        without = _cpu_only_fix(recipe, cluster, mode, _steps_in_problem(problem, recipe))
        # the two stages of a deduplicator ask for the same
        found.setdefault((one.code, one.place), replace(one, fixes=(*without, *(tried or one.fixes))))
    return InfeasibleError(found.values())


def _never_fits(problem: Problem) -> bool:
    """Whether it is about one operator, which does not fit even alone."""
    return problem.code not in ("DT101", "DT102")


def _concurrent_units(pipeline: Pipeline) -> list[list[Unit]]:
    """What streams at once: a barrier begins something new."""
    parts: list[list[Unit]] = [[]]
    for unit in fuse_stages(pipeline):
        if unit.barrier and parts[-1]:
            parts.append([])
        parts[-1].append(unit)
    return parts


def _shortages(units: Sequence[Unit], cluster: Cluster) -> list[tuple[str, float, float]]:
    """(what, asked for, there) of everything of which more is asked for than there is."""
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


def _concurrency_problem(recipe: Recipe, units: Sequence[Unit], cluster: Cluster, mode: str | None) -> Problem:
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
    fixes = tuple(_tried_fixes(recipe, cluster, mode))
    return Problem("DT101", message, tuple(evidence), fixes, recipe.document.place(("process",)))


# --- what would fit


def _tried_fixes(recipe: Recipe, cluster: Cluster, mode: str | None) -> Iterator[str]:
    """As they are typed behind `dovetail plan FILE` or `dovetail run FILE`."""
    seen: set[tuple[str, ...]] = {()}
    found = 0
    for family in _candidate_overrides(recipe):
        fitting = (one for one in family if one not in seen and _fits(recipe, cluster, mode, one))
        first = next(fitting, None) if found < MAX_FIXES - 2 else None
        seen.update(family)
        if first is not None:
            found += 1
            yield " ".join(f"--set {_shell_quoted(text)}" for text in first)
    for other in ("auto", "sequential"):
        if _fits(recipe, cluster, other, ()):
            yield f"--mode {other}" if mode is not None else f"--set mode={other}"


def _candidate_overrides(recipe: Recipe) -> Iterator[list[tuple[str, ...]]]:
    """Families of changes to the operators; within one, those of which most is left first."""
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
    """Whether it does with these changes; `only`: whether these operators would, if there were no others."""
    try:
        other = with_overrides(recipe, sets)
        if only:
            numbers = {step.number for step in only}
            other = replace(other, steps=tuple(step for step in other.steps if step.number in numbers))
        pipeline, how = other.pipeline(cluster), mode or other.mode
        if how == "streaming" and any(_shortages(part, cluster) for part in _concurrent_units(pipeline)):
            return False  # without a plan, which would take its time to say why not
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


def _cpu_only_fix(recipe: Recipe, cluster: Cluster, mode: str | None, steps: Sequence[RecipeStep]) -> tuple[str, ...]:
    """Where there are none: on CPUs, if that fits."""
    if any(node.gpus for node in cluster.nodes):
        return ()
    sets = []
    for step in steps:
        place = f"process.{step.number}"
        sets += [f"{place}.{key}=0" for key in GPU_KEYS if step.parameters.get(key) is not None]
        sets += [f"{place}.accelerator=cpu"] if step.parameters.get("accelerator") == "cuda" else []
    return (" ".join(f"--set {text}" for text in sets),) if sets and _fits(recipe, cluster, mode, sets) else ()


def _shell_quoted(text: str) -> str:
    return f"'{text}'" if "*" in text else text


# --- what the planner said


def _translate_problem(problem: Problem, recipe: Recipe, cluster: Cluster) -> Problem:
    steps = _steps_in_problem(problem, recipe)
    message = (
        _STAGE_NAME.sub("+".join(step.op for step in steps), problem.message, count=1) if steps else problem.message
    )
    path: tuple[Any, ...] = ("process", steps[0].number, steps[0].op) if steps else ("process",)
    fixes = tuple(
        _with_auto_workers(fix, recipe, cluster, steps) if SET_OPTION in fix else fix
        for fix in (_translate_fix(fix, steps) for fix in problem.fixes)
    )
    return replace(problem, message=message, fixes=tuple(filter(None, fixes)), place=recipe.document.place(path))


def _with_auto_workers(fix: str, recipe: Recipe, cluster: Cluster, steps: Sequence[RecipeStep]) -> str:
    """A change that lets one worker in, with as many workers as there is room for, if those that are asked for are too
    many; empty if even that does not help."""
    sets = fix.removeprefix("or ").removeprefix(SET_OPTION).split(f" {SET_OPTION}")
    if _fits(recipe, cluster, "sequential", sets, steps):
        return fix
    counts = [
        f"process.{step.number}.{key}={AUTO_VALUES[key]}"
        for step in steps
        for key in WORKER_COUNT_KEYS
        if step.parameters.get(key)
    ]
    if not counts or not _fits(recipe, cluster, "sequential", [*sets, *counts], steps):
        return ""
    return " ".join([fix, *(f"{SET_OPTION}{text}" for text in counts)])


def _steps_in_problem(problem: Problem, recipe: Recipe) -> list[RecipeStep]:
    """The operators that it is about: several, if they share workers."""
    named = _STAGE_NAME.match(problem.message)
    return _steps_named(named[1].split("+"), recipe) if named else []


def _steps_named(stages: Sequence[str], recipe: Recipe) -> list[RecipeStep]:
    names = {*stages, *(stage.removesuffix(HASH_STAGE_SUFFIX) for stage in stages)}
    return [step for step in recipe.steps if step.name in names]


def _recipe_key(word: str, step: RecipeStep) -> str:
    """As this operator says it, so that it is not said twice."""
    if word == "workers":
        return "workers" if step.parameters.get("workers") is not None else "num_proc"
    if step.parameters.get("resources") is not None:
        return f"resources.{word}"
    name = RECIPE_RESOURCE_NAMES.get(word, word)
    return next(
        (old for old in DEPRECATED_NAMES if DEPRECATED_NAMES[old] == name and step.parameters.get(old) is not None),
        name,
    )


def _translate_fix(fix: str, steps: Sequence[RecipeStep]) -> str:
    """`gpu_memory="20GB"` as it is typed for these operators."""
    lead = "or " if fix.startswith("or ") else ""
    text = fix.removeprefix("or ")
    pairs = [pair for part in text.split(", ") if (pair := _ASSIGNMENT.fullmatch(part))]
    values = {pair[1]: pair[2] for pair in pairs} if len(pairs) == text.count(", ") + 1 else {}
    if "mode" in values:
        return f"{lead}--mode {values['mode'].strip(chr(34))}"
    other = _INSTEAD_OF.fullmatch(text)
    values = {other[1]: other[2], other[3]: "null"} if other else values
    if values and steps:
        typed = [
            f"--set process.{step.number}.{_recipe_key(word, step)}={value.strip(chr(34))}"
            for step in steps
            for word, value in values.items()
        ]
        return lead + " ".join(typed)
    return lead + _ASSIGNMENT.sub(
        lambda found: f"{RECIPE_RESOURCE_NAMES.get(found[1], found[1])}: {found[2].strip(chr(34))}", text
    )


def plan_recipe(recipe: Recipe, cluster: Cluster | str = "auto", mode: str | None = None, **how: Any) -> Plan:
    """As `dt.plan`; what does not fit is told with the file's lines."""
    there = Cluster.of(cluster)
    try:
        return make_plan(recipe.pipeline(there), there, mode=mode or recipe.mode, **how)
    except InfeasibleError as error:
        from dovetail.recipes.recipe_plan import explain_infeasible

        raise explain_infeasible(recipe, there, mode, error) from None


def plan_notes(recipe: Recipe, cluster: Cluster) -> list[str]:
    """What the reader of a plan would not guess."""
    how = recipe.compile_options(cluster)
    found = list(recipe.notes)
    if recipe.settings.get("np") is not None and how.auto_workers:
        found.append(
            f"np: {recipe.settings['np']} is not used: workers are set by speed; auto_op_parallelism: "
            "false makes it count"
        )
    on_cpu = [step.op for step in recipe.steps if step.requirements.cuda and not effective_requirements(step, how).cuda]
    if on_cpu:
        found.append(f"there is no GPU: {', '.join(dict.fromkeys(on_cpu))} would run on CPUs")
    alone = [
        step.op
        for step in recipe.steps
        if effective_requirements(step, how).cuda
        and not {"num_gpus", "gpu_required", "resources"} & step.parameters.keys()
        if step.requirements.resources.gpu_memory is None
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
