"""`dovetail ls`: list runs."""

from __future__ import annotations

import json
import shlex
import time
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli.colour import paint
from dovetail.cli.options import json_option
from dovetail.cli.run_filter import RunFilter, Since, filter_options, run_entry, since_wall
from dovetail.observe.run_folder import list_runs, runs_folder, short_run_id
from dovetail.observe.terminal import terminal_width
from dovetail.text_format import (
    MIN_CUT_CHARS,
    align_table,
    cut_text,
    format_duration,
    format_number,
    format_rate,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEFAULT_LIMIT = 20
STATUS_STYLES = {"running": "good", "failed": "bad", "lost": "bad", "cancelled": "warning"}
LEFT_ALIGNED = ("run", "name", "kind", "engine", "status")
FIRST_TO_OMIT = ("engine", "kind", "items/s")


@click.command(
    epilog="""\b
Examples:
  dovetail ls
  dovetail ls --status running
  dovetail ls --name video --since 2d
  dovetail ls --kind backfill --limit 100
  dovetail ls --status failed --json | jq -r '.[].id'
"""
)
@filter_options()
@click.option(
    "--since", metavar="TIME", type=Since(), help="Started within this time (12h, 7d), or since a date (2026-11-16)."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Maximum number of runs.  [default: {DEFAULT_LIMIT}; all with --json]",
)
@json_option("Print the runs as JSON.")
def ls(
    name: str | None,
    statuses: tuple[str, ...],
    kinds: tuple[str, ...],
    since: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List the runs in $DOVETAIL_HOME, latest first.

    In a narrow terminal, ids are shown without the name and some columns are omitted. Any unique part of an id is
    enough to name a run.
    """
    wall = time.time()
    wanted = RunFilter(name, statuses, kinds)
    earliest = None if since is None else since_wall(since, wall)
    runs = list_runs()
    limit = limit or (None if as_json else DEFAULT_LIMIT)
    is_filtered = bool(wanted) or earliest is not None
    found = [
        entry
        for entry in (run_entry(run, wall) for run in (runs if is_filtered else runs[:limit]))
        if wanted.accepts(entry) and (earliest is None or _has_started_since(entry, wall, earliest))
    ]
    if as_json:
        click.echo(json.dumps(found[:limit], indent=2))
        return
    if not found:
        click.echo(f"no runs{' match' if is_filtered else ''} in {runs_folder()}", err=True)
        return
    _print_table(found[:limit])
    total = len(found) if is_filtered else len(runs)
    if limit is not None and total > limit:
        options = _given_options(name, statuses, kinds, since)
        more = shlex.join(["dovetail", "ls", *options, "--limit", str(total)])
        click.echo(f"{total - limit} older runs not shown: {more}", err=True)


def _has_started_since(entry: dict[str, Any], wall: float, earliest: float) -> bool:
    return entry["age_s"] is not None and wall - entry["age_s"] >= earliest


def _given_options(name: str | None, statuses: Sequence[str], kinds: Sequence[str], since: str | None) -> Iterator[str]:
    pairs = [("--name", name), *(("--status", it) for it in statuses), *(("--kind", it) for it in kinds)]
    for option, value in (*pairs, ("--since", since)):
        if value is not None:
            yield from (option, value)


def _print_table(entries: list[dict[str, Any]]) -> None:
    columns = fit_columns([_cells(entry) for entry in entries], terminal_width())
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    left = sum(name in LEFT_ALIGNED for name in columns)
    place = list(columns).index("status")
    for row, line in zip(rows, align_table(rows, left=left), strict=True):
        click.echo(_coloured(line, row[place]))


def _coloured(line: str, status: str) -> str:
    before, found, after = line.rpartition(status)  # from the right: the name of a run may be a status
    return f"{before}{paint(found, STATUS_STYLES[status])}{after}" if status in STATUS_STYLES else line


def fit_columns(rows: list[dict[str, str]], width: int) -> dict[str, list[str]]:
    """Columns of a table that is at most `width` wide: first ids lose their name, then columns are omitted, then
    names are cut."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if set(columns["kind"]) == {"pipeline"}:
        del columns["kind"]
    if _excess(columns, width) > 0:
        columns["run"] = [short_run_id(text) for text in columns["run"]]
    for name in FIRST_TO_OMIT:
        if _excess(columns, width) > 0 and name in columns:
            del columns[name]
    excess = _excess(columns, width)
    if excess > 0:
        limit = max(MIN_CUT_CHARS, max(map(len, columns["name"])) - excess)
        columns["name"] = [cut_text(text, limit) for text in columns["name"]]
    return columns


def _excess(columns: dict[str, list[str]], width: int) -> int:
    widths = [max(len(text) for text in (name, *texts)) for name, texts in columns.items()]
    return sum(widths) + 2 * (len(widths) - 1) - width


def _cells(entry: dict[str, Any]) -> dict[str, str]:
    total = entry["total"]
    items = format_number(entry["items"])
    items += f" of {format_number(total)}" if isinstance(total, int) and total != entry["items"] else ""
    items += "" if entry["unit"] == "items" else f" {entry['unit']}"
    return {
        "run": entry["id"],
        "name": entry["name"],
        "kind": entry["kind"],
        "engine": entry["engine"],
        "status": entry["status"],
        "age": "-" if entry["age_s"] is None else format_duration(entry["age_s"]),
        "items": items,
        "items/s": format_rate(entry["rate"]),
    }
