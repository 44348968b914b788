"""dovetail ls: which runs there are, and how they are doing."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from dovetail.observe.folder import RunFolder, list_runs, num, read_object, runs_folder
from dovetail.observe.history import status_of
from dovetail.observe.words import duration, rate, table

COLOURS = {"running": "green", "failed": "red", "lost": "red", "cancelled": "yellow"}


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
        click.echo(json.dumps([entry(run, wall) for run in runs], indent=2))
        return
    if not runs:
        click.echo(f"no runs in {runs_folder()} yet", err=True)
        return
    entries = [entry(run, wall) for run in runs[:limit]]
    rows = [("run", "name", "engine", "status", "age", "items", "items/s"), *(_row(it) for it in entries)]
    for row, line in zip(rows, table(rows, left=4), strict=True):
        before, status, after = line.rpartition(row[3])  # from the right: a run may be called like a status
        click.echo(f"{before}{click.style(status, fg=COLOURS.get(status))}{after}" if status in COLOURS else line)
    if len(runs) > limit:
        click.echo(f"and {len(runs) - limit} older ones: dovetail ls --limit {len(runs)}", err=True)


def entry(run: RunFolder, wall: float) -> dict[str, Any]:
    """What run.json says of a run, in few words; the log is not read."""
    header = read_object(run.header)
    progress = header.get("progress")
    done = progress if isinstance(progress, dict) else {}
    seconds, finished = num(done, "seconds"), int(num(done, "finished"))
    return {
        "id": run.id,
        "name": str(header.get("name", "")),
        "engine": str(header.get("engine", "")),
        "status": status_of(header, wall),
        "age_s": max(0.0, wall - num(header, "started")) if num(header, "started") else None,
        "items": finished,
        "total": done.get("total"),
        "rate": finished / seconds if seconds > 0 else None,
        "seconds": seconds,
        "virtual": bool(header.get("virtual")),
        "folder": str(run.path),
    }


def _row(it: dict[str, Any]) -> tuple[str, ...]:
    items = str(it["items"]) + (f" of {it['total']}" if it["total"] not in (None, it["items"]) else "")
    age = "-" if it["age_s"] is None else duration(it["age_s"])
    return it["id"], it["name"], it["engine"], it["status"], age, items, rate(it["rate"])
