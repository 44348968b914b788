"""Futures of calls from the driver: cancellation, deadlines, and answers that are unpickled outside of the loop's
thread."""

from __future__ import annotations

from concurrent.futures import Future
from heapq import heapify, heappop, heappush
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.control.engine import DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Pickled = bytes | memoryview | Sequence[bytes | memoryview]
    """A pickled value or exception, or one in pieces."""
    Body = Pickled | BaseException
    """The last is an exception of the engine itself."""


class CallOwner(Protocol):
    """The engine that made a call."""

    completions: CompletionThread

    def withdraw_call(self, call: WorkerCallFuture) -> bool:
        """Forget the call and cancel it in its worker. False: it was answered. Thread: any."""
        ...

    def load(self, body: Any, descriptors: Sequence[int]) -> Any:
        """Unpickle an answer; closes the descriptors. Thread: any."""
        ...

    def drop(self, descriptors: Sequence[int]) -> None:
        """Close the descriptors of an answer for which no caller waits. Thread: any."""
        ...

    def wait_for(self, call: WorkerCallFuture, timeout_s: float | None) -> None:
        """Read until the call is answered, if this thread may read; events are kept for the next `poll`. May return
        early."""
        ...


_OPEN_STATES = ("PENDING", "RUNNING")
"""States of `concurrent.futures` before the end."""


class WorkerCallFuture(Future[Any]):
    """The result of a call. A thread that waits for it unpickles the answer, otherwise the completion thread does; that
    thread also runs the callbacks."""

    def __init__(self, owner: CallOwner) -> None:
        super().__init__()
        self._owner = owner
        self.number = 0
        """Set when the call is sent."""
        self.worker = 0
        self.rank = 0
        self.deadline_s: float | None = None
        self._waiting_threads = 0
        self._answer: tuple[bool, Body, Sequence[int]] | None = None
        """An answer that is not unpickled yet: whether the call succeeded, its result or exception, and descriptors of
        shared memory."""

    def cancel(self) -> bool:
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        if self._owner.withdraw_call(self):
            self.set_running_or_notify_cancel()  # for `concurrent.futures.wait`
        return True

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._wait(timeout))

    def _wait(self, timeout_s: float | None) -> float | None:
        """Wait for the answer and unpickle it; returns the seconds that are left (None: without limit)."""
        end = None if timeout_s is None else monotonic() + timeout_s
        with self._condition:
            if self._state not in _OPEN_STATES:
                return 0.0
            self._waiting_threads += 1
        try:
            self._owner.wait_for(self, timeout_s)
            with self._condition:
                self._condition.wait_for(self.is_answered, None if end is None else end - monotonic())
        finally:
            with self._condition:
                self._waiting_threads -= 1
            self.complete()
        return None if end is None else max(0.0, end - monotonic())

    def is_answered(self) -> bool:
        return self._answer is not None or self._state not in _OPEN_STATES

    def deliver(self, fine: bool, body: Body, descriptors: Sequence[int] = ()) -> None:
        """Pass the answer to a thread that waits for it, or to the completion thread. Once."""
        with self._condition:
            self._answer = fine, body, descriptors
            if self._waiting_threads:
                self._condition.notify_all()
                return
        self._owner.completions.put(self)

    def deliver_here(self, fine: bool, body: Body) -> None:
        """Complete the future in this thread. Once, instead of `deliver`."""
        self._answer = fine, body, ()
        self.complete()

    def complete(self) -> None:
        """Unpickle the answer in this thread, if no other thread has taken it."""
        with self._condition:
            answer, self._answer = self._answer, None
        if answer is None:
            return
        fine, value, descriptors = answer
        if not self.set_running_or_notify_cancel():
            self._owner.drop(descriptors)
            return
        if not isinstance(value, BaseException):
            try:
                value = self._owner.load(value, descriptors)
            except Exception as error:
                fine, value = False, error
        if fine:
            self.set_result(value)
        else:
            self.set_exception(value)


class CompletionThread:
    """Completes futures that no thread waits for, in the order of their answers. Started by the first one."""

    def __init__(self) -> None:
        self._futures: SimpleQueue[WorkerCallFuture | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_closed = False
        self._lock = Lock()

    def put(self, future: WorkerCallFuture) -> None:
        with self._lock:
            if not self._is_closed:
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="dovetail-calls", daemon=True)
                    self._thread.start()
                self._futures.put(future)
                return
        future.complete()

    def _run(self) -> None:
        while (future := self._futures.get()) is not None:
            future.complete()

    def close(self) -> None:
        """Complete what has arrived and end the thread; does not wait for callbacks."""
        with self._lock:
            self._is_closed = True
            self._futures.put(None)


class CallDeadlines:
    """Deadlines of unanswered calls. Hold the engine's lock."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._queue: list[tuple[float, int]] = []
        """A heap. Entries of answered calls are removed when they are due, or when they are the majority."""

    def add(self, number: int, at: float) -> None:
        self._times[number] = at
        heappush(self._queue, (at, number))

    def discard(self, number: int) -> None:
        if self._times.pop(number, None) is not None and len(self._queue) > 2 * len(self._times) + 16:
            self._queue = [(at, number) for number, at in self._times.items()]
            heapify(self._queue)

    def next_at(self) -> float | None:
        while self._queue and self._queue[0][1] not in self._times:
            heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def take_due(self, now: float) -> Iterator[int]:
        """Numbers of the calls whose deadline has passed."""
        while self._queue and self._queue[0][0] <= now:
            _, number = heappop(self._queue)
            if self._times.pop(number, None) is not None:
                yield number


def deadline_error(deadline_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(f"no answer within {deadline_s:g} s")
