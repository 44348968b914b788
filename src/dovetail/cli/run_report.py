"""Output of `dovetail run`: results on stdout as JSON lines, summary, next commands and exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli.colour import paint, paint_error
from dovetail.cli.json_values import json_default
from dovetail.cli.run_spec_loader import recipe_of
from dovetail.engines.exception_summary import user_traceback
from dovetail.errors import DovetailError, Problem, RunError, short_repr
from dovetail.observe.run_folder import RunFolder, run_reference
from dovetail.observe.summary_text import RESUMABLE_STATUS, short_summary
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.runtime.failed_item_retry import has_retryable_items
from dovetail.text_format import LABEL_WIDTH

if TYPE_CHECKING:
    import dovetail as dt
    from dovetail.cli.signals import SignalHandler
    from dovetail.observe.summary import RunSummary
    from dovetail.runtime.run_spec import RunSpec

MIN_IMPROVABLE_S, MAX_NODES_TO_IMPROVE = 20.0, 100
"""Shorter runs, and runs on more nodes, get no advice: it is not worth it, or would take long."""
WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def print_rows(run: dt.Run) -> bool:
    """False: the reader closed the pipe (`| head`), and the run is cancelled."""
    encode = json.JSONEncoder(ensure_ascii=False, default=json_default).encode
    out = sys.stdout.buffer
    try:
        for item in run:
            out.write(_json_line(item, encode))
            out.flush()
    except BrokenPipeError:
        run.cancel("the reader of the results closed the pipe")
        # the rest of the buffer must not be written at exit: an error could not be reported then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    except OSError as error:
        if error.errno not in WRITE_ERRNOS:
            raise  # not about stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        message = f"results cannot be written to stdout: {error.strerror}"
        raise RunError(Problem("DT369", message, fixes=("--sink PATH on a disk with free space",))) from None
    return True


def _json_line(item: object, encode: Any) -> bytes:
    try:
        text: str = encode(item)
        return text.encode("utf-8", "surrogatepass") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        message = f"a result cannot be printed as JSON: {error}: {short_repr(item)}"
        fixes = ("return plain values (dict, list, str, int, float, bool, None) from the last stage",)
        raise RunError(Problem("DT369", message, fixes=fixes)) from None


STOP_TIMEOUT_S = 15.0
"""Time that a cancelled run has to stop."""


class OutputClosed(Exception):
    """The reader of stdout closed the pipe."""


def wait_for_results(run: dt.Run, *, to_stdout: bool) -> BaseException | None:
    """Waits for the end of the run; returns the error, if any."""
    try:
        if not to_stdout:
            run.wait()
        elif not print_rows(run):
            return OutputClosed()
    except Exception as error:
        if not run.done:
            run.cancel(f"{type(error).__name__} in the driver")
        return error
    return None


def report_run(
    stops: SignalHandler, job: RunSpec, error: BaseException | None, *, as_json: bool, more: Sequence[str] = ()
) -> int:
    """Prints the error and five lines about the run, then `more`; returns the exit code."""
    run = stops.run
    assert run is not None, "the run has not started"
    _wait_for_end(run)
    if isinstance(error, OutputClosed):
        return 0
    if isinstance(error, DovetailError):
        click.echo(paint_error(str(error_for_command_line(error, of_recipe=recipe_of(job) is not None))), err=True)
    elif error is not None and not isinstance(error, KeyboardInterrupt):
        click.echo("".join(user_traceback(error)).rstrip(), err=True)
    summary = run.stats
    if as_json:
        click.echo(json.dumps(summary.to_dict(), indent=2))
    summary_lines = short_summary(summary, _next_step(summary, job)).lines(paint)
    for line in [*summary_lines, *_improvement_lines(run, job), *more]:
        click.echo(line, err=True)
    if isinstance(error, DovetailError):
        return error.exit_code
    if error is not None and not isinstance(error, KeyboardInterrupt):
        return 1
    return {"finished": 0, "failed": 1}.get(summary.status, stops.exit_code)


class RunRenderer(OptionRenderer):
    """Fixes of a run that failed, as options of `dovetail run`."""

    def __init__(self, *, of_recipe: bool) -> None:
        super().__init__()
        self.of_recipe = of_recipe

    def set_option(self, stage: str, name: str, value: object) -> str:
        if name == "on_error" and self.of_recipe:
            return "--set skip_op_error=true"
        return super().set_option(stage, name, value)

    def option(self, name: str, value: object) -> str:
        if name == "on_error":
            return self.set_option("*", name, value)
        return super().option(name, "100%" if name == "max_errors" and value is None else value)


def error_for_command_line(error: DovetailError, *, of_recipe: bool = False) -> DovetailError:
    """The same error with fixes in the spelling of files and the command line."""
    return RunRenderer(of_recipe=of_recipe).error(error)


def _wait_for_end(run: dt.Run) -> None:
    end = time.monotonic() + STOP_TIMEOUT_S
    while not run.done and time.monotonic() < end:
        time.sleep(0.01)


def _next_step(summary: RunSummary, job: RunSpec) -> str:
    """What `next_command` cannot know: the options of the command line."""
    if summary.status in RESUMABLE_STATUS and job.sink is None:
        return "not resumable: results went to stdout; use --sink out.jsonl"
    if summary.status == "finished" and not summary.read:
        return "the source is empty; --source PATH reads another one"
    return ""


def _improvement_lines(run: dt.Run, job: RunSpec) -> list[str]:
    """Changes that would make the next run faster, as far as this one has measured its stages."""
    is_large = len(run.plan.cluster.nodes) > MAX_NODES_TO_IMPROVE
    if run.stats.status != "finished" or run.stats.seconds < MIN_IMPROVABLE_S or is_large or recipe_of(job) is not None:
        return []
    from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds
    from dovetail.scheduling.improvements import find_improvements
    from dovetail.scheduling.planner import plan

    profiles = load_profiles(job.pipeline, run.plan.cluster, *source_sink_kinds(job))
    made = plan(job.pipeline, run.plan.cluster, run.plan.requested, profiles=profiles)
    renderer = OptionRenderer(made.cluster)
    found = find_improvements(job.pipeline, made, profiles, nodes=False)  # no option of a run adds one
    lines = [line for one in found for line in one.lines(renderer)]
    return [f"{'' if number else 'faster':{LABEL_WIDTH}}{line}" for number, line in enumerate(lines)]


def sink_names(sink: Any) -> list[str]:
    """Names of the sinks, for messages."""
    if isinstance(sink, str):
        return [sink]
    if isinstance(sink, Mapping):
        if "stages" in sink:
            return [f"{name}: {text}" for name, part in sink["stages"].items() for text in sink_names(part)]
        return [str(sink["path"])] if "path" in sink else []
    return []


def resume_lines(summary: RunSummary, *, has_sink: bool) -> list[str]:
    """Commands that process the rest."""
    if summary.status in RESUMABLE_STATUS and not has_sink:
        return ["resume      not possible: results went to stdout; use --sink out.jsonl to make a run resumable"]
    if summary.status in RESUMABLE_STATUS:
        return [f"resume      dovetail run --resume {run_reference(summary.folder)}"]
    return retry_lines(summary) if has_sink else []


def retry_lines(summary: RunSummary) -> list[str]:
    """The command that processes failed items again, if one of them can be retried."""
    can_retry = summary.failed and summary.status == "finished"
    if not can_retry or not has_retryable_items(RunFolder(Path(summary.folder)).errors):
        return []
    run = run_reference(summary.folder)
    return [f"retry       dovetail run --retry-errors {run}   # process only the failed items"]
