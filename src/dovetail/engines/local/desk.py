"""What becomes of one message inside a worker? Its payloads are opened, run through, packed again, and reported."""

from __future__ import annotations

import os
import pickle
import resource
import time
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.control.splits import Unusable
from dovetail.control.writing import Unwritable
from dovetail.engines import rows
from dovetail.engines.failures import tell
from dovetail.engines.keys import as_tuple, join, slice_of
from dovetail.engines.local.agreed import (
    IN_FILE,
    INLINE,
    NO_MEMORY_FILES,
    NO_OUTPUT,
    SHARED,
    SPILL,
    SPOOL,
    WRITTEN,
    close_all,
    dumps,
    reading_of_file,
)
from dovetail.engines.local.barriers import Input
from dovetail.engines.local.frames import send_all
from dovetail.engines.local.leaving import Leaving, discard
from dovetail.engines.local.opened import (
    UNPICKLABLE,
    UNWRITABLE,
    Opened,
    as_plain,
    cuts,
    failure_of,
    joined,
    leave_out,
    shifted,
    spans,
)
from dovetail.engines.local.payload import INLINE_LIMIT, Unpicklable, inline, lengths, pack, split, unpack
from dovetail.engines.local.pool import Pool
from dovetail.engines.local.reading import Reader

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from dovetail.control.writing import Writer
    from dovetail.engines.batches import Outcome
    from dovetail.engines.host import Host
    from dovetail.engines.keys import Keys
    from dovetail.engines.local.frames import Frame, Piece
    from dovetail.engines.local.payload import Packed
    from dovetail.engines.local.pool import Placed, Reading
    from dovetail.engines.local.reading import Copied
    from dovetail.engines.local.spec import Spec


class Desk:
    """Reads and writes payloads for whoever runs messages, one at a time or several in threads."""

    def __init__(self, sock: socket.socket, spec: Spec) -> None:
        self._sock = sock
        self._spec = spec
        self._pid = os.getpid()
        self._forked = False
        """Whether user code forked during this message: who knows what the child still reads."""
        os.register_at_fork(after_in_parent=self._fork)
        self._sending = Lock()
        self._packing = Lock()
        self._pool: Pool | None = None
        self._placing: list[Placed] = []
        """What the message that is being packed has in shared memory by now."""
        self._reader = Reader()
        self._spool: tuple[int, str] | None = None
        self._writing: list[Writer] = []
        """Those that have begun."""

    # --- saying

    def say(self, *head: object, body: Sequence[Piece] = (), descriptors: Sequence[int] = ()) -> None:
        self._leave_if_forked()
        with self._sending:
            try:
                send_all(self._sock, head, body, descriptors)
            except (BrokenPipeError, ConnectionError):
                os._exit(0)  # the driver is gone

    def _fork(self) -> None:
        self._forked = True

    def _leave_if_forked(self) -> None:
        """A process that user code forked, and that came back from its call, is not the worker: it writes nothing."""
        if os.getpid() != self._pid:
            os._exit(0)

    def free(self, unused: Sequence[int], kept: Sequence[int]) -> None:
        """Payloads of ours that nobody needs any more, and those of which somebody keeps views."""
        with self._packing:
            if self._pool is not None:
                for buffer in unused:
                    self._pool.free(buffer)
                for buffer in kept:
                    self._pool.discard(buffer)
                closed = self._pool.closed()
                if closed:
                    self.say("closed", closed)

    # --- messages

    def run(self, host: Host, frame: Frame, crumb: memoryview) -> None:
        if host.barrier is not None:
            self._run_barrier(host, frame, crumb)
            return
        _, message, _, batch_size, cut, flags, payloads, parts, _ = frame.head
        try:
            opened = self.open(payloads, parts, frame)
            writer = host.writer
            # comprehensions, because a loop's variables would keep views of the input alive
            outcomes = [
                (
                    begin,
                    host.run(
                        keys,
                        items,
                        batch_size,
                        shifted(crumb, begin),
                        message,
                        partial(self._again, opened, frame, begin, len(items)),
                    ),
                )
                for begin, keys, items in spans(opened)
            ]
            self.done(message, joined(outcomes, opened), opened, batch_size, cut, flags, writer)
        except BaseException as error:
            self._give_up(frame, error)
        finally:
            close_all(frame.descriptors)

    def _run_barrier(self, host: Host, frame: Frame, crumb: memoryview) -> None:
        """Everything at once; what comes out is packed or written chunk by chunk."""
        _, message, _, _, cut, flags, payloads, _, _ = frame.head
        leaving = Leaving()
        try:
            bodies, readings = self._map(payloads, frame, files=False)
            given = Input(frame, bodies, _load)

            def give(keys: Keys, items: list[Any]) -> None:
                self._leave_if_forked()
                if flags & NO_OUTPUT:
                    return
                with self._packing:
                    while items:
                        try:
                            if host.writer is not None:
                                leaving.outs.append(self._written(host.writer, keys, items))
                            else:
                                leaving.add(self._placed([_packed(keys, items)], flags), self._placing)
                            items = []
                        except (Unwritable, Unpicklable) as error:
                            keys, items = given.without(keys, items, error)

            count, seconds, failures = host.run_whole(given.rows, crumb, message, given.chunk(cut), give)
            if failures:
                leaving.undo(self._pool)
            outcome = given.outcome(count, seconds, failures)
            self._report(message, outcome, readings, given.read_s, leaving)
        except BaseException as error:
            leaving.undo(self._pool)
            self._give_up(frame, error)
        finally:
            close_all(frame.descriptors)

    async def run_async(self, host: Host, frame: Frame, crumb: memoryview) -> None:
        _, message, _, batch_size, cut, flags, payloads, parts, _ = frame.head
        try:
            opened = self.open(payloads, parts, frame)
            outcomes = [
                (begin, await host.run_async(keys, items, batch_size, shifted(crumb, begin), message))
                for begin, keys, items in spans(opened)
            ]
            self.done(message, joined(outcomes, opened), opened, batch_size, cut, flags, host.writer)
        except BaseException as error:
            self._give_up(frame, error)
        finally:
            close_all(frame.descriptors)

    def _give_up(self, frame: Frame, error: BaseException) -> None:
        """Something around the user's code went wrong: memory, a disk that is full, a payload that is too large."""
        message, payloads, parts = frame.head[1], frame.head[6], frame.head[7]
        told = tell(error)
        # nobody can tell whose views are left: of none of them the memory is used again
        kept = [number for number, (kind, _, _) in enumerate(payloads) if kind == SHARED]
        items = sum(stop - start for _, start, stop in parts)
        failure = (0, items, told.line, told.detail, told.out_of_memory, told.on_gpu, ())
        if isinstance(error, Unusable):
            failure = as_plain(rows.of_unusable(error, items))
        self.say("done", message, 0.0, [failure], 0, None, [], kept, [])

    def _again(self, opened: Opened, frame: Frame, begin: int, count: int) -> list[Any]:
        """Some of the items as they came, without what was done to them meanwhile."""
        fresh = self.open(frame.head[6], frame.head[7], frame)
        opened.readings += fresh.readings
        return fresh.items[begin : begin + count]

    def open(self, payloads: Sequence[Any], parts: Sequence[Any], frame: Frame) -> Opened:
        bodies, readings = self._map(payloads, frame)
        keys: list[Keys] = []
        items: list[Any] = []
        loaded: dict[int, tuple[Keys, list[Any]]] = {}
        odd: list[rows.Odd] = []
        splits: set[int] = set()
        seconds = 0.0
        for number, start, stop in parts:
            at = len(items)
            if number not in loaded:
                its_keys, its_items = _load(*bodies[number])
                if type(its_items) is not list:
                    its_items, took = rows.read(its_items)
                    seconds += took
                    splits.add(number)
                loaded[number] = its_keys, its_items
            its_keys, its_items = loaded[number]
            if number in splits:  # of a split there may be several parts
                odd += rows.odd_ones(its_items[start:stop], at)
            if start == 0 and stop == len(its_items):
                keys.append(its_keys)
                items = its_items if not at and len(parts) == 1 else items + its_items
            else:
                keys.append(slice_of(its_keys, start, stop))
                items += its_items[start:stop]
        opened = Opened(keys[0] if len(keys) == 1 else join(keys), items, readings)
        opened.read_s = seconds
        opened.unreadable = odd
        if _BROKEN:
            broken = [(at, item.error_text) for at, item in enumerate(items) if type(item) is _BROKEN[0]]
            told = [rows.Odd(at, f"the item cannot be unpickled: {why}") for at, why in broken]
            opened.unreadable = sorted([*odd, *told])
        return opened

    def _map(
        self, payloads: Sequence[Any], frame: Frame, *, files: bool = True
    ) -> tuple[list[tuple[Any, Sequence[Any]]], list[tuple[int, Reading | Copied]]]:
        """Stream and buffers of each payload; those in files only if they are wanted now."""
        bodies: list[tuple[Any, Sequence[Any]]] = []
        readings: list[tuple[int, Reading | Copied]] = []
        at = fds = 0
        for number, (kind, sizes, place) in enumerate(payloads):
            if kind == INLINE:
                body = frame.body[at : at + place]
                at += place
                # users may write into arrays
                bodies.append((body, ()) if len(sizes) == 1 else split(memoryview(bytearray(body)), sizes))
                continue
            if kind == IN_FILE and not files:
                bodies.append((b"", ()))
                continue
            if kind == SHARED:
                reading = self._reader.read(frame.descriptors[fds], sizes)
                fds += 1
            else:
                reading = reading_of_file(place[0], place[1], sizes)
            readings.append((number, reading))
            bodies.append((reading.stream, reading.buffers))
        return bodies, readings

    def done(
        self,
        message: int,
        outcome: Outcome,
        opened: Opened,
        batch_size: int,
        cut: int,
        flags: int,
        writer: Writer | None = None,
    ) -> None:
        """Packs or writes what came out and reports; then the input's memory is given back, unless somebody keeps
        it."""
        self._leave_if_forked()
        if flags & NO_OUTPUT:
            outcome.keys, outcome.items = [], []
        leaving = Leaving()
        with self._packing:
            written = self._write(writer, outcome, opened, batch_size) if writer is not None else []
            packed = self._pack(outcome, opened, batch_size, cut) if writer is None else []
            leaving.add(self._placed(packed, flags), self._placing)
            leaving.outs += written
        if opened.readings:
            self._reader.look([reading for _, reading in opened.readings])
        outcome.items = opened.items = []  # or they keep views of what is closed now
        self._report(message, outcome, opened.readings, opened.read_s, leaving)

    def _report(
        self,
        message: int,
        outcome: Outcome,
        readings: Sequence[tuple[int, Reading | Copied]],
        read_s: float,
        leaving: Leaving,
    ) -> None:
        with self._packing:
            closed = self._pool.closed() if self._pool is not None else []
        kept = [number for number, reading in readings if not reading.close() or self._forked]
        self._forked = False
        rows.count(outcome, read_s, stage=0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        failures = [as_plain(failure) for failure in outcome.failures]
        report = ("done", message, outcome.seconds, failures, peak, outcome.stages, leaving.outs, kept, closed)
        self.say(*report, body=leaving.body, descriptors=leaving.descriptors)
        close_all(leaving.spilled)

    def _pack(self, outcome: Outcome, opened: Opened, batch_size: int, cut: int) -> list[Packed]:
        while True:
            keys, items = outcome.keys, outcome.items
            try:
                if len(items) <= cut and not outcome.failures:
                    return [_packed(keys, items)] if items else []
                return [
                    _packed(slice_of(keys, start, stop), items[start:stop])
                    for start, stop in cuts(keys, cut, outcome.failures)
                ]
            except Unpicklable as error:
                leave_out(outcome, opened, batch_size, error, UNPICKLABLE)
            except MemoryError as error:
                outcome.failures[:] = [failure_of(opened.keys, 0, len(opened.items), error)]
                outcome.keys, outcome.items = [], []

    def _write(self, writer: Writer, outcome: Outcome, opened: Opened, batch_size: int) -> list[Any]:
        """Where they belong. It is part of the last stage's work, and its time counts as such."""
        began = time.perf_counter()
        while outcome.items:
            try:
                written = self._written(writer, outcome.keys, outcome.items)
            except Unwritable as error:
                leave_out(outcome, opened, batch_size, error, UNWRITABLE)
                continue
            rows.count(outcome, time.perf_counter() - began, stage=-1)
            return [written]
        return []

    def _written(self, writer: Writer, keys: Keys, items: list[Any]) -> Any:
        if writer not in self._writing:
            writer.begin(self._spec.part_name())
            self._writing.append(writer)
        return (len(items), 0, WRITTEN, (), tuple(writer.write(keys, items)), None)

    def _placed(self, packed: list[Packed], flags: int) -> tuple[list[Any], list[Piece], list[int], list[int]]:
        """See `_place`. If it cannot be done, nothing is left of it."""
        self._placing.clear()
        try:
            return self._place(packed, flags)
        except BaseException:
            discard(self._placing, self._pool)
            raise

    def _place(self, packed: Sequence[Packed], flags: int) -> tuple[list[Any], list[Piece], list[int], list[int]]:
        """What is told of each payload, the small ones, the descriptors of the large ones, and which of those are to be
        closed when they are sent."""
        outs: list[Any] = []
        body: list[Piece] = []
        descriptors: list[int] = []
        spilled: list[int] = []
        for one in packed:
            sizes = lengths(one)
            if flags & SPOOL:
                outs.append((one.items, one.size, IN_FILE, sizes, self._append(one), one.first))
            elif one.size <= INLINE_LIMIT or flags & NO_MEMORY_FILES:
                piece = inline(one)
                body.append(piece)
                outs.append((one.items, one.size, INLINE, sizes, len(piece), one.first))
            else:
                placed = self._the_pool().put(one, spill=bool(flags & SPILL))
                self._placing.append(placed)
                if placed.fresh:
                    descriptors.append(placed.fd)
                if placed.spilled:
                    spilled.append(placed.fd)
                buffer = -1 if placed.spilled else placed.buffer
                outs.append((one.items, placed.size, SHARED, sizes, (buffer, placed.fresh), one.first))
        return outs, body, descriptors, spilled

    def _the_pool(self) -> Pool:
        if self._pool is None:
            self._pool = Pool(self._spec.pool_bytes, self._spec.spill)
        return self._pool

    def _append(self, packed: Packed) -> tuple[str, int]:
        """To this worker's part of the spool: file and place."""
        try:
            return self._appended(packed)
        except OSError as error:
            fix = "make room or mend the disk"
            raise Unusable("DT381", f"the spool cannot be written: {error.strerror}", fix, self._spec.spill) from None

    def _appended(self, packed: Packed) -> tuple[str, int]:
        if self._spool is None:
            os.makedirs(self._spec.spill, exist_ok=True)  # noqa: PTH103 - pathlib is not loaded
            path = os.path.join(self._spec.spill, f"{self._spec.part_name()}.part")  # noqa: PTH118
            self._spool = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), path
        fd, path = self._spool
        at = os.fstat(fd).st_size
        at += os.write(fd, b"\0" * (-at % 4096))
        data = memoryview(inline(packed))
        while data:
            data = data[os.write(fd, data) :]
        return path, at

    # --- calls

    def ask(self, number: int, worker: int, hosted: str, method: str, args: Any, named: Any) -> None:
        self.say("ask", number, worker, hosted, method, body=[dumps((args, named))])

    def answer(self, host: Host | None, frame: Frame) -> None:
        """A call on what this worker hosts."""
        _, number, name, method = frame.head
        if host is None:
            self.reply_error(number, LookupError(f"worker {self._spec.worker} hosts no {name!r}"))
            return
        try:
            args, named = pickle.loads(frame.body)  # noqa: S301 - from our driver or a worker of the same run
            value = getattr(host.target, method)(*args, **named)
            self.reply(number, value)
        except BaseException as error:  # the caller's
            self.reply_error(number, error)

    def reply(self, number: int, value: object) -> None:
        self.say("answer", number, True, body=[dumps(value)])

    def reply_error(self, number: int, error: BaseException) -> None:
        try:
            body = dumps(error)
            pickle.loads(body)  # noqa: S301 - exceptions with an __init__ of their own may not come back
        except Exception:
            body = dumps(RuntimeError(tell(error).line))
        self.say("answer", number, False, body=[body])


def _packed(keys: Keys, items: list[Any]) -> Packed:
    found = pack(keys, items)
    found.first = as_tuple(keys[0])
    return found


_BROKEN: list[type[Any]] = []
"""The type of unreadable items, once there was one."""


def _load(stream: Any, buffers: Sequence[Any]) -> tuple[Keys, Any]:
    """The keys, and the items or the split that stands for them."""
    try:
        return unpack(stream, buffers)
    except Exception:  # whatever the classes of the items do
        from dovetail.engines.local.recover import Broken, recover

        _BROKEN[:] = [Broken]
        return recover(stream, buffers)
