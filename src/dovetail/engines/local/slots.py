"""Concurrent slots of a worker: a thread per slot, or an event loop for async stages."""

from __future__ import annotations

import asyncio
import inspect
import select
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn

from dovetail.engines.local.message_runner import call_hosted
from dovetail.engines.local.protocol import DONT_WAIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.exception_summary import ExceptionSummary
    from dovetail.engines.local.message_runner import MessageRunner
    from dovetail.engines.local.protocol import Channel, Frame
    from dovetail.engines.local.worker_main import WorkerProcess
    from dovetail.engines.unit_executor import UnitExecutor
    from dovetail.engines.worker_context import BreadcrumbCell


class ReaderThread:
    """Reads the socket for all threads, once a call waits for an answer while the main thread is busy."""

    def __init__(
        self, channel: Channel, answered: Callable[[Frame], bool], exit_worker: Callable[[int], NoReturn]
    ) -> None:
        self._channel = channel
        self._on_answer = answered
        self._exit_worker = exit_worker
        self._frames: SimpleQueue[Frame | None] = SimpleQueue()
        """None: the driver has exited."""
        self._read_lock = Lock()
        Thread(target=self._run, name="reader", daemon=True).start()

    def _run(self) -> None:
        readable = select.poll()
        readable.register(self._channel.fileno(), select.POLLIN)
        try:
            while self._read():
                readable.poll()
        except BaseException:
            traceback.print_exc()
            self._exit_worker(70)  # a worker that does not read would block the run
        self._frames.put(None)
        self._exit_worker(0)

    def _read(self) -> bool:
        """Read everything that has arrived. False: the driver has exited."""
        with self._read_lock, suppress(BlockingIOError):
            connected = True
            while connected:
                frames, connected = self._channel.receive(DONT_WAIT)
                for frame in frames:
                    if not self._on_answer(frame):
                        self._frames.put(frame)
            return False
        return True

    def take(self, *, wait: bool) -> list[Frame]:
        if not wait:
            self._read()  # include what the thread has not read yet
        frames = [self._frames.get()] if wait else []
        while not self._frames.empty():
            frames.append(self._frames.get())
        if None in frames:
            self._exit_worker(0)
        return [frame for frame in frames if frame is not None]


class SlotDispatcher:
    """The main thread reads the socket; messages and calls run in threads, or in the event loop of an async object."""

    def __init__(self, worker: WorkerProcess, runner: MessageRunner) -> None:
        self._worker = worker
        self._runner = runner
        cells = list(worker.breadcrumbs)
        self._slots: dict[str, ThreadSlots | AsyncSlots] = {}
        for hosted in worker.spec.hosted:
            own, cells = cells[: hosted.slots], cells[hosted.slots :]
            loop = worker.async_slots.get(hosted.name)
            self._slots[hosted.name] = loop or ThreadSlots(worker.executors[hosted.name], runner, own)

    def run(self) -> None:
        while True:
            for frame in self._worker.receive_frames(wait=True):
                kind = frame.head[0]
                if kind == "run":
                    self._slots[frame.head[2]].run(frame)
                elif kind == "call":
                    slots = self._slots.get(frame.head[2])
                    slots.call(frame) if slots is not None else self._runner.answer_call(None, frame)
                elif kind == "cancel":
                    any(slots.cancel(frame.head[1]) for slots in self._slots.values())
                elif kind == "free":
                    self._runner.free_buffers(*frame.head[1:])
                elif kind == "stop":
                    self._worker.stop_reading()  # calls that are running, and those of a teardown, wait for answers
                    for slots in self._slots.values():
                        slots.finish()
                    return


class ThreadSlots:
    """Slots of an object whose calls block: a thread each."""

    def __init__(self, executor: UnitExecutor, runner: MessageRunner, breadcrumbs: list[BreadcrumbCell]) -> None:
        self._executor = executor
        self._runner = runner
        self._free_breadcrumbs = breadcrumbs
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(len(breadcrumbs), thread_name_prefix="slot")
        self._waiting: dict[int, tuple[Future[None], Frame]] = {}

    def run(self, frame: Frame) -> None:
        message = frame.head[1]
        with self._lock:
            self._waiting[message] = self._threads.submit(self._run_message, message, frame), frame

    def _run_message(self, message: int, frame: Frame) -> None:
        with self._lock:
            del self._waiting[message]
        breadcrumb = self._free_breadcrumbs.pop()
        try:
            self._runner.run(self._executor, frame, breadcrumb)
        finally:
            self._free_breadcrumbs.append(breadcrumb)

    def call(self, frame: Frame) -> None:
        self._threads.submit(self._runner.answer_call, self._executor, frame)

    def cancel(self, message: int) -> bool:
        with self._lock:
            future, frame = self._waiting.get(message, (None, None))
            if future is None or frame is None or not future.cancel():
                return False
            del self._waiting[message]
        self._runner.return_message(frame)
        return True

    def finish(self) -> None:
        self._threads.shutdown()


class AsyncSlots:
    """Slots of an object whose calls are awaited: one event loop in its own thread."""

    def __init__(self, executor: UnitExecutor, runner: MessageRunner, breadcrumbs: list[BreadcrumbCell]) -> None:
        self._executor = executor
        self._runner = runner
        self._free_breadcrumbs = breadcrumbs
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(len(breadcrumbs))
        self._waiting: dict[int, Frame] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._thread = Thread(target=self._run, name="loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Run the event loop. A user's task that raises SystemExit must not stop the others."""
        while not self._is_closed:
            try:
                self._loop.run_forever()
            except BaseException:
                traceback.print_exc()

    def _start_task(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def run(self, frame: Frame) -> None:
        self._waiting[frame.head[1]] = frame
        self._loop.call_soon_threadsafe(self._start_task, self._run_message(frame))

    async def _run_message(self, frame: Frame) -> None:
        message = frame.head[1]
        async with self._slots:
            if self._waiting.pop(message, None) is None:
                return  # cancelled
            breadcrumb = self._free_breadcrumbs.pop()
            try:
                await self._runner.run_async(self._executor, frame, breadcrumb)
            finally:
                self._free_breadcrumbs.append(breadcrumb)

    def call(self, frame: Frame) -> None:
        self._loop.call_soon_threadsafe(self._start_task, self._answer(frame))

    async def _answer(self, frame: Frame) -> None:
        number = frame.head[1]
        async with self._slots:
            try:
                value = call_hosted(self._executor, frame)
                if inspect.isawaitable(value):
                    value = await value
                self._runner.reply(number, value)
            except BaseException as error:  # passed to the caller
                self._runner.reply_error(number, error)

    def cancel(self, message: int) -> bool:
        frame = self._waiting.pop(message, None)
        if frame is None:
            return False
        self._runner.return_message(frame)
        return True

    def setup(self) -> None:
        error = asyncio.run_coroutine_threadsafe(self._setup_catching(), self._loop).result()
        if error is not None:
            raise error

    async def _setup_catching(self) -> BaseException | None:
        """Setup in the event loop. SystemExit raised in a task would end the loop and be lost."""
        try:
            await self._executor.setup_async()
        except BaseException as error:  # raised by user code
            return error
        return None

    def finish(self) -> None:
        """Wait for all messages and calls that were sent."""
        asyncio.run_coroutine_threadsafe(self._wait_for_tasks(), self._loop).result()

    def teardown(self) -> list[ExceptionSummary]:
        errors = asyncio.run_coroutine_threadsafe(self._executor.teardown_async(), self._loop).result()
        self.stop_loop()
        self._thread.join()
        return errors

    def stop_loop(self) -> None:
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _wait_for_tasks(self) -> None:
        own = asyncio.current_task()
        while rest := [task for task in self._running if task is not own]:
            await asyncio.wait(rest)
