"""How are bytes put into the files of a sink: copied by the kernel if they are plain, packed if not?"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.data.writing.parts import PartReader

BLOCK = 1 << 20
NOT_HERE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
"""The kernel does not copy between these two files; we can."""


class Output(Protocol):
    size: int
    """Bytes so far, as they were given."""

    def write(self, data: bytes) -> None: ...

    def copy(self, reader: PartReader, part: str, offset: int, length: int) -> None: ...

    def close(self) -> None:
        """Now it is on the disk."""
        ...

    def abandon(self) -> None: ...


class PlainOutput:
    """Stretches of one part file that follow each other are copied at once."""

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
            copied = copy_some(source, offset, length, self._fd)
            if not copied:
                raise reader.short(part)
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


def copy_some(source: int, offset: int, length: int, target: int) -> int:
    """Bytes that were copied, at least one unless the source is shorter; to where the target stands."""
    if length > 4096:
        try:
            return os.copy_file_range(source, target, min(length, 1 << 30), offset)
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise
    data = os.pread(source, min(length, BLOCK), offset)
    left = memoryview(data)
    while left:
        left = left[os.write(target, left) :]
    return len(data)


class PackedOutput:
    """gzip or zstd."""

    def __init__(self, path: Path, packing: str) -> None:
        self._file = path.open("xb")
        self._packing = packing
        self._packed: Any = None
        self.size = 0

    def raw(self, path: Path, length: int) -> None:
        """Bytes that are packed already, before any others: packed files may be put one after another."""
        with path.open("rb") as source:
            while length and (data := source.read(min(length, BLOCK))):
                self._file.write(data)
                length -= len(data)

    def write(self, data: bytes) -> None:
        self._begin().write(data)
        self.size += len(data)

    def _begin(self) -> Any:
        if self._packed is None and self._packing == "gz":
            self._packed = gzip.GzipFile("", "wb", 6, self._file, mtime=0)
        elif self._packed is None:
            import zstandard

            self._packed = zstandard.ZstdCompressor(level=3).stream_writer(self._file, closefd=False)
        return self._packed

    def copy(self, reader: PartReader, part: str, offset: int, length: int) -> None:
        while length:
            data = reader.read(part, offset, min(length, BLOCK))
            self.write(data)
            offset += len(data)
            length -= len(data)

    def close(self) -> None:
        self._begin().close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # what it still holds may not fit on the disk either
            self._file.close()


def output(path: Path, packing: str | None) -> Output:
    return PackedOutput(path, packing) if packing else PlainOutput(path)
