"""Pipeline: stages and their order, validated on construction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, PipelineError, Problem, argument_problem, did_you_mean, short_repr
from dovetail.pipeline.graph import (
    PIPELINE_EXAMPLE,
    Edges,
    format_names,
    pipeline_problems,
    reverse_edges,
    stage_edges,
    topological_order,
)
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_fields import DEFAULTS, NAME_LIMIT, default_problems, similar_name
from dovetail.pipeline.stage_function import function_name
from dovetail.text_format import html_table

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.pipeline.pipeline_file import ParsedPipelineFile
    from dovetail.pipeline.stage import Run


MAX_NAMES_SHOWN = 8
"""Stages in the repr of a pipeline."""


@dataclass(frozen=True, init=False, repr=False)
class Pipeline:
    """Stages, each after the one before it unless it has `after`. A stage with several parents gets the union of their
    items; an item goes to every child.

    A function, a class or "package.module:name" in place of a stage is a stage with its name and the default settings:
    `dt.Pipeline([clean, Score])`. If the name is taken, a number is added: clean, clean_2.
    """

    stages: tuple[Stage, ...]
    name: str
    order: tuple[Stage, ...] = field(compare=False, repr=False)
    """Parents before children, otherwise as given."""
    _parents: Edges = field(compare=False, repr=False)
    _children: Edges = field(compare=False, repr=False)

    def __init__(
        self, stages: Iterable[Stage | Run], name: str = "pipeline", *, defaults: Mapping[str, Any] | None = None
    ) -> None:
        """`defaults` are values for all stages that do not have their own: {"on_error": "skip", "retries": 2}."""
        problems = _default_problems(defaults)
        given = _with_defaults(_with_names(_listed(stages)), {} if problems or defaults is None else defaults)
        problems += [problem for _, problem in pipeline_problems(given, name)]
        if problems:
            raise PipelineError(problems)
        parents = stage_edges(given)
        by_name = {stage.name: stage for stage in given}
        self._set(stages=given, name=name, order=tuple(by_name[item] for item in topological_order(parents)))
        self._set(_parents=parents, _children=reverse_edges(parents))

    def _set(self, **values: object) -> None:
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}: {_shortened([stage.name for stage in self.stages])}>"

    def _repr_html_(self) -> str:
        columns = ("stage", "after", "run", "one worker", "batch_size", "workers")
        rows = [
            (
                stage.name,
                ", ".join(self._parents[stage.name]) or "the source",
                stage.run if isinstance(stage.run, str) else function_name(stage.run),
                stage.shape.describe(),
                stage.batch_size,
                stage.workers,
            )
            for stage in self.stages
        ]
        return html_table(f"Pipeline {self.name}", columns, rows)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def stage(self, name: str) -> Stage:
        self._known(name)
        return next(stage for stage in self.stages if stage.name == name)

    def parents(self, name: str) -> tuple[str, ...]:
        """The stages that it gets items from, as written."""
        self._known(name)
        return self._parents[name]

    def children(self, name: str) -> tuple[str, ...]:
        """The stages that get its items, as listed."""
        self._known(name)
        return self._children[name]

    def sources(self) -> tuple[str, ...]:
        return tuple(name for name, parents in self._parents.items() if not parents)

    def leaves(self) -> tuple[str, ...]:
        return tuple(name for name, children in self._children.items() if not children)

    @classmethod
    def load(cls, path: str | Path) -> Pipeline:
        """A YAML or JSON file; mistakes are reported with line and column."""
        try:
            from dovetail.pipeline import pipeline_file  # late: most pipelines are built by code

            written = pipeline_file.read_pipeline_file(path)
        except ConfigError as error:
            raise PipelineError(error.problems) from None
        return cls._from(written)

    @classmethod
    def from_dict(cls, data: object) -> Pipeline:
        """From the data of a pipeline file."""
        from dovetail.pipeline import pipeline_file

        return cls._from(pipeline_file.parse_pipeline_data(data))

    @classmethod
    def _from(cls, written: ParsedPipelineFile) -> Pipeline:
        if written.problems:
            raise PipelineError(written.problems)
        return cls(written.stages, written.name)

    def to_dict(self) -> dict[str, Any]:
        """The data of a pipeline file; PipelineError if a file cannot name a function."""
        from dovetail.pipeline import pipeline_file

        data, problems = pipeline_file.pipeline_to_data(self.stages, self.name)
        if problems:
            raise PipelineError(problems)
        return data

    def _known(self, name: str) -> None:
        if name not in self._parents:
            near = did_you_mean(name, list(self._parents))
            message = f"pipeline {self.name!r} has no stage {short_repr(name)}{near}"
            raise PipelineError(
                Problem("DT032", message, evidence=(format_names(self._parents),), fixes=("name one of its stages",))
            )


def _default_problems(defaults: object) -> list[Problem]:
    if defaults is None:
        return []
    if not isinstance(defaults, Mapping):
        return [argument_problem("DT034", "defaults", defaults, "a mapping", {"on_error": "skip"})]
    problems = [
        Problem(
            "DT034",
            f"defaults: {short_repr(name)} is not a setting that stages have a default for{_near_default(name)}",
            evidence=(f"defaults: {', '.join(DEFAULTS.names)}",),
            fixes=(f"remove {short_repr(name)}, or correct its spelling",),
        )
        for name in defaults
        if name not in DEFAULTS.by_name
    ]
    return [*problems, *(problem for _, problem in default_problems(defaults))]


def _near_default(name: object) -> str:
    return did_you_mean(name, DEFAULTS.names) if isinstance(name, str) else ""


def _with_defaults(stages: tuple[Any, ...], defaults: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(stage.with_defaults(defaults) if isinstance(stage, Stage) else stage for stage in stages)


def _with_names(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Functions as stages with their names; anything else that is not a stage stays, and is reported as a problem."""
    taken = {stage.name for stage in given if isinstance(stage, Stage)}
    stages = []
    for one in given:
        if isinstance(one, Stage) or not (callable(one) or (isinstance(one, str) and ":" in one)):
            stages.append(one)
            continue
        base = similar_name(function_name(one))
        numbers = (f"{base[: NAME_LIMIT - 8]}_{number}" for number in count(2))
        name = base if base not in taken else next(name for name in numbers if name not in taken)
        taken.add(name)
        stages.append(Stage(name, one))
    return tuple(stages)


def _shortened(names: list[str]) -> str:
    """'a, b, c' or 'a, b, c and 4 more'."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more


def _listed(stages: object) -> tuple[Any, ...]:
    if isinstance(stages, Iterable) and not isinstance(stages, str | bytes | Mapping):
        return tuple(stages)
    message = f"a pipeline is made of a list of stages, not {short_repr(stages)}"
    raise PipelineError(Problem("DT030", message, fixes=(PIPELINE_EXAMPLE,)))
