"""Payloads that the driver tracks: references to them, their owners, and the return of freed buffers."""

from __future__ import annotations

import contextlib
import os
import resource
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.control.events import BatchesDone, CallFailure
from dovetail.control.payload import PartFileRange, Segment
from dovetail.engines.local.buffer_pool import BufferPool, MappedPayload
from dovetail.engines.local.payload_codec import (
    MAX_INLINE_BYTES,
    PackedPayload,
    join_layout,
    layout_bytes,
    pack_items,
    pack_split,
    part_lengths,
    split_layout,
    unpack_payload,
)
from dovetail.engines.local.protocol import (
    FLAG_NO_MEMFD,
    FLAG_NO_OUTPUT,
    FLAG_SPILL,
    FLAG_SPOOL,
    KIND_FILE,
    KIND_INLINE,
    KIND_SHARED,
    KIND_WRITTEN,
    map_file,
)
from dovetail.engines.local.worker_state import InFlightMessage, fail_all_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from dovetail.control.commands import RunBatches
    from dovetail.control.payload import Split
    from dovetail.engines.item_keys import Keys
    from dovetail.engines.local.protocol import Chunk, Frame
    from dovetail.engines.local.worker_state import LocalWorker, RankProcess

    Sizes = tuple[int, ...]

FreedBuffer = tuple[int, int, bool, int]
"""Owner, buffer, kept and size of a payload in shared memory."""
SPILLED_OWNER = -1
"""Owner of payloads in files."""


class FreedSink(Protocol):
    """Called when a payload ends, in any thread."""

    def append(self, end: FreedBuffer, /) -> None: ...


class InlineRef:
    """Payload in the driver's memory, still packed."""

    __slots__ = ("data", "sizes")

    def __init__(self, data: bytes, sizes: Sizes) -> None:
        self.data = data
        self.sizes = sizes


class SharedRef:
    """Payload in shared memory that a process wrote. Reports its end, so that the writer can reuse it."""

    __slots__ = ("_freed_sink", "buffer", "fd", "has_views", "owner", "size", "sizes")

    def __init__(self, fd: int, sizes: Sizes, size: int, owner: int, buffer: int, freed: FreedSink) -> None:
        self.fd = fd
        self.sizes = sizes
        self.size = size
        self.owner = owner
        """The process that wrote it; 0: the driver."""
        self.buffer = buffer
        self.has_views = False
        """Whether a reader keeps a view: it must not be reused."""
        self._freed_sink = freed

    def __del__(self) -> None:
        self._freed_sink.append((self.owner, self.buffer, self.has_views, self.size))


class SpilledRef:
    """Payload in an unnamed file."""

    __slots__ = ("_freed_sink", "fd", "sizes")

    def __init__(self, fd: int, sizes: Sizes, freed: FreedSink) -> None:
        self.fd = fd
        self.sizes = sizes
        self._freed_sink = freed

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self._freed_sink.append((SPILLED_OWNER, 0, False, 0))


class SpoolRef:
    """Payload at an offset of a spool part file."""

    __slots__ = ("offset", "path", "sizes")

    def __init__(self, path: str, offset: int, sizes: Sizes) -> None:
        self.path = path
        self.offset = offset
        self.sizes = sizes


MAX_OPEN_MAPPINGS = 8
"""Payloads whose items the run's reader may still hold when the next one is opened."""


class PayloadTable:
    """Tracks every large payload by owner, and notifies owners of the buffers that can be reused."""

    def __init__(self, spill: Path, limit_bytes: int, numbers: Iterator[int]) -> None:
        self._spill = str(spill)
        self._limit = limit_bytes
        self._numbers = numbers
        self._descriptors = 0
        self._max_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
        self._live_bytes = 0
        """Bytes in shared memory that are not freed, written by workers."""
        self._own_live_bytes = 0
        """Bytes in shared memory that are not freed, written by the driver."""
        self._freed = FreedQueue()
        self._own_freed = FreedQueue()
        self._buffers_in_use: set[tuple[int, int]] = set()
        """Process and buffer of every payload in use that a worker wrote."""
        self._orphans: dict[tuple[int, int], int] = {}
        """The same for processes that have exited -> our descriptor."""
        self._pool: BufferPool | None = None
        self._pool_lock = Lock()
        self._load_lock = Lock()
        self.unreadable = False
        """Whether any item could not be read here."""
        self._open_mappings: deque[tuple[MappedPayload, Any]] = deque()
        self._last_split: tuple[int, list[Any]] = (0, [])

    # --- to workers

    def send(self, child: LocalWorker, command: RunBatches) -> None:
        """Queue the message for every rank of the worker."""
        refs: list[Any] = []
        payloads: list[tuple[int, tuple[int, ...], Any]] = []
        body: list[Chunk] = []
        fds: list[int] = []
        numbers: dict[int, int] = {}
        parts = []
        for segment, start, stop in command.parts:
            number = numbers.get(segment.id)
            if number is None:
                number = numbers[segment.id] = len(refs)
                ref: Any = segment.ref
                refs.append(ref)
                if type(ref) is InlineRef:
                    body.append(ref.data)
                    payloads.append((KIND_INLINE, ref.sizes, len(ref.data)))
                elif type(ref) is SpoolRef:
                    payloads.append((KIND_FILE, ref.sizes, (ref.path, ref.offset)))
                else:
                    fds.append(ref.fd)
                    payloads.append((KIND_SHARED, ref.sizes, None))
            parts.append((number, start, stop))
        sent = InFlightMessage(command.parts, refs, command.batch_size, len(child.ranks))
        flags = (FLAG_SPOOL if command.spool else 0) | self._flags()
        if child.is_single_slot and child.in_flight:
            child.prefetched += 1
            sent.prefetch_number = child.prefetched
        child.in_flight[command.message] = sent
        for rank in child.ranks:
            mine = flags | (FLAG_NO_OUTPUT if rank.rank else 0)
            how = (command.batch_size, command.segment_items, mine)
            last = (sent.prefetch_number, command.epoch_starts)
            head = ("run", command.message, command.hosted, *how, payloads, parts, *last)
            rank.channel.put(head, body, fds)

    def _flags(self) -> int:
        full = FLAG_SPILL if self._live_bytes + self._own_live_bytes > self._limit else 0
        return full | (FLAG_NO_MEMFD if self._descriptors > self._max_descriptors else 0)

    # --- from workers

    def on_done(self, rank: RankProcess, frame: Frame) -> BatchesDone | None:
        """The BatchesDone of a message, after all ranks reported it."""
        _, message, seconds, failures, peak, stages, cpu_s, outs, kept, closed, epoch_segments = frame.head
        child = rank.child
        self.on_buffers_closed(rank, closed)
        segments = self._segments(rank, outs, frame)
        sent = child.in_flight.get(message)
        if sent is None:
            return None
        for number in kept:
            ref = sent.payloads[number]
            if type(ref) is SharedRef:
                ref.has_views = True
        sent.peak = max(sent.peak, peak)
        sent.cpu_s += cpu_s
        sent.ranks_left -= 1
        if rank is child.ranks[0]:
            sent.report = (segments, seconds, failures, stages, epoch_segments)
        else:
            sent.failures += failures
        if sent.ranks_left:
            return None
        del child.in_flight[message]
        segments, seconds, failures, stages, epoch_segments = sent.report
        failed = [CallFailure(*failure) for failure in sent.failures or failures]
        if sent.failures:
            items = sum(stop - start for _, start, stop in sent.parts)
            segments, failed = [], fail_all_batches(failed, items, sent.batch_size)
            epoch_segments = None
        measured = (seconds, failed, sent.peak, stages, sent.cpu_s)
        return BatchesDone(child.number, message, segments, *measured, epoch_segments)

    def on_buffers_closed(self, rank: RankProcess, buffers: Iterable[int]) -> None:
        """A process released these buffers."""
        for buffer in buffers:
            self._close(rank.fds.pop(buffer, None))

    def _segments(self, rank: RankProcess, outs: Any, frame: Frame) -> list[Segment]:
        found = []
        numbers = self._numbers
        at = fds = 0
        node = rank.child.node
        for items, size, kind, sizes, place, first in outs:
            if kind == KIND_INLINE:
                ref: Any = InlineRef(bytes(frame.body[at : at + place]), sizes)
                at += place
                found.append(Segment(next(numbers), items, size, node, ref, first))
                continue
            if kind == KIND_FILE:
                found.append(Segment(next(numbers), items, size, "", SpoolRef(place[0], place[1], sizes), first))
                continue
            if kind == KIND_WRITTEN:
                found.append(Segment(next(numbers), items, size, "", PartFileRange(*place)))
                continue
            buffer, has_fd = place
            fd = -1
            if has_fd:
                fd = frame.descriptors[fds]
                fds += 1
                self._descriptors += 1
            if buffer < 0:
                ref = SpilledRef(fd, sizes, self._freed)
            else:
                if has_fd:
                    self._close(rank.fds.get(buffer))
                    rank.fds[buffer] = fd
                self._live_bytes += size
                self._buffers_in_use.add((rank.number, buffer))
                ref = SharedRef(rank.fds[buffer], sizes, size, rank.number, buffer, self._freed)
            found.append(Segment(next(numbers), items, size, node, ref, first))
        return found

    def take_freed(self, ranks: Mapping[int, RankProcess]) -> list[tuple[int, list[int], list[int]]]:
        """Payloads that ended: process, buffers it can reuse, buffers it must give up."""
        if self._own_freed and self._pool is not None and self._pool_lock.acquire(blocking=False):
            try:
                self._free_own(self._pool)
            finally:
                self._pool_lock.release()
        found: dict[int, tuple[list[int], list[int]]] = {}
        for owner, buffer, kept, size in self._freed.take():
            if owner == SPILLED_OWNER:
                self._descriptors -= 1
                continue
            self._live_bytes -= size
            self._buffers_in_use.discard((owner, buffer))
            rank = ranks.get(owner)
            if rank is None or rank.has_exited:
                self._close(self._orphans.pop((owner, buffer), None))
                continue
            unused, discarded = found.setdefault(owner, ([], []))
            (discarded if kept else unused).append(buffer)
            if kept:
                self._close(rank.fds.pop(buffer, None))
        return [(owner, *both) for owner, both in found.items()]

    def on_process_gone(self, rank: RankProcess) -> None:
        """A process exited. Payloads that others still need stay until they are read."""
        for buffer, fd in rank.fds.items():
            if (rank.number, buffer) in self._buffers_in_use:
                self._orphans[rank.number, buffer] = fd
            else:
                self._close(fd)
        rank.fds.clear()

    def _close(self, fd: int | None) -> None:
        if fd is not None:
            os.close(fd)
            self._descriptors -= 1

    # --- payloads of the driver

    def store(self, keys: Keys, items: list[Any]) -> Segment:
        """Store items of the driver as a payload. Thread: one at a time."""
        return self._store_packed(pack_items(keys, items))

    def store_split(self, keys: range, split: Split) -> Segment:
        """Store a split of the source, which workers read. Thread: one at a time."""
        segment = self._store_packed(pack_split(keys, split))
        segment.first = (keys.start,)
        return segment

    def _store_packed(self, packed: PackedPayload) -> Segment:
        number = next(self._numbers)
        sizes = part_lengths(packed)
        if packed.size <= MAX_INLINE_BYTES:
            return Segment(number, packed.items, packed.size, "", InlineRef(bytes(join_layout(packed)), sizes))
        with self._pool_lock:
            pool = self._pool = self._pool or self.new_pool()
            self._free_own(pool)
            placed = pool.put(packed, spill=bool(self._flags() & FLAG_SPILL))
            if placed.spilled:
                return Segment(number, packed.items, placed.size, "", SpilledRef(placed.fd, sizes, self._own_freed))
            self._own_live_bytes += placed.size
        ref = SharedRef(placed.fd, sizes, placed.size, 0, placed.buffer, self._own_freed)
        return Segment(number, packed.items, placed.size, "", ref)

    def new_pool(self) -> BufferPool:
        """A pool of this process."""
        return BufferPool(self._limit // 4, self._spill)

    def adopt(self, items: int, sizes: tuple[int, ...], data: bytes | memoryview) -> Segment:
        """Store a payload that was packed elsewhere. Thread: one at a time."""
        if len(data) <= MAX_INLINE_BYTES:
            return Segment(next(self._numbers), items, sum(sizes), "", InlineRef(bytes(data), sizes))
        stream, buffers = split_layout(memoryview(data), sizes)
        return self._store_packed(PackedPayload(items, [stream], buffers))  # type: ignore[list-item]

    def read_raw(self, segment: Segment) -> bytes:
        """The bytes of a payload, as `adopt` takes them. Thread: any."""
        ref: Any = segment.ref
        if type(ref) is InlineRef:
            data: bytes = ref.data
            return data
        if type(ref) is not SpoolRef:
            return _read_exactly(ref.fd, layout_bytes(ref.sizes), 0)
        fd = os.open(ref.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_exactly(fd, layout_bytes(ref.sizes), ref.offset)
        finally:
            os.close(fd)

    def _free_own(self, pool: BufferPool) -> None:
        for owner, buffer, kept, size in self._own_freed.take():
            if owner != SPILLED_OWNER:
                self._own_live_bytes -= size
                (pool.discard if kept else pool.free)(buffer)
        pool.take_closed()  # our own descriptor has no other user

    def load(self, segment: Segment) -> tuple[Keys, list[Any]]:
        """The keys and items of a payload; unreadable items are UnreadableItem. Thread: any."""
        keys, items = self._load(segment)
        return (keys, items) if type(items) is list else (keys, self._read_split(segment.id, items))

    def _read_split(self, number: int, split: Any) -> list[Any]:
        """The rows of a split; the last split is cached, because items are requested one by one."""
        last = self._last_split
        if last[0] != number:
            last = self._last_split = (number, split.read())
        return last[1]

    def _load(self, segment: Segment) -> tuple[Keys, Any]:
        ref: Any = segment.ref
        if type(ref) is InlineRef:
            if len(ref.sizes) == 1:
                return self._unpack(ref.data, ())
            return self._unpack(*split_layout(memoryview(bytearray(ref.data)), ref.sizes))
        with self._load_lock:
            return self._load_mapped(ref)

    # --- payloads that outlive the driver

    def spool_record(self, segment: Segment) -> list[Any] | None:
        """A payload in the spool as plain data, readable by another driver; None: it ends with this driver."""
        ref: Any = segment.ref
        if type(ref) is not SpoolRef:
            return None
        name = os.path.basename(ref.path)  # noqa: PTH119
        return [name, ref.offset, list(ref.sizes), segment.items, segment.size_bytes, list(segment.first or ())]

    def from_spool_record(self, kept: list[Any]) -> Segment | None:
        """The inverse of `spool_record`; None: the bytes no longer exist."""
        name, offset, sizes, items, size, first = kept
        path = os.path.join(self._spill, name)  # noqa: PTH118 - as workers do it
        try:
            there = os.stat(path).st_size >= offset + layout_bytes(sizes)  # noqa: PTH116
        except OSError:
            there = False
        ref = SpoolRef(path, offset, tuple(sizes))
        return Segment(next(self._numbers), items, size, "", ref, tuple(first)) if there else None

    def _unpack(self, stream: Any, buffers: Any) -> tuple[Keys, Any]:
        try:
            return unpack_payload(stream, buffers)
        except MemoryError:
            raise
        except Exception:  # classes of the items can raise anything
            from dovetail.engines.local.payload_recovery import recover_items

            self.unreadable = True
            return recover_items(stream, buffers)

    def _load_mapped(self, ref: Any) -> tuple[Keys, Any]:
        self._close_unused_mappings()
        if type(ref) is SpoolRef:
            reading = map_file(ref.path, ref.offset, ref.sizes)
        else:
            reading = MappedPayload(ref.fd, ref.sizes)
        self._open_mappings.append((reading, ref))
        return self._unpack(reading.stream, reading.buffers)

    def _close_unused_mappings(self) -> None:
        """Close the payloads whose items the user released; the oldest are assumed to be kept permanently."""
        still: deque[tuple[MappedPayload, Any]] = deque()
        while self._open_mappings:
            reading, ref = self._open_mappings.popleft()
            if reading.close():
                continue
            still.append((reading, ref))
        while len(still) > MAX_OPEN_MAPPINGS:
            _, ref = still.popleft()
            if type(ref) is SharedRef:
                ref.has_views = True
        self._open_mappings = still

    def release_mappings(self) -> None:
        """Close all mappings: each ends with the last item that the reader keeps of it."""
        with self._load_lock:
            self._close_unused_mappings()
            self._open_mappings.clear()

    def close(self) -> None:
        """Delivered payloads stay readable: their memory ends with the last reference."""
        with self._load_lock:
            self._close_unused_mappings()
        self.take_freed({})
        self._freed.set_callback(self._close_orphan)
        with self._pool_lock:
            pool = self._pool
            if pool is not None:
                self._free_own(pool)
                pool.drop_idle()
                self._own_freed.set_callback(lambda end: pool.discard(end[1]))

    def _close_orphan(self, end: FreedBuffer) -> None:
        """No writer exists after the engine is closed."""
        fd = self._orphans.pop(end[:2], None)
        if fd is not None:
            os.close(fd)


def _read_exactly(fd: int, size: int, offset: int) -> bytes:
    found = os.pread(fd, size, offset)
    while len(found) < size:
        more = os.pread(fd, size - len(found), offset + len(found))
        if not more:
            raise EOFError(f"a payload of {size} bytes has only {len(found)}")
        found += more
    return found


class FreedQueue:
    """Collects ends of payloads from any thread until they are taken; after close, handles them at once."""

    def __init__(self) -> None:
        self._queue: deque[FreedBuffer] = deque()
        self._callback: Callable[[FreedBuffer], None] | None = None

    def append(self, end: FreedBuffer, /) -> None:
        if self._callback is None:
            self._queue.append(end)
        else:
            self._callback(end)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def take(self) -> Iterator[FreedBuffer]:
        for _ in range(len(self._queue)):
            yield self._queue.popleft()

    def set_callback(self, act: Callable[[FreedBuffer], None]) -> None:
        self._callback = act
        while self._queue:
            act(self._queue.popleft())
