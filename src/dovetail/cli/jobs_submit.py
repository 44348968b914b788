"""`dovetail jobs submit`: a job from the command line."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.actors import is_actors_file
from dovetail.cli.cluster import REQUEST_EXAMPLE, parse_amounts
from dovetail.cli.colour import paint
from dovetail.cli.options import json_option
from dovetail.cli.queue_option import (
    BAD_JOBS_ARGUMENT,
    check_queue_name,
    files_option,
    find_jobs,
    opened_queue,
    queue_url,
    queue_url_option,
)
from dovetail.cli.run_filter import Duration
from dovetail.documents.document import Document
from dovetail.documents.parser import parse_document, read_document
from dovetail.errors import ObjectSource, did_you_mean, nearest_word
from dovetail.jobs.job import DEFAULT_QUEUE
from dovetail.jobs.run_submission import FILE_SUFFIXES, OPTION_TYPES
from dovetail.jobs.stores.store_url import store_place
from dovetail.jobs.worker_liveness import live_workers
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.pipeline.overrides import override_values, set_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ARGS_EXAMPLE = """--args '{"rate": 0.1}'"""
RUN_KINDS: Mapping[str, tuple[str, ...]] = {"run": ("FILE",), "backfill": ("TABLE", "COLUMN")}
RUN_EXAMPLES = {"run": "pipeline.yaml", "backfill": "clips.lance length udf=functions:length"}
RUN_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "run": ("source", "sink", "limit", "engine"),
    "backfill": ("udf", "engine", *OPTION_TYPES),
}
OPTION_FIELDS = (
    *("queue", "priority", "timeout", "isolation", "preemption_grace", "key", "at", "delay", "cron", "timezone"),
)
"""Options of the command that are options of `Queue.submit` as they are."""


@click.command(
    epilog="""\b
Examples:
  dovetail jobs submit tasks:train
  dovetail jobs submit tasks:train rate=0.1 epochs=20 tags='[a, b]'
  dovetail jobs submit tasks.py:train --args '[{"rate": 0.1}]' --wait
  dovetail jobs submit tasks:train --args @config.json --priority high
  dovetail jobs submit tasks:train --resources "gpus=1, cpus=4" --timeout 1h
  dovetail jobs submit tasks:train --set retries.error=5
  dovetail jobs submit tasks:report --cron "0 3 * * *" --timezone Asia/Tokyo
  dovetail jobs submit tasks:report --after last --delay 10m --key report
  dovetail jobs submit run pipeline.yaml --resources "cpus=4, memory=8GB"
  dovetail jobs submit run recipe.yaml source='new/*.jsonl' sink=new.parquet
  dovetail jobs submit run actors.yaml --resources cpus=8
  dovetail jobs submit backfill clips.lance length udf=functions:length

\b
Values are YAML: 0.1 is a number, true a truth value, '[a, b]' a list, '"7"' a
text. The defaults of @dt.job count if the module of the function can be
imported here.

\b
`run FILE` runs a pipeline, recipe or actors file, with source=PATH,
sink=PATH, limit=N or engine=local|ray|ray:auto instead of its own.
`backfill TABLE COLUMN` fills a column with udf=MODULE:NAME, and takes where=,
workers=, batch_size=, slots=, on_error=, max_errors=, row_timeout=,
commit_every= and recompute=. Workers run them if they were started with
--runs and the folder of the file. Without --resources, they use 1 CPU.
"""
)
@click.argument("function", metavar="MODULE:FUNCTION")
@click.argument("arguments", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--args",
    "args_text",
    metavar="JSON",
    help="Arguments: a list (positional) or an object (by name); @FILE reads them from a file, - from stdin.",
)
@click.option("--queue", metavar="NAME", help="Name of the queue.  [default: default]")
@click.option("--priority", metavar="NAME|N", help="high, normal, low or a whole number; one step is 60 s of waiting.")
@click.option("--resources", metavar="REQUEST", help=f"Resources of one attempt: '{REQUEST_EXAMPLE}'.")
@click.option("--timeout", metavar="TIME", help="Time limit of one attempt: 90s, 1h.")
@click.option("--retries", type=click.IntRange(min=0), metavar="N", help="Number of retries for every cause; 0: none.")
@click.option("--isolation", metavar="KIND", help="process, warm_process, thread or async.")
@click.option("--ranks", type=int, metavar="N", help="Run N processes at once as a gang; --resources is per process.")
@click.option(
    "--preemptible", is_flag=True, help="Allow ending it for a job of higher priority, without using a retry."
)
@click.option("--preemption-grace", metavar="TIME", help="Time to save its state when it is preempted.  [default: 30s]")
@click.option(
    "--key",
    metavar="TEXT",
    help="Idempotency key: submitting it again gives the same job. With --cron: name of the schedule.",
)
@click.option("--after", multiple=True, metavar="JOB", help="Start after this job has succeeded. May be repeated.")
@click.option("--at", metavar="TIME", help="Earliest start: 2026-11-18T20:00:00+00:00.")
@click.option("--delay", metavar="TIME", help="Delay from now: 90s, 1h.")
@click.option("--cron", metavar="EXPRESSION", help="Submit it at the times of a cron expression: '0 3 * * *'.")
@click.option("--timezone", metavar="ZONE", help="Time zone of --cron: Europe/Berlin.  [default: UTC]")
@click.option(
    "--set", "sets", multiple=True, metavar="PATH=VALUE", help="Any option by its path: --set resources.gpus=1."
)
@click.option("--no-import", is_flag=True, help="Do not import the module: it exists only on the workers.")
@click.option("--wait", is_flag=True, help="Wait for the result and print it as JSON; exit code 1 if the job fails.")
@click.option("--wait-timeout", metavar="TIME", type=Duration(), help="Stop waiting after this time, with exit code 1.")
@files_option()
@queue_url_option()
@json_option("Print the job as JSON.")
def submit(
    function: str,
    arguments: tuple[str, ...],
    args_text: str | None,
    url: str | None,
    files: str | None,
    sets: tuple[str, ...],
    no_import: bool,
    wait: bool,
    wait_timeout: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Submit a job that calls FUNCTION of MODULE, runs a file or fills a column, and print its id.

    MODULE is a module or the path of a script. The function is declared with @dt.job, and workers run it if they were
    started with --app MODULE.
    """
    check_queue_name(options["queue"])
    given = submit_options(options, sets)
    send: Callable[[dt.Queue], Any]
    if function in RUN_KINDS:
        send = _run_submission(function, arguments, args_text, given)
    else:
        args, kwargs = parse_arguments(arguments, args_text)
        target = function if no_import else find_function(function)
        send = lambda queue: queue.submit(target, *args, kwargs=kwargs, **given)  # noqa: E731
    with opened_queue(url, files=files, create=True) as queue:
        if options["after"]:
            given["after"] = [record.id for record in find_jobs(queue.store, options["after"])]
        try:
            found = send(queue)
        except dt.ConfigError as error:
            raise SubmitRenderer(is_run=function in RUN_KINDS).error(error) from None
        if isinstance(found, dt.JobSchedule):
            _print_schedule(found, as_json=as_json)
            return
        if as_json and not wait:
            click.echo(json.dumps({"id": found.id, "created": found.created}))
            return
        click.echo(found.id, err=wait)
        _print_notes(found, queue, function, url)
        if wait:
            click.echo(json.dumps(_result(found, wait_timeout)))


def _run_submission(
    kind: str, words: tuple[str, ...], args_text: str | None, options: dict[str, Any]
) -> Callable[[dt.Queue], Any]:
    """The submission of `run FILE` or `backfill TABLE COLUMN`."""
    needed = RUN_KINDS[kind]
    example = f"dovetail jobs submit {kind} {RUN_EXAMPLES[kind]}"
    if args_text is not None:
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, f"--args cannot be used with {kind}", fixes=(example,)))
    if len(words) < len(needed) or any(_is_setting(word) for word in words[: len(needed)]):
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, f"{kind} needs {' and '.join(needed)}", fixes=(example,)))
    _, kwargs = parse_arguments(words[len(needed) :], None)
    known = RUN_SETTINGS[kind]
    unknown = [name for name in kwargs if name not in known]
    if unknown:
        message = f"{kind} has no setting {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        evidence = (f"settings: {', '.join(known)}",)
        near = nearest_word(unknown[0], known) or known[0]
        fix = shlex.quote(f"{near}={json.dumps(kwargs[unknown[0]])}")
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, message, evidence, (fix,)))
    if kind == "run":
        check_run_file(words[0])
        return lambda queue: queue.submit_run(words[0], **kwargs, **options)
    if "udf" not in kwargs:
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, "backfill needs udf=MODULE:NAME", fixes=(example,)))
    udf = kwargs.pop("udf")
    columns = [name.strip() for name in words[1].split(",")]
    return lambda queue: queue.submit_backfill(words[0], columns, udf, **kwargs, **options)


def _is_setting(word: str) -> bool:
    return word.partition("=")[0].isidentifier() and "=" in word


def check_run_file(file: str) -> None:
    """Raise the mistakes of a pipeline, recipe or actors file, if it exists here. Nothing that it names is imported."""
    if not Path(file).is_file() or not file.endswith(FILE_SUFFIXES):
        return  # reported by `submit_run`
    data = read_document(file).data
    if is_actors_file(data):
        from dovetail.cli.actors_plan import load_actors  # late: most jobs need none of these

        load_actors(file)
    else:
        from dovetail.cli.run_spec_loader import load_run_spec

        load_run_spec(file)


class SubmitRenderer(OptionRenderer):
    """Options of `dt.Queue.submit` as options of this command."""

    def __init__(self, *, is_run: bool = False) -> None:
        """`is_run`: the arguments of a run are settings."""
        super().__init__()
        self.is_run = is_run

    def option(self, name: str, value: object) -> str:
        if self.is_run and name in {*RUN_SETTINGS["run"], *RUN_SETTINGS["backfill"]}:
            return shlex.quote(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
        data = value.data if isinstance(value, ObjectSource) else value
        match name, data:
            case "resources", Mapping():
                words = ", ".join(f"{key}={part}" for key, part in data.items())
                return f"--resources {shlex.quote(words)}"
            case "kwargs", Mapping():
                return " ".join(shlex.quote(f"{key}={json.dumps(part)}") for key, part in data.items())
            case _, Mapping():
                return " ".join(set_option(f"{name}.{key}", json.dumps(part)) for key, part in data.items())
            case _:
                return super().option(name, value)


def _print_schedule(schedule: dt.JobSchedule, *, as_json: bool) -> None:
    if as_json:
        about = {"schedule": schedule.name, "cron": schedule.cron, "timezone": schedule.timezone}
        click.echo(json.dumps(about | {"next": schedule.next_time.isoformat()}))
        return
    click.echo(schedule.name)
    remove = shlex.join(["dovetail", "jobs", "schedules", "--remove", schedule.name])
    click.echo(f"next: {schedule.next_time:%Y-%m-%d %H:%M} UTC; remove it: {remove}", err=True)


def _result(job: dt.Job, timeout: float | None) -> Any:
    """The result of a job; errors with commands as fixes."""
    try:
        return job.result(timeout)
    except dt.JobTimeoutError as error:
        fixes = (f"dovetail jobs show {job.id}", "omit --wait-timeout")
        raise dt.JobTimeoutError([replace(one, fixes=fixes) for one in error.problems]) from None
    except dt.JobError as error:
        fixes = (f"dovetail jobs logs {job.id}", f"dovetail jobs requeue {job.id}")
        problem = replace(error.problems[0], fixes=fixes)
        raise dt.JobError(problem, error.job_id, error.state, error.traceback) from None


def _print_notes(job: dt.Job, queue: dt.Queue, function: str, url: str | None) -> None:
    """What the submitter should know of the job."""
    if not job.created:
        click.echo(f"there is a job with this key already: it is {job.status}", err=True)
        return
    problem = job.problem()
    if problem is not None:
        for line in (problem.message, *problem.evidence):
            click.echo(f"{paint('note', 'warning')}: {line}", err=True)
        name = job.record().spec.queue
        live = live_workers(queue.store.workers(), queue.store.now_ms())
        if not any(name in worker.queues for worker in live):
            what = ["--runs", "."] if function in RUN_KINDS else ["--app", function.rpartition(":")[0]]
            words = ["dovetail", "worker", *what]
            words += ["--queue", url] if url else []
            words += ["--queues", name] if name != DEFAULT_QUEUE else []
            click.echo(f"{paint('note', 'warning')}: start one: {shlex.join(words)}", err=True)
            if not live:
                click.echo(f"{paint('note', 'warning')}: the queue is {store_place(queue_url(url))}", err=True)


# --- arguments


def parse_arguments(words: Sequence[str], args_text: str | None) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments of KEY=VALUE and --args; one error names everything that is wrong."""
    problems: list[dt.Problem] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            fixes = (f"{name}=VALUE",) if name.isidentifier() else (ARGS_EXAMPLE,)
            problems.append(dt.Problem(BAD_JOBS_ARGUMENT, f"{word!r} is not KEY=VALUE", fixes=fixes))
            continue
        try:
            kwargs[name] = parse_document(text, name).data if text.strip() else ""
        except dt.ConfigError as error:
            message = f"{name}: {error.problems[0].message}"
            fix = shlex.quote(f"{name}={json.dumps(text)}")
            problems.append(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=(fix,)))
    args: list[Any] = []
    if args_text is not None:
        try:
            found = json.loads(_read(args_text))
        except ValueError as error:
            message = f"--args is not JSON: {error}"
            problems.append(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=(ARGS_EXAMPLE, "--args '[1, \"text\"]'")))
        else:
            if isinstance(found, list):
                args = found
            elif isinstance(found, dict):
                kwargs = found | kwargs
            else:
                message = "--args is neither a list (positional arguments) nor an object (arguments by name)"
                problems.append(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=(f"--args '[{json.dumps(found)}]'",)))
    if problems:
        raise dt.ConfigError(problems)
    return args, kwargs


def _read(text: str) -> str:
    if text == "-":
        return sys.stdin.read()
    if not text.startswith("@"):
        return text
    try:
        with click.open_file(text[1:], encoding="utf-8") as file:
            return str(file.read())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = dt.Problem(BAD_JOBS_ARGUMENT, f"--args {text}: {reason}", fixes=("--args @FILE",))
        raise dt.ConfigError(problem) from None


def submit_options(options: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Options of `Queue.submit` from those of the command, and from --set."""
    given = {name: options[name] for name in OPTION_FIELDS if options[name] is not None}
    if options["retries"] is not None:
        given["retries"] = options["retries"]
    if options["ranks"] is not None:
        given["ranks"] = options["ranks"]
    if options["preemptible"]:
        given["preemptible"] = True
    if options["resources"] is not None:
        given["resources"] = parse_amounts(options["resources"])
    priority = given.get("priority", "")
    if priority.lstrip("+-").isdigit():
        given["priority"] = int(priority)
    if sets:
        given = override_values(Document("options", given), sets).data
    return given


def find_function(reference: str) -> Any:
    """The declared function of MODULE:FUNCTION, with its defaults."""
    from dovetail.jobs.application import Application

    module, colon, name = reference.rpartition(":")
    if not colon or not module or not name:
        fix = f"dovetail jobs submit {reference or 'tasks'}:FUNCTION"
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, f"{reference!r} is not MODULE:FUNCTION", fixes=(fix,)))
    application = Application.load([module])
    by_name = {one.rpartition(":")[2]: function for one, function in application.functions.items()}
    if name not in by_name:
        message = f"{module} has no job function {name!r}{did_you_mean(name, by_name)}"
        evidence = (f"functions with @dt.job: {', '.join(sorted(by_name))}",)
        near = nearest_word(name, by_name) or next(iter(by_name))
        fixes = (f"dovetail jobs submit {module}:{near}", f"write @dt.job above def {name}")
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, message, evidence, fixes))
    return by_name[name]
