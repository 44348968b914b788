"""Final JSONL and CSV files made from pieces: copying, sharding, compression, append."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
from array import array
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.data.writers import encoders
from dovetail.data.writers.piece_merge import sort_by_first_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dovetail.control.payload import PartFileRange
    from dovetail.data.writers.piece_merge import MergeJob, OldFile, OpenPiece
    from dovetail.data.writers.worker_parts import PartReader

COPY_BLOCK_BYTES = 1 << 20
COPY_UNSUPPORTED_ERRNOS = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
"""Errors after which the kernel cannot copy between these two files and a plain copy is used."""


class OutputFile(Protocol):
    size: int
    """Bytes so far, uncompressed."""

    def write(self, data: bytes) -> None: ...

    def copy(self, reader: PartReader, part: str, offset: int, length: int) -> None: ...

    def close(self) -> None:
        """Sync to disk."""
        ...

    def abandon(self) -> None: ...


class PlainOutputFile:
    """Copy adjacent ranges of one part file at once."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._next: tuple[PartReader, str, int, int] | None = None
        self.size = 0

    def write(self, data: bytes) -> None:
        self._flush()
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]
        self.size += len(data)

    def copy(self, reader: PartReader, part: str, offset: int, length: int) -> None:
        self.size += length
        if self._next is not None:
            _, its_part, its_offset, its_length = self._next
            if its_part == part and its_offset + its_length == offset:
                self._next = (reader, part, its_offset, its_length + length)
                return
            self._flush()
        self._next = (reader, part, offset, length)

    def _flush(self) -> None:
        if self._next is None:
            return
        reader, part, offset, length = self._next
        self._next = None
        source = reader.fd(part)
        while length:
            copied = copy_range(source, offset, length, self._fd)
            if not copied:
                raise reader.truncated_error(part)
            offset += copied
            length -= copied

    def close(self) -> None:
        self._flush()
        os.fsync(self._fd)
        self.abandon()

    def abandon(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def copy_range(source: int, offset: int, length: int, target: int) -> int:
    """Copy to the current position of the target; returns the bytes copied, at least one unless the source is
    shorter."""
    if length > 4096:
        try:
            return os.copy_file_range(source, target, min(length, 1 << 30), offset)
        except OSError as error:
            if error.errno not in COPY_UNSUPPORTED_ERRNOS:
                raise
    data = os.pread(source, min(length, COPY_BLOCK_BYTES), offset)
    left = memoryview(data)
    while left:
        left = left[os.write(target, left) :]
    return len(data)


class CompressedOutputFile:
    """gzip or zstd."""

    def __init__(self, path: Path, packing: str) -> None:
        self._file = path.open("xb")
        self._compression = packing
        self._compressor: Any = None
        self.size = 0

    def copy_compressed(self, path: Path, length: int) -> None:
        """Compressed bytes, before any others: compressed files can be concatenated."""
        with path.open("rb") as source:
            while length and (data := source.read(min(length, COPY_BLOCK_BYTES))):
                self._file.write(data)
                length -= len(data)

    def write(self, data: bytes) -> None:
        self._begin().write(data)
        self.size += len(data)

    def _begin(self) -> Any:
        if self._compressor is None and self._compression == "gz":
            self._compressor = gzip.GzipFile("", "wb", 6, self._file, mtime=0)
        elif self._compressor is None:
            import zstandard

            self._compressor = zstandard.ZstdCompressor(level=3).stream_writer(self._file, closefd=False)
        return self._compressor

    def copy(self, reader: PartReader, part: str, offset: int, length: int) -> None:
        while length:
            data = reader.read(part, offset, min(length, COPY_BLOCK_BYTES))
            self.write(data)
            offset += len(data)
            length -= len(data)

    def close(self) -> None:
        self._begin().close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # buffered data may not fit on the disk either
            self._file.close()


def open_output(path: Path, packing: str | None) -> OutputFile:
    return CompressedOutputFile(path, packing) if packing else PlainOutputFile(path)


def line_ends(data: bytes) -> array[int]:
    ends = array("q")
    begin = 0
    while (end := data.find(b"\n", begin)) >= 0:
        begin = end + 1
        ends.append(begin)
    return ends


class RowChunk:
    """Complete rows for a file: a range of a part file, or bytes."""

    __slots__ = ("_begin", "_ends", "_job", "data", "length", "offset", "part")

    def __init__(self, job: MergeJob, part: str, offset: int, length: int, data: bytes | None = None) -> None:
        self._job = job
        self.part = part
        self.offset = offset
        self.length = length
        self.data = data
        self._ends: Any = None
        self._begin = 0

    def fitting_bytes(self, room: int) -> int:
        """Bytes of the complete rows that fit in `room`; if not even one fits, minus the bytes of that row."""
        if self._ends is None:
            if self.data is None:
                self.data = self._job.reader.read(self.part, self.offset, self.length)
            self._ends = row_ends(self._job, self.data)
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

    def write_to(self, target: OutputFile, length: int) -> None:
        """The first `length` bytes of the rest."""
        if self.data is None:
            target.copy(self._job.reader, self.part, self.offset, length)
        else:
            target.write(self.data[self._begin : self._begin + length])
        self._begin += length
        self.offset += length
        self.length -= length


def row_ends(job: MergeJob, data: bytes) -> array[int]:
    return line_ends(data) if job.kind == "jsonl" else encoders.csv_row_ends(data)


class ShardWriter:
    """The files of a sink, one after another: the next one starts when a row does not fit."""

    def __init__(self, job: MergeJob, header: bytes) -> None:
        self._job = job
        self._header = header
        self._limit = job.shard_bytes
        self._file: OutputFile | None = None
        self._fresh = True
        self.paths: list[Path] = []

    def open(self, *, header: bool = True) -> OutputFile:
        path = self._job.path(len(self.paths))
        self.paths.append(path)
        self._file = open_output(path, self._job.packing)
        self._fresh = True
        if header and self._header:
            self._file.write(self._header)
        return self._file

    def add(self, chunk: RowChunk) -> None:
        while chunk.length:
            target = self._file or self.open()
            length = chunk.length
            if self._limit is not None and target.size + length > self._limit:
                length = chunk.fitting_bytes(self._limit - target.size)
                if length < 0 and not self._fresh:
                    self._close()
                    continue
                length = abs(length)  # a row larger than a shard gets its own
            chunk.write_to(target, length)
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


def write_line_files(job: MergeJob) -> list[Path]:
    """Build the files and sync them; they are not renamed yet."""
    whole = _link_single_part(job)
    if whole is not None:
        return [whole]
    columns = _header_columns(job)
    shelf = ShardWriter(job, _header_bytes(job, columns))
    try:
        if job.old is not None:
            _write_old_rows(job, shelf, columns)
        for chunk in _chunks(job, columns):
            shelf.add(chunk)
        return shelf.close()
    finally:
        shelf.abandon()


def _link_single_part(job: MergeJob) -> Path | None:
    """A single part file that has exactly the right contents: link it instead of copying."""
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
        return None  # not every file system supports links
    os.fsync(fd)
    return path


def _header_columns(job: MergeJob) -> list[str]:
    """Columns of the header: the requested ones, or those of all pieces and of the old file."""
    if job.kind == "jsonl":
        return []
    columns: dict[str, None] = {}
    if job.old is not None:
        columns.update(dict.fromkeys(read_old_header(job, job.old)[0]))
    if job.columns is not None:
        return list(columns | dict.fromkeys(job.columns))
    seen: set[tuple[str, ...]] = set()
    order: Sequence[PartFileRange] = sort_by_first_key(job.pieces) if job.ordered else job.pieces
    for piece in order:
        names = tuple(piece.meta)
        if names not in seen:
            seen.add(names)
            columns.update(dict.fromkeys(names))
    return list(columns)


def _header_bytes(job: MergeJob, columns: list[str]) -> bytes:
    return encoders.encode_csv([columns], encoders.CSV_DELIMITERS[job.kind]) if columns else b""


def _chunks(job: MergeJob, columns: list[str]) -> Iterator[RowChunk]:
    for opened, start, stop in job.spans():
        piece = opened.piece
        begin, end = (0, piece.length) if stop - start == piece.items else _byte_range(job, opened, start, stop)
        if job.kind == "jsonl" or piece.meta == columns:
            yield RowChunk(job, piece.part, piece.offset + begin, end - begin)
            continue
        data = job.reader.read(piece.part, piece.offset + begin, end - begin)
        data = encoders.reorder_csv_columns(data, piece.meta, columns, encoders.CSV_DELIMITERS[job.kind])
        yield RowChunk(job, piece.part, 0, len(data), data)


def _byte_range(job: MergeJob, opened: OpenPiece, start: int, stop: int) -> tuple[int, int]:
    piece = opened.piece
    if opened.cache is None:
        opened.cache = row_ends(job, job.reader.read(piece.part, piece.offset, piece.length))
    return (opened.cache[start - 1] if start else 0), opened.cache[stop - 1]


# --- existing file


def _write_old_rows(job: MergeJob, shelf: ShardWriter, columns: list[str]) -> None:
    old = job.old
    assert old is not None
    if not old.size:
        return
    header, begin, ended = read_old_header(job, old)
    if job.kind != "jsonl" and header != columns:
        target = shelf.open()
        for data in _old_row_blocks(job, old, begin):
            target.write(encoders.reorder_csv_columns(data, header, columns, encoders.CSV_DELIMITERS[job.kind]))
        return
    target = shelf.open(header=False)
    if isinstance(target, CompressedOutputFile):
        target.copy_compressed(old.path, old.size)
    else:
        for data in _old_blocks(old):
            target.write(data)
    if not ended:
        target.write(b"\n")


def _old_blocks(old: OldFile) -> Iterator[bytes]:
    left = old.size
    with old.path.open("rb") as source:
        while left and (data := source.read(min(left, COPY_BLOCK_BYTES))):
            left -= len(data)
            yield data


def _decompressed_old_blocks(job: MergeJob, old: OldFile) -> Iterator[bytes]:
    if job.packing is None:
        yield from _old_blocks(old)
        return
    with open_decompressed(old.path, job.packing) as source:
        while data := source.read(COPY_BLOCK_BYTES):
            yield data


def open_decompressed(path: Path, packing: str) -> Any:
    if packing == "gz":
        import gzip

        return gzip.open(path, "rb")
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)


def read_old_header(job: MergeJob, old: OldFile) -> tuple[list[str], int, bool]:
    """Columns of the old file, the start of its rows, and whether it ends with a newline."""
    if job.kind == "jsonl" and job.packing is None:
        with old.path.open("rb") as source:
            source.seek(max(0, old.size - 1))
            return [], 0, source.read(1) == b"\n"
    data = b""
    last = b""
    for block in _decompressed_old_blocks(job, old):
        if not encoders.csv_row_ends(data):
            data += block
        last = block[-1:] or last
    if job.kind == "jsonl" or not data:
        return [], 0, last == b"\n"
    ends = encoders.csv_row_ends(data)
    begin = ends[0] if ends else len(data)
    bom = len(b"\xef\xbb\xbf") if data.startswith(b"\xef\xbb\xbf") else 0
    return encoders.parse_csv(data[bom:begin], encoders.CSV_DELIMITERS[job.kind])[0], begin, last == b"\n"


def _old_row_blocks(job: MergeJob, old: OldFile, begin: int) -> Iterator[bytes]:
    """The old rows without their header, some megabytes at a time."""
    rest = b""
    skip = begin
    for block in _decompressed_old_blocks(job, old):
        rest += block[skip:] if skip < len(block) else b""
        skip = max(0, skip - len(block))
        ends = encoders.csv_row_ends(rest)
        if ends:
            yield rest[: ends[-1]]
            rest = rest[ends[-1] :]
    if rest:
        yield rest
