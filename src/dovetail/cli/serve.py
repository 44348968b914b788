"""`dovetail serve`: answer HTTP requests with the stages of a pipeline file."""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli.options import cluster_option, file_argument, http_options, run_dir_option, set_option
from dovetail.cli.run_spec_loader import infeasible_error_for_file, load_run_spec, recipe_of
from dovetail.cli.signals import StopSignals
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.resources.sizes import parse_size
from dovetail.runtime.arguments import SERVICE_ARGUMENT_CODE
from dovetail.runtime.http_json import is_header_value, is_loopback
from dovetail.runtime.run_spec import add_import_path, missing_code
from dovetail.runtime.service import serve as start_service
from dovetail.text_format import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.cli.http_server import ServiceServer
    from dovetail.runtime.run_spec import RunSpec
    from dovetail.runtime.service import Service

CHECK_INTERVAL_S = 0.1
CANCEL_TIMEOUT_S = 15.0


@click.command(
    epilog="""\b
Examples:
  dovetail serve pipeline.yaml
  dovetail serve pipeline.yaml --port 8001 --deadline 5s --max-wait 5ms
  DOVETAIL_TOKEN=secret dovetail serve pipeline.yaml --host 0.0.0.0
  curl -d '{"text": "a good day"}' http://127.0.0.1:8000/

\b
POST / with a JSON value returns {"result": ...}; a list of values returns
{"results": [...], "errors": [...]}, in the order of the list. With ?many=1
every value has a list of results. GET /health is 200 when workers are ready.
Errors are {"error": {"code": ..., "message": ...}}.

\b
Ctrl-C or SIGTERM: answer pending requests, then exit with code 0.
A second time: stop immediately. dovetail drain and cancel do the same.
Source and sink of FILE are not used.
"""
)
@file_argument()
@http_options(8000, is_fixed=True)
@cluster_option("cluster")
@set_option()
@click.option("--max-wait", default="20ms", show_default=True, metavar="TIME", help="Time to wait for a full batch.")
@click.option("--deadline", default="60s", show_default=True, metavar="TIME", help="Time limit of a request.")
@click.option(
    "--max-pending",
    type=int,
    default=10_000,
    show_default=True,
    metavar="N",
    help="Maximum number of unanswered requests.",
)
@click.option("--max-body", default="10MB", show_default=True, metavar="SIZE", help="Size limit of a request.")
@click.option("--no-wait", is_flag=True, help="Exit with code 3 instead of waiting for resources.")
@run_dir_option()
def serve(
    file: str,
    port: int,
    host: str,
    token: str,
    cluster: str,
    sets: tuple[str, ...],
    max_body: str,
    no_wait: bool,
    **limits: Any,
) -> None:
    """Serve the pipeline in FILE over HTTP."""
    from dovetail.cli.http_server import ServiceServer

    problems = list(_argument_errors(host, token, max_body))
    if problems:
        raise dt.ConfigError(problems)
    job = load_run_spec(file, sets)
    _check_servable(job)
    try:
        server = ServiceServer(host, port, token=token, max_body_bytes=parse_size(max_body))
    except OSError as error:
        message = f"cannot listen on {host} port {port}: {error.strerror or error}"
        fixes = ("--port 0 to use any free port", "--host 127.0.0.1")
        raise dt.ConfigError(dt.Problem("DT308", message, fixes=fixes)) from None
    with server:
        try:
            service = start_service(job.pipeline, cluster=cluster, wait=not no_wait, **limits)
        except dt.InfeasibleError as error:
            raise infeasible_error_for_file(error, job, dt.Cluster.of(cluster), "streaming") from None
        except dt.ConfigError as error:
            raise OptionRenderer().error(error) from None
        server.service = service
        _serve_until_stopped(server, service)


def _argument_errors(host: str, token: str, max_body: str) -> Iterator[dt.Problem]:
    if not token and not is_loopback(host):
        message = f"--host {host} lets other machines send requests, and there is no token"
        fixes = ("export DOVETAIL_TOKEN=$(openssl rand -hex 16)", "--host 127.0.0.1")
        yield dt.Problem(SERVICE_ARGUMENT_CODE, message, fixes=fixes)
    if token and not is_header_value(token):
        message = "the token has spaces or characters that HTTP headers cannot carry"
        yield dt.Problem(SERVICE_ARGUMENT_CODE, message, fixes=("use letters and digits",))
    try:
        parse_size(max_body)
    except ValueError as error:
        yield dt.Problem(SERVICE_ARGUMENT_CODE, f"--max-body {max_body}: {error}", fixes=("--max-body 10MB",))


def _check_servable(job: RunSpec) -> None:
    recipe = recipe_of(job)
    if recipe is not None:
        message = "is a recipe, and only pipelines can be served"
        fixes = (f"dovetail run {job.file.name}",)
        raise dt.ConfigError(dt.Problem(SERVICE_ARGUMENT_CODE, message, fixes=fixes, place=str(job.file)))
    add_import_path(job.file.parent)
    problems = missing_code(job)
    if problems:
        raise dt.ConfigError(problems)


def _serve_until_stopped(server: ServiceServer, service: Service) -> None:
    """Returns when the service has been drained; raises its error, or KeyboardInterrupt at a second signal."""
    Thread(target=server.serve_forever, args=(CHECK_INTERVAL_S,), name="dovetail-http", daemon=True).start()
    try:
        with StopSignals() as stops:
            _wait_for_stop(server, service, stops)
            server.is_stopping = True
            if not service.done:
                pending = format_count(service.pending, "pending request")
                click.echo(f"stopping after {pending}; Ctrl-C again stops now", err=True)
            service.drain()
    except BaseException as error:
        service.cancel(f"stopped by {type(error).__name__}")
        with suppress(Exception):
            service.drain(CANCEL_TIMEOUT_S)
        raise
    finally:
        server.is_stopping = True
        server.wait_for_responses()
        server.shutdown()
    click.echo("stopped", err=True)


def _wait_for_stop(server: ServiceServer, service: Service, stops: StopSignals) -> None:
    """Waits for a signal or the end of the service, and prints the URL when the workers are ready."""
    is_announced = False
    while not service.done and not stops.count:
        if not is_announced and service.ready:
            is_announced = True
            click.echo(f"serving {server.url} (run {service.folder.name}); Ctrl-C stops it", err=True)
        time.sleep(CHECK_INTERVAL_S)
