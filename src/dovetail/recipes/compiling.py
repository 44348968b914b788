"""How does a recipe become a pipeline? A stage per operator; one that needs all rows is two, the second a barrier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.pipeline.stage import Each, Stage, each
from dovetail.recipes.operators.base import Deduplicator, Filter, Operator, Whole
from dovetail.recipes.stages import Checking, Choosing, FromLines, NotHere, OnlyStats, Same, WithoutStats
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dovetail.recipes.needs import Needs
    from dovetail.recipes.reading import Step

Wrap = Callable[[Callable[..., Any], str], Callable[..., Any]]
HASHED = "_hash"
"""Behind the name of an operator that needs all rows: its first stage, which runs in parallel, and in which a row that
it could not use is set aside by itself."""
RESULTS, STATS_OUT = "results", "stats"
LITTLE = Resources(cpus=0, memory="16MB")
"""What results and stats need to part: next to nothing."""


@dataclass(frozen=True, slots=True)
class How:
    """What a recipe says about all operators."""

    auto: bool = True
    """Whether the number of workers is worked out where nothing is said."""
    np: int | None = None
    gpus: bool = True
    """Whether there are any; without, operators that would like one run on CPUs."""
    keep_stats: bool = False
    export_stats: bool = False
    text_lines: bool = False
    """Whether the input is lines of text, and not rows."""
    text_key: str = "text"


def stages_of(steps: Sequence[Step], how: How, wrap: Wrap | None = None) -> list[Stage]:
    """All stages; `wrap` may put something around what a stage runs, given the operator and its name."""
    share(steps)
    found: list[Stage] = []
    for step in steps:
        found += _stages(step, how, wrap or (lambda operator, _: operator))
    if how.text_lines:
        by_row = isinstance(found[0].run, Each)
        found[0] = _around(found[0], lambda run: FromLines(run, how.text_key, by_row=by_row))
    measured = any(step.kind == "filter" for step in steps)
    if how.export_stats and measured:
        last = found[-1].name
        found.append(Stage(STATS_OUT, each(OnlyStats()), LITTLE, workers=1, after=[last]))
        found.append(Stage(RESULTS, each(Same(keep_stats=how.keep_stats)), LITTLE, workers=1, after=[last]))
    elif measured and not how.keep_stats:
        found[-1] = _around(found[-1], WithoutStats)
    return found


def _around(stage: Stage, put: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Stage:
    """The same stage with something around what it runs."""
    run = stage.run
    assert not isinstance(run, str), f"{stage.name} runs an object"
    return replace(stage, run=each(put(run.fn)) if isinstance(run, Each) else put(run))


def _stages(step: Step, how: How, wrap: Wrap) -> list[Stage]:
    needs = needs_here(step, how)
    settings: dict[str, Any] = {
        "workers": _workers(needs, how),
        "on_error": "skip" if step.skips else "fail",
        "fuse": not needs.cuda,
        **needs.settings,
    }
    operator = step.operator
    if operator is None:
        return [Stage(step.name, each(NotHere(step.op)), needs.resources, **settings)]
    if not isinstance(operator, Whole):
        return [_by_row(step.name, operator, needs, wrap, settings)]
    run: Any = operator if isinstance(operator, Deduplicator) else Checking(operator)
    first = Stage(f"{step.name}{HASHED}", each(run), needs.resources, **{**settings, "returns": 1.0})
    alone = {key: value for key, value in settings.items() if key not in ("workers", "rate", "fuse")}
    # a barrier has one worker, and cannot leave anything out
    chosen = wrap(Choosing(operator), step.name)
    return [first, Stage(step.name, chosen, _alone(needs), **{**alone, "on_error": "fail"}, workers=1, barrier=True)]


def _by_row(name: str, operator: Operator, needs: Needs, wrap: Wrap, settings: Mapping[str, Any]) -> Stage:
    run = wrap(operator, name)
    if operator.batch_size == 1:
        return Stage(name, each(run), needs.resources, **settings)
    size = needs.batch_size or operator.batch_size
    return Stage(name, run, needs.resources, batch_size=size, **settings)


def needs_here(step: Step, how: How) -> Needs:
    """What it needs where it is planned: a GPU only if there is one, or if the file insists."""
    needs = step.needs
    return needs.on_cpu() if needs.cuda and not needs.said_cuda and not how.gpus else needs


def _workers(needs: Needs, how: How) -> Any:
    if needs.workers is not None:
        return needs.workers
    return "auto" if how.auto else how.np or 1


def _alone(needs: Needs) -> Any:
    return replace(needs.resources, gpus=0, gpu_memory=None) if needs.cuda else needs.resources


def share(steps: Sequence[Step]) -> None:
    """Tells neighbouring filters that need the same of a text, such as its words, to make it once."""
    for run in _runs(steps):
        for operator in run:
            others = (other for other in run if other is not operator)
            operator.sharing = any(set(operator.shares) & set(other.shares) for other in others)


def _runs(steps: Iterable[Step]) -> list[list[Operator]]:
    """Filters that stand beside each other: between them no text changes."""
    found: list[list[Operator]] = [[]]
    for step in steps:
        if isinstance(step.operator, Filter):
            found[-1].append(step.operator)
        else:
            found.append([])
    return found
