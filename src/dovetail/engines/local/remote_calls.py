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
    """Waits for an answer in order to pass it on: gets whether it is fine, and the bytes."""

    def __init__(self) -> None:
        from concurrent.futures import Future

        self.future: Future[tuple[bool, bytes]] = Future()
        self.future.set_running_or_notify_cancel()

    def set_exception(self, error: BaseException) -> None:
        self.future.set_result((False, pickle.dumps(error)))


if TYPE_CHECKING:
    Waiter = Future[Any] | RawAnswer | tuple[RankProcess, int]
    """Somebody in this process, who gets a value or bytes; or a worker and its own number of the call."""


class CallRouter:
    """Who waits for which answer. For whoever holds the engine's lock, unless it says otherwise."""

    def __init__(self, children: Mapping[int, LocalWorker], numbers: Iterator[int], tell: Callable[..., None]) -> None:
        """`tell` sends a frame to a process."""
        self._children = children
        self._numbers = numbers
        self._send = tell

    def call_from_driver(
        self, worker: int, hosted: str, method: str, body: Chunk, future: Future[Any] | RawAnswer
    ) -> None:
        """From this process."""
        try:
            child = self._find_worker(worker, hosted)
        except (WorkerLostError, LookupError) as error:
            future.set_exception(error)
            return
        self._forward(child, hosted, method, body, future)

    def relay_call(self, rank: RankProcess, frame: Frame, *, elsewhere: bool = False) -> bool:
        """From worker to worker, unopened. `elsewhere`: there may be more than these; False, if it is for one of
        those, of which whoever asked was told nothing."""
        _, its_number, worker, hosted, method = frame.head
        if elsewhere and not self._is_local(worker):
            return False
        try:
            child = self._find_worker(worker, hosted)
        except (WorkerLostError, LookupError) as error:
            self._send(rank, ("answer", its_number, False), [pickle.dumps(error)])
            return True
        self._forward(child, hosted, method, bytes(frame.body), (rank, its_number))
        return True

    def _is_local(self, worker: int) -> bool:
        """Of a gang, where its first rank is: that one is called."""
        child = self._children.get(worker)
        return child is not None and child.ranks[0].rank == 0

    def _find_worker(self, worker: int, hosted: str) -> LocalWorker:
        child = self._children.get(worker)
        if child is None or child.end is not None:
            raise WorkerLostError(f"worker {worker} is gone")
        if hosted not in child.names:
            raise LookupError(f"worker {worker} hosts no {hosted!r}")
        return child

    def _forward(self, child: LocalWorker, hosted: str, method: str, body: Chunk, waits: Waiter) -> None:
        number = next(self._numbers)
        child.calls[number] = waits
        self._send(child.ranks[0], ("call", number, hosted, method), [body])

    def on_answer(self, child: LocalWorker, frame: Frame) -> Future[Any] | RawAnswer | None:
        """Passes the answer on; or returns who waits for it in this process (see `settle`, without the lock)."""
        _, number, fine = frame.head
        waits = child.calls.pop(number, None)
        if isinstance(waits, tuple):
            other, its_number = waits
            if not other.has_exited:
                self._send(other, ("answer", its_number, fine), [bytes(frame.body)])
            return None
        return waits

    def on_worker_gone(self, child: LocalWorker) -> list[Future[Any] | RawAnswer]:
        """The worker is; returns those who wait in this process, to be told without the lock."""
        calls, child.calls = child.calls, {}
        gone = pickle.dumps(WorkerLostError(f"worker {child.number} is gone"))
        for waits in calls.values():
            if isinstance(waits, tuple) and not waits[0].has_exited:
                self._send(waits[0], ("answer", waits[1], False), [gone])
        return [waits for waits in calls.values() if not isinstance(waits, tuple)]


def resolve_future(future: Future[Any] | RawAnswer, fine: bool, body: Chunk) -> None:
    """The end of a call, for who waits in this process."""
    from concurrent.futures import InvalidStateError

    if isinstance(future, RawAnswer):
        future.future.set_result((fine, bytes(body)))
        return
    try:
        value = pickle.loads(body)  # noqa: S301 - from a worker of this run
    except Exception as error:
        fine, value = False, error
    with suppress(InvalidStateError):  # nobody waits for it any more
        if fine:
            future.set_result(value)
        else:
            future.set_exception(value)
