"""Fragments of a table that are done, stale or pending, and the range tasks that remain."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dovetail.backfill.arguments import BAD_BACKFILL_ARGUMENT
from dovetail.backfill.checkpoints import errors_folder, parse_file_names, parts_folder, uncovered_ranges
from dovetail.backfill.compaction_history import CompactionHistory
from dovetail.backfill.lance_table import NewDataFile
from dovetail.backfill.target import current_identity, is_done, is_incomplete
from dovetail.backfill.task import RangeTask
from dovetail.errors import UNSET, Change, ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dovetail.backfill.lance_table import Fragment, LanceTable
    from dovetail.backfill.store import TableStore
    from dovetail.backfill.target import FillTarget

EMPTY_BATCH_ROWS = 8_192
"""Rows of a batch of NULLs."""


@dataclass(slots=True)
class PendingWork:
    """Remaining work in one version of a table."""

    tasks: list[RangeTask] = field(default_factory=list)
    files: list[NewDataFile] = field(default_factory=list)
    """Complete data files that only need a commit."""
    fragments: int = 0
    """Fragments that are not complete."""
    rows: int = 0
    """Rows of these fragments, including rows in checkpoints."""
    kept: int = 0
    """Rows of these fragments in checkpoints or complete data files."""
    done_fragments: int = 0
    done_rows: int = 0
    stale: int = 0
    """Fragments filled by another version of the function, or whose input changed."""
    foreign: int = 0
    """Fragments with values of unknown origin: updated, filled by others, or compacted with unfinished fragments."""
    carried: set[str] = field(default_factory=set)
    """Fragments that are complete because a compaction copied complete ones (see `CompactionHistory`)."""


def find_pending_work(table: LanceTable, store: TableStore, target: FillTarget) -> PendingWork:
    work = PendingWork()
    fields = target.fields(table)
    folder = parts_folder(target.folder, target.parts)
    begun = set(store.folders(folder))
    history = CompactionHistory(table, store, target)
    # an older version of the table may be restored without its error records: those rows are not complete
    failed = {name.partition(".")[0] for name in store.names(errors_folder(target.folder, target.identity))}
    for fragment in _selected_fragments(table, target):
        inputs = target.input_hash(table, fragment)
        only = None if target.only is None else target.only.get(fragment.id, ())
        if only == () or not fragment.rows:
            continue
        done = is_done(fragment, target.identity, inputs, fields) and (
            f"{fragment.id}-{inputs}" in failed or not is_incomplete(fragment, fields)
        )
        if only is not None and not done:  # it was filled again or its input changed: its errors no longer apply
            continue
        if only is None and not target.recompute_fragments and (done or history.is_done(fragment)):
            work.done_fragments += 1
            work.done_rows += fragment.rows - fragment.deleted
            continue
        if isinstance(target.fragments, int) and (
            work.fragments >= target.fragments or _matches_no_row(table, fragment, target)
        ):
            continue
        _count_existing_values(work, fragment, fields, target)
        work.fragments += 1
        work.rows += fragment.rows
        before = target.kept_values_hash(table, fragment)
        whole = RangeTask(fragment.id, fragment.rows, inputs, 0, fragment.rows, only, before)
        _add_fragment(
            work,
            whole,
            store.names(f"{folder}/{whole.checkpoint_key}") if whole.checkpoint_key in begun else (),
            fields,
        )
    work.carried = history.done
    return work


def _add_fragment(work: PendingWork, whole: RangeTask, names: Sequence[str], fields: tuple[int, ...]) -> None:
    found = parse_file_names(names)
    finished = [name for name, before in found.finished if before == whole.before]
    if finished:
        work.files.append(NewDataFile(whole.fragment, finished[0], fields, whole.inputs, before=whole.before))
        work.kept += whole.rows
        return
    missing = uncovered_ranges(found.parts, 0, whole.rows)
    work.kept += whole.rows - sum(stop - start for start, stop in missing)
    for start, stop in missing or [(whole.rows, whole.rows)]:  # only the data file is missing
        work.tasks.append(replace(whole, start=start, stop=stop))


def _matches_no_row(table: LanceTable, fragment: Fragment, target: FillTarget) -> bool:
    """Whether the condition matches no row of the fragment."""
    return target.where is not None and not len(table.matching_offsets(fragment.id, target.where))


def _count_existing_values(work: PendingWork, fragment: Fragment, fields: Collection[int], target: FillTarget) -> None:
    if target.only is not None:
        return
    if not any(number in fields for file in fragment.files for number in file.fields):
        return
    before = current_identity(fragment, fields)
    if before:
        work.stale += 1
    else:
        work.foreign += 1


def add_missing_column_files(table: LanceTable, target: FillTarget) -> LanceTable:
    """Add empty files for missing columns. Lance accepts a file of several columns only where the fragment has files of
    all of them or of none; a column that existed before, or was dropped and added again, breaks that."""
    import pyarrow as pa

    numbers = dict(zip(target.columns, target.fields(table), strict=True))
    files = []
    for fragment in table.fragments():
        there = {number for file in fragment.files for number in file.fields}
        names = [name for name, number in numbers.items() if number not in there]
        if not fragment.rows or not 0 < len(names) < len(numbers):
            continue
        schema = pa.schema([table.schema.field(name) for name in names])
        empty = pa.record_batch(
            [pa.nulls(min(fragment.rows, EMPTY_BATCH_ROWS), one.type) for one in schema], schema=schema
        )
        batches = (empty.slice(0, fragment.rows - at) for at in range(0, fragment.rows, EMPTY_BATCH_ROWS))
        name = f"empty-{uuid.uuid4().hex}.lance"
        size = table.write(name, schema, batches)
        fields = tuple(numbers[name] for name in names)
        files.append(NewDataFile(fragment.id, name, fields, target.input_hash(table, fragment), size))
    if not files:
        return table
    table.commit(files, target.input_hash)
    return table.newest()


def _selected_fragments(table: LanceTable, target: FillTarget) -> Sequence[Fragment]:
    fragments = table.fragments()
    if target.fragments is None or isinstance(target.fragments, int):
        return fragments
    problems = unknown_fragment_problems(table, target.fragments)
    if problems:
        raise ConfigError(problems)
    by_id = {fragment.id: fragment for fragment in fragments}
    return [by_id[number] for number in target.fragments]


def unknown_fragment_problems(table: LanceTable, wanted: int | tuple[int, ...] | None) -> list[Problem]:
    there = [fragment.id for fragment in table.fragments()]
    missing = [number for number in wanted if number not in {*there}] if isinstance(wanted, tuple) else []
    if not missing:
        return []
    known = ", ".join(map(str, there[:10])) + (", ..." if len(there) > 10 else "")
    message = f"the table has no fragment {', '.join(map(str, missing))}"
    if not there:
        fixes = ("add rows to the table", Change({"fragments": UNSET}))
        return [Problem(BAD_BACKFILL_ARGUMENT, f"{message}: it has no rows", fixes=fixes)]
    return [
        Problem(BAD_BACKFILL_ARGUMENT, message, (f"it has {len(there)}: {known}",), (Change({"fragments": there[:1]}),))
    ]
