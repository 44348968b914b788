"""Read and write pipeline files.

name: captions
source: clips/*.jsonl
sink: captions.jsonl
defaults: {on_error: skip, retries: 2}
stages:
  - {name: read, run: "my_package.video:read"}
  - {name: caption, run: "my_package.video:Caption", resources: {gpus: 0.25, gpu_memory: 4GB}, batch_size: 16}

`source`, `sink`, `mode`, `ordered` and `max_errors` (`source_sink.py`) are for `dovetail run`; a Pipeline has none of
them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import Document, KeyPath, dotted_path
from dovetail.documents.fields import (
    NULL,
    Field,
    Record,
    Schema,
    UnknownKey,
    WrongValue,
    is_quotable,
    list_of,
    record_type,
)
from dovetail.documents.parser import read_document
from dovetail.documents.yaml_writer import YAML
from dovetail.errors import ConfigError, Problem, short_repr
from dovetail.pipeline.error_policy import RETRY, RETRY_FILE_EXAMPLE, Retry, retry_from_data, retry_to_data
from dovetail.pipeline.file_reader import FileReader
from dovetail.pipeline.graph import pipeline_problems, reverse_edges, stage_edges
from dovetail.pipeline.source_sink import JOB, job_problems
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_fields import DEFAULTS, NAME, STAGE, default_problems, quote_value
from dovetail.pipeline.stage_function import Each
from dovetail.resources.resources import RESOURCES, Resources

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dovetail.errors import Fix

EXAMPLE_STAGE = {"name": "read", "run": "my_package.my_module:read"}
EXAMPLE_FILE = {"stages": [EXAMPLE_STAGE]}
EXAMPLE_DEFAULTS = {"on_error": "skip", "retries": 2}
STAGES = list_of(
    replace(record_type(STAGE, EXAMPLE_STAGE), schema={"$ref": "#/$defs/stage"}), "a list of [stages](#stage)"
)
PIPELINE_FILE = Record(
    "Pipeline file",
    "Stages, what one worker of each needs, their order, and where items come from and go.",
    (
        Field("name", NAME, "Name of the pipeline and its runs; by default that of the file."),
        Field(
            "stages",
            replace(STAGES, schema={**STAGES.schema, "minItems": 1}),
            "The stages, each after the one before it unless it has `after`.",
            required=True,
        ),
        Field(
            "defaults",
            replace(record_type(DEFAULTS, EXAMPLE_DEFAULTS), text="[defaults](#defaults) of stages"),
            "Values of all stages that do not have their own.",
        ),
        *JOB.fields,
    ),
)


def schema() -> Schema:
    """The JSON Schema of a pipeline file."""
    workers = {"workers": {"not": {"const": "auto"}}, "workers_per_node": {"not": NULL}}
    stage = {**STAGE.schema(), "not": {"properties": workers, "required": list(workers)}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Dovetail pipeline",
        **PIPELINE_FILE.schema(),
        "$defs": {"stage": stage, "resources": RESOURCES.schema()},
    }


@dataclass(frozen=True, slots=True)
class ParsedPipelineFile:
    """A pipeline file as far as it could be read, and all problems in it."""

    name: str
    stages: tuple[Stage, ...]
    problems: tuple[Problem, ...]
    job: Mapping[str, Any] = field(default_factory=dict)
    """The other keys: `source`, `sink`, `mode`, ..."""


def read_pipeline_file(path: str | Path) -> ParsedPipelineFile:
    return parse_pipeline_document(read_document(path))


def parse_pipeline_document(document: Document) -> ParsedPipelineFile:
    return _PipelineFileReader(document).file()


def parse_pipeline_data(data: object) -> ParsedPipelineFile:
    return _PipelineFileReader(Document("pipeline", data)).file()


class _PipelineFileReader(FileReader):
    def __init__(self, document: Document) -> None:
        super().__init__(document)
        self.defaults: dict[str, Any] = {}
        """Valid values for stages without their own."""

    def file(self) -> ParsedPipelineFile:
        top = self.mapping((), self.document.data, PIPELINE_FILE, EXAMPLE_FILE)
        entries = top.get("stages", ())
        if not isinstance(entries, list | tuple):
            instead = [entries] if isinstance(entries, Mapping) else EXAMPLE_FILE["stages"]
            self.report(("stages",), WrongValue(entries, "a list", instead=(instead,)))
            entries = ()
        if "defaults" in top:
            self.defaults = self._defaults(("defaults",), top["defaults"])
        stages = [self._stage(number, entry) for number, entry in enumerate(entries)]
        name = top.get("name", self._file_name())
        formless = not stages and bool(self.problems)
        for path, problem in pipeline_problems(stages, name):
            if self.was_given(path) and not (formless and problem.code == "DT030"):
                self.add(path, problem)
        leaves = (
            None if self.problems else [end for end, then in reverse_edges(stage_edges(stages)).items() if not then]
        )
        for path, problem in job_problems(top, leaves):
            self.problems.append(replace(problem, place=self.document.place(path)))
        job = {key: top[key] for key in JOB.names if key in top}
        return ParsedPipelineFile(name, tuple(stages), self.sorted_problems(), job)

    def _file_name(self) -> str:
        """The name of the file without its suffix, if a pipeline may have it."""
        file = self.document.name.rpartition("/")[2]
        stem = file.rpartition(".")[0] or file
        return stem if NAME.accepts(stem) else "pipeline"

    def _stage(self, number: int, entry: object) -> Stage:
        path = ("stages", number)
        known = self.mapping(path, entry, STAGE, EXAMPLE_STAGE)
        self.given[number] = {*known, *self.defaults}
        name = known.get("name")
        called = f"stage {name!r}" if isinstance(name, str) else dotted_path("", path)
        return Stage(**{"name": None, "run": None, **self.defaults, **self._objects(path, known, called)})

    def _defaults(self, path: KeyPath, entry: object) -> dict[str, Any]:
        values = self._objects(path, self.mapping(path, entry, DEFAULTS, EXAMPLE_DEFAULTS), "defaults")
        for field_name, problem in default_problems(values):
            self.add((*path, field_name), problem)
            values.pop(field_name, None)
        return values

    def _objects(self, path: KeyPath, known: Mapping[str, Any], called: str) -> dict[str, Any]:
        """The values of a stage, with objects for mappings."""
        values = dict(known)
        if "resources" in values:
            values["resources"] = self.resources((*path, "resources"), values["resources"], called)
        for name in ("on_error", "on_death"):
            if isinstance(values.get(name), Mapping):
                values[name] = self._retry((*path, name), values[name])
        return values

    def _retry(self, path: KeyPath, entry: Mapping[Any, Any]) -> object:
        """The `dt.Retry` of `on_error: {retry: [ConnectionError], times: 3, backoff: 1s, then: skip}`."""
        known = self.mapping(path, entry, RETRY, {})
        try:
            return retry_from_data(known)
        except ConfigError as error:
            for problem in error.problems:
                self.problems.append(replace(problem, fixes=(RETRY_FILE_EXAMPLE,), place=self.document.place(path)))
            return "fail"

    def with_hint(self, problem: Problem, mistake: UnknownKey, record: Record) -> Problem:
        return _with_hint(problem, mistake, record)

    def right_key(self, mistake: UnknownKey, record: Record) -> str:
        word = str(mistake.path[-1])
        if record is STAGE and word in RESOURCES.by_name:
            return f"resources.{word}"
        if record is PIPELINE_FILE and word in DEFAULTS.by_name:
            return f"defaults.{word}"
        return super().right_key(mistake, record)

    def fixes(self, path: KeyPath, problem: Problem) -> tuple[Fix, ...]:
        if problem.code == "DT030":
            return (YAML.assignment("stages", [EXAMPLE_STAGE]),)
        return super().fixes(path, problem)


def _with_hint(problem: Problem, mistake: UnknownKey, record: Record) -> Problem:
    """The problem of an unknown key, with the mapping that it belongs to."""
    word = str(mistake.path[-1])
    if record is STAGE and word in RESOURCES.by_name:
        value = quote_value(mistake.value) if is_quotable(mistake.value) else 1
        message = f"unknown key {word!r}: it belongs under 'resources'"
        return replace(problem, message=message, fixes=(f"resources: {{{word}: {value}}}",))
    if record is PIPELINE_FILE and word in STAGE.by_name:
        if word not in DEFAULTS.by_name:
            fix: Fix = f"move {word!r} to its stage, below 'stages'"
            return replace(problem, message=f"unknown key {word!r}: it belongs to a stage", fixes=(fix,))
        fix = YAML.assignment("defaults", {word: mistake.value})
        message = f"unknown key {word!r}: it belongs to a stage, or to 'defaults' for all of them"
        return replace(problem, message=message, fixes=(fix,))
    if record is RESOURCES and word in STAGE.by_name:
        message = f"unknown key {word!r}: it belongs to the stage"
        return replace(problem, message=message, fixes=(f"move {word!r} out of 'resources', beside it",))
    return problem


def pipeline_to_data(stages: Sequence[Stage], name: str) -> tuple[dict[str, Any], list[Problem]]:
    """The data of a pipeline file, and a problem for each function that a file cannot name."""
    problems: list[Problem] = []
    entries = []
    for stage in stages:
        entry = _non_default_values(stage)
        run = importable_name(stage.run)
        if run is None:
            called = getattr(getattr(stage.run, "fn", stage.run), "__name__", "it")
            each = "@dt.each above its def, " if isinstance(stage.run, Each) else ""
            message = f"stage {stage.name!r}: a file cannot name run={short_repr(stage.run)}"
            fix = f"write {called} at the top of a module that can be imported, {each}or give run as a text"
            problems.append(Problem("DT035", message, fixes=(fix,)))
        entry["run"] = run
        if "resources" in entry:
            entry["resources"] = _non_default_values(stage.resources)
        entries.append(entry)
    return {"name": name, "stages": entries}, problems


def importable_name(run: object) -> str | None:
    """ "module:name" of a function or class that can be imported under this name, else None."""
    if isinstance(run, str):
        return run
    inner = run.fn if isinstance(run, Each) else run
    module, qualified = getattr(inner, "__module__", None), getattr(inner, "__qualname__", None)
    found: object = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    if found is None or not isinstance(qualified, str):
        return None
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return f"{module}:{qualified}" if found is run or (isinstance(run, Each) and found == run) else None


def _non_default_values(value: Stage | Resources) -> dict[str, Any]:
    """The values that differ from their defaults, as plain data."""
    data = {}
    for item in fields(value):
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        written = getattr(value, item.name)
        if default is MISSING or written != default:
            data[item.name] = _plain_value(written)
    return data


def _plain_value(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Retry):
        return retry_to_data(value)
    return dict(value) if isinstance(value, Mapping) else value
