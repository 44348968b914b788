"""Runs of pipelines, recipes, backfills and actor systems as jobs: their job functions, and the arguments of these.

The functions themselves are in `dovetail.job_runs`, which only workers with `--runs` load. Nothing that a file names is
imported when a run is submitted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.data.file_formats import format_from_suffix
from dovetail.documents.fields import is_int
from dovetail.documents.parser import read_document
from dovetail.errors import UNSET, Change, ConfigError, Problem, Subject, argument_problem, short_repr
from dovetail.jobs.job_function import RUN_MODULE
from dovetail.runtime.run_spec import absolute_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    PathList = str | Sequence[str] | None

BAD_RUN_ARGUMENT = "DT636"
RUN_FUNCTION = f"{RUN_MODULE}:run"
BACKFILL_FUNCTION = f"{RUN_MODULE}:backfill"
FOLDERS_VARIABLE = "DOVETAIL_RUN_FOLDERS"
"""Environment variable of job processes: the folders of `--runs`, as JSON."""
FILE_SUFFIXES = (".yaml", ".yml")
RUN_ENGINES = ("local", "ray", "ray:auto")
"""A job names no address of a Ray cluster: the file does, or RAY_ADDRESS of the worker."""
DEFAULT_RESOURCES = {"cpus": 1}
"""Resources of a run whose submission requests none."""
OPTION_TYPES: Mapping[str, tuple[type, ...]] = {
    "where": (str,),
    "workers": (int, str),
    "batch_size": (int,),
    "slots": (int,),
    "on_error": (str,),
    "max_errors": (int, float, str),
    "row_timeout": (int, float, str),
    "commit_every": (int, float, str),
    "recompute": (bool,),
}
"""Options of `Table.backfill` that a job may set: none of them names code or another cluster. `row_timeout` is its
`timeout`: that of a job limits an attempt."""


def run_call(
    file: str | os.PathLike[str],
    source: PathList = None,
    sink: str | None = None,
    limit: int | None = None,
    engine: str | None = None,
) -> dict[str, Any]:
    """Arguments of the job function of a run, with absolute paths. Raises ConfigError with all problems."""
    folder = Path.cwd()
    path = os.path.abspath(os.path.expanduser(file))  # noqa: PTH100, PTH111
    call: dict[str, Any] = {
        "file": path,
        "source": _absolute(source, folder),
        "sink": absolute_path(sink, folder, pattern=False) if isinstance(sink, str) else sink,
        "limit": limit,
        "engine": engine,
    }
    problems = [*run_call_problems(**call), *_file_problems(str(file), path)]
    if problems:
        raise ConfigError(problems)
    return {name: value for name, value in call.items() if value is not None}


def run_call_problems(file: object, source: object, sink: object, limit: object, engine: object) -> Iterator[Problem]:
    """What is wrong with the arguments of a run, wherever its file is."""
    if not isinstance(file, str):
        yield argument_problem(BAD_RUN_ARGUMENT, "file", file, "a path", "pipeline.yaml")
    if not (source is None or _is_path(source) or (isinstance(source, list) and source and all(map(_is_path, source)))):
        yield argument_problem(BAD_RUN_ARGUMENT, "source", source, "a path or a list of paths", "data/*.jsonl")
    if sink is not None and not (_is_path(sink) and format_from_suffix(str(sink))):
        kind = "a path whose suffix is that of a data format"
        yield argument_problem(BAD_RUN_ARGUMENT, "sink", sink, kind, "out.jsonl", "out.parquet")
    if limit is not None and not (is_int(limit) and int(str(limit)) >= 0):
        yield argument_problem(BAD_RUN_ARGUMENT, "limit", limit, "a whole number", 1000)
    if engine is not None and engine not in RUN_ENGINES:
        yield argument_problem(
            BAD_RUN_ARGUMENT, "engine", engine, f"one of {', '.join(RUN_ENGINES)}", "local", "ray:auto"
        )


def backfill_call(table: str, column: str | Sequence[str], udf: str, **options: Any) -> dict[str, Any]:
    """Arguments of the job function of a backfill. Raises ConfigError with all problems."""
    call: dict[str, Any] = {
        "table": absolute_path(str(table), Path.cwd(), pattern=False),
        "columns": [column] if isinstance(column, str) else column,
        "udf": udf,
        "folder": str(Path.cwd()),
        "engine": options.pop("engine", None),
        "options": {name: value for name, value in options.items() if value is not None},
    }
    problems = list(backfill_call_problems(**call))
    if problems:
        raise ConfigError(problems)
    return {name: value for name, value in call.items() if value not in (None, {})}


def backfill_call_problems(
    table: object, columns: object, udf: object, folder: object, engine: object, options: object
) -> Iterator[Problem]:
    if not _is_path(table):
        yield argument_problem(BAD_RUN_ARGUMENT, "table", table, "the path or URL of a Lance table", "clips.lance")
    if not (isinstance(columns, list | tuple) and columns and all(isinstance(name, str) and name for name in columns)):
        yield argument_problem(BAD_RUN_ARGUMENT, "column", columns, "the name of a column, or several", "length")
    if not (isinstance(udf, str) and ":" in udf):
        kind = "the name of a function in a module of the current folder"
        yield argument_problem(BAD_RUN_ARGUMENT, "udf", udf, kind, "functions:length")
    if not isinstance(folder, str):
        yield argument_problem(BAD_RUN_ARGUMENT, "folder", folder, "a path", "/data")
    if engine is not None and engine not in RUN_ENGINES:
        yield argument_problem(
            BAD_RUN_ARGUMENT, "engine", engine, f"one of {', '.join(RUN_ENGINES)}", "local", "ray:auto"
        )
    for name, value in options.items() if isinstance(options, Mapping) else ():
        if name not in OPTION_TYPES:
            message = f"a backfill that is a job has no option {short_repr(name)}"
            evidence = (f"options: {', '.join(OPTION_TYPES)}",)
            fixes = (Change({str(name): UNSET}),)
            yield Problem(BAD_RUN_ARGUMENT, message, evidence, fixes, subject=Subject("setting", str(name)))
        elif not isinstance(value, OPTION_TYPES[name]):
            kinds = " or ".join(kind.__name__ for kind in OPTION_TYPES[name])
            yield argument_problem(BAD_RUN_ARGUMENT, name, value, f"of type {kinds}")


def resolved_folders(folders: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The folders of `--runs` with all links resolved; URL prefixes stay. ConfigError if one does not exist."""
    problems = []
    found = []
    for folder in [folders] if isinstance(folders, str | os.PathLike) else folders:
        text = os.path.expanduser(folder)  # noqa: PTH111
        if "://" in text:
            found.append(text)
        elif os.path.isdir(text):  # noqa: PTH112
            found.append(os.path.realpath(text))
        else:
            message = f"runs={short_repr(text)} is not a folder"
            problems.append(Problem("DT620", message, fixes=(f"mkdir -p {text}", Change({"runs": "."}))))
    if problems:
        raise ConfigError(problems)
    return tuple(dict.fromkeys(found))


def _file_problems(written: str, path: str) -> Iterator[Problem]:
    """A file that does not exist here may exist on the workers if its path is absolute."""
    if not path.endswith(FILE_SUFFIXES):
        fixes = (f"name it {Path(path).stem}.yaml",)
        yield Problem(BAD_RUN_ARGUMENT, f"{written} is not a .yaml file", fixes=fixes)
        return
    if not os.path.isfile(path):  # noqa: PTH113
        if not os.path.isabs(written):  # noqa: PTH117
            fixes = (f"dovetail jobs submit run /absolute/path/{Path(path).name}",)
            yield Problem(BAD_RUN_ARGUMENT, f"there is no file {written} in this folder", fixes=fixes)
        return
    try:
        data = read_document(path).data
    except ConfigError as error:
        yield from error.problems
        return
    if not isinstance(data, Mapping):
        fixes = ("dovetail init pipeline",)
        yield Problem(BAD_RUN_ARGUMENT, "is not a pipeline, recipe or actors file", fixes=fixes, place=written)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _absolute(source: PathList, folder: Path) -> Any:
    if isinstance(source, str):
        return absolute_path(source, folder, pattern=True)
    if isinstance(source, list | tuple):
        return [absolute_path(one, folder, pattern=True) if isinstance(one, str) else one for one in source]
    return source
