"""Local engine: the engine port with worker processes on this machine."""

from __future__ import annotations

import pickle
import select
import socket
import time
from collections import deque
from contextlib import suppress
from itertools import count
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import Cancel, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import DEFAULT_CALL, CallOptions
from dovetail.control.events import BatchesReturned, LossCause, WorkerLost, WorkerReady, WorkerStopped
from dovetail.engines import payload_memory
from dovetail.engines.local import driver_setup
from dovetail.engines.local.breadcrumbs import BreadcrumbTable
from dovetail.engines.local.call_body import CallBody, to_portable, to_shared_memory
from dovetail.engines.local.exit_cause import OomKillCounter, describe_exit
from dovetail.engines.local.forkserver_client import ForkServerClient
from dovetail.engines.local.launcher import WorkerLauncher, find_free_port
from dovetail.engines.local.payload_table import PayloadTable
from dovetail.engines.local.protocol import close_descriptors
from dovetail.engines.local.standard_descriptors import open_standard_descriptors
from dovetail.engines.local.wakeup import Wakeup
from dovetail.engines.local.worker_call_router import WorkerCallRouter, lost_error, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dovetail.control.commands import EngineCommand, HostedObject
    from dovetail.control.events import Event
    from dovetail.engines.call_future import WorkerCallFuture
    from dovetail.engines.local.driver_calls import DriverCalls
    from dovetail.engines.local.forkserver_client import ProcessServer
    from dovetail.engines.local.memory_watch import MemoryWatch
    from dovetail.engines.local.protocol import Chunk, Frame
    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.engines.local.worker_state import LocalWorker, RankProcess
    from dovetail.resources.cluster import Cluster

    OnForeignCall = Callable[[int, int, int, str, str, list[bytes], CallOptions], None]

MAX_SERVERS_LOST = 10
"""Fork servers that may be killed from outside without a charge for the items of their workers; beyond it a call or a
setup may be what kills them, and the run must not repeat it without limit."""


READ_IN_CALLER_S = 0.05
"""How long a thread that waits for an answer reads the socket itself."""
MEMORY_CHECK_S = 0.25
"""Interval of the checks whether memory runs out."""


class LocalEngine:
    """See `control.engine.Engine`. One thread polls and submits; `post`, `call`, `store` and `load` are thread-safe."""

    on_foreign_call: OnForeignCall | None = None
    """Forwards a call from a worker to a worker on another node: (token of the calling process, call number, worker,
    hosted, method, pieces of the arguments, options). `answer_foreign_call` sends the answer."""
    on_foreign_cancel: Callable[[int, int], object] | None = None
    """Forwards the cancellation of such a call: (token, call number)."""

    def __init__(
        self,
        folder: Path | None = None,
        cluster: Cluster | None = None,
        *,
        memory_bytes: int | None = None,
        pin_cpus: bool = False,
        driver_context: DriverContext | None = None,
        memory_watch: MemoryWatch | None = None,
        start_server: Callable[[int, Mapping[str, str] | None], ProcessServer] = ForkServerClient,
    ) -> None:
        """Open an engine without workers.

        `folder` is for logs and spilled payloads, `memory_bytes` limits the memory of payloads, `driver_context` is
        given if the driver is another process. `memory_watch` chooses the worker to end before memory runs out (None:
        one that exceeds its request). `start_server` is called when the first worker starts, with the descriptor of
        the breadcrumbs and the environment of the server (None: that of this process).
        """
        driver_setup.raise_descriptor_limit()
        open_standard_descriptors()
        self._folder = folder or driver_setup.make_temporary_folder()
        self._breadcrumbs = BreadcrumbTable()
        self._launcher = WorkerLauncher(
            folder, self._folder / "spool", cluster, self._breadcrumbs, pin_cpus=pin_cpus, driver_context=driver_context
        )
        max_payload_bytes = payload_memory.total_memory_bytes() // payload_memory.PAYLOAD_MEMORY_DIVISOR
        payload_bytes = min(memory_bytes or max_payload_bytes, max_payload_bytes)
        self._numbers = count(1)
        self._payloads = PayloadTable(self._folder / "spool", payload_bytes, self._numbers)
        # see data.interfaces.PayloadStore. Thread: any, but one `store` at a time
        self.store, self.store_split = self._payloads.store, self._payloads.store_split
        self.load, self.release_mappings = self._payloads.load, self._payloads.release_mappings
        self.spool_record, self.from_spool_record = self._payloads.spool_record, self._payloads.from_spool_record
        self.adopt, self.read_raw = self._payloads.adopt, self._payloads.read_raw
        self._oom_kills = OomKillCounter()
        self._memory_watch = memory_watch
        self._memory_checked_at = 0.0
        self._workers: dict[int, LocalWorker] = {}
        self._calls = WorkerCallRouter(self._workers, self._numbers, self._queue_frame)
        self._driver_calls: DriverCalls | None = None
        """Calls of this process; None: it made none."""
        self._deferred: deque[tuple[RankProcess, Frame]] = deque()
        """Frames for the polling thread that a caller's thread has read."""
        self._ranks: dict[int, RankProcess] = {}
        self._by_fd: dict[int, RankProcess] = {}
        self._posted: deque[Event] = deque()
        self._wakeup = Wakeup()
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup.fd, select.EPOLLIN)
        self._lock = Lock()
        """Protects workers and outgoing frames against `call`, which runs in any thread."""
        self._nudged = False
        self._unflushed: dict[RankProcess, None] = {}
        self._closed = False
        self.keep_spool = False
        """Whether the spool is kept for a resume."""
        self._events: list[Event] = []
        self._start_server = start_server
        self._forkserver: ProcessServer | None = None
        self._servers_lost = 0

    # --- engine port

    def submit(self, commands: Sequence[EngineCommand]) -> None:
        with self._lock:
            if self._closed:
                return
            for command in commands:
                if isinstance(command, RunBatches):
                    self._run(command)
                elif isinstance(command, StartWorker):
                    self._start(command)
                elif isinstance(command, Cancel):
                    self._cancel(command)
                elif isinstance(command, StopWorker):
                    self._stop(command)
            self._flush()

    def poll(self, timeout_s: float | None) -> list[Event]:
        self._wakeup.polling_thread = get_ident()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            left = -1.0 if until is None else max(0.0, until - time.monotonic())
            self._wait_and_handle(0.0 if self._posted or self._events else left)
            events, self._events = self._events, []
            while self._posted:
                events.append(self._posted.popleft())
            nudged, self._nudged = self._nudged, False
            if events or nudged or (until is not None and time.monotonic() >= until):
                return events
        return []

    def _wait_and_handle(self, left: float) -> None:
        """Wait for input, at most `left` seconds (below 0: without limit), and handle it."""
        if self._workers and not 0 <= left <= MEMORY_CHECK_S:
            left = MEMORY_CHECK_S
        if self._forkserver is not None and self._forkserver.has_frames:
            left = 0.0
        if self._driver_calls is not None:
            left = self._driver_calls.seconds_left(left)
        for fd, what in self._epoll.poll(left):
            self._on_readable(fd, what)
        if self._deferred:
            self._handle_deferred()
        if self._forkserver is not None and self._forkserver.has_frames:
            self._read_forkserver()
        if self._driver_calls is not None:
            self._driver_calls.end_overdue()
        if self._workers:
            self._check_memory(time.monotonic())
        with self._lock:
            self._return_buffers()
            self._flush()

    def _wait_for(self, call: WorkerCallFuture, timeout_s: float | None) -> None:
        """See `CallOwner.wait_for`."""
        if get_ident() != self._wakeup.polling_thread:
            self._read_in_caller(call, timeout_s)
            return
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed and not call.is_answered():
            left = -1.0 if until is None else until - time.monotonic()
            if until is not None and left <= 0:
                break
            self._wait_and_handle(left)

    def _read_in_caller(self, call: WorkerCallFuture, timeout_s: float | None) -> None:
        """Read the socket of the called process for some time, in place of the polling thread: that saves a switch of
        threads, which takes longer than a short call."""
        rank = self._calls.process_of(call)
        if rank is None or not rank.reading.acquire(blocking=False):
            return
        try:
            if not self._set_read_by_caller(rank, True):
                return
            try:
                limit_s = READ_IN_CALLER_S if timeout_s is None else min(timeout_s, READ_IN_CALLER_S)
                self._read_answers(rank, call, time.monotonic() + limit_s)
            finally:
                self._set_read_by_caller(rank, False)
        finally:
            rank.reading.release()
        if self._deferred:
            self._wakeup.wake()

    def _set_read_by_caller(self, rank: RankProcess, value: bool) -> bool:
        """False: the process has exited."""
        with self._lock:
            rank.is_read_by_caller = value
            if self._closed or rank.channel.fileno() not in self._by_fd:
                return False
            self._update_polling(rank)
        return True

    def _read_answers(self, rank: RankProcess, call: WorkerCallFuture, until: float) -> None:
        readable = select.poll()
        readable.register(rank.channel.fileno(), select.POLLIN)
        is_connected = True
        while is_connected and not call.is_answered():
            left_ms = (until - time.monotonic()) * 1000
            if left_ms <= 0 or not readable.poll(left_ms):
                return
            try:
                frames, is_connected = rank.channel.receive()
            except OSError:  # the engine was closed, or the frame is not complete yet
                continue
            for frame in frames:
                if frame.head[0] == "answer":
                    self._on_answer(rank.child, frame)
                else:
                    self._deferred.append((rank, frame))

    def _handle_deferred(self) -> None:
        """Handle frames that threads of callers have read."""
        while self._deferred:
            self._on_frame(*self._deferred.popleft())

    def post(self, event: Event) -> None:
        self._posted.append(event)
        self._wakeup.wake()

    def nudge(self) -> None:
        """Wake `poll`, which returns even if no event occurred. Thread: any."""
        self._nudged = True
        self._wakeup.wake()

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        return self._get_driver_calls().call(DEFAULT_CALL, worker, hosted, method, args, named)

    def call_with(
        self, options: CallOptions, worker: int, hosted: str, method: str, /, *args: Any, **named: Any
    ) -> Future[Any]:
        return self._get_driver_calls().call(options, worker, hosted, method, args, named)

    def _get_driver_calls(self) -> DriverCalls:
        if self._driver_calls is None:
            from dovetail.engines.local.driver_calls import DriverCalls  # late: most runs make no calls

            with self._lock:
                if self._driver_calls is None:
                    self._driver_calls = DriverCalls(
                        self._calls,
                        self._lock,
                        self._flush_rank,
                        self._wakeup.wake,
                        self._wait_for,
                        self._payloads.new_pool,
                    )
        return self._driver_calls

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        if self._forkserver is not None:
            self._forkserver.close()
        if self._driver_calls is not None:
            self._driver_calls.close()
        for child in list(self._workers.values()):
            self._remove_worker(child)
        self._epoll.close()
        self._payloads.close()
        if not self.keep_spool:
            driver_setup.remove_folder(self._folder / "spool")
        self._breadcrumbs.close()
        self._wakeup.close()

    def prepare(self, hosted: Iterable[HostedObject]) -> None:
        """Pickle the code of all hosted objects, so that code that cannot be pickled is reported before anything
        starts."""
        for one in hosted:
            self._launcher.pickled_work(one)

    # --- state of workers

    @property
    def unreadable(self) -> bool:
        """Whether any loaded item could not be read."""
        return self._payloads.unreadable

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]:
        """Worker -> name of its unit and its processes; each process leads its own session."""
        return {child.number: (child.name, child.pids) for child in list(self._workers.values())}

    def is_ready(self, worker: int) -> bool:
        return worker in self._workers and self._workers[worker].ready

    def running(self, worker: int) -> tuple[int, ...]:
        """Messages whose user code is running."""
        ranks = self._workers[worker].ranks if worker in self._workers else ()
        return tuple(breadcrumb.message for rank in ranks for breadcrumb in self._breadcrumbs.read(rank.cells))

    # --- for the agent on a node of a Ray cluster, which hosts this engine

    def start_ranks(self, command: StartWorker, ranks: tuple[int, ...], meeting: tuple[str, int] | None) -> None:
        """Like `submit([command])`, for these ranks only; the others run on other nodes. `meeting` is the address and a
        free port of rank 0's node; None: there is one rank, or all ranks run here."""
        assert meeting is not None or len(ranks) == len(command.seats), "ranks on several nodes need a place to meet"
        with self._lock:
            if not self._closed:
                self._start(command, ranks, meeting)
                self._flush()

    def free_port(self, seed: int = 0) -> int:
        """A free port of this machine, for the rendezvous of a gang; see `StartWorker.rendezvous_seed`."""
        return find_free_port(seed=seed)

    def set_devices(self, node: str, devices: Mapping[int, str]) -> None:
        """Set the CUDA names of the cards of a node, by position, for workers that start from now on."""
        self._launcher.devices[node] = dict(devices)

    def end_worker(self, worker: int, cause: LossCause, detail: str) -> None:
        """Kill a worker and report this cause. Ignored if it is already ending."""
        with self._lock:
            child = self._workers.get(worker)
            if child is None or child.end is not None:
                return
            child.end = WorkerLost(worker, cause, detail)
            self._kill(child)
            self._flush()

    def call_pickled(
        self, worker: int, hosted: str, method: str, pieces: Sequence[bytes], options: CallOptions = DEFAULT_CALL
    ) -> Future[tuple[bool, list[bytes]]]:
        """Like `call`, with arguments as `call_body.pack_portable` makes them; resolves to such pieces, too, or to
        (False, pickled error) if there is no such worker. Its callbacks run in the thread of the loop."""
        return self._get_driver_calls().call_pickled(options, worker, hosted, method, pieces)

    def answer_foreign_call(self, token: int, number: int, fine: bool, pieces: Sequence[bytes]) -> None:
        """Send an answer to the calling process; ignored if it has exited."""
        try:
            body = to_shared_memory(pieces)
        except OSError as error:  # no memory or no descriptor is left
            fine, body = False, CallBody(pickle.dumps(error))
        with self._lock:
            rank = self._ranks.get(token)
            if rank is not None and not rank.has_exited:
                self._queue_frame(rank, ("answer", number, fine), [body.data], body.descriptors)
                self._flush()
            else:
                close_descriptors(body.descriptors)

    def link_driver(self, worker: int, rank: int, sock: socket.socket) -> None:
        """Give a process the socket over which the driver on this machine will call it, behind all calls sent to it
        before."""
        with self._lock:
            self._calls.link_driver(worker, rank, sock)
            self._flush()

    def _check_memory(self, now: float) -> None:
        if now < self._memory_checked_at + MEMORY_CHECK_S:
            return
        self._memory_checked_at = now
        if self._memory_watch is None:
            from dovetail.engines.local.memory_watch import LOCAL_FULL_SHARE, MemoryWatch  # late: not needed at start

            self._memory_watch = MemoryWatch(full=LOCAL_FULL_SHARE, only_excess=True)
        requested = {child.number: child.memory_bytes for child in self._workers.values()}
        chosen = self._memory_watch.check(now, self.processes(), requested)
        if chosen is not None:
            self.end_worker(chosen[0], LossCause.OUT_OF_MEMORY, chosen[1])

    def _on_call(self, rank: RankProcess, frame: Frame) -> None:
        """A worker calls another worker."""
        foreign = self.on_foreign_call
        with self._lock:
            here = self._calls.relay_call(rank, frame, elsewhere=foreign is not None)
        if not here and foreign is not None:
            _, number, worker, hosted, method, called_rank, _ = frame.head
            pieces = to_portable(frame.body, frame.descriptors)
            options = CallOptions(called_rank, origin=origin_of(rank, frame))
            foreign(rank.number, number, worker, hosted, method, pieces, options)

    def _on_cancel_call(self, rank: RankProcess, number: int) -> None:
        """A worker cancels a call that it did not send over a link."""
        with self._lock:
            is_here = self._calls.cancel_relayed(rank, number)
        if not is_here and self.on_foreign_cancel is not None:
            self.on_foreign_cancel(rank.number, number)

    def _on_link(self, rank: RankProcess, frame: Frame) -> None:
        """A worker wants to call another worker over a socket of their own."""
        with self._lock:
            self._calls.link(rank, frame, elsewhere=self.on_foreign_call is not None)

    def _start(
        self, command: StartWorker, ranks: Sequence[int] | None = None, meeting: tuple[str, int] | None = None
    ) -> None:
        server = self._get_forkserver()
        child = self._launcher.start(command, server, self._numbers, ranks, meeting)
        self._workers[child.number] = child
        for rank in child.ranks:
            self._ranks[rank.number] = rank
            self._by_fd[rank.channel.fileno()] = rank
            self._epoll.register(rank.channel.fileno(), select.EPOLLIN)

    def _get_forkserver(self) -> ProcessServer:
        if self._forkserver is None:
            self._forkserver = self._start_server(self._breadcrumbs.fd, self._launcher.inherited)
            self._epoll.register(self._forkserver.channel.fileno(), select.EPOLLIN)
        return self._forkserver

    def _run(self, command: RunBatches) -> None:
        child = self._workers.get(command.worker)
        if child is not None and child.end is None:
            self._payloads.send(child, command)
            for rank in child.ranks:
                self._unflushed[rank] = None

    def _cancel(self, command: Cancel) -> None:
        """Cancel a message. A busy worker does not read its socket; the breadcrumb shows whether the message has
        started (see `worker_main.WorkerProcess`)."""
        child = self._workers.get(command.worker)
        sent = child.in_flight.get(command.message) if child is not None else None
        if child is None or sent is None or child.is_gang:
            return
        rank = child.ranks[0]
        self._queue_frame(rank, ("cancel", command.message))
        if (
            sent.prefetch_number
            and rank.channel.flush()
            and self._breadcrumbs.last_begun(rank.cells) < sent.prefetch_number
        ):
            del child.in_flight[command.message]
            self._events.append(BatchesReturned(child.number, command.message))

    def _stop(self, command: StopWorker) -> None:
        child = self._workers.get(command.worker)
        if child is None or (child.end is not None and not isinstance(child.end, WorkerStopped)):
            return
        if command.drain:
            if child.end is None and not child.stopping:
                child.stopping = True
                if child.ready or child.in_flight or child.calls or child.callers:
                    for rank in child.ranks:
                        self._queue_frame(rank, ("stop",))
                else:  # nothing was sent: do not wait for its setup
                    child.end = WorkerStopped(child.number)
                    self._kill(child)
            return
        child.end = WorkerLost(child.number, LossCause.STOPPED, command.reason)
        self._kill(child)

    def _kill(self, child: LocalWorker) -> None:
        for rank in child.ranks:
            if self._forkserver is not None and not rank.has_exited:
                self._forkserver.kill(rank.number)

    def _queue_frame(
        self, rank: RankProcess, head: tuple[Any, ...], body: Sequence[Chunk] = (), descriptors: Sequence[int] = ()
    ) -> None:
        """Queue a frame; closes the descriptors after they are sent."""
        rank.channel.put(head, body, descriptors)
        rank.passed_fds += descriptors
        self._unflushed[rank] = None

    def _flush(self) -> None:
        if self._forkserver is not None:
            self._forkserver.flush()
            self._launcher.close_passed()
        if not self._unflushed:
            return
        dirty, self._unflushed = self._unflushed, {}
        for rank in dirty:
            self._flush_rank(rank)

    def _flush_rank(self, rank: RankProcess) -> None:
        """Hold the lock."""
        self._unflushed.pop(rank, None)
        if rank.has_exited or self._closed:
            return
        unsent = not rank.channel.flush()
        if rank.passed_fds and not unsent:
            rank.close_passed()
        if unsent != rank.has_unsent:
            rank.has_unsent = unsent
            if rank.channel.fileno() in self._by_fd:  # it may have closed its end
                self._update_polling(rank)

    def _update_polling(self, rank: RankProcess) -> None:
        """Hold the lock."""
        events = 0 if rank.is_read_by_caller else select.EPOLLIN
        self._epoll.modify(rank.channel.fileno(), events | (select.EPOLLOUT if rank.has_unsent else 0))

    def _return_buffers(self) -> None:
        for number, unused, kept in self._payloads.take_freed(self._ranks):
            self._queue_frame(self._ranks[number], ("free", unused, kept))

    # --- incoming frames

    def _on_readable(self, fd: int, what: int) -> None:
        if fd == self._wakeup.fd:
            self._wakeup.clear()
            return
        rank = self._by_fd.get(fd)
        if rank is None:
            self._read_forkserver()
            return
        if what & select.EPOLLOUT:
            self._unflushed[rank] = None
        if what & ~select.EPOLLOUT and rank.reading.acquire(blocking=False):  # otherwise a caller reads
            try:
                with suppress(BlockingIOError):
                    if not self._read(rank):
                        self._stop_listening(fd)  # the fork server reports its exit
            finally:
                rank.reading.release()

    def _stop_listening(self, fd: int) -> None:
        with self._lock:  # `call` may change what the descriptor is polled for
            if self._by_fd.pop(fd, None) is not None:
                self._epoll.unregister(fd)

    def _read(self, rank: RankProcess) -> bool:
        """Read once. False: end of the stream. BlockingIOError: no data yet. Hold `reading`."""
        if self._deferred:
            self._handle_deferred()
        frames, is_connected = rank.channel.receive()
        for frame in frames:
            self._on_frame(rank, frame)
        return is_connected

    def _on_frame(self, rank: RankProcess, frame: Frame) -> None:
        head = frame.head
        kind = head[0]
        child = rank.child
        if kind == "done":
            done = self._payloads.on_done(rank, frame)
            if done is not None:
                self._events.append(done)
        elif kind == "ready":
            self._on_ready(rank, head[1], head[2])
        elif kind == "failed":
            child.end = child.end or WorkerLost(child.number, LossCause.SETUP_FAILED, f"{head[1]}\n{head[2]}".rstrip())
        elif kind == "stopped":
            rank.stopped = True
        elif kind == "returned":
            if rank is child.ranks[0] and child.in_flight.pop(head[1], None) is not None:
                self._events.append(BatchesReturned(child.number, head[1]))
        elif kind == "answer":
            self._on_answer(child, frame)
        elif kind == "closed":
            self._payloads.on_buffers_closed(rank, head[1])
        else:
            self._on_request(rank, frame)

    def _on_request(self, rank: RankProcess, frame: Frame) -> None:
        """A process calls another one, cancels a call, or wants a socket for its calls."""
        kind = frame.head[0]
        if kind == "ask":
            self._on_call(rank, frame)
        elif kind == "cancel_call":
            self._on_cancel_call(rank, frame.head[1])
        elif kind == "link":
            self._on_link(rank, frame)

    def _on_ready(self, rank: RankProcess, setup_s: float, simple: bool) -> None:
        child = rank.child
        child.is_single_slot = simple and not child.is_gang
        rank.ready = True
        child.setup_s = max(child.setup_s, setup_s)
        if not child.ready and all(rank.ready for rank in child.ranks):
            child.ready = True
            if child.end is None:
                self._events.append(WorkerReady(child.number, child.setup_s))

    def _on_answer(self, child: LocalWorker, frame: Frame) -> None:
        with self._lock:
            call = self._calls.on_answer(child, frame)
            if call is not None and self._driver_calls is not None:
                self._driver_calls.forget(call, is_unused=frame.head[3])
        if call is not None:
            call.deliver(frame.head[2], frame.body, frame.descriptors)

    # --- exits

    def _read_forkserver(self) -> None:
        server = self._forkserver
        if server is None:
            return
        frames, there = server.receive()
        for frame in frames:
            match frame.head:
                case ("forked", number, pid):
                    server.pids[number] = pid
                    if number in self._ranks:
                        self._ranks[number].pid = pid
                case ("exited", number, status, why, peak, _seconds):
                    server.pids.pop(number, None)
                    self._on_exit(number, status, why, peak)
        if not there:
            self._on_forkserver_died(server)

    def _on_forkserver_died(self, server: ProcessServer) -> None:
        """The fork server was killed: kill its workers. The next start launches a new one."""
        self._epoll.unregister(server.channel.fileno())
        server.kill_orphans()
        self._forkserver = None
        self._servers_lost += 1
        cause = LossCause.SERVER_LOST if self._servers_lost <= MAX_SERVERS_LOST else LossCause.SIGNAL
        for rank in list(self._ranks.values()):
            self._on_exit(rank.number, 9, "the fork server was killed, and its workers with it", 0, cause)

    def _on_exit(self, number: int, status: int, why: str, peak: int, cause: LossCause | None = None) -> None:
        rank = self._ranks.pop(number, None)
        if rank is None:
            return
        fd = rank.channel.fileno()
        if rank.is_read_by_caller:
            with suppress(OSError):
                rank.channel.sock.shutdown(socket.SHUT_RD)  # the caller stops reading
        with rank.reading, suppress(BlockingIOError):
            while fd in self._by_fd and self._read(rank):
                pass
        self._handle_deferred()
        self._stop_listening(fd)
        child = rank.child
        rank.has_exited = True
        child.peak = max(child.peak, peak)
        breadcrumbs = self._breadcrumbs.read(rank.cells)
        with self._lock:
            if child.end is None and not rank.stopped:
                found, detail = (cause, why) if cause is not None else describe_exit(status, self._oom_kills)
                child.on_process_died(rank, found, why or detail)
            if not rank.stopped:
                self._kill(child)  # the ranks of a gang end together
            child.add_breadcrumbs(breadcrumbs)
        self._breadcrumbs.release(rank.cells)
        if all(rank.has_exited for rank in child.ranks):
            self._report_end(child)

    def _report_end(self, child: LocalWorker) -> None:
        end = child.final_event()
        self._remove_worker(child)
        self._events.append(end)

    def _remove_worker(self, child: LocalWorker) -> None:
        with self._lock:
            self._workers.pop(child.number, None)
            for rank in child.ranks:
                self._by_fd.pop(rank.channel.fileno(), None)
                self._ranks.pop(rank.number, None)
                self._unflushed.pop(rank, None)
                rank.has_exited = True
                rank.channel.close()
                rank.close_passed()
                self._payloads.on_process_gone(rank)
            child.in_flight.clear()
            waiting = self._calls.on_worker_gone(child)
            if self._driver_calls is not None:
                for call in waiting:
                    self._driver_calls.forget(call)
        for call in waiting:
            call.deliver(False, lost_error(child))
