"""`dovetail status`: progress or result of one run, with recent decisions, errors and failed items."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import click

from dovetail.cli.colour import paint
from dovetail.cli.options import json_option, run_argument
from dovetail.cli.run_report import resume_lines
from dovetail.cli.saved_arguments import read_saved_arguments
from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import find_run
from dovetail.observe.summary import summarize_run
from dovetail.observe.summary_text import next_step_lines, operator_table_lines, result_lines
from dovetail.observe.terminal import terminal_width
from dovetail.text_format import format_duration, wrap_labelled

if TYPE_CHECKING:
    from dovetail.observe.failed_items import RecordedFailure
    from dovetail.observe.run_folder import RunFolder

MAX_SHOWN_LINES = 5
TIME_COLUMN_WIDTH = 16


@click.command(
    epilog="""\b
Examples:
  dovetail status
  dovetail status video --watch    # the latest run of the pipeline video
  dovetail status 20261116-0305
  dovetail status ./my-run-folder --json | jq .steady_rate
"""
)
@run_argument()
@click.option("--watch", "-w", is_flag=True, help="Show the run until it ends: redrawn in a terminal, else as lines.")
@json_option("Print all figures as JSON; with --watch, one line per second.")
def status(run: str, watch: bool, as_json: bool) -> None:
    """Show the progress or result of RUN."""
    folder = find_run(run)
    if watch:
        from dovetail.cli.status_watch import print_json_line, watch_run

        watch_run(folder, partial(print_json_line if as_json else _show_status, folder), as_json=as_json)
    else:
        _show_status(folder, as_json=as_json)


def _show_status(folder: RunFolder, *, as_json: bool = False) -> None:
    history = RunHistory.load(folder.path)
    summary = summarize_run(history)
    if as_json:
        click.echo(json.dumps(summary.to_dict(), indent=2))
        return
    failed = _failed_item_lines(history.failures(), summary.id)
    decisions, errors = _latest_lines("decisions", summary.decisions), _latest_lines("errors", summary.errors)
    operators = operator_table_lines(history)
    for line in [
        *result_lines(summary, paint=paint),
        *([""] if operators else []),
        *operators,
        *decisions,
        *errors,
        *failed,
    ]:
        click.echo(line)
    arguments = read_saved_arguments(folder)
    resume = resume_lines(summary, has_sink=arguments.has_sink) if arguments else []
    for line in ["", *next_step_lines(summary), *resume]:
        click.echo(line, err=True)


def _failed_item_lines(failures: list[RecordedFailure], run: str) -> list[str]:
    """The first failed items, with their place in the source and the error."""
    if not failures:
        return []
    all_of_them = f"; all: dovetail errors {run}"
    more = f", the first {MAX_SHOWN_LINES} of {len(failures)}{all_of_them}" if len(failures) > MAX_SHOWN_LINES else ""
    shown = failures[:MAX_SHOWN_LINES]
    lines = [f"  {one.place or 'item ?'}  in {one.stage}: {one.text}" for one in shown]
    wrapped = [part for line in lines for part in wrap_labelled(line, terminal_width(), 4)]
    return ["", f"failed items{more}", *wrapped]


def _latest_lines(what: str, entries: tuple[tuple[float, str], ...]) -> list[str]:
    if not entries:
        return []
    more = f", the last {MAX_SHOWN_LINES} of {len(entries)}" if len(entries) > MAX_SHOWN_LINES else ""
    lines = [f"  {format_duration(t):>12}  {text}" for t, text in entries[-MAX_SHOWN_LINES:]]
    wrapped = [part for line in lines for part in wrap_labelled(line, terminal_width(), TIME_COLUMN_WIDTH)]
    return ["", f"{what}{more}", *wrapped]
