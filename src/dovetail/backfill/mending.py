"""Which rows of a column failed, and how are they, and only they, computed again?"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.backfill.aiming import Aim
from dovetail.backfill.backfilling import Filling
from dovetail.backfill.failures import RowError, as_line, read_errors
from dovetail.backfill.filled import Filled
from dovetail.backfill.forgetting import RETRIED, settle_errors
from dovetail.backfill.identity import identity_of
from dovetail.backfill.job import FailedRow
from dovetail.backfill.parts import BEFORE, errors_folder, parts_folder
from dovetail.backfill.records import DRAINED, columns_read, read_column, record_of, write_column

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.backfill.asking import Asked
    from dovetail.backfill.lance_table import Fragment, LanceTable
    from dovetail.backfill.records import ColumnRecord
    from dovetail.backfill.store import Store
    from dovetail.backfill.udf import Udf


def errors_of(table: LanceTable, store: Store, record: ColumnRecord) -> list[RowError]:
    """By their place in the table; those of fragments that were computed anew since are not."""
    found = {row.row: row for rows in _by_identity(table, store, record).values() for row in rows}
    return [found[row] for row in sorted(found)]


def carry_errors(table: LanceTable, store: Store, record: ColumnRecord, aim: Aim) -> None:
    """Rows that failed before, and that a condition does not name, are NULL also after it: what is told of them goes
    along to where what is told of its fragments will be."""
    assert aim.where is not None
    before: dict[int, list[RowError]] = {}
    for identity, rows in _by_identity(table, store, record, begun=False).items():
        for row in rows if identity != aim.identity else ():
            before.setdefault(row.fragment, []).append(row)
    for fragment in table.fragments():
        if fragment.id in before:
            named = set(table.matching(fragment.id, aim.where).to_pylist())
            kept = [row for row in before[fragment.id] if row.offset not in named]
            lines = [as_line(FailedRow(it.fragment, it.offset, it.error, it.message, it.traceback)) for it in kept]
            name = f"{fragment.id}-{aim.inputs_of(table, fragment)}.{BEFORE}.jsonl"
            if lines:
                store.put(f"{errors_folder(aim.folder, aim.identity)}/{name}", "".join(lines).encode())


def _by_identity(
    table: LanceTable, store: Store, record: ColumnRecord, *, begun: bool = True
) -> dict[str, list[RowError]]:
    """Of what the table has now and, with `begun`, of what is computed right now or has other input by now."""
    there = {fragment.id: fragment for fragment in table.fragments()}
    found: dict[str, list[RowError]] = {}
    for identity in store.folders(f"{record.folder}/errors"):
        if RETRIED in identity:
            continue
        aim = _aim_of(table, record, identity)
        fields = aim.fields(table)
        begun_with = store.folders(parts_folder(record.folder, identity)) if begun else ()
        waiting = {"-".join(name.split("-")[:2]) for name in begun_with}
        for name, rows in read_errors(store, errors_folder(record.folder, identity), record.columns[0]).items():
            key = name.partition(".")[0]
            number, _, inputs = key.partition("-")
            fragment = there.get(int(number)) if number.isdecimal() else None
            if fragment is None or not (key in waiting or _is_filled(fragment, fields, f"dt-{identity}-{inputs}-")):
                continue
            kept = _alive(table, fragment, rows) if begun or aim.inputs_of(table, fragment) == inputs else []
            if kept:
                found.setdefault(identity, []).extend(kept)
    return found


def _aim_of(table: LanceTable, record: ColumnRecord, identity: str) -> Aim:
    """What was computed as that."""
    made = record.made_of(identity)
    columns = tuple(name for name in record.columns if name in table.schema.names)
    return Aim(record.folder, columns, made.inputs, identity, identity, made.where, masked=True)


def _alive(table: LanceTable, fragment: Fragment, rows: list[RowError]) -> list[RowError]:
    if not fragment.deleted or not rows:
        return rows
    alive = table.alive(fragment.id, [row.offset for row in rows])
    return [row for row in rows if row.offset in alive]


def _is_filled(fragment: Fragment, fields: Iterable[int], prefix: str) -> bool:
    own = [file for file in fragment.files if any(number in file.fields for number in fields)]
    return bool(own) and all(file.path.startswith(prefix) for file in own)


def retry(table: LanceTable, store: Store, udf: Udf, record: ColumnRecord, asked: Asked, run: str) -> Filled:
    """One run for each identity of which rows failed; mostly that is one."""
    told = Filled(record.columns[0], run=run, version=table.version)
    begun = sum(map(len, _by_identity(table, store, record).values()))
    found = _by_identity(table, store, record, begun=False)
    left = begun - sum(map(len, found.values()))
    column = record.columns[0]
    if left:
        what = f"{left:,} rows of fragments that are not finished, or whose input changed"
        told.notes.append(f'{what}: table.backfill("{column}") first')
    elif not found:
        told.notes.append(f'no row is set aside; after a compaction table.backfill("{column}") computes what is NULL')
    for identity in found:
        filled = _retry_one(table, store, udf, record, asked, run, identity)
        filled.rows += told.rows
        filled.errors += told.errors
        filled.fragments += told.fragments
        filled.notes[:0] = told.notes
        told = filled
        if told.status == DRAINED:
            break
    return told


def _retry_one(
    table: LanceTable, store: Store, udf: Udf, record: ColumnRecord, asked: Asked, run: str, identity: str
) -> Filled:
    parts = f"{identity}{RETRIED}{hashlib.sha256(udf.version.encode()).hexdigest()[:8]}"

    def aim_now() -> Aim:
        """Asked when nobody else fills the column: others may have mended, or filled, them meanwhile."""
        now, newest = read_column(store, record.columns[0]) or record, table.newest()
        only: dict[int, set[int]] = {}
        for row in _by_identity(newest, store, now, begun=False).get(identity, ()):
            only.setdefault(row.fragment, set()).add(row.offset)
        chosen = {fragment: tuple(sorted(offsets)) for fragment, offsets in only.items()}
        return replace(_aim_of(newest, now, identity), parts=parts, only=chosen)

    aim = replace(_aim_of(table, record, identity), parts=parts, only={})
    reads = tuple(columns_read(udf, table.schema.names, record.columns))
    filling = Filling(table, store, udf, aim, asked, run, reads=reads)
    filling.renew = aim_now
    filling.committed = lambda committed: settle_errors(store, aim, committed.fragments)
    filling.finished = lambda: _counts_as(table, store, record, udf, identity)
    filled = filling.fill()
    more = {*reads} - {*record.made_of(identity).inputs}
    if more:
        what = f"{udf.name} also reads {', '.join(map(repr, sorted(more)))}"
        filled.notes.append(f'{what}: the next table.backfill("{record.columns[0]}") computes all rows by it')
    return filled


def _counts_as(table: LanceTable, store: Store, record: ColumnRecord, udf: Udf, identity: str) -> None:
    """The function was mended for the rows that failed; the others were kept, and count as computed by it."""
    before = read_column(store, record.columns[0]) or record
    names = table.schema.names
    now = record_of(udf, before.columns, columns_read(udf, names, before.columns), before)
    made = before.made_of(identity)
    outputs = [(name, str(table.schema.field(name).type)) for name in now.columns]
    wanted = identity_of(outputs, udf.version, now.inputs, made.where, made.generation)
    if wanted != identity and {*now.inputs} <= {*made.inputs}:  # else a change of what it reads would not be noticed
        now.same[wanted] = identity
    now.remember(identity, made)
    if now != before:
        write_column(store, now)
