"""List the failed rows of a column and compute only those again."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.backfill.checkpoints import CARRIED_OVER, errors_folder, parts_folder
from dovetail.backfill.driver import BackfillDriver
from dovetail.backfill.error_cleanup import RETRY_INFIX, replace_retried_errors
from dovetail.backfill.failed_rows import RowError, read_error_files, to_json_line
from dovetail.backfill.records import DRAINED, columns_to_read, make_column_record, read_column, write_column
from dovetail.backfill.result import BackfillResult
from dovetail.backfill.target import FillTarget, make_identity
from dovetail.backfill.task import FailedRow
from dovetail.errors import Call, Text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.backfill.arguments import BackfillArguments
    from dovetail.backfill.lance_table import Fragment, LanceTable
    from dovetail.backfill.records import ColumnRecord
    from dovetail.backfill.store import Store
    from dovetail.backfill.udf import Udf


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


def retry_failed_rows(
    table: LanceTable, store: Store, udf: Udf, record: ColumnRecord, arguments: BackfillArguments, run: str
) -> BackfillResult:
    """Retry the failed rows, in one run per identity; usually there is one."""
    result = BackfillResult(record.columns[0], run=run, version=table.version)
    begun = sum(map(len, _errors_by_identity(table, store, record).values()))
    found = _errors_by_identity(table, store, record, begun=False)
    left = begun - sum(map(len, found.values()))
    column = record.columns[0]
    if left:
        what = f"{left:,} rows of unfinished fragments, or of fragments whose input changed"
        result.notes.append(Text(f"{what}: ", Call("table.backfill", (column,)), " first"))
    elif not found:
        fill = Call("table.backfill", (column,))
        result.notes.append(Text("no failed rows; after a compaction ", fill, " computes what is NULL"))
    for identity in found:
        retried = _retry_identity(table, store, udf, record, arguments, run, identity)
        retried.rows += result.rows
        retried.errors += result.errors
        retried.fragments += result.fragments
        retried.notes[:0] = result.notes
        result = retried
        if result.status == DRAINED:
            break
    return result


def _retry_identity(
    table: LanceTable,
    store: Store,
    udf: Udf,
    record: ColumnRecord,
    arguments: BackfillArguments,
    run: str,
    identity: str,
) -> BackfillResult:
    parts = f"{identity}{RETRY_INFIX}{hashlib.sha256(udf.version.encode()).hexdigest()[:8]}"

    def current_target() -> FillTarget:
        """Called while the lease is held: another process may have retried or filled these rows meanwhile."""
        now, newest = read_column(store, record.columns[0]) or record, table.newest()
        only: dict[int, set[int]] = {}
        for row in _errors_by_identity(newest, store, now, begun=False).get(identity, ()):
            only.setdefault(row.fragment, set()).add(row.offset)
        chosen = {fragment: tuple(sorted(offsets)) for fragment, offsets in only.items()}
        return replace(_target_of_identity(newest, now, identity), parts=parts, only=chosen)

    target = replace(_target_of_identity(table, record, identity), parts=parts, only={})
    reads = tuple(columns_to_read(udf, table.schema.names, record.columns))
    driver = BackfillDriver(table, store, udf, target, arguments, run, reads=reads)
    driver.refresh_target = current_target
    driver.on_commit = lambda committed: replace_retried_errors(store, target, committed.fragments)
    driver.on_finished = lambda: _record_same_identity(table, store, record, udf, identity)
    retried = driver.fill()
    more = {*reads} - {*record.provenance_of(identity).inputs}
    if more:
        what = f"{udf.name} also reads {', '.join(map(repr, sorted(more)))}: the next "
        retried.notes.append(Text(what, Call("table.backfill", (record.columns[0],)), " computes all rows with it"))
    return retried


def _record_same_identity(table: LanceTable, store: Store, record: ColumnRecord, udf: Udf, identity: str) -> None:
    """Record that the rows that were kept count as computed by the changed function."""
    before = read_column(store, record.columns[0]) or record
    names = table.schema.names
    now = make_column_record(udf, before.columns, columns_to_read(udf, names, before.columns), before)
    made = before.provenance_of(identity)
    outputs = [(name, str(table.schema.field(name).type)) for name in now.columns]
    wanted = make_identity(outputs, udf.version, now.inputs, made.where, made.generation)
    if wanted != identity and {*now.inputs} <= {*made.inputs}:  # otherwise a change of its inputs would go unnoticed
        now.same[wanted] = identity
    now.add_provenance(identity, made)
    if now != before:
        write_column(store, now)
