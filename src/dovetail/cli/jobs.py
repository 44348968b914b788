"""`dovetail jobs`: submit, list, show, cancel and repeat the jobs of a queue, and watch queues and workers."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli import SuggestingGroup
from dovetail.cli.colour import paint
from dovetail.cli.jobs_logs import logs
from dovetail.cli.jobs_metrics import metrics
from dovetail.cli.jobs_selection import (
    UNFINISHED,
    JobSelection,
    confirm,
    jobs_of,
    selected_jobs,
    selection_options,
)
from dovetail.cli.jobs_submit import submit
from dovetail.cli.jobs_text import (
    attempt_table,
    function_name,
    job_lines,
    job_table,
    limits_text,
    queue_table,
    schedule_table,
    summary_line,
    worker_table,
)
from dovetail.cli.jobs_tune import tune
from dovetail.cli.jobs_watch import watch
from dovetail.cli.options import json_option
from dovetail.cli.queue_option import (
    BAD_JOBS_ARGUMENT,
    JOB_HELP,
    files_option,
    find_job,
    opened_queue,
    opened_store,
    queue_url_option,
)
from dovetail.cli.run_filter import Duration
from dovetail.errors import did_you_mean
from dovetail.jobs.job import REQUEUEABLE, JobState
from dovetail.jobs.job_view import attempt_data, job_data, queue_data, schedule_data, worker_data
from dovetail.jobs.payload_codec import FILE, JSON
from dovetail.jobs.placement_problem import placement_problem
from dovetail.jobs.wait_reason import wait_reason
from dovetail.jobs.worker_liveness import live_workers
from dovetail.observe.terminal import table_width
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.resources.sizes import format_size
from dovetail.text_format import format_count, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.store import Store, WorkerInfo

DEFAULT_LIMIT = 20
QUEUE_LIMIT_RANGE = click.IntRange(1, 1_000_000)
CHANGE_STEP = 1_000
VALUE_CHARS = 2_000
"""Arguments and results are shown up to this length; --json has all of them."""
PURGEABLE = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD)
PURGED_BY_DEFAULT = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
WAITING = frozenset({JobState.SCHEDULED, JobState.BLOCKED, JobState.READY})
REQUEUED_BY_DEFAULT = (JobState.DEAD, JobState.FAILED)


class JobsGroup(SuggestingGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """In the order of their use."""
        return list(self.commands)


@click.group(
    cls=JobsGroup,
    epilog="""\b
Examples:
  export DOVETAIL_QUEUE=sqlite:///jobs.db
  dovetail worker --app tasks &
  dovetail jobs submit tasks:train rate=0.1 epochs=20 --priority high
  dovetail jobs ls
  dovetail jobs show last
  dovetail jobs logs last -f
  dovetail jobs watch
  dovetail jobs requeue --state dead --yes

\b
The queue is --queue-url, else the variable DOVETAIL_QUEUE, else `queue` of
the project file (dovetail.toml).
Exit codes: 0 success, 1 the job failed (submit --wait), 2 usage or
configuration, 5 the store cannot be reached.
""",
)
def jobs() -> None:
    """Submit, list and change jobs of a queue."""


jobs.add_command(submit)


# --- list


@jobs.command(
    epilog="""\b
Examples:
  dovetail jobs ls
  dovetail jobs ls --state ready --state leased
  dovetail jobs ls --queue gpu --limit 100
  dovetail jobs ls --function tasks:train --json | jq -r '.[].id'
"""
)
@selection_options()
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Maximum number of jobs.  [default: {DEFAULT_LIMIT}; all with --json]",
)
@click.option("--before", metavar="ID", help="Only jobs that are older than this one: the next page.")
@queue_url_option()
@json_option("Print the jobs as JSON.")
def ls(url: str | None, limit: int | None, before: str | None, as_json: bool, **selected: Any) -> None:
    """List jobs, latest first.

    A job that no live worker can run is marked, with what it needs and what the workers have. A ready job shows
    why it waits.
    """
    selection = JobSelection(**selected)
    limit = limit or (None if as_json else DEFAULT_LIMIT)
    with opened_store(url) as store:
        now_ms = store.now_ms()
        if as_json:
            _print_json_jobs(jobs_of(store, selection.filter(), limit, before), store, now_ms)
            return
        page = store.find(selection.filter(), limit=limit or DEFAULT_LIMIT, before=before)
        if not page.jobs:
            click.echo(f"no jobs{' match' if selection else ' in this queue'}", err=True)
            return
        problems = placement_problems(store, page.jobs)
        marks = {text: number for number, text in enumerate(dict.fromkeys(problems.values()), 1)}
        notes = wait_reasons(store, page.jobs)
        notes |= {job: f"[{marks[text]}] no worker can run this" for job, text in problems.items()}
        for line in job_table(page.jobs, now_ms, table_width(), notes, paint):
            click.echo(line)
        for text, number in marks.items():
            click.echo(f"[{number}] {text}", err=True)
        if page.next_id is not None:
            words = ["dovetail", "jobs", "ls", *selection.options(), "--before", page.next_id]
            click.echo(f"older jobs: {shlex.join(words)}", err=True)


def _print_json_jobs(records: Iterable[JobRecord], store: Store, now_ms: int) -> None:
    """A JSON list, one job per line, written while it is read."""
    live = live_workers(store.workers(), now_ms)
    stats, reservations = {one.queue: one for one in store.stats()}, store.reservations()
    separator = "["
    for record in records:
        reason = wait_reason(record, stats, reservations, live, now_ms)
        data = job_data(record, now_ms) | {"problem": placement_text(record, live) or None, "waiting": reason or None}
        click.echo(f"{separator}{json.dumps(data)}", nl=False)
        separator = ",\n "
    click.echo("[]" if separator == "[" else "]")


@jobs.command(
    epilog="""\b
Examples:
  dovetail jobs show last
  dovetail jobs show 01kadq3f4 --json | jq .result
"""
)
@click.argument("job")
@queue_url_option()
@json_option("Print all that is known of the job as JSON, with its arguments and result.")
def show(job: str, url: str | None, as_json: bool) -> None:
    """Show one job: state, arguments, progress, attempts, result or error."""
    with opened_store(url) as store:
        record = find_job(store, job)
        now_ms = store.now_ms()
        problem = placement_problems(store, [record]).get(record.id, "")
        reason = wait_reasons(store, [record]).get(record.id, "")
    if as_json:
        data = job_data(record, now_ms) | {"problem": problem or None, "waiting": reason or None}
        data["attempts"] = [attempt_data(one) | {"traceback": one.traceback} for one in record.attempts]
        click.echo(json.dumps(data | contents_data(record), indent=2))
        return
    for line in job_lines(record, now_ms, **contents_text(record), problem=problem, waiting=reason, paint=paint):
        click.echo(line)
    trace = next((one.traceback for one in reversed(record.attempts) if one.traceback), "")
    if trace and record.state is not JobState.SUCCEEDED:
        click.echo(f"\n{trace.rstrip()}")
    if record.state in REQUEUEABLE:
        click.echo(f"run it again: dovetail jobs requeue {record.id}", err=True)


show.help = f"{show.help}\n\n{JOB_HELP}"
jobs.add_command(logs)


@jobs.command(
    epilog="""\b
Examples:
  dovetail jobs dead
  dovetail jobs dead --function tasks:train --json
  dovetail jobs requeue --state dead --function tasks:train --yes
"""
)
@click.option("--queue", metavar="NAME", help="Only jobs of this queue.")
@click.option("--function", metavar="NAME", help="Only jobs of this function, as in pkg.module:name.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=DEFAULT_LIMIT,
    show_default=True,
    metavar="N",
    help="Maximum number of jobs.",
)
@queue_url_option()
@json_option("Print the jobs as JSON.")
def dead(url: str | None, limit: int, as_json: bool, queue: str | None, function: str | None) -> None:
    """List dead letters: jobs whose retries are used up, with their attempts."""
    selection = JobSelection(queue, function, states=(JobState.DEAD.value,))
    with opened_store(url) as store:
        found = store.find(selection.filter(), limit=limit)
        now_ms = store.now_ms()
        if as_json:
            _print_json_jobs(found.jobs, store, now_ms)
            return
    if not found.jobs:
        click.echo("no dead letters", err=True)
        return
    for record in found.jobs:
        function = function_name(record.spec.function)
        click.echo(f"{paint(record.id, 'strong')}  {function}  {printable(record.error)}")
        for line in attempt_table(record.attempts, now_ms)[1:]:
            click.echo(f"  {line}")
    if found.next_id is not None:
        words = ["dovetail", "jobs", "ls", *selection.options(), "--before", found.next_id]
        click.echo(f"more: {shlex.join(words)}", err=True)
    words = ["dovetail", "jobs", "requeue", *selection.options(), "--yes"]
    click.echo(f"run them again: {shlex.join(words)}", err=True)


def placement_problems(store: Store, records: Sequence[JobRecord]) -> dict[str, str]:
    """Why no live worker can run a waiting job, by id of the job."""
    if not any(record.state in WAITING for record in records):
        return {}
    live = live_workers(store.workers(), store.now_ms())
    return {record.id: text for record in records if (text := placement_text(record, live))}


def wait_reasons(store: Store, records: Sequence[JobRecord]) -> dict[str, str]:
    """Why a ready job waits, by id of the job."""
    if not any(record.state is JobState.READY for record in records):
        return {}
    now_ms, stats, reservations = store.now_ms(), {one.queue: one for one in store.stats()}, store.reservations()
    live = live_workers(store.workers(), now_ms)
    reasons = {record.id: wait_reason(record, stats, reservations, live, now_ms) for record in records}
    return {job: reason for job, reason in reasons.items() if reason}


def placement_text(record: JobRecord, live: Sequence[WorkerInfo]) -> str:
    """Why none of these workers can run a job; "" if one can, or the job does not wait."""
    if record.state not in WAITING:
        return ""
    problem = placement_problem(record.spec.queue, record.shape, live)
    return "" if problem is None else ": ".join([problem.message, *filter(None, ["; ".join(problem.evidence)])])


# --- contents


def contents_text(record: JobRecord) -> dict[str, str]:
    """Arguments and result of a job as text. What is pickled is never opened."""
    data = contents_data(record)
    call = data["arguments"]
    if isinstance(call, dict):
        words = [json.dumps(value) for value in call["args"]]
        words += [f"{name}={json.dumps(value)}" for name, value in call["kwargs"].items()]
        call = ", ".join(words)
    result = data["result"]
    is_encoded = isinstance(result, str) and result.startswith("<")
    shown = "" if record.result is None else result if is_encoded else json.dumps(result)
    return {"call": _shortened(str(call)), "result": _shortened(str(shown))}


def contents_data(record: JobRecord) -> dict[str, Any]:
    """Arguments and result of a job as JSON data; texts such as "<pickle, 120B>" for what is not JSON in the store."""
    call = _decoded(record.spec.payload, record.spec.encoding)
    if isinstance(call, list) and len(call) == 2:
        call = {"args": call[0], "kwargs": call[1]}
    result = None if record.result is None else _decoded(record.result, record.result_encoding)
    return {"arguments": call, "result": result}


def _decoded(data: bytes, encoding: str) -> Any:
    if encoding == JSON:
        try:
            return json.loads(data)
        except ValueError:
            return f"<not JSON, {format_size(len(data))}>"
    if encoding.endswith(FILE):
        return f"<{encoding.removesuffix(FILE)} in file {data.decode(errors='replace')}>"
    return f"<{encoding}, {format_size(len(data))}>"


def _shortened(text: str) -> str:
    return printable(text if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}... ({len(text)} characters)")


# --- change


@jobs.command(
    epilog="""\b
Examples:
  dovetail jobs cancel last
  dovetail jobs cancel 01kadq3f4 01kadq3f5
  dovetail jobs cancel --queue default --state ready --yes

\b
A job that waits is cancelled at once. A job that runs is stopped by its
worker: with isolation `process` within the grace; else when its function
returns or checks dt.current_job().cancelled.
"""
)
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@selection_options(UNFINISHED, "Cancel jobs")
@click.option("--reason", default="", metavar="TEXT", help="Kept as the error of the jobs.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask. Not needed if JOB is given.")
@queue_url_option()
@json_option("Print the jobs and their states as JSON.")
def cancel(jobs: tuple[str, ...], url: str | None, reason: str, yes: bool, as_json: bool, **selected: Any) -> None:
    """Cancel JOBs, or all unfinished jobs that the options select."""
    with opened_store(url) as store:
        found = selected_jobs(store, list(jobs), JobSelection(**selected), UNFINISHED, "cancel", yes=yes)
        reason = reason or "cancelled by dovetail jobs cancel"
        changed = _changed(list(found), lambda part: store.cancel(part, reason))
    words = {JobState.LEASED: "is being stopped by its worker", JobState.CANCELLED: "cancelled"}
    _report(changed, words, "was not cancelled", as_json=as_json)


@jobs.command(
    epilog="""\b
Examples:
  dovetail jobs requeue last
  dovetail jobs requeue --state dead --yes
  dovetail jobs requeue --function tasks:train --state failed --yes
"""
)
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@selection_options([state.value for state in JobState if state in REQUEUEABLE], "Requeue jobs")
@click.option("--yes", "-y", is_flag=True, help="Do not ask. Not needed if JOB is given.")
@queue_url_option()
@json_option("Print the jobs and their states as JSON.")
def requeue(jobs: tuple[str, ...], url: str | None, yes: bool, as_json: bool, **selected: Any) -> None:
    """Requeue JOBs that failed, died or were cancelled, with all their retries.

    Without --state, the options select failed and dead jobs.
    """
    with opened_store(url) as store:
        default = [state.value for state in REQUEUED_BY_DEFAULT]
        found = selected_jobs(store, list(jobs), JobSelection(**selected), default, "requeue", yes=yes)
        changed = _changed([job for job, state in found.items() if state in REQUEUEABLE], store.requeue)
    kept = {job: state for job, state in found.items() if state not in REQUEUEABLE}
    for job, state in () if as_json else kept.items():
        click.echo(f"{job} was not requeued: it is {state}", err=True)
    if kept and not changed and not as_json:
        return
    words = {JobState.READY: "requeued", JobState.BLOCKED: "requeued, waits for other jobs"}
    _report(changed, words, "was not requeued", as_json=as_json)


def _changed(ids: Sequence[str], change: Any) -> list[tuple[str, JobState | None]]:
    """Ids and their states after a change, made in steps that do not hold up the queue."""
    found: list[tuple[str, JobState | None]] = []
    for start in range(0, len(ids), CHANGE_STEP):
        part = ids[start : start + CHANGE_STEP]
        found += zip(part, change(part), strict=True)
    return found


def _report(
    changed: list[tuple[str, JobState | None]], words: dict[JobState, str], otherwise: str, *, as_json: bool
) -> None:
    if as_json:
        click.echo(
            json.dumps([{"id": job, "state": state.value if state else None} for job, state in changed], indent=2)
        )
        return
    if not changed:
        click.echo("no jobs match", err=True)
    for job, state in changed if len(changed) <= DEFAULT_LIMIT else ():
        text = words.get(state) if state is not None else "is not in the queue any more"
        click.echo(f"{job} {text or f'{otherwise}: it is {state}'}", err=True)
    if len(changed) > DEFAULT_LIMIT:
        for state, text in words.items():
            count = sum(found is state for _, found in changed)
            if count:
                click.echo(f"{format_count(count, 'job')}: {text}", err=True)


@jobs.command(
    epilog="""\b
Examples:
  dovetail jobs purge --older-than 7d
  dovetail jobs purge --state succeeded --yes
  dovetail jobs purge --state dead --function tasks:train --yes
  dovetail jobs purge --keep 1GB --yes

\b
Only finished jobs are removed; dead letters only with --state dead.
"""
)
@selection_options([state.value for state in PURGEABLE], "Remove jobs", schedule=False)
@click.option(
    "--older-than", metavar="TIME", type=Duration(), help="Only jobs that finished longer ago than this: 12h, 7d."
)
@click.option("--keep", metavar="SIZE", help="Stop when the remaining arguments and results take at most this much.")
@click.option("--all", "everything", is_flag=True, help="All finished jobs except dead letters.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask. Not needed with --older-than.")
@files_option()
@queue_url_option()
@json_option("Print the numbers as JSON.")
def purge(
    url: str | None,
    older_than: float | None,
    keep: str | None,
    everything: bool,
    yes: bool,
    as_json: bool,
    queue: str | None,
    function: str | None,
    states: tuple[str, ...],
    files: str | None,
) -> None:
    """Remove finished jobs with their arguments, results and output, oldest first."""
    selection = JobSelection(queue, function, states=states)
    if not (selection or everything or older_than is not None or keep is not None):
        fixes = ("dovetail jobs purge --older-than 7d", "dovetail jobs purge --all --yes")
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, "no option selects the jobs to remove", fixes=fixes))
    if older_than is None and not yes:
        confirm("remove all finished jobs that match" if keep is None else f"remove finished jobs beyond {keep}")
    with opened_queue(url, files=files) as opened:
        chosen = states or [state.value for state in PURGED_BY_DEFAULT]
        try:
            removed = opened.purge(older_than=older_than, keep_bytes=keep, state=chosen, queue=queue, function=function)
        except dt.ConfigError as error:
            raise PurgeRenderer().error(error) from None
    if as_json:
        click.echo(json.dumps({"jobs": removed.jobs, "bytes": removed.bytes}))
    else:
        click.echo(f"removed {format_count(removed.jobs, 'job')}, {format_size(removed.bytes)}", err=True)


class PurgeRenderer(OptionRenderer):
    def name(self, setting: str) -> str:
        return "--keep" if setting == "keep_bytes" else super().name(setting)


# --- queues


@jobs.command(epilog="\b\nExamples:\n  dovetail jobs pause default\n  dovetail jobs pause gpu cpu\n")
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE...")
@queue_url_option()
def pause(queues: tuple[str, ...], url: str | None) -> None:
    """Stop giving jobs of QUEUEs to workers. Running jobs continue, and new jobs are accepted."""
    _set_paused(queues, url, paused=True)


@jobs.command(epilog="\b\nExamples:\n  dovetail jobs resume default\n")
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE...")
@queue_url_option()
def resume(queues: tuple[str, ...], url: str | None) -> None:
    """Give jobs of QUEUEs to workers again."""
    _set_paused(queues, url, paused=False)


@jobs.command(
    epilog="""\b
Examples:
  dovetail jobs limit gpu --max-running 4
  dovetail jobs limit research --weight 2
  dovetail jobs limit gpu --clear
"""
)
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE...")
@click.option(
    "--max-running", type=QUEUE_LIMIT_RANGE, metavar="N", help="Maximum number of jobs of the queue that run at once."
)
@click.option(
    "--weight",
    type=QUEUE_LIMIT_RANGE,
    metavar="N",
    help="Share of running jobs in proportion to other queues; all queues without one have the weight 1 together.",
)
@click.option("--clear", is_flag=True, help="Remove the limits that are not given.")
@queue_url_option()
def limit(queues: tuple[str, ...], max_running: int | None, weight: int | None, clear: bool, url: str | None) -> None:
    """Limit how many jobs of QUEUEs run, or share workers between them; without options, show their limits."""
    given = {"max_running": max_running, "weight": weight}
    chosen = {name: value for name, value in given.items() if clear or value is not None}
    with opened_queue(url) as queue:
        for name in queues:
            if chosen:
                queue.configure(name, **chosen)
            limits = {one.queue: limits_text(one.weight, one.max_running) for one in queue.stats()}
            click.echo(f"{name}: {limits.get(name) or 'no limits'}")


def _set_paused(queues: Sequence[str], url: str | None, *, paused: bool) -> None:
    with opened_store(url) as store:
        known = {one.queue for one in store.stats()} | {name for one in store.workers() for name in one.queues}
        for queue in queues:
            store.set_paused(queue, paused)
            note = "" if queue in known else f"; it has no jobs and no workers{did_you_mean(queue, known)}"
            click.echo(f"{queue} is {'paused' if paused else 'not paused'}{note}", err=True)


@jobs.command(
    epilog="""\b
Examples:
  dovetail jobs stats
  dovetail jobs stats --json | jq '.queues[] | {queue, ready}'
"""
)
@queue_url_option()
@json_option("Print queues, workers and schedules as JSON.")
def stats(url: str | None, as_json: bool) -> None:
    """Show jobs by queue and state, and the workers."""
    with opened_store(url) as store:
        queues, workers, schedules, now_ms = store.stats(), store.workers(), store.schedules(), store.now_ms()
    if as_json:
        about = {
            "queues": [queue_data(one, now_ms) for one in queues],
            "workers": [worker_data(one, now_ms) for one in workers],
            "schedules": [schedule_data(one, now_ms) for one in schedules],
        }
        click.echo(json.dumps(about, indent=2))
        return
    tables = [queue_table(queues, now_ms, table_width(), paint)] if queues else []
    tables += [worker_table(workers, now_ms, table_width(), paint)] if workers else []
    for number, lines in enumerate(tables):
        for line in ["", *lines] if number else lines:
            click.echo(line)
    if not queues or not workers:
        click.echo(summary_line(queues, workers, now_ms), err=True)


@jobs.command(
    epilog="""\b
Examples:
  dovetail jobs schedules
  dovetail jobs schedules --remove nightly
"""
)
@click.option("--remove", metavar="NAME", help="Remove this schedule; jobs that it has submitted stay.")
@queue_url_option()
@json_option("Print the schedules as JSON.")
def schedules(remove: str | None, url: str | None, as_json: bool) -> None:
    """List schedules: jobs that are submitted at the times of a cron expression."""
    with opened_store(url) as store:
        found, now_ms = store.schedules(), store.now_ms()
        if remove is not None:
            names = [one.name for one in found]
            if not store.remove_schedule(remove):
                message = f"there is no schedule {remove!r}{did_you_mean(remove, names)}"
                raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=("dovetail jobs schedules",)))
            click.echo(f"removed {remove}", err=True)
            return
    if as_json:
        click.echo(json.dumps([schedule_data(one, now_ms) for one in found], indent=2))
    elif not found:
        click.echo("no schedules", err=True)
    else:
        for line in schedule_table(found, now_ms, table_width()):
            click.echo(line)


jobs.add_command(watch)
jobs.add_command(metrics)
jobs.add_command(tune)
