"""Cursor over JSON lines, text and CSV files: row boundaries found in the driver, byte ranges read by workers."""

from __future__ import annotations

import csv
import os
import pickle
from collections import deque
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.data.io_errors import CONTENT_MISMATCH, cannot_read, source_changed
from dovetail.data.readers.block_reader import BlockReader
from dovetail.data.readers.cursor import describe_files, nearest_mark
from dovetail.data.readers.file_discovery import check_local_unchanged
from dovetail.data.readers.fingerprint import files_fingerprint
from dovetail.data.readers.row_parser import LineFormat, parse_rows, read_csv_records
from dovetail.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.control.payload import Split
    from dovetail.data.readers.file_discovery import FileRef, FileStamp

MAX_SPAN_BYTES = 8 << 20
"""Maximum bytes of a range, however few rows it has."""
BOM = b"\xef\xbb\xbf"


class RowSpan(NamedTuple):
    rows: int
    start: int
    stop: int
    """Bytes of the decompressed file."""
    line: int
    """Lines before it."""
    raw: bytes
    """Its bytes, if they are to be kept."""


class LineScanner:
    """Rows that end with a line."""

    def __init__(self, blocks: BlockReader) -> None:
        self._blocks = blocks
        self.offset = 0
        """Start of the next row."""
        self.line = 0
        """Lines before it."""
        self._block = b""
        self._block_start = 0
        self._lines = BytesIO()
        self._position = 0
        """Position up to which the block was scanned."""
        self._in_row = False
        """Whether that is inside a row."""
        self._load()
        if self._block.startswith(BOM):
            self._position = self.offset = len(BOM)
            self._lines.seek(self._position)

    def seek(self, offset: int, line: int) -> None:
        """Move to the start of a row."""
        if offset == self.offset:
            return
        self._blocks.seek(offset)
        self.offset, self.line, self._in_row = offset, line, False
        self._block, self._position = b"", 0

    def advance(self, rows: int, *, keep: bool = False) -> RowSpan | None:
        """At most this many rows; None at the end of the file."""
        start, line, got = self.offset, self.line, 0
        pieces: list[bytes] = []
        while got < rows and (self._in_row or not (got and self.offset - start >= MAX_SPAN_BYTES)):
            if self._position == len(self._block) and not self._load():
                got += self._finish()
                break
            before = self._position
            got += self._count(1 if self._in_row else rows - got)
            if keep:
                pieces.append(self._block[before : self._position])
        return RowSpan(got, start, self.offset, line, b"".join(pieces)) if got else None

    def _load(self) -> bool:
        self._block_start = self._blocks.offset
        self._block = self._read()
        self._lines = BytesIO(self._block)  # shares the bytes
        self._position = 0
        return bool(self._block)

    def _read(self) -> bytes:
        return self._blocks.read()

    def _finish(self) -> int:
        """At the end of the file: the last row may lack a line end."""
        if not self._in_row:
            return 0
        self._in_row = False
        self.offset = self._block_start
        self.line += 1
        return 1

    def _count(self, most: int) -> int:
        """Scan at most this many rows of the block, and return how many ended. Runs in C."""
        rows, last = deque(enumerate(islice(self._lines, most), 1), maxlen=1)[0]
        self._position = self._lines.tell()
        self._in_row = not last.endswith(b"\n")
        if self._in_row:
            rows -= 1
            if rows:
                self.offset = self._block_start + self._position - len(last)
        else:
            self.offset = self._block_start + self._position
        self.line += rows
        return rows


class CsvScanner(LineScanner):
    """Rows of a CSV file: a quoted field may contain line ends. Agrees with `csv.reader` on every input."""

    def __init__(self, blocks: BlockReader, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._rest = b""
        self._quotes = False
        """Whether the block contains a quote."""
        self._in_quotes = False
        """Whether a quoted field is open."""
        super().__init__(blocks)

    def seek(self, offset: int, line: int) -> None:
        if offset != self.offset:
            self._rest, self._in_quotes = b"", False
        super().seek(offset, line)

    def _load(self) -> bool:
        rest = len(self._rest)
        found = super()._load()
        self._block_start -= rest
        self._quotes = b'"' in self._block
        return found

    def _read(self) -> bytes:
        """Complete lines only, so that a line is scanned at once."""
        pieces = [self._rest]
        self._rest = b""
        while block := self._blocks.read():
            end = block.rfind(b"\n") + 1
            if end:
                pieces.append(block[:end])
                self._rest = block[end:]
                break
            pieces.append(block)
        return b"".join(pieces)

    def _count(self, most: int) -> int:
        if not (self._quotes or self._in_quotes):
            return super()._count(most)
        rows, inside, delimiter = 0, self._in_quotes, self._delimiter
        for line in self._lines:
            self._position += len(line)
            self.line += 1
            if b'"' in line:
                inside = ends_in_quotes(line, inside, delimiter)
            if not inside:
                rows += 1
                self.offset = self._block_start + self._position
                if rows == most:
                    break
        self._in_quotes = self._in_row = inside
        return rows

    def _finish(self) -> int:
        if self._in_quotes:
            self.line -= 1  # counted when it was scanned
        self._in_quotes = False
        return super()._finish()


def ends_in_quotes(line: bytes, inside: bool, delimiter: bytes) -> bool:
    """Whether a quoted field is open behind this line, by the rules of `csv.reader`: a quote opens a field only at its
    start; two quotes in a quoted field are one; behind a closing quote anything may follow, unquoted."""
    may_open, closing = not inside, False
    for number, piece in enumerate(line.split(b'"')):
        if number:  # a quote
            if closing:
                inside, closing = True, False
            elif inside:
                inside, closing = False, True
            elif may_open:
                inside = True
            may_open = False
        if piece and not inside:
            closing = False
            may_open = piece.endswith(delimiter)
            if (b"\r" in piece and not piece.endswith(b"\n")) or b"\r" in piece.rstrip(b"\r\n"):
                return False  # an error for csv, which gives up the line
    return inside


_EMPTY_SPAN = RowSpan(0, 0, 0, 0, b"")


class _OpenFile:
    """A file that is closed with its last reader."""

    def __init__(self, path: str, stamp: FileStamp) -> None:
        self.path = path
        self.stamp = stamp
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_last_file: _OpenFile | None = None
"""The last file of this process: its splits arrive one after another."""


@dataclass(slots=True)
class LineRange:
    """Bytes `start` to `stop` of a local file."""

    items: int
    path: str
    stamp: FileStamp
    start: int
    stop: int
    line: int
    form: LineFormat

    def read(self) -> list[Any]:
        raw = _read_bytes(self.path, self.stamp, self.start, self.stop)
        return parse_rows(self.form, raw, self.items, self.path, self.line)


@dataclass(slots=True)
class RawLines:
    """Lines read by the driver, because their file can only be read from its start."""

    items: int
    path: str
    raw: Any
    line: int
    form: LineFormat

    def read(self) -> list[Any]:
        return parse_rows(self.form, bytes(self.raw), self.items, self.path, self.line)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raw = pickle.PickleBuffer(self.raw) if protocol >= 5 else bytes(self.raw)
        return RawLines, (self.items, self.path, raw, self.line, self.form)


def _read_bytes(path: str, stamp: FileStamp, start: int, stop: int) -> bytes:
    global _last_file
    opened = _last_file  # another thread may replace it
    try:
        if opened is None or opened.path != path or opened.stamp != stamp:
            _last_file = opened = _OpenFile(path, stamp)
        descriptor = opened.descriptor
        raw = os.pread(descriptor, stop - start, start)
        while len(raw) < stop - start:  # Linux returns at most 2 GB at a time
            more = os.pread(descriptor, stop - start - len(raw), start + len(raw))
            if not more:
                break
            raw += more
    except OSError as error:
        raise cannot_read(path, error) from None
    check_local_unchanged(path, stamp)  # after reading: detects every earlier change
    if len(raw) < stop - start:
        raise source_changed(path, f"it ends before byte {stop}")
    return raw


class LineCursor:
    """JSON lines, text or CSV files, one after another."""

    prefers_large_splits = False

    def __init__(self, name: str, files: Sequence[FileRef], form: LineFormat, *, header: bool = True) -> None:
        self.kind = form.kind
        self.row = 0
        self.total: int | None = None
        self._name = name
        self._files = files
        self._form = form
        self._header = header
        self._index = 0
        self._blocks: BlockReader | None = None
        self._rows: LineScanner | None = None
        self._names: tuple[str, ...] = ()
        """Columns of the open file."""
        self._bytes = sum(ref.size for ref in files)
        self._before = 0
        """Bytes of the files before this one."""

    @property
    def expected(self) -> int | None:
        passed = self._before
        if self._blocks is not None and self._rows is not None:
            passed += self._bytes_passed(self._blocks, self._rows)
        if self._index >= len(self._files):
            return self.row
        return max(self.row, self.row * self._bytes // passed) if passed and self.row else None

    @staticmethod
    def _bytes_passed(blocks: BlockReader, rows: LineScanner) -> int:
        """Bytes of the file for the rows handed out; more may have been read."""
        if not blocks.compressed:
            return rows.offset
        return blocks.raw_bytes_read() * rows.offset // max(1, blocks.offset)

    def take(self, rows: int) -> Split | None:
        while (found := self._advance(rows, keep=True)) is not None:
            if found.rows:
                return self._split(found)
        return None

    def _advance(self, rows: int, *, keep: bool) -> RowSpan | None:
        """The next range; without rows at the end of a file; None behind the last file."""
        if self._index >= len(self._files):
            return None
        if self._rows is None:
            self._open()
        assert self._rows is not None
        assert self._blocks is not None
        keep = keep and (self._blocks.compressed or self._blocks.remote)
        found = self._rows.advance(rows, keep=keep)
        if found is not None:
            self.row += found.rows
            return found
        self._before += self._files[self._index].size
        self._close_file(self._index + 1)
        return _EMPTY_SPAN

    def _split(self, found: RowSpan) -> Split:
        assert self._blocks is not None
        ref = self._blocks.ref
        form = replace(self._form, names=self._names) if self._names else self._form
        if self._blocks.compressed or self._blocks.remote:
            return RawLines(found.rows, ref.path, found.raw, found.line, form)
        return LineRange(found.rows, ref.path, ref.stamp, found.start, found.stop, found.line, form)

    def mark(self) -> object:
        """File, offset, lines before it."""
        return [self._index, 0, 0] if self._rows is None else [self._index, self._rows.offset, self._rows.line]

    def seek(self, row: int, marks: Mapping[int, object]) -> None:
        begin = nearest_mark(row, marks)
        if self.row > row or (
            begin is not None and begin > self.row
        ):  # otherwise continuing from here is at least as near
            index, offset, line = (0, 0, 0) if begin is None else _parse_mark(marks[begin])
            self._close_file(index)
            self._before = sum(ref.size for ref in self._files[:index])
            self.row = begin or 0
            if offset and index < len(self._files):
                self._open()
                assert self._rows is not None
                self._rows.seek(offset, line)
        while self.row < row and self._advance(row - self.row, keep=False) is not None:
            pass

    def place_of(self, row: int, marks: Mapping[int, object]) -> str:
        """Found by another cursor: this one is in use by its thread."""
        other = LineCursor(self._name, self._files, self._form, header=self._header)
        try:
            other.seek(row, marks)
            split = other.take(1)
        finally:
            other.close()
        assert isinstance(split, LineRange | RawLines), f"{self._name} has no row {row}"
        return f"{split.path}:{split.line + 1}"

    def fingerprint(self) -> dict[str, object]:
        form = self._form
        fields: dict[str, object] = {"kind": self.kind, "encoding": form.encoding}
        if self.kind == "csv":
            fields |= {"delimiter": form.delimiter, "header": self._header}
            fields["columns"] = list(form.columns) if form.columns else None
        return fields | files_fingerprint(self._files)

    def describe(self) -> str:
        return describe_files(self._name, self._files)

    def close(self) -> None:
        self._close_file(self._index)

    def open_first_file(self) -> None:
        """Open the first file, so that its problems are reported before anything starts."""
        if self._rows is None and self._index < len(self._files):
            self._open()

    def _close_file(self, index: int) -> None:
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = self._rows = None
        self._index = index

    def _open(self) -> None:
        self._blocks = BlockReader(self._files[self._index])
        self._names = ()
        if self.kind != "csv":
            self._rows = LineScanner(self._blocks)
            return
        self._rows = CsvScanner(self._blocks, self._form.delimiter.encode())
        self._names = self._column_names(self._rows, self._blocks)

    def _column_names(self, rows: CsvScanner, blocks: BlockReader) -> tuple[str, ...]:
        """Names from the header; without one, c0, c1, ... for the fields of the first record."""
        path = blocks.ref.path
        start, line = rows.offset, rows.line
        record: list[str] | csv.Error = []
        while not record:
            found = rows.advance(1, keep=True)
            if found is None:
                return self._form.columns or ()
            record = self._first_record(found.raw)
            if isinstance(record, csv.Error):
                break
        if not self._header:
            rows.seek(start, line)
            if self._form.columns:
                return self._form.columns
            return tuple(f"c{number}" for number in range(len(record) if isinstance(record, list) else 1))
        if isinstance(record, csv.Error):
            raise _header_error(path, f"the header cannot be read: {record}", "set encoding= and delimiter=")
        _check_header(path, record, self._form.columns)
        return tuple(record)

    def _first_record(self, raw: bytes) -> list[str] | csv.Error:
        try:
            text = raw.decode(self._form.encoding)
        except UnicodeDecodeError as error:
            return csv.Error(f"it is not {self._form.encoding}: {error.reason}")
        return next((record for record, _ in read_csv_records(text, self._form.delimiter)), [])


def _check_header(path: str, record: list[str], columns: tuple[str, ...] | None) -> None:
    twice = sorted({name for name in record if record.count(name) > 1})
    if twice:
        fix = "give the columns different names, or read without them: header=False, columns=[...]"
        raise _header_error(path, f"duplicate names in the header: {', '.join(map(repr, twice))}", fix)
    for name in columns or ():
        if name not in record:
            fix = f"one of {', '.join(record)}{did_you_mean(name, record)}"
            raise _header_error(path, f"there is no column {name!r}", fix)


def _header_error(path: str, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem(CONTENT_MISMATCH, message, fixes=(fix,), place=path))


def _parse_mark(mark: object) -> tuple[int, int, int]:
    assert isinstance(mark, list | tuple), mark
    return int(mark[0]), int(mark[1]), int(mark[2])
