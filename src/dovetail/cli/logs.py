"""`dovetail logs`: output of the workers of a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dovetail.cli.options import json_option, run_argument
from dovetail.observe.run_folder import find_run
from dovetail.observe.worker_logs import find_worker_logs, follow_worker_logs

if TYPE_CHECKING:
    from dovetail.observe.worker_logs import WorkerLog


@click.command(
    epilog="""\b
Examples:
  dovetail logs last                     # all workers, each line with its worker
  dovetail logs last caption -f          # the workers of one stage, continuously
  dovetail logs 20261116-0305 12 --tail 50
"""
)
@run_argument()
@click.argument("worker", required=False)
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the run ends.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines of each worker.")
@json_option("Print one JSON object per line.")
def logs(run: str, worker: str | None, follow: bool, tail: int | None, as_json: bool) -> None:
    """Print the output of the workers of RUN.

    WORKER selects one worker by number, or the workers of a stage by name.
    """
    folder = find_run(run)
    found = find_worker_logs(folder, worker)
    if not found and not follow:
        click.echo(f"no output from workers of run {folder.id}" + (f" (worker {worker})" if worker else ""), err=True)
        return
    one = len({(log.worker, log.rank) for log in found}) == 1 and worker is not None and worker.isdigit()
    for log in found:
        lines = [*log.read(), *(() if follow else log.remainder())]
        for line in lines[max(0, len(lines) - tail) :] if tail is not None else lines:
            _print_line(log, line, as_json, plain=one)
    if follow:
        for log, line in follow_worker_logs(folder, worker, {log.path: log for log in found}):
            _print_line(log, line, as_json, plain=one)


def _print_line(log: WorkerLog, line: str, as_json: bool, *, plain: bool) -> None:
    if as_json:
        about = {"worker": log.worker, "rank": log.rank, "unit": log.unit, "node": log.node}
        click.echo(json.dumps({**about, "line": line}))
    else:
        click.echo(line if plain else f"[{log.label}] {line}")
