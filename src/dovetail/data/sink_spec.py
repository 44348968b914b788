"""Sink specification (`dt.sink`) and validation of its settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dovetail.data.writers.output_files import COMPRESSION_SUFFIXES, is_remote_sink, stem_and_suffix
from dovetail.errors import Change, ConfigError, Problem, Subject, did_you_mean, short_repr
from dovetail.resources.sizes import parse_size

KINDS = ("jsonl", "csv", "tsv", "parquet", "lance")
FORMATS = (*KINDS, *(f"{kind}.{packing}" for kind in ("jsonl", "csv", "tsv") for packing in COMPRESSION_SUFFIXES))
SUFFIXES = {"ndjson": "jsonl", "pq": "parquet", **{name: name for name in FORMATS}}
EXISTS_POLICIES = ("replace", "fail", "append")
COMPRESSIONS = ("zstd", "snappy", "none")
MIN_SHARD_BYTES = 1024
SETTINGS_TEXT = "path, format, ordered, shard_size, exists, columns, compression"
REQUIRED_PACKAGES = {"parquet": (("pyarrow", "tables"),), "lance": (("lance", "lance"), ("pyarrow", "lance"))}


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Destination of results: the value of `sink:` in a pipeline file, and of `dt.sink(...)`."""

    path: str
    """x.jsonl, x.jsonl.gz, x.jsonl.zst, x.csv, x.tsv, x.parquet, x.lance; or a URL such as s3://bucket/x.jsonl."""
    format: str | None = None
    """None: by the file name."""
    ordered: bool = False
    """Rows in source order."""
    shard_size: str | None = None
    """'256MB': several files of about that size."""
    exists: str = "replace"
    """If the file exists: `replace` (atomically, at the end), `fail` (before anything starts) or `append` (existing
    rows come first)."""
    columns: tuple[str, ...] | None = None
    """Columns and their order, for CSV, Parquet and Lance."""
    compression: str | None = None
    """For Parquet: zstd (default), snappy, none."""

    @property
    def subject(self) -> Subject:
        """What a fix about this sink is about."""
        return Subject("sink", self.path)

    @property
    def form(self) -> tuple[str, str | None]:
        """Format (jsonl, csv, tsv, parquet, lance) and compression (gz, zst, None)."""
        found = self.format or _format_from_name(self.path)
        assert found is not None
        kind, _, packing = found.partition(".")
        return kind, packing or None

    @property
    def shard_bytes(self) -> int | None:
        return None if self.shard_size is None else parse_size(self.shard_size)


def sink(path: Any, **settings: Any) -> SinkSpec:
    """A sink: `dt.sink("out.jsonl", ordered=True)`. Reports all problems at once.

    Settings: format, ordered, shard_size ("256MB"), exists ("replace", "fail", "append"), columns, compression.
    """
    known = [field.name for field in fields(SinkSpec)]
    problems = [
        _problem(
            f"unknown setting {name!r}{did_you_mean(str(name), known)}", f"settings of a sink are: {SETTINGS_TEXT}"
        )
        for name in settings
        if name not in known
    ]
    given = {name: value for name, value in settings.items() if name in known}
    if isinstance(given.get("columns"), list):
        given["columns"] = tuple(given["columns"])
    spec = SinkSpec(os.fspath(path) if isinstance(path, Path) else path, **given)
    problems += find_problems(spec)
    if problems:
        raise ConfigError(problems)
    return spec


def as_sink_spec(value: Any) -> SinkSpec | None:
    """Convert a SinkSpec, a path, or a dict of settings (with `path` or any sink setting) and check it. None for other
    values."""
    if isinstance(value, str | Path):
        return sink(value)
    if isinstance(value, SinkSpec):
        check_sink_spec(value)
        return value
    known = {field.name for field in fields(SinkSpec)}
    if not isinstance(value, dict) or not known & {key for key in value if isinstance(key, str)}:
        return None
    if "path" not in value:
        raise ConfigError(_problem("a sink without `path`", "path: out.jsonl"))
    wrong = [key for key in value if not isinstance(key, str)]
    if wrong:
        raise ConfigError(
            _problem(f"unknown setting {short_repr(wrong[0])}", f"settings of a sink are: {SETTINGS_TEXT}")
        )
    return sink(**value)


def check_sink_spec(spec: SinkSpec) -> None:
    problems = find_problems(spec)
    if problems:
        raise ConfigError(problems)


def missing_packages(spec: SinkSpec) -> list[Problem]:
    """Required packages that are not installed."""
    kind, packing = spec.form
    packages = list(REQUIRED_PACKAGES.get(kind, ()))
    packages += [("zstandard", "files")] if packing == "zst" else []
    packages += [("fsspec", "files")] if is_remote_sink(spec.path) and kind != "lance" else []
    return [
        Problem(
            "DT358", f"{name} is needed for this sink", fixes=(f"pip install 'dovetail-ml[{extra}]'",), place=spec.path
        )
        for name, extra in packages
        if find_spec(name) is None
    ]


def find_problems(spec: SinkSpec) -> list[Problem]:
    """All problems of the settings."""
    found = _path_problems(spec.path)
    if found:
        return found
    if spec.format is not None and spec.format not in FORMATS:
        guess = did_you_mean(str(spec.format), FORMATS)
        found.append(
            _problem(
                f"unknown format {short_repr(spec.format)}{guess}",
                f"format: one of {', '.join(FORMATS)}",
                spec,
                "format",
            )
        )
    elif spec.format is None and _format_from_name(spec.path) is None:
        suffix = stem_and_suffix(Path(spec.path).name)[1]
        message = (
            f"the file name has no known format suffix: {suffix!r}"
            if suffix
            else "the file name has no known format suffix"
        )
        guess = did_you_mean(suffix[1:], list(SUFFIXES)) if suffix else ""
        problem = _problem(f"{message}{guess}", "", spec)
        evidence = (f"formats: {', '.join(FORMATS)}", f"known suffixes: {', '.join(f'.{name}' for name in SUFFIXES)}")
        subjects = (spec.subject,)
        named = Change({"sink": f"{spec.path.removesuffix(suffix)}.jsonl"}, subjects)
        fixes = (named, *(Change({"format": form}, subjects) for form in ("jsonl", "csv", "parquet")))
        found.append(replace(problem, evidence=evidence, fixes=fixes))
    else:
        found += _format_problems(spec, *spec.form)
    if spec.ordered not in (True, False):
        found.append(_problem(f"`ordered` is {short_repr(spec.ordered)}", "ordered: true or false", spec, "ordered"))
    if spec.exists not in EXISTS_POLICIES:
        guess = did_you_mean(str(spec.exists), EXISTS_POLICIES)
        found.append(
            _problem(
                f"`exists` is {short_repr(spec.exists)}{guess}",
                f"exists: one of {', '.join(EXISTS_POLICIES)}",
                spec,
                "exists",
            )
        )
    return found + _size_problems(spec)


def _path_problems(path: Any) -> list[Problem]:
    example = "use a path such as out.jsonl, or a URL such as s3://bucket/out.jsonl"
    if not isinstance(path, str):
        return [_problem(f"the path of a sink is {short_repr(path)}", example)]
    if not path.strip() or "\0" in path:
        return [_problem(f"the path of a sink is {short_repr(path)}", example)]
    if path.endswith(("/", "/.", "/..")) or path in (".", ".."):
        return [_problem(f"{short_repr(path)} is a folder: name a file in it", f"{path.rstrip('./') or '.'}/out.jsonl")]
    scheme, found, rest = path.partition("://")
    if found and scheme != "file" and "/" not in rest.strip("/"):
        return [_problem(f"{short_repr(path)} names no file", f"{path.rstrip('/')}/out.jsonl")]
    return []


def _size_problems(spec: SinkSpec) -> list[Problem]:
    if spec.shard_size is None:
        return []
    try:
        size = parse_size(spec.shard_size)
    except ValueError as error:
        return [_problem(f"`shard_size`: {error}", "shard_size: 256MB", spec, "shard_size")]
    if size < MIN_SHARD_BYTES:
        return [
            _problem(
                f"`shard_size` is {spec.shard_size}, which is less than 1KB", "shard_size: 256MB", spec, "shard_size"
            )
        ]
    return []


def _format_problems(spec: SinkSpec, kind: str, packing: str | None) -> list[Problem]:
    found = []
    if spec.compression is not None and kind != "parquet":
        more = f"name it {spec.path}.gz or .zst" if kind in ("jsonl", "csv", "tsv") and not packing else "omit it"
        found.append(_problem(f"`compression` is a setting of Parquet, and this is {kind}", more, spec, "compression"))
    elif spec.compression is not None and spec.compression not in COMPRESSIONS:
        fix = f"compression: one of {', '.join(COMPRESSIONS)}"
        found.append(_problem(f"`compression` is {short_repr(spec.compression)}", fix, spec, "compression"))
    if kind == "lance" and any(ord(letter) < 32 for letter in spec.path):
        found.append(_problem("Lance does not support control characters in names", "choose another name", spec))
    columns: Any = spec.columns
    if columns is None:
        return found
    if kind == "jsonl":
        found.append(_problem("`columns` is a setting of tables, and this is jsonl", "omit `columns`", spec, "columns"))
    elif not isinstance(columns, tuple) or not columns or not all(isinstance(name, str) and name for name in columns):
        found.append(_problem(f"`columns` is {short_repr(columns)}", "columns: [id, text]", spec, "columns"))
    elif len(set(columns)) < len(columns):
        twice = next(name for at, name in enumerate(columns) if name in columns[:at])
        found.append(_problem(f"`columns` has {twice!r} twice", "name each column once", spec, "columns"))
    return found


def _format_from_name(path: str) -> str | None:
    return SUFFIXES.get(stem_and_suffix(path.rpartition("/")[2])[1][1:].lower())


def _problem(message: str, fix: str, spec: SinkSpec | None = None, setting: str = "") -> Problem:
    subject = Subject("setting", setting) if setting else None
    return Problem("DT350", message, fixes=(fix,), place=spec.path if spec else "sink", subject=subject)
