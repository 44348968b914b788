"""List the failed rows of a column and compute only those again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.backfill.checkpoints import CARRIED_OVER, errors_folder, parts_folder
from dovetail.backfill.driver import BackfillDriver
from dovetail.backfill.error_cleanup import RETRY_INFIX, replace_retried_errors
from dovetail.backfill.failed_rows import RowError, read_error_files, to_json_line
from dovetail.backfill.records import (
    DRAINED,
    FINISHED,
    columns_to_read,
    make_column_record,
    read_column,
    write_column,
)
from dovetail.backfill.result import BackfillResult, format_rows
from dovetail.backfill.target import FillTarget, current_identity, make_identity
from dovetail.backfill.task import FailedRow
from dovetail.errors import PYTHON, Call, Text
from dovetail.text_format import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.backfill.arguments import BackfillArguments
    from dovetail.backfill.lance_table import Fragment, LanceTable
    from dovetail.backfill.records import ColumnRecord, Provenance
    from dovetail.backfill.store import Store
    from dovetail.backfill.udf import Udf
    from dovetail.errors import Renderer


def read_current_errors(table: LanceTable, store: Store, record: ColumnRecord) -> list[RowError]:
    """Failed rows in table order, without those of fragments that were computed again since."""
    found = {row.row: row for rows in _errors_by_identity(table, store, record).values() for row in rows}
    return [found[row] for row in sorted(found)]


def carry_over_errors(table: LanceTable, store: Store, record: ColumnRecord, target: FillTarget) -> None:
    """Copy error records to the new identity of their fragment: rows that failed earlier and do not match the condition
    remain NULL."""
    assert target.where is not None
    before: dict[int, list[RowError]] = {}
    for identity, rows in _errors_by_identity(table, store, record, begun=False).items():
        for row in rows if identity != target.identity else ():
            before.setdefault(row.fragment, []).append(row)
    for fragment in table.fragments():
        if fragment.id in before:
            named = set(table.matching_offsets(fragment.id, target.where).to_pylist())
            kept = [row for row in before[fragment.id] if row.offset not in named]
            lines = [to_json_line(FailedRow(it.fragment, it.offset, it.error, it.message, it.traceback)) for it in kept]
            name = f"{fragment.id}-{target.input_hash(table, fragment)}.{CARRIED_OVER}.jsonl"
            if lines:
                store.put(f"{errors_folder(target.folder, target.identity)}/{name}", "".join(lines).encode())


def _errors_by_identity(
    table: LanceTable, store: Store, record: ColumnRecord, *, begun: bool = True
) -> dict[str, list[RowError]]:
    """Error records of the current values; with `begun` also of unfinished fragments and of changed input."""
    there = {fragment.id: fragment for fragment in table.fragments()}
    found: dict[str, list[RowError]] = {}
    for identity in store.folders(f"{record.folder}/errors"):
        if RETRY_INFIX in identity:
            continue
        target = _target_of_identity(table, record, identity)
        fields = target.fields(table)
        begun_with = store.folders(parts_folder(record.folder, identity)) if begun else ()
        waiting = {"-".join(name.split("-")[:2]) for name in begun_with}
        for name, rows in read_error_files(store, errors_folder(record.folder, identity), record.columns[0]).items():
            key = name.partition(".")[0]
            number, _, inputs = key.partition("-")
            fragment = there.get(int(number)) if number.isdecimal() else None
            if fragment is None or not (key in waiting or _is_filled(fragment, fields, f"dt-{identity}-{inputs}-")):
                continue
            kept = (
                _undeleted_rows(table, fragment, rows) if begun or target.input_hash(table, fragment) == inputs else []
            )
            if kept:
                found.setdefault(identity, []).extend(kept)
    return found


def _target_of_identity(table: LanceTable, record: ColumnRecord, identity: str) -> FillTarget:
    """How values of that identity were computed."""
    made = record.provenance_of(identity)
    columns = tuple(name for name in record.columns if name in table.schema.names)
    return FillTarget(record.folder, columns, made.inputs, identity, identity, made.where, masked=True)


def _undeleted_rows(table: LanceTable, fragment: Fragment, rows: list[RowError]) -> list[RowError]:
    if not fragment.deleted or not rows:
        return rows
    alive = table.undeleted_offsets(fragment.id, [row.offset for row in rows])
    return [row for row in rows if row.offset in alive]


def _is_filled(fragment: Fragment, fields: Iterable[int], prefix: str) -> bool:
    own = [file for file in fragment.files if any(number in file.fields for number in fields)]
    return bool(own) and all(file.path.startswith(prefix) for file in own)


@dataclass(frozen=True, slots=True)
class RowRetry:
    """One call of `retry_errors`."""

    table: LanceTable
    store: Store
    udf: Udf
    record: ColumnRecord
    arguments: BackfillArguments
    run_id: str
    renderer: Renderer = PYTHON
    """Spelling of calls in the notes that are printed."""

    def run(self) -> BackfillResult:
        """Retry the failed rows, in one run per identity; usually there is one."""
        column = self.record.columns[0]
        result = BackfillResult(column, run=self.run_id, version=self.table.version)
        begun = sum(map(len, _errors_by_identity(self.table, self.store, self.record).values()))
        found = _errors_by_identity(self.table, self.store, self.record, begun=False)
        left = begun - sum(map(len, found.values()))
        if left:
            what = f"{format_rows(left)} of unfinished fragments, or of fragments whose input changed"
            result.notes.append(Text(f"{what}: ", Call("table.backfill", (column,)), " first"))
        elif not found:
            fill = Call("table.backfill", (column,))
            result.notes.append(Text("no failed rows; after a compaction ", fill, " computes what is NULL"))
        for identity in found:
            driver = self._make_driver(identity)
            retried = driver.fill()
            if retried.status == FINISHED:
                retried.notes += _other_version_notes(driver, self.record)
            retried.rows += result.rows
            retried.errors += result.errors
            retried.fragments += result.fragments
            retried.notes[:0] = result.notes
            result = retried
            if result.status == DRAINED:
                break
        return result

    def _make_driver(self, identity: str) -> BackfillDriver:
        """The driver that computes the failed rows of one identity. Their fragments keep this identity, because their
        other rows do."""
        parts = f"{identity}{RETRY_INFIX}{hashlib.sha256(self.udf.version.encode()).hexdigest()[:8]}"
        target = replace(_target_of_identity(self.table, self.record, identity), parts=parts, only={})
        driver = BackfillDriver(
            *(self.table, self.store, self.udf, target, self.arguments, self.run_id),
            reads=tuple(columns_to_read(self.udf, self.table.schema.names, self.record.columns)),
            renderer=self.renderer,
        )
        driver.refresh_target = lambda: self._current_target(identity, parts)
        driver.on_commit = lambda committed: replace_retried_errors(self.store, target, committed.fragments)
        driver.on_finished = lambda: self._record_function(identity)
        return driver

    def _current_target(self, identity: str, parts: str) -> FillTarget:
        """Called while the lease is held: another process may have retried or filled these rows meanwhile."""
        now, newest = self._current_record(), self.table.newest()
        only: dict[int, set[int]] = {}
        for row in _errors_by_identity(newest, self.store, now, begun=False).get(identity, ()):
            only.setdefault(row.fragment, set()).add(row.offset)
        chosen = {fragment: tuple(sorted(offsets)) for fragment, offsets in only.items()}
        return replace(_target_of_identity(newest, now, identity), parts=parts, only=chosen)

    def _record_function(self, identity: str) -> None:
        """Record the function, which may have changed, as the one that fills the column."""
        before = self._current_record()
        inputs = columns_to_read(self.udf, self.table.schema.names, before.columns)
        now = make_column_record(self.udf, before.columns, inputs, before)
        now.add_provenance(identity, before.provenance_of(identity))
        if now != before:
            write_column(self.store, now)

    def _current_record(self) -> ColumnRecord:
        return read_column(self.store, self.record.columns[0]) or self.record


def _other_version_notes(driver: BackfillDriver, record: ColumnRecord) -> list[str]:
    """A note if the other rows of the column were computed by another version of the function."""
    udf, table, target = driver.udf, driver.table.newest(), driver.target
    made = record.provenance_of(target.identity)
    outputs = [(name, str(table.schema.field(name).type)) for name in target.columns]
    if make_identity(outputs, udf.version, driver.reads, made.where, made.generation) == target.identity:
        return []
    who = _rows_of_identity(table, target, made)
    what = f"{who} computed by another version of {udf.name}: the next "
    again = Call("table.backfill", (target.columns[0],))
    if made.version and driver.reads == made.inputs:
        keep = Call("@dt.udf", (), {"version": made.version})
        return [Text(what, again, " computes all rows with this one; ", keep, " keeps them")]
    return [Text(what, again, " computes all rows with this one")]


def _rows_of_identity(table: LanceTable, target: FillTarget, made: Provenance) -> str:
    """'2,299 rows were': those of the identity that were not retried."""
    assert target.only is not None
    fields = target.fields(table)
    alive = [
        fragment.rows - fragment.deleted
        for fragment in table.fragments()
        if current_identity(fragment, fields) == target.identity
    ]
    if made.where is not None:  # rows that do not match the condition were computed in other ways
        return f"rows of {format_count(len(alive), 'fragment')} were"
    others = sum(alive) - sum(map(len, target.only.values()))
    if not others:
        return "the rows count as"
    return f"{format_rows(others)} {'was' if others == 1 else 'were'}"
