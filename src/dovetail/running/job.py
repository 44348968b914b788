"""What does a pipeline file, together with a command line, ask to be run? `dovetail run` is `load`, then `dt.run`.

Paths in the file are relative to the file's own folder, so that it means the same wherever it is used; what is typed
(`--source`, `--sink`, `--set source.path=...`) is relative to the current folder, as everywhere in a shell. Modules
beside the file can be imported, by the driver and by workers.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.documents.read import read_document
from dovetail.errors import ConfigError, DovetailError, PipelineError, Problem
from dovetail.pipeline import file as pipeline_file
from dovetail.pipeline.changes import Change, changed, parse_change
from dovetail.pipeline.ends import ENDS
from dovetail.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.documents.document import Document, Steps

STANDARD = "-"
"""stdin as a source, stdout as a sink."""


@dataclass(frozen=True, slots=True)
class Job:
    """A pipeline and what a file says besides. `source` and `sink` are as `dt.run` takes them, except for functions,
    which are still named: see `opened`."""

    file: Path
    document: Document
    pipeline: Pipeline
    source: Any
    """None: nobody said."""
    sink: Any
    """None: results are read by whoever runs it."""
    mode: str = "auto"
    ordered: bool = False
    max_errors: int | None = None


def load(
    file: str | Path,
    sets: Sequence[str] = (),
    source: str | None = None,
    sink: str | None = None,
    typed_in: Path | None = None,
) -> Job:
    """The job of a file, with what the command line, typed in some folder, says instead; everything that is wrong with
    it at once."""
    path = Path(file).absolute()
    document = read_document(file)
    own = replace(document, data=_with_ends_in(document.data, path.parent))
    asked = changed(own, _changes(own, sets, source, sink, typed_in or Path.cwd()))
    written = pipeline_file.written(asked)
    problems = [*written.problems, *(() if written.problems else _misused_ends(written.job, asked))]
    if problems:
        raise PipelineError(problems)
    job = written.job
    return Job(
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
) -> list[Change]:
    found: list[Change] = []
    ends: list[Change] = []
    """First, so that what is set applies to them."""
    problems: list[Problem] = []
    for text in sets:
        try:
            change = parse_change(text, document.data)
            found.append(replace(change, value=_typed(change, folder)))
        except ConfigError as error:
            problems += error.problems
    for key, path in (("source", source), ("sink", sink)):
        if path == "":
            problems.append(Problem("DT360", f"--{key} names nothing", fixes=(f"--{key} data.jsonl",)))
        elif path is not None:
            value: Any = absolute(path, folder, pattern=key == "source")
            if path == STANDARD:
                value = {"run": "dovetail.running.stdin:rows"} if key == "source" else None
            ends.append(Change((key,), value, f"--{key} {path}"))
    if problems:
        raise ConfigError(problems)
    return [*ends, *found]


# --- paths


def _with_ends_in(data: Any, folder: Path) -> Any:
    """The data of a file with its source and sink in this folder; what has no form stays, and is told later."""
    if not isinstance(data, Mapping):
        return data
    return {key: _end_in(value, folder, key == "source") if key in ENDS else value for key, value in data.items()}


def _end_in(value: Any, folder: Path, pattern: bool) -> Any:
    if isinstance(value, str):
        return absolute(value, folder, pattern=pattern)
    if isinstance(value, list):
        return [_end_in(item, folder, pattern) for item in value]
    if isinstance(value, Mapping):
        inner = {key: _end_in(part, folder, pattern) for key, part in value.items() if key == "path"}
        if isinstance(value.get("stages"), Mapping):
            inner["stages"] = {name: _end_in(part, folder, pattern) for name, part in value["stages"].items()}
        return {**value, **inner}
    return value


def _typed(change: Change, folder: Path) -> Any:
    """The value of a --set: a path in it is relative to where it was typed."""
    path = change.path
    whole = len(path) == 1 or (len(path) == 3 and path[:2] == ("sink", "stages"))
    if path[0] in ENDS and (whole or path[-1] == "path"):
        return _end_in(change.value, folder, path[0] == "source")
    if path == ("sink", "stages"):
        return _end_in({"stages": change.value}, folder, False)["stages"]
    return change.value


def absolute(text: str, folder: Path, *, pattern: bool) -> str:
    """URLs stay as they are. The folder is no pattern, whatever its name; `pattern`: the rest may be one."""
    if "://" in text or not text:
        return text
    path = os.path.expanduser(text)  # noqa: PTH111 - a Path would lose a slash at the end
    if os.path.isabs(path):  # noqa: PTH117
        return path
    is_pattern = pattern and glob.has_magic(path) and not (folder / path).exists()
    return os.path.join(glob.escape(str(folder)) if is_pattern else folder, path)  # noqa: PTH118


# --- values


def _misused_ends(job: Mapping[str, Any], document: Document) -> Iterator[Problem]:
    """What only those who read and write can tell: unknown formats, settings that do not go together."""
    from dovetail.data import sinks, sources

    for path, value in _parts(job):
        if isinstance(value, Mapping) and "run" in value:
            continue
        try:
            (sources if path[0] == "source" else sinks).spec_of(_listed(value))
        except ConfigError as error:
            for problem in error.problems:
                yield replace(problem, place=document.place(_about(path, value, problem)))


def _parts(job: Mapping[str, Any]) -> Iterator[tuple[Steps, Any]]:
    """The source, and each sink."""
    if "source" in job:
        yield ("source",), job["source"]
    sink = job.get("sink")
    if isinstance(sink, Mapping) and "stages" in sink:
        for name, value in sink["stages"].items():
            yield ("sink", "stages", name), value
    elif sink is not None:
        yield ("sink",), sink


def _listed(value: Any) -> Any:
    """Several paths are a source of their own."""
    return {"path": value} if isinstance(value, list) else value


def _about(path: Steps, value: Any, problem: Problem) -> Steps:
    """Which key a problem is about, if it names one first."""
    word = problem.message.split("=")[0].split(" ")[0].strip("'\"`:")
    return (*path, word) if isinstance(value, Mapping) and word in value else path


def added_to(sink: Any) -> Any:
    """The same sink, of which nothing is replaced; a function stays what it is."""
    if isinstance(sink, str):
        return {"path": sink, "exists": "append"}
    if isinstance(sink, Mapping):
        if "stages" in sink:
            return {"stages": {name: added_to(part) for name, part in sink["stages"].items()}}
        return {**sink, "exists": "append"} if "path" in sink else sink
    return sink


# --- code


def importable(folder: Path) -> None:
    """Modules in this folder come first, as beside a script."""
    text = str(folder)
    if sys.path[:1] != [text]:
        sys.path.insert(0, text)


def missing_modules(job: Job) -> list[Problem]:
    """Stages whose module is nowhere; found without importing anything, which may take long."""
    found = []
    for number, stage in enumerate(job.pipeline.stages):
        top = stage.run.partition(":")[0].partition(".")[0] if isinstance(stage.run, str) else ""
        if top and top not in sys.modules and not _is_there(top):
            message = f"stage {stage.name!r}: there is no module {top!r}"
            evidence = (f"searched beside the file, in {job.file.parent}, and where Python looks",)
            fixes = (f"write {top}.py beside {job.file.name}, or pip install what has it",)
            place = job.document.place(("stages", number, "run"))
            found.append(Problem("DT034", message, evidence, fixes, place))
    return found


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def imported(job: Job) -> list[Problem]:
    """What goes wrong when the code of every stage is imported here."""
    problems = []
    for number, stage in enumerate(job.pipeline.stages):
        if isinstance(stage.run, str):
            try:
                _named(stage.run, f"stage {stage.name!r}")
            except DovetailError as error:
                place = job.document.place(("stages", number, "run"))
                problems += [replace(problem, place=place) for problem in error.problems]
    return problems


def opened(job: Job) -> tuple[Any, Any]:
    """(source, sink) with the functions that the file names; a source's function is called."""
    problems: list[Problem] = []
    found: dict[Steps, Any] = {}
    for path, value in _parts({"source": job.source, "sink": job.sink}):
        found[path] = _listed(value)
        if isinstance(value, Mapping) and "run" in value:
            try:
                found[path] = _function(path, value)
            except DovetailError as error:
                place = job.document.place((*path, "run"))
                problems += [replace(problem, place=place) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    if ("sink",) in found or job.sink is None:
        return found[("source",)], found.get(("sink",))
    return found[("source",)], {path[-1]: value for path, value in found.items() if path[0] == "sink"}


def _function(path: Steps, value: Mapping[str, Any]) -> Any:
    target = _named(value["run"], str(path[0]))
    if path[0] == "sink" and not isinstance(target, type):
        return target
    try:
        return target(**value.get("args", {}))
    except Exception as error:
        raise _raised(f"{path[0]}: {value['run']!r} failed when it was called", error) from error


def _named(run: str, called: str) -> Any:
    """The function or class; whatever its module does when it is imported is a ConfigError."""
    from dovetail.engines.targets import named

    try:
        return named(run, "")
    except DovetailError as error:
        fix = ("run: package.module:name of a function or class, in a module beside the file or installed",)
        raise ConfigError(
            replace(one, message=one.message.replace("stage ''", called, 1), fixes=one.fixes or fix)
            for one in error.problems
        ) from None
    except Exception as error:
        raise _raised(f"{called}: the module of {run!r} cannot be imported", error) from error


def _raised(message: str, error: BaseException) -> ConfigError:
    """With the last lines of the traceback: where in the user's code."""
    import traceback

    lines = [line.rstrip() for line in traceback.format_exception(error)]
    evidence = tuple(line for text in lines[-3:] for line in text.splitlines())
    fixes = ("mend the line above; python -c with the same import shows the whole of it",)
    return ConfigError(Problem("DT363", message, evidence, fixes))
