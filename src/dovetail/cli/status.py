"""`dovetail status`: progress or result of one run, with recent decisions, errors and failed items."""

from __future__ import annotations

import json
from typing import Any

import click

from dovetail.cli.completion import complete_runs
from dovetail.cli.run_report import resume_lines
from dovetail.cli.saved_arguments import read_saved_arguments
from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import find_run
from dovetail.observe.summary import summarize_run
from dovetail.observe.summary_text import next_step_lines, result_lines
from dovetail.observe.text_format import format_duration

MAX_SHOWN_LINES = 5


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
    history = RunHistory.load(folder.path)
    told = summarize_run(history)
    if as_json:
        click.echo(json.dumps(told.to_dict(), indent=2))
        return
    aside = _failed_item_lines(history.set_aside()) if told.aside else []
    decided, went_wrong = _latest_lines("decisions", told.decisions), _latest_lines("errors", told.errors)
    for line in [*result_lines(told), *decided, *went_wrong, *aside]:
        click.echo(line)
    asked = read_saved_arguments(folder)
    further = resume_lines(told, has_sink=asked.has_sink) if asked else []
    for line in ["", *next_step_lines(told), *further]:
        click.echo(line, err=True)


def _failed_item_lines(entries: list[dict[str, Any]]) -> list[str]:
    """The first items that were set aside: where they come from, and why."""
    if not entries:
        return []
    more = f", the first {MAX_SHOWN_LINES} of {len(entries)}" if len(entries) > MAX_SHOWN_LINES else ""
    lines = ["", f"set aside{more}"]
    for entry in entries[:MAX_SHOWN_LINES]:
        key = entry.get("key")
        number = ".".join(map(str, key)) if isinstance(key, list) else "?"
        place = entry.get("place") or f"item {number}"
        why = ": ".join(text for text in (str(entry.get("error", "")), str(entry.get("message", ""))) if text)
        lines.append(f"  {place}  in {entry.get('unit', '?')}: {' '.join(why.split())[:200]}")
    return lines


def _latest_lines(what: str, entries: tuple[tuple[float, str], ...]) -> list[str]:
    if not entries:
        return []
    more = f", the last {MAX_SHOWN_LINES} of {len(entries)}" if len(entries) > MAX_SHOWN_LINES else ""
    return ["", f"{what}{more}", *(f"  {format_duration(t):>12}  {text}" for t, text in entries[-MAX_SHOWN_LINES:])]
