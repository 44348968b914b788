"""Notes and errors about values that are recomputed, fragments that changed, dropped columns and a lost lease."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dovetail.backfill.lance_client import CANNOT_WRITE
from dovetail.backfill.lease import COLUMN_TAKEN
from dovetail.backfill.task_queue import MAX_TASK_FAILURES
from dovetail.errors import Call, Change, Problem, RunError, Setting, Text
from dovetail.text_format import format_count

if TYPE_CHECKING:
    from collections.abc import Collection

    from dovetail.backfill.pending_work import PendingWork
    from dovetail.backfill.task import RangeResult


def null_condition(column: str) -> str:
    """SQL condition that the column is NULL; names that are not plain identifiers get backticks."""
    return f"{column if re.fullmatch('[a-z_][a-z0-9_]*', column) else f'`{column}`'} IS NULL"


def recompute_notes(work: PendingWork, column: str) -> list[str]:
    """Why rows that have values are computed again."""
    notes: list[str] = []
    if work.stale:
        by = "by another version of the function, from other input, or with another condition"
        notes.append(f"{format_count(work.stale, 'fragment')} filled {by}: computed again")
    if work.foreign:
        origin = "with values of unknown origin (updated, written by others, or compacted with unfinished rows)"
        only = Change({"where": null_condition(column)})
        what = f"{format_count(work.foreign, 'fragment')} {origin}: computed again; "
        notes.append(Text(what, only, " computes only empty rows"))
    return notes


def change_note(column: str, changed: Collection[int], vanished: Collection[int]) -> str:
    """`vanished`: requested fragments that no longer exist."""
    if vanished:
        which = ", ".join(map(str, sorted(vanished)))
        what = f"fragment {which} no longer exists (compaction): "
        return Text(what, Call("table.backfill", (column,)), " computes the rest")
    return (
        f"{format_count(len(changed), 'fragment')} changed during the backfill (compaction or update): computed again"
    )


def rows_not_retried_error(column: str, changed: int, *, vanished: bool) -> RunError:
    what = f"{format_count(changed, 'fragment')} changed while their rows were retried (compaction or update)"
    fill = Call("table.backfill", (column,), {"where": null_condition(column)})
    call = fill if vanished else Call("table.retry_errors", (column,))
    return RunError(Problem("DT438", f"{what}: these rows were not retried", fixes=(call,)))


def column_dropped_error(function: str, names: Collection[str], there: Collection[str]) -> RunError:
    what = ", ".join(map(repr, dict.fromkeys(names)))
    message = Text(
        f"column {what}, which {function} or ", Setting("where"), " reads, was dropped or renamed during the backfill"
    )
    fix = f"use an existing column: {', '.join(map(repr, there))}; what is finished is committed"
    return RunError(Problem(CANNOT_WRITE, message, fixes=(fix,)))


def lease_lost_error(column: str) -> RunError:
    message = f"column {column!r} was taken over by another process: this one sent no heartbeat for too long"
    return RunError(
        Problem(COLUMN_TAKEN, message, fixes=(Call("table.history", (column,), note="lists the backfills"),))
    )


def task_failed_error(done: RangeResult, uri: str) -> RunError:
    what, _, detail = done.worker_error.partition("\n")
    lines = tuple(line for line in detail.splitlines() if line.strip())[-6:]
    message = f"fragment {done.task.fragment} could not be read or written in {MAX_TASK_FAILURES} attempts: {what}"
    return RunError(
        Problem("DT449", message, lines, ("correct that, then repeat the backfill; finished work is kept",), uri)
    )
