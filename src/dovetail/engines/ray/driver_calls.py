"""Calls from the driver to objects of remote workers: sending, deadlines, cancellation and answers. Driver side.

A call to a worker of this machine goes over a socket (`call_links`), every other one is a call of Ray to the agent.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import StopWorker
from dovetail.control.engine import CallNotSentError, WorkerLostError
from dovetail.engines.call_future import CallDeadlines, CompletionThread, WorkerCallFuture, deadline_error
from dovetail.engines.local.call_body import (
    CallBody,
    load_portable,
    load_value,
    pack_portable,
    pack_value,
    to_portable,
    to_shared_memory,
)
from dovetail.engines.local.protocol import close_descriptors
from dovetail.engines.ray.call_links import CallLinks, call_of
from dovetail.engines.ray.protocol import (
    MAX_DIRECT_CALLS,
    MESSAGE_OVERHEAD_BYTES,
    NO_DIRECT_ANSWER,
    PieceCollector,
    decode_direct_answer,
    earlier_pieces,
)
from dovetail.engines.ray.remote_worker import PendingCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from threading import RLock

    from dovetail.control.engine import CallOptions
    from dovetail.engines.call_future import Body, Pickled
    from dovetail.engines.local.outgoing_link import OutgoingCall, OutgoingLink
    from dovetail.engines.ray.agent_link import AgentLink
    from dovetail.engines.ray.remote_worker import RemoteWorker


class DriverCalls:
    """Unanswered calls of the driver. Hold the engine's lock, unless stated otherwise."""

    def __init__(
        self,
        workers: dict[int, RemoteWorker],
        numbers: Iterator[int],
        lock: RLock,
        wake: Callable[[], None],
        wait_for: Callable[[WorkerCallFuture, float | None], None],
        on_sent: Callable[[], None],
    ) -> None:
        """`lock`: of the engine. `wake` wakes the polling thread. `on_sent` is called when calls that had to wait until
        they could be sent are sent, from any thread."""
        self._workers = workers
        self._numbers = numbers
        self._lock = lock
        self._wake = wake
        self.wait_for = wait_for
        self.load, self.drop = _load_answer, close_descriptors
        self.completions = CompletionThread()
        self._deadlines = CallDeadlines()
        self._open: dict[int, WorkerCallFuture] = {}
        self._answers: deque[tuple[WorkerCallFuture, bool, Body]] = deque()
        """Answers to deliver without the lock."""
        self._direct: dict[int, AgentLink] = {}
        """Agents of the calls whose answer is the result of a call of Ray. Thread: any."""
        self.links = CallLinks(lock, self._on_link_answer, self._relay, on_sent)
        self._linked: dict[int, OutgoingLink] = {}
        """Links of the calls that are sent over one. Thread: any."""
        self._answered: deque[int] = deque()
        """Calls with a deadline whose answer came without the lock."""
        self._pieces = PieceCollector()
        self._polling_until: float | None = 0.0
        """When the polling thread looks at deadlines again; None: after the next message."""

    def call(
        self, options: CallOptions, worker: int, hosted: str, method: str, args: Any, named: dict[str, Any]
    ) -> WorkerCallFuture:
        """Do not hold the lock. Thread: any."""
        call = WorkerCallFuture(self)
        value = args, named
        packed = pack_portable(value) if self.links.find(worker, options.rank) is None else pack_value(value)
        deadline = 0.0 if options.deadline_s is None else time.monotonic() + options.deadline_s
        try:
            with self._lock:
                remote = self._find_worker(worker, options.rank, hosted)
                link = self.links.connect(remote, options.rank)
                body = None if link is None else _to_body(packed)
                call.number, call.worker, call.rank = next(self._numbers), worker, options.rank
                call.deadline_s = options.deadline_s
                self._open[call.number] = call
                if deadline:
                    self._deadlines.add(call.number, deadline)
                if link is not None and body is not None:
                    self._linked[call.number] = link
                    self.links.send(link, call_of(call.number, hosted, method, deadline, body))
                else:
                    pieces = _to_pieces(packed)
                    self._send_or_keep(remote, PendingCall(call.number, options.rank, hosted, method, pieces, deadline))
        except (WorkerLostError, LookupError) as error:
            close_descriptors(getattr(packed, "descriptors", ()))
            call.deliver_here(False, error)
            return call
        if link is not None:
            self.links.end_failed(link)
        if deadline and (self._polling_until is None or deadline < self._polling_until):
            self._wake()
        return call

    def _find_worker(self, worker: int, rank: int, hosted: str) -> RemoteWorker:
        remote = self._workers.get(worker)
        if remote is None:
            raise CallNotSentError(f"worker {worker} is gone")
        if not 0 <= rank < len(remote.command.seats):
            raise LookupError(f"worker {worker} has no rank {rank}")
        if hosted not in remote.names:
            raise LookupError(f"worker {worker} hosts no {hosted!r}")
        if remote.is_draining or any(isinstance(command, StopWorker) for command in remote.pending_commands):
            raise CallNotSentError(f"worker {worker} is stopping")
        return remote

    def _send_or_keep(self, remote: RemoteWorker, call: PendingCall) -> None:
        if remote.ranks_by_agent:
            self.send(remote, call)
            remote.agent_of(call.rank).flush()
        else:
            remote.pending_commands.append(call)

    def send(self, worker: RemoteWorker, call: PendingCall) -> None:
        """Send a call to the agent of its worker."""
        if call.number not in self._open:
            return  # its deadline has passed
        link = worker.agent_of(call.rank)
        *_, last = call.pieces
        is_direct = len(call.pieces) == 1 and len(link.direct_calls) < MAX_DIRECT_CALLS and not link.lost_reason
        left_s = max(0.0, call.deadline - time.monotonic()) if call.deadline else None
        op = ("call", call.number, worker.number, call.hosted, call.method, last, call.rank, left_s, is_direct)
        if is_direct:
            self._direct[call.number] = link
            ref = link.send_direct_call(call.number, op)
            ref.future().add_done_callback(partial(self._on_direct_answer, link, call.number))
            return
        for piece in earlier_pieces("call_piece", call.number, call.pieces):
            link.send(*piece)
        link.send(op, MESSAGE_OVERHEAD_BYTES + len(last))

    def _on_direct_answer(self, link: AgentLink, number: int, answer: Future[bytes]) -> None:
        """Thread: one of Ray's, which must not wait for the engine's lock."""
        link.direct_calls.discard(number)
        self._direct.pop(number, None)
        error = answer.exception()
        if error is None and answer.result() == NO_DIRECT_ANSWER:
            return
        call = self._open.pop(number, None)
        if call is None:
            return
        if call.deadline_s is not None:
            self._answered.append(number)
        if error is None:
            fine, body = decode_direct_answer(answer.result())
            call.deliver(fine, [body])
        else:
            reason = f"the agent of its node did not answer: {type(error).__name__}: {error}"
            call.deliver(False, WorkerLostError(f"worker {call.worker} is gone: {reason}"))

    def _on_link_answer(self, number: int, fine: bool, body: Body, descriptors: Sequence[int]) -> None:
        """Thread: any, without the lock."""
        self._linked.pop(number, None)
        call = self._open.pop(number, None)
        if call is None:
            close_descriptors(descriptors)
            return
        if call.deadline_s is not None:
            self._answered.append(number)
        call.deliver(fine, body, descriptors)

    def _relay(self, link: OutgoingLink, call: OutgoingCall) -> None:
        """Send a call for which there is no link after all as a call of Ray."""
        self._linked.pop(call.number, None)
        pieces = to_portable(*call.body)
        remote = self._workers.get(link.worker)
        if remote is not None:
            _, number, hosted, method, _, deadline = call.head
            self._send_or_keep(remote, PendingCall(number, link.rank, hosted, method, pieces, deadline))
        elif (future := self._open.pop(call.number, None)) is not None:
            self._deadlines.discard(call.number)
            self._answers.append((future, False, CallNotSentError(f"worker {link.worker} is gone")))
            self._wake()

    def is_linked(self, call: WorkerCallFuture) -> bool:
        """Whether the call goes over a socket and is not answered. Without the lock."""
        return call.number in self._linked

    def read_answer(self, call: WorkerCallFuture, timeout_s: float | None) -> bool:
        """Read the socket of the called worker for some time in this thread. False: that is not possible. Without the
        lock."""
        link = self._linked.get(call.number)
        return link is not None and self.links.read_answer(link, call, timeout_s)

    def withdraw_call(self, call: WorkerCallFuture) -> bool:
        """Do not hold the lock. Thread: any."""
        with self._lock:
            return self._withdraw(call)

    def _withdraw(self, call: WorkerCallFuture) -> bool:
        if self._open.pop(call.number, None) is None:
            return False
        self._deadlines.discard(call.number)
        link = self._linked.pop(call.number, None)
        if link is not None:
            self.links.cancel(link, call.number)
            return True
        self._pieces.drop(call.number)
        remote = self._workers.get(call.worker)
        if remote is None:
            return True
        if remote.ranks_by_agent:
            agent = remote.agent_of(call.rank)
            agent.send(("cancel_call", call.number))
            agent.flush()
        else:
            waiting = [one for one in remote.pending_commands if getattr(one, "number", None) == call.number]
            remote.pending_commands.remove(*waiting)
        return True

    def seconds_left(self, limit_s: float | None) -> float | None:
        """Seconds until the next deadline, at most the limit (None: none). The polling thread waits as long."""
        with self._lock:
            while self._answered:
                self._deadlines.discard(self._answered.popleft())
            at = self._deadlines.next_at()
            now = time.monotonic()
            if at is not None and (limit_s is None or at < now + limit_s):
                limit_s = max(0.0, at - now)
            self._polling_until = None if limit_s is None else now + limit_s
        return limit_s

    def end_overdue(self) -> None:
        """End the calls whose deadline has passed."""
        for number in self._deadlines.take_due(time.monotonic()):
            call = self._open.get(number)
            if call is not None and self._withdraw(call):
                self._answers.append((call, False, deadline_error(call.deadline_s or 0.0)))

    def on_answer_piece(self, number: int, piece: bytes) -> None:
        if number in self._open:
            self._pieces.add(number, piece)

    def on_answer(self, number: int, fine: bool, last: bytes) -> None:
        pieces = self._pieces.take(number, last)
        call = self._open.pop(number, None)
        if call is not None:
            self._deadlines.discard(number)
            self._answers.append((call, fine, pieces))

    def on_worker_gone(self, worker: RemoteWorker, *, is_closing: bool = False) -> None:
        """A direct call ends by itself unless its agent is lost, too, and a call over a link when the link is read to
        its end: the worker may have answered it before its end."""
        self.links.on_worker_gone(worker, is_closing=is_closing)
        kind = WorkerLostError if worker.ready else CallNotSentError  # calls are read after the setup
        for call in [call for call in self._open.copy().values() if call.worker == worker.number]:
            link = self._direct.get(call.number)
            is_read = call.number in self._linked or (link is not None and not link.lost_reason)
            if is_read and not is_closing:
                continue
            self._deadlines.discard(call.number)
            self._pieces.drop(call.number)
            self._linked.pop(call.number, None)
            if self._open.pop(call.number, None) is not None:
                self._answers.append((call, False, kind(f"worker {worker.number} is gone")))

    def deliver(self) -> None:
        """Deliver answers. Do not hold the lock: callers may be waiting for it."""
        while self._answers:
            call, fine, body = self._answers.popleft()
            call.deliver(fine, body)


def _load_answer(body: Pickled, descriptors: Sequence[int]) -> Any:
    """The value of an answer: over a link, or in pieces."""
    if isinstance(body, bytes | memoryview):
        return load_value(body, descriptors)
    return load_portable(body)


def _to_body(packed: CallBody | list[bytes]) -> CallBody:
    """Arguments for a link, which may have been packed before it existed."""
    return packed if isinstance(packed, CallBody) else to_shared_memory(packed)


def _to_pieces(packed: CallBody | list[bytes]) -> list[bytes]:
    """Arguments for a call of Ray."""
    return to_portable(*packed) if isinstance(packed, CallBody) else packed
