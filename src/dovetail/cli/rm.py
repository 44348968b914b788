"""`dovetail rm`: remove runs, by name or by age."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import click

import dovetail as dt
from dovetail.cli.options import complete_runs, json_option
from dovetail.cli.run_filter import Duration, RunFilter, filter_options, run_entry
from dovetail.observe.run_folder import RunFolder, find_run, list_runs
from dovetail.resources.sizes import format_size
from dovetail.runtime.run_removal import RunFiles, find_run_files, remove_run_files
from dovetail.text_format import align_table, format_count, format_duration

NOT_REMOVED = "DT307"


@dataclass(frozen=True, slots=True)
class Selected:
    """A run to remove."""

    entry: dict[str, Any]
    files: RunFiles

    def to_dict(self) -> dict[str, Any]:
        keys = ("id", "name", "kind", "status", "age_s", "folder")
        about = {key: self.entry[key] for key in keys}
        return {**about, "bytes": self.files.size_bytes, "other_files": list(self.files.others)}


@click.command(
    epilog="""\b
Examples:
  dovetail rm 20261116-0305
  dovetail rm --older-than 7d --dry-run
  dovetail rm --older-than 7d --keep 10 --yes
  dovetail rm --name video --status failed

\b
A run that is running is never removed. Files that the run wrote to its sink
stay; unfinished results are removed, so that the run cannot be resumed. In a
folder given by --run-dir, only files of Dovetail are removed.
"""
)
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_runs)
@click.option("--older-than", metavar="TIME", type=Duration(), help="Runs that ended longer ago than this: 12h, 7d.")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the N latest of the selected runs.")
@filter_options()
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask. Not needed if RUN is given.")
@json_option("Print the removed runs as JSON.")
def rm(
    runs: tuple[str, ...],
    older_than: float | None,
    keep: int | None,
    name: str | None,
    statuses: tuple[str, ...],
    kinds: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove RUNs, or all runs that the options select.

    RUN is an id, a name (its latest run), a part of id or name that only one run has, `last`, or a folder.
    """
    wanted = RunFilter(name, statuses, kinds)
    by_options = bool(wanted) or older_than is not None or keep is not None
    if bool(runs) == by_options:
        message = "a RUN and options that select runs cannot be combined" if runs else "no runs were selected"
        raise _error(message, "dovetail rm RUN", "dovetail rm --older-than 7d --dry-run")
    wall = time.time()
    if runs:
        selected = _named_runs(runs, wall)
    else:
        selected = _matching_runs(wanted, older_than, keep, wall)
        if selected and not (dry_run or yes):
            _confirm(selected)
    failures = [] if dry_run else _remove(selected)
    gone = [it for it in selected if it.files.run.id not in {run for run, _ in failures}]
    _report(gone, dry_run=dry_run, as_json=as_json)
    if failures:
        raise dt.ConfigError([dt.Problem(NOT_REMOVED, f"run {run} was not removed: {why}") for run, why in failures])


def _named_runs(names: tuple[str, ...], wall: float) -> list[Selected]:
    """The runs with these names; raises one error for all that cannot be removed."""
    found: dict[str, RunFolder] = {}
    problems: list[dt.Problem] = []
    for name in names:
        try:
            run = find_run(name)
        except dt.ConfigError as error:
            problems += error.problems
            continue
        found[str(run.path)] = run
    entries = [(run_entry(run, wall), run) for run in found.values()]
    problems += [_running_problem(entry) for entry, _ in entries if entry["status"] == "running"]
    if problems:
        raise dt.ConfigError(problems)
    return [Selected(entry, find_run_files(run)) for entry, run in entries]


def _running_problem(entry: dict[str, Any]) -> dt.Problem:
    message = f"run {entry['id']} is running: only a run that has ended can be removed"
    return dt.Problem(NOT_REMOVED, message, fixes=(f"dovetail drain {entry['id']} --wait",))


def _matching_runs(wanted: RunFilter, older_than: float | None, keep: int | None, wall: float) -> list[Selected]:
    found = [(entry, run) for run in list_runs() if wanted.accepts(entry := run_entry(run, wall))]
    return [
        Selected(entry, find_run_files(run))
        for entry, run in found[keep or 0 :]
        if entry["status"] != "running" and (older_than is None or entry["idle_s"] > older_than)
    ]


def _confirm(selected: list[Selected]) -> None:
    what = f"{format_count(len(selected), 'run')}, {format_size(_total_bytes(selected))}"
    if not _is_interactive():
        raise _error(
            f"this removes {what}, and stdin is not a terminal", "--dry-run to list them", "--yes to remove them"
        )
    for line in _lines(selected):
        click.echo(line, err=True)
    click.confirm(f"remove {what}?", abort=True, err=True)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _remove(selected: list[Selected]) -> list[tuple[str, str]]:
    """Removes the runs; (id, reason) of those that could not be removed."""
    failures = []
    for it in selected:
        try:
            remove_run_files(it.files)
        except OSError as error:
            failures.append((it.files.run.id, f"{error.filename}: {error.strerror}"))
        except dt.ConfigError as error:  # it was resumed meanwhile
            failures.append((it.files.run.id, error.problems[0].message))
    return failures


def _report(gone: list[Selected], *, dry_run: bool, as_json: bool) -> None:
    total = _total_bytes(gone)
    if as_json:
        data = {"dry_run": dry_run, "bytes": total, "removed": [it.to_dict() for it in gone]}
        click.echo(json.dumps(data, indent=2))
        return
    for line in _lines(gone):
        click.echo(line)
    did = "would remove" if dry_run else "removed"
    click.echo(f"{did} {format_count(len(gone), 'run')}, {format_size(total)}", err=True)
    for it in gone:
        if it.files.others:
            count = format_count(len(it.files.others), "other file or folder", "other files and folders")
            click.echo(f"note: {count} in {it.files.run.path} stay", err=True)


def _lines(selected: list[Selected]) -> list[str]:
    rows = []
    for it in selected:
        age = it.entry["age_s"]
        shown = "-" if age is None else format_duration(age)
        rows.append((it.entry["id"], it.entry["status"], shown, format_size(it.files.size_bytes)))
    return align_table([("run", "status", "age", "size"), *rows], left=2) if rows else []


def _total_bytes(selected: list[Selected]) -> int:
    return sum(it.files.size_bytes for it in selected)


def _error(message: str, *fixes: str) -> dt.ConfigError:
    return dt.ConfigError(dt.Problem(NOT_REMOVED, message, fixes=fixes))
