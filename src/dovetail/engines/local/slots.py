"""Concurrent slots of a worker: a thread per slot, or an event loop for async stages."""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn

from dovetail.control.engine import CONTROL_METHODS
from dovetail.engines.local.call_body import open_value
from dovetail.engines.local.call_waits import WaitableCall
from dovetail.engines.local.message_runner import call_hosted
from dovetail.engines.local.protocol import close_descriptors
from dovetail.engines.local.running_slot import CURRENT_SLOT, RunningSlot
from dovetail.engines.unit_executor import is_awaitable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.exception_summary import ExceptionSummary
    from dovetail.engines.local.message_runner import MessageRunner
    from dovetail.engines.local.peer_links import PeerLinks
    from dovetail.engines.local.protocol import Frame
    from dovetail.engines.local.worker_main import WorkerProcess
    from dovetail.engines.unit_executor import UnitExecutor
    from dovetail.engines.worker_context import BreadcrumbCell


class ReaderThread:
    """Reads the socket for all threads, once a call waits for an answer while the main thread is busy."""

    def __init__(self, links: PeerLinks, exit_worker: Callable[[int], NoReturn]) -> None:
        self._links = links
        self._exit_worker = exit_worker
        self._frames: SimpleQueue[Frame | None] = SimpleQueue()
        """None: the driver has exited."""
        self._read_lock = Lock()
        Thread(target=self._run, name="reader", daemon=True).start()

    def _run(self) -> None:
        try:
            is_connected = self._read()
            while is_connected:
                is_connected = self._read(self._links.wait())
        except BaseException:
            traceback.print_exc()
            self._exit_worker(70)  # a worker that does not read would block the run
        self._frames.put(None)
        self._exit_worker(0)

    def _read(self, ready: list[tuple[int, int]] | None = None) -> bool:
        """Read everything that has arrived. False: the driver has exited."""
        with self._read_lock:
            frames, is_connected = self._links.receive(wait=False, ready=ready)
            for frame in frames:
                self._frames.put(frame)
        return is_connected

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
            self._slots[hosted.name] = loop or ThreadSlots(worker, hosted.name, own)
        worker.slots = self._slots
        self._is_stopping = False
        self._control: ThreadPoolExecutor | None = None
        """Thread of calls that take no slot."""

    def run(self) -> None:
        while not self._is_stopping:
            self._receive()
        self._finish()

    def run_in_main_thread(self) -> None:
        """Like `run`, for one object with one slot that gets calls only: they run in this thread."""
        (slots,) = self._slots.values()
        assert isinstance(slots, ThreadSlots)
        slots.has_main_thread = True
        standby = self._worker.start_standby(self._receive, lambda: self._is_stopping or slots.can_run)
        while not self._is_stopping:
            standby.receive()
            slots.run_queued()
        self._finish()

    def _receive(self) -> None:
        """Wait for frames and handle them."""
        frames = deque(self._worker.receive_frames(wait=True))
        while frames:
            frame = frames.popleft()
            kind = frame.head[0]
            if kind == "run":
                self._slots[frame.head[2]].run(frame)
            elif kind == "call":
                self._call(frame)
            elif kind == "cancel":
                any(slots.cancel(frame.head[1]) for slots in self._slots.values())
            elif kind == "free":
                self._runner.free_buffers(*frame.head[1:])
            elif kind == "stop":
                for last in (*frames, *self._worker.refuse_calls()):
                    if last.head[0] == "call":  # of another worker, which sent it before
                        self._call(last)
                self._is_stopping = True
                self._worker.stop_reading()  # calls that are running, and those of a teardown, wait for answers
                return

    def _finish(self) -> None:
        """Wait until all slots are idle; objects that finish may still call each other."""
        while True:
            for slots in self._slots.values():
                slots.finish()
            if not any(slots.is_busy for slots in self._slots.values()):
                break
        if self._control is not None:
            self._control.shutdown()

    def _call(self, frame: Frame) -> None:
        slots = self._slots.get(frame.head[2])
        if slots is None:
            self._runner.answer_call(None, frame)
        elif frame.head[3] in CONTROL_METHODS:
            if self._control is None:
                self._control = ThreadPoolExecutor(1, thread_name_prefix="control")
            self._control.submit(slots.call_now, frame)
        else:
            slots.call(frame)


class SlotTask:
    """Work for a slot: a message, or a call from another process."""

    __slots__ = ("_function", "frame")

    def __init__(self, function: Callable[[Frame], None], frame: Frame) -> None:
        self._function = function
        self.frame = frame

    @property
    def number(self) -> int | None:
        """Number of the call; None: the frame is no call."""
        return self.frame.head[1] if self.frame.head[0] == "call" else None

    def run(self) -> None:
        self._function(self.frame)


class DirectCall(WaitableCall):
    """Future of a call between two objects of this process.

    A thread that waits for the call runs it itself if a slot is free and no earlier work waits: switching threads takes
    longer than most calls. A wait with a timeout leaves the call to a thread of the called object.
    """

    is_direct = True

    def __init__(
        self,
        sender: WorkerProcess,
        slots: ThreadSlots | AsyncSlots,
        method: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        super().__init__(sender, sender.process)
        self.number = id(self)
        self._slots = slots
        self._request = method, args, named

    def start(self, executor: UnitExecutor, slot: RunningSlot | None = None) -> Any:
        """Call the method, whose result may be awaitable. It does not see the context variables of the caller."""
        return Context().run(self._call, executor, slot)

    def _call(self, executor: UnitExecutor, slot: RunningSlot | None) -> Any:
        CURRENT_SLOT.set(slot)
        method, args, named = self._request
        self._request = "", (), {}  # the future may outlive the arguments
        return executor.call(method, *args, **named)

    def run_here(self) -> None:
        self._slots.run_in_this_thread(self)

    def withdraw(self, error: BaseException) -> None:
        self._slots.remove(self)
        with suppress(InvalidStateError):
            self.set_exception(error)

    def end(self, value: Any, error: BaseException | None = None) -> None:
        """Set the result; ignored if the call was withdrawn."""
        try:
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)
        except InvalidStateError:
            pass


class ThreadSlots:
    """Slots of an object whose calls block: a thread each, started when it is needed. Work starts in the order in which
    it arrived."""

    def __init__(self, worker: WorkerProcess, hosted: str, breadcrumbs: list[BreadcrumbCell]) -> None:
        self._worker = worker
        self._hosted = hosted
        self._executor = worker.executors[hosted]
        self._runner = worker.runner
        self._free_breadcrumbs = breadcrumbs
        self._slots = len(breadcrumbs)
        self._lock = Lock()
        self._queue: deque[SlotTask | DirectCall] = deque()
        self._running: set[RunningSlot] = set()
        self._threads = 0
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        """An entry wakes a thread, which runs what is queued; False ends it."""
        self._is_signalled = False
        """Whether an entry waits for a thread: calls in quick succession, which run in the threads that wait for them,
        make only one."""
        self._is_idle = Condition(self._lock)
        self.has_main_thread = False
        """Whether the main thread runs the calls of other processes (`run_queued`)."""

    def run(self, frame: Frame) -> None:
        self._add(SlotTask(self._run_message, frame))

    def _run_message(self, frame: Frame) -> None:
        breadcrumb = self._free_breadcrumbs.pop()
        try:
            self._runner.run(self._executor, frame, breadcrumb)
        finally:
            self._free_breadcrumbs.append(breadcrumb)

    def call(self, frame: Frame) -> None:
        job = SlotTask(self._answer, frame)
        if self.has_main_thread:
            with self._lock:
                self._queue.append(job)
        else:
            self._add(job)

    def _answer(self, frame: Frame) -> None:
        self._runner.answer_call(self._executor, frame)

    def call_directly(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Future[Any]:
        """Call the object from another object of this process. Thread: any."""
        call = DirectCall(self._worker, self, method, args, named)
        self._add(call)
        return call

    def remove(self, call: DirectCall) -> None:
        """A call is withdrawn: if it has not begun, it never does."""
        with self._lock, suppress(ValueError):
            self._queue.remove(call)

    def slots_behind(self, number: int) -> list[RunningSlot]:
        """Slots that may free a call: the one in which it runs, or all, if it is queued; otherwise none."""
        with self._lock:
            running = list(self._running)
            queued = any(job.number == number for job in self._queue)
        own = [slot for slot in running if slot.number == number]
        return own or (running if queued and len(running) == self._slots else [])

    def call_now(self, frame: Frame) -> None:
        """Make a call in this thread, without a slot."""
        self._runner.answer_call(self._executor, frame)

    def cancel(self, message: int) -> bool:
        with self._lock:
            for job in self._queue:
                if isinstance(job, SlotTask) and job.frame.head[:2] == ("run", message):
                    self._queue.remove(job)
                    break
            else:
                return False
        self._runner.return_message(job.frame)
        return True

    def run_in_this_thread(self, call: DirectCall) -> None:
        """Run a call in the thread that waits for it, if it is the next one and a slot is free."""
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - documented
            return
        with self._lock:
            if not self._queue or self._queue[0] is not call or len(self._running) >= self._slots:
                return
            self._queue.popleft()
            slot = RunningSlot(self._hosted, call.number, call.depth)
            self._running.add(slot)
        self._run_job(call, slot)
        if self._queue:
            with self._lock:
                self._wake_thread()

    @property
    def can_run(self) -> bool:
        """Whether work waits and a slot is free."""
        return bool(self._queue) and len(self._running) < self._slots

    def run_queued(self) -> None:
        """Run what waits, in this thread."""
        while (taken := self._take()) is not None:
            self._run_job(*taken)
            del taken  # it may hold the last reference to large arguments

    def finish(self) -> None:
        """Wait for all messages and calls that were sent."""
        if self.has_main_thread:
            self.run_queued()
        with self._is_idle:
            while self.is_busy:
                self._is_idle.wait()

    @property
    def is_busy(self) -> bool:
        return bool(self._queue or self._running)

    def close(self) -> None:
        """End the threads."""
        for _ in range(self._threads):
            self._wakeups.put(False)

    # --- jobs

    def _add(self, job: SlotTask | DirectCall) -> None:
        with self._lock:
            self._queue.append(job)
            self._wake_thread()

    def _wake_thread(self) -> None:
        """Wake or start a thread if work waits and a slot is free. A thread that frees a slot looks for work itself.
        Hold the lock."""
        if self._is_signalled or not self.can_run:
            return
        if self._threads < min(self._slots, len(self._running) + len(self._queue)):
            Thread(target=self._serve, name="slot", daemon=True).start()
            self._threads += 1
        self._is_signalled = True
        self._wakeups.put(True)

    def _serve(self) -> None:
        while self._wakeups.get():
            self._is_signalled = False
            self.run_queued()

    def _take(self) -> tuple[SlotTask | DirectCall, RunningSlot] | None:
        """The next job, if a slot is free, with its slot."""
        with self._lock:
            if not self.can_run:
                return None
            job = self._queue.popleft()
            number = job.number
            depth = job.depth if isinstance(job, DirectCall) else self._worker.depth_of(number)
            slot = RunningSlot(self._hosted, number, depth)
            self._running.add(slot)
            if not self.has_main_thread:
                self._wake_thread()  # for the next job
            return job, slot

    def _run_job(self, job: SlotTask | DirectCall, slot: RunningSlot) -> None:
        try:
            if isinstance(job, DirectCall):
                self._run_call(job, slot)
            else:
                CURRENT_SLOT.set(slot)
                job.run()
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            with self._lock:
                self._running.discard(slot)
                if not self._running and not self._queue:
                    self._is_idle.notify_all()

    def _run_call(self, call: DirectCall, slot: RunningSlot) -> None:
        if not call.set_running_or_notify_cancel():
            return
        try:
            value = call.start(self._executor, slot)
            if is_awaitable(value):
                value = self._runner.await_result(value, slot=slot)
        except BaseException as error:  # passed to the caller
            call.end(None, error)
        else:
            call.end(value)


class AsyncSlots:
    """Slots of an object whose calls are awaited: one event loop in its own thread."""

    def __init__(self, worker: WorkerProcess, hosted: str, breadcrumbs: list[BreadcrumbCell]) -> None:
        self._worker = worker
        self._executor = worker.executors[hosted]
        self._runner = worker.runner
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

    def call_now(self, frame: Frame) -> None:
        """Make a call in this thread, without a slot; an async method is awaited in the event loop."""
        self._runner.answer_call(self._executor, frame, self._loop)

    async def _answer(self, frame: Frame) -> None:
        number, deadline = frame.head[1], frame.head[4]
        calls = self._runner.calls
        async with self._slots:
            if not self._runner.begin_call(number, deadline):
                close_descriptors(frame.descriptors)
                return
            try:
                task = asyncio.current_task()
                assert task is not None
                calls.set_cancel(number, partial(self._loop.call_soon_threadsafe, task.cancel))
                opened = open_value(frame.body, frame.descriptors)
                value = call_hosted(self._executor, frame, opened)
                if is_awaitable(value):
                    value = await value
                self._runner.reply(number, value, opened)
            except BaseException as error:  # passed to the caller
                self._runner.reply_error(number, error)
            finally:
                calls.end(number)

    def call_directly(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Future[Any]:
        """Call the object from another object of this process. Thread: any."""
        call = DirectCall(self._worker, self, method, args, named)
        self._loop.call_soon_threadsafe(self._start_task, self._run_call(call))
        return call

    def run_in_this_thread(self, call: DirectCall) -> None:
        """Nothing: calls run in the event loop."""

    def remove(self, call: DirectCall) -> None:
        """Nothing: async methods are never part of a cycle."""

    def slots_behind(self, _number: int) -> list[RunningSlot]:
        """None: an event loop is always at work."""
        return []

    async def _run_call(self, call: DirectCall) -> None:
        async with self._slots:
            if not call.set_running_or_notify_cancel():
                return
            try:
                value = call.start(self._executor)
                if is_awaitable(value):
                    value = await value
            except BaseException as error:  # passed to the caller
                call.end(None, error)
            else:
                call.end(value)

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

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def close(self) -> None:
        """Nothing: `teardown` ends the event loop."""

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
