"""Files of a source and their format by file name, with all problems reported at once."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from typing import TYPE_CHECKING

from dovetail.data.file_formats import FORMATS, SUFFIXES, format_from_suffix
from dovetail.data.io_errors import (
    CONTENT_MISMATCH,
    INVALID_SETTING,
    SOURCE_SUBJECT,
    UNKNOWN_FORMAT,
    list_paths,
)
from dovetail.data.readers.block_reader import is_compressed
from dovetail.data.readers.file_discovery import FileFinder, is_remote
from dovetail.data.readers.row_parser import LineFormat
from dovetail.data.readers.text_lines import LineCursor
from dovetail.errors import Change, ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.data.readers.file_discovery import FileRef
    from dovetail.data.sources import SourceSpec


def find_files(spec: SourceSpec) -> tuple[str, list[FileRef]]:
    """The format, and the files in reading order."""
    form = spec.format
    finder = FileFinder(_name_filter(form), stamps=form != "paths", underscored=form in ("paths", "bytes"))
    for path in spec.paths:
        finder.add(path)
    problems = list(finder.problems)
    twice = [path for path, count in Counter(ref.path for ref in finder.files).items() if count > 1]
    if twice:
        message = f"{len(twice)} files are named twice: {list_paths(twice, len(twice))}"
        problems.append(
            Problem(INVALID_SETTING, message, fixes=("use paths that match different files",), place="source")
        )
    if form is None and not problems:
        form = _format_from_names(finder.files, problems)
    if problems:
        raise ConfigError(problems)
    assert form is not None
    return form, finder.files


def _name_filter(form: str | None) -> Callable[[str], bool]:
    if form in ("paths", "bytes"):
        return lambda name: True  # noqa: ARG005
    if form == "text":
        return lambda name: format_from_suffix(name) in ("text", None)
    return lambda name: (
        format_from_suffix(name) not in (None, "lance") if form is None else format_from_suffix(name) == form
    )


def _format_from_names(files: list[FileRef], problems: list[Problem]) -> str | None:
    by_form: dict[str | None, list[str]] = {}
    for ref in files:
        by_form.setdefault(format_from_suffix(ref.path), []).append(ref.path)
    if None in by_form:
        unknown = by_form[None]
        message = f"unknown format by file name: {list_paths(unknown, len(unknown))}"
        evidence = (f"formats: {', '.join(FORMATS)}", f"known suffixes: {', '.join(SUFFIXES)}")
        fixes = tuple(Change({"format": form}, (SOURCE_SUBJECT,)) for form in ("jsonl", "csv", "text"))
        problems.append(Problem(UNKNOWN_FORMAT, message, evidence, fixes, "source"))
    elif len(by_form) > 1:
        counts = ", ".join(f"{len(paths)} {form} (such as {paths[0]})" for form, paths in by_form.items())
        fix = "use a pattern that matches one format, such as 'folder/**/*.jsonl', or set format:"
        problems.append(
            Problem(UNKNOWN_FORMAT, f"the files have several formats: {counts}", fixes=(fix,), place="source")
        )
    return next(iter(by_form))


def open_line_files(name: str, spec: SourceSpec, files: list[FileRef]) -> LineCursor:
    assert spec.format is not None
    delimiter = spec.delimiter or ("\t" if all(".tsv" in ref.path.lower() for ref in files) else ",")
    form = LineFormat(spec.format, spec.encoding, delimiter, columns=spec.columns)
    problems = [problem for ref in files if (problem := _single_document_problem(ref)) is not None]
    if problems:
        raise ConfigError(problems)
    cursor = LineCursor(name, files, form, header=spec.header)
    if spec.format == "csv":
        cursor.open_first_file()
    return cursor


def _single_document_problem(ref: FileRef) -> Problem | None:
    """A .json file may contain one array over many lines, instead of one value per line."""
    if not ref.path.lower().endswith(".json") or is_remote(ref.path) or is_compressed(ref.path):
        return None
    with open(ref.path, "rb") as file:  # noqa: PTH123
        first = file.readline(1 << 16)
    if not first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"[", b"{")) or len(first) == 1 << 16:
        return None
    try:
        value = json.loads(first)
    except ValueError:
        value = None
    if isinstance(value, dict) or (isinstance(value, list) and len(first) < ref.size):
        return None
    message = "contains one JSON document, not one row per line"
    fix = f"jq -c '.[]' {shlex.quote(ref.path)} > {shlex.quote(ref.path[:-5] + '.jsonl')}"
    return Problem(CONTENT_MISMATCH, message, fixes=(fix, "load it and pass the list as the source"), place=ref.path)
