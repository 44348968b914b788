"""Jobs, queues and workers as text for people. Pure: times are arguments."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Final

from dovetail.jobs.job import JobState
from dovetail.jobs.job_view import resources_text, seconds_in_state
from dovetail.jobs.worker_liveness import is_live, live_workers
from dovetail.text_format import (
    MIN_CUT_CHARS,
    align_table,
    cut_text,
    fit_table,
    format_count,
    format_duration,
    format_number,
    format_percent,
    plain,
    printable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.jobs.job import Attempt, Gang, JobRecord
    from dovetail.jobs.store import QueueStats, Schedule, WorkerInfo
    from dovetail.text_format import Paint

STATE_STYLES: Final = {
    JobState.LEASED: "good",
    JobState.FAILED: "bad",
    JobState.DEAD: "bad",
    JobState.CANCELLED: "warning",
}
QUEUE_STATES = (
    JobState.READY,
    JobState.LEASED,
    JobState.SCHEDULED,
    JobState.BLOCKED,
    JobState.SUCCEEDED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.DEAD,
)
ALWAYS_SHOWN = frozenset({JobState.READY, JobState.LEASED})
FIRST_TO_OMIT = (JobState.CANCELLED, JobState.SUCCEEDED, JobState.BLOCKED, JobState.SCHEDULED, JobState.FAILED)


# --- jobs


def job_table(
    jobs: Sequence[JobRecord],
    now_ms: int,
    width: int,
    problems: Mapping[str, str],
    paint: Paint = plain,
) -> list[str]:
    """One line per job that fits the width. `problems`: by id, why no worker can run a job."""
    columns: dict[str, list[str]] = {
        "job": [job.id for job in jobs],
        "function": [function_name(job.spec.function) for job in jobs],
        "queue": [job.spec.queue for job in jobs],
        "state": [job.state.value for job in jobs],
        "time": [_time_text(job, now_ms) for job in jobs],
        "": [printable(problems.get(job.id) or job_note(job)) for job in jobs],
    }
    if set(columns["queue"]) == {"default"}:
        del columns["queue"]
    _fit(columns, width)
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    place = list(columns).index("state")
    lines = align_table(rows, left=len(columns))
    return [lines[0], *(_painted(line, rows[i][place], paint) for i, line in enumerate(lines[1:], 1))]


def _painted(line: str, state: str, paint: Paint) -> str:
    style = STATE_STYLES.get(JobState(state))
    if style is None:
        return line
    before, found, after = line.partition(f"  {state}  ")
    return f"{before}  {paint(state, style)}  {after}" if found else line


def _fit(columns: dict[str, list[str]], width: int) -> None:
    """Shorten notes, then functions, then queues; in a very narrow terminal, omit times and queues."""

    def excess() -> int:
        return sum(map(column_width, columns)) + 2 * (len(columns) - 1) - width

    def column_width(name: str) -> int:
        return max(len(text) for text in (name, *columns[name]))

    for name in ("", "function", "queue"):
        if excess() > 0 and name in columns:
            limit = max(MIN_CUT_CHARS, column_width(name) - excess())
            columns[name] = [cut_text(text, limit) for text in columns[name]]
    for name in ("time", "queue", ""):
        if excess() > 0 and name in columns:
            del columns[name]


def function_name(reference: str) -> str:
    """A reference without the folders of a script: 'train.py:fit'."""
    return printable(reference.rpartition("/")[2])


def _time_text(job: JobRecord, now_ms: int) -> str:
    """Waiting and running: for how long. Finished: how long ago."""
    seconds = seconds_in_state(job, now_ms)
    if job.state is JobState.SCHEDULED:
        return f"in {format_duration(-seconds)}"
    if job.state.is_finished:
        return f"{format_duration((now_ms - (job.finished_ms or now_ms)) / 1000)} ago"
    return format_duration(seconds)


def job_note(job: JobRecord) -> str:
    """What is most worth knowing of a job, on one line."""
    match job.state:
        case JobState.LEASED:
            parts = ["is being cancelled"] if job.cancel_requested else []
            parts += [format_percent(job.progress)] if job.progress is not None else []
            parts += [job.message] if job.message else []
            return ", ".join([*parts, *([f"attempt {job.attempt}"] if job.attempt > 1 else [])])
        case JobState.BLOCKED:
            waits = format_count(len(job.unmet), "job")
            return f"waits for {job.unmet[0] if len(job.unmet) == 1 else waits}" if job.unmet else ""
        case JobState.SCHEDULED | JobState.READY if job.attempts:
            last = job.attempts[-1]
            return f"attempt {last.number}: {last.error or last.outcome.value}"
        case JobState.SUCCEEDED:
            last_attempt = job.attempts[-1] if job.attempts else None
            return f"took {format_duration(_seconds(last_attempt))}" if last_attempt else ""
        case _:
            return job.error.partition("\n")[0]


def _seconds(attempt: Attempt) -> float:
    return (attempt.ended_ms - attempt.started_ms) / 1000


# --- one job


def job_lines(
    job: JobRecord,
    now_ms: int,
    *,
    call: str,
    result: str,
    problem: str,
    waiting: str = "",
    paint: Paint = plain,
) -> list[str]:
    """All that is known of a job. `call` and `result`: its arguments and result as text; `problem`: why no worker can
    run it."""
    spec = job.spec
    style = STATE_STYLES.get(job.state)
    state = paint(job.state.value, style) if style else job.state.value
    time = _time_text(job, now_ms)
    options = [f"priority {spec.priority}"] if spec.priority else []
    options += [f"timeout {format_duration(spec.timeout_ms / 1000)}"] if spec.timeout_ms else []
    options += [f"isolation {spec.isolation}"] if spec.isolation else []
    options += ["preemptible"] if spec.preemptible else []
    rows = [
        ("state", f"{state}{' for ' if not (job.state.is_finished or time.startswith('in ')) else ', '}{time}"),
        ("", "the cancellation was requested" if job.cancel_requested else ""),
        ("", f"it makes room for job {job.preempted_for}" if job.preempted_for else ""),
        ("problem", paint(problem, "warning") if problem else ""),
        ("waiting", "" if problem else waiting),
        ("call", f"{function_name(spec.function)}({call})"),
        ("queue", ", ".join([spec.queue, *options])),
        ("needs", resources_text(job.shape)),
        ("key", spec.key or ""),
        ("schedule", spec.schedule or ""),
        ("after", ", ".join(spec.after)),
        ("waits for", ", ".join(job.unmet) if job.state is JobState.BLOCKED else ""),
        ("worker", (job.worker or "") if job.gang is None else ""),
        ("ranks", _gang_text(job.gang) if job.gang is not None else ""),
        ("progress", _progress_text(job)),
        ("submitted", time_text(job.submitted_ms, now_ms)),
        ("finished", time_text(job.finished_ms, now_ms) if job.finished_ms is not None else ""),
        ("error", printable(job.error)),
        ("result", result),
    ]
    lines = [paint(f"job {job.id}", "strong")]
    lines += [f"{label:<11}{text}" for label, text in rows if text]
    if job.attempts:
        lines += ["", *attempt_table(job.attempts, now_ms)]
    return lines


def _gang_text(gang: Gang) -> str:
    """'0 to 3 on w1, 4 on w2, rank 0 listens at 10.0.0.7:41231'."""
    parts = []
    for worker, ranks in groupby(range(len(gang.members)), lambda rank: gang.workers[rank]):
        first, *rest = ranks
        parts.append(f"{first}{f' to {rest[-1]}' if rest else ''} on {worker}")
    return f"{', '.join(parts)}, rank 0 listens at {gang.address}"


def _progress_text(job: JobRecord) -> str:
    parts = [format_percent(job.progress)] if job.progress is not None else []
    return printable(", ".join([*parts, *([job.message] if job.message else [])]))


def time_text(ms: int, now_ms: int) -> str:
    """'2026-11-18 20:03:52 UTC, 5 s ago'."""
    when = datetime.fromtimestamp(ms / 1000, UTC)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC, {format_duration((now_ms - ms) / 1000)} ago"


def attempt_table(attempts: Sequence[Attempt], now_ms: int) -> list[str]:
    rows = [["attempt", "outcome", "began", "took", "CPU", "worker", ""]]
    for one in attempts:
        cpu = "-" if one.cpu_ms is None else format_duration(one.cpu_ms / 1000)
        code = f"exit code {one.exit_code}" if one.exit_code else ""
        note = ", ".join(filter(None, [printable(one.error), code]))
        began = f"{format_duration((now_ms - one.started_ms) / 1000)} ago"
        rows.append([str(one.number), one.outcome.value, began, format_duration(_seconds(one)), cpu, one.worker, note])
    return align_table(rows, left=len(rows[0]))


# --- queues, workers, schedules


def queue_table(stats: Sequence[QueueStats], now_ms: int, width: int, paint: Paint = plain) -> list[str]:
    """One line per queue. States that no queue has are left out, but for ready and leased; in a narrow terminal also
    others."""
    states = [state for state in QUEUE_STATES if state in ALWAYS_SHOWN or any(one.counts.get(state) for one in stats)]
    notes = [limits_text(one.weight, one.max_running) for one in stats]
    notes = [
        ", ".join(filter(None, ["paused" if one.paused else "", note])) for one, note in zip(stats, notes, strict=True)
    ]
    noted = max(map(len, ["paused", *notes])) + 2
    for state in FIRST_TO_OMIT:
        if table_width(_queue_rows(stats, states, now_ms)) + noted > width and state in states:
            states.remove(state)
    lines = fit_table(_queue_rows(stats, states, now_ms), width - noted, cut=0)
    marked = [
        f"{line}  {paint(note, 'warning')}" if note else line for note, line in zip(notes, lines[1:], strict=True)
    ]
    return [lines[0], *marked]


def limits_text(weight: int | None, max_running: int | None) -> str:
    """'weight 2, at most 10 running'; empty without limits."""
    parts = [] if weight is None else [f"weight {weight}"]
    parts += [] if max_running is None else [f"at most {max_running} running"]
    return ", ".join(parts)


def _queue_rows(stats: Sequence[QueueStats], states: Sequence[JobState], now_ms: int) -> list[list[str]]:
    rows = [["queue", *(state.value for state in states), "oldest"]]
    for one in stats:
        oldest = "-" if one.oldest_ms is None else format_duration(max(0, now_ms - one.oldest_ms) / 1000)
        rows.append([one.queue, *(format_number(one.counts.get(state, 0)) for state in states), oldest])
    return rows


def table_width(rows: Sequence[Sequence[str]]) -> int:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return sum(widths) + 2 * (len(widths) - 1)


def worker_table(workers: Sequence[WorkerInfo], now_ms: int, width: int, paint: Paint = plain) -> list[str]:
    """One line per worker."""
    rows = [["worker", "queues", "jobs", "slots", "seen"]]
    gone = []
    for one in workers:
        seconds = max(0, now_ms - one.heartbeat_ms) / 1000
        gone.append(not is_live(one, now_ms))
        rows.append([one.id, ",".join(one.queues), str(one.leases), str(one.slots), f"{format_duration(seconds)} ago"])
    lines = fit_table(rows, width - len("  gone"), left=2, cut=(1, 0))
    marked = [
        f"{line}  {paint('gone', 'bad')}" if is_gone else line for is_gone, line in zip(gone, lines[1:], strict=True)
    ]
    return [lines[0], *marked]


def schedule_table(schedules: Sequence[Schedule], now_ms: int, width: int) -> list[str]:
    rows = [["schedule", "cron", "zone", "function", "queue", "next"]]
    for one in schedules:
        due = f"in {format_duration(max(0, one.next_ms - now_ms) / 1000)}"
        template = one.template
        rows.append([one.name, one.cron, one.timezone, function_name(template.function), template.queue, due])
    return fit_table(rows, width, left=len(rows[0]), cut=(3, 0, 4, 2))


def summary_line(stats: Sequence[QueueStats], workers: Sequence[WorkerInfo], now_ms: int) -> str:
    """'12 ready, 4 leased, 100 succeeded; 2 workers with 4 of 8 slots in use'."""
    totals = {state: sum(one.counts.get(state, 0) for one in stats) for state in QUEUE_STATES}
    counts = [f"{totals[state]} {state.value}" for state in QUEUE_STATES if totals[state]]
    live = live_workers(workers, now_ms)
    used, slots = sum(one.leases for one in live), sum(one.slots for one in live)
    at_work = f"{format_count(len(live), 'worker')} with {used} of {slots} slots in use" if live else "no workers"
    return f"{', '.join(counts) or 'no jobs'}; {at_work}"
