"""Routing of method calls and answers between the driver and objects hosted by workers."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import TYPE_CHECKING

from dovetail.control.engine import CallNotSentError, WorkerLostError
from dovetail.engines.local.call_body import CallBody
from dovetail.engines.local.protocol import (
    DRIVER_PROCESS,
    LinkState,
    close_descriptors,
    send_frame,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from dovetail.engines.call_future import WorkerCallFuture
    from dovetail.engines.local.protocol import Frame
    from dovetail.engines.local.worker_state import LocalWorker, RankProcess

    Waiter = WorkerCallFuture | tuple[RankProcess, int]
    """Receiver of an answer: a future of this process; or a worker and its own number of the call."""
    CallOrigin = tuple[int, int, int, int] | None
    """See `CallOptions.origin`."""


class WorkerCallRouter:
    """Pending calls and the receivers of their answers. Hold the engine's lock, unless stated otherwise."""

    def __init__(self, children: Mapping[int, LocalWorker], numbers: Iterator[int], send: Callable[..., None]) -> None:
        """`send` sends a frame to a process."""
        self._children = children
        self._numbers = numbers
        self._send = send

    def call_from_driver(
        self,
        worker: int,
        rank: int,
        hosted: str,
        method: str,
        body: CallBody,
        deadline: float,
        call: WorkerCallFuture,
        origin: CallOrigin = None,
    ) -> RankProcess:
        """Send a call from this process. Raises WorkerLostError or LookupError."""
        called = _find_rank(self._find_worker(worker, hosted), rank)
        call.worker, call.rank = worker, rank
        call.number = self._forward(called, hosted, method, body, call, deadline, origin)
        return called

    def process_of(self, call: WorkerCallFuture) -> RankProcess | None:
        """The process that is called; None: the call was answered. Without the lock."""
        child = self._children.get(call.worker)
        return _find_rank(child, call.rank) if child is not None and call.number in child.calls else None

    def withdraw(self, call: WorkerCallFuture) -> RankProcess | None:
        """Forget a call from this process and cancel it in its worker. None: it was answered, or its worker is gone."""
        child = self._children.get(call.worker)
        if child is None or child.calls.pop(call.number, None) is None:
            return None
        called = _find_rank(child, call.rank)
        self._send(called, ("cancel_call", call.number))
        return called

    def relay_call(self, rank: RankProcess, frame: Frame, *, elsewhere: bool = False) -> bool:
        """Forward a call from worker to worker, without opening it. `elsewhere`: workers exist on other nodes; returns
        False if the call is for one of those, and sends no answer."""
        _, its_number, worker, hosted, method, called_rank, _ = frame.head
        if elsewhere and not self._is_local(worker, called_rank):
            return False
        try:
            child = self._find_worker(worker, hosted)
            called = _find_rank(child, called_rank)
        except (WorkerLostError, LookupError) as error:
            close_descriptors(frame.descriptors)
            self._send(rank, ("answer", its_number, False), [pickle.dumps(error)])
            return True
        body = CallBody(bytes(frame.body), tuple(frame.descriptors))
        self._forward(called, hosted, method, body, (rank, its_number), origin=origin_of(rank, frame))
        return True

    def cancel_relayed(self, rank: RankProcess, its_number: int) -> bool:
        """Forget a call from worker to worker and cancel it. False: it was answered, or relayed to another node."""
        for child in self._children.values():
            for number, waits in child.calls.items():
                if waits == (rank, its_number):
                    del child.calls[number]
                    for called in child.ranks:
                        self._send(called, ("cancel_call", number))
                    return True
        return False

    def link(self, caller: RankProcess, frame: Frame, *, elsewhere: bool = False) -> None:
        """Pass a socket from a process to one that it wants to call, behind all frames sent to that one before.
        `elsewhere`: workers exist on other nodes; calls to those are relayed."""
        _, worker, rank = frame.head
        state, error = LinkState.OPEN, b""
        names: tuple[str, ...] = ()
        try:
            child = self._find_worker(worker)
            called = _find_rank(child, rank)
        except (WorkerLostError, LookupError) as problem:
            close_descriptors(frame.descriptors)
            state, error = LinkState.REFUSED, pickle.dumps(problem)
            if elsewhere and not self._is_local(worker, rank):
                state = LinkState.RELAYED
        else:
            names = tuple(child.names)
            child.callers.add(caller)
            caller.called.add(child)
            self._send(called, ("link", caller.child.number, caller.rank), (), frame.descriptors)
        self._send(caller, ("linked", worker, rank, state.value, names), [error])

    def link_driver(self, worker: int, rank: int, sock: socket.socket) -> None:
        """Answer the request of a driver outside of this process for a link, and pass its socket to the worker, behind
        all frames sent to that one before."""
        with sock:
            try:
                called = _find_rank(self._find_worker(worker), rank)
            except (WorkerLostError, LookupError) as problem:
                with suppress(OSError):  # the driver has exited
                    send_frame(sock, ("linked", LinkState.REFUSED.value), [pickle.dumps(problem)])
                return
            with suppress(OSError):
                send_frame(sock, ("linked", LinkState.OPEN.value))
                self._send(called, ("link", *DRIVER_PROCESS), (), [sock.detach()])

    def _is_local(self, worker: int, rank: int) -> bool:
        """Whether this rank of the worker can be called here."""
        child = self._children.get(worker)
        return child is not None and any(process.rank == rank for process in child.ranks)

    def _find_worker(self, worker: int, hosted: str = "") -> LocalWorker:
        child = self._children.get(worker)
        if child is None or child.end is not None:
            raise CallNotSentError(f"worker {worker} is gone")
        if child.stopping:  # it would end without having read the call
            raise CallNotSentError(f"worker {worker} is stopping")
        if hosted and hosted not in child.names:
            raise LookupError(f"worker {worker} hosts no {hosted!r}")
        return child

    def _forward(
        self,
        rank: RankProcess,
        hosted: str,
        method: str,
        body: CallBody,
        waits: Waiter,
        deadline: float = 0.0,
        origin: CallOrigin = None,
    ) -> int:
        """Send a call; returns its number. `deadline`: of the monotonic clock; 0: none."""
        number = next(self._numbers)
        rank.child.calls[number] = waits
        head = ("call", number, hosted, method, deadline)
        self._send(rank, head if origin is None else (*head, origin), [body.data], body.descriptors)
        return number

    def on_answer(self, child: LocalWorker, frame: Frame) -> WorkerCallFuture | None:
        """Forward the answer to a worker; or return its receiver in this process (deliver it without the lock)."""
        number, fine = frame.head[1:3]
        waits = child.calls.pop(number, None)
        if isinstance(waits, tuple) and not waits[0].has_exited:
            other, its_number = waits
            self._send(other, ("answer", its_number, fine), [bytes(frame.body)], frame.descriptors)
            return None
        if waits is None or isinstance(waits, tuple):
            close_descriptors(frame.descriptors)
            return None
        return waits

    def on_worker_gone(self, child: LocalWorker) -> list[WorkerCallFuture]:
        """The worker is gone. Returns the receivers in this process, to be resolved without the lock."""
        calls, child.calls = child.calls, {}
        gone = pickle.dumps(lost_error(child))
        for waits in calls.values():
            if isinstance(waits, tuple) and not waits[0].has_exited:
                self._send(waits[0], ("answer", waits[1], False), [gone])
        for caller in child.callers:
            caller.called.discard(child)
            if not caller.has_exited:
                self._send(caller, ("gone", child.number))
        child.callers.clear()
        for rank in child.ranks:
            for called in rank.called:
                called.callers.discard(rank)
            rank.called.clear()
        return [waits for waits in calls.values() if not isinstance(waits, tuple)]


def origin_of(rank: RankProcess, frame: Frame) -> tuple[int, int, int, int]:
    """See `CallOptions.origin`; of a call that a process relays."""
    return rank.child.number, rank.rank, frame.head[1], frame.head[6]


def lost_error(child: LocalWorker) -> WorkerLostError:
    """The error of calls to a worker that is gone; calls are read after the setup."""
    is_set_up = any(rank.ready for rank in child.ranks)
    return (WorkerLostError if is_set_up else CallNotSentError)(f"worker {child.number} is gone")


def _find_rank(child: LocalWorker, rank: int) -> RankProcess:
    for process in child.ranks:
        if process.rank == rank:
            return process
    raise LookupError(f"worker {child.number} has no rank {rank}")
