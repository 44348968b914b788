"""Shared-memory buffers for large payloads: a pool for the writer, mapped or copied views for readers.

Buffers are memfds that are passed as descriptors: they have no names, need no cleanup and disappear with the last
descriptor or mapping. Fresh pages are most of the cost (10 MB: 6 ms, against 0.4 ms into existing pages), so a producer
keeps its buffers and reuses them when they have no readers.

Nothing here can end in SIGBUS: pages are created by `pwritev`, which returns an error when memory is short, and only
existing pages are written through a mapping.

A mapping costs nothing until it is written to; then every page is a fault and a copy, four times the cost of one copy
into existing memory. Which of the two a function does is sampled from the page tables.
"""

from __future__ import annotations

import mmap
import os
import sys
from array import array
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.engines.local.payload_codec import layout_bytes, layout_chunks, part_lengths, split_layout
from dovetail.engines.local.standard_descriptors import open_standard_descriptors
from dovetail.machine.private_files import make_private_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer

    from dovetail.engines.local.payload_codec import PackedPayload

MAX_IDLE_BUFFERS = 32
"""Maximum number of idle buffers."""
MAX_PARTS_PER_WRITE = 1024
"""Maximum number of parts of one pwritev (IOV_MAX)."""
MADV_POPULATE_WRITE = 23
"""Linux 5.14; the `mmap` module does not define it."""
# before Python 3.13 a mapping keeps a duplicate of its descriptor
_NO_DUPLICATE: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class PlacedPayload:
    """A payload in shared memory or in a file."""

    __slots__ = ("buffer", "fd", "fresh", "lengths", "size", "spilled")

    def __init__(self, buffer: int, fd: int, lengths: tuple[int, ...], spilled: bool, fresh: bool) -> None:
        self.buffer = buffer
        """Number of the buffer in its pool; stays the same when the buffer is reused. Spilled payloads are never
        reused."""
        self.fd = fd
        """Descriptor. In memory: owned by the pool, leave it open. Spilled: owned by the caller, which closes it after
        sending."""
        self.lengths = lengths
        """Lengths that `MappedPayload` needs besides the descriptor."""
        self.size = layout_bytes(lengths)
        self.spilled = spilled
        self.fresh = fresh
        """Whether this descriptor has not been sent before."""


class BufferPool:
    """Buffers of one producer. Thread: one at a time."""

    __slots__ = ("_closed", "_idle", "_last_number", "_limit_bytes", "_spill_dir", "_used")

    def __init__(self, limit_bytes: int, spill_dir: str | os.PathLike[str]) -> None:
        self._limit_bytes = limit_bytes
        self._spill_dir = os.fspath(spill_dir)
        self._last_number = 0
        self._closed: list[int] = []
        self._used: dict[int, _Buffer] = {}
        self._idle: dict[int, _Buffer] = {}
        """Idle buffers by number, the longest idle first."""

    @property
    def idle_bytes(self) -> int:
        return sum(buffer.filled for buffer in self._idle.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of payloads that were neither freed nor discarded."""
        return sum(buffer.filled for buffer in self._used.values())

    def put(self, packed: PackedPayload, spill: bool = False) -> PlacedPayload:
        """Copy a payload into memory, or into a file if requested or if memory is short. Raises OSError if both
        fail."""
        parts = layout_chunks(packed)
        layout = part_lengths(packed)
        buffer = None if spill else self._write(parts, layout_bytes(layout))
        if buffer is not None:
            fresh, buffer.sent = not buffer.sent, True
            return PlacedPayload(buffer.number, buffer.fd, layout, spilled=False, fresh=fresh)
        fd = _write_spill_file(self._spill_dir, parts)
        self._last_number += 1
        return PlacedPayload(self._last_number, fd, layout, spilled=True, fresh=True)

    def free(self, buffer: int) -> None:
        """Mark a buffer without readers as reusable. Once per `put`; ignored for spilled payloads."""
        freed = self._used.pop(buffer, None)
        if freed is None:
            return
        self._idle[buffer] = freed
        self._trim_idle(MAX_IDLE_BUFFERS, self._limit_bytes)

    def discard(self, buffer: int) -> None:
        """Give up a buffer because a reader keeps a view of it. It is never reused."""
        discarded = self._used.pop(buffer, None)
        if discarded is not None:
            discarded.close()

    def drop_idle(self) -> None:
        """Release all idle buffers; nothing more will be put."""
        self._trim_idle(0, 0)

    def close(self) -> None:
        """Close all buffers. Payloads that were sent stay readable through the descriptors of their readers."""
        for buffer in (*self._idle.values(), *self._used.values()):
            buffer.close()
        self._idle.clear()
        self._used.clear()

    def _write(self, parts: list[ReadableBuffer], size: int) -> _Buffer | None:
        """Write into the best idle buffer or a new one. None if memory is short; idle buffers are then released,
        too."""
        buffer = None
        try:
            buffer = self._take_best_idle(size) or self._new(size)
            buffer.write(parts, size)
        except BaseException as error:
            if buffer is not None:
                buffer.close()
                self._closed.append(buffer.number)  # readers must close their descriptors of it
            if not isinstance(error, OSError):
                raise
            self._trim_idle(0, 0)
            return None
        self._used[buffer.number] = buffer
        return buffer

    def _trim_idle(self, buffers: int, size_bytes: int) -> None:
        while self._idle and (len(self._idle) > buffers or self.idle_bytes > size_bytes):
            number = next(iter(self._idle))
            self._idle.pop(number).close()
            self._closed.append(number)

    def take_closed(self) -> list[int]:
        """Buffers that were released since the last call: readers can close their descriptors."""
        found, self._closed = self._closed, []
        return found

    def _take_best_idle(self, size: int) -> _Buffer | None:
        """The smallest idle buffer whose pages suffice; none that is more than twice as large."""
        fitting = [buffer for buffer in self._idle.values() if size <= buffer.capacity <= 2 * size]
        best = min(fitting, key=lambda buffer: (buffer.filled < size, buffer.capacity), default=None)
        return None if best is None else self._idle.pop(best.number)

    def _new(self, size: int) -> _Buffer:
        self._last_number += 1
        return _Buffer(self._last_number, size)


class _Buffer:
    """A memfd. It is mapped at its second use, because many are used only once."""

    __slots__ = ("_is_populated", "_memory", "_view", "capacity", "fd", "filled", "number", "sent")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.sent = False
        self.capacity = _capacity_for(size)
        self.filled = 0
        """Bytes whose pages exist. The rest up to the capacity costs nothing until it is written."""
        self._memory: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._is_populated = False
        """Whether the mapping contains all existing pages."""
        open_standard_descriptors()
        self.fd = os.memfd_create("dovetail", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.capacity)
        except OSError:
            os.close(self.fd)
            raise

    def write(self, parts: list[ReadableBuffer], size: int) -> None:
        if size <= self.filled and self._ensure_mapped():
            _copy_parts(parts, self._view)
        else:
            write_all(self.fd, parts)
        if size > self.filled:
            self.filled = min(self.capacity, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._is_populated = False

    def _ensure_mapped(self) -> bool:
        """Map the buffer if needed. Whether all existing pages can be written through the mapping."""
        try:
            if self._memory is None:
                self._memory = mmap.mmap(self.fd, self.capacity, **_NO_DUPLICATE)
                self._view = memoryview(self._memory)
            if not self._is_populated:
                self._is_populated = True
                self._memory.madvise(MADV_POPULATE_WRITE, 0, self.filled)  # half the cost of a fault per page
        except OSError:  # an older kernel, or no address space for a mapping
            pass
        return self._memory is not None

    def close(self) -> None:
        self._view.release()
        if self._memory is not None:
            self._memory.close()
        os.close(self.fd)


class MappedPayload:
    """A payload as its reader sees it: mapped copy-on-write, so that writes in place are private.

    The caller keeps ownership of the descriptor and may close it at once. Before Python 3.13 the mapping keeps a
    duplicate: a process needs one descriptor for each payload that it reads.
    """

    __slots__ = ("_memory", "_view", "buffers", "stream")

    def __init__(self, fd: int, lengths: Sequence[int], offset: int = 0) -> None:
        """`offset`: start in the file, a multiple of the page size."""
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        size = layout_bytes(lengths)
        self._memory = mmap.mmap(fd, size, mmap.MAP_PRIVATE, prot, offset=offset, **_NO_DUPLICATE)
        self._view = memoryview(self._memory)
        self.stream, self.buffers = split_layout(self._view, lengths)

    @property
    def pages(self) -> int:
        return -(-len(self._memory) // mmap.PAGESIZE)

    @property
    def address(self) -> int:
        """Address of the mapping."""
        import ctypes  # late: rarely needed

        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> bool:
        """Unmap the payload. False: a view still exists; the buffer must be discarded, not freed.

        The memory is then unmapped with that view. Drop the loaded items first, and any exception whose traceback holds
        them.
        """
        for view in (self.stream, *self.buffers, self._view):
            try:
                view.release()
            except BufferError:
                return False
        try:
            self._memory.close()
        except BufferError:
            return False
        return True


def _capacity_for(size: int) -> int:
    """At most a quarter more than `size`, so that the next, slightly larger payload fits."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


def _copy_parts(parts: list[ReadableBuffer], memory: memoryview) -> None:
    at = 0
    for part in parts:
        end = at + memoryview(part).nbytes
        memory[at:end] = part
        at = end


def write_all(fd: int, parts: list[ReadableBuffer]) -> None:
    """Write all parts from offset 0, however little each call writes."""
    at = 0
    for start in range(0, len(parts), MAX_PARTS_PER_WRITE):
        views = [memoryview(part) for part in parts[start : start + MAX_PARTS_PER_WRITE]]
        waiting = [view for view in views if len(view)]
        while waiting:
            written = os.pwritev(fd, waiting, at)
            at += written
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]


def _write_spill_file(folder: str, parts: list[ReadableBuffer]) -> int:
    """Descriptor of an unnamed file that contains the parts."""
    fd = _unnamed_file(folder)
    try:
        write_all(fd, parts)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unnamed_file(folder: str) -> int:
    make_private_folder(folder)
    open_standard_descriptors()
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # a file system without O_TMPFILE
        from tempfile import mkstemp

        fd, path = mkstemp(prefix="dovetail-", dir=folder)
        os.unlink(path)  # noqa: PTH108
        return fd


PROBE_EVERY_MESSAGES = 16
"""Messages between two samples, after the first few."""
WRITTEN_SHARE = 0.5
"""A function that modifies at least this share of the pages writes in place."""
MAX_WARM_BUFFERS = 8
"""Maximum number of buffers kept for reuse."""
PAGE_PRESENT, PAGE_OF_FILE = 1 << 63, 1 << 61
_WARM_LOCK = Lock()


class PayloadReader:
    """Opens the payloads of one worker, mapped or copied.

    A function that writes in place pays a page fault per page of a private mapping; a copy into warm memory is cheaper.
    For arrays of 10 MB that are changed in place, copying gives 0.44 instead of 0.30 GB/s and takes 44 instead of 59 ms
    of CPU per array (`benchmarks/payload.py`, in_place); functions that only read are as fast as without the samples.
    """

    def __init__(self) -> None:
        self._copy_next = False
        self._messages = 0
        self._warm: list[mmap.mmap] = []
        self._pagemap = -2

    def read(self, fd: int, lengths: Sequence[int], offset: int = 0) -> MappedPayload | CopiedPayload:
        if self._copy_next:
            return CopiedPayload(fd, lengths, offset, self._warm)
        return MappedPayload(fd, lengths, offset)

    def probe_writes(self, readings: Sequence[MappedPayload | CopiedPayload]) -> None:
        """Sample, after a message and before its payloads are closed, whether the function writes into them."""
        self._messages += 1
        if self._messages > 4 and self._messages % PROBE_EVERY_MESSAGES:
            return
        if self._copy_next:
            self._copy_next = (
                self._messages % (PROBE_EVERY_MESSAGES * 16) != 0
            )  # map the next payloads, to sample again
            return
        mapped = [reading for reading in readings if isinstance(reading, MappedPayload)]
        pages = sum(reading.pages for reading in mapped)
        self._copy_next = bool(pages) and sum(map(self._written_pages, mapped)) >= WRITTEN_SHARE * pages

    def _written_pages(self, reading: MappedPayload) -> int:
        """Number of pages of a private mapping that were copied; 0 if unknown."""
        if self._pagemap == -2:
            try:
                self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._pagemap = -1
        if self._pagemap < 0:
            return 0
        entries = array("Q")
        try:
            entries.frombytes(os.pread(self._pagemap, 8 * reading.pages, reading.address // mmap.PAGESIZE * 8))
        except (OSError, ValueError):
            return 0
        return sum(1 for entry in entries if entry & PAGE_PRESENT and not entry & PAGE_OF_FILE)


class CopiedPayload:
    """A payload in private memory. Views of it may be kept."""

    __slots__ = ("_memory", "_view", "_warm", "buffers", "stream")

    def __init__(self, fd: int, lengths: Sequence[int], offset: int, warm: list[mmap.mmap]) -> None:
        size = layout_bytes(lengths)
        self._warm = warm
        self._memory = self._take(size)
        self._view = memoryview(self._memory)[:size]
        done = 0
        while done < size:
            count = os.preadv(fd, [self._view[done:]], offset + done)
            if not count:
                raise EOFError(f"a payload of {size} bytes has only {done}")
            done += count
        self.stream, self.buffers = split_layout(self._view, lengths)

    def _take(self, size: int) -> mmap.mmap:
        with _WARM_LOCK:
            fitting = [memory for memory in self._warm if size <= len(memory) <= 2 * size]
            if fitting:
                best = min(fitting, key=len)
                self._warm.remove(best)
                return best
        # private: a process that user code forks gets its own copy
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def close(self) -> bool:
        """Always True: the shared buffer is not involved. The memory is reused unless a view of it exists."""
        try:
            for view in (self.stream, *self.buffers, self._view):
                view.release()
            self._memory.resize(len(self._memory))  # raises while views exist
        except (BufferError, OSError, SystemError):
            return True
        with _WARM_LOCK:
            if len(self._warm) < MAX_WARM_BUFFERS:
                self._warm.append(self._memory)
                return True
        self._memory.close()
        return True
