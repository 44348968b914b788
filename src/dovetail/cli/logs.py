"""`dovetail logs`: output of the workers of a run."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

import click

import dovetail as dt
from dovetail.cli.options import complete_stages_of_run, json_option, run_argument
from dovetail.observe.run_folder import find_run
from dovetail.observe.worker_logs import find_worker_logs, follow_worker_logs, log_lines, merge_by_time

if TYPE_CHECKING:
    from datetime import date

    from dovetail.observe.worker_logs import LogLine


@click.command(
    epilog="""\b
Examples:
  dovetail logs                       # all, each line with time and worker
  dovetail logs --stage caption -f    # the workers of one stage, continuously
  dovetail logs 20261116-0305 12 --tail 50

\b
Times are those at which Python code printed the line, in the local time zone.
Output of other programs has no time. Lines are sorted by time.
"""
)
@run_argument()
@click.argument("worker", required=False, shell_complete=complete_stages_of_run)
@click.option("--stage", metavar="NAME", shell_complete=complete_stages_of_run, help="Only the workers of this stage.")
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the run ends.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines of each worker.")
@click.option("--no-timestamps", is_flag=True, help="Do not print the times.")
@json_option("Print one JSON object per line.")
def logs(
    run: str,
    worker: str | None,
    stage: str | None,
    follow: bool,
    tail: int | None,
    no_timestamps: bool,
    as_json: bool,
) -> None:
    """Print the output of the workers of RUN.

    WORKER selects one worker by number, or the workers of a stage by name.
    """
    if worker is not None and stage is not None:
        message = "WORKER and --stage cannot be combined"
        raise dt.ConfigError(dt.Problem("DT367", message, fixes=("remove one of them",)))
    wanted = worker if stage is None else stage
    folder = find_run(run)
    found = find_worker_logs(folder, wanted)
    is_one = len({(log.worker, log.rank) for log in found}) == 1 and wanted is not None and wanted.isdigit()
    show = LinePrinter(as_json=as_json, labels=not is_one, times=not no_timestamps)
    has_output = False
    for line in merge_by_time(log_lines(log, ended=not follow, tail=tail) for log in found):
        show(line)
        has_output = True
    if not has_output and not follow and tail != 0:
        which = f" ({'stage' if stage else 'worker'} {wanted})" if wanted else ""
        click.echo(f"no output from workers of run {folder.id}{which}", err=True)
    if follow:
        for line in follow_worker_logs(folder, wanted, {log.path: log for log in found}):
            show(line)


class LinePrinter:
    """Prints lines of workers, as text or JSON."""

    def __init__(self, *, as_json: bool, labels: bool, times: bool) -> None:
        self._as_json, self._labels, self._times = as_json, labels, times
        self._today = datetime.now().astimezone().date()

    def __call__(self, line: LogLine) -> None:
        if self._as_json:
            log = line.log
            about = {"time": line.time or None, "worker": log.worker, "rank": log.rank, "unit": log.unit}
            click.echo(json.dumps({**about, "node": log.node, "line": line.text}))
            return
        time = f"{local_time(line.time, self._today)} " if self._times and line.time else ""
        label = f"[{line.log.label}] " if self._labels else ""
        click.echo(f"{time}{label}{line.text}")


def local_time(text: str, today: date) -> str:
    """'03:05:33.250' in the local time zone, with the date before it if it is not today."""
    try:
        when = datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):  # a line of a program that only looks like one with a time
        return text
    clock = f"{when:%H:%M:%S}.{when.microsecond // 1000:03d}"
    return clock if when.date() == today else f"{when:%Y-%m-%d} {clock}"
