"""Routing of method calls and answers between the driver and objects hosted by workers."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

    from dovetail.engines.local.protocol import Chunk, Frame
    from dovetail.engines.local.worker_state import LocalWorker, RankProcess


class RawAnswer:
    """Future of an answer that is forwarded: resolves to success and the pickled value."""

    def __init__(self) -> None:
        from concurrent.futures import Future

        self.future: Future[tuple[bool, bytes]] = Future()
        self.future.set_running_or_notify_cancel()

    def set_exception(self, error: BaseException) -> None:
        self.future.set_result((False, pickle.dumps(error)))


if TYPE_CHECKING:
    Waiter = Future[Any] | RawAnswer | tuple[RankProcess, int]
    """Receiver of an answer: a future of this process for a value or bytes; or a worker and its own number of the
    call."""


class CallRouter:
    """Pending calls and the receivers of their answers. Hold the engine's lock, unless stated otherwise."""

    def __init__(self, children: Mapping[int, LocalWorker], numbers: Iterator[int], send: Callable[..., None]) -> None:
        """`send` sends a frame to a process."""
        self._children = children
        self._numbers = numbers
        self._send = send

    def call_from_driver(
        self, worker: int, rank: int, hosted: str, method: str, body: Chunk, future: Future[Any] | RawAnswer
    ) -> None:
        """Send a call from this process."""
        try:
            child = self._find_worker(worker, hosted)
            called = _find_rank(child, rank)
        except (WorkerLostError, LookupError) as error:
            future.set_exception(error)
            return
        self._forward(called, hosted, method, body, future)

    def relay_call(self, rank: RankProcess, frame: Frame, *, elsewhere: bool = False) -> bool:
        """Forward a call from worker to worker, without opening it. `elsewhere`: workers exist on other nodes; returns
        False if the call is for one of those, and sends no answer."""
        _, its_number, worker, hosted, method = frame.head
        if elsewhere and not self._is_local(worker):
            return False
        try:
            child = self._find_worker(worker, hosted)
        except (WorkerLostError, LookupError) as error:
            self._send(rank, ("answer", its_number, False), [pickle.dumps(error)])
            return True
        self._forward(child.ranks[0], hosted, method, bytes(frame.body), (rank, its_number))
        return True

    def _is_local(self, worker: int) -> bool:
        """Whether the worker can be called here; of a gang, rank 0 is called."""
        child = self._children.get(worker)
        return child is not None and child.ranks[0].rank == 0

    def _find_worker(self, worker: int, hosted: str) -> LocalWorker:
        child = self._children.get(worker)
        if child is None or child.end is not None:
            raise WorkerLostError(f"worker {worker} is gone")
        if child.stopping:  # it would end without having read the call
            raise WorkerLostError(f"worker {worker} is stopping")
        if hosted not in child.names:
            raise LookupError(f"worker {worker} hosts no {hosted!r}")
        return child

    def _forward(self, rank: RankProcess, hosted: str, method: str, body: Chunk, waits: Waiter) -> None:
        number = next(self._numbers)
        rank.child.calls[number] = waits
        self._send(rank, ("call", number, hosted, method), [body])

    def on_answer(self, child: LocalWorker, frame: Frame) -> Future[Any] | RawAnswer | None:
        """Forward the answer to a worker; or return its receiver in this process (see `resolve_future`; do not hold the
        lock)."""
        _, number, fine = frame.head
        waits = child.calls.pop(number, None)
        if isinstance(waits, tuple):
            other, its_number = waits
            if not other.has_exited:
                self._send(other, ("answer", its_number, fine), [bytes(frame.body)])
            return None
        return waits

    def on_worker_gone(self, child: LocalWorker) -> list[Future[Any] | RawAnswer]:
        """The worker is gone. Returns the receivers in this process, to be resolved without the lock."""
        calls, child.calls = child.calls, {}
        gone = pickle.dumps(WorkerLostError(f"worker {child.number} is gone"))
        for waits in calls.values():
            if isinstance(waits, tuple) and not waits[0].has_exited:
                self._send(waits[0], ("answer", waits[1], False), [gone])
        return [waits for waits in calls.values() if not isinstance(waits, tuple)]


def _find_rank(child: LocalWorker, rank: int) -> RankProcess:
    for process in child.ranks:
        if process.rank == rank:
            return process
    raise LookupError(f"worker {child.number} has no rank {rank}")


def resolve_future(future: Future[Any] | RawAnswer, fine: bool, body: Chunk) -> None:
    """Resolve the receiver of an answer in this process."""
    from concurrent.futures import InvalidStateError

    if isinstance(future, RawAnswer):
        future.future.set_result((fine, bytes(body)))
        return
    try:
        value = pickle.loads(body)  # noqa: S301 - from a worker of this run
    except Exception as error:
        fine, value = False, error
    with suppress(InvalidStateError):  # the caller has cancelled it
        if fine:
            future.set_result(value)
        else:
            future.set_exception(value)
