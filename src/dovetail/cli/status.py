"""`dovetail status`: progress or result of one run, with recent decisions, errors and failed items."""

from __future__ import annotations

import json
from typing import Any

import click

from dovetail.cli.options import json_option, run_argument
from dovetail.cli.run_report import resume_lines
from dovetail.cli.saved_arguments import read_saved_arguments
from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import LAST_RUN, find_run
from dovetail.observe.summary import summarize_run
from dovetail.observe.summary_text import next_step_lines, result_lines
from dovetail.observe.text_format import format_duration

MAX_SHOWN_LINES = 5


@click.command(
    epilog="""\b
Examples:
  dovetail status
  dovetail status 20261116-0305
  dovetail status ./my-run-folder --json | jq .steady_rate
"""
)
@run_argument(default=LAST_RUN)
@json_option("Print all figures as JSON.")
def status(run: str, as_json: bool) -> None:
    """Show the progress or result of RUN (an id, the start of one, `last`, or a folder; default: the latest run)."""
    folder = find_run(run)
    history = RunHistory.load(folder.path)
    summary = summarize_run(history)
    if as_json:
        click.echo(json.dumps(summary.to_dict(), indent=2))
        return
    failed = _failed_item_lines(history.failed_items()) if summary.failed else []
    decisions, errors = _latest_lines("decisions", summary.decisions), _latest_lines("errors", summary.errors)
    for line in [*result_lines(summary), *decisions, *errors, *failed]:
        click.echo(line)
    arguments = read_saved_arguments(folder)
    resume = resume_lines(summary, has_sink=arguments.has_sink) if arguments else []
    for line in ["", *next_step_lines(summary), *resume]:
        click.echo(line, err=True)


def _failed_item_lines(entries: list[dict[str, Any]]) -> list[str]:
    """The first failed items, with their place in the source and the error."""
    if not entries:
        return []
    more = f", the first {MAX_SHOWN_LINES} of {len(entries)}" if len(entries) > MAX_SHOWN_LINES else ""
    lines = ["", f"failed items{more}"]
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
