"""Why does a recipe not fit, on which lines, and what would? Every change that is offered was tried."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, InfeasibleError, Problem
from dovetail.pipeline.units import units_of
from dovetail.recipes.changes import with_sets
from dovetail.recipes.compiling import HASHED
from dovetail.recipes.keys import OLD_NAMES
from dovetail.recipes.needs import WORDS
from dovetail.recipes.reading import written
from dovetail.scheduling.planner import plan as make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.pipeline.units import Unit
    from dovetail.recipes.reading import Step
    from dovetail.recipes.recipe import Recipe
    from dovetail.resources.cluster import Cluster

SHARES = (0.5, 0.33, 0.25, 0.2, 0.125, 0.1, 0.05, 0.02, 0.01)
MOST_LINES = 20
MOST_FIXES = 4
COUNTS, GPUS, CPUS = ("num_proc", "workers"), ("num_gpus", "gpu_required"), ("num_cpus", "cpu_required")
AUTO = {"num_proc": -1, "workers": "auto"}
TYPED = "--set "
_STAGE = re.compile(r"stage '([^']+)'")
_INSTEAD = re.compile(r"(\w+)=(\S+) instead of (\w+)")
_PAIR = re.compile(r"\b(\w+)=(\"[^\"]*\"|[^\s,]+)")


def told(recipe: Recipe, cluster: Cluster, mode: str | None, error: InfeasibleError) -> InfeasibleError:
    """The same in the words of a recipe, with its lines; all operators at once come as one sum."""
    alone = [problem for problem in error.problems if _never(problem)]
    if not alone and (mode or recipe.mode) == "streaming":
        short = [part for part in _parts(recipe.pipeline(cluster)) if _sums(part, cluster)]
        if short:
            return InfeasibleError(_at_once(recipe, short[0], cluster, mode))
    tried = () if alone else tuple(_fixes(recipe, cluster, mode))
    found: dict[tuple[str, str], Problem] = {}
    for problem in error.problems:
        one = _translated(problem, recipe, cluster)
        without = _without_gpus(recipe, cluster, mode, _steps_of(problem, recipe))
        # the two stages of a deduplicator ask for the same
        found.setdefault((one.code, one.place), replace(one, fixes=(*without, *(tried or one.fixes))))
    return InfeasibleError(found.values())


def _never(problem: Problem) -> bool:
    """Whether it is about one operator, which does not fit even alone."""
    return problem.code not in ("DT101", "DT102")


def _parts(pipeline: Pipeline) -> list[list[Unit]]:
    """What streams at once: a barrier begins something new."""
    parts: list[list[Unit]] = [[]]
    for unit in units_of(pipeline):
        if unit.barrier and parts[-1]:
            parts.append([])
        parts[-1].append(unit)
    return parts


def _sums(units: Sequence[Unit], cluster: Cluster) -> list[tuple[str, float, float]]:
    """(what, asked for, there) of everything of which more is asked for than there is."""
    asked = {"CPUs": sum(_cpus(unit) for unit in units), "GPUs": sum(_gpus(unit) for unit in units)}
    there = {
        "CPUs": sum(node.cpu_milli for node in cluster.nodes),
        "GPUs": 1000 * sum(len(node.gpus) for node in cluster.nodes),
    }
    return [(what, asked[what] / 1000, there[what] / 1000) for what in asked if asked[what] > there[what]]


def _least(unit: Unit) -> int:
    workers = unit.workers
    return workers[0] if isinstance(workers, tuple) else workers if isinstance(workers, int) else 1


def _cpus(unit: Unit) -> int:
    return _least(unit) * unit.shape.cpu_milli


def _gpus(unit: Unit) -> int:
    return _least(unit) * unit.shape.cards * unit.shape.gpu_milli


def _at_once(recipe: Recipe, units: Sequence[Unit], cluster: Cluster, mode: str | None) -> Problem:
    sums = _sums(units, cluster)
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
        least, gpus = _least(unit), _gpus(unit) / 1000
        each = f"{unit.shape.cpu_milli / 1000:g} CPU" + (f" + {gpus / least:g} GPU" if gpus else "")
        total = f"{_cpus(unit) / 1000:.1f} CPUs" + (f", {gpus:.1f} GPUs" if gpus else "")
        evidence.append(f"{place}  {'+'.join(step.op for step in steps)}: {least} x ({each}) = {total}")
    if len(evidence) > MOST_LINES:
        evidence[MOST_LINES:] = [f"... and {len(evidence) - MOST_LINES} more"]
    message = f"{count} operators at once need {asked}; the cluster has {there}"
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
    counts = [f"process.*.{key}={AUTO[key]}" for key in _said(recipe, COUNTS)]
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


def _fits(recipe: Recipe, cluster: Cluster, mode: str | None, sets: Sequence[str], only: Sequence[Step] = ()) -> bool:
    """Whether it does with these changes; `only`: whether these operators would, if there were no others."""
    try:
        other = variant(recipe, sets)
        if only:
            numbers = {step.number for step in only}
            other = replace(other, steps=tuple(step for step in other.steps if step.number in numbers))
        pipeline, how = other.pipeline(cluster), mode or other.mode
        if how == "streaming" and any(_sums(part, cluster) for part in _parts(pipeline)):
            return False  # without a plan, which would take its time to say why not
        make_plan(pipeline, cluster, mode=how)
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


def _without_gpus(recipe: Recipe, cluster: Cluster, mode: str | None, steps: Sequence[Step]) -> tuple[str, ...]:
    """Where there are none: on CPUs, if that fits."""
    if any(node.gpus for node in cluster.nodes):
        return ()
    sets = []
    for step in steps:
        place = f"process.{step.number}"
        sets += [f"{place}.{key}=0" for key in GPUS if step.given.get(key) is not None]
        sets += [f"{place}.accelerator=cpu"] if step.given.get("accelerator") == "cuda" else []
    return (" ".join(f"--set {text}" for text in sets),) if sets and _fits(recipe, cluster, mode, sets) else ()


def _quoted(text: str) -> str:
    return f"'{text}'" if "*" in text else text


# --- what the planner said


def _translated(problem: Problem, recipe: Recipe, cluster: Cluster) -> Problem:
    steps = _steps_of(problem, recipe)
    message = _STAGE.sub("+".join(step.op for step in steps), problem.message, count=1) if steps else problem.message
    path: tuple[Any, ...] = ("process", steps[0].number, steps[0].op) if steps else ("process",)
    fixes = tuple(
        _enough(fix, recipe, cluster, steps) if TYPED in fix else fix
        for fix in (_fix(fix, steps) for fix in problem.fixes)
    )
    return replace(problem, message=message, fixes=tuple(filter(None, fixes)), place=recipe.document.place(path))


def _enough(fix: str, recipe: Recipe, cluster: Cluster, steps: Sequence[Step]) -> str:
    """A change that lets one worker in, with as many workers as there is room for, if those that are asked for are too
    many; empty if even that does not help."""
    sets = fix.removeprefix("or ").removeprefix(TYPED).split(f" {TYPED}")
    if _fits(recipe, cluster, "sequential", sets, steps):
        return fix
    counts = [f"process.{step.number}.{key}={AUTO[key]}" for step in steps for key in COUNTS if step.given.get(key)]
    if not counts or not _fits(recipe, cluster, "sequential", [*sets, *counts], steps):
        return ""
    return " ".join([fix, *(f"{TYPED}{text}" for text in counts)])


def _steps_of(problem: Problem, recipe: Recipe) -> list[Step]:
    """The operators that it is about: several, if they share workers."""
    named = _STAGE.match(problem.message)
    return _steps_named(named[1].split("+"), recipe) if named else []


def _steps_named(stages: Sequence[str], recipe: Recipe) -> list[Step]:
    names = {*stages, *(stage.removesuffix(HASHED) for stage in stages)}
    return [step for step in recipe.steps if step.name in names]


def _key(word: str, step: Step) -> str:
    """As this operator says it, so that it is not said twice."""
    if word == "workers":
        return "workers" if step.given.get("workers") is not None else "num_proc"
    if step.given.get("resources") is not None:
        return f"resources.{word}"
    name = WORDS.get(word, word)
    return next((old for old in OLD_NAMES if OLD_NAMES[old] == name and step.given.get(old) is not None), name)


def _fix(fix: str, steps: Sequence[Step]) -> str:
    """`gpu_memory="20GB"` as it is typed for these operators."""
    lead = "or " if fix.startswith("or ") else ""
    text = fix.removeprefix("or ")
    pairs = [pair for part in text.split(", ") if (pair := _PAIR.fullmatch(part))]
    values = {pair[1]: pair[2] for pair in pairs} if len(pairs) == text.count(", ") + 1 else {}
    if "mode" in values:
        return f"{lead}--mode {values['mode'].strip(chr(34))}"
    other = _INSTEAD.fullmatch(text)
    values = {other[1]: other[2], other[3]: "null"} if other else values
    if values and steps:
        typed = [
            f"--set process.{step.number}.{_key(word, step)}={value.strip(chr(34))}"
            for step in steps
            for word, value in values.items()
        ]
        return lead + " ".join(typed)
    return lead + _PAIR.sub(lambda found: f"{WORDS.get(found[1], found[1])}: {found[2].strip(chr(34))}", text)
