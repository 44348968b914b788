"""Jobs as data: the specification, states, attempts, leases and records of jobs. Pure.

Times are whole milliseconds of the store's clock, which counts like Unix time. Amounts are integers (`Shape`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.shape import Shape, ShapeKind

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_QUEUE = "default"
PRIORITY_NAMES = {"high": 10, "normal": 0, "low": -10}
PRIORITY_LIMIT = 1_000_000
RETRIES_LIMIT = 100
DEFAULT_LEASE_MS = 15_000
DEFAULT_PREEMPTION_GRACE_MS = 30_000
NO_RESOURCES = Shape(ShapeKind.CPU_ONLY)
"""Shape of a job that declares no resources: it takes one slot of its worker and nothing else."""


class JobState(StrEnum):
    """States of a job; `state_machine.LEGAL_MOVES` has the moves between them."""

    SCHEDULED = "scheduled"
    """Waits for its start time: `at` or `delay`, or the backoff before a retry."""
    BLOCKED = "blocked"
    """Waits for other jobs to succeed."""
    READY = "ready"
    """Can be claimed."""
    LEASED = "leased"
    """A worker runs it, and renews its lease."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """Ended by an error that is not retried."""
    CANCELLED = "cancelled"
    """Cancelled by a user, or because a job that it waited for did not succeed."""
    DEAD = "dead"
    """Dead letter: all retries are used up. Kept with its attempts, until it is requeued or purged."""

    @property
    def is_finished(self) -> bool:
        return self in FINISHED


FINISHED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD})
REQUEUEABLE = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.DEAD})


class Outcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    ERROR = "error"
    """The function raised an exception, or could not be called."""
    TIMEOUT = "timeout"
    LOST = "lost"
    """The lease expired, or the process of the job died."""
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    """Ended to make room for a job of higher priority, or because its worker was stopped. Never counted against the
    retries."""
    CANCELLED = "cancelled"
    """Ended because its cancellation was requested."""
    RELEASED = "released"
    """Returned by its worker before it began. Neither recorded nor counted as an attempt."""


class DependencyPolicy(StrEnum):
    """What happens to a job when a job that it waits for ends without success."""

    CANCEL = "cancel"
    """It is cancelled, and the jobs that wait for it are treated in the same way."""
    BLOCK = "block"
    """It stays blocked, until the other job is requeued and succeeds."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Maximum number of retries of a job, by the outcome of the attempt, and the delay before a retry.

    The delay before the nth retry for one outcome is `jitter x min(max_backoff_ms, backoff_ms x 2^(n-1))`, with a
    random number 0 <= jitter < 1 (full jitter). After an expired lease there is no delay.
    """

    error: int = 3
    timeout: int = 1
    lost: int = 3
    out_of_memory: int = 2
    backoff_ms: int = 2_000
    max_backoff_ms: int = 600_000

    def limit(self, outcome: Outcome) -> int:
        match outcome:
            case Outcome.ERROR:
                return self.error
            case Outcome.TIMEOUT:
                return self.timeout
            case Outcome.LOST:
                return self.lost
            case Outcome.OUT_OF_MEMORY:
                return self.out_of_memory
            case _:
                raise ValueError(f"{outcome} is never retried by count")


NORMAL_RETRIES = Retries()


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as submitted. It never changes; `JobRecord` has the state and history of the job.

    Stores interpret `id`, `queue`, `priority`, `shape`, `retries`, `key`, `after`, `if_dependency_fails`, `at_ms`,
    `delay_ms` and `preemptible`; they keep everything else for the worker and for people.
    """

    id: str
    """Made by the submitter (`job_id.new_job_id`), so that repeating a submission whose reply was lost is harmless.
    Ids sort by time: of two jobs with the same order key the smaller id is claimed first."""
    function: str
    """"pkg.module:name", or "/path/script.py:name"."""
    payload: bytes = b""
    """Encoded arguments, or where they are kept (`encoding`)."""
    encoding: str = "json"
    queue: str = DEFAULT_QUEUE
    priority: int = 0
    """Higher is more urgent. One step is worth 60 s of waiting."""
    shape: Shape = NO_RESOURCES
    """Required resources; with several ranks the job is a gang, and each rank needs this."""
    retries: Retries = NORMAL_RETRIES
    key: str | None = None
    """Idempotency key: while the store keeps a job with this key, another submission of it returns that job."""
    after: tuple[str, ...] = ()
    """Ids of jobs that must have succeeded before this one may start."""
    if_dependency_fails: DependencyPolicy = DependencyPolicy.CANCEL
    at_ms: int | None = None
    """Earliest start."""
    delay_ms: int = 0
    """Minimum delay from the submission to the start."""
    timeout_ms: int | None = None
    """Time limit of one attempt, enforced by the worker."""
    isolation: str | None = None
    """"process", "warm_process", "thread" or "async"; None: the worker's default for such a job."""
    schedule: str | None = None
    """Name of the schedule that submitted the job."""
    preemptible: bool = False
    """Whether it may be ended to make room for a job of higher priority."""
    preemption_grace_ms: int = DEFAULT_PREEMPTION_GRACE_MS
    """Time to save its state after its preemption is requested, enforced by the worker."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Plain JSON data that only workers interpret."""

    def __hash__(self) -> int:
        return hash(self.id)


class Lease(NamedTuple):
    """The right of one attempt to complete its job."""

    job_id: str
    token: int
    """Fencing token: 1 for the first claim of the job and larger for each later one. A renewal or completion with any
    other token than the newest one is refused."""
    attempt: int
    """Number of the attempt, from 1; a claim that was given back is not counted."""
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that has ended."""

    number: int
    token: int
    worker: str
    started_ms: int
    ended_ms: int
    outcome: Outcome
    error: str = ""
    """One line, such as "ValueError: no such model"."""
    traceback: str = ""
    exit_code: int | None = None
    cpu_ms: int | None = None
    peak_memory_bytes: int | None = None


class Member(NamedTuple):
    """A rank of a running gang."""

    worker: str
    deadline_ms: int
    """When the lease expires, unless this worker renews it."""
    is_sent: bool = False
    """Whether its worker has received the rank."""
    has_ended: bool = False
    """Whether its function has returned, or has saved its state after the preemption of the gang was requested."""


@dataclass(frozen=True, slots=True)
class Gang:
    """The members of a running gang, which have one lease together: it holds as long as the workers of all members that
    have not ended renew it."""

    members: tuple[Member, ...]
    """Members in the order of their ranks."""
    address: str
    """HOST:PORT at which rank 0 listens."""
    result: bytes | None = None
    """Result of rank 0, kept until all members have ended."""
    result_encoding: str = ""
    is_preempted: bool = False
    """Whether a member has saved its state and ended to make room for another job."""

    @property
    def workers(self) -> tuple[str, ...]:
        """The worker of each rank."""
        return tuple(member.worker for member in self.members)

    @property
    def deadline_ms(self) -> int | None:
        """The earliest deadline of the members that run; None: all have ended."""
        return min((member.deadline_ms for member in self.members if not member.has_ended), default=None)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job with its state and history."""

    spec: JobSpec
    state: JobState
    shape: Shape
    """Resources of the next attempt: those of the specification, or more after it ran out of memory."""
    submitted_ms: int
    enqueued_ms: int
    """Start of the waiting time: when the job could first run. Retries keep it; a requeue sets it to the time of the
    requeue."""
    due_ms: int | None = None
    """Scheduled: when it becomes ready. Leased: when the lease expires. Otherwise None."""
    token: int = 0
    """The newest fencing token; 0 before the first claim."""
    attempt: int = 0
    """Number of attempts that were charged, the running one included."""
    counted_after: int = 0
    """Attempts up to this number do not count against the retries, because a requeue followed them."""
    worker: str | None = None
    started_ms: int | None = None
    """Start of the running attempt."""
    attempts: tuple[Attempt, ...] = ()
    """Attempts that have ended, oldest first."""
    unmet: tuple[str, ...] = ()
    """Jobs that have not succeeded yet, of those in `spec.after`."""
    cancel_requested: bool = False
    preempted_for: str | None = None
    """Leased and its preemption requested: id of the job for which it makes room."""
    gang: Gang | None = None
    """Members of a leased gang. `worker` is the worker of rank 0."""
    progress: float | None = None
    message: str = ""
    """Text of the latest progress report."""
    result: bytes | None = None
    result_encoding: str = ""
    error: str = ""
    """Why it failed, died or was cancelled."""
    finished_ms: int | None = None

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that run the job, without duplicates."""
        if self.gang is not None:
            return tuple(dict.fromkeys(self.gang.workers))
        return () if self.worker is None else (self.worker,)

    @property
    def lease(self) -> Lease | None:
        if self.state is not JobState.LEASED or self.due_ms is None:
            return None
        return Lease(self.spec.id, self.token, self.attempt, self.due_ms)
