"""`dovetail worker`: run the jobs of a queue."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import click

import dovetail as dt
from dovetail.cli.options import FOLDER_PATH, SuggestingChoice, http_options
from dovetail.cli.queue_option import files_option, opened_queue, queue_url, queue_url_option
from dovetail.cli.signals import SIGNAL_NAMES, WorkerSignals
from dovetail.jobs.job_function import RUN_MODULE
from dovetail.jobs.stores.store_url import checked_scheme, shown_url, store_place
from dovetail.observe.terminal import is_terminal, raw_terminal, terminal_width
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.text_format import cut_text, format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.jobs.application import Application
    from dovetail.jobs.workers.ingest import Ingester, Route
    from dovetail.jobs.workers.worker import Worker

T = TypeVar("T")

BAD_ROUTE = "DT645"
CHECK_S = 0.2
CLEAR_LINE = "\r\x1b[K"
FUNCTIONS_SHOWN = 8
LINE_INTERVAL_S = 10.0
LIVE_INTERVAL_S = 1.0
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
ISOLATIONS = ("process", "warm_process", "thread", "async")


class WorkerCommand(click.Command):
    """A command that takes no arguments, as other programs name the module of functions by one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if type(error) is not click.UsageError:  # about an option
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}. Name modules by --app MODULE.", ctx) from None


@click.command(
    cls=WorkerCommand,
    epilog="""\b
Examples:
  dovetail worker --queue sqlite:///jobs.db --app tasks
  dovetail worker --app tasks --app reports.py --queues gpu,default --slots 4
  dovetail worker --queue redis://queue:6379/0 --app tasks --grace 5m
  MAX_CONCURRENT_JOBS=2 USE_GPU=true GPU_DEVICE=0 dovetail worker --app tasks
  DOVETAIL_TOKEN=secret dovetail worker --app tasks --host 0.0.0.0
  dovetail worker --app tasks --ingest ai:gpu:queue=tasks:infer
  dovetail worker --runs pipelines --queues runs
  curl http://127.0.0.1:8000/workers/status

\b
Environment variables; an option wins over its variable:
  DOVETAIL_QUEUE        --queue
  DOVETAIL_TOKEN        --token, which other users cannot see
  MAX_CONCURRENT_JOBS   --slots
  WORKER_ID             --worker-id
  JOB_TIMEOUT           --job-timeout, in seconds
  USE_GPU               --use-gpu if true, --no-gpu if false
  GPU_DEVICE            --gpu-device
  CUDA_VISIBLE_DEVICES  GPUs of this machine that Dovetail may use

\b
Ctrl-C or SIGTERM once: take no more jobs, return those that have not begun,
and finish the others within --grace. Twice: stop now; the jobs run again on
another worker.

\b
Exit codes: 0 stopped, 1 failed, 2 usage or configuration, 3 no resources,
5 the store cannot be reached at the start, 130 stopped at once (143 by
SIGTERM).
""",
)
@queue_url_option("--queue", "--queue-url")
@click.option(
    "--app",
    "apps",
    multiple=True,
    metavar="MODULE",
    help="Module or script with @dt.job functions; only these are run. May be repeated.",
)
@click.option(
    "--runs",
    multiple=True,
    metavar="DIR",
    type=FOLDER_PATH,
    help="Folder whose pipelines, recipes, actors files and tables may be run as jobs; they can run code. May be "
    "repeated.  [default: none]",
)
@click.option("--queues", default="default", show_default=True, metavar="A,B", help="Names of the queues to serve.")
@click.option(
    "--slots", metavar="N|auto", help="Maximum number of concurrent jobs.  [default: MAX_CONCURRENT_JOBS, or auto]"
)
@click.option(
    "--resources", metavar="SPEC", help="What jobs may use: '8cpu, 32GB'.  [default: this machine, shared by a claim]"
)
@click.option(
    "--use-gpu/--no-gpu",
    default=None,
    help="Whether jobs may use GPUs.  [default: USE_GPU, or those that request GPUs]",
)
@click.option("--gpu-device", metavar="N,N", help="Indices of the GPUs to use.  [default: GPU_DEVICE, or all]")
@click.option(
    "--isolation",
    type=SuggestingChoice(ISOLATIONS),
    help="Isolation of jobs that set none and need none.  [default: async for async functions, else process]",
)
@click.option("--job-timeout", metavar="TIME", help="Timeout of jobs that set none.  [default: JOB_TIMEOUT, or none]")
@click.option("--lease", metavar="TIME", help="Jobs of a dead worker run again after this time.  [default: 15s]")
@click.option("--grace", metavar="TIME", help="Time for running jobs when the worker stops.  [default: 30s]")
@click.option("--kill-grace", metavar="TIME", help="Time between SIGTERM and SIGKILL of a job process.  [default: 5s]")
@click.option(
    "--placement-delay",
    metavar="TIME",
    help="Leave a job to a better worker for this long; 0: take it at once.  [default: 50ms]",
)
@click.option(
    "--rendezvous-host",
    metavar="HOST",
    help="Address at which ranks of gangs on other machines reach this one.  [default: that of the route to Redis]",
)
@click.option("--worker-id", metavar="NAME", help="Unique name.  [default: WORKER_ID, or from host and pid]")
@click.option(
    "--recycle-jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Restart the worker after N jobs in threads or the event loop, a warm process after N jobs.",
)
@click.option("--recycle-bytes", metavar="SIZE", help="Restart the worker, or a warm process, above this memory.")
@click.option("--allow-pickle", is_flag=True, help="Unpickle arguments. Use it only if all submitters are trusted.")
@files_option()
@click.option("--log-dir", metavar="DIR", type=FOLDER_PATH, help="Output of jobs.  [default: --files]")
@http_options(8000, "the status pages")
@click.option("--no-status", is_flag=True, help="Do not serve the status over HTTP.")
@click.option(
    "--ingest",
    "routes",
    multiple=True,
    metavar="LIST=MODULE:FUNCTION",
    help="Turn JSON messages of a Redis list into jobs. May be repeated.",
)
@click.option("--ingest-url", metavar="URL", help="Redis with the lists of --ingest.  [default: that of --queue]")
def worker(
    url: str | None,
    apps: tuple[str, ...],
    runs: tuple[str, ...],
    routes: tuple[str, ...],
    ingest_url: str | None,
    allow_pickle: bool,
    files: str | None,
    port: int,
    host: str,
    token: str,
    no_status: bool,
    **options: Any,
) -> None:
    """Run jobs of a queue until Ctrl-C or SIGTERM."""
    from dovetail.jobs.application import load_application
    from dovetail.jobs.run_submission import resolved_folders
    from dovetail.jobs.workers.ingest import parse_routes
    from dovetail.jobs.workers.status_server import StatusServer, address_problems

    where = queue_url(url)
    problems = [] if no_status else list(address_problems(host, token))
    lists_at = _lists_url(ingest_url or where, problems) if routes else ""
    application = _collected(lambda: load_application(apps, runs=bool(runs)), problems)
    folders = _collected(lambda: resolved_folders(runs), problems)
    found = _collected(lambda: parse_routes(routes, application), problems) if application else None
    given = {name: value for name, value in options.items() if value is not None}
    given["runs"] = folders or ()
    given["queues"] = tuple(name.strip() for name in given["queues"].split(",") if name.strip())
    if problems:
        raise dt.ConfigError(problems)
    assert application is not None
    with ExitStack() as stack:
        queue = stack.enter_context(opened_queue(where, files=files, create=True, allow_pickle=allow_pickle))
        queue.store.now_ms()  # a store that cannot be reached is an error now, and waited for later
        running = _made_worker(queue, application, given)
        signals = stack.enter_context(WorkerSignals())
        stack.callback(running.stop_now)
        running.start()
        ingesters = [_started_ingester(lists_at, route, queue, stack) for route in found or ()]
        source = WorkerSource(running, ingesters)
        page = ""
        if not no_status:
            server = StatusServer(source, queue.store, host=host, port=port, token=token)
            page = stack.enter_context(server).url
        _announce(source.get_status(), page, port, application, store_place(where), folders or ())
        _wait(running, source, signals)
    if isinstance(running.error, dt.ConfigError):
        raise WorkerRenderer().error(running.error)
    if running.error is not None:
        raise running.error
    if running.is_recycled and not signals.count:
        click.echo("restarting", err=True)
        os.execv(sys.executable, [sys.executable, "-m", "dovetail", *sys.argv[1:]])  # noqa: S606 - this program itself
    sys.exit(signals.exit_code)


def _made_worker(queue: dt.Queue, application: Application, given: dict[str, Any]) -> Worker:
    from dovetail.jobs.workers.worker import Worker

    try:
        return Worker(queue, app=application, **given)
    except dt.ConfigError as error:
        raise WorkerRenderer().error(error) from None


class WorkerRenderer(OptionRenderer):
    """Options of `dt.Worker` as options of this command."""

    def option(self, name: str, value: object) -> str:
        if name == "queues" and isinstance(value, list):
            return f"--queues {','.join(value)}"
        return "--no-gpu" if name == "use_gpu" and value is False else super().option(name, value)


def _collected(load: Callable[[], T], problems: list[dt.Problem]) -> T | None:
    """The result of a function; its problems are added to those of the other options."""
    try:
        return load()
    except dt.ConfigError as error:
        problems += error.problems
        return None


def _lists_url(url: str, problems: list[dt.Problem]) -> str:
    """The Redis that has the lists of --ingest."""
    if not url.startswith(REDIS_SCHEMES):
        message = f"--ingest reads lists of Redis, and {shown_url(url)} is not Redis"
        problems.append(dt.Problem(BAD_ROUTE, message, fixes=("--ingest-url redis://localhost:6379/0",)))
    elif find_spec("redis") is None:
        message = "--ingest needs the package redis, which is not installed"
        problems.append(dt.Problem(BAD_ROUTE, message, fixes=("pip install 'dovetail-ml[redis]'",)))
    else:
        _collected(lambda: checked_scheme(url), problems)
    return url


def _started_ingester(url: str, route: Route, queue: dt.Queue, stack: ExitStack) -> Ingester:
    from dovetail.jobs.workers.ingest import Ingester

    ingester = Ingester(
        url,
        route,
        queue.store,
        queue.codec,
        report=lambda text: click.echo(text, err=True),
        is_same_redis=url == queue.url,
    )
    ingester.start()
    stack.callback(ingester.stop)
    return ingester


class WorkerSource:
    """Status of a worker, with the limits of its options and its ingestion."""

    def __init__(self, running: Worker, ingesters: Sequence[Ingester] = ()) -> None:
        self._running, self._ingesters = running, ingesters
        self._started = time.monotonic()

    def get_status(self) -> dict[str, Any]:
        options = self._running.options
        more = {
            "lease_s": options.lease_ms / 1000,
            "grace_s": options.grace_s,
            "uptime_s": round(time.monotonic() - self._started, 3),
        }
        ingest = [ingester.get_status() for ingester in self._ingesters]
        return {**self._running.get_status(), **more, **({"ingest": ingest} if ingest else {})}


def _announce(
    status: Mapping[str, Any], page: str, port: int, application: Application, place: str, folders: Sequence[str]
) -> None:
    words = [f"worker {status['worker_id']}", f"queues {', '.join(status['queues'])}"]
    words += ["uses GPUs"] if status["gpu_enabled"] else []
    click.echo(f"{'; '.join(words)}; Ctrl-C drains it", err=True)
    click.echo(f"jobs: {place}", err=True)
    functions = [one for one in application.functions if not one.startswith(f"{RUN_MODULE}:")]
    names = sorted(reference.rpartition("/")[2] for reference in functions)
    more = f" and {len(names) - FUNCTIONS_SHOWN} more" if len(names) > FUNCTIONS_SHOWN else ""
    if names:
        click.echo(f"functions: {', '.join(names[:FUNCTIONS_SHOWN])}{more}", err=True)
    if folders:
        click.echo(f"runs files in: {', '.join(folders)}", err=True)
    if page:
        taken = f" (port {port} is taken)" if port and f":{port}/" not in page else ""
        click.echo(f"status: {page}workers/status{taken}", err=True)


def _wait(running: Worker, source: WorkerSource, signals: WorkerSignals) -> None:
    """Print a line from time to time until the worker has stopped; a signal drains it, a second one stops it now."""
    show = StatusLine()
    is_draining = False
    while not running.wait(CHECK_S):
        if signals.count and not is_draining:
            is_draining = True
            show.clear()
            click.echo(_drain_text(source.get_status(), SIGNAL_NAMES[signal.Signals(signals.first_signal)]), err=True)
            running.request_stop()
        if signals.count > 1:
            show.clear()
            click.echo("stopping now; running jobs are run again by another worker", err=True)
            running.stop_now()
        show(source.get_status())
    show.clear()
    click.echo("stopped", err=True)


def _drain_text(status: Mapping[str, Any], name: str) -> str:
    active, grace = status["active_jobs"], format_duration(status["grace_s"])
    jobs = f"{format_count(active, 'running job')} may finish within {grace}" if active else "no running jobs"
    return f"{name}: taking no more jobs; {jobs}; a second one stops now"


class StatusLine:
    """What a worker does, on one line: redrawn in a terminal, printed every 10 s elsewhere."""

    def __init__(self) -> None:
        self._is_live = is_terminal(sys.stderr)
        self._next = time.monotonic() + (LIVE_INTERVAL_S if self._is_live else LINE_INTERVAL_S)
        self._is_drawn = False

    def __call__(self, status: Mapping[str, Any]) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (LIVE_INTERVAL_S if self._is_live else LINE_INTERVAL_S)
        text = status_text(status)
        if not self._is_live:
            click.echo(text, err=True)
            return
        self.clear()
        raw_terminal(sys.stderr).write(cut_text(text, terminal_width() - 1))
        raw_terminal(sys.stderr).flush()
        self._is_drawn = True

    def clear(self) -> None:
        if self._is_drawn:
            raw_terminal(sys.stderr).write(CLEAR_LINE)
            raw_terminal(sys.stderr).flush()
        self._is_drawn = False


def status_text(status: Mapping[str, Any]) -> str:
    """'running: 3 jobs, 5 free slots, 2 error, 120 succeeded'."""
    counts = [f"{count} {outcome.replace('_', ' ')}" for outcome, count in status["totals"].items()]
    parts = [format_count(status["active_jobs"], "job"), format_count(status["available_slots"], "free slot")]
    away = "" if status["store_available"] else "; the store cannot be reached"
    return f"{status['state']}: {', '.join([*parts, *counts])}{away}"
