"""Results of messages on their way out of a worker: packed into payloads, or written to their destination."""

from __future__ import annotations

import os
import resource
import time
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.control.engine import UnsendableItemError
from dovetail.control.payload import SourceSinkError, UnwritableItemError
from dovetail.engines.item_keys import as_tuple, slice_keys
from dovetail.engines.local.buffer_pool import BufferPool
from dovetail.engines.local.message_input import (
    add_stage_seconds,
    fail_unsendable,
    failure_from_error,
    segment_bounds,
)
from dovetail.engines.local.payload_codec import (
    MAX_INLINE_BYTES,
    PackedPayload,
    Unpicklable,
    join_layout,
    pack_items,
    part_lengths,
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
)
from dovetail.engines.local.standard_descriptors import open_standard_descriptors
from dovetail.engines.result_stream import ResultsNotStoredError, StoredPiece, stored_positions
from dovetail.machine.private_files import make_private_folder, open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dovetail.control.payload import Writer
    from dovetail.engines.item_keys import Keys
    from dovetail.engines.local.buffer_pool import PlacedPayload
    from dovetail.engines.local.message_input import MessageInput
    from dovetail.engines.local.protocol import Chunk
    from dovetail.engines.local.worker_spec import WorkerSpec
    from dovetail.engines.stage_chain import MessageOutcome

PlacedOutput = tuple[list[Any], "list[Chunk]", list[int], list[int]]
"""Descriptions of payloads, inline bodies, descriptors of large payloads, and the descriptors to close after
sending."""
DESCRIPTOR_SHARE = 4
"""A quarter of a worker's descriptors may be for large results of one message."""


class OutgoingPayloads:
    """Descriptions and contents of the output payloads of a message."""

    __slots__ = ("_placed", "body", "descriptions", "descriptors", "epoch_segments", "spilled")

    def __init__(self) -> None:
        self.descriptions: list[Any] = []
        self.body: list[Chunk] = []
        """Inline payloads."""
        self.descriptors: list[int] = []
        """Descriptors of the large payloads."""
        self.spilled: list[int] = []
        """Descriptors to close after sending."""
        self.epoch_segments: list[int] | None = None
        """See `BatchesDone`."""
        self._placed: list[PlacedPayload] = []

    def add(self, output: PlacedOutput, placed: Sequence[PlacedPayload]) -> None:
        outs, body, descriptors, spilled = output
        self.descriptions += outs
        self.body += body
        self.descriptors += descriptors
        self.spilled += spilled
        self._placed += placed

    def undo(self, pool: BufferPool | None) -> None:
        """Discard all output. Bytes appended to files stay there unreferenced."""
        discard_placed(self._placed, pool)
        self.descriptions, self.body, self.descriptors, self.spilled, self._placed = [], [], [], [], []


def discard_placed(placed: Sequence[PlacedPayload], pool: BufferPool | None) -> None:
    for one in placed:
        if one.spilled:
            os.close(one.fd)
        elif pool is not None:
            pool.discard(one.buffer)


class ResultPacker:
    """Packs and writes the results of one worker. Thread: one at a time, under `lock`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.lock = Lock()
        self.pool: BufferPool | None = None
        self.placed_now: list[PlacedPayload] = []
        """Payloads of the last call of `place_or_discard` that are in shared memory."""
        self._spool: tuple[int, str] | None = None
        self._begun_writers: list[Writer] = []
        """Writers whose `begin` was called."""

    @property
    def max_memory_bytes(self) -> int:
        """Memory limit for the large results of one message; what is beyond goes to files."""
        return self._spec.pool_bytes

    def take_closed(self) -> list[int]:
        """Buffers that were released since the last call."""
        return self.pool.take_closed() if self.pool is not None else []

    def close(self) -> None:
        """Close the descriptors of the pool and of the spool file. A worker process leaves this to its exit."""
        with self.lock:
            if self.pool is not None:
                self.pool.close()
            if self._spool is not None:
                os.close(self._spool[0])
            self.pool = self._spool = None

    def place_results(self, results: Sequence[Any], flags: int, outgoing: OutgoingPayloads) -> None:
        """Add results in their order: packed payloads, descriptions of what was written, and what is stored already."""
        for is_packed, group in groupby(results, lambda one: isinstance(one, PackedPayload)):
            if is_packed:
                outgoing.add(self.place_or_discard(list(group), flags), self.placed_now)
                continue
            for one in group:
                if type(one) is not StoredPiece:
                    outgoing.descriptions.append(one)
                elif one.place is not None:
                    outgoing.add(one.place.output, one.place.payloads)

    def pack_results(
        self, outcome: MessageOutcome, opened: MessageInput, batch_size: int, cut: int
    ) -> list[PackedPayload | StoredPiece]:
        """Pack the results; what is stored already stays in its place."""
        while True:
            keys, items = outcome.keys, outcome.items
            try:
                stored = stored_positions(items)
                if len(items) <= cut and not (stored or outcome.failures) and outcome.epoch_starts is None:
                    return [pack_keyed_items(keys, items)] if items else []
                return [
                    items[start]
                    if start in stored
                    else pack_keyed_items(slice_keys(keys, start, stop), items[start:stop])
                    for start, stop in segment_bounds(keys, cut, outcome.failures, outcome.epoch_starts, stored)
                ]
            except Unpicklable as error:
                fail_unsendable(outcome, opened, batch_size, error)
            except MemoryError as error:
                outcome.failures[:] = [failure_from_error(opened.keys, 0, len(opened.items), error)]
                outcome.keys, outcome.items = [], []
                if outcome.epoch_starts is not None:
                    outcome.epoch_starts.keep(())

    def write_results(
        self, writer: Writer, outcome: MessageOutcome, opened: MessageInput, batch_size: int
    ) -> list[Any]:
        """Write results to their destination. Counts as work of the last stage."""
        began = time.perf_counter()
        while outcome.items:
            try:
                written = self._write_segments(writer, outcome)
            except UnwritableItemError as error:
                fail_unsendable(outcome, opened, batch_size, error)
                continue
            add_stage_seconds(outcome, time.perf_counter() - began, stage=-1)
            return written
        return []

    def _write_segments(self, writer: Writer, outcome: MessageOutcome) -> list[Any]:
        """Write the results, each epoch by itself; what is stored already stays in its place."""
        keys, items, starts = outcome.keys, outcome.items, outcome.epoch_starts
        stored = stored_positions(items)
        if starts is None and not stored:
            return [self.write_items(writer, keys, items)]
        written = []
        for start, stop in segment_bounds(keys, len(items), [], starts, stored):
            try:
                written.append(
                    items[start]
                    if start in stored
                    else self.write_items(writer, slice_keys(keys, start, stop), items[start:stop])
                )
            except UnwritableItemError as error:
                error.index += start
                raise
        return written

    def write_items(self, writer: Writer, keys: Keys, items: list[Any]) -> Any:
        if writer not in self._begun_writers:
            open_standard_descriptors()
            writer.begin(self._spec.part_name())
            self._begun_writers.append(writer)
        return (len(items), 0, KIND_WRITTEN, (), tuple(writer.write(keys, items)), None)

    def place_or_discard(self, packed: list[PackedPayload], flags: int) -> PlacedOutput:
        """Like `_place`; discards everything if it fails."""
        self.placed_now.clear()
        try:
            return self._place(packed, flags)
        except BaseException:
            discard_placed(self.placed_now, self.pool)
            raise

    def _place(self, packed: Sequence[PackedPayload], flags: int) -> PlacedOutput:
        """Descriptions of all payloads, inline bodies, descriptors of large payloads, and the descriptors to close
        after sending."""
        outs: list[Any] = []
        body: list[Chunk] = []
        descriptors: list[int] = []
        spilled: list[int] = []
        for one in packed:
            sizes = part_lengths(one)
            if flags & FLAG_SPOOL:
                outs.append((one.items, one.size, KIND_FILE, sizes, self._append_to_spool(one), one.first))
            elif one.size <= MAX_INLINE_BYTES or flags & FLAG_NO_MEMFD:
                piece = join_layout(one)
                body.append(piece)
                outs.append((one.items, one.size, KIND_INLINE, sizes, len(piece), one.first))
            else:
                placed = self._get_pool().put(one, spill=bool(flags & FLAG_SPILL))
                self.placed_now.append(placed)
                if placed.fresh:
                    descriptors.append(placed.fd)
                if placed.spilled:
                    spilled.append(placed.fd)
                buffer = -1 if placed.spilled else placed.buffer
                outs.append((one.items, placed.size, KIND_SHARED, sizes, (buffer, placed.fresh), one.first))
        return outs, body, descriptors, spilled

    def _get_pool(self) -> BufferPool:
        if self.pool is None:
            self.pool = BufferPool(self._spec.pool_bytes, self._spec.spool_folder)
        return self.pool

    def _append_to_spool(self, packed: PackedPayload) -> tuple[str, int]:
        """Append to this worker's part file of the spool: path and offset."""
        try:
            return self._write_to_spool(packed)
        except OSError as error:
            fix = "free disk space or repair the disk"
            raise SourceSinkError(
                "DT381", f"the spool cannot be written: {error.strerror}", fix, self._spec.spool_folder
            ) from None

    def _write_to_spool(self, packed: PackedPayload) -> tuple[str, int]:
        if self._spool is None:
            make_private_folder(self._spec.spool_folder)
            path = os.path.join(self._spec.spool_folder, f"{self._spec.part_name()}.part")  # noqa: PTH118
            open_standard_descriptors()
            self._spool = open_private(path, os.O_WRONLY | os.O_APPEND), path
        fd, path = self._spool
        at = os.fstat(fd).st_size
        at += os.write(fd, b"\0" * (-at % 4096))
        data = memoryview(join_layout(packed))
        while data:
            data = data[os.write(fd, data) :]
        return path, at


class StoredPlace(NamedTuple):
    """Where a `StoredPiece` is."""

    output: PlacedOutput
    payloads: list[PlacedPayload]


class PieceStore:
    """Stores results of the calls of one message while they are running."""

    def __init__(
        self,
        packer: ResultPacker,
        flags: int,
        cut: int,
        writer: Writer | None,
        exit_if_forked: Callable[[], None],
    ) -> None:
        self._packer = packer
        self._exit_if_forked = exit_if_forked
        self._flags = flags
        self._cut = cut
        self._writer = writer
        self._pieces: list[StoredPiece] = []
        self._stored_bytes = 0

    def __call__(self, keys: Keys, items: list[Any]) -> list[StoredPiece]:
        self._exit_if_forked()
        try:
            with self._packer.lock:
                found = list(self._store(keys, items))
        except (UnsendableItemError, MemoryError):  # because of the results
            raise
        except BaseException as error:
            raise ResultsNotStoredError from error
        return found

    def _store(self, keys: Keys, items: list[Any]) -> Iterator[StoredPiece]:
        if self._flags & FLAG_NO_OUTPUT:
            yield StoredPiece(len(items), None)
            return
        if self._writer is not None:
            yield self._add(StoredPlace(([self._packer.write_items(self._writer, keys, items)], [], [], []), []))
            return
        for start in range(0, len(items), self._cut):
            stop = start + self._cut
            packed = pack_keyed_items(slice_keys(keys, start, stop), items[start:stop])
            self._stored_bytes += packed.size
            output = self._packer.place_or_discard([packed], self._current_flags())
            yield self._add(StoredPlace(output, list(self._packer.placed_now)))

    def _add(self, place: StoredPlace) -> StoredPiece:
        piece = StoredPiece(place.output[0][0][0], place)
        self._pieces.append(piece)
        return piece

    def _current_flags(self) -> int:
        """The driver sees nothing of these payloads before the message has finished: limit them here."""
        flags = self._flags
        if self._stored_bytes > self._packer.max_memory_bytes:
            flags |= FLAG_SPILL
        if len(self._pieces) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTOR_SHARE:
            flags |= FLAG_NO_MEMFD
        return flags

    def discard_unused(self, items: Sequence[Any]) -> None:
        """Discard pieces that are not among the results: those of calls that failed."""
        if not self._pieces:
            return
        used = {id(item) for item in items}
        with self._packer.lock:
            for piece in self._pieces:
                if id(piece) not in used:
                    discard_placed(piece.place.payloads, self._packer.pool)
        self._pieces = [piece for piece in self._pieces if id(piece) in used]


def pack_keyed_items(keys: Keys, items: list[Any]) -> PackedPayload:
    found = pack_items(keys, items)
    found.first = as_tuple(keys[0])
    return found
