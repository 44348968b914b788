"""State machine of a job: the table of legal moves, and one pure function per event that returns the new record. Pure.

    submit ─▶ blocked ─▶ scheduled ─▶ ready ──claim──▶ leased ──complete──▶ succeeded
                 │           │  ▲       │ ▲              │ │ │
                 │           │  └───────┼─┼─── retry ────┘ │ └────────────▶ failed, dead ─┐
                 │           │          │ └─ lost, released ┘                             │
                 └───────────┴──────────┴─── cancel ─────────────▶ cancelled ─────────────┤
                                 ready, blocked ◀────────────── requeue ──────────────────┘

Every function takes the time of the store first, and refuses an illegal move with an assertion: stores check the
state before they call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.jobs.job import REQUEUEABLE, Attempt, DependencyPolicy, JobRecord, JobState, Outcome
from dovetail.jobs.retry_backoff import backoff_ms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.jobs.job import Gang, JobSpec
    from dovetail.jobs.store import Completion

PREEMPTED = "it made room for a job of higher priority; this attempt does not count"
PREEMPTIONS_KEPT = 20
"""Maximum number of preempted attempts that a record keeps; the retries do not limit them."""

_S = JobState
LEGAL_MOVES: dict[JobState, frozenset[JobState]] = {
    _S.SCHEDULED: frozenset({_S.READY, _S.CANCELLED}),
    _S.BLOCKED: frozenset({_S.SCHEDULED, _S.READY, _S.CANCELLED}),
    _S.READY: frozenset({_S.LEASED, _S.CANCELLED}),
    _S.LEASED: frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.DEAD, _S.READY, _S.SCHEDULED}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset({_S.READY, _S.BLOCKED}),
    _S.CANCELLED: frozenset({_S.READY, _S.BLOCKED}),
    _S.DEAD: frozenset({_S.READY, _S.BLOCKED}),
}
"""Legal moves from each state. A new job starts as blocked, and leaves this state in the same step if it has no
dependencies."""


def submitted(now_ms: int, spec: JobSpec, unmet: Iterable[str] = (), failed: str = "") -> JobRecord:
    """A new job. `unmet`: jobs of `spec.after` that have not succeeded; `failed`: one of them that has ended."""
    record = JobRecord(spec, JobState.BLOCKED, spec.shape, submitted_ms=now_ms, enqueued_ms=now_ms, unmet=tuple(unmet))
    if failed:
        return dependency_failed(now_ms, record, failed)
    return record if record.unmet else _startable(now_ms, record)


def claimed(now_ms: int, record: JobRecord, worker: str, lease_ms: int, gang: Gang | None = None) -> JobRecord:
    """Leased by a worker, with a new fencing token; the attempt is charged now. `gang`: the members of a gang."""
    assert record.state is JobState.READY, record.state
    return _moved(
        record,
        JobState.LEASED,
        due_ms=now_ms + lease_ms,
        token=record.token + 1,
        attempt=record.attempt + 1,
        worker=worker,
        started_ms=now_ms,
        progress=None,
        message="",
        gang=gang,
    )


def renewed(
    now_ms: int,
    record: JobRecord,
    lease_ms: int,
    progress: float | None = None,
    message: str | None = None,
    worker: str = "",
) -> JobRecord:
    """Renew the lease; that of a gang for the members of this worker. A progress or message that is not given
    stays."""
    assert record.state is JobState.LEASED, record.state
    gang, due_ms = record.gang, now_ms + lease_ms
    if gang is not None:
        gang = _with_members(gang, worker, deadline_ms=due_ms)
        due_ms = gang.deadline_ms or due_ms
    return replace(
        record,
        due_ms=due_ms,
        gang=gang,
        progress=record.progress if progress is None else progress,
        message=record.message if message is None else message,
    )


def completed(now_ms: int, record: JobRecord, completion: Completion) -> JobRecord:
    """End the attempt, as its worker reports, or one member of a gang."""
    assert (record.state, record.token) == (JobState.LEASED, completion.token)
    if record.gang is not None:
        return _member_completed(now_ms, record, record.gang, completion)
    return _completed(now_ms, record, completion)


def members_sent(now_ms: int, record: JobRecord, worker: str, lease_ms: int) -> JobRecord:
    """Mark the members of a gang that a worker has received; its part of the lease starts now."""
    assert record.gang is not None, record.id
    gang = _with_members(record.gang, worker, deadline_ms=now_ms + lease_ms, is_sent=True)
    return replace(record, gang=gang, due_ms=gang.deadline_ms)


def has_ended(record: JobRecord, completion: Completion) -> bool:
    """Whether this member of a running gang has ended already, so that its worker reports it again."""
    return record.gang is not None and record.gang.members[completion.rank].has_ended


def has_member(record: JobRecord, worker: str, rank: int) -> bool:
    """Whether a worker runs this rank of the job."""
    if record.gang is None:
        return rank == 0
    return 0 <= rank < len(record.gang.members) and record.gang.members[rank].worker == worker


def expired_rank(record: JobRecord) -> int:
    """The first rank whose worker has not renewed the lease until it expired."""
    if record.gang is None:
        return 0
    running = [(member.deadline_ms, rank) for rank, member in enumerate(record.gang.members) if not member.has_ended]
    return min(running)[1]


def _member_completed(now_ms: int, record: JobRecord, gang: Gang, completion: Completion) -> JobRecord:
    """A gang succeeds when all of its members have, with the result of rank 0; it is preempted when all have ended
    after that was requested. Any other end of one member ends the attempt of all."""
    outcome, rank = completion.outcome, completion.rank
    is_preempted = outcome is Outcome.PREEMPTED and record.preempted_for is not None
    if outcome is not Outcome.SUCCEEDED and not is_preempted:
        if completion.error:
            completion = completion._replace(error=f"rank {rank} on {gang.members[rank].worker}: {completion.error}")
        return _completed(now_ms, record, completion)
    member = gang.members[rank]._replace(has_ended=True)
    gang = replace(
        gang,
        members=(*gang.members[:rank], member, *gang.members[rank + 1 :]),
        is_preempted=gang.is_preempted or is_preempted,
    )
    if rank == 0 and not is_preempted:
        gang = replace(gang, result=completion.result, result_encoding=completion.encoding)
    due_ms = gang.deadline_ms
    if due_ms is not None:
        return replace(record, gang=gang, due_ms=due_ms)
    if gang.is_preempted:
        completion = completion._replace(outcome=Outcome.PREEMPTED, result=None, encoding="", error=PREEMPTED)
    else:
        completion = completion._replace(result=gang.result, encoding=gang.result_encoding)
    return _completed(now_ms, record, completion)


def _with_members(gang: Gang, worker: str, **changes: Any) -> Gang:
    """The gang with these changes of all members of a worker."""
    members = (member._replace(**changes) if member.worker == worker else member for member in gang.members)
    return replace(gang, members=tuple(members))


def _completed(now_ms: int, record: JobRecord, completion: Completion) -> JobRecord:
    match completion.outcome:
        case Outcome.RELEASED if record.cancel_requested:
            return _finished(now_ms, replace(record, attempt=record.attempt - 1), JobState.CANCELLED)
        case Outcome.RELEASED:
            return _ready_again(replace(record, attempt=record.attempt - 1))
        case Outcome.SUCCEEDED:
            return _finished(
                now_ms,
                record,
                JobState.SUCCEEDED,
                attempts=_attempts_after(now_ms, record, completion),
                result=completion.result,
                result_encoding=completion.encoding,
            )
        case _:
            return _ended_without_success(now_ms, record, completion)


def expired(now_ms: int, record: JobRecord, completion: Completion) -> JobRecord:
    """Expire a lease that was not renewed in time; `completion` has the outcome LOST and no jitter."""
    assert record.due_ms is not None
    assert record.due_ms <= now_ms
    return completed(now_ms, record, completion)


def promoted(record: JobRecord) -> JobRecord:
    """Make a scheduled job ready when its time has come."""
    assert record.state is JobState.SCHEDULED, record.state
    return _moved(record, JobState.READY, due_ms=None)


def cancelled(now_ms: int, record: JobRecord, reason: str = "") -> JobRecord:
    """Cancel a waiting job, or mark a running one so that its worker stops it."""
    if record.state is JobState.LEASED:
        return replace(record, cancel_requested=True, error=reason)
    return _finished(now_ms, record, JobState.CANCELLED, error=reason)


def preemption_requested(record: JobRecord, job_id: str) -> JobRecord:
    """Mark a running job so that its worker ends it, to make room for another job."""
    assert record.state is JobState.LEASED, record.state
    assert record.spec.preemptible, record.id
    return replace(record, preempted_for=job_id)


def dependency_succeeded(now_ms: int, record: JobRecord, job_id: str) -> JobRecord:
    """Remove a dependency that has succeeded."""
    unmet = tuple(other for other in record.unmet if other != job_id)
    if unmet:
        return replace(record, unmet=unmet)
    return _startable(now_ms, replace(record, unmet=()))


def dependency_failed(now_ms: int, record: JobRecord, job_id: str) -> JobRecord:
    """Handle a dependency that has ended without success: cancel the job, or keep it blocked."""
    if record.spec.if_dependency_fails is DependencyPolicy.BLOCK:
        return record
    return _finished(now_ms, record, JobState.CANCELLED, error=_dependency_error(job_id))


def requeued(now_ms: int, record: JobRecord, unmet: Iterable[str] = ()) -> JobRecord:
    """Run a failed, dead or cancelled job again, with all its retries. Its attempts are kept."""
    assert record.state in REQUEUEABLE, record.state
    waiting_for = tuple(unmet)
    return _moved(
        record,
        JobState.BLOCKED if waiting_for else JobState.READY,
        shape=record.spec.shape,
        enqueued_ms=now_ms,
        unmet=waiting_for,
        counted_after=record.attempt,
        cancel_requested=False,
        error="",
        finished_ms=None,
        progress=None,
        message="",
    )


def is_repeated(record: JobRecord, completion: Completion, worker: str) -> bool:
    """Whether this completion was applied before, and its worker sends it again because the reply was lost."""
    if not record.attempts:
        return False
    last = record.attempts[-1]
    return (last.token, last.outcome, last.worker) == (completion.token, completion.outcome, worker)


# --- parts


def _ended_without_success(now_ms: int, record: JobRecord, completion: Completion) -> JobRecord:
    ended = replace(record, attempts=_attempts_after(now_ms, record, completion))
    outcome = completion.outcome
    if record.cancel_requested or outcome is Outcome.CANCELLED:
        return _finished(now_ms, ended, JobState.CANCELLED, error=record.error or completion.error)
    if outcome is Outcome.PREEMPTED:
        return _ready_again(ended)
    limit = 0 if completion.final else record.spec.retries.limit(outcome)
    failures = sum(1 for item in ended.attempts if item.outcome is outcome and item.number > record.counted_after)
    if failures > limit:
        state = JobState.DEAD if limit else JobState.FAILED
        return _finished(now_ms, ended, state, error=completion.error or outcome.value)
    if completion.shape is not None:
        ended = replace(ended, shape=completion.shape)
    delay_ms = backoff_ms(record.spec.retries, failures, completion.jitter)
    if not delay_ms:
        return _ready_again(ended)
    return _moved(ended, JobState.SCHEDULED, due_ms=now_ms + delay_ms, worker=None, started_ms=None)


def _attempts_after(now_ms: int, record: JobRecord, completion: Completion) -> tuple[Attempt, ...]:
    assert record.worker is not None
    assert record.started_ms is not None
    attempt = Attempt(
        number=record.attempt,
        token=record.token,
        worker=record.worker,
        started_ms=record.started_ms,
        ended_ms=now_ms,
        outcome=completion.outcome,
        error=completion.error,
        traceback=completion.traceback,
        exit_code=completion.exit_code,
        cpu_ms=completion.cpu_ms,
        peak_memory_bytes=completion.peak_memory_bytes,
    )
    kept = record.attempts
    if attempt.outcome is Outcome.PREEMPTED:
        preempted = [item for item in kept if item.outcome is Outcome.PREEMPTED]
        if len(preempted) >= PREEMPTIONS_KEPT:
            kept = tuple(item for item in kept if item is not preempted[0])
    return (*kept, attempt)


def _finished(now_ms: int, record: JobRecord, state: JobState, error: str = "", **changes: Any) -> JobRecord:
    return _moved(
        record,
        state,
        due_ms=None,
        worker=None,
        started_ms=None,
        cancel_requested=False,
        error=error,
        finished_ms=now_ms,
        **changes,
    )


def _ready_again(record: JobRecord) -> JobRecord:
    return _moved(record, JobState.READY, due_ms=None, worker=None, started_ms=None)


def _startable(now_ms: int, record: JobRecord) -> JobRecord:
    """The record as ready, or as scheduled if its time has not come. Waiting counts from the time at which it could
    first run."""
    due_ms = max(record.submitted_ms + record.spec.delay_ms, record.spec.at_ms or 0)
    if due_ms > now_ms:
        return _moved(record, JobState.SCHEDULED, due_ms=due_ms, enqueued_ms=due_ms)
    return _moved(record, JobState.READY, enqueued_ms=now_ms)


def _dependency_error(job_id: str) -> str:
    return f"job {job_id}, which it waits for, did not succeed"


def _moved(record: JobRecord, state: JobState, **changes: Any) -> JobRecord:
    assert state in LEGAL_MOVES[record.state], f"job {record.id}: illegal move from {record.state} to {state}"
    changes = {"preempted_for": None, "gang": None, **changes}
    return replace(record, state=state, **changes)
