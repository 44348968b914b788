"""What is there to do in a table, and what is done already?"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.backfill.identity import filled_by, inputs_hash, is_done
from dovetail.backfill.job import Task
from dovetail.backfill.lance_table import NewFile
from dovetail.backfill.parts import parts_folder
from dovetail.backfill.ranges import found_in, gaps
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dovetail.backfill.lance_table import Fragment, LanceTable
    from dovetail.backfill.store import Store

EMPTY_ROWS = 8_192
"""Of one batch without values."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Which columns, by which function, for which rows: what decides about done and not done."""

    folder: str
    columns: tuple[str, ...]
    inputs: tuple[str, ...]
    identity: str
    parts: str
    where: str | None = None
    fragments: int | tuple[int, ...] | None = None
    only: Mapping[int, tuple[int, ...]] | None = None
    """Fragment -> rows to compute once more; others are left alone."""

    def fields(self, table: LanceTable) -> tuple[int, ...]:
        """In the order of the columns, as data files have them."""
        ids = table.field_ids()
        return tuple(ids[name] for name in self.columns)

    def inputs_of(self, table: LanceTable, fragment: Fragment) -> str:
        """The hash of the files from which it is computed."""
        ids = table.field_ids()
        names = {*self.inputs, *(table.columns_in(self.where) if self.where is not None else ())} - {*self.columns}
        return inputs_hash(fragment, {ids[name] for name in names if name in ids})


@dataclass(slots=True)
class Work:
    """Of one version of a table."""

    tasks: list[Task] = field(default_factory=list)
    files: list[NewFile] = field(default_factory=list)
    """Whole, and only to be committed."""
    fragments: int = 0
    """That are not done."""
    rows: int = 0
    """Of those, with what lies in parts."""
    kept: int = 0
    """Rows of those that lie in parts, or in files."""
    done_fragments: int = 0
    done_rows: int = 0
    stale: int = 0
    """Fragments that an other version of the function filled, or of which the input changed."""
    strange: int = 0
    """Fragments with values that we have not computed: compacted, updated, or filled by somebody else."""


def work_in(table: LanceTable, store: Store, aim: Aim) -> Work:
    work = Work()
    fields = aim.fields(table)
    folder = parts_folder(aim.folder, aim.parts)
    begun = set(store.folders(folder))
    for fragment in _chosen(table, aim):
        inputs = aim.inputs_of(table, fragment)
        only = None if aim.only is None else aim.only.get(fragment.id, ())
        if only == () or not fragment.rows:
            continue
        if only is None and is_done(fragment, aim.identity, inputs, fields):
            work.done_fragments += 1
            work.done_rows += fragment.rows - fragment.deleted
            continue
        if isinstance(aim.fragments, int) and (work.fragments >= aim.fragments or _is_unnamed(table, fragment, aim)):
            continue
        _note_what_is_there(work, fragment, fields, aim)
        work.fragments += 1
        work.rows += fragment.rows
        names = store.names(f"{folder}/{fragment.id}-{inputs}") if f"{fragment.id}-{inputs}" in begun else ()
        _add(work, fragment, inputs, only, names, fields, masked=aim.where is not None or only is not None)
    return work


def _add(
    work: Work,
    fragment: Fragment,
    inputs: str,
    only: tuple[int, ...] | None,
    names: Sequence[str],
    fields: tuple[int, ...],
    *,
    masked: bool,
) -> None:
    found = found_in(names)
    if found.finished and not masked:  # with a condition it has the other rows as they were then
        work.files.append(NewFile(fragment.id, found.finished[0], fields, inputs))
        work.kept += fragment.rows
        return
    missing = gaps(found.parts, 0, fragment.rows)
    work.kept += fragment.rows - sum(stop - start for start, stop in missing)
    for start, stop in missing or [(fragment.rows, fragment.rows)]:  # only its file is missing
        work.tasks.append(Task(fragment.id, fragment.rows, inputs, start, stop, only))


def _is_unnamed(table: LanceTable, fragment: Fragment, aim: Aim) -> bool:
    """Whether a condition names none of its rows."""
    return aim.where is not None and not len(table.matching(fragment.id, aim.where))


def _note_what_is_there(work: Work, fragment: Fragment, fields: Collection[int], aim: Aim) -> None:
    if aim.only is not None:
        return
    if not any(number in fields for file in fragment.files for number in file.fields):
        return
    before = filled_by(fragment, fields)
    if before:
        work.stale += 1
    else:
        work.strange += 1


def even_out(table: LanceTable, aim: Aim) -> LanceTable:
    """Lance takes a file of several columns only where a fragment has files of all of them, or of none: those that are
    missing beside others (a column that was there before, or was dropped and added anew) are added, empty."""
    import pyarrow as pa

    numbers = dict(zip(aim.columns, aim.fields(table), strict=True))
    files = []
    for fragment in table.fragments():
        there = {number for file in fragment.files for number in file.fields}
        names = [name for name, number in numbers.items() if number not in there]
        if not fragment.rows or not 0 < len(names) < len(numbers):
            continue
        schema = pa.schema([table.schema.field(name) for name in names])
        empty = pa.record_batch([pa.nulls(min(fragment.rows, EMPTY_ROWS), one.type) for one in schema], schema=schema)
        batches = (empty.slice(0, fragment.rows - at) for at in range(0, fragment.rows, EMPTY_ROWS))
        name = f"empty-{uuid.uuid4().hex}.lance"
        size = table.write(name, schema, batches)
        fields = tuple(numbers[name] for name in names)
        files.append(NewFile(fragment.id, name, fields, aim.inputs_of(table, fragment), size))
    if not files:
        return table
    table.commit(files, aim.inputs_of)
    return table.newest()


def _chosen(table: LanceTable, aim: Aim) -> Sequence[Fragment]:
    fragments = table.fragments()
    if aim.fragments is None or isinstance(aim.fragments, int):
        return fragments
    by_id = {fragment.id: fragment for fragment in fragments}
    missing = [number for number in aim.fragments if number not in by_id]
    if missing:
        known = ", ".join(map(str, list(by_id)[:10])) + (", ..." if len(by_id) > 10 else "")
        message = f"the table has no fragment {', '.join(map(str, missing))}"
        raise ConfigError(
            Problem("DT437", message, (f"it has {len(by_id)}: {known}",), (f"fragments={list(by_id)[:1]}",))
        )
    return [by_id[number] for number in aim.fragments]
