"""The keys `source`, `sink`, `mode`, `ordered` and `max_errors` of a pipeline file: validation and schema.

source: data/*.jsonl                                  # or [a.jsonl, b.jsonl], or {path: ..., format: csv, ...}
source: {run: "my_module:rows", args: {split: dev}}   # a function that gives an iterable
sink: {path: out.parquet, ordered: true}              # or out.jsonl, or {run: "my_module:keep"}
sink: {stages: {good: good.jsonl, bad: bad.jsonl}}    # of a pipeline with several ends
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import KeyPath, dotted_path
from dovetail.documents.validation import missing_key_problem, unknown_key_problem
from dovetail.errors import Problem, did_you_mean, short_repr
from dovetail.pipeline.error_policy import MAX_ERRORS_TEXT, PERCENT_PATTERN, parse_max_errors
from dovetail.pipeline.stage_validation import RUN_PATTERN
from dovetail.resources.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Schema = dict[str, Any]
Located = tuple[KeyPath, Problem]

MODES = ("auto", "streaming", "sequential", "waves")
"""As `scheduling` has them, which this package does not know."""
EXISTS = ("replace", "fail", "append")
COUNT_LIMIT = 10**12
SIZE_PATTERN = r"^\s*[0-9.][0-9._]*([eE][+-]?[0-9]+)?\s*([kKmMgGtTpP]([iI]?[bB])?|[bB])\s*$"


@dataclass(frozen=True, slots=True)
class ValueType:
    """A kind of value: what it is called, one that fits, how it is told, and how an editor is told."""

    words: str
    example: str
    fits: Callable[[object], bool]
    schema: Schema


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value)) and len(set(value)) == len(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_LIMIT


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


def choice(values: Sequence[str]) -> ValueType:
    listed = ", ".join(values)
    return ValueType(f"one of {listed}", values[0], lambda value: value in values, {"enum": list(values)})


_TEXT_SCHEMA: Schema = {"type": "string", "minLength": 1}
_TEXTS_SCHEMA: Schema = {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "uniqueItems": True}
TEXT = ValueType("a text", "utf-8", _is_text, _TEXT_SCHEMA)
PATH = ValueType("a path", "out.jsonl", _is_text, _TEXT_SCHEMA)
PATHS = ValueType(
    "a path, or a list of paths",
    "data/*.jsonl",
    lambda value: _is_text(value) or _is_texts(value),
    {"anyOf": [_TEXT_SCHEMA, _TEXTS_SCHEMA]},
)
TEXTS = ValueType("a list of names", "[id, text]", _is_texts, _TEXTS_SCHEMA)
FLAG = ValueType("true or false", "true", lambda value: isinstance(value, bool), {"type": "boolean"})
COUNT = ValueType(
    "a whole number from 0 on", "1000", _is_count, {"type": "integer", "minimum": 0, "maximum": COUNT_LIMIT}
)
ERROR_LIMIT = ValueType(
    MAX_ERRORS_TEXT, "1000", _is_error_limit, {"anyOf": [COUNT.schema, {"type": "string", "pattern": PERCENT_PATTERN}]}
)
SIZE = ValueType("a size", "256MB", _is_size, {"type": "string", "pattern": SIZE_PATTERN})
FUNCTION = ValueType(
    "'package.module:name'",
    "my_module:rows",
    lambda value: isinstance(value, str) and re.search(RUN_PATTERN, value) is not None,
    {"type": "string", "pattern": RUN_PATTERN},
)
ARGUMENTS = ValueType(
    "a mapping of arguments", "{split: dev}", lambda value: isinstance(value, Mapping), {"type": "object"}
)

Keys = dict[str, tuple[ValueType, bool, str]]
"""Key -> its form, whether it may also be null, what it means."""
SOURCE_KEYS: Keys = {
    "path": (PATHS, False, "Files, folders, globs or URLs; relative ones start at the folder of this file."),
    "format": (TEXT, True, "jsonl, csv, text, parquet, lance, paths or bytes; by the name if left out."),
    "columns": (TEXTS, True, "Which columns are read."),
    "encoding": (TEXT, False, "Of text and CSV."),
    "delimiter": (TEXT, True, "Of CSV."),
    "header": (FLAG, False, "Whether the first line of CSV has the names of the columns."),
    "limit": (COUNT, True, "At most so many rows."),
}
SINK_KEYS: Keys = {
    "path": (PATH, False, "A file or URL; relative ones start at the folder of this file."),
    "format": (TEXT, True, "jsonl, csv, parquet or lance; by the name if left out."),
    "ordered": (FLAG, False, "Whether rows stand in the order of the source."),
    "shard_size": (SIZE, True, "Several files of about this size instead of one."),
    "exists": (choice(EXISTS), False, "What becomes of a file that is there: replaced at the end, refused, added to."),
    "columns": (TEXTS, True, "Which columns are written, in this order."),
    "compression": (TEXT, True, "Of Parquet."),
}
SOURCE_RUN_KEYS: Keys = {
    "run": (FUNCTION, False, "A function that gives an iterable of items."),
    "args": (ARGUMENTS, False, "What it is called with."),
}
SINK_RUN_KEYS: Keys = {"run": (FUNCTION, False, "A function that is called with lists of results, in the driver.")}
JOB_KEYS: Keys = {
    "mode": (choice(MODES), False, "How stages share the cluster."),
    "ordered": (FLAG, False, "Whether results leave in the order of the source."),
    "max_errors": (ERROR_LIMIT, True, "More failed items than this, or than this percentage of them, fail the run."),
}
SOURCE_AND_SINK = ("source", "sink")
TOP_KEYS = (*SOURCE_AND_SINK, *JOB_KEYS)


def job_problems(top: Mapping[str, Any], leaves: Sequence[str] | None) -> Iterator[Located]:
    """What is wrong with the form of everything in a file but its stages; `leaves` is None if these are wrong."""
    if "source" in top:
        yield from _source_or_sink_problems(("source",), top["source"], PATHS, SOURCE_KEYS, SOURCE_RUN_KEYS)
    sink = top.get("sink")
    if isinstance(sink, Mapping) and "stages" in sink:
        yield from _leaf_sink_problems(sink, leaves)
    elif sink is not None:
        yield from _source_or_sink_problems(("sink",), sink, PATH, SINK_KEYS, SINK_RUN_KEYS)
    given = {key: top[key] for key in JOB_KEYS if key in top}
    yield from value_problems((), given, JOB_KEYS)


def _source_or_sink_problems(
    path: KeyPath, entry: object, plain: ValueType, keys: Keys, run_keys: Keys
) -> Iterator[Located]:
    if not isinstance(entry, Mapping):
        if not plain.fits(entry):
            words = f"{plain.words}, or a mapping with 'path' or 'run'"
            yield path, _wrong_type(path, entry, words, f"{path[-1]}: {plain.example}")
        return
    if "path" in entry and "run" in entry:
        fix = "remove 'path' or 'run'"
        yield path, Problem("DT035", f"{dotted_path('', path)} has both a path and a function", fixes=(fix,))
        return
    known = run_keys if "run" in entry else keys
    if "path" not in entry and "run" not in entry:
        where = (*path, "path")
        problem = missing_key_problem(dotted_path("", where), "path", "")
        yield where, Problem(problem.code, problem.message, fixes=(f"path: {plain.example}",))
    yield from value_problems(path, entry, known)


def value_problems(path: KeyPath, entry: Mapping[Any, object], keys: Keys) -> Iterator[Located]:
    for key, value in entry.items():
        where = (*path, str(key))
        if key not in keys:
            yield where, unknown_key_problem(str(key), keys, "")
            continue
        form, nullable, _ = keys[key]
        if not form.fits(value) and not (nullable and value is None):
            yield where, _wrong_type(where, value, form.words, f"{key}: {form.example}")


def _leaf_sink_problems(sink: Mapping[Any, Any], leaves: Sequence[str] | None) -> Iterator[Located]:
    path: KeyPath = ("sink", "stages")
    for key in sink:
        if key != "stages":
            yield ("sink", str(key)), unknown_key_problem(str(key), ("stages",), "")
    entries = sink["stages"]
    if not isinstance(entries, Mapping) or not entries:
        example = f"sink: {{stages: {{{(leaves or ['good'])[0]}: out.jsonl}}}}"
        yield path, _wrong_type(path, entries, "a mapping of stages to sinks", example)
        return
    for name, entry in entries.items():
        if leaves is not None and name not in leaves:
            message = f"no results leave at stage {short_repr(name)}{did_you_mean(str(name), leaves)}"
            yield (*path, str(name)), Problem("DT032", message, fixes=(f"one of: {', '.join(leaves)}",))
        yield from _source_or_sink_problems((*path, str(name)), entry, PATH, SINK_KEYS, SINK_RUN_KEYS)
    for name in leaves or ():
        if name not in entries:
            message = f"results leave at stage {name!r}, too, and there is no sink for it"
            yield path, Problem("DT035", message, fixes=(f"{name}: {name}.jsonl",))


def _wrong_type(path: KeyPath, value: object, words: str, fix: str) -> Problem:
    return Problem("DT013", f"{dotted_path('', path)} should be {words}, not {short_repr(value)}", fixes=(fix,))


# --- for editors


def source_sink_schemas() -> dict[str, Schema]:
    """Key -> JSON Schema, with what it means."""
    source = _path_or_run_schema(PATHS, SOURCE_KEYS, SOURCE_RUN_KEYS)
    sink = _path_or_run_schema(PATH, SINK_KEYS, SINK_RUN_KEYS)
    per_leaf = {
        "type": "object",
        "properties": {"stages": {"type": "object", "additionalProperties": sink, "minProperties": 1}},
        "required": ["stages"],
        "additionalProperties": False,
    }
    sinks = {"anyOf": [*sink["anyOf"], per_leaf, {"type": "null"}]}
    described: dict[str, Schema] = {
        "source": {**source, "description": "Where items come from: paths, or a function that gives them."},
        "sink": {**sinks, "description": "Where results go: a file, a function, or one per stage; else to stdout."},
    }
    return described | _properties(JOB_KEYS)


def _path_or_run_schema(plain: ValueType, keys: Keys, run_keys: Keys) -> Schema:
    return {"anyOf": [plain.schema, _object(keys, "path"), _object(run_keys, "run")]}


def _object(keys: Keys, needed: str) -> Schema:
    return {"type": "object", "properties": _properties(keys), "required": [needed], "additionalProperties": False}


def _properties(keys: Keys) -> dict[str, Schema]:
    found = {}
    for key, (form, nullable, description) in keys.items():
        part = {"anyOf": [*form.schema.get("anyOf", [form.schema]), {"type": "null"}]} if nullable else form.schema
        found[key] = {**part, "description": description}
    return found
