"""Calls from this process to objects of its workers: sending, deadlines and cancellation."""

from __future__ import annotations

import pickle
import time
from math import inf
from typing import TYPE_CHECKING, Any, cast

from dovetail.control.engine import WorkerLostError
from dovetail.engines.call_future import CallDeadlines, CompletionThread, WorkerCallFuture, deadline_error
from dovetail.engines.local.call_body import (
    CallBody,
    CallBuffers,
    load_value,
    pickle_if_small,
    to_portable,
    to_shared_memory,
)
from dovetail.engines.local.protocol import close_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import Lock

    from dovetail.control.engine import CallOptions
    from dovetail.engines.call_future import Body
    from dovetail.engines.local.buffer_pool import BufferPool
    from dovetail.engines.local.protocol import Chunk
    from dovetail.engines.local.worker_call_router import WorkerCallRouter
    from dovetail.engines.local.worker_state import RankProcess


class PickledCallFuture(WorkerCallFuture):
    """Resolves to success and the pieces of the pickled result, in the thread that delivers it: for answers that are
    forwarded."""

    def deliver(self, fine: bool, body: Body, descriptors: Sequence[int] = ()) -> None:
        if not self.set_running_or_notify_cancel():
            close_descriptors(descriptors)
        elif isinstance(body, BaseException):
            self.set_result((fine, [pickle.dumps(body)]))
        else:
            self.set_result((fine, to_portable(cast("Chunk", body), descriptors)))

    deliver_here = deliver


class DriverCalls:
    """Unanswered calls of this process. Created by its first call, because most runs make none."""

    def __init__(
        self,
        router: WorkerCallRouter,
        lock: Lock,
        flush: Callable[[RankProcess], None],
        wake: Callable[[], None],
        wait_for: Callable[[WorkerCallFuture, float | None], None],
        new_pool: Callable[[], BufferPool],
    ) -> None:
        """`lock`: of the engine. `flush` sends the queued frames of a process, `wake` wakes the polling thread."""
        self._router = router
        self._lock = lock
        self._flush = flush
        self._wake = wake
        self.wait_for = wait_for
        self.load, self.drop = load_value, close_descriptors
        self.completions = CompletionThread()
        self._deadlines = CallDeadlines()
        self._buffers = CallBuffers(new_pool())
        self._buffer_of: dict[int, int] = {}
        """Number of a call -> buffer of its arguments."""
        self._open: dict[int, WorkerCallFuture] = {}
        """Calls with a deadline, by number."""
        self._polling_until = 0.0
        """When the polling thread looks at deadlines again."""

    def call(
        self, options: CallOptions, worker: int, hosted: str, method: str, args: Any, named: dict[str, Any]
    ) -> WorkerCallFuture:
        call = WorkerCallFuture(self)
        data = pickle_if_small((args, named))
        body, buffer = self._buffers.pack((args, named)) if data is None else (CallBody(data), 0)
        self._send(options, worker, hosted, method, body, call, buffer)
        return call

    def call_pickled(
        self, options: CallOptions, worker: int, hosted: str, method: str, pieces: Sequence[Chunk]
    ) -> PickledCallFuture:
        call = PickledCallFuture(self)
        try:
            body = to_shared_memory(pieces)
        except OSError as error:  # no memory or no descriptor is left
            call.deliver_here(False, error)
        else:
            self._send(options, worker, hosted, method, body, call)
        return call

    def _send(
        self,
        options: CallOptions,
        worker: int,
        hosted: str,
        method: str,
        body: CallBody,
        call: WorkerCallFuture,
        buffer: int = 0,
    ) -> None:
        deadline_s = options.deadline_s
        deadline = 0.0 if deadline_s is None else time.monotonic() + deadline_s
        try:
            with self._lock:
                rank = self._router.call_from_driver(
                    worker, options.rank, hosted, method, body, deadline, call, options.origin
                )
                if buffer:
                    self._buffer_of[call.number] = buffer
                if deadline_s is not None:
                    call.deadline_s = deadline_s
                    self._deadlines.add(call.number, deadline)
                    self._open[call.number] = call
                self._flush(rank)
        except (WorkerLostError, LookupError) as error:
            close_descriptors(body.descriptors)
            if buffer:
                self._buffers.release(buffer, is_unused=True)
            call.deliver_here(False, error)
            return
        if deadline and deadline < self._polling_until:
            self._wake()

    def withdraw_call(self, call: WorkerCallFuture) -> bool:
        with self._lock:
            rank = self._router.withdraw(call)
            if rank is None:
                return False
            self.forget(call)
            self._flush(rank)
        return True

    def forget(self, call: WorkerCallFuture, *, is_unused: bool = False) -> None:
        """The call has ended. `is_unused`: no process has a view of its arguments. Hold the lock."""
        if self._buffer_of:
            self._release_buffer(call, is_unused)
        if call.deadline_s is not None and self._open.pop(call.number, None) is not None:
            self._deadlines.discard(call.number)

    def _release_buffer(self, call: WorkerCallFuture, is_unused: bool) -> None:
        buffer = self._buffer_of.pop(call.number, 0)
        if buffer:
            self._buffers.release(buffer, is_unused=is_unused)

    def seconds_left(self, limit_s: float) -> float:
        """Seconds until the next deadline, at most the limit (below 0: none). The polling thread waits as long."""
        with self._lock:
            at = self._deadlines.next_at()
            now = time.monotonic()
            if at is not None and (limit_s < 0 or at < now + limit_s):
                limit_s = max(0.0, at - now)
            self._polling_until = inf if limit_s < 0 else now + limit_s
        return limit_s

    def end_overdue(self) -> None:
        """End the calls whose deadline has passed."""
        overdue: list[WorkerCallFuture] = []
        with self._lock:
            for number in self._deadlines.take_due(time.monotonic()):
                call = self._open.pop(number)
                self._release_buffer(call, is_unused=False)
                rank = self._router.withdraw(call)
                if rank is not None:
                    self._flush(rank)
                    overdue.append(call)
        for call in overdue:
            call.deliver(False, deadline_error(call.deadline_s or 0.0))

    def close(self) -> None:
        self.completions.close()
        self._buffers.close()
