"""Batches of a worker: jobs for which one call is made, while they are collected and while the call runs.

    first job claimed (slot, seat) ──▶ collecting: further jobs join, without slots or resources of their own
                                          │ size, bytes, wait, deadline
                                          ▼
                                       call: one attempt of a runner ──▶ an end per job

Each job keeps its own lease, attempt, result and error. A job that was attempted before gets a call of its own: if it
has ended its process, it cannot do so to others again.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.jobs.batch import is_marked, unmarked_shape
from dovetail.jobs.job import Lease, Outcome
from dovetail.jobs.store import BatchRoom, ClaimedJob, Completion
from dovetail.jobs.workers.batch_call import BATCH, BatchItem, endings_of, pack_items
from dovetail.jobs.workers.running_attempt import RunningAttempt, StopReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.jobs.batch import Batch
    from dovetail.jobs.job import JobSpec
    from dovetail.jobs.workers.attempt_table import AttemptTable
    from dovetail.jobs.workers.job_ending import Ending
    from dovetail.jobs.workers.running_attempt import Runner
    from dovetail.resources.seat import Seat
    from dovetail.resources.shape import Shape

DEADLINE_SHARE = 0.5
"""Part of its timeout after which a job waits for no others."""

EARLY_SHARE = 0.5
"""Part of its wait by which a call is made early at most."""


class JobBatch:
    """Jobs that one call is made for. Thread: loop, except `call`."""

    __slots__ = (
        "call",
        "declared",
        "flush_at",
        "isolation",
        "items",
        "payload_bytes",
        "queue",
        "seat",
        "shape",
        "was_asked",
    )

    def __init__(
        self, declared: Batch, queue: str, shape: Shape, isolation: str, seat: Seat | None, claimed: float
    ) -> None:
        """`claimed`: monotonic time at which its first job was claimed, at the latest."""
        self.declared = declared
        self.queue = queue
        self.shape = shape
        """Shape of its jobs; with the queue, it identifies their bucket."""
        self.isolation = isolation
        self.seat = seat
        self.items: list[RunningAttempt] = []
        self.payload_bytes = 0
        self.flush_at = claimed + declared.wait_s
        self.was_asked = False
        """Whether the store was asked for more jobs."""
        self.call: BatchAttempt | None = None
        """None: it collects jobs."""

    def add(self, attempt: RunningAttempt) -> None:
        attempt.batch = self
        self.items.append(attempt)
        self.payload_bytes += len(attempt.spec.payload)
        if attempt.timeout_s is not None:
            self.flush_at = min(self.flush_at, attempt.started + DEADLINE_SHARE * attempt.timeout_s)

    def due_at(self, early_s: float) -> float:
        """When the call is to be made: up to `early_s`, and half of the wait, before `flush_at`."""
        return self.flush_at - min(early_s, EARLY_SHARE * self.declared.wait_s)

    @property
    def room(self) -> BatchRoom | None:
        """What it can take; None: nothing."""
        limit = self.declared.bytes_limit
        jobs, payload_bytes = (
            self.declared.size - len(self.items),
            None if limit is None else limit - self.payload_bytes,
        )
        if jobs <= 0 or (payload_bytes is not None and payload_bytes <= 0) or not is_marked(self.shape):
            return None
        return BatchRoom(self.queue, self.shape, jobs, payload_bytes)


class BatchAttempt(RunningAttempt):
    """The call for the jobs of a batch, which a runner treats as one attempt of the first job."""

    __slots__ = ("_cpu_ms", "_endings", "items")

    def __init__(self, batch: JobBatch, items: Sequence[RunningAttempt]) -> None:
        first = items[0]
        payload = pack_items([BatchItem(item.spec.id, item.spec.payload, item.spec.encoding) for item in items])
        spec = replace(first.spec, payload=payload, encoding=BATCH)
        lease = Lease(*first.key[:2], first.attempt, 0)
        now = time.monotonic()
        left = [item.started + item.timeout_s - now for item in items if item.timeout_s is not None]
        timeout_s = max(0.001, min(left)) if left else None
        claimed = ClaimedJob(spec, unmarked_shape(first.shape), lease)
        super().__init__(claimed, batch.seat, first.function, batch.isolation, timeout_s)
        self.items = tuple(items)
        self._endings: list[Ending] = []
        self._cpu_ms: int | None = None

    @property
    def first_spec(self) -> JobSpec:
        return self.items[0].spec

    @property
    def log_names(self) -> tuple[str, ...]:
        return tuple(name for item in self.items for name in item.log_names)

    def report(self, fraction: float | None, message: str | None) -> None:
        for item in self.items:
            item.report(fraction, message)

    def completion(self, ending: Ending, cpu_ms: int | None = None) -> Completion:
        if ending.encoding != BATCH:  # the call could not be made
            return super().completion(ending, cpu_ms)
        self._endings = endings_of(ending)
        self._cpu_ms = None if cpu_ms is None else cpu_ms // len(self.items)
        return Completion(*self.key[:2], Outcome.SUCCEEDED)

    def stop_text(self) -> str:
        if self.stop_reason is StopReason.TIMEOUT:
            limit = min(item.timeout_s for item in self.items if item.timeout_s is not None)
            return f"the call for {len(self.items)} jobs did not end within the timeout of {limit:g} s"
        return super().stop_text()

    def completions(self, completion: Completion) -> list[tuple[RunningAttempt, Completion]]:
        """What the end of the call is for each job."""
        if self._endings:
            return [
                (item, self._of_ending(item, ending, completion))
                for item, ending in zip(self.items, self._endings, strict=True)
            ]
        return [(item, self._of_call(item, completion)) for item in self.items]

    def _of_ending(self, item: RunningAttempt, ending: Ending, completion: Completion) -> Completion:
        found = item.completion(ending, self._cpu_ms)
        if found.outcome is Outcome.SUCCEEDED:
            found = found._replace(exit_code=completion.exit_code)
        return found._replace(peak_memory_bytes=completion.peak_memory_bytes)

    def _of_call(self, item: RunningAttempt, completion: Completion) -> Completion:
        """The call has ended for all jobs, as that of a process that has died."""
        if item.is_stopping() and completion.outcome is not Outcome.RELEASED:
            return item.stopped(exit_code=completion.exit_code)
        job_id, token, rank = item.key
        jitter = random.random()  # noqa: S311 - not for security
        shape = completion.shape
        if shape is not None:
            shape = replace(shape, custom=item.shape.custom)
        return completion._replace(job_id=job_id, token=token, rank=rank, jitter=jitter, shape=shape)


class JobBatches:
    """The batches that a worker collects. Thread: loop, except `stop`."""

    def __init__(self, table: AttemptTable, runners: Mapping[str, Runner], wake: Callable[[], None]) -> None:
        """`wake`: ends the wait of the loop."""
        self._table = table
        self._runners = runners
        self._wake = wake
        self._open: list[JobBatch] = []
        self._lock = threading.Lock()
        """Protects the calls of batches, and the reasons why their jobs are to end."""

    @property
    def rooms(self) -> tuple[BatchRoom, ...]:
        """What to ask the store for."""
        found = []
        for batch in self._open:
            batch.was_asked = True
            room = batch.room
            if room is not None:
                found.append(room)
        return tuple(found)

    @property
    def has_new(self) -> bool:
        """Whether the store was not asked yet for jobs of some batch."""
        return any(not batch.was_asked for batch in self._open)

    def seconds_left(self, early_s: float) -> float | None:
        """Until the next call is due; None: no batch collects. `early_s`: as for `flush_due`."""
        if not self._open:
            return None
        return max(0.0, min(batch.due_at(early_s) for batch in self._open) - time.monotonic())

    def find(self, job: ClaimedJob, isolation: str) -> JobBatch | None:
        """The batch that a claimed job can join."""
        if job.lease.attempt > 1 or not is_marked(job.shape):
            return None
        for batch in self._open:
            if (batch.queue, batch.isolation) == (job.spec.queue, isolation) and batch.shape == job.shape:
                return batch
        return None

    def add(self, batch: JobBatch, attempt: RunningAttempt) -> None:
        """A job joins a batch, or begins it. The call is made if the batch is full, or has to be alone."""
        is_alone = attempt.attempt > 1
        if not batch.items and not is_alone:
            self._open.append(batch)
        batch.add(attempt)
        if is_alone or batch.room is None:
            self._flush(batch)

    def flush_due(self, early_s: float) -> None:
        """Make the calls that are due, and end jobs that were cancelled meanwhile. `early_s`: duration of an exchange:
        a call is made that much early, because an exchange that begins now would end too late to make it."""
        now = time.monotonic()
        for batch in list(self._open):
            if batch.due_at(early_s) <= now and batch.was_asked:
                self._flush(batch)
            else:
                self._keep(batch, [item for item in batch.items if not item.is_stopping()])

    def release(self) -> None:
        """Give back the jobs that no call was made for."""
        for batch in self._open:
            items, batch.items = batch.items, []
            self._table.drop(batch, [(item, item.released()) for item in items])
        self._open.clear()

    def _flush(self, batch: JobBatch) -> None:
        with self._lock:
            kept = [item for item in batch.items if not item.is_stopping()]
            batch.call = BatchAttempt(batch, kept) if kept else None
        self._keep(batch, kept)
        if batch in self._open:
            self._open.remove(batch)
        if batch.call is not None:
            self._runners[batch.isolation].start([batch.call])

    def _keep(self, batch: JobBatch, kept: list[RunningAttempt]) -> None:
        """End the other jobs of a batch: they were cancelled, or their leases are lost."""
        ended = [item for item in batch.items if item not in kept]
        if ended:
            batch.items = kept
            self._table.drop(batch, [(item, item.stopped()) for item in ended])
        if not kept and batch in self._open:
            self._open.remove(batch)

    # --- any thread

    def stop(self, attempt: RunningAttempt, reason: StopReason, detail: str = "") -> None:
        """End a job. A call ends when all of its jobs are to end, or the worker."""
        runner = self._runners[attempt.isolation]
        batch = attempt.batch
        if batch is None:
            runner.stop(attempt, reason, detail)
            return
        with self._lock:
            is_new = attempt.try_stop(reason, detail)
            call = batch.call
        if call is None:
            self._wake()
        elif reason is StopReason.SHUTDOWN or (is_new and all(item.is_stopping() for item in call.items)):
            runner.stop(call, reason, detail)
