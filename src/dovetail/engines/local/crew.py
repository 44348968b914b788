"""How does a worker do several things at once? A thread per slot of each object, or an event loop for async ones."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import select
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from dovetail.engines.local.agreed import close_all
from dovetail.engines.local.frames import DO_NOT_WAIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.failures import Told
    from dovetail.engines.host import Host
    from dovetail.engines.local.desk import Desk
    from dovetail.engines.local.frames import Channel, Frame
    from dovetail.engines.local.inside import Inside


class Pump:
    """A thread that reads for everybody, once answers are waited for while the main thread is busy."""

    def __init__(self, channel: Channel, answered: Callable[[Frame], bool]) -> None:
        self._channel = channel
        self._answered = answered
        self._frames: SimpleQueue[Frame] = SimpleQueue()
        self._reading = Lock()
        Thread(target=self._run, name="reader", daemon=True).start()

    def _run(self) -> None:
        readable = select.poll()
        readable.register(self._channel.fileno(), select.POLLIN)
        try:
            while True:
                readable.poll()
                self._read()
        except BaseException:
            traceback.print_exc()
            os._exit(70)  # a worker that does not hear would hold up the run

    def _read(self) -> None:
        """All there is."""
        with self._reading, suppress(BlockingIOError):
            there = True
            while there:
                frames, there = self._channel.receive(DO_NOT_WAIT)
                for frame in frames:
                    if not self._answered(frame):
                        self._frames.put(frame)
            os._exit(0)  # the driver is gone

    def take(self, *, wait: bool) -> list[Frame]:
        if not wait:
            self._read()  # what the thread has not seen yet counts, too
        found = [self._frames.get()] if wait else []
        while not self._frames.empty():
            found.append(self._frames.get())
        return found


class Crew:
    """The main thread reads; messages and calls run in threads, or in the loop of an async object."""

    def __init__(self, inside: Inside, desk: Desk) -> None:
        self._inside = inside
        self._desk = desk
        cells = list(inside.crumbs)
        self._lines: dict[str, Threads | Loop] = {}
        for guest in inside.spec.guests:
            own, cells = cells[: guest.slots], cells[guest.slots :]
            loop = inside.loops.get(guest.name)
            self._lines[guest.name] = loop or Threads(inside.hosts[guest.name], desk, own)

    def run(self) -> None:
        while True:
            for frame in self._inside.frames(wait=True):
                kind = frame.head[0]
                if kind == "run":
                    self._lines[frame.head[2]].run(frame)
                elif kind == "call":
                    line = self._lines.get(frame.head[2])
                    line.call(frame) if line is not None else self._desk.answer(None, frame)
                elif kind == "cancel":
                    any(line.cancel(frame.head[1]) for line in self._lines.values())
                elif kind == "free":
                    self._desk.free(*frame.head[1:])
                elif kind == "stop":
                    for line in self._lines.values():
                        line.finish()
                    return


class Threads:
    """The slots of an object whose calls block."""

    def __init__(self, host: Host, desk: Desk, crumbs: list[memoryview]) -> None:
        self._host = host
        self._desk = desk
        self._crumbs = crumbs
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(len(crumbs), thread_name_prefix="slot")
        self._waiting: dict[int, tuple[Future[None], Frame]] = {}

    def run(self, frame: Frame) -> None:
        message = frame.head[1]
        with self._lock:
            self._waiting[message] = self._threads.submit(self._go, message, frame), frame

    def _go(self, message: int, frame: Frame) -> None:
        with self._lock:
            del self._waiting[message]
        crumb = self._crumbs.pop()
        try:
            self._desk.run(self._host, frame, crumb)
        finally:
            self._crumbs.append(crumb)

    def call(self, frame: Frame) -> None:
        self._threads.submit(self._desk.answer, self._host, frame)

    def cancel(self, message: int) -> bool:
        with self._lock:
            future, frame = self._waiting.get(message, (None, None))
            if future is None or frame is None or not future.cancel():
                return False
            del self._waiting[message]
        close_all(frame.descriptors)
        self._desk.say("returned", message)
        return True

    def finish(self) -> None:
        self._threads.shutdown()


class Loop:
    """The slots of an object whose calls are awaited: one event loop, in a thread of its own."""

    def __init__(self, host: Host, desk: Desk, crumbs: list[memoryview]) -> None:
        self._host = host
        self._desk = desk
        self._crumbs = crumbs
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(len(crumbs))
        self._waiting: dict[int, Frame] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._over = False
        self._thread = Thread(target=self._run, name="loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """A task of the user's that exits must not stop everybody else's."""
        while not self._over:
            try:
                self._loop.run_forever()
            except BaseException:
                traceback.print_exc()

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def run(self, frame: Frame) -> None:
        self._waiting[frame.head[1]] = frame
        self._loop.call_soon_threadsafe(self._begin, self._go(frame))

    async def _go(self, frame: Frame) -> None:
        message = frame.head[1]
        async with self._slots:
            if self._waiting.pop(message, None) is None:
                return  # cancelled
            crumb = self._crumbs.pop()
            try:
                await self._desk.run_async(self._host, frame, crumb)
            finally:
                self._crumbs.append(crumb)

    def call(self, frame: Frame) -> None:
        self._loop.call_soon_threadsafe(self._begin, self._answer(frame))

    async def _answer(self, frame: Frame) -> None:
        _, number, _, method = frame.head
        async with self._slots:
            try:
                args, named = pickle.loads(frame.body)  # noqa: S301 - from our driver or a worker of the same run
                value = getattr(self._host.target, method)(*args, **named)
                if inspect.isawaitable(value):
                    value = await value
                self._desk.reply(number, value)
            except BaseException as error:  # the caller's
                self._desk.reply_error(number, error)

    def cancel(self, message: int) -> bool:
        frame = self._waiting.pop(message, None)
        if frame is None:
            return False
        close_all(frame.descriptors)
        self._desk.say("returned", message)
        return True

    def setup(self) -> None:
        error = asyncio.run_coroutine_threadsafe(self._guarded(), self._loop).result()
        if error is not None:
            raise error

    async def _guarded(self) -> BaseException | None:
        """Raised in a task, SystemExit would end the loop and never be heard of."""
        try:
            await self._host.setup_async()
        except BaseException as error:  # the user's
            return error
        return None

    def finish(self) -> None:
        """Waits for what was sent."""
        asyncio.run_coroutine_threadsafe(self._rest(), self._loop).result()

    def teardown(self) -> list[Told]:
        told = asyncio.run_coroutine_threadsafe(self._host.teardown_async(), self._loop).result()
        self._over = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        return told

    async def _rest(self) -> None:
        own = asyncio.current_task()
        while rest := [task for task in self._running if task is not own]:
            await asyncio.wait(rest)
