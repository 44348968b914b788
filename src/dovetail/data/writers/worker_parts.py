"""Part files: append in workers, sync in the driver, read back when the sink is finished."""

from __future__ import annotations

import os
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import PartFileRange, UnwritableItemError
from dovetail.data.io_errors import results_missing, write_failed
from dovetail.data.writers.piece_merge import encode_keys

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dovetail.control.payload import SourceSinkError

MAX_OPEN_FILES = 100


class PartWriter:
    """Base class of the writers of all file sinks, which implement `encode`."""

    def __init__(self, folder: Path, *, ordered: bool) -> None:
        self._folder = folder
        self._ordered = ordered
        self._part = ""
        self._fd = -1
        self._at = 0
        self._lock: Any = None

    def encode(self, items: list[Any]) -> tuple[bytes, Any]:
        """The bytes of these rows, and metadata for the end of the run. Raises UnwritableItemError."""
        raise NotImplementedError

    def begin(self, part: str) -> None:
        self._part = part
        self._lock = Lock()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._folder / part, flags, 0o666)
            self._at = os.fstat(self._fd).st_size
        except OSError as error:
            raise self._write_error(error) from None

    def write(self, keys: Any, items: list[Any]) -> PartFileRange:
        if not self._ordered:
            data, meta = self.encode(items)
            return PartFileRange(self._part, self._append(data), len(data), len(items), [], [], None, meta)
        first, last, encoded, order = encode_keys(keys)
        if order is not None:
            items = [items[at] for at in order]
        try:
            data, meta = self.encode(items)
        except UnwritableItemError as error:
            index = error.index if order is None or error.index < 0 else order[error.index]
            raise UnwritableItemError(index, error.error_text) from None
        offset = self._append(data + encoded if encoded else data)
        where = [offset + len(data), len(encoded)] if encoded else None
        return PartFileRange(self._part, offset, len(data), len(items), first, last, where, meta)

    def _append(self, data: bytes) -> int:
        """Append the bytes and return their location. A partial write on a full disk is truncated."""
        with self._lock:
            offset = self._at
            try:
                written = os.write(self._fd, data)
                while written < len(data):
                    written += os.write(self._fd, memoryview(data)[written:])
            except OSError as error:
                self._truncate(offset)
                raise self._write_error(error) from None
            self._at = offset + len(data)
            return offset

    def _truncate(self, offset: int) -> None:
        try:
            os.ftruncate(self._fd, offset)
        except OSError:
            self._at = os.fstat(self._fd).st_size  # the partial bytes belong to no piece

    def end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_error(self, error: OSError) -> SourceSinkError:
        return write_failed(error, str(self._folder / self._part))


class PartReader:
    """Reads part files at the end; limits the number of open files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()

    def path(self, part: str) -> Path:
        return self._folder / part

    def fd(self, part: str) -> int:
        """Open until MOST_OPEN others were requested."""
        if part in self._open:
            self._open.move_to_end(part)
            return self._open[part]
        if len(self._open) >= MAX_OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        try:
            found = os.open(self._folder / part, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise write_failed(error, str(self._folder / part)) from None
        self._open[part] = found
        return found

    def read(self, part: str, offset: int, length: int) -> bytes:
        data = os.pread(self.fd(part), length, offset)
        while len(data) < length:
            more = os.pread(self.fd(part), length - len(data), offset + len(data))
            if not more:
                raise self.truncated_error(part)
            data += more
        return data

    def read_keys(self, piece: PartFileRange) -> bytes:
        """The encoded keys of a piece."""
        assert piece.keys is not None
        return self.read(piece.part, *piece.keys)

    def truncated_error(self, part: str) -> SourceSinkError:
        return results_missing(str(self._folder / part))

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class PartSyncer:
    """Makes part files durable, in the driver."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        self._known: set[str] = set()

    def sync(self, parts: Iterable[str]) -> None:
        """Detects removed part files, which a worker that has them open can still write to."""
        path = self._folder
        try:
            fresh = False
            for part in parts:
                path = self._folder / part
                fd = self._fd(part, path)
                os.fsync(fd)
                there, held = path.stat(), os.fstat(fd)
                if (there.st_ino, there.st_dev) != (held.st_ino, held.st_dev):
                    raise results_missing(str(path))
                fresh = fresh or part not in self._known
                self._known.add(part)
            if fresh:
                path = self._folder
                sync_folder(self._folder)
        except OSError as error:
            raise write_failed(error, str(path)) from None

    def _fd(self, part: str, path: Path) -> int:
        if part not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[part] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(part)
        return self._open[part]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def which_pieces_exist(folder: Path, pieces: Iterable[PartFileRange]) -> list[bool]:
    """For each piece, whether its part file is long enough to contain it."""
    sizes: dict[str, int] = {}
    found = []
    for piece in pieces:
        size = sizes.get(piece.part)
        if size is None:
            try:
                size = (folder / piece.part).stat().st_size
            except OSError:
                size = -1
            sizes[piece.part] = size
        keys_end = sum(piece.keys) if piece.keys else 0
        found.append(max(piece.offset + piece.length, keys_end) <= size)
    return found
