"""The engine port with real processes on this machine: commands go out as frames, frames come back as events."""

from __future__ import annotations

import select
import time
from collections import deque
from contextlib import suppress
from itertools import count
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import Cancel, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import WorkerGone
from dovetail.control.events import BatchesReturned, Cause, WorkerLost, WorkerReady, WorkerStopped
from dovetail.engines.local import limits
from dovetail.engines.local.agreed import dumps
from dovetail.engines.local.bell import Bell
from dovetail.engines.local.calling import Calls, settle
from dovetail.engines.local.crumbs import Crumbs
from dovetail.engines.local.deaths import OutOfMemoryWatch, cause_of
from dovetail.engines.local.guest import AsGuest
from dovetail.engines.local.nursing import NurseryLink
from dovetail.engines.local.payloads import Payloads
from dovetail.engines.local.starting import Starter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dovetail.control.commands import EngineCommand, Hosted
    from dovetail.control.events import Event
    from dovetail.engines.local.children import Child, Rank
    from dovetail.engines.local.frames import Frame, Piece
    from dovetail.engines.local.spec import Home
    from dovetail.resources.cluster import Cluster


class LocalEngine(AsGuest):
    """See `control.engine.Engine`. One thread polls and submits; `post`, `call`, `store` and `load` are for any."""

    def __init__(
        self,
        folder: Path | None = None,
        cluster: Cluster | None = None,
        *,
        memory_bytes: int | None = None,
        pin_cpus: bool = False,
        home: Home | None = None,
    ) -> None:
        """`folder`: for logs and spilled payloads. `memory_bytes`: what payloads may fill. `home`: see `spec.Home`."""
        limits.raise_limit_of_descriptors()
        limits.open_standard_descriptors()
        self._folder = folder or limits.a_folder()
        self._crumbs = Crumbs()
        self._starter = Starter(folder, self._folder / "spool", cluster, self._crumbs, pin_cpus=pin_cpus, home=home)
        there = limits.memory_there() // limits.SHARE_OF_MEMORY
        self._numbers = count(1)
        self._payloads = Payloads(self._folder / "spool", min(memory_bytes or there, there), self._numbers)
        # what the ends of a stream need (data.ends.Store): any thread, but `store` only one at a time
        self.store, self.store_split = self._payloads.store, self._payloads.store_split
        self.load, self.let_go = self._payloads.load, self._payloads.let_go
        self.keepsake, self.from_keepsake = self._payloads.keepsake, self._payloads.from_keepsake
        self.adopt, self.raw = self._payloads.adopt, self._payloads.raw
        self._deaths = OutOfMemoryWatch()
        self._children: dict[int, Child] = {}
        self._calls = Calls(self._children, self._numbers, self._put)
        self._ranks: dict[int, Rank] = {}
        self._by_fd: dict[int, Rank] = {}
        self._posted: deque[Event] = deque()
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._bell.fd, select.EPOLLIN)
        self._lock = Lock()
        """For calls, which come from any thread, against the end of a worker and other sending."""
        self._nudged = False
        self._dirty: dict[Rank, None] = {}
        self._closed = False
        self.keep_spool = False
        """Whether what lies in the spool is needed by who goes on with the run."""
        self._heard: list[Event] = []
        self._nursery: NurseryLink | None = None
        self.pids: list[int] = []
        """Of all processes that were ever started for workers."""

    # --- the port

    def submit(self, commands: Sequence[EngineCommand]) -> None:
        with self._lock:
            if self._closed:
                return
            for command in commands:
                kind = type(command)
                if kind is RunBatches:
                    self._run(command)  # type: ignore[arg-type]
                elif isinstance(command, StartWorker):
                    self._start(command)
                elif isinstance(command, Cancel):
                    self._cancel(command)
                elif isinstance(command, StopWorker):
                    self._stop(command)
            self._flush()

    def poll(self, timeout_s: float | None) -> list[Event]:
        self._bell.listener = get_ident()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            left = -1.0 if until is None else max(0.0, until - time.monotonic())
            if self._posted or self._heard or (self._nursery is not None and self._nursery.has_said):
                left = 0.0
            for fd, what in self._epoll.poll(left):
                self._look(fd, what)
            if self._nursery is not None and self._nursery.has_said:
                self._look_at_nursery()
            with self._lock:
                self._give_back()
                self._flush()
            events, self._heard = self._heard, []
            while self._posted:
                events.append(self._posted.popleft())
            nudged, self._nudged = self._nudged, False
            if events or nudged or (until is not None and time.monotonic() >= until):
                return events
        return []

    def post(self, event: Event) -> None:
        self._posted.append(event)
        self._bell.ring()

    def nudge(self) -> None:
        """Wakes `poll`, which returns although nothing happened. From any thread."""
        self._nudged = True
        self._bell.ring()

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        from concurrent.futures import Future  # late: most runs call nobody

        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        body = dumps((args, named))
        with self._lock:
            self._calls.ask(worker, hosted, method, body, future)
        self._bell.ring()
        return future

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        if self._nursery is not None:
            self._nursery.close()
        for child in list(self._children.values()):
            self._forget(child)
        self._epoll.close()
        self._payloads.close()
        if not self.keep_spool:
            limits.remove(self._folder / "spool")
        self._crumbs.close()
        self._bell.close()

    def prepare(self, hosted: Iterable[Hosted]) -> None:
        """Packs the code of what will be started: what cannot be sent is said before anything runs."""
        for one in hosted:
            self._starter.packed(one)

    # --- who is there

    @property
    def unreadable(self) -> bool:
        """Whether an item that was loaded could not be read, ever."""
        return self._payloads.unreadable

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]:
        """Worker -> what it hosts by name, and its processes, each of which leads a session of its own."""
        return {child.number: (child.name, child.pids) for child in list(self._children.values())}

    def is_ready(self, worker: int) -> bool:
        return worker in self._children and self._children[worker].ready

    def running(self, worker: int) -> tuple[int, ...]:
        """The messages that are in a call of the user's code right now."""
        ranks = self._children[worker].ranks if worker in self._children else ()
        return tuple(crumb.message for rank in ranks for crumb in self._crumbs.read(rank.cells))

    # --- out

    def _start(
        self, command: StartWorker, ranks: Sequence[int] | None = None, meeting: tuple[str, int] | None = None
    ) -> None:
        nursery = self._the_nursery()
        child = self._starter.start(command, nursery, self._numbers, ranks, meeting)
        self._children[child.number] = child
        for rank in child.ranks:
            self._ranks[rank.number] = rank
            self._by_fd[rank.channel.fileno()] = rank
            self._epoll.register(rank.channel.fileno(), select.EPOLLIN)

    def _the_nursery(self) -> NurseryLink:
        if self._nursery is None:
            self._nursery = NurseryLink(self._crumbs.fd, self._starter.inherited)
            self._epoll.register(self._nursery.channel.fileno(), select.EPOLLIN)
        return self._nursery

    def _run(self, command: RunBatches) -> None:
        child = self._children.get(command.worker)
        if child is not None and child.end is None:
            self._payloads.send(child, command)
            for rank in child.ranks:
                self._dirty[rank] = None

    def _cancel(self, command: Cancel) -> None:
        """A busy worker does not listen; whether it has begun is seen without its help (see `inside.Inside`)."""
        child = self._children.get(command.worker)
        sent = child.sent.get(command.message) if child is not None else None
        if child is None or sent is None or child.gang:
            return
        rank = child.ranks[0]
        self._put(rank, ("cancel", command.message))
        if sent.turn and rank.channel.flush() and self._crumbs.begun(rank.cells) < sent.turn:
            del child.sent[command.message]
            self._heard.append(BatchesReturned(child.number, command.message))

    def _stop(self, command: StopWorker) -> None:
        child = self._children.get(command.worker)
        if child is None or (child.end is not None and not isinstance(child.end, WorkerStopped)):
            return
        if command.drain:
            if child.end is None and not child.stopping:
                child.stopping = True
                if child.ready or child.sent:
                    for rank in child.ranks:
                        self._put(rank, ("stop",))
                else:  # nothing was sent: nobody waits for the end of its setup
                    child.end = WorkerStopped(child.number)
                    self._kill(child)
            return
        child.end = WorkerLost(child.number, Cause.STOPPED, command.reason)
        self._kill(child)

    def _kill(self, child: Child) -> None:
        for rank in child.ranks:
            if self._nursery is not None and not rank.gone:
                self._nursery.kill(rank.number)

    def _put(self, rank: Rank, head: tuple[Any, ...], body: Sequence[Piece] = ()) -> None:
        rank.channel.put(head, body)
        self._dirty[rank] = None

    def _flush(self) -> None:
        if self._nursery is not None:
            self._nursery.flush()
            self._starter.handed_over()
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, {}
        for rank in dirty:
            if rank.gone:
                continue
            unsent = not rank.channel.flush()
            if unsent != rank.unsent:
                rank.unsent = unsent
                fd = rank.channel.fileno()
                if fd in self._by_fd:  # not of one that has said its last
                    self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if unsent else 0))

    def _give_back(self) -> None:
        for number, unused, kept in self._payloads.freed(self._ranks):
            self._put(self._ranks[number], ("free", unused, kept))

    # --- in

    def _look(self, fd: int, what: int) -> None:
        if fd == self._bell.fd:
            self._bell.heard()
            return
        rank = self._by_fd.get(fd)
        if rank is None:
            self._look_at_nursery()
            return
        if what & select.EPOLLOUT:
            self._dirty[rank] = None
        with suppress(BlockingIOError):
            if what & ~select.EPOLLOUT and not self._read(rank):
                self._epoll.unregister(fd)  # its end is decided by who waits for it, not by its socket
                del self._by_fd[fd]

    def _read(self, rank: Rank) -> bool:
        """One read; False when nothing more can come. BlockingIOError: nothing is there now."""
        frames, there = rank.channel.receive()
        for frame in frames:
            self._hear(rank, frame)
        return there

    def _hear(self, rank: Rank, frame: Frame) -> None:
        head = frame.head
        kind = head[0]
        child = rank.child
        if kind == "done":
            done = self._payloads.received(rank, frame)
            if done is not None:
                self._heard.append(done)
        elif kind == "ready":
            self._ready(rank, head[1], head[2])
        elif kind == "failed":
            child.end = child.end or WorkerLost(child.number, Cause.SETUP_FAILED, f"{head[1]}\n{head[2]}".rstrip())
        elif kind == "stopped":
            rank.stopped = True
        elif kind == "returned":
            if rank is child.ranks[0] and child.sent.pop(head[1], None) is not None:
                self._heard.append(BatchesReturned(child.number, head[1]))
        elif kind == "answer":
            self._answered(child, frame)
        elif kind == "closed":
            self._payloads.closed(rank, head[1])
        elif kind == "ask":
            self._ask(rank, frame)

    def _ready(self, rank: Rank, setup_s: float, simple: bool) -> None:
        child = rank.child
        child.simple = simple and not child.gang
        rank.ready = True
        child.setup_s = max(child.setup_s, setup_s)
        if not child.ready and all(rank.ready for rank in child.ranks):
            child.ready = True
            if child.end is None:
                self._heard.append(WorkerReady(child.number, child.setup_s))

    def _answered(self, child: Child, frame: Frame) -> None:
        with self._lock:
            future = self._calls.answered(child, frame)
        if future is not None:
            settle(future, frame.head[2], frame.body)

    # --- ends

    def _look_at_nursery(self) -> None:
        nursery = self._nursery
        if nursery is None:
            return
        frames, there = nursery.receive()
        for frame in frames:
            match frame.head:
                case ("forked", number, pid):
                    nursery.pids[number] = pid
                    self.pids.append(pid)
                    if number in self._ranks:
                        self._ranks[number].pid = pid
                case ("exited", number, status, why, peak, _seconds):
                    nursery.pids.pop(number, None)
                    self._exited(number, status, why, peak)
        if not there:
            self._nursery_died(nursery)

    def _nursery_died(self, nursery: NurseryLink) -> None:
        """Somebody killed it: everybody it forked is ended, and the next start makes another."""
        self._epoll.unregister(nursery.channel.fileno())
        nursery.died()
        self._nursery = None
        for rank in list(self._ranks.values()):
            self._exited(rank.number, 9, "the process that waits for workers was killed, and they with it", 0)

    def _exited(self, number: int, status: int, why: str, peak: int) -> None:
        rank = self._ranks.pop(number, None)
        if rank is None:
            return
        fd = rank.channel.fileno()
        with suppress(BlockingIOError):
            while fd in self._by_fd and self._read(rank):
                pass
        if self._by_fd.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        child = rank.child
        rank.gone = True
        child.peak = max(child.peak, peak)
        crumbs = self._crumbs.read(rank.cells)
        with self._lock:
            if child.end is None and not rank.stopped:
                cause, detail = cause_of(status, self._deaths)
                child.died(rank, cause, why or detail)
            if not rank.stopped:
                self._kill(child)  # a gang lives and dies together
            child.was_doing(crumbs)
        self._crumbs.give_back(rank.cells)
        if all(rank.gone for rank in child.ranks):
            self._bury(child)

    def _bury(self, child: Child) -> None:
        end = child.last_word()
        self._forget(child)
        self._heard.append(end)

    def _forget(self, child: Child) -> None:
        with self._lock:
            self._children.pop(child.number, None)
            for rank in child.ranks:
                self._by_fd.pop(rank.channel.fileno(), None)
                self._ranks.pop(rank.number, None)
                self._dirty.pop(rank, None)
                rank.gone = True
                rank.channel.close()
                self._payloads.gone(rank)
            child.sent.clear()
            waiting = self._calls.gone(child)
        for future in waiting:
            future.set_exception(WorkerGone(f"worker {child.number} is gone"))
