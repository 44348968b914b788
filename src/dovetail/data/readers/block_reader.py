"""Bytes of a file, local or remote, plain, gzip or zstd, read in large blocks."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.control.payload import SourceSinkError
from dovetail.data.io_errors import archive_damaged, cannot_read, missing_source_package, source_changed
from dovetail.data.readers.file_discovery import (
    check_local_unchanged,
    check_remote_unchanged,
    file_system,
    is_remote,
    local_stamp,
)

if TYPE_CHECKING:
    from dovetail.data.readers.file_discovery import FileRef

BLOCK_BYTES = 1 << 20
GZIP_SUFFIXES, ZSTD_SUFFIXES = (".gz",), (".zst", ".zstd")
_COMPRESSED_READ_BYTES = 8 << 10
"""Compressed bytes per read: they may expand by a factor of several thousand."""


class ByteReader(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _open_gzip(raw: Any) -> ByteReader:
    import gzip  # late: most files are not compressed

    return gzip.GzipFile(fileobj=raw)


def is_compressed(path: str) -> bool:
    return path.lower().endswith(GZIP_SUFFIXES + ZSTD_SUFFIXES)


class BlockReader:
    """The decompressed bytes of one file. Memory use does not grow with the file."""

    def __init__(self, ref: FileRef) -> None:
        self.ref = ref
        self.offset = 0
        """Decompressed bytes before the next block."""
        self.remote = is_remote(ref.path)
        self.compressed = is_compressed(ref.path)
        if self.compressed and ref.path.lower().endswith(ZSTD_SUFFIXES):
            _import_zstandard(ref.path)
        self._open()

    def _open(self) -> None:
        path = self.ref.path
        try:
            if self.remote:
                check_remote_unchanged(path, self.ref.stamp)
                fs, name = file_system(path)
                self._raw: Any = fs.open(name, "rb", block_size=4 * BLOCK_BYTES)
            else:
                self._raw = Path(path).open("rb", buffering=0)  # noqa: SIM115 - see close
        except Exception as error:
            raise cannot_read(path, error) from None
        self.offset = 0
        self._decompressed: ByteReader = self._raw
        if self.compressed:
            lower = path.lower()
            self._decompressed = _open_gzip(self._raw) if lower.endswith(GZIP_SUFFIXES) else ZstdReader(self._raw, path)

    def read(self) -> bytes:
        """The next block; empty at the end."""
        path = self.ref.path
        try:
            block = self._decompressed.read(BLOCK_BYTES)
        except Exception as error:
            if not isinstance(error, zlib.error | EOFError) and type(error).__name__ != "BadGzipFile":
                raise cannot_read(path, error) from None
            self._check_unchanged()  # a file truncated while it was read is reported as such
            raise archive_damaged(path, error) from None
        self._check_unchanged()
        self.offset += len(block)
        if not (block or self.compressed or self.remote) and self.offset != self.ref.size:
            raise source_changed(path, f"it had {self.ref.size} bytes and ends after {self.offset}")
        return block

    def seek(self, offset: int) -> None:
        """Seek: the next block begins there. A compressed file can only be read forwards."""
        try:
            if not self.compressed:
                self._raw.seek(offset)
                self.offset = offset
                return
        except Exception as error:
            raise cannot_read(self.ref.path, error) from None
        if offset < self.offset:
            self.close()
            self._open()
        while self.offset < offset:
            wanted = min(BLOCK_BYTES, offset - self.offset)
            try:
                block = self._decompressed.read(wanted)
            except Exception as error:
                raise archive_damaged(self.ref.path, error) from None
            if not block:
                raise source_changed(self.ref.path, f"it ends after {self.offset} decompressed bytes, and had more")
            self.offset += len(block)

    def raw_bytes_read(self) -> int:
        """Bytes of the file that were read."""
        with suppress(Exception):
            return int(self._raw.tell())
        return 0

    def close(self) -> None:
        with suppress(Exception):
            self._raw.close()

    def __del__(self) -> None:
        self.close()  # opening it failed

    def _check_unchanged(self) -> None:
        """Check that an open file was not written to or truncated; replaced files are checked when splits are
        opened."""
        if not self.remote and local_stamp(os.fstat(self._raw.fileno())) != self.ref.stamp:
            check_local_unchanged(self.ref.path, self.ref.stamp)
            raise source_changed(self.ref.path, "it was written to")


class ZstdReader:
    """Reads concatenated zstd frames; unlike the package's own reader it detects a truncated file."""

    def __init__(self, raw: ByteReader, path: str) -> None:
        self._raw = raw
        self._path = path
        self._make = _import_zstandard(path).ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._rest = b""
        self._out = b""

    def read(self, size: int, /) -> bytes:
        pieces, have = [self._out], len(self._out)
        while have < size:
            piece = self._rest or self._raw.read(_COMPRESSED_READ_BYTES)
            self._rest = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                break
            pieces.append(self._unpack(piece))
            have += len(pieces[-1])
        whole = b"".join(pieces)
        self._out = whole[size:]
        return whole[:size]

    def _unpack(self, piece: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._make()
        try:
            found: bytes = self._frame.decompress(piece)
        except SourceSinkError:
            raise
        except Exception as error:  # from the package
            raise EOFError(str(error)) from None
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return found


def _import_zstandard(path: str) -> Any:
    try:
        import zstandard
    except ImportError:
        raise missing_source_package("zstandard", "files", path) from None
    return zstandard
