"""`dovetail backfill`: compute a column of a Lance table with a function."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import dovetail as dt
from dovetail.backfill.arguments import validate_arguments
from dovetail.backfill.udf import load_udf
from dovetail.cli.backfill_surface import BackfillSurface
from dovetail.cli.engine_option import LOCAL, engine_conflicts, engine_option
from dovetail.errors import Problem
from dovetail.observe.text_format import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dovetail.backfill.result import BackfillResult
    from dovetail.backfill.table import Table
    from dovetail.backfill.udf import Udf

ACTIONS = ("plan", "errors", "retry_errors", "history", "drop")
"""Options that replace filling the column by another action."""
ALIASES = {"concurrency": "workers", "intra_applier_concurrency": "slots", "num_frags": "fragments"}
"""Geneva's spelling of an option -> ours."""
COMMON_OPTIONS = ("table", "column", "storage_options")
FILL_OPTIONS: tuple[str, ...] = (
    *("udf", "workers", "batch_size", "slots", "on_error", "retry", "max_errors", "timeout", "commit_every"),
    *("engine", "cluster", "share", "env_from", "no_wait", "as_json"),
)
NUMBER_OPTIONS = ("batch_size", "max_errors", "timeout", "commit_every", "share")
SELECTION_OPTIONS = ("where", "fragments", "recompute")
OPTIONS_BY_ACTION: dict[str, tuple[str, ...]] = {
    "": (*FILL_OPTIONS, *SELECTION_OPTIONS),
    "plan": (*FILL_OPTIONS, *SELECTION_OPTIONS, "no_sample"),
    "retry_errors": FILL_OPTIONS,
    "errors": ("as_json",),
    "history": ("as_json",),
    "drop": (),
}
"""Options that each action accepts."""


@click.command(
    epilog="""\b
Examples:
  dovetail backfill clips.lance length --udf functions:length --plan
  dovetail backfill clips.lance length --udf functions:length
  dovetail backfill clips.lance length
  dovetail backfill clips.lance width,height --udf functions:size --workers 4 --on-error skip --max-errors 1%
  dovetail backfill clips.lance length --where "length IS NULL" --fragments 10
  dovetail backfill clips.lance length --errors --json | jq .message
  dovetail backfill clips.lance length --retry-errors
  dovetail backfill s3://bucket/clips.lance length --storage-option aws_region=eu-west-1 --engine ray:auto
  dovetail backfill clips.lance --history

The function is named once; modules in the current folder can be imported. Rows that are filled are not computed
again unless the function or its input changed, or with --recompute. Readers see finished fragments while it runs.

Ctrl-C or SIGTERM once finishes and keeps the work in flight; twice stops at once. Either way, and after any kill, run
the same command again to resume.

Exit codes: 0 finished, 1 a row or the run failed, 2 usage or configuration, 3 does not fit, 5 engine unreachable,
130 interrupted (143 by SIGTERM).
"""
)
@click.argument("table")
@click.argument("column", required=False)
@click.option("--udf", metavar="MODULE:NAME", help="The function or class; required the first time.")
@click.option("--plan", is_flag=True, help="Show the work, the workers and the estimated time; start nothing.")
@click.option("--no-sample", is_flag=True, help="With --plan: do not run the function on sample rows.")
@click.option("--errors", is_flag=True, help="List the rows that failed.")
@click.option("--retry-errors", is_flag=True, help="Compute only the rows that failed, again.")
@click.option("--history", is_flag=True, help="List the backfills of COLUMN, or of all columns.")
@click.option("--drop", is_flag=True, help="Remove the column and its records beside the table.")
@click.option(
    "--workers", metavar="auto|N|MIN-MAX", help="Number of workers; fewer if they do not fit.  [default: auto]"
)
@click.option("--batch-size", metavar="N", help="Rows per call of a function of arrays or batches.")
@click.option("--slots", metavar="N", help="Concurrent calls per worker.")
@click.option("--where", metavar="SQL", help="Compute only rows that match; other rows keep their values.")
@click.option(
    "--fragments",
    metavar="N|ID,ID,...",
    help="How many unfinished fragments to process, or a list of ids (a single id: `3,`).",
)
@click.option("--recompute", is_flag=True, help="Compute rows that are already filled again.")
@click.option("--on-error", metavar="fail|skip", help="When a row fails: stop, or leave it NULL and record the error.")
@click.option(
    "--retry",
    multiple=True,
    metavar="EXCEPTION",
    help="Retry rows that raise this exception (* for any); may be repeated.",
)
@click.option("--max-errors", metavar="N|P%", help="Stop when more rows, or a larger percentage of them, fail.")
@click.option("--timeout", metavar="30s", help="Time limit per row.")
@click.option("--commit-every", metavar="10s", help="How often finished fragments are committed.")
@engine_option(LOCAL, later=True)
@click.option("--cluster", metavar="SPEC", help="Resources to use: a spec, a file, or auto (this machine).")
@click.option("--share", metavar="FRACTION", help="Use at most this fraction of a cluster, such as 0.5.")
@click.option("--env-from", multiple=True, metavar="NAME", help="Pass this variable to the workers; may be repeated.")
@click.option("--no-wait", is_flag=True, help="Fail instead of waiting if another backfill holds the column.")
@click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the object store; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--concurrency", hidden=True)
@click.option("--intra-applier-concurrency", hidden=True)
@click.option("--num-frags", hidden=True)
@click.pass_context
def backfill(context: click.Context, /, table: str, column: str | None, **options: Any) -> None:
    """Compute the missing rows of COLUMN of the Lance table TABLE with a function. Finished fragments are visible at
    once. Several columns that one function returns are written a,b."""
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    problems: list[Problem] = []
    action = _action(options, given, column, problems)
    surface = BackfillSurface(table, column or "COLUMN", action)
    arguments, storage = _backfill_arguments(options, problems)
    try:
        function = _load_function(options["udf"], problems)
        found, names = _open_table(table, storage, column, problems)
        problems += _column_errors(table, column, names, options["udf"]) if found is not None else []
        if found is None or problems:
            raise dt.ConfigError(problems)
        _HANDLERS[action](found, names, arguments, options | {"udf": function, "surface": surface})
    except dt.DovetailError as error:
        raise surface.error(error) from None


def _action(options: dict[str, Any], given: set[str], column: str | None, problems: list[Problem]) -> str:
    """The action that was given; "": fill the column."""
    actions = [name for name in ACTIONS if options[name]]
    action = actions[0] if actions else ""
    found = [f"{' and '.join(map(_flag, actions))} cannot be combined"] if len(actions) > 1 else []
    takes = {*COMMON_OPTIONS, *ACTIONS, *(name for one in actions or [""] for name in OPTIONS_BY_ACTION[one])}
    strange = [name for name in options if name in given and ALIASES.get(name, name) not in takes]
    if strange:
        what = f"with {' or '.join(map(_flag, actions))}" if actions else "without --plan"
        found.append(f"{', '.join(map(_flag, strange))} {'has' if len(strange) == 1 else 'have'} no effect {what}")
    for other, name in ALIASES.items():
        if options[other] is not None and options[name] is not None and options[other] != options[name]:
            found.append(f"{_flag(name)} and {_flag(other)} are the same option with different values")
    problems += [Problem("DT367", message, fixes=("leave one of them out",)) for message in found]
    if not found and column is None and action != "history":
        raise click.MissingParameter(param_type="argument", param_hint="COLUMN")
    return action


def _flag(name: str) -> str:
    return "--json" if name == "as_json" else f"--{name.replace('_', '-')}"


# --- parsing of options into the arguments of `dt.table` and its methods


def _backfill_arguments(options: dict[str, Any], problems: list[Problem]) -> tuple[dict[str, Any], dict[str, str]]:
    """The arguments of `Table.backfill` that were given, and the storage options."""
    arguments = {name: options[name] for name in ("where", "engine", "cluster")}
    arguments |= {name: _parse_number(options[name]) for name in NUMBER_OPTIONS}
    for ours, read in (("workers", _parse_workers), ("slots", _parse_number), ("fragments", _parse_fragments)):
        theirs = next(other for other, name in ALIASES.items() if name == ours)
        name = theirs if options[ours] is None else ours
        arguments[name] = read(options[name])
    problems += engine_conflicts(options["engine"], options["cluster"])
    storage = _storage_options(options["storage_options"], problems)
    arguments["on_error"] = _error_policy(options["on_error"], options["retry"], problems)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    arguments |= {"recompute": True} if options["recompute"] else {}
    arguments |= {"wait": not options["no_wait"], "env_from": options["env_from"]}
    problems += validate_arguments(arguments)[1]
    return arguments, storage


def _load_function(reference: str | None, problems: list[Problem]) -> Udf | None:
    try:
        return None if reference is None else load_udf(reference)
    except dt.ConfigError as error:
        problems += error.problems
        return None


def _open_table(
    address: str, storage: dict[str, str], column: str | None, problems: list[Problem]
) -> tuple[Table | None, list[str]]:
    try:
        table = dt.table(address, storage)
        return table, _column_names(table, column)
    except dt.ConfigError as error:
        problems += error.problems
        return None, []


def _column_errors(address: str, column: str | None, names: list[str], udf: str | None) -> list[Problem]:
    if column is None or (all(names) and len({*names}) == len(names)):
        return []
    message = f"{column!r} is not a column name or a list of different names (a,b)"
    good = ",".join(name for name in dict.fromkeys(names) if name) or "length"
    fix = shlex.join(["dovetail", "backfill", address, good, *(() if udf is None else ("--udf", udf))])
    return [Problem("DT447", message, fixes=(fix,))]


def _storage_options(given: tuple[str, ...], problems: list[Problem]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    wrong = [text for text, (key, equals, _) in zip(given, pairs, strict=True) if not key.strip() or not equals]
    for text in wrong:
        message = f"--storage-option {shlex.quote(text)} is not KEY=VALUE"
        problems.append(Problem("DT437", message, fixes=("--storage-option aws_region=eu-west-1",)))
    return {key.strip(): value for key, _, value in pairs}


def _error_policy(then: str | None, retry: tuple[str, ...], problems: list[Problem]) -> Any:
    if not retry:
        return then
    try:
        return dt.Retry(*retry, then=then or "fail")  # type: ignore[arg-type]  # Retry checks it
    except dt.DovetailError as error:
        problems += error.problems
        return None


def _parse_number(text: str | None) -> int | float | str | None:
    """The number; a text that is none is returned as it is, and rejected by the argument checks."""
    for kind in (int, float):
        try:
            return None if text is None else kind(text)
        except ValueError:
            continue
    return text


def _parse_workers(text: str | None) -> int | float | str | tuple[Any, Any] | None:
    low, dash, high = (text or "").partition("-")
    return (_parse_number(low), _parse_number(high)) if dash and low else _parse_number(text)


def _parse_fragments(text: str | None) -> int | float | str | list[Any] | None:
    if text is None or "," not in text:
        return _parse_number(text)
    return [_parse_number(one.strip()) for one in text.split(",") if one.strip()]


def _column_names(table: Table, column: str | None) -> list[str]:
    """`a,b` names two columns, unless the table has a column of that name."""
    if column is None:
        return []
    return [column] if column in table.schema.names else [name.strip() for name in column.split(",")]


# --- actions


def _fill(table: Table, names: list[str], arguments: dict[str, Any], options: dict[str, Any]) -> None:
    _run_and_report(lambda: table.backfill(names, options["udf"], progress=True, **arguments), options)


def _retry(table: Table, names: list[str], arguments: dict[str, Any], options: dict[str, Any]) -> None:
    arguments = {name: value for name, value in arguments.items() if name not in SELECTION_OPTIONS}
    _run_and_report(lambda: table.retry_errors(names[0], options["udf"], progress=True, **arguments), options)


def _run_and_report(fill: Callable[[], BackfillResult], options: dict[str, Any]) -> None:
    """Run it and print the result; the exit code shows an interruption."""
    surface: BackfillSurface = options["surface"]
    with _sigterm_as_ctrl_c() as by:
        try:
            result = fill()
        except KeyboardInterrupt:
            click.echo("interrupted; finished work is kept. Run the same command again to resume.", err=True)
            sys.exit(128 + by[-1])
    click.echo(json.dumps(_result_json(result), indent=2) if options["as_json"] else result.render(surface))
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


def _result_json(result: BackfillResult) -> dict[str, Any]:
    data = asdict(result) | {"folder": None if result.folder is None else str(result.folder)}
    return data | {"rows_per_s": result.rows_per_s, "slowest": result.slowest if result.rows else None}


def _plan(table: Table, names: list[str], arguments: dict[str, Any], options: dict[str, Any]) -> None:
    plan = table.plan_backfill(names, options["udf"], sample=not options["no_sample"], **arguments)
    click.echo(json.dumps(plan.to_dict(), indent=2) if options["as_json"] else str(plan))


def _errors(table: Table, names: list[str], arguments: dict[str, Any], options: dict[str, Any]) -> None:  # noqa: ARG001
    rows = table.errors(names[0])
    for row in rows:
        place = f"row {row.row} (fragment {row.fragment}, offset {row.offset})"
        click.echo(json.dumps(asdict(row)) if options["as_json"] else f"{place}: {row.error}: {row.message}")
    if not options["as_json"]:
        summary = f"{format_count(len(rows), 'row')} failed; fix the function, then use --retry-errors"
        click.echo(summary if rows else "no failed rows", err=True)


def _history(table: Table, names: list[str], arguments: dict[str, Any], options: dict[str, Any]) -> None:  # noqa: ARG001
    jobs = table.history(names[0] if names else None)
    for job in jobs:
        click.echo(json.dumps(asdict(job)) if options["as_json"] else str(job))
    if not jobs and not options["as_json"]:
        click.echo("no backfills", err=True)


def _drop(table: Table, names: list[str], arguments: dict[str, Any], options: dict[str, Any]) -> None:  # noqa: ARG001
    table.drop(names)
    click.echo(f"removed: {', '.join(names)}; older versions of the table still contain it", err=True)


_HANDLERS: dict[str, Callable[[Table, list[str], dict[str, Any], dict[str, Any]], None]] = {
    "": _fill,
    "plan": _plan,
    "errors": _errors,
    "retry_errors": _retry,
    "history": _history,
    "drop": _drop,
}
