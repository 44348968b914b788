"""`dovetail errors`: failed items of a run, grouped by stage and error."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dovetail.cli.options import complete_stages_of_run, json_option, run_argument
from dovetail.cli.run_report import retry_lines
from dovetail.cli.saved_arguments import read_saved_arguments
from dovetail.errors import did_you_mean
from dovetail.observe.failed_items import RecordedFailure, group_failures
from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import find_run
from dovetail.observe.summary import summarize_run
from dovetail.text_format import escape_controls, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.observe.summary import RunSummary


@click.command(
    epilog="""\b
Examples:
  dovetail errors
  dovetail errors last --stage parse --type KeyError --items 20
  dovetail errors 20261116-0305 --json | jq .place
"""
)
@run_argument()
@click.option(
    "--stage", metavar="NAME", shell_complete=complete_stages_of_run, help="Show only failures of this stage."
)
@click.option("--type", "error_type", metavar="EXCEPTION", help="Show only failures with this exception.")
@click.option(
    "--items", type=click.IntRange(min=0), default=3, show_default=True, metavar="N", help="Items to show per error."
)
@click.option("--traceback", is_flag=True, help="Show the traceback of the first item of each error.")
@json_option("Print one JSON object per failed item.")
def errors(run: str, stage: str | None, error_type: str | None, items: int, traceback: bool, as_json: bool) -> None:
    """Show the failed items of RUN.

    Each item is shown with its place in the source: the item with which a run failed, and items that were skipped.
    """
    history = RunHistory.load(find_run(run).path)
    summary = summarize_run(history)
    failures = [*history.failures(), *(_backfill_failures(summary) if summary.column else ())]
    found = [
        failure
        for failure in failures
        if stage in (None, failure.stage, *failure.stage.split("+")) and error_type in (None, failure.error)
    ]
    if as_json:
        for failure in found:
            click.echo(json.dumps(asdict(failure)))
        return
    noun = "row" if summary.column else "item"
    for line in _lines(found, items, noun, traceback=traceback):
        click.echo(line)
    if not found:
        which = " that match" if failures else ""
        click.echo(f"no failed {noun}s{which} in run {summary.id}", err=True)
        for line in _existing(failures, stage, error_type):
            click.echo(line, err=True)
    elif len(failures) < summary.failed:
        click.echo(f"the first {len(failures)} of {summary.failed} failed {noun}s were recorded", err=True)
    for line in retry_lines(summary) if _is_of_command_line(history) else []:
        click.echo(line, err=True)


def _existing(failures: list[RecordedFailure], stage: str | None, error_type: str | None) -> Iterator[str]:
    """Stages and exceptions of the failed items, where the selected ones have none."""
    given = {"stages": stage, "exceptions": error_type}
    existing = {"stages": {one.stage for one in failures}, "exceptions": {one.error for one in failures}}
    for kind, names in existing.items():
        word = given[kind]
        if names and word is not None:
            yield f"{kind} with failures: {', '.join(sorted(names))}{did_you_mean(word, names - {word})}"


def _is_of_command_line(history: RunHistory) -> bool:
    """Whether `dovetail run --retry-errors` can run it again: it was started by a command and has a sink."""
    arguments = read_saved_arguments(history.folder)
    return arguments is not None and arguments.has_sink


def _lines(failures: list[RecordedFailure], items: int, noun: str, *, traceback: bool) -> Iterator[str]:
    for group in group_failures(failures):
        first = group[0]
        ended = ", ended the run" if any(failure.ended_run for failure in group) else ""
        yield f"{format_count(len(group), noun)} in {first.stage}{ended}: {first.text}"
        for failure in group[:items]:
            yield f"  {failure.place or 'item ?'}  {failure.item}".rstrip()
        if items and len(group) > items:
            yield f"  and {len(group) - items} more"
        if traceback:
            yield from (f"  | {escape_controls(line)}" for line in first.traceback.splitlines())


def _backfill_failures(summary: RunSummary) -> list[RecordedFailure]:
    """The rows of a column that have failed and were not computed since."""
    from dovetail.backfill.table import Table

    return [
        RecordedFailure(
            unit=summary.column,
            stage=summary.column,
            error=row.error,
            message=row.message,
            place=row.place,
            traceback=row.traceback,
        )
        for row in Table(summary.table).errors(summary.column)
    ]
