"""A running attempt of a job in its worker, and the completion that reports its end."""

from __future__ import annotations

import random
import time
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dovetail.engines.local.worker_environment import rendezvous_variables
from dovetail.jobs.job import Outcome
from dovetail.jobs.payload_files import log_name
from dovetail.jobs.state_machine import PREEMPTED
from dovetail.jobs.store import Completion
from dovetail.jobs.workers.retry_memory import next_shape
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.jobs.job import JobSpec
    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.store import ClaimedJob, GangPlace
    from dovetail.jobs.workers.job_batches import JobBatch
    from dovetail.jobs.workers.job_ending import Ending
    from dovetail.resources.shape import Shape

NOT_PREEMPTED = "JobPreempted was raised, but dt.current_job().checkpoint_requested was not true"


class AttemptKey(NamedTuple):
    """Key of a running attempt; the members of a gang differ by their rank."""

    job_id: str
    token: int
    rank: int = 0


class Membership(NamedTuple):
    """A rank of a gang on this worker."""

    rank: int
    gang: GangPlace
    seats: tuple[Seat | None, ...]
    """Seats of the ranks of the gang on this worker."""
    local_rank: int
    """Position of this rank among the ranks on this worker."""

    def variables(self) -> dict[str, str]:
        """Rendezvous variables, named as by torchrun. A worker counts as a node."""
        host, _, port = self.gang.address.rpartition(":")
        return rendezvous_variables([Seat(worker) for worker in self.gang.workers], self.rank, int(port), host)


class StopReason(Enum):
    """Why a worker ends an attempt."""

    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out of memory"
    LEASE_LOST = "lease lost"
    """The store refused a renewal: another worker runs the job. There is nothing to complete."""
    SHUTDOWN = "shutdown"
    PREEMPTED = "preempted"
    """A job of higher priority needs the room."""

    @property
    def outcome(self) -> Outcome:
        return _OUTCOMES[self]


_OUTCOMES = {
    StopReason.CANCELLED: Outcome.CANCELLED,
    StopReason.TIMEOUT: Outcome.TIMEOUT,
    StopReason.OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY,
    StopReason.LEASE_LOST: Outcome.LOST,
    # recorded in the history of the job, and never counted against its retries
    StopReason.SHUTDOWN: Outcome.PREEMPTED,
    StopReason.PREEMPTED: Outcome.PREEMPTED,
}


class RunningAttempt:
    """An attempt that a worker holds. Mutable; each attribute is written by one thread at a time."""

    __slots__ = (
        "attempt",
        "batch",
        "function",
        "has_begun",
        "isolation",
        "key",
        "membership",
        "message",
        "pid",
        "polls_checkpoint",
        "progress",
        "reported",
        "seat",
        "shape",
        "spec",
        "started",
        "stop_detail",
        "stop_reason",
        "timeout_s",
    )

    def __init__(
        self,
        claimed: ClaimedJob,
        seat: Seat | None,
        function: JobFunction,
        isolation: str,
        timeout_s: float | None,
        membership: Membership | None = None,
    ) -> None:
        self.spec: JobSpec = claimed.spec
        self.shape: Shape = claimed.shape
        self.key = AttemptKey(claimed.lease.job_id, claimed.lease.token, claimed.rank)
        self.membership = membership
        """The rank that this attempt runs; None if the job is not a gang."""
        self.attempt = claimed.lease.attempt
        self.batch: JobBatch | None = None
        """The batch that it is in, which has its slot and seat."""
        self.seat = seat
        """None for a job that declares no resources."""
        self.function = function
        self.isolation = isolation
        self.timeout_s = timeout_s
        self.started = time.monotonic()
        self.has_begun = False
        """Whether its code has started. Until then the job can be returned without a charge."""
        self.stop_reason: StopReason | None = None
        self.stop_detail = ""
        self.polls_checkpoint = False
        """Whether the job has checked `checkpoint_requested`: then it gets time to end by itself."""
        self.pid: int | None = None
        self.progress: float | None = None
        self.message: str | None = None
        self.reported = True
        """Whether the store has its latest progress."""

    @property
    def first_spec(self) -> JobSpec:
        """Its job; of a call for several jobs, the first one."""
        return self.spec

    @property
    def log_names(self) -> tuple[str, ...]:
        """Names of the file with its output: one per job."""
        return (log_name(self.spec.id, self.attempt, self.key.rank),)

    def report(self, fraction: float | None, message: str | None) -> None:
        """Progress of the job. Sent with the next renewal. Thread: any."""
        if fraction is not None:
            self.progress = fraction
        if message is not None:
            self.message = message
        self.reported = False

    def is_stopping(self) -> bool:
        return self.stop_reason is not None

    def is_cancelled(self) -> bool:
        """Whether its code should stop without saving its state for the next attempt."""
        return self.stop_reason not in (None, StopReason.PREEMPTED)

    def is_checkpoint_requested(self) -> bool:
        """Called by the code of the job. Thread: any."""
        self.polls_checkpoint = True
        return self.stop_reason is StopReason.PREEMPTED

    @property
    def preemption_grace_s(self) -> float:
        return self.spec.preemption_grace_ms / 1000

    def try_stop(self, reason: StopReason, detail: str = "") -> bool:
        """Record why it is to end. The first reason counts, but nothing may be completed after the lease is lost, and a
        cancelled job saves no state for another attempt.
        False: it was ending for this reason, or another one, already."""
        if (
            self.stop_reason is None
            or reason is StopReason.LEASE_LOST
            or (reason is StopReason.CANCELLED and self.stop_reason is StopReason.PREEMPTED)
        ):
            is_new = self.stop_reason is not reason
            self.stop_detail = self.stop_detail if self.stop_reason else detail
            self.stop_reason = reason
            return is_new
        return False

    # --- completions

    def completion(self, ending: Ending, cpu_ms: int | None = None) -> Completion:
        """The completion after the function has returned or raised."""
        outcome = ending.outcome
        if outcome is Outcome.SUCCEEDED:
            job_id, token, rank = self.key
            return Completion(job_id, token, outcome, ending.result, ending.encoding, cpu_ms=cpu_ms, rank=rank)
        if self.stop_reason is not None and outcome in (Outcome.ERROR, Outcome.PREEMPTED) and not ending.final:
            return self.stopped(cpu_ms=cpu_ms, traceback=ending.traceback)
        if outcome is Outcome.PREEMPTED:
            outcome, ending = Outcome.ERROR, ending._replace(error=NOT_PREEMPTED)
        shape = next_shape(self.shape, on_gpu=ending.on_gpu) if outcome is Outcome.OUT_OF_MEMORY else None
        return Completion(
            *self.key[:2],
            outcome,
            rank=self.key.rank,
            error=ending.error,
            traceback=ending.traceback,
            final=ending.final,
            jitter=random.random(),  # noqa: S311 - not for security
            shape=shape,
            cpu_ms=cpu_ms,
        )

    def stopped(
        self,
        *,
        error: str = "",
        traceback: str = "",
        exit_code: int | None = None,
        cpu_ms: int | None = None,
        peak_bytes: int | None = None,
        memory_limit: int = 0,
    ) -> Completion:
        """The worker has ended it. `memory_limit`: the memory that the worker has, for the next attempt."""
        assert self.stop_reason is not None
        outcome = self.stop_reason.outcome
        return Completion(
            *self.key[:2],
            outcome,
            rank=self.key.rank,
            error=error or self.stop_text(),
            traceback=traceback,
            jitter=random.random(),  # noqa: S311
            shape=next_shape(self.shape, peak_bytes, memory_limit) if outcome is Outcome.OUT_OF_MEMORY else None,
            exit_code=exit_code,
            cpu_ms=cpu_ms,
            peak_memory_bytes=peak_bytes,
        )

    def stop_text(self) -> str:
        match self.stop_reason:
            case StopReason.TIMEOUT:
                return f"it did not end within its timeout of {self.timeout_s:g} s"
            case StopReason.SHUTDOWN:
                return "its worker was stopped; this attempt does not count"
            case StopReason.PREEMPTED:
                return PREEMPTED
            case StopReason.CANCELLED:
                return ""
            case _:
                return self.stop_detail

    def released(self) -> Completion:
        """The completion of an attempt that has not begun and is returned."""
        return Completion(*self.key[:2], Outcome.RELEASED, rank=self.key.rank)


class CompletionSink(Protocol):
    """Receiver of the ends that runners report. Thread: any."""

    def finish(self, attempt: RunningAttempt, completion: Completion) -> None:
        """Report an attempt that has ended; its slot and seat become free."""


class Runner(Protocol):
    """Runs attempts with one isolation. All methods return at once. Thread: any."""

    def start(self, attempts: Sequence[RunningAttempt]) -> None: ...

    def stop(self, attempt: RunningAttempt, reason: StopReason, detail: str = "") -> None:
        """End an attempt as soon as this isolation can."""

    def release_unbegun(self) -> None:
        """Return attempts that have not begun, now and from now on."""

    def close(self) -> None:
        """End everything that can be ended, and wait for that."""
