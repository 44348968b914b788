"""Execution of one message in a worker: open its payloads, run the stages, pack or write the results, report."""

from __future__ import annotations

import inspect
import os
import pickle
import resource
import time
from functools import partial
from itertools import accumulate
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn

from dovetail.control.engine import UnreadableItem
from dovetail.control.events import VERDICT_SKIP, CallFailure
from dovetail.control.payload import BLANK_ROW, BadRow, SourceSinkError, UnwritableItemError
from dovetail.engines.barrier import BarrierRows, output_chunk_items
from dovetail.engines.epoch_starts import EpochStarts
from dovetail.engines.exception_summary import summarize_exception
from dovetail.engines.item_keys import as_tuple, join_keys, slice_keys
from dovetail.engines.local import message_input
from dovetail.engines.local.buffer_pool import BufferPool, PayloadReader
from dovetail.engines.local.call_body import open_value, pack_value
from dovetail.engines.local.message_input import (
    UNPICKLABLE_TEXT,
    UNWRITABLE_TEXT,
    MessageInput,
    fail_unsendable,
    failure_as_tuple,
    failure_from_error,
    join_outcomes,
    readable_spans,
    segment_bounds,
    shift_breadcrumb,
)
from dovetail.engines.local.payload_codec import (
    MAX_INLINE_BYTES,
    Unpicklable,
    join_layout,
    layout_bytes,
    pack_items,
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
    close_descriptors,
    map_file,
    pickle_value,
    send_frame,
)
from dovetail.engines.local.received_calls import ReceivedCalls
from dovetail.engines.local.standard_descriptors import open_standard_descriptors
from dovetail.engines.stage_chain import MessageOutcome
from dovetail.machine.private_files import make_private_folder, open_private

if TYPE_CHECKING:
    import socket
    from asyncio import AbstractEventLoop
    from collections.abc import Awaitable, Callable, Sequence

    from dovetail.control.engine import UnsendableItemError
    from dovetail.control.payload import Writer
    from dovetail.engines.item_keys import Keys
    from dovetail.engines.local.buffer_pool import CopiedPayload, MappedPayload, PlacedPayload
    from dovetail.engines.local.call_body import OpenedValue
    from dovetail.engines.local.payload_codec import PackedPayload
    from dovetail.engines.local.peer_links import PeerLinks
    from dovetail.engines.local.protocol import Chunk, Frame
    from dovetail.engines.local.worker_spec import WorkerSpec
    from dovetail.engines.unit_executor import UnitExecutor
    from dovetail.engines.worker_context import BreadcrumbCell


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

    def add(
        self, placed: tuple[list[Any], list[Chunk], list[int], list[int]], placing: Sequence[PlacedPayload]
    ) -> None:
        outs, body, descriptors, spilled = placed
        self.descriptions += outs
        self.body += body
        self.descriptors += descriptors
        self.spilled += spilled
        self._placed += placing

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


MAX_CHUNK_ROWS = 2048
MAX_CHUNK_BYTES = 16 << 20
"""Maximum bytes of results that wait to be packed."""


class BarrierInput:
    """Payloads of a barrier message: those in files are opened one at a time, the others are already mapped."""

    def __init__(self, frame: Frame, bodies: Sequence[tuple[Any, Sequence[Any]]], load: Callable[..., Any]) -> None:
        self._payloads, parts = frame.head[6], frame.head[7]
        self._bodies = bodies
        self._unpack = load
        self.read_s = 0.0
        self._unsendable: list[tuple[tuple[int, ...], str]] = []
        """Keys of results that cannot be sent, with the reason."""
        self.items = sum(stop - start for _, start, stop in parts)
        self.size = sum(layout_bytes(sizes) for _, sizes, _ in self._payloads)
        first = self._load(parts[0][0])
        self._from_files = first[3]
        first[2]()
        self.rows = BarrierRows(self.load, parts, _is_skipped, from_files=self._from_files)

    def load(self, number: int) -> tuple[Keys, list[Any], Callable[[], object]]:
        keys, items, close, _ = self._load(number)
        return keys, items, close

    def _load(self, number: int) -> tuple[Keys, list[Any], Callable[[], object], bool]:
        kind, sizes, place = self._payloads[number]
        close: Callable[[], object] = _no_close
        if kind == KIND_FILE:
            reading = map_file(place[0], place[1], sizes)
            keys, items = self._unpack(reading.stream, reading.buffers)
            close = reading.close
        else:
            keys, items = self._unpack(*self._bodies[number])
        is_split = type(items) is not list
        if is_split:
            items, took = message_input.read_split(items)
            self.read_s += took
        return keys, items, close, is_split

    def skipped_items(self) -> list[message_input.SkippedItem]:
        """Skipped items among the rows read so far that no stage receives."""
        found = []
        for at, item in sorted(self.rows.skipped.items()):
            if item is BLANK_ROW:
                found.append(message_input.SkippedItem(at, ""))
            elif type(item) is BadRow:
                found += [
                    message_input.SkippedItem(at, odd.error, odd.verdict)
                    for odd in message_input.find_skipped([item], at)
                ]
            else:
                found.append(message_input.SkippedItem(at, f"the item cannot be unpickled: {item.error_text}"))
        return found

    def drop_unsendable(self, keys: Keys, items: list[Any], error: UnsendableItemError) -> tuple[Keys, list[Any]]:
        """Remove a result that cannot be sent or written; the row that it came from fails."""
        if error.index < 0:
            raise error
        why = UNWRITABLE_TEXT if isinstance(error, UnwritableItemError) else UNPICKLABLE_TEXT
        self._unsendable.append((as_tuple(keys[error.index]), f"{why}: {error.error_text}"))
        stays = [index for index in range(len(items)) if index != error.index]
        return [keys[index] for index in stays], [items[index] for index in stays]

    def chunk_items(self, cut: int) -> int:
        return output_chunk_items(cut, self.items, self.size, MAX_CHUNK_ROWS, MAX_CHUNK_BYTES)

    def outcome(self, count: int, seconds: float, failures: list[CallFailure]) -> MessageOutcome:
        """The outcome as for any other message; its results are already packed."""
        given = count - len(self._unsendable)
        found = MessageOutcome([], [], failures, seconds, [(0 if failures else self.items, given, seconds)])
        odd = [] if failures else [*(one for one in self.skipped_items() if one.error), *self._skipped_outputs()]
        keys = self.rows.keys() if odd else []
        found.failures += [message_input.failure_of_skipped(one, keys) for one in sorted(odd)]
        return found

    def _skipped_outputs(self) -> list[message_input.SkippedItem]:
        """The rows whose results cannot be sent, each once."""
        if not self._unsendable:
            return []
        places = {as_tuple(key): at for at, key in enumerate(self.rows.keys())}
        found = {}
        for key, why in self._unsendable:
            while key not in places:
                key = key[:-1]  # the key of its parent
            found[places[key]] = why
        return [message_input.SkippedItem(at, why, VERDICT_SKIP) for at, why in found.items()]


def _is_skipped(item: Any) -> bool:
    return item is BLANK_ROW or isinstance(item, UnreadableItem)


def _no_close() -> None:
    pass


_FORKS = [0]
"""Number of times that this process has forked."""


def _count_fork() -> None:
    _FORKS[0] += 1


os.register_at_fork(after_in_parent=_count_fork)


class MessageRunner:
    """Reads payloads, runs messages and reports results; one message at a time or several in threads."""

    def __init__(self, sock: socket.socket, spec: WorkerSpec, exit_worker: Callable[[int], NoReturn]) -> None:
        """`exit_worker` ends this worker at once with an exit code."""
        self._sock = sock
        self._spec = spec
        self._exit_worker = exit_worker
        self._pid = os.getpid()
        self._forks_seen = _FORKS[0]
        self._send_lock = Lock()
        self._pack_lock = Lock()
        self._reported_cpu_s = 0.0
        self._pool: BufferPool | None = None
        self._placed_now: list[PlacedPayload] = []
        """Payloads of the current message that are already in shared memory."""
        self._reader = PayloadReader()
        self._spool: tuple[int, str] | None = None
        self.links: PeerLinks | None = None
        """Links to other workers; None: none was made."""
        self._loop_lock = Lock()
        self._loop: AbstractEventLoop | None = None
        """Event loop of async methods; None: none was called."""
        self.calls = ReceivedCalls()
        self.before_await: Callable[[], None] = _no_close
        """Called before an async method is awaited outside of the main thread."""
        self._begun_writers: list[Writer] = []
        """Writers whose `begin` was called."""

    # --- sending

    def send(self, *head: object, body: Sequence[Chunk] = (), descriptors: Sequence[int] = ()) -> None:
        self.exit_if_forked()
        with self._send_lock:
            try:
                send_frame(self._sock, head, body, descriptors)
            except (BrokenPipeError, ConnectionError):
                self._exit_worker(0)  # the driver has exited

    def exit_if_forked(self) -> None:
        """Exit if user code forked this process and returned: it is not the worker and must not write to the socket."""
        if os.getpid() != self._pid:
            os._exit(0)

    def return_message(self, frame: Frame) -> None:
        """Report that a message was cancelled before it began."""
        close_descriptors(frame.descriptors)
        self.send("returned", frame.head[1])

    def free_buffers(self, unused: Sequence[int], kept: Sequence[int]) -> None:
        """Release buffers without readers, and give up those that a reader keeps views of."""
        with self._pack_lock:
            if self._pool is not None:
                for buffer in unused:
                    self._pool.free(buffer)
                for buffer in kept:
                    self._pool.discard(buffer)
                closed = self._pool.take_closed()
                if closed:
                    self.send("closed", closed)

    # --- messages

    def run(self, executor: UnitExecutor, frame: Frame, breadcrumb: BreadcrumbCell) -> None:
        if executor.barrier is not None:
            self._run_barrier(executor, frame, breadcrumb)
            return
        _, message, _, batch_size, cut, flags, payloads, parts, _, starts = frame.head
        try:
            opened = self.open(payloads, parts, frame)
            if starts:
                opened.epoch_starts = EpochStarts(starts)
            writer = executor.writer
            # comprehensions, because loop variables would keep views of the input alive
            outcomes = [
                (
                    begin,
                    executor.run(
                        keys,
                        items,
                        batch_size,
                        shift_breadcrumb(breadcrumb, begin),
                        message,
                        partial(self._reload_items, opened, frame, begin, len(items)),
                        opened.starts_inside(begin, len(items)),
                    ),
                )
                for begin, keys, items in readable_spans(opened)
            ]
            self.finish_message(message, join_outcomes(outcomes, opened), opened, batch_size, cut, flags, writer)
        except BaseException as error:
            self._report_error(frame, error)
        finally:
            close_descriptors(frame.descriptors)

    def _run_barrier(self, executor: UnitExecutor, frame: Frame, breadcrumb: BreadcrumbCell) -> None:
        """Run a barrier stage; its output is packed or written chunk by chunk."""
        _, message, _, _, cut, flags, payloads, _, _, _ = frame.head
        outgoing = OutgoingPayloads()
        try:
            bodies, readings = self._map_payloads(payloads, frame, files=False)
            given = BarrierInput(frame, bodies, _load_payload)

            def give(keys: Keys, items: list[Any]) -> None:
                self.exit_if_forked()
                if flags & FLAG_NO_OUTPUT:
                    return
                with self._pack_lock:
                    while items:
                        try:
                            if executor.writer is not None:
                                outgoing.descriptions.append(self._write_items(executor.writer, keys, items))
                            else:
                                outgoing.add(
                                    self._place_or_discard([_pack_items(keys, items)], flags), self._placed_now
                                )
                            items = []
                        except (UnwritableItemError, Unpicklable) as error:
                            keys, items = given.drop_unsendable(keys, items, error)

            count, seconds, failures = executor.run_barrier(
                given.rows, breadcrumb, message, given.chunk_items(cut), give
            )
            if failures:
                outgoing.undo(self._pool)
            outcome = given.outcome(count, seconds, failures)
            self._report(message, outcome, readings, given.read_s, outgoing)
        except BaseException as error:
            outgoing.undo(self._pool)
            self._report_error(frame, error)
        finally:
            close_descriptors(frame.descriptors)

    async def run_async(self, executor: UnitExecutor, frame: Frame, breadcrumb: BreadcrumbCell) -> None:
        _, message, _, batch_size, cut, flags, payloads, parts, _, starts = frame.head
        try:
            opened = self.open(payloads, parts, frame)
            if starts:
                opened.epoch_starts = EpochStarts(starts)
            outcomes = [
                (
                    begin,
                    await executor.run_async(
                        keys,
                        items,
                        batch_size,
                        shift_breadcrumb(breadcrumb, begin),
                        message,
                        partial(self._reload_items, opened, frame, begin, len(items)),
                        opened.starts_inside(begin, len(items)),
                    ),
                )
                for begin, keys, items in readable_spans(opened)
            ]
            self.finish_message(
                message, join_outcomes(outcomes, opened), opened, batch_size, cut, flags, executor.writer
            )
        except BaseException as error:
            self._report_error(frame, error)
        finally:
            close_descriptors(frame.descriptors)

    def _report_error(self, frame: Frame, error: BaseException) -> None:
        """Report an error outside of user code: out of memory, a full disk, a payload that is too large."""
        message, payloads, parts = frame.head[1], frame.head[6], frame.head[7]
        summary = summarize_exception(error)
        # the owners of the remaining views are unknown: no buffer is reused
        kept = [number for number, (kind, _, _) in enumerate(payloads) if kind == KIND_SHARED]
        items = sum(stop - start for _, start, stop in parts)
        failure = (0, items, summary.line, summary.detail, summary.out_of_memory, summary.on_gpu, ())
        if isinstance(error, SourceSinkError):
            failure = failure_as_tuple(message_input.failure_of_unusable(error, items))
        self.send("done", message, 0.0, [failure], 0, None, 0.0, [], kept, [], None)

    def _reload_items(self, opened: MessageInput, frame: Frame, begin: int, count: int) -> list[Any]:
        """Load some of the items again, unmodified."""
        fresh = self.open(frame.head[6], frame.head[7], frame)
        opened.readings += fresh.readings
        return fresh.items[begin : begin + count]

    def open(self, payloads: Sequence[Any], parts: Sequence[Any], frame: Frame) -> MessageInput:
        bodies, readings = self._map_payloads(payloads, frame)
        keys: list[Keys] = []
        items: list[Any] = []
        loaded: dict[int, tuple[Keys, list[Any]]] = {}
        odd: list[message_input.SkippedItem] = []
        splits: set[int] = set()
        seconds = 0.0
        for number, start, stop in parts:
            at = len(items)
            if number not in loaded:
                its_keys, its_items = _load_payload(*bodies[number])
                if type(its_items) is not list:
                    its_items, took = message_input.read_split(its_items)
                    seconds += took
                    splits.add(number)
                loaded[number] = its_keys, its_items
            its_keys, its_items = loaded[number]
            if number in splits:  # a split may have several parts
                odd += message_input.find_skipped(its_items[start:stop], at)
            if start == 0 and stop == len(its_items):
                keys.append(its_keys)
                items = its_items if not at and len(parts) == 1 else items + its_items
            else:
                keys.append(slice_keys(its_keys, start, stop))
                items += its_items[start:stop]
        opened = MessageInput(keys[0] if len(keys) == 1 else join_keys(keys), items, readings)
        opened.read_s = seconds
        opened.skipped = odd
        if _BROKEN_TYPE:
            broken = [(at, item.error_text) for at, item in enumerate(items) if type(item) is _BROKEN_TYPE[0]]
            unreadable = [message_input.SkippedItem(at, f"the item cannot be unpickled: {why}") for at, why in broken]
            opened.skipped = sorted([*odd, *unreadable])
        return opened

    def _map_payloads(
        self, payloads: Sequence[Any], frame: Frame, *, files: bool = True
    ) -> tuple[list[tuple[Any, Sequence[Any]]], list[tuple[int, MappedPayload | CopiedPayload]]]:
        """Stream and buffers of each payload; those in files only with `files`."""
        bodies: list[tuple[Any, Sequence[Any]]] = []
        readings: list[tuple[int, MappedPayload | CopiedPayload]] = []
        at = fds = 0
        for number, (kind, sizes, place) in enumerate(payloads):
            if kind == KIND_INLINE:
                body = frame.body[at : at + place]
                at += place
                # users may write into arrays
                bodies.append((body, ()) if len(sizes) == 1 else split_layout(memoryview(bytearray(body)), sizes))
                continue
            if kind == KIND_FILE and not files:
                bodies.append((b"", ()))
                continue
            if kind == KIND_SHARED:
                reading = self._reader.read(frame.descriptors[fds], sizes)
                fds += 1
            else:
                reading = map_file(place[0], place[1], sizes)
            readings.append((number, reading))
            bodies.append((reading.stream, reading.buffers))
        return bodies, readings

    def finish_message(
        self,
        message: int,
        outcome: MessageOutcome,
        opened: MessageInput,
        batch_size: int,
        cut: int,
        flags: int,
        writer: Writer | None = None,
    ) -> None:
        """Pack or write the results and report; then release the input, unless views of it are kept."""
        self.exit_if_forked()
        if flags & FLAG_NO_OUTPUT:
            outcome.keys, outcome.items, outcome.epoch_starts = [], [], None
        outgoing = OutgoingPayloads()
        with self._pack_lock:
            written = self._write_results(writer, outcome, opened, batch_size) if writer is not None else []
            packed = self._pack_results(outcome, opened, batch_size, cut) if writer is None else []
            outgoing.add(self._place_or_discard(packed, flags), self._placed_now)
            outgoing.descriptions += written
        if outcome.epoch_starts is not None:
            # results are in order, so each segment begins where the one before it ends
            sizes = [description[0] for description in outgoing.descriptions]
            outgoing.epoch_segments = outcome.epoch_starts.segment_counts(list(accumulate(sizes, initial=0))[:-1])
        if opened.readings:
            self._reader.probe_writes([reading for _, reading in opened.readings])
        outcome.items = opened.items = []  # tracebacks would keep views of payloads that are closed now
        self._report(message, outcome, opened.readings, opened.read_s, outgoing)

    def _report(
        self,
        message: int,
        outcome: MessageOutcome,
        readings: Sequence[tuple[int, MappedPayload | CopiedPayload]],
        read_s: float,
        outgoing: OutgoingPayloads,
    ) -> None:
        with self._pack_lock:
            closed = self._pool.take_closed() if self._pool is not None else []
            usage, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
            total_s = usage.ru_utime + usage.ru_stime + children.ru_utime + children.ru_stime
            cpu_s, self._reported_cpu_s = total_s - self._reported_cpu_s, total_s
        # a process that user code forked during this message may still read the input
        has_forked, self._forks_seen = _FORKS[0] != self._forks_seen, _FORKS[0]
        kept = [number for number, reading in readings if not reading.close() or has_forked]
        message_input.add_stage_seconds(outcome, read_s, stage=0)
        peak = usage.ru_maxrss << 10
        failures = [failure_as_tuple(failure) for failure in outcome.failures]
        measured = (outcome.seconds, failures, peak, outcome.stages, cpu_s)
        report = ("done", message, *measured, outgoing.descriptions, kept, closed, outgoing.epoch_segments)
        self.send(*report, body=outgoing.body, descriptors=outgoing.descriptors)
        close_descriptors(outgoing.spilled)

    def _pack_results(
        self, outcome: MessageOutcome, opened: MessageInput, batch_size: int, cut: int
    ) -> list[PackedPayload]:
        while True:
            keys, items = outcome.keys, outcome.items
            try:
                if len(items) <= cut and not outcome.failures and outcome.epoch_starts is None:
                    return [_pack_items(keys, items)] if items else []
                return [
                    _pack_items(slice_keys(keys, start, stop), items[start:stop])
                    for start, stop in segment_bounds(keys, cut, outcome.failures, outcome.epoch_starts)
                ]
            except Unpicklable as error:
                fail_unsendable(outcome, opened, batch_size, error, UNPICKLABLE_TEXT)
            except MemoryError as error:
                outcome.failures[:] = [failure_from_error(opened.keys, 0, len(opened.items), error)]
                outcome.keys, outcome.items = [], []
                if outcome.epoch_starts is not None:
                    outcome.epoch_starts.keep(())

    def _write_results(
        self, writer: Writer, outcome: MessageOutcome, opened: MessageInput, batch_size: int
    ) -> list[Any]:
        """Write results to their destination. Counts as work of the last stage."""
        began = time.perf_counter()
        while outcome.items:
            try:
                written = self._write_epochs(writer, outcome)
            except UnwritableItemError as error:
                fail_unsendable(outcome, opened, batch_size, error, UNWRITABLE_TEXT)
                continue
            message_input.add_stage_seconds(outcome, time.perf_counter() - began, stage=-1)
            return written
        return []

    def _write_epochs(self, writer: Writer, outcome: MessageOutcome) -> list[Any]:
        """Write the results, each epoch by itself."""
        keys, items, starts = outcome.keys, outcome.items, outcome.epoch_starts
        if starts is None:
            return [self._write_items(writer, keys, items)]
        written = []
        for start, stop in segment_bounds(keys, len(items), [], starts):
            try:
                written.append(self._write_items(writer, slice_keys(keys, start, stop), items[start:stop]))
            except UnwritableItemError as error:
                error.index += start
                raise
        return written

    def _write_items(self, writer: Writer, keys: Keys, items: list[Any]) -> Any:
        if writer not in self._begun_writers:
            writer.begin(self._spec.part_name())
            self._begun_writers.append(writer)
        return (len(items), 0, KIND_WRITTEN, (), tuple(writer.write(keys, items)), None)

    def _place_or_discard(
        self, packed: list[PackedPayload], flags: int
    ) -> tuple[list[Any], list[Chunk], list[int], list[int]]:
        """Like `_place`; discards everything if it fails."""
        self._placed_now.clear()
        try:
            return self._place(packed, flags)
        except BaseException:
            discard_placed(self._placed_now, self._pool)
            raise

    def _place(
        self, packed: Sequence[PackedPayload], flags: int
    ) -> tuple[list[Any], list[Chunk], list[int], list[int]]:
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
                self._placed_now.append(placed)
                if placed.fresh:
                    descriptors.append(placed.fd)
                if placed.spilled:
                    spilled.append(placed.fd)
                buffer = -1 if placed.spilled else placed.buffer
                outs.append((one.items, placed.size, KIND_SHARED, sizes, (buffer, placed.fresh), one.first))
        return outs, body, descriptors, spilled

    def _get_pool(self) -> BufferPool:
        if self._pool is None:
            self._pool = BufferPool(self._spec.pool_bytes, self._spec.spool_folder)
        return self._pool

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

    def close(self) -> None:
        """Close the descriptors of the pool and of the spool file. A worker process leaves this to its exit."""
        with self._pack_lock:
            if self._pool is not None:
                self._pool.close()
            if self._spool is not None:
                os.close(self._spool[0])
            self._pool = self._spool = None
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    # --- calls

    def answer_call(self, executor: UnitExecutor | None, frame: Frame, loop: AbstractEventLoop | None = None) -> None:
        """Answer a call on a hosted object. `loop`: awaits async methods; None: the loop that all objects share."""
        _, number, name, _, deadline = frame.head
        if not self.calls.begin(number, deadline):
            close_descriptors(frame.descriptors)
            return
        if executor is None:
            self.calls.end(number)
            close_descriptors(frame.descriptors)
            self.reply_error(number, LookupError(f"worker {self._spec.worker} hosts no {name!r}"))
            return
        try:
            opened = open_value(frame.body, frame.descriptors)
            value = call_hosted(executor, frame, opened)
            if inspect.isawaitable(value):  # an async method of an object whose __call__ is not async, or that has none
                value = self.await_result(value, number, loop)
            self.reply(number, value, opened)
        except BaseException as error:  # passed to the caller
            self.reply_error(number, error)
        finally:
            self.calls.end(number)

    def _get_loop(self) -> AbstractEventLoop:
        import asyncio  # late: few objects have async methods

        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                Thread(target=self._loop.run_forever, name="async-methods", daemon=True).start()
        return self._loop

    def await_result(self, awaitable: Awaitable[Any], number: int = 0, loop: AbstractEventLoop | None = None) -> Any:
        """Await in an event loop (None: the one that all async methods of this worker share); the slot is taken
        meanwhile. `number`: of the call, which may be cancelled; 0: a call of this process."""
        import asyncio

        async def wait() -> Any:
            return await awaitable

        if number:
            self.before_await()
        future = asyncio.run_coroutine_threadsafe(wait(), loop or self._get_loop())
        if number:
            self.calls.set_cancel(number, future.cancel)
        return future.result()

    def reply(self, number: int, value: object, arguments: OpenedValue) -> None:
        """Send the result, and whether the shared memory of the arguments is unused."""
        if number < 0 and self.links is not None:
            self.links.answer(number, True, value)
            return
        body = pack_value(value)
        try:
            is_unused = arguments.close()
            self.send("answer", number, True, is_unused, body=[body.data], descriptors=body.descriptors)
        finally:
            close_descriptors(body.descriptors)

    def reply_error(self, number: int, error: BaseException) -> None:
        try:
            body = pickle_value(error)
            pickle.loads(body)  # noqa: S301 - exceptions with an __init__ of their own may not come back
        except Exception:
            error = RuntimeError(summarize_exception(error).line)
            body = pickle_value(error)
        if number < 0 and self.links is not None:
            self.links.answer(number, False, error)
            return
        self.send("answer", number, False, False, body=[body])


def call_hosted(executor: UnitExecutor, frame: Frame, arguments: OpenedValue) -> Any:
    """Call the method of a hosted object that a frame requests; its result may be awaitable."""
    args, named = arguments.value
    return executor.call(frame.head[3], *args, **named)


def _pack_items(keys: Keys, items: list[Any]) -> PackedPayload:
    found = pack_items(keys, items)
    found.first = as_tuple(keys[0])
    return found


_BROKEN_TYPE: list[type[Any]] = []
"""The type of unreadable items, set when the first one occurs."""


def _load_payload(stream: Any, buffers: Sequence[Any]) -> tuple[Keys, Any]:
    """The keys, and the items or the split that replaces them."""
    try:
        return unpack_payload(stream, buffers)
    except Exception:  # classes of the items can raise anything
        from dovetail.engines.local.payload_recovery import BrokenItem, recover_items

        _BROKEN_TYPE[:] = [BrokenItem]
        return recover_items(stream, buffers)
