"""What is said of a table that is not as one may think, or that others change?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.errors import Problem, RunError
from dovetail.observe.words import counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from dovetail.backfill.work import Work


def of_what_is_there(work: Work, column: str) -> list[str]:
    """Why rows are computed that have values."""
    notes = []
    if work.stale:
        by = "by another version of the function, from other input, or by where="
        notes.append(f"{counted(work.stale, 'fragment')} filled {by}: computed again")
    if work.strange:
        origin = "with values of unknown origin (compacted, updated, or written by others)"
        only = f'where="{column} IS NULL" computes only empty rows'
        notes.append(f"{counted(work.strange, 'fragment')} {origin}: computed again; {only}")
    return notes


def of_what_changed(column: str, changed: Collection[int], vanished: Collection[int]) -> str:
    """`vanished`: of those that were asked for by their number."""
    if vanished:
        which = ", ".join(map(str, sorted(vanished)))
        return f'fragment {which} is not there any more (compaction): table.backfill("{column}") computes the rest'
    return (
        f"{counted(len(changed), 'fragment')} changed while they were computed (compaction or update): computed again"
    )


def not_mended(column: str, changed: int, *, vanished: bool) -> RunError:
    what = f"{counted(changed, 'fragment')} changed while rows of them were computed again (compaction or update)"
    call = f'backfill("{column}", where="{column} IS NULL")' if vanished else f'retry_errors("{column}")'
    return RunError(Problem("DT438", f"{what}: these rows are not mended", fixes=(f"table.{call}",)))
