"""What does a worker process do? It sets up what it hosts, and then takes what comes until it is told to stop."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
import traceback
from collections import deque
from itertools import count
from mmap import mmap
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dovetail.engines.failures import tell
from dovetail.engines.host import make_host
from dovetail.engines.local.agreed import BEGUN, CELL, close_all
from dovetail.engines.local.calling import settle
from dovetail.engines.local.desk import Desk
from dovetail.engines.local.frames import DO_NOT_WAIT, Channel, Frame
from dovetail.engines.worker import Worker

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dovetail.engines.host import Host
    from dovetail.engines.local.crew import Loop
    from dovetail.engines.local.spec import Spec

SETUP_FAILED = 71


def main(sock: socket.socket, crumbs: int, cells: tuple[int, ...], pickled: bytes) -> int:
    """Returns the exit code."""
    spec: Spec = pickle.loads(pickled)  # noqa: S301 - from our driver
    _enter(spec)
    with open(os.devnull) as nothing:  # noqa: PTH123 - pathlib is not loaded
        os.dup2(nothing.fileno(), 0)
    numbers = memoryview(mmap(crumbs, 0)).cast("q")
    views = [numbers[cell * CELL : (cell + 1) * CELL] for cell in cells]
    return Inside(Channel(sock), spec, views).run()


def fresh(sock: int, crumbs: int, box: int, *cells: int) -> None:
    """The beginning of a worker that is an interpreter of its own."""
    code = 70
    try:
        spec = os.pread(box, os.fstat(box).st_size, 0)
        os.close(box)
        for fd in (sock, crumbs):
            os.set_inheritable(fd, False)
        code = main(socket.socket(fileno=sock), crumbs, cells, spec)
    except BaseException:
        report_crash()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def report_crash() -> None:
    """Our own mistake, into the worker's log."""
    with contextlib.suppress(Exception):
        traceback.print_exc()


def _enter(spec: Spec) -> None:
    """The folder, the paths and the log of the driver's world."""
    with contextlib.suppress(OSError):
        os.chdir(spec.folder)
    sys.path[:] = list(spec.path)
    sys.argv = [""]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # of a driver that has neither
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        import faulthandler

        faulthandler.enable()
    if spec.cpus:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(0, spec.cpus)


class Inside:
    """One worker process. Its main thread takes what comes; with one object and one slot it also runs it."""

    def __init__(self, channel: Channel, spec: Spec, crumbs: list[memoryview]) -> None:
        self.spec = spec
        self.crumbs = crumbs
        self._channel = channel
        self._numbers = count(1)
        self._asked: dict[int, Future[Any]] = {}
        self._pump: Any = None
        """A thread that takes over reading, once somebody here waits for an answer."""
        self._asking = Lock()
        self._always_reads = False
        """The main thread does nothing else."""
        self.hosts: dict[str, Host] = {}
        self.loops: dict[str, Loop] = {}
        """Of the async ones."""
        self.desk = Desk(channel.sock, spec)

    def run(self) -> int:
        began = time.perf_counter()
        if not self._set_up():
            return SETUP_FAILED
        guests = self.spec.guests
        simple = len(guests) == 1 and guests[0].slots == 1 and not self.loops
        self.desk.say("ready", time.perf_counter() - began, simple)
        if simple:
            self._one_by_one()
        else:
            from dovetail.engines.local.crew import Crew

            self._always_reads = True
            Crew(self, self.desk).run()
        for name, host in self.hosts.items():
            told = self.loops[name].teardown() if name in self.loops else host.teardown()
            for error in told:
                print(f"teardown of {name}: {error.line}\n{error.detail}", file=sys.stderr)  # noqa: T201 - its own log
            if host.writer is not None:
                host.writer.end()
        self.desk.say("stopped")
        return 0

    def _set_up(self) -> bool:
        try:
            cells = list(self.crumbs)
            for guest in self.spec.guests:
                own, cells = cells[: guest.slots], cells[guest.slots :]
                defined, work = pickle.loads(guest.work)  # noqa: S301 - from our driver
                _take_over(defined)
                host = self.hosts[guest.name] = make_host(work, self._worker(guest.name), guest.slots)
                if host.is_async:
                    from dovetail.engines.local.crew import Loop

                    loop = self.loops[guest.name] = Loop(host, self.desk, own)
                    loop.setup()
                else:
                    host.setup()
                if guest.writer:
                    host.writer = pickle.loads(guest.writer)  # noqa: S301 - from our driver
        except BaseException as error:  # the user's
            told = tell(error)
            print(f"{told.line}\n{told.detail}", file=sys.stderr)  # noqa: T201 - its own log
            self.desk.say("failed", told.line, told.detail[-8000:])
            return False
        return True

    def _worker(self, unit: str) -> Worker:
        spec = self.spec
        return Worker(
            id=spec.worker,
            unit=unit,
            node=spec.seat.node,
            rank=spec.rank,
            ranks=spec.ranks,
            local_rank=spec.local_rank,
            seat=spec.seat,
            gpus=tuple(range(len(spec.seat.cards))),
            cpus=spec.seat.cpu_milli / 1000,
            memory_bytes=spec.seat.memory_bytes,
            caller=self.call,
        )

    # --- what comes

    def frames(self, *, wait: bool) -> list[Frame]:
        """What came; waits for the first, or takes all there is: a single read ends behind every descriptor."""
        if self._pump is not None:
            found: list[Frame] = self._pump.take(wait=wait)
            return found
        frames, there = [], True
        try:
            while there:
                more, there = self._channel.receive(0 if wait else DO_NOT_WAIT)
                frames += more
                if wait:
                    break
        except BlockingIOError:
            pass
        if not there:
            os._exit(0)  # the driver is gone
        return [frame for frame in frames if not self.answered(frame)]

    def answered(self, frame: Frame) -> bool:
        """Whether that was the answer to a call of ours."""
        if frame.head[0] != "answer":
            return False
        future = self._asked.pop(frame.head[1], None)
        if future is not None:
            settle(future, frame.head[2], frame.body)
        return True

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        """A method of an object that another worker hosts; the driver passes it on unopened."""
        from concurrent.futures import Future

        with self._asking:
            if self._pump is None and not self._always_reads:
                from dovetail.engines.local.crew import Pump

                self._pump = Pump(self._channel, self.answered)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        self._asked[number] = future
        self.desk.ask(number, worker, hosted, method, args, named)
        return future

    # --- one thing at a time

    def _one_by_one(self) -> None:
        ((name, host),) = self.hosts.items()
        todo: deque[Frame] = deque()
        while True:
            if not todo:
                self._look(todo, wait=True)
                continue
            frame = todo.popleft()
            kind = frame.head[0]
            if kind == "run":
                if self._is_ours(frame, todo):
                    self.desk.run(host, frame, self.crumbs[0])
                else:
                    self._drop(frame)
            elif kind == "call":
                self.desk.answer(host if frame.head[2] == name else None, frame)
            elif kind == "stop":
                return

    def _look(self, todo: deque[Frame], *, wait: bool) -> list[int]:
        """Takes in what came; returns the messages that were taken back."""
        cancelled = []
        for frame in self.frames(wait=wait):
            kind = frame.head[0]
            if kind == "cancel":
                cancelled.append(frame.head[1])
            elif kind == "free":
                self.desk.free(*frame.head[1:])
            else:
                todo.append(frame)
        for message in cancelled:
            for frame in todo:
                if frame.head[0] == "run" and frame.head[1] == message:
                    todo.remove(frame)
                    self._drop(frame)
                    break
        return cancelled

    def _is_ours(self, frame: Frame, todo: deque[Frame]) -> bool:
        """Whether the message is still to be run. We say first that it begins, and look then; the driver takes it back
        first, and looks then. So at least one of us sees the other."""
        number = frame.head[8]
        if not number:
            return True  # it was not sent in advance: nobody takes it back
        self.crumbs[0][BEGUN] = number
        return frame.head[1] not in self._look(todo, wait=False)

    def _drop(self, frame: Frame) -> None:
        close_all(frame.descriptors)
        self.desk.say("returned", frame.head[1])


def _take_over(defined: dict[str, dict[str, object]]) -> None:
    """What the user's script defines, under the names by which items refer to it."""
    for module, values in defined.items():
        vars(_module(module)).update(values)


def _module(name: str) -> ModuleType:
    """The module; made up, with the packages it lies in, if there is none here."""
    parent, _, _ = name.rpartition(".")
    if name not in sys.modules:
        if parent:
            _module(parent).__path__ = []
        sys.modules[name] = ModuleType(name)
    return sys.modules[name]
