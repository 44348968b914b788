"""dovetail status: how one run is doing, or how it went."""

from __future__ import annotations

import json
from typing import Any

import click

from dovetail.cli.resuming import asked_before
from dovetail.cli.run_ending import ways_on
from dovetail.cli.run_names import complete_runs
from dovetail.observe.folder import find_run
from dovetail.observe.history import History
from dovetail.observe.summary import summary
from dovetail.observe.summary_lines import next_lines, result_lines
from dovetail.observe.words import duration

SHOWN = 5


@click.command(
    epilog="""\b
Examples:
  dovetail status last
  dovetail status 20261116-0305
  dovetail status ./my-run-folder --json | jq .steady_rate
"""
)
@click.argument("run", shell_complete=complete_runs)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def status(run: str, as_json: bool) -> None:
    """Show RUN: an id, the beginning of one, `last`, or a folder."""
    folder = find_run(run)
    history = History.load(folder.path)
    told = summary(history)
    if as_json:
        click.echo(json.dumps(told.to_dict(), indent=2))
        return
    aside = _aside(history.set_aside()) if told.aside else []
    decided, went_wrong = _latest("decisions", told.decisions), _latest("errors", told.errors)
    for line in [*result_lines(told), *decided, *went_wrong, *aside]:
        click.echo(line)
    asked = asked_before(folder)
    further = ways_on(told, has_sink=asked.has_sink) if asked else []
    for line in ["", *next_lines(told), *further]:
        click.echo(line, err=True)


def _aside(entries: list[dict[str, Any]]) -> list[str]:
    """The first items that were set aside: where they come from, and why."""
    if not entries:
        return []
    more = f", the first {SHOWN} of {len(entries)}" if len(entries) > SHOWN else ""
    lines = ["", f"set aside{more}"]
    for entry in entries[:SHOWN]:
        key = entry.get("key")
        number = ".".join(map(str, key)) if isinstance(key, list) else "?"
        place = entry.get("place") or f"item {number}"
        why = ": ".join(text for text in (str(entry.get("error", "")), str(entry.get("message", ""))) if text)
        lines.append(f"  {place}  in {entry.get('unit', '?')}: {' '.join(why.split())[:200]}")
    return lines


def _latest(what: str, entries: tuple[tuple[float, str], ...]) -> list[str]:
    if not entries:
        return []
    more = f", the last {SHOWN} of {len(entries)}" if len(entries) > SHOWN else ""
    return ["", f"{what}{more}", *(f"  {duration(t):>12}  {text}" for t, text in entries[-SHOWN:])]
