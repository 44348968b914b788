"""A Lance table whose columns are filled by functions. `table = dt.table("clips.lance")`."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.backfill.admission import check_fits
from dovetail.backfill.aiming import aim_of
from dovetail.backfill.asking import Asked, asked_of, asked_or_problems
from dovetail.backfill.backfilling import Filling
from dovetail.backfill.lance_table import LanceTable
from dovetail.backfill.lease import TAKEN
from dovetail.backfill.leases import held
from dovetail.backfill.mending import carry_errors, errors_of, retry
from dovetail.backfill.records import (
    ColumnRecord,
    JobRecord,
    Made,
    columns_read,
    filled_together,
    forget_columns,
    is_kept,
    read_column,
    read_jobs,
    record_of,
    write_column,
)
from dovetail.backfill.store import Store, folder_of
from dovetail.backfill.udf import Udf, load_udf
from dovetail.backfill.udf import udf as make_udf
from dovetail.backfill.unchanged import told_if_not_written
from dovetail.backfill.work import unknown_fragments
from dovetail.errors import ConfigError, DovetailError, Problem, RunError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dovetail.backfill.aiming import Aim
    from dovetail.backfill.failures import RowError
    from dovetail.backfill.filled import Filled
    from dovetail.backfill.on_error import OnError, Retry
    from dovetail.backfill.planning import BackfillPlan
    from dovetail.pipeline.stage import Workers
    from dovetail.resources.cluster import Cluster

NO_COLUMN = "DT447"
THERE = "DT448"
LANCES_OWN = ("_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version")
"""A column of such a name makes the table unreadable."""


def table(uri: str | Path, storage_options: Mapping[str, str] | None = None) -> Table:
    """A Lance table: a folder, or "s3://bucket/clips.lance" with the storage options that Lance takes."""
    return Table(str(uri), storage_options)


class Table:
    """Add columns, fill them, see what failed. Every call looks at the newest version of the table."""

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        found = LanceTable(uri, storage_options)
        self.uri, self._storage = found.uri, found.storage
        self._store = Store(self.uri, self._storage)

    def __repr__(self) -> str:
        return f"dt.table({self.uri!r})"

    def _newest(self) -> LanceTable:
        return LanceTable(self.uri, self._storage)

    @property
    def version(self) -> int:
        return self._newest().version

    @property
    def schema(self) -> Any:
        """As pyarrow has it."""
        return self._newest().schema

    # --- columns

    def add_column(self, name: str | Sequence[str], udf: Udf | Callable[..., Any] | str) -> None:
        """An empty column that `udf` will fill; instant, whatever the size of the table. A function that gives a
        NamedTuple fills several: their names as a list. To say it once more changes nothing, or the function."""
        function, columns = _udf(udf), _names(name)
        found = self._newest()
        record = read_column(self._store, columns[0])
        problems = function.check(found.schema, columns)
        there = [column for column in columns if column in found.schema.names]
        if there and (record is None or record.columns != columns):
            message = f"the table has a column {there[0]!r} already"
            fixes = (f'table.backfill("{there[0]}", udf) computes it anew', f'table.drop("{there[0]}") removes it')
            problems.append(Problem(THERE, message, fixes=fixes, place=self.uri))
        if problems:
            raise ConfigError(problems)
        self._add(found, function, columns, record)

    def _add(self, found: LanceTable, udf: Udf, columns: list[str], record: ColumnRecord | None) -> LanceTable:
        import pyarrow as pa

        missing = [
            pa.field(column, kind)
            for column, (_, kind) in zip(columns, udf.outputs(), strict=True)
            if column not in found.schema.names
        ]
        if missing:
            try:
                found = found.add_columns(missing)
            except DovetailError:  # somebody else may have added the same just now
                found = found.newest()
                if any(one.name not in found.schema.names or found.schema.field(one.name) != one for one in missing):
                    raise
        write_column(self._store, record_of(udf, columns, columns_read(udf, found.schema.names, columns), record))
        return found

    def drop(self, column: str | Sequence[str]) -> None:
        """Removes a column from the table, and what is kept of it beside the table."""
        names = _names(column)
        found = self._newest()
        there = found.schema.names
        problems = [self._no_column(found, it) for it in names if it not in there and not is_kept(self._store, it)]
        known = [read_column(self._store, name) for name in names]
        records = {record.folder: record for record in known if record is not None}.values()
        every = set(names)
        for record in records:
            together = filled_together(self._store, record)
            left = [name for name in together if name in there]
            every.update(together)
            if set(left) - set(names):
                message = f"{', '.join(together)} are filled together"
                problems.append(Problem(NO_COLUMN, message, fixes=(f"table.drop({left})",), place=self.uri))
        if problems:
            raise ConfigError(problems)
        self._drop(found, [name for name in names if name in there], sorted(every))

    def _drop(self, found: LanceTable, there: list[str], kept: list[str]) -> None:
        """Columns that are there, and what is kept of those and of others that are not there any more."""
        try:
            with told_if_not_written(self.uri), held(self._store, kept, _run_id(), wait=False, say=lambda _: None):
                if there:
                    found.drop_columns(there)
                forget_columns(self._store, kept)
        except RunError as error:
            taken = [replace(it, fixes=("wait for its end, or end it",)) for it in error.problems if it.code == TAKEN]
            raise RunError(taken or error.problems) from None
        for name in kept:
            self._store.delete_folder(folder_of(name))

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
        on_error: str | OnError | Retry | None = None,
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
        concurrency: int | None = None,
        intra_applier_concurrency: int | None = None,
        num_frags: int | None = None,
        **unknown: Any,
    ) -> Filled:
        """Fills a column: computes what is not computed yet, on worker processes, and commits while it goes.

        Readers see finished fragments at once, and then every `commit_every`. Killed, it loses at most two seconds of
        each worker: the same call again goes on. What is done is done, also where the function gave None; `recompute`
        computes it again, and so does another version of the function, which it says.

        `udf` is needed once, or if it cannot be imported by its name. `workers` is "auto" (what fits), n (fewer, if
        they do not fit: it says so) or (least, most); `slots` are calls at once in each; `batch_size` rows per call.
        `where` computes only rows that meet a condition, the others keep what they have; `fragments` only so many, or
        those with these ids. `on_error`: "fail" (the default) raises the function's own exception type, "skip" leaves
        the row NULL and lists it in `errors`, `dt.Retry(...)` tries again; more than `max_errors` rows (or share of
        them: "1%") stop it. `timeout` is for one row. If another process fills the column it waits for it, or with
        `wait=False` raises. `engine`, `cluster`, `share` and `env_from` are those of `dt.run`.

        `concurrency`, `intra_applier_concurrency` and `num_frags` are other spellings of `workers`, `slots` and
        `fragments`.
        """
        how = {name: value for name, value in locals().items() if name not in ("self", "column", "udf", "unknown")}
        found, function, names, before, asked = self._checked(column, udf, how | unknown)
        check_fits(function, asked)
        ready, record = self._ready(found, function, names, before)
        aim = aim_of(ready, function, record, asked)
        filling = Filling(ready, self._store, function, aim, asked, _run_id(), record.rate, tuple(record.inputs))
        filling.renew = lambda: self._renewed(ready, function, record, asked)
        filling.finished = lambda: self._finished(record, filling.rate, asked)
        filling.failed_before = lambda: len(errors_of(self._newest(), self._store, record))
        with told_if_not_written(self.uri):
            return filling.fill()

    def _checked(
        self, column: str | Sequence[str], udf: Udf | Callable[..., Any] | str | None, how: Mapping[str, Any]
    ) -> tuple[LanceTable, Udf, list[str], ColumnRecord | None, Asked]:
        """Table, function, columns, what is known of them, and what is asked; or everything that is wrong, at once."""
        asked, problems = asked_or_problems(how)
        names = _names(column)
        found = self._newest()
        record = read_column(self._store, names[0])
        try:
            function = _udf(udf) if udf is not None else self._kept_udf(found, names[0], record)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if record is not None and names[0] in record.columns and len(names) < len(record.columns):
            names = record.columns
        problems += function.check(found.schema, names)
        if asked is not None:
            problems += self._where_problems(found, asked.where) + unknown_fragments(found, asked.fragments)
            problems += self._skip_problems(found, names, asked.on_error or function.on_error)
        if problems or asked is None:
            raise ConfigError(problems)
        return found, function, names, record, asked

    def _ready(
        self, found: LanceTable, function: Udf, names: list[str], record: ColumnRecord | None
    ) -> tuple[LanceTable, ColumnRecord]:
        """A column that is new is there."""
        if record is None or record.columns != names or any(name not in found.schema.names for name in names):
            found = self._add(found, function, names, record)
        return found, record_of(function, names, columns_read(function, found.schema.names, names), record)

    def _where_problems(self, found: LanceTable, where: str | None) -> list[Problem]:
        try:
            if where is not None:
                found.check_where(where)
        except DovetailError as error:
            return list(error.problems)
        return []

    def _skip_problems(self, found: LanceTable, names: Sequence[str], on_error: OnError) -> list[Problem]:
        wrong = _not_null(found, names) if on_error.then == "skip" else []
        message = f'column {", ".join(wrong)} may not be NULL, and on_error="skip" leaves rows that fail NULL'
        return [Problem("DT437", message, fixes=('on_error="fail"',), place=self.uri)] if wrong else []

    def _kept_udf(self, found: LanceTable, column: str, record: ColumnRecord | None, call: str = "backfill") -> Udf:
        if record is None:
            if column not in found.schema.names:
                raise ConfigError(self._no_column(found, column))
            message = f"nobody has said which function fills {column!r}"
            raise ConfigError(Problem(NO_COLUMN, message, fixes=(f'table.backfill("{column}", udf)',), place=self.uri))
        if not record.reference:
            message = (
                f"{column!r} is filled by {record.name}, which no module has by that name (a script's, or a lambda)"
            )
            raise ConfigError(Problem(NO_COLUMN, message, fixes=(f'table.{call}("{column}", {record.name})',)))
        return load_udf(record.reference)

    def _no_column(self, found: LanceTable, column: str) -> Problem:
        hint = did_you_mean(column, found.schema.names)
        fixes = (f'table.add_column("{column}", udf)', f"it has: {', '.join(found.schema.names)}")
        return Problem(NO_COLUMN, f"the table has no column {column!r}{hint}", fixes=fixes, place=self.uri)

    def _renewed(self, found: LanceTable, udf: Udf, record: ColumnRecord, asked: Asked) -> Aim:
        """Nobody else fills the column now: what others wrote meanwhile counts."""
        now = self._newest()
        problems = [self._no_column(now, name) for name in record.columns if name not in now.schema.names]
        if problems:
            raise ConfigError(problems)
        before = read_column(self._store, record.columns[0])
        if before is not None:
            record.goes_on_from(before)
        if asked.recompute and not asked.anew:
            record.begin_again(asked.where)
        aim = aim_of(found, udf, record, asked)
        record.remember(aim.identity, Made(aim.inputs, aim.where, record.generation_of(aim.where)))
        write_column(self._store, record)
        if asked.where is not None:
            carry_errors(now, self._store, record, aim)
        return aim

    def _finished(self, record: ColumnRecord, rate: float | None, asked: Asked) -> None:
        """Writes down what the run learned; what somebody said of the column meanwhile (`add_column`) stays."""
        before = read_column(self._store, record.columns[0]) or record
        if before.columns != record.columns:  # another function fills it, with others
            return
        changed = replace(before)
        if before.version == record.version:
            changed.rate = (rate if asked.where is None else None) or record.rate
        if asked.fragments is None:
            changed.end_again(asked.where)
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
        """What `backfill` with the same arguments would do: fragments, rows, workers, what they ask for line by line,
        and how long it takes, by a sample of rows that is computed and thrown away. Nothing is changed."""
        from dovetail.backfill.planning import planned

        found, function, names, record, asked = self._checked(column, udf, how)
        now = record_of(function, names, columns_read(function, found.schema.names, names), record)
        if asked.recompute and not asked.anew:
            now.begin_again(asked.where)
        return planned(found, self._store, function, now, asked, sample=sample)

    # --- what failed, what was

    def errors(self, column: str) -> list[RowError]:
        """The rows that were set aside: address, exception type, message, traceback."""
        return errors_of(self._newest(), self._store, self._record(_name(column)))

    def retry_errors(self, column: str, udf: Udf | Callable[..., Any] | str | None = None, **how: Any) -> Filled:
        """Computes the rows of `errors(column)` again, and no others, with the function as it is now. Arguments as
        those of `backfill`, without `where`, `fragments` and `recompute`."""
        wrong = [name for name in ("where", "fragments", "recompute", "num_frags") if how.get(name)]
        if wrong:
            message = f"retry_errors has no {', '.join(wrong)}: it computes the rows that failed"
            raise ConfigError(Problem("DT437", message, fixes=(f'table.backfill("{column}", {wrong[0]}=...)',)))
        asked = asked_of(how)
        record = self._record(_name(column))
        found = self._newest()
        function = _udf(udf) if udf is not None else self._kept_udf(found, column, record, "retry_errors")
        problems = function.check(found.schema, record.columns)
        if problems:
            raise ConfigError(problems)
        with told_if_not_written(self.uri):
            return retry(found, self._store, function, record, asked, _run_id())

    def history(self, column: str | None = None) -> list[JobRecord]:
        """Every backfill of a column, or of all; the oldest first."""
        return read_jobs(self._store, None if column is None else self._record(_name(column)).columns[0])

    def _record(self, column: str) -> ColumnRecord:
        record = read_column(self._store, column)
        if record is None:
            raise ConfigError(self._never_filled(column))
        return record

    def _never_filled(self, column: str) -> Problem:
        found = self._newest()
        if column not in found.schema.names:
            return self._no_column(found, column)
        message = f"column {column!r} was never filled by a function"
        return Problem(NO_COLUMN, message, fixes=(f'table.backfill("{column}", udf)',), place=self.uri)


def _names(column: str | Sequence[str]) -> list[str]:
    given: object = column
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else []
    if not names or not all(isinstance(name, str) and name for name in names) or len({*names}) != len(names):
        message = f"{column!r} is not the name of a column, nor a list of different names"
        raise ConfigError(Problem(NO_COLUMN, message, fixes=('table.backfill("n", udf)',)))
    kept = [name for name in names if name in LANCES_OWN]
    if kept:
        message = f"{', '.join(map(repr, kept))} is a name that Lance keeps for itself"
        raise ConfigError(Problem(NO_COLUMN, message, fixes=(f'"{kept[0].strip("_")}"',)))
    return names


def _name(column: str) -> str:
    """Of one that is there."""
    given: object = column
    if isinstance(given, str):
        return given
    message = f"{column!r} is not the name of a column"
    raise ConfigError(Problem(NO_COLUMN, message, fixes=('table.errors("n")',)))


def _not_null(found: LanceTable, names: Sequence[str]) -> list[str]:
    """Columns that must have a value in every row."""
    return [name for name in names if name in found.schema.names and not found.schema.field(name).nullable]


def _udf(given: Udf | Callable[..., Any] | str) -> Udf:
    if isinstance(given, Udf):
        return given
    if isinstance(given, str):
        return load_udf(given)
    made: Udf = make_udf(given)
    return made


def _run_id() -> str:
    return uuid.uuid4().hex[:12]
