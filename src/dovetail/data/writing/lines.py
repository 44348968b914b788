"""How do pieces of JSONL and CSV become the final files? Copied, cut at rows where a file is full."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING, Any

from dovetail.data.writing import csvs
from dovetail.data.writing.outputs import BLOCK, PackedOutput, output
from dovetail.data.writing.sorting import by_first

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dovetail.control.writing import Piece
    from dovetail.data.writing.job import Job, Old
    from dovetail.data.writing.outputs import Output
    from dovetail.data.writing.sorting import Opened


def line_ends(data: bytes) -> array[int]:
    ends = array("q")
    begin = 0
    while (end := data.find(b"\n", begin)) >= 0:
        begin = end + 1
        ends.append(begin)
    return ends


class Chunk:
    """Whole rows that go to a file: a stretch of a part file, or bytes."""

    __slots__ = ("_begin", "_ends", "_job", "data", "length", "offset", "part")

    def __init__(self, job: Job, part: str, offset: int, length: int, data: bytes | None = None) -> None:
        self._job = job
        self.part = part
        self.offset = offset
        self.length = length
        self.data = data
        self._ends: Any = None
        self._begin = 0

    def fitting(self, room: int) -> int:
        """Bytes of the whole rows that fit in `room`; if there is not even room for one, minus the bytes of that."""
        if self._ends is None:
            if self.data is None:
                self.data = self._job.reader.read(self.part, self.offset, self.length)
            self._ends = ends_of(self._job, self.data)
        low, high = 0, len(self._ends)
        while low < high:
            middle = (low + high) // 2
            if self._ends[middle] - self._begin <= room:
                low = middle + 1
            else:
                high = middle
        best = self._ends[low - 1] - self._begin if low else 0
        if best > 0:
            return best
        following = next((end for end in self._ends[low:] if end > self._begin), self._begin + self.length)
        return self._begin - following

    def give(self, target: Output, length: int) -> None:
        """The first `length` bytes of what is left."""
        if self.data is None:
            target.copy(self._job.reader, self.part, self.offset, length)
        else:
            target.write(self.data[self._begin : self._begin + length])
        self._begin += length
        self.offset += length
        self.length -= length


def ends_of(job: Job, data: bytes) -> array[int]:
    return line_ends(data) if job.kind == "jsonl" else csvs.row_ends(data)


class Shelf:
    """The files of a sink, one after another: the next one is begun when a row does not fit any more."""

    def __init__(self, job: Job, header: bytes) -> None:
        self._job = job
        self._header = header
        self._limit = job.shard_bytes
        self._file: Output | None = None
        self._fresh = True
        self.paths: list[Path] = []

    def open(self, *, header: bool = True) -> Output:
        path = self._job.path(len(self.paths))
        self.paths.append(path)
        self._file = output(path, self._job.packing)
        self._fresh = True
        if header and self._header:
            self._file.write(self._header)
        return self._file

    def add(self, chunk: Chunk) -> None:
        while chunk.length:
            target = self._file or self.open()
            length = chunk.length
            if self._limit is not None and target.size + length > self._limit:
                length = chunk.fitting(self._limit - target.size)
                if length < 0 and not self._fresh:
                    self._close()
                    continue
                length = abs(length)  # a row that is larger than a file has one for itself
            chunk.give(target, length)
            self._fresh = False

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> list[Path]:
        if not self.paths:
            self.open()
        self._close()
        return self.paths

    def abandon(self) -> None:
        if self._file is not None:
            self._file.abandon()


def write_lines(job: Job) -> list[Path]:
    """Makes the files; they are on the disk when it returns, but not under their names."""
    whole = _only_part(job)
    if whole is not None:
        return [whole]
    columns = _columns(job)
    shelf = Shelf(job, _header(job, columns))
    try:
        if job.old is not None:
            _put_old(job, shelf, columns)
        for chunk in _chunks(job, columns):
            shelf.add(chunk)
        return shelf.close()
    finally:
        shelf.abandon()


def _only_part(job: Job) -> Path | None:
    """A single part file that is just what is wanted, under another name: then there is nothing to copy."""
    if job.kind != "jsonl" or job.packing or job.shard_bytes or job.old or not job.pieces:
        return None
    part = job.pieces[0].part
    end = 0
    for piece in job.pieces:
        if piece.part != part or piece.offset != end or piece.keys is not None:
            return None
        end += piece.length
    if job.ordered and any(job.pieces[at].first > job.pieces[at + 1].first for at in range(len(job.pieces) - 1)):
        return None
    fd = job.reader.fd(part)
    if os.fstat(fd).st_size != end:
        return None
    path = job.path(0)
    try:
        os.link(job.reader.path(part), path)
    except OSError:
        return None  # not every file system has links
    os.fsync(fd)
    return path


def _columns(job: Job) -> list[str]:
    """What the header says: what was asked for, or what there is in all pieces and in the old file."""
    if job.kind == "jsonl":
        return []
    columns: dict[str, None] = {}
    if job.old is not None:
        columns.update(dict.fromkeys(old_header(job, job.old)[0]))
    if job.columns is not None:
        return list(columns | dict.fromkeys(job.columns))
    seen: set[tuple[str, ...]] = set()
    order: Sequence[Piece] = by_first(job.pieces) if job.ordered else job.pieces
    for piece in order:
        names = tuple(piece.meta)
        if names not in seen:
            seen.add(names)
            columns.update(dict.fromkeys(names))
    return list(columns)


def _header(job: Job, columns: list[str]) -> bytes:
    return csvs.encoded([columns], csvs.DELIMITERS[job.kind]) if columns else b""


def _chunks(job: Job, columns: list[str]) -> Iterator[Chunk]:
    for opened, start, stop in job.stretches():
        piece = opened.piece
        begin, end = (0, piece.length) if stop - start == piece.items else _bytes_of(job, opened, start, stop)
        if job.kind == "jsonl" or piece.meta == columns:
            yield Chunk(job, piece.part, piece.offset + begin, end - begin)
            continue
        data = job.reader.read(piece.part, piece.offset + begin, end - begin)
        data = csvs.with_columns(data, piece.meta, columns, csvs.DELIMITERS[job.kind])
        yield Chunk(job, piece.part, 0, len(data), data)


def _bytes_of(job: Job, opened: Opened, start: int, stop: int) -> tuple[int, int]:
    piece = opened.piece
    if opened.notes is None:
        opened.notes = ends_of(job, job.reader.read(piece.part, piece.offset, piece.length))
    return (opened.notes[start - 1] if start else 0), opened.notes[stop - 1]


# --- what was there before


def _put_old(job: Job, shelf: Shelf, columns: list[str]) -> None:
    old = job.old
    assert old is not None
    if not old.size:
        return
    header, begin, ended = old_header(job, old)
    if job.kind != "jsonl" and header != columns:
        target = shelf.open()
        for data in _old_rows(job, old, begin):
            target.write(csvs.with_columns(data, header, columns, csvs.DELIMITERS[job.kind]))
        return
    target = shelf.open(header=False)
    if isinstance(target, PackedOutput):
        target.raw(old.path, old.size)
    else:
        for data in _blocks(old):
            target.write(data)
    if not ended:
        target.write(b"\n")


def _blocks(old: Old) -> Iterator[bytes]:
    left = old.size
    with old.path.open("rb") as source:
        while left and (data := source.read(min(left, BLOCK))):
            left -= len(data)
            yield data


def _plain_blocks(job: Job, old: Old) -> Iterator[bytes]:
    if job.packing is None:
        yield from _blocks(old)
        return
    with unpacked(old.path, job.packing) as source:
        while data := source.read(BLOCK):
            yield data


def unpacked(path: Path, packing: str) -> Any:
    if packing == "gz":
        import gzip

        return gzip.open(path, "rb")
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)


def old_header(job: Job, old: Old) -> tuple[list[str], int, bool]:
    """The columns of the old file, where its rows begin, and whether it ends with a newline."""
    if job.kind == "jsonl" and job.packing is None:
        with old.path.open("rb") as source:
            source.seek(max(0, old.size - 1))
            return [], 0, source.read(1) == b"\n"
    data = b""
    last = b""
    for block in _plain_blocks(job, old):
        if not csvs.row_ends(data):
            data += block
        last = block[-1:] or last
    if job.kind == "jsonl" or not data:
        return [], 0, last == b"\n"
    ends = csvs.row_ends(data)
    begin = ends[0] if ends else len(data)
    bom = len(b"\xef\xbb\xbf") if data.startswith(b"\xef\xbb\xbf") else 0
    return csvs.parsed(data[bom:begin], csvs.DELIMITERS[job.kind])[0], begin, last == b"\n"


def _old_rows(job: Job, old: Old, begin: int) -> Iterator[bytes]:
    """The old rows without their header, some megabytes at a time."""
    rest = b""
    skip = begin
    for block in _plain_blocks(job, old):
        rest += block[skip:] if skip < len(block) else b""
        skip = max(0, skip - len(block))
        ends = csvs.row_ends(rest)
        if ends:
            yield rest[: ends[-1]]
            rest = rest[ends[-1] :]
    if rest:
        yield rest
