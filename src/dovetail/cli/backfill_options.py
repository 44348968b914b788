"""Options of the commands of `dovetail backfill`, parsed into arguments of `Table.backfill`."""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.backfill.arguments import validate_arguments
from dovetail.backfill.table import Table
from dovetail.backfill.udf import load_udf
from dovetail.cli.backfill_renderer import BackfillRenderer
from dovetail.cli.engine_option import LOCAL, engine_conflicts, engine_option
from dovetail.cli.options import FOLDER_PATH, complete_values
from dovetail.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.backfill.udf import Udf
    from dovetail.cli.options import Decorator

ALIASES = {"concurrency": "workers", "intra_applier_concurrency": "slots", "num_frags": "fragments"}
"""Geneva's spelling of an option -> ours."""
NUMBER_OPTIONS = ("batch_size", "max_errors", "timeout", "commit_every", "share")
FILL_OPTIONS: tuple[Decorator, ...] = (
    click.option("--udf", metavar="MODULE:NAME", help="The function or class."),
    click.option(
        "--workers", metavar="auto|N|MIN-MAX", help="Number of workers; fewer if they do not fit.  [default: auto]"
    ),
    click.option("--batch-size", metavar="N", help="Rows per call of a function of arrays or batches."),
    click.option("--slots", metavar="N", help="Concurrent calls per worker."),
    click.option(
        "--on-error",
        metavar="fail|skip",
        shell_complete=complete_values(("fail", "skip")),
        help="When a row fails: stop, or leave it NULL and record the error.",
    ),
    click.option(
        "--retry",
        multiple=True,
        metavar="EXCEPTION",
        help="Retry rows that raise this exception (* for any); may be repeated.",
    ),
    click.option("--max-errors", metavar="N|P%", help="Stop when more rows, or a larger percentage of them, fail."),
    click.option("--timeout", metavar="30s", help="Time limit per row."),
    click.option("--commit-every", metavar="10s", help="How often finished fragments are committed."),
    engine_option(LOCAL, later=True),
    click.option("--cluster", metavar="SPEC", help="Resources to use: a spec, a file, or auto (this machine)."),
    click.option("--share", metavar="FRACTION", help="Use at most this fraction of a cluster, such as 0.5."),
    click.option(
        "--env-from", multiple=True, metavar="NAME", help="Pass this variable to the workers; may be repeated."
    ),
    click.option("--no-wait", is_flag=True, help="Fail instead of waiting if another backfill holds the column."),
    click.option("--concurrency", hidden=True),
    click.option("--intra-applier-concurrency", hidden=True),
)
"""How a column is filled."""
TRUST_OPTION: Decorator = click.option(
    "--trust-table",
    is_flag=True,
    help="Without --udf, load the function that the table names; anyone who can write to the table can change it.",
)
SELECTION_OPTIONS: tuple[Decorator, ...] = (
    click.option("--where", metavar="SQL", help="Compute only rows that match; other rows keep their values."),
    click.option(
        "--fragments",
        metavar="N|ID,ID,...",
        help="How many unfinished fragments to process, or a list of ids (a single id: `3,`).",
    ),
    click.option("--recompute", is_flag=True, help="Compute rows that are filled again, and replace values of others."),
    click.option("--num-frags", hidden=True),
)
"""Which rows are filled."""


def fill_options(command: Any) -> Any:
    return _decorate(command, FILL_OPTIONS)


def trust_option(command: Any) -> Any:
    return TRUST_OPTION(command)


def selection_options(command: Any) -> Any:
    return _decorate(command, SELECTION_OPTIONS)


def table_arguments(*, column_required: bool = True) -> Decorator:
    """TABLE, COLUMN and the options of the store of the table."""
    storage = click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="KEY=VALUE",
        help="Option of the object store; may be repeated.",
    )
    table = click.argument("table", type=FOLDER_PATH)
    column = click.argument("column", required=column_required)
    return lambda command: _decorate(command, (table, column, storage))


def _decorate(command: Any, decorators: tuple[Decorator, ...]) -> Any:
    """Options are listed in the order in which they are given here."""
    return reduce(lambda decorated, decorator: decorator(decorated), reversed(decorators), command)


@dataclass(frozen=True, slots=True)
class BackfillCommand:
    """A command with parsed arguments."""

    renderer: BackfillRenderer
    table: Table
    columns: list[str]
    udf: Udf | None
    arguments: dict[str, Any]
    """Arguments of `Table.backfill` that were given."""


@contextmanager
def parsed_command(action: str, table: str, column: str | None, **options: Any) -> Iterator[BackfillCommand]:
    """Parse the command and report all mistakes at once. Errors are spelled as options and commands."""
    renderer = BackfillRenderer(
        table,
        column or "COLUMN",
        action,
        options.get("udf"),
        options["storage_options"],
        trust_table=options.get("trust_table", False),
    )
    try:
        yield _parse(renderer, column, options)
    except dt.DovetailError as error:
        raise renderer.error(error) from None


def _parse(renderer: BackfillRenderer, column: str | None, options: dict[str, Any]) -> BackfillCommand:
    problems: list[Problem] = []
    storage = _storage_options(options["storage_options"], problems)
    arguments = _backfill_arguments(options, problems) if "workers" in options else {}
    udf = _load_function(options.get("udf"), problems)
    table, names = _open_table(renderer, storage, column, problems)
    if table is not None:
        problems += _column_errors(renderer, column, names)
    if table is None or problems:
        raise dt.ConfigError(problems)
    return BackfillCommand(renderer, table, names, udf, arguments)


def _backfill_arguments(options: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    arguments = {name: options.get(name) for name in ("where", "engine", "cluster")}
    arguments |= {name: _parse_number(options[name]) for name in NUMBER_OPTIONS}
    for theirs, ours in ALIASES.items():
        if ours not in options:
            continue
        if None not in (options[theirs], options[ours]) and options[theirs] != options[ours]:
            message = f"{_flag(ours)} and {_flag(theirs)} are the same option with different values"
            problems.append(Problem("DT367", message, fixes=("leave one of them out",)))
        name = theirs if options[ours] is None else ours
        arguments[name] = PARSERS[ours](options[name])
    problems += engine_conflicts(options["engine"], options["cluster"])
    arguments["on_error"] = _error_policy(options["on_error"], options["retry"], problems)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    arguments |= {name: True for name in ("recompute", "trust_table") if options.get(name)}
    arguments |= {"wait": not options["no_wait"], "env_from": options["env_from"]}
    problems += validate_arguments(arguments)[1]
    return arguments


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _load_function(reference: str | None, problems: list[Problem]) -> Udf | None:
    try:
        return None if reference is None else load_udf(reference)
    except dt.ConfigError as error:
        problems += error.problems
        return None


def _open_table(
    renderer: BackfillRenderer, storage: dict[str, str], column: str | None, problems: list[Problem]
) -> tuple[Table | None, list[str]]:
    try:
        table = Table(renderer.table, storage, renderer=renderer)
        return table, _column_names(table, column)
    except dt.ConfigError as error:
        problems += error.problems
        return None, []


def _column_names(table: Table, column: str | None) -> list[str]:
    """`a,b` names two columns, unless the table has a column of that name."""
    if column is None:
        return []
    return [column] if column in table.schema.names else [name.strip() for name in column.split(",")]


def _column_errors(renderer: BackfillRenderer, column: str | None, names: list[str]) -> list[Problem]:
    if column is None or (all(names) and len({*names}) == len(names)):
        return []
    message = f"{column!r} is not a column name or a list of different names (a,b)"
    good = ",".join(name for name in dict.fromkeys(names) if name) or "length"
    udf = () if renderer.udf is None else ("--udf", renderer.udf)
    return [Problem("DT447", message, fixes=(renderer.command(renderer.action, good, *udf),))]


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


PARSERS = {"workers": _parse_workers, "slots": _parse_number, "fragments": _parse_fragments}
