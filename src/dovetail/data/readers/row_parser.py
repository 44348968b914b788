"""Parsers of raw lines to rows (JSON, CSV, text), with the file and line of every bad row."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import BLANK_ROW, BadRow

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_RAW_CHARACTERS = 10_000
"""Placeholder of an unreadable row."""
CSV_FIELD_LIMIT_BYTES = 1 << 31
"""The csv module rejects fields of more than 128 KB unless a limit is set."""

JSON_CHUNK_BYTES = 64 << 10
"""Lines that are parsed together."""

_decoder = json.JSONDecoder()
_separator_number = int.from_bytes(os.urandom(7), "big") | 1 << 56
_separator = f",\n{_separator_number},"
"""Separator between lines that are parsed together: a number that no file can contain, so that lines that are not
complete values are detected."""


@dataclass(frozen=True, slots=True)
class LineFormat:
    """Parser settings for the lines of a file."""

    kind: str
    encoding: str = "utf-8"
    delimiter: str = ","
    names: tuple[str, ...] = ()
    """Names of the fields of a record."""
    columns: tuple[str, ...] | None = None
    """The selected fields."""


def parse_rows(form: LineFormat, raw: bytes, items: int, path: str, line: int) -> list[Any]:
    """Parse exactly this many rows; `line`: number of lines before them."""
    if form.kind == "csv":
        rows = list(_parse_csv(form, raw, path, line))
        if len(rows) == items:
            return rows
        return [_bad_row(f"not {form.encoding}: the fields cannot be separated", path, line, raw)] * items
    if form.kind == "text":
        return _parse_text(form, raw, items, path, line)
    return _parse_json(form, raw, path, line)


def _parse_json(form: LineFormat, raw: bytes, path: str, line: int) -> list[Any]:
    """JSON, in chunks that fit in the CPU cache."""
    if len(raw) <= JSON_CHUNK_BYTES:
        return _parse_json_joined(raw, form.encoding) or _parse_json_lines(form, raw, path, line)
    rows: list[Any] = []
    start = 0
    while start < len(raw):
        stop = raw.find(b"\n", start + JSON_CHUNK_BYTES) + 1 or len(raw)
        piece = raw[start:stop]
        rows += _parse_json_joined(piece, form.encoding) or _parse_json_lines(form, piece, path, line + len(rows))
        start = stop
    return rows


def _parse_json_joined(raw: bytes, encoding: str) -> list[Any] | None:
    """Parse all lines in one call, which takes two thirds of the time; None if any line is not exactly one value.

    If every separator is an element of the outermost list, with one value between any two of them, each line is exactly
    one value.
    """
    try:
        text = raw.decode(encoding).removesuffix("\n")
        joined = text.replace("\n", _separator)
        values: list[Any] = _decoder.decode(f"[{joined}]")
    except (ValueError, RecursionError):
        return None
    separators = (len(joined) - len(text)) // (len(_separator) - 1)
    if len(values) != 2 * separators + 1 or values[1::2].count(_separator_number) != separators:
        return None
    del values[1::2]
    return values


def _parse_json_lines(form: LineFormat, raw: bytes, path: str, line: int) -> list[Any]:
    rows: list[Any] = []
    for number, text in enumerate(_split_lines(raw), line):
        if not text.strip():
            rows.append(BLANK_ROW)
            continue
        try:
            rows.append(_decoder.decode(text.decode(form.encoding)))
        except UnicodeDecodeError as error:
            rows.append(_bad_row(f"not {form.encoding}: {error.reason} at byte {error.start}", path, number, text))
        except RecursionError:
            rows.append(_bad_row("JSON that is nested too deeply", path, number, text))
        except ValueError as error:
            rows.append(_bad_row(f"not JSON: {error}", path, number, text))
    return rows


def _parse_text(form: LineFormat, raw: bytes, items: int, path: str, line: int) -> list[Any]:
    try:
        text = raw.decode(form.encoding)
    except UnicodeDecodeError:
        rows: list[Any] = []
        for number, one in enumerate(_split_lines(raw), line):
            try:
                rows.append(one.decode(form.encoding).removesuffix("\r"))
            except UnicodeDecodeError as error:
                rows.append(_bad_row(f"not {form.encoding}: {error.reason} at byte {error.start}", path, number, one))
        return rows
    found = text.split("\n")
    if len(found) > items:
        found.pop()
    return [one.removesuffix("\r") for one in found] if "\r" in text else found


def _split_lines(raw: bytes) -> list[bytes]:
    found = raw.split(b"\n")
    if not found[-1]:
        found.pop()
    return found


def read_csv_records(text: str, delimiter: str) -> Iterator[tuple[list[str] | csv.Error, int]]:
    """Records with the number of lines up to their end."""
    if csv.field_size_limit() < CSV_FIELD_LIMIT_BYTES:
        csv.field_size_limit(CSV_FIELD_LIMIT_BYTES)  # global; not restored, because another thread may be reading
    reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter)
    while True:
        try:
            yield next(reader), reader.line_num
        except StopIteration:
            return
        except csv.Error as error:
            yield error, reader.line_num


def _parse_csv(form: LineFormat, raw: bytes, path: str, line: int) -> Iterator[Any]:
    broken = False
    try:
        text = raw.decode(form.encoding)
    except UnicodeDecodeError:
        text, broken = raw.decode(form.encoding, "surrogateescape"), True
    names, wanted = form.names, form.columns
    before = 0
    for record, after in read_csv_records(text, form.delimiter):
        place, before = line + before, after
        if isinstance(record, csv.Error):
            yield _bad_row(f"not CSV: {record}", path, place, b"")
        elif not record:
            yield BLANK_ROW
        elif broken and _has_escapes(record):
            yield _bad_row(f"not {form.encoding}", path, place, form.delimiter.join(record).encode("utf-8", "replace"))
        elif len(record) > len(names):
            reason = f"{len(record)} fields, expected {len(names)}"
            yield _bad_row(reason, path, place, form.delimiter.join(record).encode())
        else:
            row: dict[str, str | None] = dict(zip(names, record, strict=False))
            if len(record) < len(names):
                row.update(dict.fromkeys(names[len(record) :]))
            yield row if wanted is None else {name: row[name] for name in wanted}


def _has_escapes(record: list[str]) -> bool:
    return any("\ud800" <= character <= "\udfff" for field in record for character in field)


def _bad_row(reason: str, path: str, line: int, raw: bytes) -> BadRow:
    """`line`: number of lines before it."""
    shown = raw[: 4 * MAX_RAW_CHARACTERS].decode("utf-8", "replace")[:MAX_RAW_CHARACTERS]
    return BadRow(reason, f"{path}:{line + 1}", shown)
