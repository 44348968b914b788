"""Requests and replies of the functions in `redis_functions/`, in a compact encoding that costs the client little CPU.

An exchange is one JSON text and the results, one behind the other. Its reply has the claimed jobs as two texts: the
lengths of all parts, and the parts. Strings are UTF-8; lone surrogates, which error messages may have, are kept.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any

from dovetail.jobs.free_vector import free_from_text, free_to_text
from dovetail.jobs.job import NO_RESOURCES, Attempt, Gang, JobRecord, JobSpec, JobState, Lease, Member, Outcome
from dovetail.jobs.store import (
    ClaimedJob,
    GangPlace,
    LeaseId,
    Offer,
    QueueSettings,
    Receipt,
    Reply,
    Reservation,
    Schedule,
    WorkerInfo,
)
from dovetail.jobs.stores.memory_store import stats_of
from dovetail.jobs.stores.serialization import (
    schedule_from_text,
    shape_from_text,
    shape_to_text,
    spec_from_text,
    worker_from_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.jobs.store import Claim, Completion, Exchange, JobFilter, PreemptibleJob, QueueStats
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape

SPECS_CACHED = 1_000
SPEC_CACHED_BYTES = 4_096
"""Maximum length of a specification that is cached."""
_NUMBERS = Struct(">6i")
_PLAIN_END = ("", "", False, 0.0, None, None, None, None, 0)
_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


# --- exchanges


def exchange_arguments(request: Exchange) -> tuple[bytes, bytes, bytes]:
    """The request, the results of its completions, and the free vector of its claim."""
    if not (request.completions or request.renewals or request.claim is None):
        return _idle_request(request.worker, request.lease_ms, request.claim), b"", _free_data(request.claim.free)
    renewals = [_renewal_row(item) for item in request.renewals]
    text = _dumps([request.worker, request.lease_ms, [_completion_row(item) for item in request.completions], renewals])
    if request.claim is not None:
        text = f"{text[:-1]},{_claim_text(request.claim)}]"
    results = [item.result for item in request.completions if item.result is not None]
    return to_bytes(text), b"".join(results), b"" if request.claim is None else _free_data(request.claim.free)


@lru_cache(SPECS_CACHED)
def _idle_request(worker: str, lease_ms: int, claim: Claim) -> bytes:
    """The request of an idle worker, which is always the same."""
    return to_bytes(f"{_dumps([worker, lease_ms, [], []])[:-1]},{_claim_text(claim)}]")


def _completion_row(completion: Completion) -> tuple[object, ...]:
    """In the order of `COMPLETION_FIELDS` in steps.lua; false for what is not given."""
    job_id, token, outcome, result, encoding, *rest = completion
    size = False if result is None else len(result)
    if tuple(rest) == _PLAIN_END:
        return job_id, token, outcome, size, encoding
    error, traceback, final, jitter, shape, exit_code, cpu_ms, peak_memory_bytes, rank = rest
    return (
        *(job_id, token, outcome, size, encoding, error or False, traceback or False, final, jitter),
        False if shape is None else shape_to_text(shape),
        *(False if number is None else number for number in (exit_code, cpu_ms, peak_memory_bytes)),
        rank,
    )


def _renewal_row(renewal: Any) -> tuple[object, ...]:
    job_id, token, progress, message = renewal
    if progress is None and message is None:
        return job_id, token
    return job_id, token, False if progress is None else progress, False if message is None else message


def _claim_text(claim: Claim) -> str:
    held, ends_in_ms = [_held_row(item) for item in claim.preemptible], _number_text(claim.ends_in_ms)
    head = f"{claim.slots},{_dumps(claim.queues)},{claim.placement_delay_ms}"
    batches = [
        (room.queue, shape_to_text(room.shape), room.jobs, False if room.payload_bytes is None else room.payload_bytes)
        for room in claim.batches
    ]
    return f"{head},{_dumps(held)},{ends_in_ms},{_dumps(claim.address)},{_dumps(batches)}"


def _held_row(held: PreemptibleJob) -> tuple[object, ...]:
    """As `preemption.lua` reads it. Cards are counted from 1 there."""
    seats = [
        (seat.cpu_milli, seat.memory_bytes, seat.custom, [(share.card + 1, *share[1:]) for share in seat.cards])
        for seat in held.seats
    ]
    return held.job_id, held.token, held.slots, seats


def _number_text(number: int | None) -> str:
    return "false" if number is None else str(number)


@lru_cache(SPECS_CACHED)
def _free_data(free: FreeResources) -> bytes:
    return to_bytes(free_to_text(free))


def reply_from(data: list[Any], request: Exchange) -> Reply:
    now_ms, known, next_ms, refused, cancelled, preempted, schedules, numbers, texts, members = data
    claimed = () if request.claim is None else _claimed_jobs(numbers, texts, now_ms + request.lease_ms)
    return Reply(
        now_ms,
        _with_members(claimed, members) if members else claimed,
        refused
        and [LeaseId(to_text(job_id), token) for job_id, token in zip(refused[::2], refused[1::2], strict=True)],
        cancelled and [to_text(job_id) for job_id in cancelled],
        preempted and [to_text(job_id) for job_id in preempted],
        next_ms,
        schedules and sorted(map(_schedule_from, schedules), key=_name),
        bool(known),
    )


def _claimed_jobs(numbers: bytes, texts: bytes, deadline_ms: int) -> list[ClaimedJob]:
    jobs: list[ClaimedJob] = []
    if not numbers:
        return jobs
    start = 0
    parts: tuple[Any, ...] = ()
    shape = NO_RESOURCES
    for id_size, payload_size, spec_size, shape_size, token, attempt in _NUMBERS.iter_unpack(numbers):
        middle = start + id_size
        end = middle + payload_size
        job_id = texts[start:middle].decode("utf-8", "surrogatepass")
        payload = texts[middle:end]
        if spec_size >= 0:
            start, end = end, end + spec_size
            parts = _spec_parts(texts[start:end])
        if shape_size >= 0:
            start, end = end, end + shape_size
            shape = shape_from_text(to_text(texts[start:end]))
        start = end
        spec = JobSpec(job_id, parts[0], payload, *parts[1])
        jobs.append(ClaimedJob(spec, shape, Lease(job_id, token, attempt, deadline_ms)))
    return jobs


def _with_members(jobs: Sequence[ClaimedJob], rows: list[list[Any]]) -> list[ClaimedJob]:
    """With the members of gangs at their positions among the jobs."""
    found: list[ClaimedJob] = []
    taken = 0
    for position, *row in rows:
        found += [*jobs[taken:position], _member_from(row)]
        taken = position
    return [*found, *jobs[taken:]]


def _member_from(row: list[Any]) -> ClaimedJob:
    """As `member_row` in gangs.lua writes it."""
    job_id, text, payload, shape, token, attempt, rank, deadline_ms, address, workers = row
    spec = spec_from_text(to_text(job_id), to_text(text), payload)
    place = GangPlace(to_text(address), tuple(map(to_text, workers)))
    return ClaimedJob(spec, _shape_from(shape), Lease(spec.id, token, attempt, deadline_ms), rank, place)


def _spec_parts(text: bytes) -> tuple[str, tuple[Any, ...]]:
    """Function, and all that follows the payload, of a specification."""
    return _cached_spec_parts(text) if len(text) <= SPEC_CACHED_BYTES else _cached_spec_parts.__wrapped__(text)


@lru_cache(SPECS_CACHED)
def _cached_spec_parts(text: bytes) -> tuple[str, tuple[Any, ...]]:
    spec = spec_from_text("", to_text(text))
    return spec.function, tuple(getattr(spec, name) for name in JobSpec.__slots__[3:])


# --- records


def record_from(data: list[Any]) -> JobRecord:
    """As `reply_of` in lookup.lua writes it."""
    job_id, text, payload, state, shape, submitted_ms, enqueued_ms, due_ms, token, attempt, counted_after = data[:11]
    worker, started_ms, attempts, unmet, cancel, progress, message, result, encoding, error, finished_ms = data[11:22]
    preempted_for, gang = data[22:]
    spec = spec_from_text(to_text(job_id), to_text(text), payload or b"")
    return JobRecord(
        spec=spec,
        state=JobState(state.decode()),
        shape=spec.shape if shape is None else _shape_from(shape),
        submitted_ms=submitted_ms,
        enqueued_ms=enqueued_ms,
        due_ms=due_ms,
        token=token,
        attempt=attempt,
        counted_after=counted_after,
        worker=None if worker is None else to_text(worker),
        started_ms=started_ms,
        attempts=tuple(map(_attempt_from, attempts)),
        unmet=tuple(map(to_text, unmet)),
        cancel_requested=bool(cancel),
        preempted_for=None if preempted_for is None else to_text(preempted_for),
        gang=None if gang is None else _gang_from(gang),
        progress=None if progress is None else float(progress),
        message=to_text(message),
        result=result,
        result_encoding=to_text(encoding),
        error=to_text(error),
        finished_ms=finished_ms,
    )


def _gang_from(data: list[Any]) -> Gang:
    """As `gang_of` in lookup.lua writes it."""
    rows, address, result, encoding, is_preempted = data
    members = (Member(to_text(row[0]), row[1], bool(row[2]), bool(row[3])) for row in rows)
    return Gang(tuple(members), to_text(address), result, to_text(encoding), bool(is_preempted))


def _attempt_from(data: list[Any]) -> Attempt:
    number, token, worker, started_ms, ended_ms, outcome = data[:6]
    details: list[Any] = [*data[6:], *[None] * (11 - len(data))]
    return Attempt(
        number=number,
        token=token,
        worker=to_text(worker),
        started_ms=started_ms,
        ended_ms=ended_ms,
        outcome=Outcome(outcome.decode()),
        error=to_text(details[0] or b""),
        traceback=to_text(details[1] or b""),
        exit_code=details[2],
        cpu_ms=details[3],
        peak_memory_bytes=details[4],
    )


def _shape_from(data: bytes) -> Shape:
    return shape_from_text(to_text(data))


def receipt_from(data: list[Any]) -> Receipt:
    job_id, created, missing = data
    return Receipt(to_text(job_id), bool(created), tuple(map(to_text, missing)))


def state_from(data: bytes | None) -> JobState | None:
    return None if data is None else JobState(data.decode())


def filter_data(chosen: JobFilter, states: Sequence[JobState]) -> list[object]:
    """As `lookup.filter` in lookup.lua reads it."""
    rest = (chosen.queue, chosen.function, chosen.schedule, chosen.finished_before_ms)
    return [list(states), *(False if value is None else value for value in rest)]


# --- workers and schedules


def worker_from(data: list[Any]) -> WorkerInfo:
    worker, text, registered_ms, heartbeat_ms, leases, offer = data
    info = worker_from_text(to_text(worker), to_text(text), registered_ms, heartbeat_ms, leases)
    if offer is None:
        return info
    offered_ms, lease_ms, slots, free, ends_ms = offer
    return replace(info, offer=Offer(offered_ms, lease_ms, slots, free_from_text(to_text(free)), ends_ms))


def reservations_from(data: Sequence[list[Any]]) -> list[Reservation]:
    return sorted(Reservation(to_text(queue), to_text(job), to_text(worker), made) for queue, job, worker, made in data)


def schedules_from(data: Sequence[list[Any]]) -> list[Schedule]:
    return sorted(map(_schedule_from, data), key=_name)


def _schedule_from(data: list[Any]) -> Schedule:
    name, text, next_ms = data
    return schedule_from_text(to_text(name), to_text(text), next_ms)


def _name(schedule: Schedule) -> str:
    return schedule.name


# --- counts


def stats_from(data: list[Any]) -> list[QueueStats]:
    """Counts of states, settings of queues, and buckets (queue, shape, jobs, earliest enqueued_ms)."""
    rows, queues, buckets = data
    settings = {to_text(queue): QueueSettings(bool(paused), *limits) for queue, paused, *limits in queues}
    counts: dict[str, dict[JobState, int]] = {queue: {} for queue in settings}
    for name, number in zip(rows[::2], rows[1::2], strict=True):
        state, _, queue = to_text(name).partition(":")
        counts.setdefault(queue, {})[JobState(state)] = int(number)
    shapes: dict[str, dict[Shape, int]] = {queue: {} for queue in counts}
    oldest: dict[str, int] = {}
    for name, text, number, enqueued_ms in buckets:
        queue, shape = to_text(name), _shape_from(text)
        shapes[queue][shape] = shapes[queue].get(shape, 0) + number
        oldest[queue] = min(oldest.get(queue, enqueued_ms), enqueued_ms)
    return stats_of(counts, settings, oldest, shapes)


def request_text(data: object) -> bytes:
    return to_bytes(_dumps(data))
