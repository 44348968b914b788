"""Calls from the driver to workers of its own machine, over sockets of their own. Driver side.

A call of Ray takes longer than most calls of actors, and the agent between driver and worker adds half of that. The
first call to a worker that is ready connects to the socket of its agent (`call_socket`), which passes the connection on
to the worker once it has handled everything that the driver sent to it before; calls wait for that, so they arrive in
the order in which they were made. To the worker the driver is one more caller (`peer_links`). Calls to other machines,
and to workers that are not ready, are calls of Ray. A thread that waits for an answer reads the socket itself; the
thread of this module reads the others.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import time
from contextlib import suppress
from threading import Lock, Thread, get_ident
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import CallNotSentError, WorkerLostError
from dovetail.engines.local import driver_setup
from dovetail.engines.local.call_body import CallBody
from dovetail.engines.local.outgoing_link import OutgoingCall, OutgoingLink, receive_once
from dovetail.engines.local.protocol import LinkState, close_descriptors, encode_frame
from dovetail.engines.ray.call_socket import peer_user
from dovetail.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import RLock

    from dovetail.engines.call_future import Body, WorkerCallFuture
    from dovetail.engines.local.protocol import Frame
    from dovetail.engines.ray.agent_link import AgentLink
    from dovetail.engines.ray.remote_worker import RemoteWorker

    OnAnswer = Callable[[int, bool, Body, Sequence[int]], None]

READ_IN_CALLER_S = 0.05
"""How long a thread that waits for an answer reads the socket itself."""
JOIN_TIMEOUT_S = 2.0


class CallLinks:
    """Links to workers of this machine. Hold the engine's lock, unless stated otherwise."""

    def __init__(
        self,
        lock: RLock,
        on_answer: OnAnswer,
        relay: Callable[[OutgoingLink, OutgoingCall], None],
        on_sent: Callable[[], None],
    ) -> None:
        """`lock`: of the engine. `on_answer` takes an answer or an error, without the lock. `relay` sends a call as a
        call of Ray. `on_sent` is called when calls that had to wait were sent."""
        self._lock = lock
        self._on_answer = on_answer
        self._relay = relay
        self._on_sent = on_sent
        self._links: dict[tuple[int, int], OutgoingLink] = {}
        """(Worker, rank) -> link."""
        self._agents: dict[OutgoingLink, AgentLink] = {}
        self._by_fd: dict[int, OutgoingLink] = {}
        """Links whose socket is open."""
        self._starting = Lock()
        self._epoll: select.epoll | None = None
        self._wakeup = -1
        self._thread: Thread | None = None
        self._is_closing = False

    # --- calls

    def find(self, worker: int, rank: int) -> OutgoingLink | None:
        """The link to a process; None: there is none. Without the lock."""
        link = self._links.get((worker, rank))
        return link if link is not None and link.state is not LinkState.RELAYED else None

    def connect(self, worker: RemoteWorker, rank: int) -> OutgoingLink | None:
        """The link to a process, requested if possible; None: calls to it are calls of Ray."""
        known = self._links.get((worker.number, rank))
        if known is not None:
            return known if known.state is not LinkState.RELAYED else None
        if not worker.ready:
            return None
        agent = worker.agent_of(rank)
        if agent not in worker.ready or agent.lost_reason or not agent.call_address or self._is_closing:
            return None
        try:
            return self._request(agent, worker.number, rank)
        except OSError:  # another machine with the same id, or the agent has closed
            agent.call_address = ""
            return None

    def _request(self, agent: AgentLink, worker: int, rank: int) -> OutgoingLink:
        sock = _connect(agent.call_address)
        link = OutgoingLink(sock, worker, rank)
        try:
            agent.flush()
            request = ("link", agent.call_secret, worker, rank, agent.frames_sent)
            sock.send(encode_frame(request)[0])
            self._by_fd[sock.fileno()] = link
            self._start_thread().register(sock.fileno(), select.EPOLLIN)
        except BaseException:
            self._by_fd.pop(sock.fileno(), None)
            sock.close()
            raise
        self._links[worker, rank] = link
        self._agents[link] = agent
        return link

    def send(self, link: OutgoingLink, call: OutgoingCall) -> None:
        """Send a call, or let it wait. `end_failed` follows, without the lock."""
        with link.lock:
            self._send(link, call)

    def _send(self, link: OutgoingLink, call: OutgoingCall) -> None:
        """Hold the lock of the link."""
        if link.state is LinkState.REFUSED:
            link.failed.append((call, CallNotSentError(f"worker {link.worker} is gone")))
            return
        link.waiting.append(call)
        if link.state is LinkState.OPEN and link.sending is None:
            self._flush(link)

    def _flush(self, link: OutgoingLink) -> None:
        """Hold the lock of the link."""
        is_sent = link.flush()
        if link.channel.is_broken:
            link.state = LinkState.REFUSED
            link.fail_unsent(f"worker {link.worker} is stopping")
        if link.is_full != (not is_sent):
            link.is_full = not is_sent
            self._poll_link(link)
            if not link.is_full:
                self._on_sent()

    def cancel(self, link: OutgoingLink, number: int) -> None:
        """Cancel a call: it is not sent, or its worker cancels it. With or without the engine's lock."""
        with link.lock:
            for call in link.waiting:
                if call.number == number:
                    link.waiting.remove(call)
                    close_descriptors(call.body.descriptors)
                    return
            link.unanswered.discard(number)
            if link.state is LinkState.OPEN:
                self._send(link, OutgoingCall(("cancel_call", number), CallBody(b"")))

    def has_unsent(self, worker: RemoteWorker) -> bool:
        """Whether calls to a worker wait until they can be sent."""
        links = [self._links.get((worker.number, rank)) for rank in range(len(worker.command.seats))]
        return any(link is not None and link.has_unsent for link in links)

    def end_failed(self, link: OutgoingLink) -> None:
        """End the calls that could not be sent. Hold no lock."""
        if not link.failed:
            return
        with link.lock:
            failed, link.failed = link.failed, []
        for call, error in failed:
            close_descriptors(call.body.descriptors)
            if call.head[0] == "call":
                self._on_answer(call.number, False, error, ())

    def on_worker_gone(self, worker: RemoteWorker, *, is_closing: bool) -> None:
        """The worker is gone: what it has answered is read, then the other calls end. A process that it forked may
        still have its socket."""
        for rank in range(len(worker.command.seats)):
            link = self._links.pop((worker.number, rank), None)
            if link is not None:
                self._agents.pop(link, None)
                self._end(link, wait=not is_closing)

    def _end(self, link: OutgoingLink, *, wait: bool) -> None:
        """Read a link to its end, unless another thread does. `wait`: until then."""
        with suppress(OSError):
            link.channel.sock.shutdown(socket.SHUT_RDWR)
        # before the agent's answer, the other thread may need the engine's lock
        if link.reading.acquire(blocking=wait and link.state is not LinkState.REQUESTED):
            try:
                while link.channel.fileno() >= 0:
                    self._read(link)
            except OSError:  # no descriptor is left: the thread of this module tries again
                pass
            finally:
                link.reading.release()

    # --- answers. Thread: any, without the engine's lock

    def read_answer(self, link: OutgoingLink, call: WorkerCallFuture, timeout_s: float | None) -> bool:
        """Read the socket for some time in the thread that waits for an answer: that saves a switch of threads, which
        takes longer than a short call. False: that is not possible now, or another thread does it."""
        if link.state is not LinkState.OPEN or not link.reading.acquire(blocking=False):
            return False
        try:
            self._set_reader(link, by_caller=True)
            end = time.monotonic() + (READ_IN_CALLER_S if timeout_s is None else min(timeout_s, READ_IN_CALLER_S))
            readable = select.poll()
            readable.register(link.channel.fileno(), select.POLLIN)
            while not call.is_answered() and link.channel.fileno() >= 0:
                left_ms = (end - time.monotonic()) * 1000
                if left_ms <= 0 or not readable.poll(left_ms):
                    break
                self._read(link)
        except (OSError, ValueError):  # it was closed meanwhile
            return False
        finally:
            self._set_reader(link, by_caller=False)
            link.reading.release()
        return True

    def _set_reader(self, link: OutgoingLink, *, by_caller: bool) -> None:
        with link.lock:
            link.is_read_by_caller = by_caller
            self._poll_link(link)

    def _poll_link(self, link: OutgoingLink) -> None:
        """Poll a link for what is needed now. Hold its lock."""
        fd = link.channel.fileno()
        if self._epoll is not None and fd in self._by_fd:
            what = 0 if link.is_read_by_caller else select.EPOLLIN
            self._epoll.modify(fd, what | (select.EPOLLOUT if link.is_full else 0))

    def _read(self, link: OutgoingLink) -> None:
        """Read once. Hold `link.reading`."""
        error: EngineError | None = None
        try:
            frames, is_connected = receive_once(link.channel)
        except EngineError as problem:  # the descriptors of an answer were lost: too many files are open
            frames, is_connected, error = [], False, problem
        for frame in frames:
            if frame.head[0] == "linked":
                self._on_linked(link, frame)
            else:
                _, number, fine = frame.head
                link.unanswered.discard(number)
                self._on_answer(number, fine, frame.body, frame.descriptors)
        if not is_connected:
            self._on_end(link, error)

    def _on_linked(self, link: OutgoingLink, frame: Frame) -> None:
        with link.lock:
            link.state = LinkState(frame.head[1])
            if link.state is LinkState.OPEN:
                self._flush(link)
            else:
                error = pickle.loads(frame.body)  # noqa: S301 - from our agent
                link.failed += [(call, error) for call in link.waiting]
                link.waiting.clear()
        self.end_failed(link)
        self._on_sent()

    def _on_end(self, link: OutgoingLink, error: EngineError | None = None) -> None:
        """The socket was closed, because the worker has exited or the agent has not accepted the request; or an answer
        could not be received: the next call makes another link."""
        if error is not None and self._links.get((link.worker, link.rank)) is link:
            del self._links[link.worker, link.rank]
            self._agents.pop(link, None)
        if link.state is LinkState.REQUESTED and not self._is_closing:
            with self._lock:
                self._relay_calls(link)
        why = f"worker {link.worker} is gone"
        with link.lock:
            link.state = link.state if link.state is LinkState.RELAYED else LinkState.REFUSED
            link.fail_unsent(why)
            if self._epoll is not None and link.channel.fileno() in self._by_fd:
                self._epoll.unregister(link.channel.fileno())
                del self._by_fd[link.channel.fileno()]  # last: then the thread may end
            link.channel.close()
            unanswered, link.unanswered = link.unanswered, set()
        self.end_failed(link)
        for number in unanswered:
            self._on_answer(number, False, error or WorkerLostError(why), ())
        self._on_sent()

    def _relay_calls(self, link: OutgoingLink) -> None:
        """The agent did not accept the request: all calls are calls of Ray."""
        with link.lock:
            link.state = LinkState.RELAYED
            calls = list(link.waiting)
            link.waiting.clear()
        agent = self._agents.get(link)
        if agent is not None:
            agent.call_address = ""
        for call in calls:
            self._relay(link, call)

    # --- the thread

    def _start_thread(self) -> select.epoll:
        with self._starting:
            if self._epoll is None:
                driver_setup.raise_descriptor_limit()
                self._epoll = select.epoll()
                self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._epoll.register(self._wakeup, select.EPOLLIN)
                self._thread = Thread(target=self._run, args=(self._epoll,), name="dovetail-call-links", daemon=True)
                self._thread.start()
            return self._epoll

    def _run(self, epoll: select.epoll) -> None:
        while not self._is_closing or self._by_fd:
            for fd, what in epoll.poll():
                link = self._by_fd.get(fd)
                if link is not None:
                    self._on_ready(link, what)
        epoll.close()
        os.close(self._wakeup)

    def _on_ready(self, link: OutgoingLink, what: int) -> None:
        if what & select.EPOLLOUT:
            with link.lock:
                self._flush(link)
            self.end_failed(link)
        if what & ~select.EPOLLOUT and link.reading.acquire(blocking=False):  # otherwise a caller reads
            try:
                self._read(link)
            except OSError:  # not enough memory or descriptors for the moment
                time.sleep(0.001)
            finally:
                link.reading.release()

    def close(self) -> None:
        """Close all links; calls that are not answered end. Hold no lock."""
        self._is_closing = True
        for link in list(self._by_fd.values()):
            with suppress(OSError):
                link.channel.sock.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            os.eventfd_write(self._wakeup, 1)
            if self._thread.ident != get_ident():
                self._thread.join(JOIN_TIMEOUT_S)


def _connect(address: str) -> socket.socket:
    """Connect to the socket of an agent. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(f"\0{address}")
        has_same_user = peer_user(sock) == os.getuid()
    except BaseException:
        sock.close()
        raise
    if not has_same_user:
        sock.close()
        raise PermissionError("the agent belongs to another user")
    return sock


def call_of(number: int, hosted: str, method: str, deadline: float, body: CallBody) -> OutgoingCall:
    """A call of the driver as a link sends it. `deadline`: of the monotonic clock, which all processes of the machine
    share; 0: none."""
    head: tuple[Any, ...] = ("call", number, hosted, method, 0, deadline)
    return OutgoingCall(head, body)
