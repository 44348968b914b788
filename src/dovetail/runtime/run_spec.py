"""`RunSpec`: a pipeline file with the overrides of the command line, resolved to what `dt.run` takes.

Paths in the file are relative to its folder; paths typed on the command line (`--source`, `--sink`, `--set`) are
relative to the current folder. The driver and the workers can import modules beside the file.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.documents.parser import read_document
from dovetail.errors import ConfigError, DovetailError, PipelineError, Problem, short_repr
from dovetail.pipeline import pipeline_file
from dovetail.pipeline.overrides import Override, apply_overrides, parse_overrides
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.source_sink import SOURCE_AND_SINK
from dovetail.runtime.missing_code import find_missing_code
from dovetail.streaming.partial_batches import warn_of_partial_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.documents.document import Document, KeyPath
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.run_handle import Run
    from dovetail.scheduling.plan import Plan


def stdin_rows() -> Iterator[Any]:
    if sys.stdin is None:
        raise ConfigError(Problem("DT363", "stdin is closed", fixes=("--source data.jsonl",), place="stdin"))
    for number, line in enumerate(sys.stdin.buffer, 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            message = f"is not JSON: {error}: {short_repr(line.decode(errors='replace'))}"
            fixes = ("one JSON value per line, as jq -c . prints",)
            raise ConfigError(Problem("DT363", message, fixes=fixes, place=f"stdin:{number}")) from None


STDIO = "-"
"""stdin as a source, stdout as a sink."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A pipeline and the other settings of its file. `source` and `sink` are as `dt.run` takes them, except for
    functions, which are still names: `open_source_and_sink` imports them."""

    file: Path
    document: Document
    pipeline: Pipeline
    source: Any
    """None: not specified."""
    sink: Any
    """None: the caller reads the results."""
    mode: str = "auto"
    ordered: bool = False
    max_errors: int | float | str | None = None

    @property
    def order_settings(self) -> list[str]:
        """The settings by which results keep the order of the source; none: they need not."""
        if self.ordered:
            return ["ordered"]
        sinks = _source_and_sinks({"sink": self.sink})
        return [
            ".".join((*map(str, path), "ordered"))
            for path, sink in sinks
            if isinstance(sink, Mapping) and sink.get("ordered")
        ]

    def complete_plan(self, plan: Plan) -> Plan:
        """The plan with the warnings that depend on the settings of the run."""
        return warn_of_partial_batches(plan, self.pipeline, self.order_settings, durable=self.sink is not None)

    def start(
        self,
        *,
        engine: str = "local",
        cluster: Cluster | str = "auto",
        mode: str | None = None,
        ordered: bool | None = None,
        retry_errors: str | Path | None = None,
        **arguments: Any,
    ) -> Run:
        """Start a run with `dt.run`; what is not given is as in the file."""
        from dovetail.runtime.run import run  # late: planning does not need it

        # a retry reads the failed items of the earlier run, not the source
        spec = self if retry_errors is None else replace(self, source=(), sink=with_append(self.sink))
        source, sink = open_source_and_sink(spec)
        settings = {"sink": sink, "max_errors": self.max_errors} | arguments
        return run(
            self.pipeline,
            settings.pop("source", source),
            engine,
            cluster,
            mode or self.mode,
            ordered=self.ordered if ordered is None else ordered,
            retry_errors=retry_errors,
            **settings,
        )


def load_pipeline_spec(
    file: str | Path,
    sets: Sequence[str] = (),
    source: str | None = None,
    sink: str | None = None,
    typed_in: Path | None = None,
) -> RunSpec:
    """Loads a file with the overrides of a command that was typed in `typed_in`; reports all errors at once."""
    path = Path(file).absolute()
    document = read_document(file)
    own = replace(document, data=_with_absolute_paths(document.data, path.parent))
    asked = apply_overrides(own, _changes(own, sets, source, sink, typed_in or Path.cwd()))
    written = pipeline_file.parse_pipeline_document(asked)
    problems = [*written.problems, *(() if written.problems else _source_sink_errors(written.job, asked))]
    if problems:
        raise PipelineError(problems)
    job = written.job
    return RunSpec(
        path,
        asked,
        Pipeline(written.stages, written.name),
        job.get("source"),
        job.get("sink"),
        job.get("mode", "auto"),
        job.get("ordered", False),
        job.get("max_errors"),
    )


def _changes(
    document: Document, sets: Sequence[str], source: str | None, sink: str | None, folder: Path
) -> list[Override]:
    found: list[Override] = []
    ends: list[Override] = []
    """Applied first, so that --set applies to them."""
    problems: list[Problem] = []
    for text in sets:
        try:
            changes = parse_overrides(text, document.data)
            found += [replace(change, value=_absolute_set_value(change, folder)) for change in changes]
        except ConfigError as error:
            problems += error.problems
    for key, path in (("source", source), ("sink", sink)):
        if path == "":
            problems.append(Problem("DT360", f"--{key} is empty", fixes=(f"--{key} data.jsonl",)))
        elif path is not None:
            value: Any = absolute_path(path, folder, pattern=key == "source")
            if path == STDIO:
                value = {"run": "dovetail.runtime.run_spec:stdin_rows"} if key == "source" else None
            ends.append(Override((key,), value, f"--{key} {path}"))
    if problems:
        raise ConfigError(problems)
    return [*ends, *found]


# --- paths


def _with_absolute_paths(data: Any, folder: Path) -> Any:
    """The data of a file with absolute paths of source and sink; malformed values are reported later."""
    if not isinstance(data, Mapping):
        return data
    return {
        key: _absolute_value(value, folder, key == "source") if key in SOURCE_AND_SINK else value
        for key, value in data.items()
    }


def _absolute_value(value: Any, folder: Path, pattern: bool) -> Any:
    if isinstance(value, str):
        return absolute_path(value, folder, pattern=pattern)
    if isinstance(value, list):
        return [_absolute_value(item, folder, pattern) for item in value]
    if isinstance(value, Mapping):
        inner = {key: _absolute_value(part, folder, pattern) for key, part in value.items() if key == "path"}
        if isinstance(value.get("stages"), Mapping):
            inner["stages"] = {name: _absolute_value(part, folder, pattern) for name, part in value["stages"].items()}
        return {**value, **inner}
    return value


def _absolute_set_value(change: Override, folder: Path) -> Any:
    """The value of a --set with paths relative to the folder of the command."""
    path = change.path
    whole = len(path) == 1 or (len(path) == 3 and path[:2] == ("sink", "stages"))
    if path[0] in SOURCE_AND_SINK and (whole or path[-1] == "path"):
        return _absolute_value(change.value, folder, path[0] == "source")
    if path == ("sink", "stages"):
        return _absolute_value({"stages": change.value}, folder, False)["stages"]
    return change.value


def absolute_path(text: str, folder: Path, *, pattern: bool) -> str:
    """An absolute path; URLs are unchanged. With `pattern`, the text may be a glob, and the folder is escaped."""
    if "://" in text or not text:
        return text
    path = os.path.expanduser(text)  # noqa: PTH111 - a Path would lose a slash at the end
    if os.path.isabs(path):  # noqa: PTH117
        return path
    is_pattern = pattern and glob.has_magic(path) and not (folder / path).exists()
    return os.path.join(glob.escape(str(folder)) if is_pattern else folder, path)  # noqa: PTH118


# --- values


def _source_sink_errors(job: Mapping[str, Any], document: Document) -> Iterator[Problem]:
    """Errors that the readers and writers find: unknown formats, settings that contradict each other."""
    from dovetail.data.sinks import as_sink_spec
    from dovetail.data.sources import as_source_spec

    for path, value in _source_and_sinks(job):
        if isinstance(value, Mapping) and "run" in value:
            continue
        try:
            (as_source_spec if path[0] == "source" else as_sink_spec)(_paths_as_mapping(value))
        except ConfigError as error:
            for problem in error.problems:
                yield replace(problem, place=document.place(_problem_path(path, value, problem)))


def _source_and_sinks(job: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """The source and each sink."""
    if "source" in job:
        yield ("source",), job["source"]
    sink = job.get("sink")
    if isinstance(sink, Mapping) and "stages" in sink:
        for name, value in sink["stages"].items():
            yield ("sink", "stages", name), value
    elif sink is not None:
        yield ("sink",), sink


def _paths_as_mapping(value: Any) -> Any:
    """A list of paths as a source."""
    return {"path": value} if isinstance(value, list) else value


def _problem_path(path: KeyPath, value: Any, problem: Problem) -> KeyPath:
    """The key that a problem is about, if the file has it."""
    key = problem.subject.name if problem.subject is not None else ""
    return (*path, key) if isinstance(value, Mapping) and key in value else path


def with_append(sink: Any) -> Any:
    """The sink with exists: append; functions are unchanged."""
    if isinstance(sink, str):
        return {"path": sink, "exists": "append"}
    if isinstance(sink, Mapping):
        if "stages" in sink:
            return {"stages": {name: with_append(part) for name, part in sink["stages"].items()}}
        return {**sink, "exists": "append"} if "path" in sink else sink
    return sink


# --- code


def add_import_path(folder: Path) -> None:
    """Puts the folder first on sys.path, as for a script in it."""
    text = str(folder)
    if sys.path[:1] != [text]:
        sys.path.insert(0, text)


def missing_code(job: RunSpec) -> list[Problem]:
    """Stages of a file whose module or function does not exist, found without the cost of importing the module."""
    found = []
    for number, stage in enumerate(job.pipeline.stages):
        missing = find_missing_code(f"stage {stage.name!r}", stage.run, job.file.parent)
        if missing is not None:
            fixes = (f"run: {missing.nearest}",) if missing.nearest else (missing.remedy(job.file.name),)
            place = job.document.place(("stages", number, "run"))
            found.append(Problem("DT034", missing.message, (missing.searched,), fixes, place))
    return found


def leaf_sinks(data: Any, folder: Path) -> dict[str, str]:
    """Path of a sink -> the leaf stage that it belongs to, if the file has one sink per leaf."""
    sink = data.get("sink") if isinstance(data, Mapping) else None
    stages = sink.get("stages") if isinstance(sink, Mapping) else None
    found: dict[str, str] = {}
    for stage, value in stages.items() if isinstance(stages, Mapping) else ():
        path = value.get("path") if isinstance(value, Mapping) else value
        if isinstance(path, str):
            found[absolute_path(path, folder, pattern=False)] = str(stage)
    return found


def data_beside(file: Path) -> str | None:
    """The name of a data file in the folder of a pipeline file, for a suggestion."""
    from dovetail.data.file_formats import format_from_suffix

    try:
        names = sorted(path.name for path in file.parent.iterdir() if path != file)
    except OSError:
        return None
    return next((name for name in names if format_from_suffix(name) in ("jsonl", "csv", "parquet")), None)


def import_errors(job: RunSpec) -> list[Problem]:
    """Errors from importing the code of every stage."""
    problems = []
    for number, stage in enumerate(job.pipeline.stages):
        if isinstance(stage.run, str):
            try:
                _import_target(stage.run, f"stage {stage.name!r}")
            except DovetailError as error:
                place = job.document.place(("stages", number, "run"))
                problems += [replace(problem, place=place) for problem in error.problems]
    return problems


def open_source_and_sink(job: RunSpec) -> tuple[Any, Any]:
    """(source, sink) with the functions that the file names; the function of a source is called."""
    problems: list[Problem] = []
    found: dict[KeyPath, Any] = {}
    for path, value in _source_and_sinks({"source": job.source, "sink": job.sink}):
        found[path] = _paths_as_mapping(value)
        if isinstance(value, Mapping) and "run" in value:
            try:
                found[path] = _load_function(path, value)
            except DovetailError as error:
                place = job.document.place((*path, "run"))
                problems += [replace(problem, place=place) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    if ("sink",) in found or job.sink is None:
        return found[("source",)], found.get(("sink",))
    return found[("source",)], {path[-1]: value for path, value in found.items() if path[0] == "sink"}


def _load_function(path: KeyPath, value: Mapping[str, Any]) -> Any:
    target = _import_target(value["run"], str(path[0]))
    if path[0] == "sink" and not isinstance(target, type):
        return target
    try:
        return target(**value.get("args", {}))
    except Exception as error:
        raise _user_code_error(f"{path[0]}: {value['run']!r} failed when it was called", error) from error


def _import_target(run: str, called: str) -> Any:
    """The function or class; an exception while importing its module becomes a ConfigError."""
    from dovetail.engines.object_loader import import_object

    try:
        return import_object(run, f"{called}: run=")
    except DovetailError as error:
        fix = ("run: package.module:name of a function or class, in a module beside the file or installed",)
        raise ConfigError(replace(one, fixes=one.fixes or fix) for one in error.problems) from None
    except Exception as error:
        raise _user_code_error(f"{called}: the module of {run!r} cannot be imported", error) from error


def _user_code_error(message: str, error: BaseException) -> ConfigError:
    """An error with the last lines of the traceback."""
    from dovetail.engines.exception_summary import user_traceback  # late: most files have no mistakes

    lines = [line.rstrip() for line in user_traceback(error)]
    evidence = tuple(line for text in lines[-3:] for line in text.splitlines())
    fixes = ("correct the line above; for the full traceback, import the module with python -c",)
    return ConfigError(Problem("DT363", message, evidence, fixes))
