"""dovetail status: how one run is doing, or how it went."""

from __future__ import annotations

import json

import click

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
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def status(run: str, as_json: bool) -> None:
    """Show RUN: an id, the beginning of one, `last`, or a folder."""
    told = summary(History.load(find_run(run).path))
    if as_json:
        click.echo(json.dumps(told.to_dict(), indent=2))
        return
    for line in [*result_lines(told), *_latest("decisions", told.decisions), *_latest("errors", told.errors)]:
        click.echo(line)
    for line in ["", *next_lines(told)]:
        click.echo(line, err=True)


def _latest(what: str, entries: tuple[tuple[float, str], ...]) -> list[str]:
    if not entries:
        return []
    more = f", the last {SHOWN} of {len(entries)}" if len(entries) > SHOWN else ""
    return ["", f"{what}{more}", *(f"  {duration(t):>12}  {text}" for t, text in entries[-SHOWN:])]
