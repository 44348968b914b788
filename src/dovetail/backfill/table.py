"""Table, the public API for columns of a Lance table: add, backfill, plan, list errors, retry, history, drop."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.backfill.arguments import BAD_BACKFILL_ARGUMENT, BackfillArguments, parse_arguments, validate_arguments
from dovetail.backfill.change_notes import null_condition
from dovetail.backfill.driver import BackfillDriver
from dovetail.backfill.lance_client import translate_write_errors
from dovetail.backfill.lance_table import LanceTable
from dovetail.backfill.lease import COLUMN_TAKEN, hold_leases
from dovetail.backfill.pending_work import unknown_fragment_problems
from dovetail.backfill.records import (
    BackfillRecord,
    ColumnRecord,
    Provenance,
    columns_filled_together,
    columns_to_read,
    delete_column_state,
    has_stored_state,
    make_column_record,
    read_backfills,
    read_column,
    write_column,
)
from dovetail.backfill.result import DroppedColumn, format_rows
from dovetail.backfill.row_retry import RowRetry, carry_over_errors, read_current_errors
from dovetail.backfill.schema_check import fill_other_column, unused_name
from dovetail.backfill.store import TableStore, column_folder
from dovetail.backfill.target import make_target
from dovetail.backfill.udf import Udf, load_udf
from dovetail.backfill.udf import udf as make_udf
from dovetail.backfill.worker_stage import plan_workers
from dovetail.engines.ray.address import is_ray_engine
from dovetail.errors import (
    PYTHON,
    Call,
    Change,
    ConfigError,
    DovetailError,
    Expression,
    Problem,
    RunError,
    Text,
    did_you_mean,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dovetail.backfill.estimate import BackfillPlan
    from dovetail.backfill.failed_rows import RowError
    from dovetail.backfill.result import BackfillResult
    from dovetail.backfill.target import FillTarget
    from dovetail.errors import Renderer
    from dovetail.pipeline.error_policy import ErrorPolicy, Retry
    from dovetail.pipeline.stage import Workers
    from dovetail.resources.cluster import Cluster

NO_COLUMN = "DT447"
COLUMN_EXISTS = "DT448"
NOT_CREATED = "DT450"
FOREIGN_VALUES = "DT451"
UNCONFIRMED_FUNCTION = "DT452"
CREATED_METADATA = {b"dovetail": b"created"}
"""Metadata of columns that Dovetail added. Lance keeps it until the column is dropped."""
RESERVED_NAMES = ("_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version")
"""Names that Lance reserves; a column of such a name makes the table unreadable."""


def table(uri: str | Path, storage_options: Mapping[str, str] | None = None) -> Table:
    """Open a Lance table: a folder, or "s3://bucket/clips.lance" with the storage options of Lance."""
    return Table(str(uri), storage_options)


class Table:
    """Columns of a Lance table: add, fill, list failed rows. Every call reads the newest version of the table."""

    def __init__(
        self, uri: str, storage_options: Mapping[str, str] | None = None, *, renderer: Renderer = PYTHON
    ) -> None:
        """`renderer`: the spelling of calls in the notes that a backfill prints."""
        found = LanceTable(uri, storage_options)
        self.uri, self._storage, self._renderer = found.uri, found.storage, renderer
        self._store = TableStore(self.uri, self._storage)
        self._given_functions: dict[str, Udf] = {}
        """Column -> function that the caller of this object passed for it."""

    def __repr__(self) -> str:
        return f"dt.table({self.uri!r})"

    def _newest(self) -> LanceTable:
        return LanceTable(self.uri, self._storage)

    @property
    def version(self) -> int:
        return self._newest().version

    @property
    def schema(self) -> Any:
        """The schema as a pyarrow.Schema."""
        return self._newest().schema

    # --- columns

    def add_column(self, name: str | Sequence[str], udf: Udf | Callable[..., Any] | str) -> None:
        """Add an empty column that `udf` fills; instant for tables of any size. A function that returns a NamedTuple
        fills several columns: pass their names as a list. Repeating the call has no effect, or replaces the
        function."""
        function, columns = _to_udf(udf), _check_column_names(name)
        found = self._newest()
        record = read_column(self._store, columns[0])
        problems = function.check(found.schema, columns)
        there = [column for column in columns if column in found.schema.names]
        if there and (record is None or record.columns != columns):
            message = f"the table already has a column {there[0]!r}"
            fix = Call("table.add_column", (unused_name(there[0], found.schema.names), Expression("udf")))
            problems.append(Problem(COLUMN_EXISTS, message, fixes=(fix,), place=self.uri))
        if problems:
            raise ConfigError(problems)
        self._add(found, function, columns, record)
        self._remember(function, columns)

    def _add(self, found: LanceTable, udf: Udf, columns: list[str], record: ColumnRecord | None) -> LanceTable:
        import pyarrow as pa

        missing = [
            pa.field(column, kind, metadata=CREATED_METADATA)
            for column, (_, kind) in zip(columns, udf.outputs(), strict=True)
            if column not in found.schema.names
        ]
        if missing:
            try:
                found = found.add_columns(missing)
            except DovetailError:  # another process may have added the same column
                found = found.newest()
                if any(one.name not in found.schema.names or found.schema.field(one.name) != one for one in missing):
                    raise
        write_column(
            self._store, make_column_record(udf, columns, columns_to_read(udf, found.schema.names, columns), record)
        )
        return found

    def drop(self, column: str | Sequence[str], *, force: bool = False) -> list[DroppedColumn]:
        """Remove a column from the table, and its records beside the table. Columns that Dovetail did not create are
        removed only with `force`."""
        names = _check_column_names(column)
        found = self._newest()
        there = found.schema.names
        problems = [
            self._no_column_problem(found, it)
            for it in names
            if it not in there and not has_stored_state(self._store, it)
        ]
        known = [read_column(self._store, name) for name in names]
        records = {record.folder: record for record in known if record is not None}.values()
        every = set(names)
        for record in records:
            together = columns_filled_together(self._store, record)
            left = [name for name in together if name in there]
            every.update(together)
            if set(left) - set(names):
                message = f"{', '.join(together)} are filled together, and only removed together"
                fix = f"name all of them, or none: {', '.join(left)}"
                problems.append(Problem(NO_COLUMN, message, fixes=(fix,), place=self.uri))
        existing = [name for name in names if name in there]
        dropped = [self._describe_drop(found, name) for name in existing]
        if not force:
            problems += [self._not_created_problem(one) for one in dropped if not one.created]
        if problems:
            raise ConfigError(problems)
        self._drop(found, existing, sorted(every))
        return dropped

    def _describe_drop(self, found: LanceTable, column: str) -> DroppedColumn:
        rows = sum(fragment.rows - fragment.deleted for fragment in found.fragments())
        kind = str(found.schema.field(column).type)
        return DroppedColumn(column, kind, rows, found.version, _is_created(found, column))

    def _not_created_problem(self, one: DroppedColumn) -> Problem:
        message = f"column {one.name!r} was not created by Dovetail, and is not removed"
        evidence = (f"it has {format_rows(one.rows)} of type {one.type}",)
        fix = Call("table.history", note="lists the columns that Dovetail filled")
        return Problem(NOT_CREATED, message, evidence, (fix,), self.uri)

    def _drop(self, found: LanceTable, there: list[str], kept: list[str]) -> None:
        """Columns of the table, and records of these and of removed columns."""
        try:
            with (
                translate_write_errors(self.uri),
                hold_leases(self._store, kept, _new_run_id(), wait=False, say=lambda _: None),
            ):
                if there:
                    found.drop_columns(there)
                delete_column_state(self._store, kept)
        except RunError as error:
            taken = [
                replace(it, fixes=("wait until it has finished, or stop it",))
                for it in error.problems
                if it.code == COLUMN_TAKEN
            ]
            raise RunError(taken or error.problems) from None
        for name in kept:
            self._store.delete_folder(column_folder(name))

    # --- filling

    def backfill(
        self,
        column: str | Sequence[str],
        udf: Udf | Callable[..., Any] | str | None = None,
        *,
        workers: Workers | None = None,
        batch_size: int | None = None,
        slots: int | None = None,
        where: str | None = None,
        fragments: int | Sequence[int] | None = None,
        on_error: str | ErrorPolicy | Retry | None = None,
        max_errors: float | str | None = None,
        timeout: float | str | None = None,
        engine: str | None = None,
        cluster: Cluster | str | None = None,
        commit_every: float | str | None = None,
        recompute: bool = False,
        wait: bool = True,
        progress: bool | None = None,
        share: float | None = None,
        env_from: Sequence[str] = (),
        trust_table: bool = False,
        concurrency: int | None = None,
        intra_applier_concurrency: int | None = None,
        num_frags: int | None = None,
        **unknown: Any,
    ) -> BackfillResult:
        """Fill a column: compute the missing rows in worker processes and commit them while it runs.

        Finished fragments become visible with the first commit and then every `commit_every`. After a kill, repeat the
        call to resume; at most two seconds of work per worker is repeated. A row counts as filled even if the function
        returned None. `recompute` computes filled rows again, and so does a new version of the function.

        `udf` is required, unless it was passed to this object before. The table stores the name of the function that
        fills a column; anyone who can write to the table can change it, and with `trust_table=True` it is imported and
        called. `workers` is "auto" (as many as fit), n
        (fewer if they do not fit) or (min, max); `slots` is the number of concurrent calls per worker; `batch_size` the
        rows per call. `where` limits the rows; other rows keep their values. `fragments` is a number of unfinished
        fragments or a list of ids. `on_error`: "fail" (default) raises an error that is also of the function's
        exception type, "skip" leaves the row NULL and records it in `errors`, `dt.Retry(...)` retries with backoff.
        More failed rows than `max_errors` (a count or "1%") stop the backfill. `timeout` applies to one row. If another
        process is filling the column, the call waits for it, or raises with `wait=False`. `engine`, `cluster`, `share`
        and `env_from` are those of `dt.run`.

        `concurrency`, `intra_applier_concurrency` and `num_frags` are aliases of `workers`, `slots` and `fragments`.
        """
        how = {name: value for name, value in locals().items() if name not in ("self", "column", "udf", "unknown")}
        found, function, names, before, arguments = self._check_call(column, udf, how | unknown)
        if not is_ray_engine(arguments.engine):  # on Ray the run itself checks it
            plan_workers(function, arguments)
        ready, record = self._ensure_columns(found, function, names, before)
        target = make_target(ready, function, record, arguments)
        driver = BackfillDriver(
            *(ready, self._store, function, target, arguments, _new_run_id()),
            reads=tuple(record.inputs),
            renderer=self._renderer,
        )
        driver.refresh_target = lambda: self._refresh_target(ready, function, record, arguments)
        driver.on_finished = lambda: self._save_outcome(record, arguments)
        driver.count_earlier_failures = lambda: len(read_current_errors(self._newest(), self._store, record))
        with translate_write_errors(self.uri):
            return driver.fill()

    def _check_call(
        self,
        column: str | Sequence[str],
        udf: Udf | Callable[..., Any] | str | None,
        how: Mapping[str, Any],
        method: str = "backfill",
    ) -> tuple[LanceTable, Udf, list[str], ColumnRecord | None, BackfillArguments]:
        """The table, the function, the columns, their record and the arguments; ConfigError with all problems at
        once."""
        arguments, problems = validate_arguments(how)
        names = _check_column_names(column)
        found = self._newest()
        record = read_column(self._store, names[0])
        try:
            trusted = arguments is not None and arguments.trust_table
            function = self._function_to_use(udf, found, names[0], record, method, trusted=trusted)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if record is not None and names[0] in record.columns and len(names) < len(record.columns):
            names = record.columns
        problems += function.check(found.schema, names)
        if arguments is not None:
            problems += self._where_problems(found, arguments.where) + unknown_fragment_problems(
                found, arguments.fragments
            )
            problems += self._skip_problems(found, names, arguments.on_error or function.on_error)
            if not problems and arguments.where is None and not arguments.recompute:
                problems += self._foreign_value_problems(found, function, names)
        if problems or arguments is None:
            raise ConfigError(problems)
        self._remember(function, names)
        return found, function, names, record, arguments

    def _ensure_columns(
        self, found: LanceTable, function: Udf, names: list[str], record: ColumnRecord | None
    ) -> tuple[LanceTable, ColumnRecord]:
        """Add the column if it does not exist."""
        if record is None or record.columns != names or any(name not in found.schema.names for name in names):
            found = self._add(found, function, names, record)
        return found, make_column_record(function, names, columns_to_read(function, found.schema.names, names), record)

    def _where_problems(self, found: LanceTable, where: str | None) -> list[Problem]:
        try:
            if where is not None:
                found.check_where(where)
        except DovetailError as error:
            return list(error.problems)
        return []

    def _foreign_value_problems(self, found: LanceTable, function: Udf, names: Sequence[str]) -> list[Problem]:
        """Columns with values of others, which are not replaced by accident."""
        problems = []
        for name in names:
            record = read_column(self._store, name)
            was_filled = record is not None and record.was_filled_without_condition
            if name in found.schema.names and not _is_created(found, name) and not was_filled:
                values = found.count(f"NOT ({null_condition(name)})")
                if values:
                    problems.append(self._foreign_values_problem(found, function, names, name, values))
        return problems

    def _foreign_values_problem(
        self, found: LanceTable, function: Udf, names: Sequence[str], column: str, values: int
    ) -> Problem:
        what = "1 value" if values == 1 else f"{values:,} values"
        message = f"column {column!r} has {what} that no backfill computed, which are not replaced"
        fixes = [fill_other_column(function, found.schema, names, column)]
        if found.schema.field(column).nullable:
            columns = list(names) if len(names) > 1 else column
            only_empty = Call("table.backfill", (columns, Expression(function.name)), {"where": null_condition(column)})
            fixes.insert(0, only_empty)
        return Problem(FOREIGN_VALUES, message, fixes=tuple(fixes), place=self.uri)

    def _skip_problems(self, found: LanceTable, names: Sequence[str], on_error: ErrorPolicy) -> list[Problem]:
        wrong = _non_nullable(found, names) if on_error.then == "skip" else []
        skip = Change({"on_error": "skip"})
        message = Text(f"column {', '.join(wrong)} is not nullable, and ", skip, " leaves failed rows NULL")
        return (
            [Problem(BAD_BACKFILL_ARGUMENT, message, fixes=(Change({"on_error": "fail"}),), place=self.uri)]
            if wrong
            else []
        )

    def _remember(self, function: Udf, columns: Sequence[str]) -> None:
        self._given_functions |= dict.fromkeys(columns, function)

    def _function_to_use(
        self,
        given: Udf | Callable[..., Any] | str | None,
        found: LanceTable,
        column: str,
        record: ColumnRecord | None,
        method: str,
        *,
        trusted: bool,
    ) -> Udf:
        """The given function, else the one that the caller passed before, else the one that the table names."""
        if given is not None:
            return _to_udf(given)
        reference = self._stored_reference(found, column, record, method)
        earlier = self._given_functions.get(column)
        if earlier is not None and earlier.reference == reference:
            return earlier
        if trusted and method != "plan_backfill":
            return load_udf(reference)
        raise ConfigError(self._unconfirmed_problem(column, reference, method))

    def _unconfirmed_problem(self, column: str, reference: str, method: str) -> Problem:
        """Importing a module runs its code, and anyone who can write to the table can change the reference."""
        message = (
            f"the table names {reference} as the function of column {column!r}, which is loaded only if you confirm it"
        )
        call = f"table.{method}"
        fixes = [Call(call, (column,), {"udf": reference})]
        if method != "plan_backfill":
            fixes.append(Call(call, (column,), {"trust_table": True}, note="loads what the table names"))
        return Problem(UNCONFIRMED_FUNCTION, message, fixes=tuple(fixes), place=self.uri)

    def stored_reference(self, column: str) -> str:
        """Name of the function that filled the column last, "module:name"; "" if it cannot be imported by name. It is
        not loaded."""
        return self._read_record(_check_column_name(column)).reference

    def _stored_reference(self, found: LanceTable, column: str, record: ColumnRecord | None, method: str) -> str:
        if record is None:
            if column not in found.schema.names:
                raise ConfigError(self._no_column_problem(found, column))
            message = f"no function is registered for column {column!r}"
            fix = Call("table.backfill", (column, Expression("udf")), {"where": null_condition(column)})
            raise ConfigError(Problem(NO_COLUMN, message, fixes=(fix,), place=self.uri))
        if not record.reference:
            message = f"{column!r} is filled by {record.name}, which cannot be imported by name (script or lambda)"
            fix = Call(f"table.{method}", (column, Expression(record.name)))
            raise ConfigError(Problem(NO_COLUMN, message, fixes=(fix,)))
        return record.reference

    def _no_column_problem(self, found: LanceTable, column: str) -> Problem:
        hint = did_you_mean(column, found.schema.names)
        fixes = (Call("table.add_column", (column, Expression("udf"))), f"it has: {', '.join(found.schema.names)}")
        return Problem(NO_COLUMN, f"the table has no column {column!r}{hint}", fixes=fixes, place=self.uri)

    def _refresh_target(
        self, found: LanceTable, udf: Udf, record: ColumnRecord, arguments: BackfillArguments
    ) -> FillTarget:
        """Reload the records: the lease is held now, and other processes may have written meanwhile."""
        now = self._newest()
        problems = [self._no_column_problem(now, name) for name in record.columns if name not in now.schema.names]
        if problems:
            raise ConfigError(problems)
        before = read_column(self._store, record.columns[0])
        if before is not None:
            record.continue_from(before)
        if arguments.recompute and not arguments.recompute_fragments:
            record.start_recompute(arguments.where)
        target = make_target(found, udf, record, arguments)
        made = Provenance(target.inputs, target.where, record.generation_of(target.where), udf.version)
        record.add_provenance(target.identity, made)
        write_column(self._store, record)
        if arguments.where is not None:
            carry_over_errors(now, self._store, record, target)
        return target

    def _save_outcome(self, record: ColumnRecord, arguments: BackfillArguments) -> None:
        """Record the end of a recomputation; changes of the record by `add_column` meanwhile are kept."""
        before = read_column(self._store, record.columns[0]) or record
        if before.columns != record.columns:  # another function fills it together with other columns
            return
        changed = replace(before)
        if arguments.fragments is None:
            changed.finish_recompute(arguments.where)
        if changed != before:
            write_column(self._store, changed)

    def plan_backfill(
        self,
        column: str | Sequence[str],
        udf: Udf | Callable[..., Any] | str | None = None,
        *,
        sample: bool = True,
        **how: Any,
    ) -> BackfillPlan:
        """Dry run of `backfill` with the same arguments: fragments, rows, workers, their resources, and the estimated
        time, measured by computing sample rows. Nothing is changed. The function that the table names is never loaded
        for a plan."""
        from dovetail.backfill.estimate import estimate_backfill

        found, function, names, record, arguments = self._check_call(column, udf, how, "plan_backfill")
        now = make_column_record(function, names, columns_to_read(function, found.schema.names, names), record)
        if arguments.recompute and not arguments.recompute_fragments:
            now.start_recompute(arguments.where)
        return estimate_backfill(found, self._store, function, now, arguments, sample=sample)

    # --- failed rows and history

    def errors(self, column: str) -> list[RowError]:
        """The rows that failed: address, exception type, message, traceback."""
        return read_current_errors(self._newest(), self._store, self._read_record(_check_column_name(column)))

    def retry_errors(
        self, column: str, udf: Udf | Callable[..., Any] | str | None = None, **how: Any
    ) -> BackfillResult:
        """Compute only the rows of `errors(column)` again, with the current function. Takes the arguments of
        `backfill` except `where`, `fragments` and `recompute`. Rows that another version of the function computed keep
        their values; the result has a note about them, and the next `backfill` computes them again."""
        wrong = [name for name in ("where", "fragments", "recompute", "num_frags") if how.get(name)]
        if wrong:
            message = f"retry_errors has no {', '.join(wrong)}: it computes the rows that failed"
            fix = Call("table.backfill", (column,), {wrong[0]: Expression("...")})
            raise ConfigError(Problem(BAD_BACKFILL_ARGUMENT, message, fixes=(fix,)))
        arguments = parse_arguments(how)
        record = self._read_record(_check_column_name(column))
        found = self._newest()
        trusted = arguments.trust_table
        function = self._function_to_use(udf, found, column, record, "retry_errors", trusted=trusted)
        problems = function.check(found.schema, record.columns)
        if problems:
            raise ConfigError(problems)
        self._remember(function, record.columns)
        with translate_write_errors(self.uri):
            retry = RowRetry(found, self._store, function, record, arguments, _new_run_id(), self._renderer)
            return retry.run()

    def history(self, column: str | None = None) -> list[BackfillRecord]:
        """All backfills of a column, or of all columns; oldest first."""
        return read_backfills(
            self._store, None if column is None else self._read_record(_check_column_name(column)).columns[0]
        )

    def _read_record(self, column: str) -> ColumnRecord:
        record = read_column(self._store, column)
        if record is None:
            raise ConfigError(self._never_filled_problem(column))
        return record

    def _never_filled_problem(self, column: str) -> Problem:
        found = self._newest()
        if column not in found.schema.names:
            return self._no_column_problem(found, column)
        message = f"column {column!r} was never filled by a function"
        fix = Call("table.history", note="lists the columns that were filled")
        return Problem(NO_COLUMN, message, fixes=(fix,), place=self.uri)


def _is_created(found: LanceTable, column: str) -> bool:
    """Whether Dovetail created the column."""
    return CREATED_METADATA.items() <= (found.schema.field(column).metadata or {}).items()


def _check_column_names(column: str | Sequence[str]) -> list[str]:
    given: object = column
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else []
    if not names or not all(isinstance(name, str) and name for name in names) or len({*names}) != len(names):
        message = f"{column!r} is not a column name or a list of different names"
        raise ConfigError(Problem(NO_COLUMN, message, fixes=(Call("table.backfill", ("n", Expression("udf"))),)))
    kept = [name for name in names if name in RESERVED_NAMES]
    if kept:
        message = f"{', '.join(map(repr, kept))} is a name that Lance reserves"
        raise ConfigError(Problem(NO_COLUMN, message, fixes=(f'"{kept[0].strip("_")}"',)))
    return names


def _check_column_name(column: str) -> str:
    """Field of an existing column."""
    given: object = column
    if isinstance(given, str):
        return given
    message = f"{column!r} is not a column name"
    raise ConfigError(Problem(NO_COLUMN, message, fixes=(Call("table.errors", ("n",)),)))


def _non_nullable(found: LanceTable, names: Sequence[str]) -> list[str]:
    """Columns that are not nullable."""
    return [name for name in names if name in found.schema.names and not found.schema.field(name).nullable]


def _to_udf(given: Udf | Callable[..., Any] | str) -> Udf:
    if isinstance(given, Udf):
        return given
    if isinstance(given, str):
        return load_udf(given)
    made: Udf = make_udf(given)
    return made


def _new_run_id() -> str:
    return uuid.uuid4().hex[:12]
