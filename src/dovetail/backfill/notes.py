"""What is said of a table that is not as one may think, that others change, or that cannot be read?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dovetail.backfill.lease import TAKEN
from dovetail.backfill.settling import TRIES
from dovetail.backfill.unchanged import NOT_CHANGED
from dovetail.errors import Problem, RunError
from dovetail.observe.words import counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from dovetail.backfill.job import Done
    from dovetail.backfill.work import Work


def is_null(column: str) -> str:
    """As a condition: what is not a plain name stands in backticks."""
    return f"{column if re.fullmatch('[a-z_][a-z0-9_]*', column) else f'`{column}`'} IS NULL"


def of_what_is_there(work: Work, column: str) -> list[str]:
    """Why rows are computed that have values."""
    notes = []
    if work.stale:
        by = "by another version of the function, from other input, or by where="
        notes.append(f"{counted(work.stale, 'fragment')} filled {by}: computed again")
    if work.strange:
        origin = "with values of unknown origin (updated, written by others, or compacted with rows that were not done)"
        only = f'where="{is_null(column)}" computes only empty rows'
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
    call = f'backfill("{column}", where="{is_null(column)}")' if vanished else f'retry_errors("{column}")'
    return RunError(Problem("DT438", f"{what}: these rows are not mended", fixes=(f"table.{call}",)))


def as_typed(function: str, where: str | None, fragments: object) -> str:
    """What a call was given besides the column."""
    given = {"where": where, "fragments": list(fragments) if isinstance(fragments, tuple) else fragments}
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    return "".join(f", {one}" for one in ([function] if function else []) + named)


def dropped(function: str, names: Collection[str], there: Collection[str]) -> RunError:
    what = ", ".join(map(repr, dict.fromkeys(names)))
    message = f"column {what}, which {function} or where= reads, was dropped or renamed while the table was filled"
    fix = f"name one that is there: {', '.join(map(repr, there))}; what is finished is committed"
    return RunError(Problem(NOT_CHANGED, message, fixes=(fix,)))


def taken_over(column: str) -> RunError:
    message = f"column {column!r} was taken over by another process: this one was not heard of for too long"
    return RunError(Problem(TAKEN, message, fixes=(f'table.history("{column}") says by whom',)))


def cannot(done: Done, uri: str) -> RunError:
    what, _, detail = done.broken.partition("\n")
    lines = tuple(line for line in detail.splitlines() if line.strip())[-6:]
    message = f"fragment {done.task.fragment} could not be read or written, {TRIES} times: {what}"
    return RunError(Problem("DT449", message, lines, ("mend that and call it again: what is finished is kept",), uri))
