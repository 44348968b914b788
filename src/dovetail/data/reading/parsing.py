"""What do raw lines say? Opened by workers: JSON, CSV or text, with the place of every row that cannot be read."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.control.splits import BLANK, BadRow

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN_CHARACTERS = 10_000
"""Of a row that cannot be read."""
FIELD_BYTES = 1 << 31
"""The csv module refuses fields of more than 128 KB unless it is told a limit."""

PIECE_BYTES = 64 << 10
"""Lines that are parsed together."""

_decoder = json.JSONDecoder()
_mark = int.from_bytes(os.urandom(7), "big") | 1 << 56
_between = f",\n{_mark},"
"""Between two lines that are parsed together: a number that no file can know, so that lines that are no values by
themselves are told from those that are, whatever they look like side by side."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the lines of a file are read."""

    kind: str
    encoding: str = "utf-8"
    delimiter: str = ","
    names: tuple[str, ...] = ()
    """Of the fields of a record."""
    columns: tuple[str, ...] | None = None
    """Those that are wanted."""


def parse(form: Form, raw: bytes, items: int, path: str, line: int) -> list[Any]:
    """Exactly so many rows; `line`: how many lines of the file are before them."""
    if form.kind == "csv":
        rows = list(_records(form, raw, path, line))
        if len(rows) == items:
            return rows
        return [_bad(f"not {form.encoding}: the fields cannot be told apart", path, line, raw)] * items
    if form.kind == "text":
        return _texts(form, raw, items, path, line)
    return _values(form, raw, path, line)


def _values(form: Form, raw: bytes, path: str, line: int) -> list[Any]:
    """JSON, in pieces that stay in the cache."""
    if len(raw) <= PIECE_BYTES:
        return _together(raw, form.encoding) or _one_by_one(form, raw, path, line)
    rows: list[Any] = []
    start = 0
    while start < len(raw):
        stop = raw.find(b"\n", start + PIECE_BYTES) + 1 or len(raw)
        piece = raw[start:stop]
        rows += _together(piece, form.encoding) or _one_by_one(form, piece, path, line + len(rows))
        start = stop
    return rows


def _together(raw: bytes, encoding: str) -> list[Any] | None:
    """All lines in one call, which takes two thirds of the time; None if any of them is no value by itself.

    That every separator came out as a number of the outermost list, and between any two of them one value, means that
    each line is exactly one value.
    """
    try:
        text = raw.decode(encoding).removesuffix("\n")
        joined = text.replace("\n", _between)
        values: list[Any] = _decoder.decode(f"[{joined}]")
    except (ValueError, RecursionError):
        return None
    separators = (len(joined) - len(text)) // (len(_between) - 1)
    if len(values) != 2 * separators + 1 or values[1::2].count(_mark) != separators:
        return None
    del values[1::2]
    return values


def _one_by_one(form: Form, raw: bytes, path: str, line: int) -> list[Any]:
    rows: list[Any] = []
    for number, text in enumerate(_lines(raw), line):
        if not text.strip():
            rows.append(BLANK)
            continue
        try:
            rows.append(_decoder.decode(text.decode(form.encoding)))
        except UnicodeDecodeError as error:
            rows.append(_bad(f"not {form.encoding}: {error.reason} at byte {error.start}", path, number, text))
        except RecursionError:
            rows.append(_bad("JSON that is nested too deeply", path, number, text))
        except ValueError as error:
            rows.append(_bad(f"not JSON: {error}", path, number, text))
    return rows


def _texts(form: Form, raw: bytes, items: int, path: str, line: int) -> list[Any]:
    try:
        text = raw.decode(form.encoding)
    except UnicodeDecodeError:
        rows: list[Any] = []
        for number, one in enumerate(_lines(raw), line):
            try:
                rows.append(one.decode(form.encoding).removesuffix("\r"))
            except UnicodeDecodeError as error:
                rows.append(_bad(f"not {form.encoding}: {error.reason} at byte {error.start}", path, number, one))
        return rows
    found = text.split("\n")
    if len(found) > items:
        found.pop()
    return [one.removesuffix("\r") for one in found] if "\r" in text else found


def _lines(raw: bytes) -> list[bytes]:
    found = raw.split(b"\n")
    if not found[-1]:
        found.pop()
    return found


def read_records(text: str, delimiter: str) -> Iterator[tuple[list[str] | csv.Error, int]]:
    """Records with the number of lines up to their end."""
    if csv.field_size_limit() < FIELD_BYTES:
        csv.field_size_limit(FIELD_BYTES)  # of the process; not put back, since another thread may be reading too
    reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter)
    while True:
        try:
            yield next(reader), reader.line_num
        except StopIteration:
            return
        except csv.Error as error:
            yield error, reader.line_num


def _records(form: Form, raw: bytes, path: str, line: int) -> Iterator[Any]:
    broken = False
    try:
        text = raw.decode(form.encoding)
    except UnicodeDecodeError:
        text, broken = raw.decode(form.encoding, "surrogateescape"), True
    names, wanted = form.names, form.columns
    before = 0
    for record, after in read_records(text, form.delimiter):
        place, before = line + before, after
        if isinstance(record, csv.Error):
            yield _bad(f"not CSV: {record}", path, place, b"")
        elif not record:
            yield BLANK
        elif broken and _has_escapes(record):
            yield _bad(f"not {form.encoding}", path, place, form.delimiter.join(record).encode("utf-8", "replace"))
        elif len(record) > len(names):
            said = f"{len(record)} fields, and there are {len(names)} columns"
            yield _bad(said, path, place, form.delimiter.join(record).encode())
        else:
            row: dict[str, str | None] = dict(zip(names, record, strict=False))
            if len(record) < len(names):
                row.update(dict.fromkeys(names[len(record) :]))
            yield row if wanted is None else {name: row[name] for name in wanted}


def _has_escapes(record: list[str]) -> bool:
    return any("\ud800" <= character <= "\udfff" for field in record for character in field)


def _bad(said: str, path: str, line: int, raw: bytes) -> BadRow:
    """`line`: how many are before it."""
    shown = raw[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace")[:SHOWN_CHARACTERS]
    return BadRow(said, f"{path}:{line + 1}", shown)
