"""How are files of lines read? The driver finds where lines end, and workers read and parse them."""

from __future__ import annotations

import csv
import os
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.data.reading.blocks import Blocks
from dovetail.data.reading.boundaries import Lines, Records, Stretch
from dovetail.data.reading.cursor import describe_files, files_fingerprint, nearest
from dovetail.data.reading.files import check_local
from dovetail.data.reading.parsing import Form, parse, read_records
from dovetail.data.reading.trouble import NOT_AS_SAID, cannot_read, changed
from dovetail.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.control.splits import Split
    from dovetail.data.reading.files import FileRef, Stamp

_NOTHING = Stretch(0, 0, 0, 0, b"")


class _Opened:
    """A file that is closed when nobody reads it any more."""

    def __init__(self, path: str, stamp: Stamp) -> None:
        self.path = path
        self.stamp = stamp
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_opened: _Opened | None = None
"""The file that this process read last: its splits come one after another."""


@dataclass(slots=True)
class LineRange:
    """Bytes `start` to `stop` of a file of this machine."""

    items: int
    path: str
    stamp: Stamp
    start: int
    stop: int
    line: int
    form: Form

    def read(self) -> list[Any]:
        raw = _bytes_of(self.path, self.stamp, self.start, self.stop)
        return parse(self.form, raw, self.items, self.path, self.line)


@dataclass(slots=True)
class RawLines:
    """Lines that only the driver could reach, because their file can only be read through."""

    items: int
    path: str
    raw: Any
    line: int
    form: Form

    def read(self) -> list[Any]:
        return parse(self.form, bytes(self.raw), self.items, self.path, self.line)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raw = pickle.PickleBuffer(self.raw) if protocol >= 5 else bytes(self.raw)
        return RawLines, (self.items, self.path, raw, self.line, self.form)


def _bytes_of(path: str, stamp: Stamp, start: int, stop: int) -> bytes:
    global _opened
    opened = _opened  # another thread may put its own there
    try:
        if opened is None or opened.path != path or opened.stamp != stamp:
            _opened = opened = _Opened(path, stamp)
        descriptor = opened.descriptor
        raw = os.pread(descriptor, stop - start, start)
        while len(raw) < stop - start:  # Linux gives at most 2 GB at a time
            more = os.pread(descriptor, stop - start - len(raw), start + len(raw))
            if not more:
                break
            raw += more
    except OSError as error:
        raise cannot_read(path, error) from None
    check_local(path, stamp)  # after reading: whatever happened before is seen
    if len(raw) < stop - start:
        raise changed(path, f"it ends before byte {stop}")
    return raw


class LinesCursor:
    """JSON lines, text, or CSV: files one after another."""

    coarse = False

    def __init__(self, said: str, files: Sequence[FileRef], form: Form, *, header: bool = True) -> None:
        self.kind = form.kind
        self.row = 0
        self.total: int | None = None
        self._said = said
        self._files = files
        self._form = form
        self._header = header
        self._index = 0
        self._blocks: Blocks | None = None
        self._rows: Lines | None = None
        self._names: tuple[str, ...] = ()
        """Of the file that is open."""
        self._bytes = sum(ref.size for ref in files)
        self._before = 0
        """Bytes of the files before this one."""

    @property
    def expected(self) -> int | None:
        passed = self._before
        if self._blocks is not None and self._rows is not None:
            passed += self._passed(self._blocks, self._rows)
        if self._index >= len(self._files):
            return self.row
        return max(self.row, self.row * self._bytes // passed) if passed and self.row else None

    @staticmethod
    def _passed(blocks: Blocks, rows: Lines) -> int:
        """Bytes of the file for rows that were handed out; more may have been read."""
        if not blocks.compressed:
            return rows.offset
        return blocks.consumed() * rows.offset // max(1, blocks.offset)

    def take(self, rows: int) -> Split | None:
        while (found := self._advance(rows, keep=True)) is not None:
            if found.rows:
                return self._split(found)
        return None

    def _advance(self, rows: int, *, keep: bool) -> Stretch | None:
        """The next stretch; with no rows, where a file ends; None behind the last file."""
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
        self._leave(self._index + 1)
        return _NOTHING

    def _split(self, found: Stretch) -> Split:
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
        begin = nearest(row, marks)
        if self.row > row or (begin is not None and begin > self.row):  # else going on from here is at least as near
            index, offset, line = (0, 0, 0) if begin is None else _as_mark(marks[begin])
            self._leave(index)
            self._before = sum(ref.size for ref in self._files[:index])
            self.row = begin or 0
            if offset and index < len(self._files):
                self._open()
                assert self._rows is not None
                self._rows.goto(offset, line)
        while self.row < row and self._advance(row - self.row, keep=False) is not None:
            pass

    def fingerprint(self) -> dict[str, object]:
        form = self._form
        said: dict[str, object] = {"kind": self.kind, "encoding": form.encoding}
        if self.kind == "csv":
            said |= {"delimiter": form.delimiter, "header": self._header}
            said["columns"] = list(form.columns) if form.columns else None
        return said | files_fingerprint(self._files)

    def describe(self) -> str:
        return describe_files(self._said, self._files)

    def close(self) -> None:
        self._leave(self._index)

    def look(self) -> None:
        """Opens the first file, so that what is wrong with it is said before anything starts."""
        if self._rows is None and self._index < len(self._files):
            self._open()

    def _leave(self, index: int) -> None:
        if self._blocks is not None:
            self._blocks.close()
        self._blocks = self._rows = None
        self._index = index

    def _open(self) -> None:
        self._blocks = Blocks(self._files[self._index])
        self._names = ()
        if self.kind != "csv":
            self._rows = Lines(self._blocks)
            return
        self._rows = Records(self._blocks, self._form.delimiter.encode())
        self._names = self._names_of(self._rows, self._blocks)

    def _names_of(self, rows: Records, blocks: Blocks) -> tuple[str, ...]:
        """The header's names; or, without one, c0, c1, ... as many as the first record has fields."""
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
            rows.goto(start, line)
            if self._form.columns:
                return self._form.columns
            return tuple(f"c{number}" for number in range(len(record) if isinstance(record, list) else 1))
        if isinstance(record, csv.Error):
            raise _bad_header(path, f"the header cannot be read: {record}", "name the encoding= and the delimiter=")
        _check_header(path, record, self._form.columns)
        return tuple(record)

    def _first_record(self, raw: bytes) -> list[str] | csv.Error:
        try:
            text = raw.decode(self._form.encoding)
        except UnicodeDecodeError as error:
            return csv.Error(f"it is not {self._form.encoding}: {error.reason}")
        return next((record for record, _ in read_records(text, self._form.delimiter)), [])


def _check_header(path: str, record: list[str], columns: tuple[str, ...] | None) -> None:
    twice = sorted({name for name in record if record.count(name) > 1})
    if twice:
        fix = "give the columns different names, or read without them: header=False, columns=[...]"
        raise _bad_header(path, f"the header has a name twice: {', '.join(map(repr, twice))}", fix)
    for name in columns or ():
        if name not in record:
            fix = f"one of {', '.join(record)}{did_you_mean(name, record)}"
            raise _bad_header(path, f"there is no column {name!r}", fix)


def _bad_header(path: str, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem(NOT_AS_SAID, message, fixes=(fix,), place=path))


def _as_mark(mark: object) -> tuple[int, int, int]:
    assert isinstance(mark, list | tuple), mark
    return int(mark[0]), int(mark[1]), int(mark[2])
