"""Main function and message loop of a worker process."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections import deque
from mmap import mmap
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle  # noqa: F401 - every worker needs it; the fork server imports it once

from dovetail.control.engine import CONTROL_METHODS
from dovetail.engines.exception_summary import summarize_exception
from dovetail.engines.local.message_runner import MessageRunner
from dovetail.engines.local.protocol import BEGUN_WORD, BREADCRUMB_WORDS, DONT_WAIT, Channel, Frame
from dovetail.engines.local.running_slot import CURRENT_SLOT, RunningSlot
from dovetail.engines.local.timestamped_output import TimestampedOutput
from dovetail.engines.local.worker_spec import RAY_NAMESPACE_VARIABLE
from dovetail.engines.unit_executor import make_executor
from dovetail.engines.worker_context import Worker

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from concurrent.futures import Future

    from dovetail.engines.call_cycles import WaitingSlot
    from dovetail.engines.local.call_waits import WaitableCall
    from dovetail.engines.local.peer_links import PeerLinks
    from dovetail.engines.local.slots import AsyncSlots, ThreadSlots
    from dovetail.engines.local.standby_reader import StandbyReader
    from dovetail.engines.local.worker_spec import WorkerSpec
    from dovetail.engines.unit_executor import UnitExecutor
    from dovetail.engines.worker_context import BreadcrumbCell

SETUP_FAILED_EXIT_CODE = 71
CLEAN_EXIT_CODE = None
LINK_FRAMES = frozenset({"link", "linked", "gone"})
"""Frames about links to other workers."""


def prepare(body: bytes) -> None:
    """Workers of a run get their code with the specification."""


def main(sock: socket.socket, breadcrumbs: int, cells: tuple[int, ...], pickled: bytes) -> int:
    """Run a worker; returns the exit code."""
    spec: WorkerSpec = pickle.loads(pickled)  # noqa: S301 - from our driver
    _enter_driver_context(spec)
    with open(os.devnull) as nothing:  # noqa: PTH123 - pathlib is not loaded
        os.dup2(nothing.fileno(), 0)
    numbers = memoryview(mmap(breadcrumbs, 0)).cast("q")
    views: list[BreadcrumbCell] = [numbers[cell * BREADCRUMB_WORDS : (cell + 1) * BREADCRUMB_WORDS] for cell in cells]
    return WorkerProcess(Channel(sock), spec, views).run()


def _enter_driver_context(spec: WorkerSpec) -> None:
    """Set working folder, module path, standard streams and CPU affinity."""
    with contextlib.suppress(OSError):
        os.chdir(spec.folder)
    sys.path[:] = list(spec.path)
    sys.argv = [""]
    if sys.stdout is not None:  # None if the driver has none
        sys.stdout = TimestampedOutput(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = TimestampedOutput(sys.stderr)
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        import faulthandler

        faulthandler.enable()
    namespace = os.environ.get(RAY_NAMESPACE_VARIABLE)
    if namespace:
        from dovetail.engines.local.ray_namespace import use_namespace

        use_namespace(namespace)
    if spec.cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, spec.cpus)


class WorkerProcess:
    """One worker process. The main thread reads the socket; with one object and one slot it also runs messages."""

    def __init__(self, channel: Channel, spec: WorkerSpec, breadcrumbs: list[BreadcrumbCell]) -> None:
        self.spec = spec
        self.process = spec.worker, spec.rank
        self.breadcrumbs = breadcrumbs
        self._channel = channel
        self._reader: Any = None
        """Thread that reads the socket, started by the first call to another worker."""
        self._standby: StandbyReader | None = None
        """Thread that reads the socket while the main thread runs a call; None: the main thread runs no calls."""
        self._reader_lock = Lock()
        self._links_lock = Lock()
        self._single_slot: RunningSlot | None = None
        """The slot, if the main thread runs messages."""
        self._main_thread_reads = False
        """Whether the main thread only reads the socket."""
        self.executors: dict[str, UnitExecutor] = {}
        self.async_slots: dict[str, AsyncSlots] = {}
        """Slots of async objects."""
        self.slots: dict[str, ThreadSlots | AsyncSlots] = {}
        """Slots of all objects; empty during the setup, and with one object and one slot, whose messages the main
        thread runs."""
        self.runner = MessageRunner(channel.sock, spec, self.exit)
        self.runner.before_await = self._read_while_awaiting

    def exit(self, code: int) -> NoReturn:
        """End this worker at once, without teardown. Thread: any."""
        os._exit(code)

    def install_definitions(self, defined: dict[str, dict[str, object]]) -> None:
        """Define the classes and functions of the user's script under the names by which items refer to them."""
        for module, values in defined.items():
            vars(_ensure_module(module)).update(values)

    def run(self) -> int:
        began = time.perf_counter()
        if not self._set_up():
            return SETUP_FAILED_EXIT_CODE
        hosted_objects = self.spec.hosted
        single_slot = len(hosted_objects) == 1 and hosted_objects[0].slots == 1 and not self.async_slots
        # calls that take no slot are read while the slot is busy
        has_control_methods = any(executor.has_control_methods for executor in self.executors.values())
        gets_messages = any(callable(executor.target) for executor in self.executors.values())
        self.runner.send("ready", time.perf_counter() - began, single_slot and not has_control_methods)
        if single_slot and not has_control_methods:
            self._run_single_slot()
        else:
            from dovetail.engines.local.slots import SlotDispatcher

            self._main_thread_reads = True
            dispatcher = SlotDispatcher(self, self.runner)
            if single_slot and not gets_messages:
                dispatcher.run_in_main_thread()
            else:
                dispatcher.run()
        for name, executor in self.executors.items():
            errors = self.async_slots[name].teardown() if name in self.async_slots else executor.teardown()
            for error in errors:
                print(f"teardown of {name}: {error.line}\n{error.detail}", file=sys.stderr)  # noqa: T201 - its own log
            if executor.writer is not None:
                executor.writer.end()
        self.close_threads()
        self.runner.send("stopped")
        return 0

    def close_threads(self) -> None:
        for slots in self.slots.values():
            slots.close()
        if self._standby is not None:
            self._standby.close()

    def _set_up(self) -> bool:
        try:
            cells = list(self.breadcrumbs)
            for hosted in self.spec.hosted:
                own, cells = cells[: hosted.slots], cells[hosted.slots :]
                defined, work = pickle.loads(hosted.work)  # noqa: S301 - from our driver
                self.install_definitions(defined)
                executor = self.executors[hosted.name] = make_executor(work, self._worker(hosted.name), hosted.slots)
                if executor.is_async:
                    from dovetail.engines.local.slots import AsyncSlots

                    loop = self.async_slots[hosted.name] = AsyncSlots(self, hosted.name, own)
                    loop.setup()
                else:
                    executor.setup()
                if hosted.writer:
                    executor.writer = pickle.loads(hosted.writer)  # noqa: S301 - from our driver
        except BaseException as error:  # raised by user code
            summary = summarize_exception(error)
            print(f"{summary.line}\n{summary.detail}", file=sys.stderr)  # noqa: T201 - its own log
            self.runner.send("failed", summary.line, summary.detail[-8000:])
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
            gpus=spec.gpus,
            cpus=spec.seat.cpu_milli / 1000,
            memory_bytes=spec.seat.memory_bytes,
            context=spec.context,
            caller=self.call,
            call_here=self.call_here,
            run_async=self.runner.await_result,
        )

    # --- receiving

    def receive_frames(self, *, wait: bool) -> list[Frame]:
        """Received frames; waits for the first, or takes all that have arrived: one read ends behind every
        descriptor."""
        if self._reader is not None:
            found: list[Frame] = self._reader.take(wait=wait)
            return found
        links = self.runner.links
        if links is not None:
            frames, there = links.receive(wait=wait)
        else:
            frames, there = self._receive_from_driver(wait=wait)
        if not there:
            self.exit(0)  # the driver has exited
        return frames

    def _receive_from_driver(self, *, wait: bool) -> tuple[list[Frame], bool]:
        """Received frames, before there is any link to another worker; and whether the driver is still connected."""
        frames: list[Frame] = []
        there = True
        try:
            while there:
                more, there = self._channel.receive(0 if wait else DONT_WAIT)
                frames += more
                if wait:
                    break
        except BlockingIOError:
            pass
        if self.runner.links is not None or any(frame.head[0] in LINK_FRAMES for frame in frames):
            links = self._get_links()
            return [frame for frame in frames if not links.on_frame(frame)], there
        return [frame for frame in frames if not self.runner.calls.on_frame(frame)], there

    def _get_links(self) -> PeerLinks:
        with self._links_lock:
            if self.runner.links is None:
                from dovetail.engines.local.peer_links import PeerLinks  # late: most workers make and get no calls

                self.runner.links = PeerLinks(self._channel, self)
            return self.runner.links

    def call(self, worker: int, rank: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        """Call a method of a hosted object: of this process directly, of another worker over a link."""
        if worker == self.spec.worker and rank == self.spec.rank and hosted in self.slots:
            return self.call_here(hosted, method, args, named)
        return self._call_over_link(worker, rank, hosted, method, args, named)

    def call_here(self, hosted: str, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Future[Any]:
        """Call a method of a hosted object of this process."""
        if method in CONTROL_METHODS:  # received like calls of others, and takes no slot
            return self._call_over_link(self.spec.worker, self.spec.rank, hosted, method, args, named)
        return self.slots[hosted].call_directly(method, args, named)

    def _call_over_link(
        self, worker: int, rank: int, hosted: str, method: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Future[Any]:
        links = self._get_links()
        future = links.call(worker, rank, hosted, method, args, named)
        if self._standby is not None:
            if not links.is_linked(worker, rank):
                self._standby.read_now()
            return future
        with (
            self._reader_lock
        ):  # after the call: `stop_reading` sees it, or it is seen here that the thread reads no more
            if not self._main_thread_reads:
                self._start_reader()
        return future

    def depth_of(self, number: int | None) -> int:
        """How many callers wait for a received call."""
        if number is None or self.runner.links is None:
            return 0
        return self.runner.calls.depth_of(number) if number > 0 else self.runner.links.depth_of(number)

    def slots_behind(self, waiting: WaitingSlot) -> Future[list[WaitingSlot]]:
        """See `CallSender`."""
        if waiting.called != self.process:
            return self._get_links().ask_waiting(waiting.called, waiting.call)
        from concurrent.futures import Future

        found: Future[list[WaitingSlot]] = Future()
        found.set_result(self.find_waiting(waiting.call))
        return found

    def find_waiting(self, call: tuple[int, int, int]) -> list[WaitingSlot]:
        """The slots of this process that may free a call, if all of them wait. Thread: any."""
        caller, number = call[:2], call[2]
        mine = self.runner.links.find_received(caller, number) if self.runner.links is not None else None
        if mine is None:
            mine = self.runner.calls.find(caller, number)
        if mine is None and caller != self.process:
            return []
        slots = [slot for one in self.slots.values() for slot in one.slots_behind(mine or number)]
        if mine is not None and self._single_slot is not None:
            slots = [self._single_slot]
        waiting = [self.waiting_slot(slot, waited) for slot in slots if (waited := slot.waits_for) is not None]
        return waiting if len(waiting) == len(slots) else []

    def waiting_slot(self, slot: RunningSlot, call: WaitableCall) -> WaitingSlot:
        from dovetail.engines.call_cycles import WaitingSlot

        return WaitingSlot(
            (*self.process, id(slot)),
            self.executors[slot.hosted].label,
            slot.depth,
            call.called,
            (*self.process, call.number),
        )

    def refuse_calls(self) -> list[Frame]:
        """Accept no further calls of other workers; returns those that were sent before and not received yet."""
        if self.runner.links is None:
            return []
        self.runner.links.refuse_calls()
        return [frame for frame in self.receive_frames(wait=False) if frame.head[0] == "call"]

    def _read_while_awaiting(self) -> None:
        """Read the socket in a thread from now on: the main thread waits for an async method, which may be
        cancelled."""
        if self._standby is not None:
            self._standby.read_now()
            return
        with self._reader_lock:
            if not self._main_thread_reads:
                self._start_reader()

    def stop_reading(self) -> None:
        """The main thread reads no more frames: a thread reads the answers to pending and to later calls."""
        if self._standby is not None:
            self._standby.keep_reading()
            return
        with self._reader_lock:
            self._main_thread_reads = False
            if self.runner.links is not None and self.runner.links.has_pending:
                self._start_reader()

    def start_standby(self, receive: Callable[[], None], has_work: Callable[[], bool]) -> StandbyReader:
        """Start the thread that reads while the main thread runs a call."""
        from dovetail.engines.local.standby_reader import StandbyReader

        self._standby = StandbyReader(receive, has_work, self.exit)
        return self._standby

    def _start_reader(self) -> None:
        if self._reader is None:
            from dovetail.engines.local.slots import ReaderThread

            self._reader = ReaderThread(self._get_links(), self.exit)

    # --- single slot

    def _run_single_slot(self) -> None:
        ((name, executor),) = self.executors.items()
        slot = self._single_slot = RunningSlot(name)
        CURRENT_SLOT.set(slot)
        todo: deque[Frame] = deque()
        has_read = False
        """Whether nothing was executed since the last read."""
        while True:
            if not todo:
                self._receive_into(todo, wait=True)
                has_read = True
                continue
            frame = todo.popleft()
            kind = frame.head[0]
            if kind == "run":
                if self._claim_message(frame, todo):
                    self.runner.run(executor, frame, self.breadcrumbs[0])
                else:
                    self.runner.return_message(frame)
            elif kind == "call":
                if not has_read:  # it may be cancelled
                    self._receive_into(todo, wait=False)
                slot.number, slot.depth = frame.head[1], self.depth_of(frame.head[1])
                self.runner.answer_call(executor if frame.head[2] == name else None, frame)
                slot.number, slot.depth = None, 0
            elif kind == "stop":
                for last in (*todo, *self.refuse_calls()):
                    if last.head[0] == "call":
                        self.runner.answer_call(executor if last.head[2] == name else None, last)
                return
            has_read = False

    def _receive_into(self, todo: deque[Frame], *, wait: bool) -> list[int]:
        """Queue received frames; returns the cancelled messages."""
        cancelled = []
        for frame in self.receive_frames(wait=wait):
            kind = frame.head[0]
            if kind == "cancel":
                cancelled.append(frame.head[1])
            elif kind == "free":
                self.runner.free_buffers(*frame.head[1:])
            else:
                todo.append(frame)
        for message in cancelled:
            for frame in todo:
                if frame.head[0] == "run" and frame.head[1] == message:
                    todo.remove(frame)
                    self.runner.return_message(frame)
                    break
        return cancelled

    def _claim_message(self, frame: Frame, todo: deque[Frame]) -> bool:
        """Whether the message is still to be run. The worker records the start first and reads cancellations then; the
        driver sends the cancellation first and reads the record then. So at least one of them sees the other."""
        number = frame.head[8]
        if not number:
            return True  # not prefetched: it is never cancelled
        self.breadcrumbs[0][BEGUN_WORD] = number
        return frame.head[1] not in self._receive_into(todo, wait=False)


def _ensure_module(name: str) -> ModuleType:
    """The module; created together with its parent packages if it does not exist."""
    parent, _, _ = name.rpartition(".")
    if name not in sys.modules:
        if parent:
            _ensure_module(parent).__path__ = []
        sys.modules[name] = ModuleType(name)
    return sys.modules[name]
