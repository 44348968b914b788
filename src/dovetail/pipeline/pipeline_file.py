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

import re
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
    file_problem,
    is_quotable,
    list_of,
    record_type,
)
from dovetail.documents.parser import read_document
from dovetail.documents.yaml_surface import YAML
from dovetail.errors import ConfigError, Problem, ResourceError, Subject, nearest_word, short_repr
from dovetail.pipeline.error_policy import RETRY, RETRY_FILE_EXAMPLE, Retry, retry_from_data, retry_to_data
from dovetail.pipeline.graph import pipeline_problems, reverse_edges, stage_edges
from dovetail.pipeline.option_surface import OptionSurface
from dovetail.pipeline.overrides import set_option
from dovetail.pipeline.source_sink import JOB, job_problems
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_fields import DEFAULTS, NAME, STAGE, default_problems, quote_value
from dovetail.pipeline.stage_function import Each
from dovetail.resources.resources import RESOURCES, Resources

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dovetail.errors import Fix

OPTION = "--set "
"""Begin of the place of a value that the command line gave."""
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
        Field("name", NAME, "Name of the pipeline.", "pipeline"),
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


class _PipelineFileReader:
    """Collects all problems, so that they can be fixed at once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.given: list[set[str]] = []
        """Keys of each stage in the file; a missing key is reported once, not also as an invalid value."""
        self.defaults: dict[str, Any] = {}
        """Valid values for stages without their own."""

    def file(self) -> ParsedPipelineFile:
        top = self._mapping((), self.document.data, PIPELINE_FILE, EXAMPLE_FILE)
        entries = top.get("stages", ())
        if not isinstance(entries, list | tuple):
            instead = [entries] if isinstance(entries, Mapping) else EXAMPLE_FILE["stages"]
            self._report(("stages",), WrongValue(entries, "a list", instead=(instead,)))
            entries = ()
        if "defaults" in top:
            self.defaults = self._defaults(("defaults",), top["defaults"])
        stages = [self._stage(("stages", number), entry) for number, entry in enumerate(entries)]
        name = top.get("name", "pipeline")
        formless = not stages and bool(self.problems)
        for path, problem in pipeline_problems(stages, name):
            if self._was_given(path) and not (formless and problem.code == "DT030"):
                self._add(path, problem)
        leaves = (
            None if self.problems else [end for end, then in reverse_edges(stage_edges(stages)).items() if not then]
        )
        for path, problem in job_problems(top, leaves):
            self.problems.append(replace(problem, place=self.document.place(path)))
        job = {key: top[key] for key in JOB.names if key in top}
        return ParsedPipelineFile(name, tuple(stages), tuple(sorted(self.problems, key=self._line_and_column)), job)

    def _stage(self, path: KeyPath, entry: object) -> Stage:
        known = self._mapping(path, entry, STAGE, EXAMPLE_STAGE)
        self.given.append({*known, *self.defaults})
        name = known.get("name")
        called = f"stage {name!r}" if isinstance(name, str) else dotted_path("", path)
        return Stage(**{"name": None, "run": None, **self.defaults, **self._objects(path, known, called)})

    def _defaults(self, path: KeyPath, entry: object) -> dict[str, Any]:
        values = self._objects(path, self._mapping(path, entry, DEFAULTS, EXAMPLE_DEFAULTS), "defaults")
        for field_name, problem in default_problems(values):
            self._add((*path, field_name), problem)
            values.pop(field_name, None)
        return values

    def _objects(self, path: KeyPath, known: Mapping[str, Any], called: str) -> dict[str, Any]:
        """The values of a stage, with objects for mappings."""
        values = dict(known)
        if "resources" in values:
            values["resources"] = self._resources((*path, "resources"), values["resources"], called)
        for name in ("on_error", "on_death"):
            if isinstance(values.get(name), Mapping):
                values[name] = self._retry((*path, name), values[name])
        return values

    def _retry(self, path: KeyPath, entry: Mapping[Any, Any]) -> object:
        """The `dt.Retry` of `on_error: {retry: [ConnectionError], times: 3, backoff: 1s, then: skip}`."""
        known = self._mapping(path, entry, RETRY, {})
        try:
            return retry_from_data(known)
        except ConfigError as error:
            for problem in error.problems:
                self.problems.append(replace(problem, fixes=(RETRY_FILE_EXAMPLE,), place=self.document.place(path)))
            return "fail"

    def _resources(self, path: KeyPath, entry: object, called: str) -> Resources:
        known = self._mapping(path, entry, RESOURCES, {"cpus": 1})
        try:
            return Resources(**known)
        except ResourceError as error:
            for problem in error.problems:
                setting = problem.subject.name if problem.subject is not None else ""
                about = (setting,) if setting in known else ()
                self._add((*path, *about), replace(problem, message=f"{called}: {problem.message}"))
            return Resources()

    def _mapping(self, path: KeyPath, data: object, record: Record, example: object) -> dict[str, Any]:
        """The values of known keys; unknown and missing keys are problems."""
        if not isinstance(data, Mapping):
            self._report(path, WrongValue(data, "a mapping", instead=(example,)))
            return {}
        for mistake in record.key_mistakes(data):
            problem = file_problem(mistake, path)
            place = self.document.place((*path, *mistake.path))
            if isinstance(mistake, UnknownKey):
                problem = _with_hint(problem, mistake, record)
                if place.startswith(OPTION):
                    problem = replace(problem, fixes=_spelled_as_option(place, problem, mistake))
            self.problems.append(replace(problem, place=place))
        return {key: data[key] for key in record.names if key in data}

    def _report(self, path: KeyPath, mistake: WrongValue) -> None:
        problem = file_problem(replace(mistake, path=path))
        self.problems.append(replace(problem, place=self.document.place(path)))

    def _line_and_column(self, problem: Problem) -> tuple[int, ...]:
        """Order of problems. Values of the command line (`overrides.py`) have neither, and come first."""
        found = re.search(r":(\d+):(\d+)$", problem.place) if self.document.root is not None else None
        return (int(found[1]), int(found[2])) if found and not problem.place.startswith("--") else ()

    def _was_given(self, path: KeyPath) -> bool:
        match path:
            case ("stages", int(number), str(key), *_):
                return key in self.given[number]
        return True

    def _add(self, path: KeyPath, problem: Problem) -> None:
        place = self.document.place(path)
        fixes = YAML.fixes(problem)
        if problem.code == "DT030":
            fixes = (YAML.assignment("stages", [EXAMPLE_STAGE]),)
        elif place.startswith(OPTION) and (stage := self._stage_name(path)):
            fixes = OptionSurface().fixes(replace(problem, subject=Subject("stage", stage)))
        self.problems.append(replace(problem, fixes=fixes, place=place))

    def _stage_name(self, path: KeyPath) -> str:
        """The name of the stage that a path is in; empty: in none, or it has no valid name."""
        match path:
            case ("stages", int(number), *_):
                name = self.document.data["stages"][number].get("name")
                return name if isinstance(name, str) else ""
        return ""


def _with_hint(problem: Problem, mistake: UnknownKey, record: Record) -> Problem:
    """The problem of an unknown key, with the mapping that it belongs to."""
    word = str(mistake.path[-1])
    if record is STAGE and word in RESOURCES.by_name:
        value = quote_value(mistake.value) if is_quotable(mistake.value) else 1
        message = f"unknown key {word!r}: it belongs under 'resources'"
        return replace(problem, message=message, fixes=(f"resources: {{{word}: {value}}}",))
    if record is RESOURCES and word in STAGE.by_name:
        message = f"unknown key {word!r}: it belongs to the stage"
        return replace(problem, message=message, fixes=(f"move {word!r} out of 'resources', beside it",))
    return problem


def _spelled_as_option(place: str, problem: Problem, mistake: UnknownKey) -> tuple[Fix, ...]:
    """The fix of an unknown key of the option `--set`, as that option."""
    near = nearest_word(str(mistake.path[-1]), mistake.known)
    path, _, value = place.removeprefix(OPTION).partition("=")
    if near is None or not path.endswith(f".{mistake.path[-1]}"):
        return problem.fixes
    return (set_option(f"{path.rpartition('.')[0]}.{near}", value),)


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
