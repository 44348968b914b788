"""Isolation `async`: coroutine functions in one event loop of the worker process.

A timeout or a cancellation cancels the task. It takes effect where the coroutine awaits: code that blocks the loop, or
catches `CancelledError`, cannot be interrupted; its attempt is completed after a grace, and keeps its slot until it
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from dovetail.jobs.workers.current_job import CurrentJob
from dovetail.jobs.workers.job_call import call_async_job
from dovetail.jobs.workers.job_ending import failure_ending
from dovetail.jobs.workers.running_attempt import StopReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.jobs.payload_codec import PayloadCodec
    from dovetail.jobs.workers.model_cache import JobModels
    from dovetail.jobs.workers.running_attempt import AttemptKey, CompletionSink, RunningAttempt
    from dovetail.resources.seat import Seat

CLOSE_TIMEOUT_S = 5.0


class AsyncRunner:
    """One thread with an event loop, started by the first attempt."""

    def __init__(
        self, worker: str, codec: PayloadCodec, sink: CompletionSink, models_of: Callable[[Seat | None], JobModels]
    ) -> None:
        """`models_of`: the models of this process for a job with this seat."""
        self._worker = worker
        self._models_of = models_of
        self._codec = codec
        self._sink = sink
        self._incoming: deque[RunningAttempt] = deque()
        self._tasks: dict[AttemptKey, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_releasing = False

    def start(self, attempts: Sequence[RunningAttempt]) -> None:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(loop,), name="dovetail-job-loop", daemon=True)
            self._thread.start()
        self._incoming.extend(attempts)
        loop.call_soon_threadsafe(self._start_incoming)

    def stop(self, attempt: RunningAttempt, reason: StopReason, detail: str = "") -> None:
        is_new = attempt.try_stop(reason, detail)
        if self._loop is None or not (is_new or reason is StopReason.SHUTDOWN):
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed
            if reason is StopReason.PREEMPTED and attempt.polls_checkpoint:
                self._loop.call_soon_threadsafe(
                    self._loop.call_later, attempt.preemption_grace_s, self._cancel, attempt
                )
            else:
                self._loop.call_soon_threadsafe(self._cancel, attempt)

    def release_unbegun(self) -> None:
        self._is_releasing = True

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    # --- in the loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _start_incoming(self) -> None:
        assert self._loop is not None
        while self._incoming:
            attempt = self._incoming.popleft()
            if self._is_releasing:
                self._sink.finish(attempt, attempt.released())
            else:
                self._tasks[attempt.key] = self._loop.create_task(self._run_attempt(attempt))

    async def _run_attempt(self, attempt: RunningAttempt) -> None:
        assert self._loop is not None
        attempt.has_begun = True
        spec = attempt.spec
        job = CurrentJob(
            spec.id,
            attempt.attempt,
            attempt.key[1],
            spec.queue,
            self._worker,
            attempt.report,
            attempt.is_cancelled,
            attempt.is_checkpoint_requested,
            partial(self._models_of, attempt.seat),
        )
        timer = None
        if attempt.timeout_s is not None:
            timer = self._loop.call_later(attempt.timeout_s, self._on_timeout, attempt)
        try:
            if attempt.is_stopping():
                completion = attempt.stopped()
            else:
                ending = await call_async_job(attempt.function, spec.payload, spec.encoding, self._codec, job)
                completion = attempt.completion(ending)
        except asyncio.CancelledError as error:
            # if the worker did not stop it, its own code cancelled it
            completion = attempt.stopped() if attempt.is_stopping() else attempt.completion(failure_ending(error))
        except BaseException as error:  # without an end, its lease would be renewed without end
            completion = attempt.completion(failure_ending(error))
        finally:
            if timer is not None:
                timer.cancel()
            job.release_models()
            self._tasks.pop(attempt.key, None)
        self._sink.finish(attempt, completion)

    def _on_timeout(self, attempt: RunningAttempt) -> None:
        if attempt.try_stop(StopReason.TIMEOUT):
            self._cancel(attempt)

    def _cancel(self, attempt: RunningAttempt) -> None:
        task = self._tasks.get(attempt.key)
        if task is not None:
            task.cancel()
