"""Which rows of a column failed, and how are they, and only they, computed again?"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.backfill.backfilling import Filling
from dovetail.backfill.failures import RowError, as_line, read_errors
from dovetail.backfill.filled import Filled
from dovetail.backfill.job import FailedRow
from dovetail.backfill.parts import errors_folder, parts_folder
from dovetail.backfill.records import columns_read, read_column, write_column
from dovetail.backfill.work import Aim

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.backfill.asking import Asked
    from dovetail.backfill.lance_table import Committed, Fragment, LanceTable
    from dovetail.backfill.records import ColumnRecord
    from dovetail.backfill.store import Store
    from dovetail.backfill.udf import Udf

RETRIED = "-again-"
"""Between the identity of what failed and that of the attempt to mend it."""


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
            name = f"{fragment.id}-{aim.inputs_of(table, fragment)}.before.jsonl"
            if lines:
                store.put(f"{errors_folder(aim.folder, aim.identity)}/{name}", "".join(lines).encode())


def _by_identity(
    table: LanceTable, store: Store, record: ColumnRecord, *, begun: bool = True
) -> dict[str, list[RowError]]:
    """Of what the table has now and, with `begun`, of what is computed right now."""
    ids = table.field_ids()
    fields = {ids[name] for name in record.columns if name in ids}
    there = {fragment.id: fragment for fragment in table.fragments()}
    found: dict[str, list[RowError]] = {}
    for identity in store.folders(f"{record.folder}/errors"):
        if RETRIED in identity:
            continue
        folder = errors_folder(record.folder, identity)
        waiting = set(store.folders(parts_folder(record.folder, identity))) if begun else ()
        for name, rows in read_errors(store, folder, record.columns[0]).items():
            key = name.partition(".")[0]
            number, _, inputs = key.partition("-")
            fragment = there.get(int(number)) if number.isdecimal() else None
            if fragment is not None and (key in waiting or _is_filled(fragment, fields, f"dt-{identity}-{inputs}-")):
                found.setdefault(identity, []).extend(rows)
    return found


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
        told.notes.append(f'{left:,} rows of fragments that are not finished: table.backfill("{column}") first')
    elif not found:
        told.notes.append(f'no row is set aside; after a compaction table.backfill("{column}") computes what is NULL')
    for identity, rows in found.items():
        filled = _retry_one(table, store, udf, record, asked, run, identity, rows)
        filled.rows += told.rows
        filled.errors += told.errors
        filled.fragments += told.fragments
        filled.notes[:0] = told.notes
        told = filled
    return told


def _retry_one(
    table: LanceTable,
    store: Store,
    udf: Udf,
    record: ColumnRecord,
    asked: Asked,
    run: str,
    identity: str,
    rows: list[RowError],
) -> Filled:
    only: dict[int, list[int]] = {}
    for row in rows:
        only.setdefault(row.fragment, []).append(row.offset)
    chosen = {fragment: tuple(sorted({*offsets})) for fragment, offsets in only.items()}
    told = json.dumps([udf.version, sorted(chosen.items())])
    parts = f"{identity}{RETRIED}{hashlib.sha256(told.encode()).hexdigest()[:8]}"
    aim = Aim(record.folder, tuple(record.columns), tuple(record.inputs), identity, parts, only=chosen)
    reads = tuple(columns_read(udf, table.schema.names, record.columns))
    filling = Filling(table, store, udf, aim, asked, run, masked=True, reads=reads)
    filling.committed = lambda committed: _settled(store, aim, committed)
    filled = filling.fill()
    _counts_as(store, record, udf)
    return filled


def _settled(store: Store, aim: Aim, committed: Committed) -> None:
    """Rows of these fragments are mended: what is told of them is what the attempt told."""
    done = {str(number) for number in committed.fragments}
    before, after = errors_folder(aim.folder, aim.identity), errors_folder(aim.folder, aim.parts)
    old = [name for name in store.names(before) if name.partition("-")[0] in done]
    new = [name for name in store.names(after) if name.partition("-")[0] in done]
    store.delete(*(f"{before}/{name}" for name in old))
    for name in new:
        store.put(f"{before}/{name}", store.get(f"{after}/{name}") or b"")
    store.delete(*(f"{after}/{name}" for name in new))


def _counts_as(store: Store, record: ColumnRecord, udf: Udf) -> None:
    """The function was mended for the rows that failed; the others were kept, and count as computed by it."""
    now = read_column(store, record.columns[0]) or record
    if udf.version != now.version:
        aliases = now.aliases | {udf.version: now.counts_as(now.version)}
        name, reference = udf.name, udf.reference
        write_column(
            store, replace(now, aliases=aliases, version=udf.version, code=udf.code, name=name, reference=reference)
        )
