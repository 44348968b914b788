"""`dovetail run --dry-run`: check code, source, sink and plan without starting or writing anything."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli.engine_option import target_cluster
from dovetail.cli.run_report import sink_names
from dovetail.cli.run_spec_loader import fit_to_cluster, infeasible_error_for_file, recipe_of
from dovetail.cli.saved_plan import read_plan
from dovetail.control.payload import BLANK_ROW, BadRow, SourceSinkError
from dovetail.errors import short_repr
from dovetail.observe.terminal import terminal_width
from dovetail.recipes.column_check import missing_columns, sample_rows
from dovetail.runtime.run_spec import import_errors, open_source_and_sink
from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds
from dovetail.scheduling.plan_report import headline_lines, unit_table

if TYPE_CHECKING:
    from dovetail.cli.saved_arguments import RunArguments
    from dovetail.runtime.run_spec import RunSpec

EMPTY_SOURCE = object()


@dataclass(frozen=True, slots=True)
class SourceSample:
    """A source, and its first row."""

    description: str
    rows: int | None
    """None: not known without reading it."""
    first: object

    def lines(self) -> list[str]:
        total = "" if self.rows is None else f", {self.rows} rows"
        return [f"source      {self.description}{total}", f"first row   {self._first_text()}"]

    def to_dict(self) -> dict[str, object]:
        first = None if self.first is EMPTY_SOURCE else self._first_text()
        return {"source": self.description, "rows": self.rows, "first_row": first}

    def _first_text(self) -> str:
        if isinstance(self.first, BadRow):
            return f"cannot be parsed: {self.first.place}: {self.first.error_text}"
        return "none: the source is empty" if self.first is EMPTY_SOURCE else short_repr(self.first)


def dry_run(
    job: RunSpec, asked: RunArguments, engine: str, plan_file: str | None, again: str, *, as_json: bool = False
) -> None:
    """Prints the plan, or raises a ConfigError with everything that would fail."""
    recipe = recipe_of(job)
    problems = import_errors(job) if recipe is None else recipe.unready()
    source: Any = None
    sample: SourceSample | None = None
    try:
        source, _ = open_source_and_sink(job)
        sample = _sample_source(source, asked.limit) if source is not None else None
        if recipe is not None and source is not None:
            problems += missing_columns(recipe, sample_rows(recipe.source))
    except dt.DovetailError as error:
        problems += error.problems
    except SourceSinkError as error:
        problems.append(dt.Problem(error.code, error.message, fixes=(error.fix,), place=error.place))
    except Exception as error:  # the user's generator
        message = f"the source raised at its first item: {type(error).__name__}: {error}"
        problems.append(dt.Problem("DT363", message, fixes=("fix the function named by `source: {run: ...}`",)))
    problems += [problem for path in _sink_paths(job.sink) for problem in _sink_errors(path)]
    if problems:
        raise dt.ConfigError(problems)
    on = target_cluster(engine, asked.cluster)
    job = fit_to_cluster(job, on.cluster)
    profiles = load_profiles(job.pipeline, on.cluster, *source_sink_kinds(job)) if plan_file is None else {}
    try:
        plan = (
            on.plan(partial(dt.plan, job.pipeline, mode=asked.mode or job.mode, profiles=profiles), asked.share)
            if plan_file is None
            else read_plan(plan_file, job.pipeline, on.cluster, again)
        )
    except dt.InfeasibleError as error:
        raise infeasible_error_for_file(error, job, on.cluster, asked.mode, on_ray=on.on_ray, is_real=True) from None
    plan = replace(job, ordered=job.ordered if asked.ordered is None else asked.ordered).complete_plan(plan)
    sinks = sink_names(job.sink) or ["a function" if job.sink else "stdout, one JSON value per line"]
    if as_json:
        about = {**(sample.to_dict() if sample else {}), "sinks": sinks, "notes": list(plan.notes[1:])}
        click.echo(json.dumps({"plan": plan.to_dict(), **about}, indent=2))
        return
    lines = [*(sample.lines() if sample else ()), *(f"sink        {name}" for name in sinks)]
    for line in [*headline_lines(plan), "", *unit_table(plan, terminal_width()), "", *lines]:
        click.echo(line)
    for line in [*(f"note: {note}" for note in plan.notes[1:]), *on.usage_lines()]:
        click.echo(line)
    click.echo(f"\n{len(job.pipeline)} stages were imported; nothing was started or written", err=True)


def _sample_source(source: Any, limit: int | None) -> SourceSample:
    """Kind, size and first row of the source, read as a worker reads it."""
    from dovetail.data.sources import open_source

    cursor = open_source(source, limit)
    if cursor is None:
        return SourceSample(type(source).__name__, None, next(iter(source), EMPTY_SOURCE))
    try:
        first: object = BLANK_ROW
        while first is BLANK_ROW:
            split = cursor.take(1)
            first = EMPTY_SOURCE if split is None else split.read()[0]
        return SourceSample(cursor.describe(), cursor.total, first)
    finally:
        cursor.close()


def _sink_paths(sink: Any) -> Iterator[tuple[str, bool]]:
    """(path, whether it must not exist) of every sink on this machine."""
    if isinstance(sink, str):
        sink = {"path": sink}
    if isinstance(sink, Mapping):
        for part in sink.get("stages", {}).values():
            yield from _sink_paths(part)
        if "path" in sink and "://" not in sink["path"]:
            yield sink["path"], sink.get("exists") == "fail"


def _sink_errors(sink: tuple[str, bool]) -> Iterator[dt.Problem]:
    path, must_be_new = Path(sink[0]), sink[1]
    fix = "choose a file in a writable folder"
    with suppress(OSError):
        if must_be_new and path.exists():
            yield dt.Problem(
                "DT025",
                "file exists, and the sink has exists: fail",
                fixes=("--set sink.exists=replace",),
                place=str(path),
            )
        if path.is_dir() and path.suffix != ".lance":
            yield dt.Problem("DT025", "is a folder, not a file", fixes=(fix,), place=str(path))
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        yield dt.Problem("DT025", f"cannot be written: {folder} is not a folder", fixes=(fix,), place=str(path))
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield dt.Problem("DT025", f"cannot be written: no write permission in {folder}", fixes=(fix,), place=str(path))
