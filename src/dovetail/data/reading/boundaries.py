"""Where do rows end? Found without parsing them, as fast as memory is searched."""

from __future__ import annotations

from collections import deque
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dovetail.data.reading.blocks import Blocks

STRETCH_BYTES = 8 << 20
"""A stretch ends after about this, however few rows it has."""
BOM = b"\xef\xbb\xbf"


class Stretch(NamedTuple):
    rows: int
    start: int
    stop: int
    """Bytes of the unpacked file."""
    line: int
    """Lines before it."""
    raw: bytes
    """Its bytes, if they were to be kept."""


class Lines:
    """Rows that end with a line."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.offset = 0
        """Where the next row begins."""
        self.line = 0
        """Lines before it."""
        self._block = b""
        self._block_start = 0
        self._lines = BytesIO()
        self._at = 0
        """How far the block was looked at."""
        self._midway = False
        """Whether that is in the middle of a row."""
        self._load()
        if self._block.startswith(BOM):
            self._at = self.offset = len(BOM)
            self._lines.seek(self._at)

    def goto(self, offset: int, line: int) -> None:
        """To a place that was the beginning of a row."""
        if offset == self.offset:
            return
        self._blocks.goto(offset)
        self.offset, self.line, self._midway = offset, line, False
        self._block, self._at = b"", 0

    def advance(self, rows: int, *, keep: bool = False) -> Stretch | None:
        """At most so many rows; None at the end of the file."""
        start, line, got = self.offset, self.line, 0
        pieces: list[bytes] = []
        while got < rows and (self._midway or not (got and self.offset - start >= STRETCH_BYTES)):
            if self._at == len(self._block) and not self._load():
                got += self._finish()
                break
            before = self._at
            got += self._count(1 if self._midway else rows - got)
            if keep:
                pieces.append(self._block[before : self._at])
        return Stretch(got, start, self.offset, line, b"".join(pieces)) if got else None

    def _load(self) -> bool:
        self._block_start = self._blocks.offset
        self._block = self._read()
        self._lines = BytesIO(self._block)  # shares the bytes
        self._at = 0
        return bool(self._block)

    def _read(self) -> bytes:
        return self._blocks.read()

    def _finish(self) -> int:
        """At the end of the file: the last row may lack its end."""
        if not self._midway:
            return 0
        self._midway = False
        self.offset = self._block_start
        self.line += 1
        return 1

    def _count(self, most: int) -> int:
        """Goes through at most so many rows of the block, and says how many ended. All of it happens in C."""
        rows, last = deque(enumerate(islice(self._lines, most), 1), maxlen=1)[0]
        self._at = self._lines.tell()
        self._midway = not last.endswith(b"\n")
        if self._midway:
            rows -= 1
            if rows:
                self.offset = self._block_start + self._at - len(last)
        else:
            self.offset = self._block_start + self._at
        self.line += rows
        return rows


class Records(Lines):
    """Rows of a CSV file: a quoted field may hold ends of lines. Agrees with `csv.reader` on every input."""

    def __init__(self, blocks: Blocks, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._rest = b""
        self._quotes = False
        """Whether the block has any."""
        self._inside = False
        """Whether a quoted field is open."""
        super().__init__(blocks)

    def goto(self, offset: int, line: int) -> None:
        if offset != self.offset:
            self._rest, self._inside = b"", False
        super().goto(offset, line)

    def _load(self) -> bool:
        rest = len(self._rest)
        found = super()._load()
        self._block_start -= rest
        self._quotes = b'"' in self._block
        return found

    def _read(self) -> bytes:
        """Whole lines only, so that a line is looked at in one piece."""
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
        if not (self._quotes or self._inside):
            return super()._count(most)
        rows, inside, delimiter = 0, self._inside, self._delimiter
        for line in self._lines:
            self._at += len(line)
            self.line += 1
            if b'"' in line:
                inside = ends_inside(line, inside, delimiter)
            if not inside:
                rows += 1
                self.offset = self._block_start + self._at
                if rows == most:
                    break
        self._inside = self._midway = inside
        return rows

    def _finish(self) -> int:
        if self._inside:
            self.line -= 1  # it was counted when it was looked at
        self._inside = False
        return super()._finish()


def ends_inside(line: bytes, inside: bool, delimiter: bytes) -> bool:
    """Whether a quoted field is open behind this line, as `csv.reader` sees it: a quote opens a field only at its
    beginning; two of them in a quoted field are one; behind a closing one anything may follow, unquoted."""
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
                return False  # an error to csv, which gives up the line
    return inside
