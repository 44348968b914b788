"""`dovetail backfill`: fill columns of a Lance table with functions, and list, retry or drop what they filled."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli import SuggestingGroup
from dovetail.cli.backfill_options import (
    fill_options,
    parsed_command,
    selection_options,
    table_arguments,
    trust_option,
)
from dovetail.cli.colour import paint
from dovetail.cli.options import json_option
from dovetail.errors import Call, nearest_word
from dovetail.text_format import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dovetail.backfill.result import BackfillResult
    from dovetail.cli.backfill_renderer import BackfillRenderer

COMMAND_BY_FLAG = {
    "--plan": "plan",
    "--errors": "errors",
    "--retry-errors": "retry",
    "--history": "history",
    "--drop": "drop",
}
"""Options of `dovetail backfill TABLE COLUMN` in version 0.1 -> the command that replaces them."""


class BackfillGroup(SuggestingGroup):
    """A group that translates commands of version 0.1, which had no subcommands."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """In the order of their use."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and self._is_earlier_form(args):
            message = f"`dovetail backfill` takes a command before the table: {', '.join(self.commands)}"
            words = args[1:] if args[0] in self.commands else args
            raise dt.ConfigError(dt.Problem("DT367", message, fixes=(translate_earlier_form(words),)))
        return super().parse_args(ctx, args)

    def _is_earlier_form(self, words: Sequence[str]) -> bool:
        """Whether a table comes first, or there is an option that is a command now."""
        if not COMMAND_BY_FLAG.keys().isdisjoint(words):
            return True
        if len(words) < 2 or words[0] in self.commands or words[0].startswith("-"):
            return False
        return nearest_word(words[0], self.commands) is None


def translate_earlier_form(words: Sequence[str]) -> str:
    """The command that does the same as `dovetail backfill WORDS` in version 0.1."""
    commands = [COMMAND_BY_FLAG[word] for word in words if word in COMMAND_BY_FLAG]
    rest = [word for word in words if word not in COMMAND_BY_FLAG]
    return shlex.join(["dovetail", "backfill", *(commands[:1] or ["run"]), *rest])


@click.group(
    cls=BackfillGroup,
    epilog="""\b
Examples:
  dovetail backfill plan clips.lance length --udf functions:length
  dovetail backfill run clips.lance length --udf functions:length
  dovetail backfill errors clips.lance length
  dovetail backfill retry clips.lance length --udf functions:length
  dovetail backfill history clips.lance
""",
)
def backfill() -> None:
    """Fill columns of a Lance table with functions.

    Several columns that one function returns are written a,b.
    """


@backfill.command(
    epilog="""\b
Examples:
  dovetail backfill run clips.lance length --udf functions:length
  dovetail backfill run clips.lance length --trust-table
  dovetail backfill run clips.lance width,height --udf functions:size
  dovetail backfill run clips.lance length --trust-table --max-errors 1%
  dovetail backfill run clips.lance length --udf functions:length \\
    --where "length IS NULL" --workers 4
  dovetail backfill run s3://bucket/clips.lance length --trust-table \\
    --storage-option aws_region=eu-west-1

Modules in the current folder can be imported. The table stores the name of the function, which is loaded only with
--trust-table: anyone who can write to the table can change it. Rows that are filled are not computed again unless the
function or its input changed, or with --recompute. Readers see finished fragments while it runs.

Ctrl-C or SIGTERM once finishes and keeps the work in flight; twice stops at once. Either way, and after any kill, run
the same command again to resume.

Exit codes: 0 finished, 1 a row or the run failed, 2 usage or configuration, 3 does not fit, 5 engine unreachable,
130 interrupted (143 by SIGTERM).
"""
)
@table_arguments()
@fill_options
@trust_option
@selection_options
@json_option("Print the result as JSON.")
def run(table: str, column: str, as_json: bool, **options: Any) -> None:
    """Compute the missing rows of COLUMN with a function."""
    with parsed_command("run", table, column, **options) as command:
        _run_and_report(
            lambda: command.table.backfill(command.columns, command.udf, progress=True, **command.arguments),
            command.renderer,
            as_json=as_json,
        )


@backfill.command(
    epilog="""\b
Examples:
  dovetail backfill plan clips.lance length --udf functions:length
  dovetail backfill plan clips.lance length --udf functions:length --no-sample
  dovetail backfill plan clips.lance length --trust-table --cluster nodes.yaml
"""
)
@table_arguments()
@fill_options
@selection_options
@click.option("--no-sample", is_flag=True, help="Do not run the function on sample rows.")
@json_option("Print the plan as JSON.")
def plan(table: str, column: str, no_sample: bool, as_json: bool, **options: Any) -> None:
    """Show the work, workers and time of a run; change nothing.

    A few rows are computed to measure the speed, and discarded.
    """
    with parsed_command("plan", table, column, **options) as command:
        found = command.table.plan_backfill(command.columns, command.udf, sample=not no_sample, **command.arguments)
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))


@backfill.command(
    epilog="""\b
Examples:
  dovetail backfill errors clips.lance length
  dovetail backfill errors clips.lance length --json | jq .message
"""
)
@table_arguments()
@json_option("Print one JSON object per row, with its traceback.")
def errors(table: str, column: str, as_json: bool, **options: Any) -> None:
    """List the rows of COLUMN that failed and are NULL."""
    with parsed_command("errors", table, column, **options) as command:
        rows = command.table.errors(command.columns[0])
        command.renderer.udf = command.table.stored_reference(command.columns[0])
    for row in rows:
        click.echo(json.dumps(asdict(row)) if as_json else f"{row.place}: {row.error}: {row.message}")
    if as_json:
        return
    retry_command = command.renderer.call(Call("table.retry_errors", (command.columns[0],)))
    failed = f"{format_count(len(rows), 'row')} failed; correct the function, then: {retry_command}"
    click.echo(failed if rows else "no failed rows", err=True)


@backfill.command(
    epilog="""\b
Examples:
  dovetail backfill retry clips.lance length --udf functions:length
  dovetail backfill retry clips.lance length --trust-table --on-error skip

Other rows keep their values. If the function changed, they still count as computed by its earlier version, and the
next `dovetail backfill run` computes them again.
"""
)
@table_arguments()
@fill_options
@trust_option
@json_option("Print the result as JSON.")
def retry(table: str, column: str, as_json: bool, **options: Any) -> None:
    """Compute only the rows of COLUMN that failed, again."""
    with parsed_command("retry", table, column, **options) as command:
        _run_and_report(
            lambda: command.table.retry_errors(command.columns[0], command.udf, progress=True, **command.arguments),
            command.renderer,
            as_json=as_json,
        )


@backfill.command(
    epilog="""\b
Examples:
  dovetail backfill history clips.lance
  dovetail backfill history clips.lance length --json | jq -r .status
"""
)
@table_arguments(column_required=False)
@json_option("Print one JSON object per backfill.")
def history(table: str, column: str | None, as_json: bool, **options: Any) -> None:
    """List the backfills of COLUMN, or of all columns, oldest first."""
    with parsed_command("history", table, column, **options) as command:
        jobs = command.table.history(command.columns[0] if command.columns else None)
    for job in jobs:
        click.echo(json.dumps(asdict(job)) if as_json else str(job))
    if not jobs and not as_json:
        click.echo("no backfills", err=True)


@backfill.command(
    epilog="""\b
Examples:
  dovetail backfill drop clips.lance length
  dovetail backfill drop clips.lance width,height

A column that Dovetail did not create is removed only with --force. Older versions of the table contain a removed column
until Lance cleans them up.
"""
)
@table_arguments()
@click.option("--force", is_flag=True, help="Remove the column even if Dovetail did not create it.")
def drop(table: str, column: str, force: bool, **options: Any) -> None:
    """Remove COLUMN, and the records of its backfills, from the table."""
    with parsed_command("drop", table, column, **options) as command:
        dropped = command.table.drop(command.columns, force=force)
    for one in dropped:
        click.echo(f"removed {one}", err=True)


def _run_and_report(fill: Callable[[], BackfillResult], renderer: BackfillRenderer, *, as_json: bool) -> None:
    """Run it and print the result; the exit code shows an interruption."""
    with _sigterm_as_ctrl_c() as by:
        try:
            result = fill()
        except KeyboardInterrupt:
            click.echo("interrupted; finished work is kept. Run the same command again to resume.", err=True)
            sys.exit(128 + by[-1])
    click.echo(json.dumps(_result_json(result, renderer), indent=2) if as_json else result.render(renderer, paint))
    if result.status != "finished":
        click.echo("stopped early. Run the same command again to resume.", err=True)
        sys.exit(128 + by[-1])


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """Make SIGTERM act like Ctrl-C, which the run handles. Yields the signals received; the last one is the cause."""
    by = [int(signal.SIGINT)]

    def caught(number: int, _: object) -> None:
        by.append(number)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGTERM)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, caught)
    try:
        yield by
    finally:
        signal.signal(signal.SIGTERM, before)


def _result_json(result: BackfillResult, renderer: BackfillRenderer) -> dict[str, Any]:
    data = asdict(result) | {"folder": None if result.folder is None else str(result.folder)}
    data |= {"notes": [renderer.text(note) for note in result.notes]}
    return data | {"rows_per_s": result.rows_per_s, "slowest": result.slowest if result.rows else None}
