"""The smallest engine with real processes: one per worker, pickles through pipes, and a crumb in shared memory.

For tests only: it forks, takes no notice of resources, and its payload passes through the driver
(pickled, never opened there). `Hosted.work` is a function of a list of items that returns a list, or a class that is
made in the worker, has such a `__call__`, and a `setup` if it wants one.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
import time
import traceback
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from mmap import mmap
from multiprocessing.connection import Connection, wait
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import Cancel, Deliver, Pull, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import WorkerGone
from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    Cause,
    Crumb,
    Failure,
    InputEnded,
    ItemsArrived,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.commands import DataCommand, EngineCommand, Hosted, SetAside
    from dovetail.control.events import Event

CRUMB = struct.Struct("qq")
NOTHING = (-1, -1)
FORK = multiprocessing.get_context("fork")


class InWorker:
    """The worker's side: the main thread takes commands, each object has a thread per slot."""

    def __init__(self, pipe: Connection, crumb: mmap) -> None:
        self._pipe = pipe
        self._crumb = crumb
        self._sending = Lock()
        self._objects: dict[str, Any] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._sent: dict[int, Future[None]] = {}

    def run(self, hosted: Sequence[Hosted]) -> None:
        began = time.perf_counter()
        try:
            for one in hosted:
                made = one.work() if isinstance(one.work, type) else one.work
                getattr(made, "setup", bool)()
                self._objects[one.name] = made
                self._threads[one.name] = ThreadPoolExecutor(one.slots)
        except Exception as error:  # the user's
            self._send("failed", _line(error))
            return
        self._send("ready", time.perf_counter() - began)
        while True:
            match self._pipe.recv():
                case ("run", message, name, *rest):
                    self._sent[message] = self._threads[name].submit(self._batches, message, name, *rest)
                case ("cancel", message) if message in self._sent and self._sent[message].cancel():
                    self._send("returned", message)
                case ("call", number, name, method, args, named):
                    self._threads[name].submit(self._call, number, name, method, args, named)
                case ("stop",):
                    for threads in self._threads.values():
                        threads.shutdown()
                    self._send("stopped")
                    return

    def _batches(self, message: int, name: str, parts: list[Any], batch_size: int, cut: int) -> None:
        items = [item for ref, start, stop in parts for item in pickle.loads(ref)[start:stop]]
        out: list[Any] = []
        failures = []
        began = time.perf_counter()
        for start in range(0, len(items), batch_size):
            batch = items[start : start + batch_size]
            CRUMB.pack_into(self._crumb, 0, message, start)
            try:
                out += self._objects[name](batch)
            except Exception as error:  # the user's
                memory = isinstance(error, MemoryError)
                failures.append((start, start + len(batch), _line(error), traceback.format_exc(), memory))
        seconds = time.perf_counter() - began
        CRUMB.pack_into(self._crumb, 0, *NOTHING)
        pieces = [(len(piece), pickle.dumps(piece)) for piece in (out[i : i + cut] for i in range(0, len(out), cut))]
        self._send("done", message, pieces, seconds, failures)

    def _call(self, number: int, name: str, method: str, args: Any, named: Any) -> None:
        try:
            self._send("answer", number, getattr(self._objects[name], method)(*args, **named), None)
        except Exception as error:  # the caller's
            self._send("answer", number, None, error)

    def _send(self, *what: object) -> None:
        data = pickle.dumps(what)
        with self._sending:
            self._pipe.send_bytes(data)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _in_worker(pipe: Connection, crumb: mmap, hosted: Sequence[Hosted]) -> None:
    InWorker(pipe, crumb).run(hosted)
    pipe.close()
    os._exit(0)  # what pytest has registered to happen at exit is not the worker's


class Child:
    """The driver's side of a worker."""

    def __init__(self, command: StartWorker) -> None:
        self.number = command.worker
        self.node = command.seats[0].node
        self.names = {hosted.name for hosted in command.hosted}
        self.spooled: set[int] = set()
        self.calls: dict[int, Future[Any]] = {}
        self.end: WorkerLost | WorkerStopped | None = None
        """What is known of its end before it comes."""
        self.crumb = mmap(-1, CRUMB.size)
        CRUMB.pack_into(self.crumb, 0, *NOTHING)
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_in_worker, args=(theirs, self.crumb, command.hosted), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: threads and fork
            self.process.start()
        theirs.close()

    def send(self, *what: object) -> None:
        """Workers that are set up always read, so that this does not block; that one is gone will be heard anyway."""
        with suppress(OSError):
            self.pipe.send(what)

    def how_it_ended(self) -> Event:
        self.process.join()
        code = self.process.exitcode or 0
        message, index = CRUMB.unpack_from(self.crumb)
        crumbs = (Crumb(message, index),) if message >= 0 else ()
        if isinstance(self.end, WorkerLost):
            self.end.crumbs = crumbs
        if self.end is not None:
            return self.end
        cause, detail = (Cause.SIGNAL, f"signal {-code}") if code < 0 else (Cause.EXIT, f"exit code {code}")
        return WorkerLost(self.number, cause, detail, crumbs)


class SubprocessEngine:
    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._posted: deque[Event] = deque()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._numbers = count(1)
        self._lock = Lock()
        """For calls, which come from any thread, against the end of a worker and other sending."""
        self._closed = False
        self.pids: list[int] = []
        """Of all that were ever started."""

    def submit(self, commands: Sequence[EngineCommand]) -> None:
        for command in commands:
            if isinstance(command, StartWorker):
                child = self._children[command.worker] = Child(command)
                self.pids.append(child.process.pid or 0)
                continue
            if command.worker in self._children:
                with self._lock:
                    self._hand_over(self._children[command.worker], command)

    def _hand_over(self, child: Child, command: RunBatches | Cancel | StopWorker) -> None:
        match command:
            case RunBatches(message, _, name, parts, _, batch_size, cut, spool):
                if spool:
                    child.spooled.add(message)
                refs = [(segment.ref, start, stop) for segment, start, stop in parts]
                child.send("run", message, name, refs, batch_size, cut)
            case Cancel(message):
                child.send("cancel", message)
            case StopWorker(_, True):
                child.send("stop")
            case StopWorker(_, False, reason):
                child.end = WorkerLost(child.number, Cause.STOPPED, reason)
                child.process.kill()

    def poll(self, timeout_s: float | None) -> list[Event]:
        by_pipe = {child.pipe: child for child in self._children.values()}
        by_end = {child.process.sentinel: child for child in self._children.values()}
        events: list[Event] = []
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not events and not self._closed:
            left = None if until is None else max(0.0, until - time.monotonic())
            heard = wait([self._woken, *by_pipe, *by_end], left)
            if self._woken in heard:
                os.read(self._woken, 4096)
            for child in [by_pipe[one] for one in heard if isinstance(one, Connection)]:
                if not self._read(child, events):
                    del by_pipe[child.pipe]  # its end is decided by the process, not by the pipe
            for child in [by_end.pop(one) for one in heard if isinstance(one, int) and one != self._woken]:
                while child.pipe.poll() and self._read(child, events):
                    pass
                by_pipe.pop(child.pipe, None)
                events.append(self._bury(child))
            while self._posted:
                events.append(self._posted.popleft())
            if not heard:
                break
        return events

    def _read(self, child: Child, events: list[Event]) -> bool:
        """One message; False at the end of what it sent."""
        try:
            what = pickle.loads(child.pipe.recv_bytes())
        except (EOFError, OSError):
            return False
        match what:
            case ("ready", setup_s):
                events.append(WorkerReady(child.number, setup_s))
            case ("failed", text):
                child.end = WorkerLost(child.number, Cause.SETUP_FAILED, text)
            case ("stopped",):
                child.end = child.end or WorkerStopped(child.number)
            case ("returned", message):
                events.append(BatchesReturned(child.number, message))
            case ("answer", number, result, error):
                future = child.calls.pop(number)
                future.set_result(result) if error is None else future.set_exception(error)
            case ("done", message, pieces, seconds, failures):
                node = "" if message in child.spooled else child.node
                segments = [Segment(next(self._numbers), n, len(ref), node, ref) for n, ref in pieces]
                events.append(
                    BatchesDone(child.number, message, segments, seconds, [Failure(*one) for one in failures])
                )
        return True

    def _bury(self, child: Child) -> Event:
        end = child.how_it_ended()
        with self._lock:
            del self._children[child.number]
            child.pipe.close()
        for future in child.calls.values():
            future.set_exception(WorkerGone(f"worker {child.number} is gone"))
        return end

    def post(self, event: Event) -> None:
        self._posted.append(event)
        with self._lock, suppress(BlockingIOError):  # full: then poll will wake anyway
            if not self._closed:
                os.write(self._wake, b"!")

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            child = self._children.get(worker)
            if child is None:
                future.set_exception(WorkerGone(f"worker {worker} is gone"))
            elif hosted not in child.names:
                future.set_exception(LookupError(f"worker {worker} hosts no {hosted!r}"))
            else:
                number = next(self._numbers)
                child.calls[number] = future
                child.send("call", number, hosted, method, args, named)
        return future

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        for child in list(self._children.values()):
            child.process.kill()
            self._bury(child)
        os.close(self._woken)
        os.close(self._wake)

    # for tests

    def pid(self, worker: int) -> int:
        pid = self._children[worker].process.pid
        assert pid is not None
        return pid

    def runs(self, worker: int) -> int:
        """The message that is in a call now; -1: none."""
        message: int = CRUMB.unpack_from(self._children[worker].crumb)[0]
        return message


class ListData:
    """A list as the source, and lists as sinks: both ends of a stream over the subprocess engine."""

    def __init__(self, engine: SubprocessEngine, items: Sequence[Any], *, segment_items: int = 100) -> None:
        self._engine = engine
        self._items = items
        self._step = segment_items
        self._numbers = count(-1, -1)
        self.outputs: dict[str, list[Any]] = {}
        self.aside: list[SetAside] = []
        self.log: list[Deliver] = []

    def submit(self, commands: Sequence[DataCommand]) -> None:
        for command in commands:
            if isinstance(command, Pull):
                self._pull(command)
                continue
            self.log.append(command)
            self.aside += command.aside
            for leaf, segments in command.outputs.items():
                self.outputs.setdefault(leaf, []).extend(item for segment in segments for item in read(segment))

    def _pull(self, pull: Pull) -> None:
        last = min(pull.first + pull.items, len(self._items))
        for first in range(pull.first, last, self._step):
            items = list(self._items[first : min(first + self._step, last)])
            self._engine.post(ItemsArrived(first, [segment_of(next(self._numbers), items)]))
        if pull.first + pull.items >= len(self._items):
            self._engine.post(InputEnded(len(self._items)))


def segment_of(number: int, items: list[Any]) -> Segment:
    data = pickle.dumps(items)
    return Segment(number, len(items), len(data), "", data)


def read(segment: Segment) -> list[Any]:
    assert isinstance(segment.ref, bytes)
    found: list[Any] = pickle.loads(segment.ref)
    return found
