"""Isolation `thread`: jobs in a pool of threads of the worker process.

The least work per job, and the least protection: a thread cannot be interrupted, so it has no timeout, no memory limit
and no cards of its own, and a job that crashes the process ends all jobs of the worker.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from dovetail.jobs.workers.current_job import CurrentJob
from dovetail.jobs.workers.job_call import call_job
from dovetail.jobs.workers.job_ending import failure_ending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.jobs.payload_codec import PayloadCodec
    from dovetail.jobs.workers.model_cache import JobModels
    from dovetail.jobs.workers.running_attempt import CompletionSink, RunningAttempt, StopReason
    from dovetail.resources.seat import Seat

HAND_OVER_S = 20e-6
"""Pause of the loop after the start of the only attempt: its thread finds the interpreter lock free as it wakes up."""


class ThreadRunner:
    """Threads are started as they are needed, up to one per attempt that runs at the same time."""

    def __init__(
        self, worker: str, codec: PayloadCodec, sink: CompletionSink, models_of: Callable[[Seat | None], JobModels]
    ) -> None:
        """`models_of`: the models of this process for a job with this seat."""
        self._worker = worker
        self._models_of = models_of
        self._codec = codec
        self._sink = sink
        self._queue: SimpleQueue[RunningAttempt | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pending = 0
        """Attempts that were started and have not ended, as the starting thread knows it."""
        self._ended = 0
        self._lock = threading.Lock()
        self._is_releasing = False

    def start(self, attempts: Sequence[RunningAttempt]) -> None:
        self._pending += len(attempts)
        needed = self._pending - self._ended
        while len(self._threads) < needed:
            thread = threading.Thread(target=self._run, name=f"dovetail-job-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        put = self._queue.put
        for attempt in attempts:
            put(attempt)
        if needed == 1:
            time.sleep(HAND_OVER_S)

    def stop(self, attempt: RunningAttempt, reason: StopReason, detail: str = "") -> None:
        """The job sees `cancelled`; its thread cannot be interrupted."""
        attempt.try_stop(reason, detail)

    def release_unbegun(self) -> None:
        self._is_releasing = True

    def close(self) -> None:
        """Threads of jobs that have not ended stay, as daemons."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        get, codec, worker, finish = self._queue.get, self._codec, self._worker, self._sink.finish
        clock = time.thread_time_ns
        while (attempt := get()) is not None:
            if self._is_releasing:
                completion = attempt.released()
            else:
                attempt.has_begun = True
                spec = attempt.spec
                began = clock()
                job = CurrentJob(
                    spec.id,
                    attempt.attempt,
                    attempt.key[1],
                    spec.queue,
                    worker,
                    attempt.report,
                    attempt.is_cancelled,
                    attempt.is_checkpoint_requested,
                    partial(self._models_of, attempt.seat),
                )
                try:
                    try:
                        ending = call_job(attempt.function, spec.payload, spec.encoding, codec, job)
                    finally:
                        job.release_models()
                except BaseException as error:  # without an end, its lease would be renewed without end
                    ending = failure_ending(error)
                completion = attempt.completion(ending, (clock() - began) // 1_000_000)
            with self._lock:
                self._ended += 1
            finish(attempt, completion)
