"""How does a run end, for whoever typed `dovetail run`? Results, what to look at next, an exit code."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli.loading import recipe_of
from dovetail.cli.rows import print_rows
from dovetail.errors import DovetailError
from dovetail.observe.naming import name_for
from dovetail.observe.summary_lines import next_lines, result_lines

if TYPE_CHECKING:
    import dovetail as dt
    from dovetail.cli.stops import Stops
    from dovetail.observe.summary import Summary
    from dovetail.running.job import Job

ENDING_S = 15.0
"""How long a run that was told to stop has for it."""


class NobodyReads(Exception):
    """Whoever read our output has enough of it."""


def until_the_end(run: dt.Run, *, to_stdout: bool) -> BaseException | None:
    """What went wrong, if something did."""
    try:
        if not to_stdout:
            run.wait()
        elif not print_rows(run):
            return NobodyReads()
    except Exception as error:
        if not run.done:
            run.cancel(f"{type(error).__name__} in the driver")
        return error
    return None


def tell(stops: Stops, job: Job, error: BaseException | None, *, as_json: bool) -> int:
    """Says how it went, and gives the exit code."""
    run = stops.run
    assert run is not None, "nothing is told of a run that did not begin"
    _wait_for_end(run)
    if isinstance(error, NobodyReads):
        return 0
    if isinstance(error, DovetailError):
        click.echo(str(as_typed(error, of_recipe=recipe_of(job) is not None)), err=True)
    elif error is not None and not isinstance(error, KeyboardInterrupt):
        click.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    told = run.stats
    if as_json:
        click.echo(json.dumps(told.to_dict(), indent=2))
    for line in [
        *result_lines(told),
        *_output_lines(told, job),
        "",
        *next_lines(told),
        *ways_on(told, has_sink=job.sink is not None),
    ]:
        click.echo(line, err=True)
    if isinstance(error, DovetailError):
        return error.exit_code
    if error is not None and not isinstance(error, KeyboardInterrupt):
        return 1
    return {"finished": 0, "failed": 1}.get(told.status, stops.exit_code)


def as_typed(error: DovetailError, *, of_recipe: bool = False) -> DovetailError:
    """In the words of files and the command line instead of Python's."""
    skip = "skip_op_error: true in the file" if of_recipe else "on_error: skip in the file"

    def typed(fix: str) -> str:
        if fix.startswith("max_errors=None, or a larger number;"):
            return "--max-errors with a larger number"
        return fix.replace('on_error="skip"', skip)

    return type(error)(replace(one, fixes=tuple(map(typed, one.fixes))) for one in error.problems)


def _wait_for_end(run: dt.Run) -> None:
    end = time.monotonic() + ENDING_S
    while not run.done and time.monotonic() < end:
        time.sleep(0.01)


def _output_lines(told: Summary, job: Job) -> list[str]:
    names = sink_names(job.sink)
    if told.status == "finished":
        return [f"output      {name}" for name in names]
    return [f"output      {name}: written when the run is complete; what is done so far is kept" for name in names]


def sink_names(sink: Any) -> list[str]:
    """Where results go, for people."""
    if isinstance(sink, str):
        return [sink]
    if isinstance(sink, Mapping):
        if "stages" in sink:
            return [f"{name}: {text}" for name, part in sink["stages"].items() for text in sink_names(part)]
        return [str(sink["path"])] if "path" in sink else []
    return []


def ways_on(told: Summary, *, has_sink: bool) -> list[str]:
    """What to type to have the rest."""
    run, lines = name_for(told.folder), []
    if told.status in ("failed", "drained", "cancelled", "lost"):
        lines.append(f"resume      dovetail run --resume {run}")
        if not has_sink:
            lines = ["resume      not possible: results went to stdout; with --sink out.jsonl a run can be resumed"]
    if told.aside and has_sink and told.status == "finished":
        lines.append(f"again       dovetail run --retry-errors {run}   # only what was set aside, once it is mended")
    return lines
