"""How does a call reach an object in a worker, from the driver or from another worker, past the controller?"""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import WorkerGone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

    from dovetail.engines.local.children import Child, Rank
    from dovetail.engines.local.frames import Frame, Piece


class Calls:
    """Who waits for which answer. For whoever holds the engine's lock, unless it says otherwise."""

    def __init__(self, children: Mapping[int, Child], numbers: Iterator[int], tell: Callable[..., None]) -> None:
        """`tell` sends a frame to a process."""
        self._children = children
        self._numbers = numbers
        self._tell = tell

    def ask(self, worker: int, hosted: str, method: str, body: Piece, future: Future[Any]) -> None:
        """From the driver."""
        try:
            child = self._hosting(worker, hosted)
        except (WorkerGone, LookupError) as error:
            future.set_exception(error)
            return
        self._pass_on(child, hosted, method, body, future)

    def relay(self, rank: Rank, frame: Frame) -> None:
        """From worker to worker, unopened."""
        _, its_number, worker, hosted, method = frame.head
        try:
            child = self._hosting(worker, hosted)
        except (WorkerGone, LookupError) as error:
            self._tell(rank, ("answer", its_number, False), [pickle.dumps(error)])
            return
        self._pass_on(child, hosted, method, bytes(frame.body), (rank, its_number))

    def _hosting(self, worker: int, hosted: str) -> Child:
        child = self._children.get(worker)
        if child is None or child.end is not None:
            raise WorkerGone(f"worker {worker} is gone")
        if hosted not in child.names:
            raise LookupError(f"worker {worker} hosts no {hosted!r}")
        return child

    def _pass_on(
        self, child: Child, hosted: str, method: str, body: Piece, waits: Future[Any] | tuple[Rank, int]
    ) -> None:
        number = next(self._numbers)
        child.calls[number] = waits
        self._tell(child.ranks[0], ("call", number, hosted, method), [body])

    def answered(self, child: Child, frame: Frame) -> Future[Any] | None:
        """Passes the answer on; or returns who waits for it in the driver (see `settle`, without the lock)."""
        _, number, fine = frame.head
        waits = child.calls.pop(number, None)
        if isinstance(waits, tuple):
            other, its_number = waits
            if not other.gone:
                self._tell(other, ("answer", its_number, fine), [bytes(frame.body)])
            return None
        return waits

    def gone(self, child: Child) -> list[Future[Any]]:
        """The worker is; returns those who wait in the driver, to be told without the lock."""
        calls, child.calls = child.calls, {}
        gone = pickle.dumps(WorkerGone(f"worker {child.number} is gone"))
        for waits in calls.values():
            if isinstance(waits, tuple) and not waits[0].gone:
                self._tell(waits[0], ("answer", waits[1], False), [gone])
        return [waits for waits in calls.values() if not isinstance(waits, tuple)]


def settle(future: Future[Any], fine: bool, body: Piece) -> None:
    """The end of a call, for who waits in this process."""
    from concurrent.futures import InvalidStateError

    try:
        value = pickle.loads(body)  # noqa: S301 - from a worker of this run
    except Exception as error:
        fine, value = False, error
    with suppress(InvalidStateError):  # nobody waits for it any more
        if fine:
            future.set_result(value)
        else:
            future.set_exception(value)
