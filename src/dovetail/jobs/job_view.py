"""Jobs, queues and workers as plain data for JSON: `--json` of commands, and responses of the status server. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.jobs.batch import unmarked_shape
from dovetail.jobs.job import NO_RESOURCES, JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.jobs.job import Attempt, JobRecord
    from dovetail.jobs.store import QueueStats, Schedule, WorkerInfo
    from dovetail.resources.shape import Shape

NO_RESOURCES_TEXT = "one slot"
"""Text for the shape of jobs that declare no resources."""


def resources_text(shape: Shape) -> str:
    """What a job needs, for people: '1 GPU, 4 CPUs'."""
    shape = unmarked_shape(shape)
    if shape.rank == NO_RESOURCES:
        return NO_RESOURCES_TEXT if shape.ranks == 1 else f"{shape.ranks} ranks of ({NO_RESOURCES_TEXT})"
    return shape.describe()


def job_data(record: JobRecord, now_ms: int) -> dict[str, Any]:
    """A job without payload, result and tracebacks. Times are milliseconds of the store's clock."""
    spec = record.spec
    return {
        "id": spec.id,
        "function": spec.function,
        "queue": spec.queue,
        "state": record.state.value,
        "priority": spec.priority,
        "needs": resources_text(record.shape),
        "key": spec.key,
        "schedule": spec.schedule,
        "after": list(spec.after),
        "waits_for": list(record.unmet) if record.state is JobState.BLOCKED else [],
        "timeout_ms": spec.timeout_ms,
        "isolation": spec.isolation,
        "preemptible": spec.preemptible,
        "submitted_ms": record.submitted_ms,
        "due_ms": record.due_ms,
        "started_ms": record.started_ms,
        "finished_ms": record.finished_ms,
        "seconds": seconds_in_state(record, now_ms),
        "worker": record.worker,
        "ranks": spec.shape.ranks,
        "rank_workers": [] if record.gang is None else list(record.gang.workers),
        "attempt": record.attempt,
        "progress": record.progress,
        "message": record.message,
        "cancel_requested": record.cancel_requested,
        "preempted_for": record.preempted_for,
        "error": record.error,
        "attempts": [attempt_data(item) for item in record.attempts],
    }


def seconds_in_state(record: JobRecord, now_ms: int) -> float:
    """Waiting: since it could first run. Leased: since the attempt started. Finished: how long the last attempt took.
    Scheduled: until it is due, as a negative number. Blocked: since it was submitted."""
    match record.state:
        case JobState.SCHEDULED:
            return min(0, now_ms - (record.due_ms or now_ms)) / 1000
        case JobState.BLOCKED:
            began = record.submitted_ms
        case JobState.READY:
            began = record.enqueued_ms
        case JobState.LEASED:
            began = record.started_ms or now_ms
        case _:
            last = record.attempts[-1] if record.attempts else None
            return 0.0 if last is None else (last.ended_ms - last.started_ms) / 1000
    return max(0, now_ms - began) / 1000


def attempt_data(attempt: Attempt) -> dict[str, Any]:
    """An attempt without its traceback."""
    return {
        "number": attempt.number,
        "worker": attempt.worker,
        "outcome": attempt.outcome.value,
        "started_ms": attempt.started_ms,
        "seconds": (attempt.ended_ms - attempt.started_ms) / 1000,
        "error": attempt.error,
        "exit_code": attempt.exit_code,
        "cpu_ms": attempt.cpu_ms,
        "peak_memory_bytes": attempt.peak_memory_bytes,
    }


def queue_data(stats: QueueStats, now_ms: int) -> dict[str, Any]:
    oldest = stats.oldest_ms
    return {
        "queue": stats.queue,
        "paused": stats.paused,
        "weight": stats.weight,
        "max_running": stats.max_running,
        "oldest_s": None if oldest is None else max(0, now_ms - oldest) / 1000,
        **{state.value: stats.counts.get(state, 0) for state in JobState},
        "ready_by_needs": ready_by_needs(stats),
    }


def ready_by_needs(stats: QueueStats) -> dict[str, int]:
    """Number of ready jobs by what they need."""
    found: dict[str, int] = {}
    for shape, count in stats.ready_by_shape.items():
        text = resources_text(shape)
        found[text] = found.get(text, 0) + count
    return dict(sorted(found.items()))


def queue_work(stats: Sequence[QueueStats], queues: Sequence[str]) -> dict[str, int]:
    """Jobs that need a worker now: those that are ready in queues that are not paused, and those that run."""
    found = [one for one in stats if one.queue in queues]
    ready = sum(one.counts.get(JobState.READY, 0) for one in found if not one.paused)
    leased = sum(one.counts.get(JobState.LEASED, 0) for one in found)
    return {"jobs": ready + leased, "ready": ready, "leased": leased}


def worker_data(worker: WorkerInfo, now_ms: int) -> dict[str, Any]:
    return {
        "worker": worker.id,
        "queues": list(worker.queues),
        "slots": worker.slots,
        "active_jobs": worker.leases,
        "available_slots": max(0, worker.slots - worker.leases),
        "seen_s_ago": max(0, now_ms - worker.heartbeat_ms) / 1000,
        "details": dict(worker.details),
    }


def schedule_data(schedule: Schedule, now_ms: int) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "function": schedule.template.function,
        "queue": schedule.template.queue,
        "next_ms": schedule.next_ms,
        "due_in_s": (schedule.next_ms - now_ms) / 1000,
    }
