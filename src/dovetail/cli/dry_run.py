"""dovetail run --dry-run: would it begin? Everything is looked at; nothing is started, nothing is written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli.engines import there
from dovetail.cli.loading import explained, on_cluster, recipe_of
from dovetail.cli.plan_check import read_plan
from dovetail.cli.run_ending import sink_names
from dovetail.control.splits import BLANK, BadRow, Unusable
from dovetail.errors import shown
from dovetail.recipes.sampling import missing_columns, sample
from dovetail.running.job import imported, opened
from dovetail.running.profiling import kinds_of, profiles_for
from dovetail.scheduling.narrate import headline, unit_table

if TYPE_CHECKING:
    from dovetail.cli.resuming import Asked
    from dovetail.running.job import Job

NOTHING = object()


def dry_run(job: Job, asked: Asked, engine: str, plan_file: str | None, again: str) -> None:
    """A ConfigError with everything that would go wrong, or what would be done, on stdout."""
    recipe = recipe_of(job)
    problems = imported(job) if recipe is None else recipe.unready()
    source: Any = None
    lines: list[str] = []
    try:
        source, _ = opened(job)
        lines = _source_lines(source, asked.limit) if source is not None else []
        if recipe is not None and source is not None:
            problems += missing_columns(recipe, sample(recipe.source))
    except dt.DovetailError as error:
        problems += error.problems
    except Unusable as error:
        problems.append(dt.Problem(error.code, error.message, fixes=(error.fix,), place=error.place))
    except Exception as error:  # the user's generator
        message = f"the source raised at its first item: {type(error).__name__}: {error}"
        problems.append(dt.Problem("DT363", message, fixes=("mend the function that `source: {run: ...}` names",)))
    problems += [problem for path in _sink_paths(job.sink) for problem in _unwritable(path)]
    if problems:
        raise dt.ConfigError(problems)
    on = there(engine, asked.cluster)
    job = on_cluster(job, on.cluster)
    profiles = profiles_for(job.pipeline, on.cluster, *kinds_of(job)) if plan_file is None else {}
    try:
        plan = (
            on.planned(partial(dt.plan, job.pipeline, mode=asked.mode or job.mode, profiles=profiles), asked.share)
            if plan_file is None
            else read_plan(plan_file, job.pipeline, on.cluster, again)
        )
    except dt.InfeasibleError as error:
        raise explained(error, job, on.cluster, asked.mode, on_ray=on.on_ray) from None
    sinks = sink_names(job.sink) or ["a function" if job.sink else "stdout, one JSON value per line"]
    for line in [*headline(plan), "", *unit_table(plan), "", *lines, *(f"sink        {name}" for name in sinks)]:
        click.echo(line)
    for line in [*(f"note: {note}" for note in plan.notes[1:]), *on.lines()]:
        click.echo(line)
    click.echo(f"\n{len(job.pipeline)} stages can be imported; nothing was started or written", err=True)


def _source_lines(source: Any, limit: int | None) -> list[str]:
    """What it is, how much, and its first row: read as a worker would, or taken from the iterable."""
    from dovetail.data.sources import open_source

    cursor = open_source(source, limit)
    if cursor is None:
        first = next(iter(source), NOTHING)
        return [f"source      {type(source).__name__}", *_first(first)]
    try:
        first = BLANK
        while first is BLANK:
            split = cursor.take(1)
            first = NOTHING if split is None else split.read()[0]
        total = "" if cursor.total is None else f", {cursor.total} rows"
        return [f"source      {cursor.describe()}{total}", *_first(first)]
    finally:
        cursor.close()


def _first(row: object) -> list[str]:
    if isinstance(row, BadRow):
        return [f"first row   is bad: {row.place}: {row.error_text}"]
    return ["first row   none: the source is empty" if row is NOTHING else f"first row   {shown(row)}"]


def _sink_paths(sink: Any) -> Iterator[tuple[str, bool]]:
    """(path, whether it must not be there) of every sink on this machine."""
    if isinstance(sink, str):
        sink = {"path": sink}
    if isinstance(sink, Mapping):
        for part in sink.get("stages", {}).values():
            yield from _sink_paths(part)
        if "path" in sink and "://" not in sink["path"]:
            yield sink["path"], sink.get("exists") == "fail"


def _unwritable(sink: tuple[str, bool]) -> Iterator[dt.Problem]:
    path, must_be_new = Path(sink[0]), sink[1]
    fix = "name a file in a folder that you may write"
    with suppress(OSError):
        if must_be_new and path.exists():
            yield dt.Problem("DT025", "is there already, and exists: fail", fixes=("exists: replace",), place=str(path))
        if path.is_dir() and path.suffix != ".lance":
            yield dt.Problem("DT025", "is a folder, not a file", fixes=(fix,), place=str(path))
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        yield dt.Problem("DT025", f"cannot be written: {folder} is not a folder", fixes=(fix,), place=str(path))
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield dt.Problem("DT025", f"cannot be written: you may not write in {folder}", fixes=(fix,), place=str(path))
