"""`dovetail ls`, `cancel`, `drain` and `trace`: list runs, stop them, and export their timeline."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

import click

from dovetail.cli.completion import complete_runs
from dovetail.cli.output_file import write_file
from dovetail.observe.control_socket import send_request
from dovetail.observe.history import RunHistory, run_status
from dovetail.observe.run_folder import (
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


def stop_run(run: str, do: str, *, wait: bool) -> None:
    folder = find_run(run)
    send_request(folder.path, do, f"dovetail {do}")
    name = run_reference(folder.path)
    if not wait:
        click.echo(f"asked {folder.id} to {do}; see: dovetail status {name}", err=True)
        return
    while (status := run_status(read_json_object(folder.header), time.time())) == "running":
        time.sleep(POLL_S)
    goes_on = status != "finished" and folder.is_resumable
    further = f"dovetail run --resume {name}" if goes_on else f"dovetail status {name}"
    click.echo(f"{folder.id} is {status}; next: {further}", err=True)


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
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many, the youngest first."
)
@click.option("--json", "as_json", is_flag=True, help="Print all of them as JSON.")
def ls(limit: int, as_json: bool) -> None:
    """List the runs in $DOVETAIL_HOME, the youngest first."""
    wall = time.time()
    runs = list_runs()
    if as_json:
        click.echo(json.dumps([run_entry(run, wall) for run in runs], indent=2))
        return
    if not runs:
        click.echo(f"no runs in {runs_folder()} yet", err=True)
        return
    entries = [run_entry(run, wall) for run in runs[:limit]]
    rows = [("run", "name", "engine", "status", "age", "items", "items/s"), *(_run_row(it) for it in entries)]
    for row, line in zip(rows, align_table(rows, left=4), strict=True):
        before, status, after = line.rpartition(row[3])  # from the right: a run may be called like a status
        click.echo(
            f"{before}{click.style(status, fg=STATUS_COLOURS.get(status))}{after}" if status in STATUS_COLOURS else line
        )
    if len(runs) > limit:
        click.echo(f"and {len(runs) - limit} older ones: dovetail ls --limit {len(runs)}", err=True)


def run_entry(run: RunFolder, wall: float) -> dict[str, Any]:
    """What run.json says of a run, in few words; the log is not read."""
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
        "rate": finished / seconds if seconds > 0 else None,
        "seconds": seconds,
        "virtual": bool(header.get("virtual")),
        "folder": str(run.path),
    }


def _run_row(it: dict[str, Any]) -> tuple[str, ...]:
    items = str(it["items"]) + (f" of {it['total']}" if it["total"] not in (None, it["items"]) else "")
    age = "-" if it["age_s"] is None else format_duration(it["age_s"])
    return it["id"], it["name"], it["engine"], it["status"], age, items, format_rate(it["rate"])


@click.command(
    epilog="""\b
Examples:
  dovetail cancel last
  dovetail cancel 20261116-0305 --wait
"""
)
@click.argument("run", shell_complete=complete_runs)
@click.option("--wait", is_flag=True, help="Return when the run is over.")
def cancel(run: str, wait: bool) -> None:
    """Tell RUN (an id, the beginning of one, `last`, or a folder) to stop now.

    What it has in hand is done again by `dovetail run --resume RUN`; to have it finished, use `dovetail drain`.
    """
    stop_run(run, "cancel", wait=wait)


@click.command(
    epilog="""\b
Examples:
  dovetail drain last
  dovetail drain 20261116-0305 --wait && dovetail run --resume 20261116-0305
"""
)
@click.argument("run", shell_complete=complete_runs)
@click.option("--wait", is_flag=True, help="Return when the run is over.")
def drain(run: str, wait: bool) -> None:
    """Tell RUN (an id, the beginning of one, `last`, or a folder) to read nothing more and finish what it has in hand.

    Nothing is lost or done twice: `dovetail run --resume RUN` goes on from there.
    """
    stop_run(run, "drain", wait=wait)


@click.command(
    epilog="""\b
Examples:
  dovetail trace last -o trace.json     # then open it at https://ui.perfetto.dev
  dovetail trace last -o - | gzip > trace.json.gz
"""
)
@click.argument("run")
@click.option("-o", "--out", required=True, metavar="FILE", help="Write the trace here, as JSON; - is stdout.")
def trace(run: str, out: str) -> None:
    """Write RUN (an id, the beginning of one, `last`, or a folder) as a trace."""
    folder = find_run(run)
    text = trace_json(RunHistory.load(folder.path)) + "\n"
    if out == "-":
        click.echo(text, nl=False)
        return
    write_file(out, text, fix=f"dovetail trace {shlex.quote(run)} -o trace.json")
    click.echo(f"written: {out}; open it at https://ui.perfetto.dev", err=True)
