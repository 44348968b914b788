"""Declaration of the keys `source`, `sink`, `mode`, `ordered` and `max_errors` of a pipeline file.

source: data/*.jsonl                                  # or [a.jsonl, b.jsonl], or {path: ..., format: csv, ...}
source: {run: "my_module:rows", args: {split: dev}}   # a function that returns an iterable
sink: {path: out.parquet, ordered: true}              # or out.jsonl, or {run: "my_module:keep"}
sink: {stages: {good: good.jsonl, bad: bad.jsonl}}    # of a pipeline with several ends
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import KeyPath, dotted_path
from dovetail.documents.fields import (
    FLAG,
    MAPPING,
    PATH,
    PATHS,
    TEXT,
    TEXTS,
    Field,
    Located,
    Mistake,
    Record,
    Type,
    WrongValue,
    choice,
    file_problem,
    mapping_of,
    predicate,
    whole,
)
from dovetail.errors import Problem, did_you_mean, short_repr
from dovetail.pipeline.error_policy import MAX_ERRORS_TEXT, PERCENT_PATTERN, parse_max_errors
from dovetail.pipeline.stage_fields import RUN_PATTERN
from dovetail.resources.resources import SIZE_PATTERN
from dovetail.resources.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MODES = ("auto", "streaming", "sequential", "waves")
"""How the stages of a run share the cluster (`scheduling/modes.py`)."""
EXISTS = ("replace", "fail", "append")
COUNT_LIMIT = 10**12


def _is_error_limit(value: object) -> bool:
    try:
        return not isinstance(value, float) and parse_max_errors(value) is not None
    except ValueError:
        return False


def _is_size(value: object) -> bool:
    try:
        return parse_size(value) > 0
    except ValueError:
        return False


def _is_run(value: object) -> bool:
    return isinstance(value, str) and re.search(RUN_PATTERN, value) is not None


COUNT = whole(0, COUNT_LIMIT, "a whole number from 0 on", example=1000)
ERROR_LIMIT = predicate(
    MAX_ERRORS_TEXT, 1000, {"anyOf": [COUNT.schema, {"type": "string", "pattern": PERCENT_PATTERN}]}, _is_error_limit
)
SIZE = predicate("a size", "256MB", {"type": "string", "pattern": SIZE_PATTERN}, _is_size)
FUNCTION = predicate("'package.module:name'", "my_module:rows", {"type": "string", "pattern": RUN_PATTERN}, _is_run)

SOURCE = Record(
    "Source",
    "Files that items are read from.",
    (
        Field(
            "path",
            PATHS,
            "Files, folders, globs or URLs; relative paths start at the folder of this file.",
            required=True,
        ),
        Field(
            "format",
            TEXT,
            "jsonl, csv, text, parquet, lance, paths or bytes; by default that of the file name.",
            nullable=True,
        ),
        Field("columns", TEXTS, "Columns to read.", nullable=True),
        Field("encoding", TEXT, "Encoding of text and CSV.", "utf-8"),
        Field("delimiter", TEXT, "Delimiter of CSV.", nullable=True),
        Field("header", FLAG, "Whether the first line of CSV has the names of the columns.", True),
        Field("limit", COUNT, "Maximum number of rows.", nullable=True),
    ),
)
SOURCE_FUNCTION = Record(
    "Source function",
    "A function that items are read from.",
    (
        Field("run", FUNCTION, "A function that returns an iterable of items.", required=True),
        Field("args", MAPPING, "Its arguments."),
    ),
)
SINK = Record(
    "Sink",
    "A file that results are written to.",
    (
        Field("path", PATH, "A file or URL; relative paths start at the folder of this file.", required=True),
        Field("format", TEXT, "jsonl, csv, parquet or lance; by default that of the file name.", nullable=True),
        Field("ordered", FLAG, "Write rows in the order of the source.", False),
        Field("shard_size", SIZE, "Write several files of about this size instead of one.", nullable=True),
        Field("exists", choice(EXISTS), "If the file exists: replace it at the end, fail, or append to it.", "replace"),
        Field("columns", TEXTS, "Columns to write, in this order.", nullable=True),
        Field("compression", TEXT, "Compression of Parquet.", nullable=True),
    ),
)
SINK_FUNCTION = Record(
    "Sink function",
    "A function that results are passed to.",
    (Field("run", FUNCTION, "A function that is called with lists of results, in the driver.", required=True),),
)


def _path_or_function(plain: Type, path: Record, function: Record) -> Type:
    """A path, or a mapping with a path or a function."""

    def check(value: object) -> Iterator[Mistake]:
        if not isinstance(value, Mapping):
            if not plain.accepts(value):
                yield WrongValue(value, f"{plain.text}, or a mapping with 'path' or 'run'", instead=(plain.example,))
        elif "run" not in value:
            yield from path.mistakes(value)
        elif "path" not in value:
            yield from function.mistakes(value)

    choices = [*plain.schema.get("anyOf", [plain.schema]), path.schema(), function.schema()]
    return Type(f"{plain.text}, or a mapping with 'path' or 'run'", plain.example, {"anyOf": choices}, check)


SOURCE_VALUE = _path_or_function(PATHS, SOURCE, SOURCE_FUNCTION)
SINK_ENTRY = _path_or_function(PATH, SINK, SINK_FUNCTION)
LEAF_SINKS = Record(
    "Sinks of several last stages",
    "One sink for each stage whose results leave the pipeline.",
    (
        Field(
            "stages",
            mapping_of(SINK_ENTRY, "a mapping of stages to sinks", {"good": "good.jsonl"}, may_be_empty=False),
            "Name of the stage and its sink.",
            required=True,
        ),
    ),
)


def _sink_mistakes(value: object) -> Iterable[Mistake]:
    if isinstance(value, Mapping) and "stages" in value:
        return LEAF_SINKS.mistakes(value)
    return SINK_ENTRY.check(value)


SINK_VALUE = Type(
    f"{SINK_ENTRY.text} or 'stages'",
    SINK_ENTRY.example,
    {"anyOf": [*SINK_ENTRY.schema["anyOf"], LEAF_SINKS.schema()]},
    _sink_mistakes,
)
SOURCE_AND_SINK = ("source", "sink")
JOB = Record(
    "Job",
    "Source, sink and settings of a run.",
    (
        Field("source", SOURCE_VALUE, "Where items come from: paths, or a function that returns them."),
        Field(
            "sink", SINK_VALUE, "Where results go: a file, a function, or one per stage; default stdout.", nullable=True
        ),
        Field("mode", choice(MODES), "How stages share the cluster."),
        Field("ordered", FLAG, "Deliver results in the order of the source."),
        Field(
            "max_errors",
            ERROR_LIMIT,
            "Fail the run when more items than this, a number or a percentage, have failed.",
            nullable=True,
        ),
    ),
)


def job_problems(top: Mapping[str, Any], leaves: Sequence[str] | None) -> Iterator[Located]:
    """Problems of the keys of a file other than `name` and `stages`; `leaves` are the stages whose results leave the
    pipeline, None if the stages are invalid."""
    for name, mistake in JOB.value_mistakes(top):
        path = (name, *mistake.path)
        yield path, file_problem(replace(mistake, path=path))
    sink = top.get("sink")
    yield from _path_and_function_problems(("source",), top.get("source"))
    yield from _path_and_function_problems(("sink",), sink)
    if isinstance(sink, Mapping) and isinstance(sink.get("stages"), Mapping):
        yield from _leaf_problems(sink["stages"], leaves)


def _path_and_function_problems(path: KeyPath, entry: object) -> Iterator[Located]:
    if isinstance(entry, Mapping) and "path" in entry and "run" in entry:
        message = f"{dotted_path('', path)} has both a path and a function"
        yield path, Problem("DT035", message, fixes=("remove 'path' or 'run'",))


def _leaf_problems(entries: Mapping[Any, Any], leaves: Sequence[str] | None) -> Iterator[Located]:
    path: KeyPath = ("sink", "stages")
    for name, entry in entries.items():
        if leaves is not None and name not in leaves:
            message = f"no results leave at stage {short_repr(name)}{did_you_mean(str(name), leaves)}"
            yield (*path, str(name)), Problem("DT032", message, fixes=(f"one of: {', '.join(leaves)}",))
        yield from _path_and_function_problems((*path, str(name)), entry)
    for name in leaves or ():
        if entries and name not in entries:
            message = f"results also leave at stage {name!r}, which has no sink"
            yield path, Problem("DT035", message, fixes=(f"{name}: {name}.jsonl",))
