"""Read and write pipeline files.

name: captions
source: clips/*.jsonl
sink: captions.jsonl
stages:
  - {name: read, run: "my_package.video:read"}
  - {name: caption, run: "my_package.video:Caption", resources: {gpus: 0.25, gpu_memory: 4GB}, batch_size: 16}

`source`, `sink`, `mode`, `ordered` and `max_errors` (`ends.py`) are for `dovetail run`; a Pipeline has none of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import Document, KeyPath, dotted_path
from dovetail.documents.parser import read_document
from dovetail.documents.validation import missing_key_problem, unknown_key_problem
from dovetail.documents.yaml_surface import YAML
from dovetail.errors import ConfigError, Problem, ResourceError, short_repr
from dovetail.pipeline.error_policy import RETRY_FILE_EXAMPLE, RETRY_KEYS, Retry, retry_from_data, retry_to_data
from dovetail.pipeline.graph import pipeline_problems, reverse_edges, stage_edges
from dovetail.pipeline.source_sink import TOP_KEYS, job_problems
from dovetail.pipeline.stage import Each, Stage
from dovetail.pipeline.stage_validation import is_quotable, quote_value
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

FILE_KEYS = ("name", "stages", *TOP_KEYS)
STAGE_KEYS = tuple(item.name for item in fields(Stage))
RESOURCE_KEYS = tuple(item.name for item in fields(Resources))
STAGE_EXAMPLE = '{name: read, run: "my_package.my_module:read"}'
EXAMPLES = {
    "name": "name: read",
    "run": 'run: "my_package.my_module:read"',
    "stages": f"stages: [{STAGE_EXAMPLE}]",
}


@dataclass(frozen=True, slots=True)
class ParsedPipelineFile:
    """A pipeline file as far as it could be read, and everything that is wrong with it."""

    name: str
    stages: tuple[Stage, ...]
    problems: tuple[Problem, ...]
    job: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else it says: `source`, `sink`, `mode`, ..., checked for their form."""


def read_pipeline_file(path: str | Path) -> ParsedPipelineFile:
    return parse_pipeline_document(read_document(path))


def parse_pipeline_document(document: Document) -> ParsedPipelineFile:
    return _PipelineFileReader(document).file()


def parse_pipeline_data(data: object) -> ParsedPipelineFile:
    return _PipelineFileReader(Document("pipeline", data)).file()


class _PipelineFileReader:
    """Collects mistakes of form and of value, so that all of them can be fixed at once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.given: list[set[str]] = []
        """Keys of each stage that were there; what was left out for want of form is not a value that is wrong."""

    def file(self) -> ParsedPipelineFile:
        top = self._mapping((), self.document.data, FILE_KEYS, ("stages",), EXAMPLES["stages"])
        entries = top.get("stages", ())
        if not isinstance(entries, list | tuple):
            self._form(("stages",), entries, "a list", EXAMPLES["stages"])
            entries = ()
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
        job = {key: top[key] for key in TOP_KEYS if key in top}
        return ParsedPipelineFile(name, tuple(stages), tuple(sorted(self.problems, key=self._line_and_column)), job)

    def _stage(self, path: KeyPath, entry: object) -> Stage:
        known = self._mapping(path, entry, STAGE_KEYS, ("name", "run"), f"- {STAGE_EXAMPLE}")
        self.given.append(set(known))
        values = {"name": None, "run": None, **known}
        if "resources" in values:
            called = f"stage {values['name']!r}" if isinstance(values["name"], str) else dotted_path("", path)
            values["resources"] = self._resources((*path, "resources"), values["resources"], called)
        if isinstance(values.get("on_error"), Mapping):
            values["on_error"] = self._retry((*path, "on_error"), values["on_error"])
        return Stage(**values)

    def _retry(self, path: KeyPath, entry: Mapping[Any, Any]) -> object:
        """The `dt.Retry` of `on_error: {retry: [ConnectionError], times: 3, backoff: 1s, then: skip}`."""
        known = self._mapping(path, entry, RETRY_KEYS, (), RETRY_FILE_EXAMPLE)
        try:
            return retry_from_data(known)
        except ConfigError as error:
            for problem in error.problems:
                self.problems.append(replace(problem, fixes=(RETRY_FILE_EXAMPLE,), place=self.document.place(path)))
            return "fail"

    def _resources(self, path: KeyPath, entry: object, called: str) -> Resources:
        known = self._mapping(path, entry, RESOURCE_KEYS, (), "resources: {cpus: 1}")
        try:
            return Resources(**known)
        except ResourceError as error:
            for problem in error.problems:
                setting = problem.subject.name if problem.subject is not None else ""
                about = (setting,) if setting in known else ()
                self._add((*path, *about), replace(problem, message=f"{called}: {problem.message}"))
            return Resources()

    def _mapping(
        self, path: KeyPath, data: object, keys: Collection[str], needed: Collection[str], example: str
    ) -> dict[str, Any]:
        """The known keys; unknown ones, and needed ones that are not there, are problems."""
        if not isinstance(data, Mapping):
            self._form(path, data, "a mapping", example)
            return {}
        for key in data:
            if not isinstance(key, str) or key not in keys:
                self.problems.append(self._unknown(path, key, data[key], keys))
        for key in needed:
            if key not in data:
                where = (*path, key)
                problem = missing_key_problem(dotted_path("", where), key, self.document.place(where))
                self.problems.append(replace(problem, fixes=(EXAMPLES[key],)))
        return {key: data[key] for key in keys if key in data}

    def _unknown(self, path: KeyPath, key: object, value: object, keys: Collection[str]) -> Problem:
        word = key if isinstance(key, str) else short_repr(key)
        problem = unknown_key_problem(word, keys, self.document.place((*path, word)))
        if keys is STAGE_KEYS and word in RESOURCE_KEYS:
            fixes = (f"resources: {{{word}: {quote_value(value) if is_quotable(value) else 1}}}",)
            return replace(problem, message=f"unknown key {word!r}: it belongs under 'resources'", fixes=fixes)
        if keys is RESOURCE_KEYS and word in STAGE_KEYS:
            fixes = (f"move {word!r} out of 'resources', beside it",)
            return replace(problem, message=f"unknown key {word!r}: it belongs to the stage", fixes=fixes)
        return problem

    def _form(self, path: KeyPath, data: object, wanted: str, example: str) -> None:
        where = dotted_path("", path) or "the file"
        message = f"{where} should be {wanted}, not {short_repr(data)}"
        self.problems.append(Problem("DT013", message, fixes=(example,), place=self.document.place(path)))

    def _line_and_column(self, problem: Problem) -> tuple[int, ...]:
        """What the command line changed (`changes.py`) has neither, and comes first."""
        found = re.search(r":(\d+):(\d+)$", problem.place) if self.document.root is not None else None
        return (int(found[1]), int(found[2])) if found and not problem.place.startswith("--") else ()

    def _was_given(self, path: KeyPath) -> bool:
        match path:
            case ("stages", int(number), str(key), *_):
                return key in self.given[number]
        return True

    def _add(self, path: KeyPath, problem: Problem) -> None:
        fixes = (EXAMPLES["stages"],) if problem.code == "DT030" else YAML.fixes(problem)
        self.problems.append(replace(problem, fixes=fixes, place=self.document.place(path)))


def pipeline_to_data(stages: Sequence[Stage], name: str) -> tuple[dict[str, Any], list[Problem]]:
    """What a file would hold, and which functions it could not name."""
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
    """ "module:name" if that is where this very function or class is found, else None."""
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
    """The fields that are not as they are by default, as plain data."""
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
