"""Source specification (`dt.source`): validation of its settings, format detection and opening."""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from dovetail.data.file_formats import FORMATS, LINE_FORMATS, format_from_suffix
from dovetail.data.io_errors import INVALID_SETTING
from dovetail.errors import Change, ConfigError, Problem, Subject, did_you_mean, nearest_word, short_repr

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.data.readers.cursor import Cursor
    from dovetail.errors import Fix

NON_ASCII_CODECS = (
    "utf_7",
    "utf_16",
    "utf_32",
    "iso2022",
    "hz",
    "punycode",
    "idna",
    "unicode_escape",
    "raw_unicode",
    "cp037",
)
"""Codecs in which a byte below 128 is not always an ASCII character: line ends are not visible in the bytes."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The value of `source:` in a pipeline file and of `dt.source(...)`. Create it with `source`."""

    path: str | tuple[str, ...]
    """Files, folders, patterns (** matches folders), URLs; read one after another."""
    format: str | None = None
    """One of FORMATS; None: by the file names."""
    columns: tuple[str, ...] | None = None
    encoding: str = "utf-8"
    delimiter: str | None = None
    header: bool = True
    limit: int | None = None
    """Maximum number of rows."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


SETTING_NAMES = tuple(field.name for field in fields(SourceSpec))


def source(path: Any, **settings: Any) -> SourceSpec:
    """A source: `dt.source("data.csv", delimiter=";")`. Reports all problems at once, except those of the files."""
    return _validate({"path": path, **settings})


def as_source_spec(value: object) -> SourceSpec | None:
    """From a path, a mapping of a pipeline file, or a spec; None for other values."""
    if isinstance(value, SourceSpec):
        return value
    if isinstance(value, str | os.PathLike):
        return _validate({"path": value})
    return _validate(value) if type(value) is dict else None


def open_source(value: object, limit: int | None = None, before: Mapping[str, Any] | None = None) -> Cursor | None:
    """The cursor of a source; None for a plain iterable. `before`: fingerprint of the run to resume: versioned tables
    are opened at that version."""
    from dovetail.data.readers.cursor import LimitedCursor
    from dovetail.data.readers.dataframes import table_cursor

    spec = as_source_spec(value)
    found: Cursor | None = table_cursor(value) if spec is None else _open_spec(spec, before or {})
    limits = [most for most in (limit, spec.limit if spec else None) if most is not None]
    return LimitedCursor(found, min(limits)) if found is not None and limits else found


def source_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between two fingerprints, as sentences; empty: none."""
    from dovetail.data.readers.fingerprint import fingerprint_differences

    return fingerprint_differences(before, now)


# --- specification


def _validate(settings: dict[Any, Any]) -> SourceSpec:
    problems: list[Problem] = []

    def wrong(setting: str, message: str, *fixes: Fix) -> None:
        subject = Subject("setting", setting)
        problems.append(Problem(INVALID_SETTING, message, fixes=fixes, place="source", subject=subject))

    for key in settings:
        if key not in SETTING_NAMES:
            wrong(
                str(key),
                f"unknown setting {short_repr(key)}{did_you_mean(str(key), SETTING_NAMES)}",
                f"settings are: {', '.join(SETTING_NAMES)}",
            )
    values = {
        key: value for key, value in settings.items() if key in SETTING_NAMES and (value is not None or key == "path")
    }
    values["path"] = _validate_paths(settings.get("path"), wrong)
    _validate_format_settings(values, wrong)
    if isinstance(columns := values.get("columns"), list | tuple):
        values["columns"] = tuple(columns)
        if not columns or not all(isinstance(name, str) for name in columns) or len(set(columns)) < len(columns):
            wrong("columns", f"columns is {short_repr(columns)}, not a list of different names", "columns: [id, text]")
    elif columns is not None:
        wrong("columns", f"columns is {short_repr(columns)}, not a list of names", "columns: [id, text]")
    limit = values.get("limit")
    if limit is not None and (type(limit) is not int or limit < 0):
        wrong("limit", f"limit is {short_repr(limit)}, not a number of rows", "limit: 1000")
    if type(values.get("header", True)) is not bool:
        wrong("header", f"header is {short_repr(values['header'])}, not true or false", "header: true")
    if not problems:
        _validate_combination(SourceSpec(**values), settings, wrong)
    if problems:
        raise ConfigError(problems)
    return SourceSpec(**values)


def _validate_paths(path: object, wrong: Any) -> str | tuple[str, ...]:
    many = list(path) if isinstance(path, list | tuple) else [path]
    paths: list[str] = []
    for one in many:
        text = os.fspath(one) if isinstance(one, os.PathLike) else one
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            wrong("path", f"path is {short_repr(one)}, not the name of a file, folder or pattern", "path: data/*.jsonl")
        else:
            paths.append(text)
    if not many:
        wrong("path", "path is an empty list", "path: data/*.jsonl")
    return tuple(paths) if isinstance(path, list | tuple) else "".join(paths)


def _validate_format_settings(values: dict[str, Any], wrong: Any) -> None:
    form = values.get("format")
    if form is not None and form not in FORMATS:
        near = did_you_mean(form, FORMATS) if isinstance(form, str) else ""
        meant = [nearest_word(form, FORMATS)] if near else ["jsonl", "csv", "text", "parquet"]
        wrong(
            "format",
            f"format is {short_repr(form)}, which is not a format{near}",
            *(Change({"format": name}, (Subject("source", "source"),)) for name in meant),
        )
    encoding = values.get("encoding", "utf-8")
    try:
        name = codecs.lookup(encoding).name.replace("-", "_")
        if name == "utf_8_sig":
            name = values["encoding"] = "utf-8"
        if name.startswith(NON_ASCII_CODECS) or bytes(range(128)).decode(encoding) != "".join(map(chr, range(128))):
            wrong(
                "encoding",
                f"encoding {encoding!r} cannot be read line by line",
                "iconv -f THAT -t utf-8 old > new, then read new",
            )
    except (LookupError, TypeError, ValueError):
        wrong(
            "encoding",
            f"encoding is {short_repr(encoding)}, which Python does not support",
            "encoding: utf-8",
            "encoding: latin-1",
        )
    delimiter = values.get("delimiter")
    if delimiter is not None and not (
        isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii() and delimiter not in '"\r\n\0'
    ):
        wrong(
            "delimiter",
            f"delimiter is {short_repr(delimiter)}, not one ASCII character",
            'delimiter: ";"',
            r'delimiter: "\t"',
        )


def _validate_combination(spec: SourceSpec, settings: dict[Any, Any], wrong: Any) -> None:
    form = spec.format
    if form is None:
        return
    if spec.columns and form not in ("csv", "parquet", "lance"):
        wrong("columns", f"columns is not supported for {form}", "omit columns, and drop fields in a stage")
    for key in ("delimiter", "header"):
        if settings.get(key) is not None and form != "csv":
            wrong(key, f"{key} is not supported for {form}", "format: csv")
    if settings.get("encoding") is not None and form not in LINE_FORMATS:
        wrong("encoding", f"encoding is not supported for {form}", "omit encoding")


# --- opening


def _open_spec(spec: SourceSpec, before: Mapping[str, Any]) -> Cursor:
    name = ", ".join(spec.paths[:3]) + (f" and {len(spec.paths) - 3} more" if len(spec.paths) > 3 else "")
    if spec.format == "lance" or (
        spec.format is None and any(format_from_suffix(path) == "lance" for path in spec.paths)
    ):
        from dovetail.data.readers.lance_tables import LanceCursor

        versions = dict(before.get("tables", ())) if before.get("kind") == "lance" else {}
        return LanceCursor(name, spec.paths, spec.columns, versions)
    from dovetail.data.readers.source_files import find_files, open_line_files

    form, files = find_files(spec)
    if spec.format is None:  # the file names determined the format
        spec = source(list(spec.paths), **_non_default_settings(spec), format=form)
    if form in ("paths", "bytes"):
        from dovetail.data.readers.path_list import PathCursor

        return PathCursor(name, files, contents=form == "bytes")
    if form == "parquet":
        from dovetail.data.readers.parquet import ParquetCursor

        return ParquetCursor(name, files, spec.columns)
    return open_line_files(name, replace(spec, format=form), files)


def _non_default_settings(spec: SourceSpec) -> dict[str, Any]:
    """Settings that differ from their defaults."""
    plain = SourceSpec("")
    return {
        key: getattr(spec, key)
        for key in SETTING_NAMES
        if key not in ("path", "format") and getattr(spec, key) != getattr(plain, key)
    }
