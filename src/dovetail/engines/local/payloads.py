"""How do payloads pass through the driver unopened? Small ones as bytes, large ones as descriptors of memory."""

from __future__ import annotations

import os
import resource
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.control.events import BatchesDone, Failure
from dovetail.control.segments import Segment
from dovetail.control.writing import Piece
from dovetail.engines.local.agreed import (
    IN_FILE,
    INLINE,
    NO_MEMORY_FILES,
    NO_OUTPUT,
    SHARED,
    SPILL,
    SPOOL,
    WRITTEN,
    reading_of_file,
)
from dovetail.engines.local.children import Sent
from dovetail.engines.local.payload import (
    INLINE_LIMIT,
    Packed,
    extent,
    inline,
    lengths,
    pack,
    pack_split,
    split,
    unpack,
)
from dovetail.engines.local.pool import Pool, Reading
from dovetail.engines.local.refs import SPILLED, InFile, Inline, Shared, Spilled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from dovetail.control.commands import RunBatches
    from dovetail.control.splits import Split
    from dovetail.engines.keys import Keys
    from dovetail.engines.local.children import Child, Rank
    from dovetail.engines.local.frames import Frame
    from dovetail.engines.local.frames import Piece as Chunk
    from dovetail.engines.local.refs import End

MOST_OPEN = 8
"""Payloads of which the run's reader may still hold items when the next one is opened."""


class Payloads:
    """Knows every payload of large size by its owner, and tells owners when theirs are free again."""

    def __init__(self, spill: Path, limit_bytes: int, numbers: Iterator[int]) -> None:
        self._spill = str(spill)
        self._limit = limit_bytes
        self._numbers = numbers
        self._descriptors = 0
        self._most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
        self._live = 0
        """Bytes in shared memory that are not freed: written by workers."""
        self._own_live = 0
        """The same, written by the driver's own thread."""
        self._freed = Ends()
        self._own_freed = Ends()
        self._used: set[tuple[int, int]] = set()
        """Process and buffer of every payload that workers wrote and somebody still needs."""
        self._orphans: dict[tuple[int, int], int] = {}
        """The same of processes that are gone -> our descriptor."""
        self._pool: Pool | None = None
        self._pooling = Lock()
        self._loading = Lock()
        self.unreadable = False
        """Whether there ever was an item that could not be read here."""
        self._open: deque[tuple[Reading, Any]] = deque()
        self._last_split: tuple[int, list[Any]] = (0, [])

    # --- to workers

    def send(self, child: Child, command: RunBatches) -> None:
        """Queues the message for every rank of the worker."""
        refs: list[Any] = []
        told: list[tuple[int, tuple[int, ...], Any]] = []
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
                if type(ref) is Inline:
                    body.append(ref.data)
                    told.append((INLINE, ref.sizes, len(ref.data)))
                elif type(ref) is InFile:
                    told.append((IN_FILE, ref.sizes, (ref.path, ref.offset)))
                else:
                    fds.append(ref.fd)
                    told.append((SHARED, ref.sizes, None))
            parts.append((number, start, stop))
        sent = Sent(command.parts, refs, command.batch_size, len(child.ranks))
        flags = (SPOOL if command.spool else 0) | self._flags()
        if child.simple and child.sent:
            child.turns += 1
            sent.turn = child.turns
        child.sent[command.message] = sent
        for rank in child.ranks:
            mine = flags | (NO_OUTPUT if rank.rank else 0)
            how = (command.batch_size, command.cut, mine)
            head = ("run", command.message, command.hosted, *how, told, parts, sent.turn)
            rank.channel.put(head, body, fds)

    def _flags(self) -> int:
        full = SPILL if self._live + self._own_live > self._limit else 0
        return full | (NO_MEMORY_FILES if self._descriptors > self._most_descriptors else 0)

    # --- from workers

    def received(self, rank: Rank, frame: Frame) -> BatchesDone | None:
        """The end of a message, once all ranks have told it."""
        _, message, seconds, failures, peak, stages, outs, kept, closed = frame.head
        child = rank.child
        self.closed(rank, closed)
        segments = self._segments(rank, outs, frame)
        sent = child.sent.get(message)
        if sent is None:
            return None
        for number in kept:
            ref = sent.payloads[number]
            if type(ref) is Shared:
                ref.kept = True
        sent.peak = max(sent.peak, peak)
        sent.ranks_left -= 1
        if rank is child.ranks[0]:
            sent.report = (segments, seconds, failures, stages)
        else:
            sent.failures += failures
        if sent.ranks_left:
            return None
        del child.sent[message]
        segments, seconds, failures, stages = sent.report
        if sent.failures and len(child.ranks) > 1:
            # what one rank could not do counts as not done, whatever the others made of it
            items, size = sum(stop - start for _, start, stop in sent.parts), sent.batch_size
            first = min(sent.failures, key=lambda failure: failure[0])
            segments, failures = [], [(at, min(at + size, items), *first[2:6]) for at in range(0, items, size)]
        told = [Failure(*failure) for failure in failures] if failures else []
        return BatchesDone(child.number, message, segments, seconds, told, sent.peak, stages)

    def closed(self, rank: Rank, buffers: Iterable[int]) -> None:
        """Buffers that a process has given back."""
        for buffer in buffers:
            self._close(rank.fds.pop(buffer, None))

    def _segments(self, rank: Rank, outs: Any, frame: Frame) -> list[Segment]:
        found = []
        numbers = self._numbers
        at = fds = 0
        node = rank.child.node
        for items, size, kind, sizes, place, first in outs:
            if kind == INLINE:
                ref: Any = Inline(bytes(frame.body[at : at + place]), sizes)
                at += place
                found.append(Segment(next(numbers), items, size, node, ref, first))
                continue
            if kind == IN_FILE:
                found.append(Segment(next(numbers), items, size, "", InFile(place[0], place[1], sizes), first))
                continue
            if kind == WRITTEN:
                found.append(Segment(next(numbers), items, size, "", Piece(*place)))
                continue
            buffer, has_fd = place
            fd = -1
            if has_fd:
                fd = frame.descriptors[fds]
                fds += 1
                self._descriptors += 1
            if buffer < 0:
                ref = Spilled(fd, sizes, self._freed)
            else:
                if has_fd:
                    self._close(rank.fds.get(buffer))
                    rank.fds[buffer] = fd
                self._live += size
                self._used.add((rank.number, buffer))
                ref = Shared(rank.fds[buffer], sizes, size, rank.number, buffer, self._freed)
            found.append(Segment(next(numbers), items, size, node, ref, first))
        return found

    def freed(self, ranks: Mapping[int, Rank]) -> list[tuple[int, list[int], list[int]]]:
        """Whose payloads nobody needs any more: the process, those it can use again, and those it must not."""
        if self._own_freed and self._pool is not None and self._pooling.acquire(blocking=False):
            try:
                self._free_own(self._pool)
            finally:
                self._pooling.release()
        found: dict[int, tuple[list[int], list[int]]] = {}
        for owner, buffer, kept, size in self._freed.take():
            if owner == SPILLED:
                self._descriptors -= 1
                continue
            self._live -= size
            self._used.discard((owner, buffer))
            rank = ranks.get(owner)
            if rank is None or rank.gone:
                self._close(self._orphans.pop((owner, buffer), None))
                continue
            unused, discarded = found.setdefault(owner, ([], []))
            (discarded if kept else unused).append(buffer)
            if kept:
                self._close(rank.fds.pop(buffer, None))
        return [(owner, *both) for owner, both in found.items()]

    def gone(self, rank: Rank) -> None:
        """A process ended. What it wrote and others still need stays until they have read it."""
        for buffer, fd in rank.fds.items():
            if (rank.number, buffer) in self._used:
                self._orphans[rank.number, buffer] = fd
            else:
                self._close(fd)
        rank.fds.clear()

    def _close(self, fd: int | None) -> None:
        if fd is not None:
            os.close(fd)
            self._descriptors -= 1

    # --- the driver's own

    def store(self, keys: Keys, items: list[Any]) -> Segment:
        """Items from the driver as a payload. One thread at a time."""
        return self._stored(pack(keys, items))

    def store_split(self, keys: range, split: Split) -> Segment:
        """A piece of the source that workers read by themselves. One thread at a time."""
        segment = self._stored(pack_split(keys, split))
        segment.first = (keys.start,)
        return segment

    def _stored(self, packed: Packed) -> Segment:
        number = next(self._numbers)
        sizes = lengths(packed)
        if packed.size <= INLINE_LIMIT:
            return Segment(number, packed.items, packed.size, "", Inline(bytes(inline(packed)), sizes))
        with self._pooling:
            pool = self._pool = self._pool or Pool(self._limit // 4, self._spill)
            self._free_own(pool)
            placed = pool.put(packed, spill=bool(self._flags() & SPILL))
            if placed.spilled:
                return Segment(number, packed.items, placed.size, "", Spilled(placed.fd, sizes, self._own_freed))
            self._own_live += placed.size
        ref = Shared(placed.fd, sizes, placed.size, 0, placed.buffer, self._own_freed)
        return Segment(number, packed.items, placed.size, "", ref)

    def adopt(self, items: int, sizes: tuple[int, ...], data: bytes | memoryview) -> Segment:
        """A payload that was written elsewhere, unopened. One thread at a time."""
        if len(data) <= INLINE_LIMIT:
            return Segment(next(self._numbers), items, sum(sizes), "", Inline(bytes(data), sizes))
        stream, buffers = split(memoryview(data), sizes)
        return self._stored(Packed(items, [stream], buffers))  # type: ignore[list-item]

    def raw(self, segment: Segment) -> bytes:
        """The bytes of a payload, as `adopt` takes them. From any thread."""
        ref: Any = segment.ref
        if type(ref) is Inline:
            data: bytes = ref.data
            return data
        if type(ref) is not InFile:
            return _all_of(ref.fd, extent(ref.sizes), 0)
        fd = os.open(ref.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _all_of(fd, extent(ref.sizes), ref.offset)
        finally:
            os.close(fd)

    def _free_own(self, pool: Pool) -> None:
        for owner, buffer, kept, size in self._own_freed.take():
            if owner != SPILLED:
                self._own_live -= size
                (pool.discard if kept else pool.free)(buffer)
        pool.closed()  # of our own descriptors nobody else has one

    def load(self, segment: Segment) -> tuple[Keys, list[Any]]:
        """The keys and items of a payload; those that cannot be read are Unreadable. From any thread."""
        keys, items = self._load(segment)
        return (keys, items) if type(items) is list else (keys, self._read(segment.id, items))

    def _read(self, number: int, split: Any) -> list[Any]:
        """The rows of a split; the last one is kept, because one item after another is asked for."""
        last = self._last_split
        if last[0] != number:
            last = self._last_split = (number, split.read())
        return last[1]

    def _load(self, segment: Segment) -> tuple[Keys, Any]:
        ref: Any = segment.ref
        if type(ref) is Inline:
            if len(ref.sizes) == 1:
                return self._unpacked(ref.data, ())
            return self._unpacked(*split(memoryview(bytearray(ref.data)), ref.sizes))
        with self._loading:
            return self._map(ref)

    # --- what outlives the driver

    def keepsake(self, segment: Segment) -> list[Any] | None:
        """A payload of the spool as plain data, so that another driver can read it; None: it is gone with this one."""
        ref: Any = segment.ref
        if type(ref) is not InFile:
            return None
        name = os.path.basename(ref.path)  # noqa: PTH119
        return [name, ref.offset, list(ref.sizes), segment.items, segment.size_bytes, list(segment.first or ())]

    def from_keepsake(self, kept: list[Any]) -> Segment | None:
        """The inverse; None: the bytes are not there any more."""
        name, offset, sizes, items, size, first = kept
        path = os.path.join(self._spill, name)  # noqa: PTH118 - as workers do it
        try:
            there = os.stat(path).st_size >= offset + extent(sizes)  # noqa: PTH116
        except OSError:
            there = False
        ref = InFile(path, offset, tuple(sizes))
        return Segment(next(self._numbers), items, size, "", ref, tuple(first)) if there else None

    def _unpacked(self, stream: Any, buffers: Any) -> tuple[Keys, Any]:
        try:
            return unpack(stream, buffers)
        except MemoryError:
            raise
        except Exception:  # whatever the classes of the items do
            from dovetail.engines.local.recover import recover

            self.unreadable = True
            return recover(stream, buffers)

    def _map(self, ref: Any) -> tuple[Keys, Any]:
        self._close_readings()
        if type(ref) is InFile:
            reading = reading_of_file(ref.path, ref.offset, ref.sizes)
        else:
            reading = Reading(ref.fd, ref.sizes)
        self._open.append((reading, ref))
        return self._unpacked(reading.stream, reading.buffers)

    def _close_readings(self) -> None:
        """Those whose items the user has let go of; of the oldest it is assumed that they are kept for good."""
        still: deque[tuple[Reading, Any]] = deque()
        while self._open:
            reading, ref = self._open.popleft()
            if reading.close():
                continue
            still.append((reading, ref))
        while len(still) > MOST_OPEN:
            _, ref = still.popleft()
            if type(ref) is Shared:
                ref.kept = True
        self._open = still

    def let_go(self) -> None:
        """Nothing more will be loaded: a mapping goes with the last item that the reader keeps of it."""
        with self._loading:
            self._close_readings()
            self._open.clear()

    def close(self) -> None:
        """What was delivered can still be read: its memory goes with the last who holds it."""
        with self._loading:
            self._close_readings()
        self.freed({})
        self._freed.then(self._end_late)
        with self._pooling:
            pool = self._pool
            if pool is not None:
                self._free_own(pool)
                pool.keep_only_used()
                self._own_freed.then(lambda end: pool.discard(end[1]))

    def _end_late(self, end: End) -> None:
        """After the engine's end nobody writes again."""
        fd = self._orphans.pop(end[:2], None)
        if fd is not None:
            os.close(fd)


def _all_of(fd: int, size: int, offset: int) -> bytes:
    found = os.pread(fd, size, offset)
    while len(found) < size:
        more = os.pread(fd, size - len(found), offset + len(found))
        if not more:
            raise EOFError(f"a payload of {size} bytes has only {len(found)}")
        found += more
    return found


class Ends:
    """The ends of payloads, in whichever thread they come, until somebody looks; at last, who acts on them at once."""

    def __init__(self) -> None:
        self._ends: deque[End] = deque()
        self._act: Callable[[End], None] | None = None

    def append(self, end: End, /) -> None:
        if self._act is None:
            self._ends.append(end)
        else:
            self._act(end)

    def __bool__(self) -> bool:
        return bool(self._ends)

    def take(self) -> Iterator[End]:
        for _ in range(len(self._ends)):
            yield self._ends.popleft()

    def then(self, act: Callable[[End], None]) -> None:
        self._act = act
        while self._ends:
            act(self._ends.popleft())
