"""Calls between the workers of one machine, over sockets of their own. Worker side.

A process that calls another one for the first time makes a pair of sockets, keeps one end, and sends the other one to
the driver, which passes it on behind all frames that it sent to the called process before, and confirms it. The calls
of the process wait for the confirmation, so they arrive in the order in which they were made. Calls to workers of other
machines are relayed by the driver.
"""

from __future__ import annotations

import pickle
import select
import socket
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.control.engine import CallNotSentError, WorkerLostError
from dovetail.engines.local.call_body import load_value, pack_value
from dovetail.engines.local.protocol import (
    DONT_WAIT,
    LINK_OPEN,
    LINK_REFUSED,
    LINK_RELAYED,
    Channel,
    Frame,
    close_descriptors,
    pickle_value,
    send_frame,
)

if TYPE_CHECKING:
    from dovetail.engines.local.call_body import CallBody
    from dovetail.engines.local.message_runner import MessageRunner

LINK_RETRY_S = 0.5
"""Minimum time between two requests for a link to a worker that was not on this machine: it may not have started."""
LINK_CALL_NUMBER = -1
"""Numbers of calls that arrive over links are negative, those of the driver positive."""


class OutgoingCall(NamedTuple):
    number: int
    hosted: str
    method: str
    body: CallBody


class OutgoingLink:
    """Calls of this process to one process of another worker. Hold its lock, unless stated otherwise."""

    def __init__(self, worker: int, rank: int) -> None:
        self.worker = worker
        self.rank = rank
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        self.channel = Channel(ours)
        self.lock = Lock()
        self.state = ""
        """Empty until the driver answers the request."""
        self.names: frozenset[str] = frozenset()
        """Objects that the worker hosts."""
        self.requested_at = time.monotonic()
        self.waiting: deque[OutgoingCall] = deque()
        """Calls that were not sent yet."""
        self.sending: OutgoingCall | None = None
        """The call that the channel has not sent completely."""
        self.unanswered: set[int] = set()
        self.failed: list[tuple[OutgoingCall, BaseException]] = []
        """Calls to be ended with an error once no lock is held: their callbacks may make calls."""

    def flush(self) -> bool:
        """Send as much as possible without blocking. False: the socket is full."""
        while True:
            if not self.channel.flush():
                return False
            if self.channel.is_broken:
                return True
            if self.sending is not None:
                close_descriptors(self.sending.body.descriptors)
                self.sending = None
            if not self.waiting:
                return True
            self.sending = call = self.waiting.popleft()
            self.unanswered.add(call.number)
            self.channel.put(("call", call.number, call.hosted, call.method), [call.body.data], call.body.descriptors)

    def fail_unsent(self, why: str) -> None:
        """End the calls that were not sent completely."""
        unsent = [*([] if self.sending is None else [self.sending]), *self.waiting]
        self.failed += [(call, CallNotSentError(why)) for call in unsent]
        self.waiting.clear()
        self.sending = None


class IncomingLink:
    """Calls of another process to this one."""

    def __init__(self, fd: int) -> None:
        self.channel = Channel(socket.socket(fileno=fd))
        self._lock = Lock()

    def answer(self, number: int, fine: bool, body: CallBody) -> None:
        """Send an answer. May block: a process that makes calls always reads. Thread: any."""
        try:
            with self._lock, suppress(OSError):  # the caller has exited
                send_frame(self.channel.sock, ("answer", number, fine), [body.data], body.descriptors)
        finally:
            close_descriptors(body.descriptors)


class PeerLinks:
    """All links of this process. Frames are received by one thread at a time; calls are made by any thread."""

    def __init__(self, driver: Channel, runner: MessageRunner) -> None:
        self._driver = driver
        self._runner = runner
        self._send_to_driver = runner.send
        self._lock = Lock()
        self._numbers = count(1)
        self._pending: dict[int, tuple[Future[Any], OutgoingLink]] = {}
        """Number of a call of this process -> its future."""
        self._links: dict[tuple[int, int], OutgoingLink] = {}
        """(Worker, rank) -> link."""
        self._by_fd: dict[int, OutgoingLink | IncomingLink] = {}
        self._received: dict[int, tuple[IncomingLink, int]] = {}
        """Number of a call to this process -> its link and the number that the caller gave it."""
        self._received_numbers = count(LINK_CALL_NUMBER, -1)
        self._epoll = select.epoll()
        self._epoll.register(driver.fileno(), select.EPOLLIN)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    # --- calls of this process

    def call(
        self, worker: int, rank: int, hosted: str, method: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Future[Any]:
        """Call an object of another process. Thread: any."""
        self._runner.exit_if_forked()
        body = pack_value((args, named))
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            link = self._links.get((worker, rank))
            if link is None or self._should_retry(link):
                link = self._request(worker, rank)
            number = next(self._numbers)
            self._pending[number] = future, link
            link.lock.acquire()  # before the other lock is released: keeps the order of calls
        try:
            self._send(link, OutgoingCall(number, hosted, method, body))
        finally:
            link.lock.release()
        self._end_failed(link)
        return future

    def _should_retry(self, link: OutgoingLink) -> bool:
        """Whether a link to a worker that was not on this machine is requested again. Only while no relayed call is
        unanswered, which a call over the new link could overtake."""
        return (
            link.state == LINK_RELAYED and not link.unanswered and time.monotonic() >= link.requested_at + LINK_RETRY_S
        )

    def _request(self, worker: int, rank: int) -> OutgoingLink:
        link = self._links[worker, rank] = OutgoingLink(worker, rank)
        with link.theirs as theirs:
            self._send_to_driver("link", worker, rank, descriptors=[theirs.fileno()])
        return link

    def _send(self, link: OutgoingLink, call: OutgoingCall) -> None:
        """Send a call, or let it wait. Hold the lock of the link."""
        if link.state == LINK_RELAYED:
            self._relay(link, call)
        elif link.state == LINK_OPEN and call.hosted not in link.names:
            link.failed.append((call, LookupError(f"worker {link.worker} hosts no {call.hosted!r}")))
        elif link.state == LINK_REFUSED:
            link.failed.append((call, CallNotSentError(f"worker {link.worker} is gone")))
        else:
            link.waiting.append(call)
            if link.state == LINK_OPEN and link.sending is None:
                self._flush(link)

    def _flush(self, link: OutgoingLink) -> None:
        """Hold the lock of the link."""
        is_sent = link.flush()
        if link.channel.is_broken:
            link.state = LINK_REFUSED
            self._forget(link)
            link.fail_unsent(f"worker {link.worker} is stopping")
        fd = link.channel.fileno()
        if fd in self._by_fd:
            self._epoll.modify(fd, select.EPOLLIN if is_sent else select.EPOLLIN | select.EPOLLOUT)

    def _relay(self, link: OutgoingLink, call: OutgoingCall) -> None:
        """Send a call to the driver, which relays it to another machine."""
        link.unanswered.add(call.number)
        data = call.body.data
        if call.body.descriptors:
            data = pickle_value(load_value(data, call.body.descriptors))
        self._send_to_driver("ask", call.number, link.worker, call.hosted, call.method, link.rank, body=[data])

    def _end_failed(self, link: OutgoingLink) -> None:
        """Hold no lock."""
        while link.failed:
            call, error = link.failed.pop(0)
            close_descriptors(call.body.descriptors)
            self._resolve(call.number, False, error)

    def _forget(self, link: OutgoingLink) -> None:
        """Calls from now on request a new link."""
        if self._links.get((link.worker, link.rank)) is link:
            del self._links[link.worker, link.rank]

    def _resolve(self, number: int, fine: bool, value: Any) -> None:
        future, link = self._pending.pop(number, (None, None))
        if future is None or link is None:
            return
        link.unanswered.discard(number)
        with suppress(InvalidStateError):
            if fine:
                future.set_result(value)
            else:
                future.set_exception(value)

    # --- frames of the driver

    def on_frame(self, frame: Frame) -> bool:
        """Whether a frame of the driver was handled: it is about links or the cancellation of a call, or answers a
        relayed call."""
        match frame.head:
            case ("answer", number, fine):
                self._on_answer(number, fine, frame)
            case ("linked", worker, rank, state, names):
                self._on_linked(worker, rank, state, names, frame)
            case ("link",):
                self.add_incoming(frame.descriptors[0])
            case ("gone", worker):
                for link in [link for (called, _), link in self._links.items() if called == worker]:
                    self._close(link)
            case _:
                return self._runner.calls.on_frame(frame)
        return True

    def _on_linked(self, worker: int, rank: int, state: str, names: tuple[str, ...], frame: Frame) -> None:
        link = self._links.get((worker, rank))
        if link is None or link.state:
            return  # its worker is gone
        with link.lock:
            link.state = state
            link.names = frozenset(names)
            calls = list(link.waiting)
            link.waiting.clear()
            if state == LINK_OPEN:
                self._by_fd[link.channel.fileno()] = link
                self._epoll.register(link.channel.fileno(), select.EPOLLIN)
            else:
                link.channel.close()
            if state == LINK_REFUSED:
                self._forget(link)
                link.failed += [(call, pickle.loads(frame.body)) for call in calls]  # noqa: S301 - from our driver
                calls.clear()
            for call in calls:
                self._send(link, call)
        self._end_failed(link)

    def add_incoming(self, fd: int) -> None:
        link = IncomingLink(fd)
        self._by_fd[fd] = link
        self._epoll.register(fd, select.EPOLLIN)

    # --- receiving. Thread: one at a time

    def wait(self) -> None:
        """Wait until a frame can be received."""
        self._epoll.poll()

    def receive(self, *, wait: bool) -> tuple[list[Frame], bool]:
        """Frames of the driver and calls of other processes; and whether the driver is still connected."""
        frames: list[Frame] = []
        is_connected = True
        for fd, what in self._epoll.poll(-1 if wait else 0):
            if fd == self._driver.fileno():
                more, is_connected = receive_all(self._driver)
                frames += [frame for frame in more if not self.on_frame(frame)]
                continue
            link = self._by_fd.get(fd)
            if isinstance(link, IncomingLink):
                frames += self._receive_calls(link)
            elif link is not None:
                self._on_outgoing(link, what)
        return frames, is_connected

    def _receive_calls(self, link: IncomingLink) -> list[Frame]:
        received, is_connected = receive_all(link.channel)
        frames = []
        for frame in received:
            _, number, hosted, method = frame.head
            mine = next(self._received_numbers)
            self._received[mine] = link, number
            self._runner.calls.add(mine)
            frames.append(Frame(("call", mine, hosted, method, 0.0), frame.body, frame.descriptors))
        if not is_connected:
            self._unregister(link)  # unanswered calls keep the socket open
        return frames

    def _on_outgoing(self, link: OutgoingLink, what: int) -> None:
        if what & select.EPOLLOUT:
            with link.lock:
                self._flush(link)
            self._end_failed(link)
        if what & ~select.EPOLLOUT:
            frames, is_connected = receive_all(link.channel)
            for frame in frames:
                self._on_answer(frame.head[1], frame.head[2], frame)
            if not is_connected:
                self._close(link)

    def _on_answer(self, number: int, fine: bool, frame: Frame) -> None:
        try:
            value = load_value(frame.body, frame.descriptors)
        except Exception as error:
            fine, value = False, error
        if not fine and isinstance(value, WorkerLostError):
            _, link = self._pending.get(number, (None, None))
            if link is not None and link.state == LINK_RELAYED:
                self._forget(link)
        self._resolve(number, fine, value)

    def _close(self, link: OutgoingLink) -> None:
        """The called process is gone."""
        why = f"worker {link.worker} is gone"
        with link.lock:
            self._forget(link)
            link.state = LINK_REFUSED
            link.fail_unsent(why)
            self._unregister(link)
            link.channel.close()
        self._end_failed(link)
        for number in list(link.unanswered):
            self._resolve(number, False, WorkerLostError(why))

    def _unregister(self, link: OutgoingLink | IncomingLink) -> None:
        fd = link.channel.fileno()
        if self._by_fd.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    # --- calls of other processes

    def answer(self, number: int, fine: bool, value: object) -> None:
        """Answer a call that arrived over a link. Thread: any."""
        body = pack_value(value)
        link, theirs = self._received.pop(number)
        link.answer(theirs, fine, body)

    def refuse_calls(self) -> None:
        """Accept no further calls: what was sent before can still be received, and senders get an error."""
        for link in list(self._by_fd.values()):
            if isinstance(link, IncomingLink):
                with suppress(OSError):
                    link.channel.sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        for link in list(self._by_fd.values()):
            link.channel.close()
        self._epoll.close()


def receive_all(channel: Channel) -> tuple[list[Frame], bool]:
    """All frames that have arrived; one read ends behind every descriptor."""
    frames: list[Frame] = []
    is_connected = True
    with suppress(BlockingIOError):
        while is_connected:
            more, is_connected = channel.receive(DONT_WAIT)
            frames += more
    return frames, is_connected
