"""`dovetail ls`, `cancel`, `drain` and `trace`: list runs, stop them, and export their timeline."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

import click

from dovetail.cli.options import json_option, output_option, run_argument
from dovetail.cli.output_file import write_file
from dovetail.observe.control_socket import send_request
from dovetail.observe.history import RunHistory, run_status
from dovetail.observe.run_folder import (
    LAST_RUN,
    RunFolder,
    find_run,
    list_runs,
    number_field,
    read_json_object,
    run_reference,
    runs_folder,
)
from dovetail.observe.text_format import align_table, format_duration, format_rate
from dovetail.observe.trace import trace_json

POLL_S = 0.05


def stop_run(run: str, command: str, *, wait: bool) -> None:
    folder = find_run(run)
    send_request(folder.path, command, f"dovetail {command}")
    name = run_reference(folder.path)
    if not wait:
        click.echo(f"sent {command} to run {folder.id}; follow it with: dovetail status {name}", err=True)
        return
    while (status := run_status(read_json_object(folder.header), time.time())) == "running":
        time.sleep(POLL_S)
    can_resume = status != "finished" and folder.is_resumable
    next_command = f"dovetail run --resume {name}" if can_resume else f"dovetail status {name}"
    click.echo(f"run {folder.id} is {status}; next: {next_command}", err=True)


DEFAULT_LIMIT = 20
STATUS_COLOURS = {"running": "green", "failed": "red", "lost": "red", "cancelled": "yellow"}


@click.command(
    epilog="""\b
Examples:
  dovetail ls
  dovetail ls --limit 100
  dovetail ls --json | jq -r '.[] | select(.status == "failed") | .id'
"""
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help=f"Maximum number of runs.  [default: {DEFAULT_LIMIT}; all with --json]",
)
@json_option("Print the runs as JSON.")
def ls(limit: int | None, as_json: bool) -> None:
    """List the runs in $DOVETAIL_HOME, latest first."""
    wall = time.time()
    runs = list_runs()
    if as_json:
        click.echo(json.dumps([run_entry(run, wall) for run in runs[:limit]], indent=2))
        return
    limit = limit or DEFAULT_LIMIT
    if not runs:
        click.echo(f"no runs in {runs_folder()}", err=True)
        return
    entries = [run_entry(run, wall) for run in runs[:limit]]
    rows = [("run", "name", "engine", "status", "age", "items", "items/s"), *(_run_row(it) for it in entries)]
    for row, line in zip(rows, align_table(rows, left=4), strict=True):
        before, status, after = line.rpartition(row[3])  # from the right: the name of a run may be a status
        click.echo(
            f"{before}{click.style(status, fg=STATUS_COLOURS.get(status))}{after}" if status in STATUS_COLOURS else line
        )
    if len(runs) > limit:
        click.echo(f"{len(runs) - limit} older runs not shown: dovetail ls --limit {len(runs)}", err=True)


def run_entry(run: RunFolder, wall: float) -> dict[str, Any]:
    """Summary of a run from run.json; the event log is not read."""
    header = read_json_object(run.header)
    progress = header.get("progress")
    done = progress if isinstance(progress, dict) else {}
    seconds, finished = number_field(done, "seconds"), int(number_field(done, "finished"))
    return {
        "id": run.id,
        "name": str(header.get("name", "")),
        "engine": str(header.get("engine", "")),
        "status": run_status(header, wall),
        "age_s": max(0.0, wall - number_field(header, "started")) if number_field(header, "started") else None,
        "items": finished,
        "total": done.get("total"),
        "unit": str(done.get("noun") or "items"),
        "rate": finished / seconds if seconds > 0 else None,
        "seconds": seconds,
        "virtual": bool(header.get("virtual")),
        "folder": str(run.path),
    }


def _run_row(it: dict[str, Any]) -> tuple[str, ...]:
    items = str(it["items"]) + (f" of {it['total']}" if it["total"] not in (None, it["items"]) else "")
    items += "" if it["unit"] == "items" else f" {it['unit']}"
    age = "-" if it["age_s"] is None else format_duration(it["age_s"])
    return it["id"], it["name"], it["engine"], it["status"], age, items, format_rate(it["rate"])


@click.command(
    epilog="""\b
Examples:
  dovetail cancel last
  dovetail cancel 20261116-0305 --wait
"""
)
@run_argument()
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
def cancel(run: str, wait: bool) -> None:
    """Stop RUN (an id, the start of one, `last`, or a folder) immediately.

    Work in flight is discarded; `dovetail run --resume RUN` repeats it. To finish it first, use `dovetail drain`.
    """
    stop_run(run, "cancel", wait=wait)


@click.command(
    epilog="""\b
Examples:
  dovetail drain last
  dovetail drain 20261116-0305 --wait && dovetail run --resume 20261116-0305
"""
)
@run_argument()
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
def drain(run: str, wait: bool) -> None:
    """Make RUN (an id, the start of one, `last`, or a folder) stop reading input, finish the work in flight, and exit.

    No work is lost or repeated: `dovetail run --resume RUN` continues from there.
    """
    stop_run(run, "drain", wait=wait)


@click.command(
    epilog="""\b
Examples:
  dovetail trace last -o trace.json     # open it at https://ui.perfetto.dev
  dovetail trace last -o - | gzip > trace.json.gz
"""
)
@run_argument(default=LAST_RUN)
@output_option("Write the trace as JSON to FILE", required=True)
def trace(run: str, out: str) -> None:
    """Export the timeline of RUN (an id, the start of one, `last`, or a folder; default: the latest run)."""
    folder = find_run(run)
    text = trace_json(RunHistory.load(folder.path)) + "\n"
    if out == "-":
        click.echo(text, nl=False)
        return
    write_file(out, text, fix=f"dovetail trace {shlex.quote(run)} -o trace.json")
    click.echo(f"wrote {out}; open it at https://ui.perfetto.dev", err=True)
