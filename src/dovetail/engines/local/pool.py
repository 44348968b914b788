"""Where do large payloads lie while they travel?

In unnamed memory that is passed on as descriptors: no names, nothing to clean up, gone with the last descriptor or
mapping. Fresh pages are nearly the whole cost (10 MB: 6 ms, against 0.4 ms into pages that are there), so a producer
keeps its buffers and uses them again once nobody reads them.

Nothing here can end in SIGBUS: pages are made by `pwritev`, which fails with an error when memory is short, and only
pages that exist are written through a mapping.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import TYPE_CHECKING, Any

from dovetail.engines.local.payload import extent, lengths, pieces, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer

    from dovetail.engines.local.payload import Packed

IDLE_BUFFERS = 32
"""At most so many buffers are kept without a payload."""
PARTS = 1024
"""IOV_MAX: at most so many parts go into one pwritev."""
MADV_POPULATE_WRITE = 23
"""Linux 5.14; the `mmap` module does not name it."""
# before Python 3.13 a mapping keeps a duplicate of its descriptor as long as it lives
_NO_DUPLICATE: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class Placed:
    """A payload that lies in memory or in a file."""

    __slots__ = ("buffer", "fd", "fresh", "lengths", "size", "spilled")

    def __init__(self, buffer: int, fd: int, lengths: tuple[int, ...], spilled: bool, fresh: bool) -> None:
        self.buffer = buffer
        """The buffer's number in its pool, the same when it is used again. A spilled payload's is never used again."""
        self.fd = fd
        """In memory: the pool's, leave it open. Spilled: the caller's, who closes it once it is sent."""
        self.lengths = lengths
        """What `Reading` needs besides the descriptor."""
        self.size = extent(lengths)
        self.spilled = spilled
        self.fresh = fresh
        """Whether nobody has been sent this descriptor before."""


class Pool:
    """The buffers of one producer. For one thread."""

    __slots__ = ("_closed", "_idle", "_last", "_limit_bytes", "_spill_dir", "_used")

    def __init__(self, limit_bytes: int, spill_dir: str | os.PathLike[str]) -> None:
        self._limit_bytes = limit_bytes
        self._spill_dir = os.fspath(spill_dir)
        self._last = 0
        self._closed: list[int] = []
        self._used: dict[int, _Buffer] = {}
        self._idle: dict[int, _Buffer] = {}
        """By number, the longest idle first."""

    @property
    def idle_bytes(self) -> int:
        return sum(buffer.filled for buffer in self._idle.values())

    @property
    def used_bytes(self) -> int:
        """Memory of payloads that were neither freed nor discarded."""
        return sum(buffer.filled for buffer in self._used.values())

    def put(self, packed: Packed, spill: bool = False) -> Placed:
        """Copies a payload: into memory, or into a file if so wanted or memory is short. OSError if neither can be."""
        parts = pieces(packed)
        layout = lengths(packed)
        buffer = None if spill else self._write(parts, extent(layout))
        if buffer is not None:
            fresh, buffer.sent = not buffer.sent, True
            return Placed(buffer.number, buffer.fd, layout, spilled=False, fresh=fresh)
        fd = _spilled(self._spill_dir, parts)
        self._last += 1
        return Placed(self._last, fd, layout, spilled=True, fresh=True)

    def free(self, buffer: int) -> None:
        """Nobody reads it any more: it may be used again. Once per `put`; a spilled payload's number means nothing."""
        freed = self._used.pop(buffer, None)
        if freed is None:
            return
        self._idle[buffer] = freed
        self._keep_idle(IDLE_BUFFERS, self._limit_bytes)

    def discard(self, buffer: int) -> None:
        """Somebody keeps a view of it: it is theirs now and never used again."""
        discarded = self._used.pop(buffer, None)
        if discarded is not None:
            discarded.close()

    def keep_only_used(self) -> None:
        """Nothing more will be put: what nobody reads is given back."""
        self._keep_idle(0, 0)

    def close(self) -> None:
        """Forgets everything. Payloads that were sent live on with those who have their descriptors."""
        for buffer in (*self._idle.values(), *self._used.values()):
            buffer.close()
        self._idle.clear()
        self._used.clear()

    def _write(self, parts: list[ReadableBuffer], size: int) -> _Buffer | None:
        """Into the best idle buffer, or a new one; None if memory is short: then idle buffers are given back, too."""
        buffer = None
        try:
            buffer = self._fitting(size) or self._new(size)
            buffer.write(parts, size)
        except BaseException as error:
            if buffer is not None:
                buffer.close()
                self._closed.append(buffer.number)  # whoever has its descriptor must let it go
            if not isinstance(error, OSError):
                raise
            self._keep_idle(0, 0)
            return None
        self._used[buffer.number] = buffer
        return buffer

    def _keep_idle(self, buffers: int, size_bytes: int) -> None:
        while self._idle and (len(self._idle) > buffers or self.idle_bytes > size_bytes):
            number = next(iter(self._idle))
            self._idle.pop(number).close()
            self._closed.append(number)

    def closed(self) -> list[int]:
        """Buffers that were given back since it was last asked: whoever keeps their descriptors can close them."""
        found, self._closed = self._closed, []
        return found

    def _fitting(self, size: int) -> _Buffer | None:
        """The idle buffer whose pages suffice, and of those the smallest; none that is over twice too large."""
        fitting = [buffer for buffer in self._idle.values() if size <= buffer.capacity <= 2 * size]
        best = min(fitting, key=lambda buffer: (buffer.filled < size, buffer.capacity), default=None)
        return None if best is None else self._idle.pop(best.number)

    def _new(self, size: int) -> _Buffer:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no unnamed memory")
        self._last += 1
        return _Buffer(self._last, size)


class _Buffer:
    """Unnamed memory. It is mapped when it is used the second time: many are used only once."""

    __slots__ = ("_memory", "_view", "_warm", "capacity", "fd", "filled", "number", "sent")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.sent = False
        self.capacity = _roomy(size)
        self.filled = 0
        """The bytes whose pages exist. The rest up to the capacity costs nothing until it is written."""
        self._memory: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._warm = False
        """Whether the mapping has all pages that exist."""
        self.fd = os.memfd_create("dovetail", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.capacity)
        except OSError:
            os.close(self.fd)
            raise

    def write(self, parts: list[ReadableBuffer], size: int) -> None:
        if size <= self.filled and self._mapped():
            _copy(parts, self._view)
        else:
            _write_all(self.fd, parts)
        if size > self.filled:
            self.filled = min(self.capacity, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._warm = False

    def _mapped(self) -> bool:
        """Whether all existing pages can be written through the mapping, now at the latest."""
        try:
            if self._memory is None:
                self._memory = mmap.mmap(self.fd, self.capacity, **_NO_DUPLICATE)
                self._view = memoryview(self._memory)
            if not self._warm:
                self._warm = True
                self._memory.madvise(MADV_POPULATE_WRITE, 0, self.filled)  # half as dear as a fault per page
        except OSError:  # an older kernel, or no room for a mapping
            pass
        return self._memory is not None

    def close(self) -> None:
        self._view.release()
        if self._memory is not None:
            self._memory.close()
        os.close(self.fd)


class Reading:
    """A payload as its reader sees it: mapped copy-on-write, so that what is written in place is seen by nobody else.

    The descriptor stays the caller's, who may close it at once. Before Python 3.13 the mapping keeps a duplicate of it:
    a process needs one descriptor for each payload that it reads.
    """

    __slots__ = ("_memory", "_whole", "buffers", "stream")

    def __init__(self, fd: int, lengths: Sequence[int], offset: int = 0) -> None:
        """`offset`: where in the file it begins, at a page."""
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        size = extent(lengths)
        self._memory = mmap.mmap(fd, size, mmap.MAP_PRIVATE, prot, offset=offset, **_NO_DUPLICATE)
        self._whole = memoryview(self._memory)
        self.stream, self.buffers = split(self._whole, lengths)

    @property
    def pages(self) -> int:
        return -(-len(self._memory) // mmap.PAGESIZE)

    @property
    def address(self) -> int:
        """Where it is mapped."""
        import ctypes  # late: only asked for now and then

        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> bool:
        """Whether it could be unmapped. If not, somebody keeps a view: its buffer must be discarded, not freed.

        It is then unmapped when that view goes. Drop what was loaded first, and any exception whose traceback holds it.
        """
        for view in (self.stream, *self.buffers, self._whole):
            try:
                view.release()
            except BufferError:
                return False
        try:
            self._memory.close()
        except BufferError:
            return False
        return True


def _roomy(size: int) -> int:
    """At most a quarter more than `size`, so that the next payload, slightly larger, fits too."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


def _copy(parts: list[ReadableBuffer], memory: memoryview) -> None:
    at = 0
    for part in parts:
        end = at + memoryview(part).nbytes
        memory[at:end] = part
        at = end


def _write_all(fd: int, parts: list[ReadableBuffer]) -> None:
    """From the file's first byte on, however little each call writes."""
    at = 0
    for start in range(0, len(parts), PARTS):
        views = [memoryview(part) for part in parts[start : start + PARTS]]
        waiting = [view for view in views if len(view)]
        while waiting:
            written = os.pwritev(fd, waiting, at)
            at += written
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]


def _spilled(folder: str, parts: list[ReadableBuffer]) -> int:
    """The descriptor of a file without a name that holds the parts."""
    fd = _unnamed_file(folder)
    try:
        _write_all(fd, parts)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unnamed_file(folder: str) -> int:
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103  pathlib would be imported for this alone
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError):  # not Linux, or a file system that has no such files
        from tempfile import mkstemp

        fd, path = mkstemp(prefix="dovetail-", dir=folder)
        os.unlink(path)  # noqa: PTH108
        return fd
