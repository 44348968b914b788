"""Calls between the workers of one machine, and of a driver of Ray on it, over sockets of their own. Worker side.

A process that calls another one for the first time makes a pair of sockets, keeps one end, and sends the other one to
the driver, which passes it on behind all frames that it sent to the called process before, and confirms it. The calls
of the process wait for the confirmation, so they arrive in the order in which they were made. Calls to workers of other
machines are relayed by the driver. The driver of a Ray engine is a caller like a worker (see `ray.call_links`).
"""

from __future__ import annotations

import pickle
import select
import socket
import time
from concurrent.futures import InvalidStateError
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.control.engine import CallNotSentError, WorkerLostError
from dovetail.engines.local.call_body import CallBody, load_value, pack_value
from dovetail.engines.local.call_waits import WaitableCall
from dovetail.engines.local.outgoing_link import OutgoingCall, OutgoingLink, receive_once
from dovetail.engines.local.protocol import (
    DONT_WAIT,
    Channel,
    Frame,
    LinkState,
    close_descriptors,
    encode_frame,
    send_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from dovetail.engines.call_cycles import Process, WaitingSlot
    from dovetail.engines.local.worker_main import WorkerProcess

    Receive = Callable[[Channel], tuple[list[Frame], bool]]

LINK_RETRY_S = 0.5
"""Minimum time between two requests for a link to a worker that was not on this machine: it may not have started."""
NO_DEADLINE = 0.0
LINK_CALL_NUMBER = -1
"""Numbers of calls that arrive over links are negative, those of the driver positive."""


class PeerCall(WaitableCall):
    """Future of a call to another process."""

    def __init__(self, links: PeerLinks, called: Process) -> None:
        super().__init__(links.worker, called)
        self._links = links

    def cancel(self) -> bool:
        """Cancel the call: if it has not begun, it never does; the result of a running one is dropped."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        self._links.withdraw(self)
        return True

    def _pause(self, seconds: float) -> None:
        if not self._links.receive_answers(self, seconds):
            super()._pause(seconds)

    def withdraw(self, error: BaseException) -> None:
        self._links.withdraw(self)
        with suppress(InvalidStateError):
            self.set_exception(error)


class IncomingLink:
    """Calls of another process to this one."""

    def __init__(self, fd: int, caller: Process) -> None:
        self.channel = Channel(socket.socket(fileno=fd))
        self.caller = caller
        self.is_at_end = False
        """Whether no further calls will arrive."""
        self.unanswered: set[int] = set()
        self._lock = Lock()

    def answer(self, number: int, fine: bool, body: CallBody) -> None:
        """Send an answer. May block: a process that makes calls always reads. Thread: any."""
        try:
            with self._lock, suppress(OSError):  # the caller has exited
                send_frame(self.channel.sock, ("answer", number, fine), [body.data], body.descriptors)
        finally:
            close_descriptors(body.descriptors)

    def forget(self, number: int) -> None:
        """A call was answered or withdrawn. Thread: any."""
        self.unanswered.discard(number)
        self.close_if_unused()

    def close_if_unused(self) -> None:
        if self.is_at_end and not self.unanswered:
            self.channel.sock.close()

    def try_answer(self, number: int, body: bytes) -> None:
        """Send a short answer without blocking, or not at all. Thread: the one that receives."""
        if self._lock.acquire(blocking=False):
            with suppress(OSError):
                self.channel.sock.send(encode_frame(("answer", number, True), [body])[0], DONT_WAIT)
            self._lock.release()


class ReceivedCall(NamedTuple):
    link: IncomingLink
    number: int
    """The number that the caller gave it."""
    depth: int
    """How many callers wait for it."""


class PeerLinks:
    """All links of this process. Frames are received by one thread at a time; calls are made by any thread."""

    def __init__(self, driver: Channel, worker: WorkerProcess) -> None:
        self._driver = driver
        self.worker = worker
        self._runner = worker.runner
        self._send_to_driver = worker.runner.send
        self._lock = Lock()
        self._numbers = count(1)
        self._pending: dict[int, tuple[PeerCall, OutgoingLink]] = {}
        """Number of a call of this process -> its future."""
        self._links: dict[tuple[int, int], OutgoingLink] = {}
        """(Worker, rank) -> link."""
        self._by_fd: dict[int, OutgoingLink | IncomingLink] = {}
        self._received: dict[int, ReceivedCall] = {}
        """Number of an unanswered call to this process -> call."""
        self._received_numbers = count(LINK_CALL_NUMBER, -1)
        self._epoll = select.epoll()
        self._epoll.register(driver.fileno(), select.EPOLLIN)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    # --- calls of this process

    def is_linked(self, worker: int, rank: int) -> bool:
        """Whether a thread that waits for an answer of this process can receive it itself."""
        link = self._links.get((worker, rank))
        return link is not None and link.state is LinkState.OPEN

    def call(
        self, worker: int, rank: int, hosted: str, method: str, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Future[Any]:
        """Call an object of another process. Thread: any."""
        self._runner.exit_if_forked()
        body = pack_value((args, named))
        future = PeerCall(self, (worker, rank))
        self._start(future, ("call", hosted, method, future.depth, NO_DEADLINE), body)
        return future

    def ask_waiting(self, called: Process, call: tuple[int, int, int]) -> Future[list[WaitingSlot]]:
        """Ask a process which slots a call waits for (`WorkerProcess.find_waiting`). A process with one slot that is at
        work does not answer."""
        future = PeerCall(self, called)
        self._start(future, ("waiting", call), CallBody(b""))
        return future

    def _start(self, future: PeerCall, what: tuple[Any, ...], body: CallBody) -> None:
        kind, *rest = what
        with self._lock:
            link = self._links.get(future.called)
            if link is None or self._should_retry(link):
                link = self._request(*future.called)
            number = future.number = next(self._numbers)
            self._pending[number] = future, link
            link.lock.acquire()  # before the other lock is released: keeps the order of calls
        try:
            self._send(link, OutgoingCall((kind, number, *rest), body))
        finally:
            link.lock.release()
        self._end_failed(link)

    def withdraw(self, call: PeerCall) -> None:
        """Forget a call, and cancel it in the called process."""
        future, link = self._pending.pop(call.number, (None, None))
        if future is None or link is None:
            return
        link.unanswered.discard(call.number)
        with link.lock:
            self._send(link, OutgoingCall(("cancel_call", call.number), CallBody(b"")))
        self._end_failed(link)

    def _should_retry(self, link: OutgoingLink) -> bool:
        """Whether a link to a worker that was not on this machine is requested again. Only while no relayed call is
        unanswered, which a call over the new link could overtake."""
        return (
            link.state is LinkState.RELAYED
            and not link.unanswered
            and time.monotonic() >= link.requested_at + LINK_RETRY_S
        )

    def _request(self, worker: int, rank: int) -> OutgoingLink:
        ours, theirs = socket.socketpair()
        link = self._links[worker, rank] = OutgoingLink(ours, worker, rank)
        with theirs:
            self._send_to_driver("link", worker, rank, descriptors=[theirs.fileno()])
        return link

    def _send(self, link: OutgoingLink, call: OutgoingCall) -> None:
        """Send a call, or let it wait. Hold the lock of the link."""
        if link.state is LinkState.RELAYED:
            self._relay(link, call)
        elif link.state is LinkState.OPEN and call.head[0] == "call" and call.head[2] not in link.names:
            link.failed.append((call, LookupError(f"worker {link.worker} hosts no {call.head[2]!r}")))
        elif link.state is LinkState.REFUSED:
            link.failed.append((call, CallNotSentError(f"worker {link.worker} is gone")))
        else:
            link.waiting.append(call)
            if link.state is LinkState.OPEN and link.sending is None:
                self._flush(link)

    def _flush(self, link: OutgoingLink) -> None:
        """Hold the lock of the link."""
        is_sent = link.flush()
        if link.channel.is_broken:
            link.state = LinkState.REFUSED
            self._forget(link)
            link.fail_unsent(f"worker {link.worker} is stopping")
        if link.is_full != (not is_sent):
            link.is_full = not is_sent
            self._poll_link(link)

    def _poll_link(self, link: OutgoingLink) -> None:
        """Poll a link for what is needed now. Hold its lock."""
        fd = link.channel.fileno()
        if fd in self._by_fd:
            what = 0 if link.is_read_by_caller else select.EPOLLIN
            self._epoll.modify(fd, what | (select.EPOLLOUT if link.is_full else 0))

    def receive_answers(self, call: PeerCall, seconds: float) -> bool:
        """Receive answers in the thread that waits for one of them, which saves two changes of threads. False: that is
        not possible, or another thread does it already."""
        _, link = self._pending.get(call.number, (None, None))
        if link is None or link.state is not LinkState.OPEN or not link.reading.acquire(blocking=False):
            return False
        try:
            self._set_reader(link, by_caller=True)
            end = time.monotonic() + seconds
            readable = select.poll()
            readable.register(link.channel.fileno(), select.POLLIN)
            while not call.done() and (left := end - time.monotonic()) > 0 and link.state is LinkState.OPEN:
                if readable.poll(left * 1000):
                    self._receive_answers(link)
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

    def _relay(self, link: OutgoingLink, call: OutgoingCall) -> None:
        """Send a call to the driver, which relays it to another machine. A question about a call is a call of no
        object."""
        kind, number, *rest = call.head
        if kind == "cancel_call":
            self._send_to_driver("cancel_call", number)
            return
        link.unanswered.add(number)
        data, descriptors = call.body
        if kind == "waiting":
            hosted, method, depth = "", kind, 0
            data = pickle.dumps(*rest)
        else:
            hosted, method, depth, _ = rest
        self._send_to_driver(
            "ask", number, link.worker, hosted, method, link.rank, depth, body=[data], descriptors=descriptors
        )
        close_descriptors(descriptors)

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
        with suppress(InvalidStateError):  # it was withdrawn
            if not future.set_running_or_notify_cancel():
                return
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
                self._on_linked(worker, rank, LinkState(state), names, frame)
            case ("link", worker, rank):
                self._add_incoming(frame.descriptors[0], (worker, rank))
            case ("call", number, "", *_):
                self._answer_waiting(number, pickle.loads(frame.body))  # noqa: S301 - from a worker of the same run
            case ("gone", worker):
                for link in [link for (called, _), link in self._links.items() if called == worker]:
                    self._close(link)
            case _:
                return self._runner.calls.on_frame(frame)
        return True

    def _answer_waiting(self, number: int, call: tuple[int, int, int]) -> None:
        """Answer a process of another machine which slots its call waits for."""
        found = pack_value(self.worker.find_waiting(call))
        self._send_to_driver("answer", number, True, False, body=[found.data], descriptors=found.descriptors)
        close_descriptors(found.descriptors)

    def _on_linked(self, worker: int, rank: int, state: LinkState, names: tuple[str, ...], frame: Frame) -> None:
        link = self._links.get((worker, rank))
        if link is None or link.state is not LinkState.REQUESTED:
            return  # its worker is gone
        with link.lock:
            link.state = state
            link.names = frozenset(names)
            calls = list(link.waiting)
            link.waiting.clear()
            if state is LinkState.OPEN:
                self._by_fd[link.channel.fileno()] = link
                self._epoll.register(link.channel.fileno(), select.EPOLLIN)
            else:
                link.channel.close()
            if state is LinkState.REFUSED:
                self._forget(link)
                link.failed += [(call, pickle.loads(frame.body)) for call in calls]  # noqa: S301 - from our driver
                calls.clear()
            for call in calls:
                self._send(link, call)
        self._end_failed(link)

    def _add_incoming(self, fd: int, caller: Process) -> None:
        self._by_fd[fd] = IncomingLink(fd, caller)
        self._epoll.register(fd, select.EPOLLIN)

    # --- receiving. Thread: one at a time

    def wait(self) -> list[tuple[int, int]]:
        """Wait until a frame can be received; returns what `receive` takes."""
        return self._epoll.poll()

    def receive(self, *, wait: bool, ready: list[tuple[int, int]] | None = None) -> tuple[list[Frame], bool]:
        """Frames of the driver and calls of other processes; and whether the driver is still connected. Takes all that
        have arrived, if it does not wait and does not know what is `ready`."""
        receive = receive_once if wait or ready is not None else receive_all
        frames: list[Frame] = []
        is_connected = True
        for fd, what in self._epoll.poll(-1 if wait else 0) if ready is None else ready:
            if fd == self._driver.fileno():
                more, is_connected = receive(self._driver)
                frames += [frame for frame in more if not self.on_frame(frame)]
                continue
            link = self._by_fd.get(fd)
            if isinstance(link, IncomingLink):
                frames += self._receive_calls(link, receive)
            elif link is not None:
                self._on_outgoing(link, what)
        return frames, is_connected

    def _receive_calls(self, link: IncomingLink, receive: Receive) -> list[Frame]:
        received, is_connected = receive(link.channel)
        frames = []
        for frame in received:
            match frame.head:
                case ("call", number, hosted, method, depth, deadline):
                    mine = next(self._received_numbers)
                    self._received[mine] = ReceivedCall(link, number, depth)
                    link.unanswered.add(number)
                    self._runner.calls.add(mine)
                    frames.append(Frame(("call", mine, hosted, method, deadline), frame.body, frame.descriptors))
                case ("waiting", number, call):
                    link.try_answer(number, pack_value(self.worker.find_waiting(call)).data)
                case ("cancel_call", number):
                    self._cancel(link, number)
        if not is_connected:
            self._unregister(link)
            link.is_at_end = True
            link.close_if_unused()
        return frames

    def _on_outgoing(self, link: OutgoingLink, what: int) -> None:
        if what & select.EPOLLOUT:
            with link.lock:
                self._flush(link)
            self._end_failed(link)
        if what & ~select.EPOLLOUT and link.reading.acquire(blocking=False):
            try:
                self._receive_answers(link)
            finally:
                link.reading.release()

    def _receive_answers(self, link: OutgoingLink) -> None:
        """Hold `link.reading`."""
        frames, is_connected = receive_once(link.channel)
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
            if link is not None and link.state is LinkState.RELAYED:
                self._forget(link)
        self._resolve(number, fine, value)

    def _close(self, link: OutgoingLink) -> None:
        """The called process is gone."""
        why = f"worker {link.worker} is gone"
        with link.lock:
            self._forget(link)
            link.state = LinkState.REFUSED
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

    def find_received(self, caller: Process, number: int) -> int | None:
        """The number that a call of another process has here; None: it was not received, or it was answered."""
        for mine, call in list(self._received.items()):
            if call.number == number and call.link.caller == caller:
                return mine
        return None

    def depth_of(self, number: int) -> int:
        return self._received[number].depth if number in self._received else 0

    def _cancel(self, link: IncomingLink, number: int) -> None:
        mine = self.find_received(link.caller, number)
        if mine is not None and self._runner.calls.cancel(mine):
            self.forget(mine)

    def forget(self, number: int) -> None:
        """A call that arrived over a link will not be answered: it was cancelled, or is past its deadline. Thread:
        any."""
        call = self._received.pop(number, None)
        if call is not None:
            call.link.forget(call.number)

    def answer(self, number: int, fine: bool, value: object) -> None:
        """Answer a call that arrived over a link. Thread: any."""
        body = pack_value(value)
        call = self._received.pop(number)
        call.link.answer(call.number, fine, body)
        call.link.forget(call.number)

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
    """All frames that have arrived: one read ends behind every descriptor."""
    frames: list[Frame] = []
    is_connected = True
    with suppress(BlockingIOError):
        while is_connected:
            more, is_connected = channel.receive(DONT_WAIT)
            frames += more
    return frames, is_connected
