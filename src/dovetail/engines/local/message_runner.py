"""Execution of one message in a worker: open its payloads, run the stages, pack or write the results, report."""

from __future__ import annotations

import os
import pickle
import resource
from functools import partial
from itertools import accumulate
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn

from dovetail.control.payload import SourceSinkError, UnwritableItemError
from dovetail.engines.epoch_starts import EpochStarts
from dovetail.engines.exception_summary import summarize_exception
from dovetail.engines.item_keys import join_keys, slice_keys
from dovetail.engines.local import message_input
from dovetail.engines.local.barrier_input import BarrierInput
from dovetail.engines.local.buffer_pool import PayloadReader
from dovetail.engines.local.call_body import open_value, pack_value
from dovetail.engines.local.message_input import (
    MessageInput,
    failure_as_tuple,
    join_outcomes,
    readable_spans,
    shift_breadcrumb,
)
from dovetail.engines.local.payload_codec import Unpicklable, split_layout, unpack_payload
from dovetail.engines.local.protocol import (
    FLAG_NO_OUTPUT,
    KIND_FILE,
    KIND_INLINE,
    KIND_SHARED,
    close_descriptors,
    map_file,
    pickle_value,
    send_frame,
)
from dovetail.engines.local.received_calls import ReceivedCalls
from dovetail.engines.local.result_packer import OutgoingPayloads, PieceStore, ResultPacker, pack_keyed_items
from dovetail.engines.local.running_slot import CURRENT_SLOT
from dovetail.engines.result_stream import StoredPiece
from dovetail.engines.unit_executor import is_awaitable

if TYPE_CHECKING:
    import socket
    from asyncio import AbstractEventLoop
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from dovetail.control.payload import Writer
    from dovetail.engines.item_keys import Keys
    from dovetail.engines.local.buffer_pool import CopiedPayload, MappedPayload
    from dovetail.engines.local.call_body import OpenedValue
    from dovetail.engines.local.peer_links import PeerLinks
    from dovetail.engines.local.protocol import Chunk, Frame
    from dovetail.engines.local.running_slot import RunningSlot
    from dovetail.engines.local.worker_spec import WorkerSpec
    from dovetail.engines.stage_chain import MessageOutcome
    from dovetail.engines.unit_executor import UnitExecutor
    from dovetail.engines.worker_context import BreadcrumbCell


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
        self._packer = ResultPacker(spec)
        self._exit_worker = exit_worker
        self._pid = os.getpid()
        self._forks_seen = _FORKS[0]
        self._send_lock = Lock()
        self._reported_cpu_s = 0.0
        self._reader = PayloadReader()
        self.links: PeerLinks | None = None
        """Links to other workers; None: none was made."""
        self._loop_lock = Lock()
        self._loop: AbstractEventLoop | None = None
        """Event loop of async methods; None: none was called."""
        self.calls = ReceivedCalls()
        self.before_await: Callable[[], None] = _no_close
        """Called before an async method is awaited outside of the main thread."""

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
        with self._packer.lock:
            pool = self._packer.pool
            if pool is not None:
                for buffer in unused:
                    pool.free(buffer)
                for buffer in kept:
                    pool.discard(buffer)
                closed = pool.take_closed()
                if closed:
                    self.send("closed", closed)

    # --- messages

    def run(self, executor: UnitExecutor, frame: Frame, breadcrumb: BreadcrumbCell) -> None:
        if executor.barrier is not None:
            self._run_barrier(executor, frame, breadcrumb)
            return
        store = self._piece_store(executor, frame)
        try:
            opened = self._open_message(frame)
            calls = self._arguments(opened, frame, breadcrumb, store)
            # comprehensions, because loop variables would keep views of the input alive
            outcomes = [(begin, executor.run(*arguments)) for begin, arguments in calls]
            self._finish_message(frame, join_outcomes(outcomes, opened), opened, store, executor.writer)
        except BaseException as error:
            store.discard_unused(())
            self._report_error(frame, error)
        finally:
            close_descriptors(frame.descriptors)

    async def run_async(self, executor: UnitExecutor, frame: Frame, breadcrumb: BreadcrumbCell) -> None:
        store = self._piece_store(executor, frame)
        try:
            opened = self._open_message(frame)
            calls = self._arguments(opened, frame, breadcrumb, store)
            outcomes = [(begin, await executor.run_async(*arguments)) for begin, arguments in calls]
            self._finish_message(frame, join_outcomes(outcomes, opened), opened, store, executor.writer)
        except BaseException as error:
            store.discard_unused(())
            self._report_error(frame, error)
        finally:
            close_descriptors(frame.descriptors)

    def _piece_store(self, executor: UnitExecutor, frame: Frame) -> PieceStore:
        cut, flags = frame.head[4], frame.head[5]
        return PieceStore(self._packer, flags, cut, executor.writer, self.exit_if_forked)

    def _open_message(self, frame: Frame) -> MessageInput:
        payloads, parts, starts = frame.head[6], frame.head[7], frame.head[9]
        opened = self.open(payloads, parts, frame)
        if starts:
            opened.epoch_starts = EpochStarts(starts)
        return opened

    def _arguments(
        self, opened: MessageInput, frame: Frame, breadcrumb: BreadcrumbCell, store: PieceStore
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Start and arguments of `UnitExecutor.run` for each run of readable items."""
        message, batch_size = frame.head[1], frame.head[3]
        for begin, keys, items in readable_spans(opened):
            fresh = partial(self._reload_items, opened, frame, begin, len(items))
            starts = opened.starts_inside(begin, len(items))
            place = shift_breadcrumb(breadcrumb, begin)
            yield begin, (keys, items, batch_size, place, message, fresh, starts, store)

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
                with self._packer.lock:
                    while items:
                        try:
                            if executor.writer is not None:
                                outgoing.descriptions.append(self._packer.write_items(executor.writer, keys, items))
                            else:
                                self._packer.place_results([pack_keyed_items(keys, items)], flags, outgoing)
                            items = []
                        except (UnwritableItemError, Unpicklable) as error:
                            keys, items = given.drop_unsendable(keys, items, error)

            count, seconds, failures = executor.run_barrier(
                given.rows, breadcrumb, message, given.chunk_items(cut), give
            )
            if failures:
                outgoing.undo(self._packer.pool)
            outcome = given.outcome(count, seconds, failures)
            self._report(message, outcome, readings, given.read_s, outgoing)
        except BaseException as error:
            outgoing.undo(self._packer.pool)
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

    def _finish_message(
        self,
        frame: Frame,
        outcome: MessageOutcome,
        opened: MessageInput,
        store: PieceStore,
        writer: Writer | None,
    ) -> None:
        """Pack or write the results and report; then release the input, unless views of it are kept."""
        _, message, _, batch_size, cut, flags, *_ = frame.head
        self.exit_if_forked()
        if flags & FLAG_NO_OUTPUT:
            outcome.keys, outcome.items, outcome.epoch_starts = [], [], None
        outgoing = OutgoingPayloads()
        with self._packer.lock:
            if writer is not None:
                results = self._packer.write_results(writer, outcome, opened, batch_size)
            else:
                results = self._packer.pack_results(outcome, opened, batch_size, cut)
            self._packer.place_results(results, flags, outgoing)
        store.discard_unused(outcome.items)
        if outcome.epoch_starts is not None:
            # results are in order, so each segment begins where the one before it ends
            counts = zip(results, outgoing.descriptions, strict=True)
            sizes = [1 if type(result) is StoredPiece else description[0] for result, description in counts]
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
        with self._packer.lock:
            closed = self._packer.take_closed()
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

    def close(self) -> None:
        """Close the descriptors of results. A worker process leaves this to its exit."""
        self._packer.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    # --- calls

    def answer_call(self, executor: UnitExecutor | None, frame: Frame, loop: AbstractEventLoop | None = None) -> None:
        """Answer a call on a hosted object. `loop`: awaits async methods; None: the loop that all objects share."""
        number, name, deadline = frame.head[1], frame.head[2], frame.head[4]
        if not self.begin_call(number, deadline):
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
            if is_awaitable(value):  # an async method of an object whose __call__ is not async, or that has none
                value = self.await_result(value, number, loop)
            self.reply(number, value, opened)
        except BaseException as error:  # passed to the caller
            self.reply_error(number, error)
        finally:
            self.calls.end(number)

    def begin_call(self, number: int, deadline: float) -> bool:
        """See `ReceivedCalls.begin`."""
        has_begun = self.calls.begin(number, deadline)
        if not has_begun and number < 0 and self.links is not None:
            self.links.forget(number)
        return has_begun

    def _get_loop(self) -> AbstractEventLoop:
        import asyncio  # late: few objects have async methods

        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                Thread(target=self._loop.run_forever, name="async-methods", daemon=True).start()
        return self._loop

    def await_result(
        self,
        awaitable: Awaitable[Any],
        number: int = 0,
        loop: AbstractEventLoop | None = None,
        slot: RunningSlot | None = None,
    ) -> Any:
        """Await in an event loop (None: the one that all async methods of this worker share); the slot is taken
        meanwhile. `number`: of the call, which may be cancelled; 0: a call of this process. `slot`: that of the call;
        None: the current one."""
        import asyncio

        slot = CURRENT_SLOT.get() if slot is None else slot

        async def wait() -> Any:
            CURRENT_SLOT.set(slot)
            if slot is not None:
                slot.task = asyncio.current_task()
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
