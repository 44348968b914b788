"""Compilation of a recipe to pipeline stages: one per operator, two (hash and barrier) for dataset operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_function import Each, each
from dovetail.recipes.operators.base import DatasetOperator, Deduplicator, Filter, Operator
from dovetail.recipes.stage_wrappers import (
    BarrierStage,
    LinesToRows,
    PassThrough,
    RowCheck,
    StatsOnly,
    StripStats,
    UnavailableOperator,
)
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dovetail.recipes.recipe_file import RecipeStep
    from dovetail.recipes.requirements import OperatorRequirements

WrapRun = Callable[[Callable[..., Any], str], Callable[..., Any]]
HASH_STAGE_SUFFIX = "_hash"
"""Suffix of the first stage of an operator that needs all rows: it runs in parallel, and rows that the operator cannot
use fail there one by one."""
RESULTS_STAGE, STATS_STAGE = "results", "stats"
MINIMAL_RESOURCES = Resources(cpus=0, memory="16MB")
"""Resources of the two stages that separate results and stats."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Settings of a recipe for all operators."""

    auto_workers: bool = True
    """Whether Dovetail sets the number of workers where the file does not."""
    np: int | None = None
    has_gpus: bool = True
    """Whether the cluster has GPUs; without, operators that prefer a GPU run on CPUs."""
    keep_stats: bool = False
    export_stats: bool = False
    reads_text_lines: bool = False
    """Whether the input is lines of text instead of rows."""
    text_key: str = "text"


def compile_stages(steps: Sequence[RecipeStep], how: CompileOptions, wrap: WrapRun | None = None) -> list[Stage]:
    """The stages of all operators; `wrap` may wrap what a stage runs, given the operator and its name."""
    mark_shared_intermediates(steps)
    found: list[Stage] = []
    for step in steps:
        found += _compile_step(step, how, wrap or (lambda operator, _: operator))
    if how.reads_text_lines:
        by_row = isinstance(found[0].run, Each)
        found[0] = _wrap_stage(found[0], lambda run: LinesToRows(run, how.text_key, by_row=by_row))
    measured = any(step.kind == "filter" for step in steps)
    if how.export_stats and measured:
        last = found[-1].name
        found.append(Stage(STATS_STAGE, each(StatsOnly()), MINIMAL_RESOURCES, workers=1, after=[last]))
        found.append(
            Stage(
                RESULTS_STAGE, each(PassThrough(keep_stats=how.keep_stats)), MINIMAL_RESOURCES, workers=1, after=[last]
            )
        )
    elif measured and not how.keep_stats:
        found[-1] = _wrap_stage(found[-1], StripStats)
    return found


def step_stages(step: RecipeStep) -> tuple[str, ...]:
    """The names of the stages that run an operator."""
    if isinstance(step.operator, DatasetOperator):
        return f"{step.name}{HASH_STAGE_SUFFIX}", step.name
    return (step.name,)


def _wrap_stage(stage: Stage, put: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Stage:
    """The stage with a wrapper around what it runs."""
    run = stage.run
    assert not isinstance(run, str), f"{stage.name} runs an object"
    return replace(stage, run=each(put(run.fn)) if isinstance(run, Each) else put(run))


def _compile_step(step: RecipeStep, how: CompileOptions, wrap: WrapRun) -> list[Stage]:
    needs = effective_requirements(step, how)
    settings: dict[str, Any] = {
        "workers": _worker_count(needs, how),
        "on_error": "skip" if step.skip_errors else "fail",
        "fuse": not needs.cuda,
        **needs.settings,
    }
    operator = step.operator
    if operator is None:
        return [Stage(step.name, each(UnavailableOperator(step.op)), needs.resources, **settings)]
    if not isinstance(operator, DatasetOperator):
        return [_row_stage(step.name, operator, needs, wrap, settings)]
    run: Any = operator if isinstance(operator, Deduplicator) else RowCheck(operator)
    first = Stage(f"{step.name}{HASH_STAGE_SUFFIX}", each(run), needs.resources, **{**settings, "returns": 1.0})
    # a barrier has one worker, and cannot skip rows
    alone = {key: value for key, value in settings.items() if key not in ("workers", "rate", "fuse", "on_death")}
    chosen = wrap(BarrierStage(operator), step.name)
    return [
        first,
        Stage(step.name, chosen, _barrier_resources(needs), **{**alone, "on_error": "fail"}, workers=1, barrier=True),
    ]


def _row_stage(
    name: str, operator: Operator, needs: OperatorRequirements, wrap: WrapRun, settings: Mapping[str, Any]
) -> Stage:
    run = wrap(operator, name)
    if operator.batch_size == 1:
        return Stage(name, each(run), needs.resources, **settings)
    size = needs.batch_size or operator.batch_size
    return Stage(name, run, needs.resources, batch_size=size, **settings)


def effective_requirements(step: RecipeStep, how: CompileOptions) -> OperatorRequirements:
    """Requirements on this cluster: a GPU only if there is one, or if the file requests it."""
    needs = step.requirements
    return needs.without_gpu() if needs.cuda and not needs.cuda_required and not how.has_gpus else needs


def _worker_count(needs: OperatorRequirements, how: CompileOptions) -> Any:
    if needs.workers is not None:
        return needs.workers
    return "auto" if how.auto_workers else how.np or 1


def _barrier_resources(needs: OperatorRequirements) -> Any:
    return replace(needs.resources, gpus=0, gpu_memory=None) if needs.cuda else needs.resources


def mark_shared_intermediates(steps: Sequence[RecipeStep]) -> None:
    """Let adjacent filters that need the same intermediate of a text, such as its words, compute it once."""
    for run in _adjacent_filters(steps):
        for operator in run:
            others = (other for other in run if other is not operator)
            operator.use_shared_cache = any(
                set(operator.shared_intermediates) & set(other.shared_intermediates) for other in others
            )


def _adjacent_filters(steps: Iterable[RecipeStep]) -> list[list[Operator]]:
    """Groups of adjacent filters: no text changes between them."""
    found: list[list[Operator]] = [[]]
    for step in steps:
        if isinstance(step.operator, Filter):
            found[-1].append(step.operator)
        else:
            found.append([])
    return found
