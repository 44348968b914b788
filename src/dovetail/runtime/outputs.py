"""Output of a run: parsing of `sink=`, checks of the paths, and writers attached to leaf stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dovetail.data.interfaces import RunOutputs
from dovetail.errors import Change, ConfigError, Problem, did_you_mean, short_repr

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.data.sinks import SinkSpec
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.streaming.settings import UnitSpec

ALL_LEAVES = ""
"""Label of a sink that all leaves share."""


@dataclass(slots=True)
class SinkRequest:
    """The validated `sink` argument."""

    files: dict[str, SinkSpec] = field(default_factory=dict)
    functions: dict[str, Callable[[list[Any]], object]] = field(default_factory=dict)

    @property
    def durable(self) -> bool:
        return bool(self.files or self.functions)

    @property
    def in_order(self) -> bool:
        """Whether a sink needs its rows in the order of the source."""
        return any(spec.ordered for spec in self.files.values())

    @property
    def order_settings(self) -> list[str]:
        """The settings of its sinks that keep the order of the source."""
        ordered = [label for label, spec in self.files.items() if spec.ordered]
        return [f"sink.stages.{label}.ordered" if label is not ALL_LEAVES else "sink.ordered" for label in ordered]

    def kinds(self, pipeline: Pipeline) -> dict[str, str]:
        """Leaf stage -> kind of its sink."""
        kinds = {label: spec.form[0] for label, spec in self.files.items()}
        return {leaf: kinds.get(leaf, kinds.get(ALL_LEAVES, "")) for leaf in pipeline.leaves()}


def parse_sinks(sink: object, pipeline: Pipeline, *, ordered: bool) -> SinkRequest:
    found = SinkRequest()
    if sink is None:
        return found
    problems: list[Problem] = []
    by_leaf = sink if _is_by_leaf(sink, pipeline) else {ALL_LEAVES: sink}
    assert isinstance(by_leaf, Mapping)
    leaves = pipeline.leaves()
    for label, one in by_leaf.items():
        if label is not ALL_LEAVES and label not in leaves:
            message = f"{label!r} in sink= is not a leaf stage{did_you_mean(str(label), leaves)}"
            problems.append(
                Problem("DT385", message, (f"leaf stages: {', '.join(leaves)}",), (f"sink={{{leaves[0]!r}: ...}}",))
            )
            continue
        try:
            _add_sink(found, str(label), one, ordered=ordered)
        except ConfigError as error:
            problems += error.problems
    problems += _duplicate_sink_errors(found)
    if problems:
        raise ConfigError(problems)
    return found


def _is_by_leaf(sink: object, pipeline: Pipeline) -> bool:
    """A mapping with a path is one sink."""
    if not isinstance(sink, Mapping) or not sink:
        return False
    names = {stage.name for stage in pipeline.stages}
    return "path" not in sink or ("path" in names and not isinstance(sink["path"], str))


def _add_sink(found: SinkRequest, label: str, sink: object, *, ordered: bool) -> None:
    from dovetail.data.sinks import as_sink_spec

    spec = as_sink_spec(sink)
    if spec is not None:
        found.files[label] = replace(spec, ordered=True) if ordered else spec
    elif callable(sink):
        found.functions[label] = sink
    else:
        fixes = ('sink="out.jsonl"', "sink=a_function_of_a_list")
        raise ConfigError(Problem("DT385", f"sink={short_repr(sink)} is neither a file nor a function", fixes=fixes))


def _duplicate_sink_errors(found: SinkRequest) -> list[Problem]:
    if len(found.files) < 2:
        return []
    from dovetail.data.sinks import canonical_path, find_replaced_input

    by_path: dict[str, list[str]] = {}
    for label, spec in found.files.items():
        by_path.setdefault(canonical_path(spec), []).append(label)
    for label, spec in found.files.items():
        others = {place: labels for place, labels in by_path.items() if label not in labels}
        hit = find_replaced_input(spec, others)
        if hit is not None:
            by_path[hit].append(label)
    return [
        Problem(
            "DT385", f"{' and '.join(labels)} write to the same sink {path}", fixes=("use a different path for each",)
        )
        for path, labels in by_path.items()
        if len(labels) > 1
    ]


def check_sinks_apart_from_source(want: SinkRequest, files: Collection[str]) -> None:
    """Raises if a sink would replace a file of the source."""
    if not files or not want.files:
        return
    from dovetail.data.sinks import find_replaced_input
    from dovetail.data.writers.output_files import unused_name

    problems = []
    for spec in want.files.values():
        found = find_replaced_input(spec, files)
        if found is not None:
            evidence = (f"the sink {spec.path} would replace {found}, which the run reads",)
            fixes = (Change({"sink": unused_name(spec.path)}, (spec.subject,)),)
            problems.append(Problem("DT385", "the sink is a part of the source", evidence, fixes, spec.path))
    if problems:
        raise ConfigError(problems)


def open_sinks(want: SinkRequest, run_id: str, spare: Path) -> RunOutputs:
    """Creates and changes no file."""
    if not want.files:
        return RunOutputs(functions=dict(want.functions))
    from dovetail.data.sinks import open_sink

    files = {label: open_sink(spec, run_id, spare / (label or "all")) for label, spec in want.files.items()}
    return RunOutputs(dict(files), dict(want.functions))


def attach_writers(units: tuple[UnitSpec, ...], outputs: RunOutputs, pipeline: Pipeline) -> tuple[UnitSpec, ...]:
    """Gives leaf units the writer of their sink; without one, results go to the driver."""
    leaves = set(pipeline.leaves())
    found = []
    for unit in units:
        last = unit.stages[-1]
        label = next((one for one in (last, ALL_LEAVES) if one in outputs.files or one in outputs.functions), None)
        if last in leaves and label is not None:
            outputs.label_of[unit.name] = label
            if label in outputs.files:
                unit = replace(unit, hosted=replace(unit.hosted, writer=outputs.files[label].writer()))
        if last in leaves and unit.hosted.writer is None:
            unit = replace(unit, hosted=replace(unit.hosted, results_to_driver=True))
        found.append(unit)
    return tuple(found)
