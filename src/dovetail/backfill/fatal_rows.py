"""Rows that kill workers: which rows of a dead worker are computed next, and after how many deaths one row is to blame.
Pure.

A worker that dies leaves an `AttemptMark` of the rows it had started. The next worker that gets the task computes them
in smaller and smaller steps, each with a mark of its own, until the row that kills workers is isolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.backfill.task import WORKER_DIED, FailedRow, RangeTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.backfill.checkpoints import AttemptMark

BISECTION_STEPS = 16
"""Number of steps in which rows of a dead worker are computed again."""
MIN_DEATHS_TO_BLAME = 2
"""A single row is blamed after this many deaths: one worker may have been killed for another reason."""


def fatal_row(task: RangeTask, row: int) -> FailedRow:
    message = (
        f"its worker died {MIN_DEATHS_TO_BLAME} times on this row alone (crash in native code, kill, out of memory)"
    )
    return FailedRow(task.fragment, row, WORKER_DIED, message)


def narrowest_attempt(tried: Sequence[AttemptMark], start: int, stop: int) -> tuple[int, int, int] | None:
    """The smallest attempted range within [start, stop), and the number of attempts; None if there is none."""
    inside = [item for item in tried if max(start, item.start) < min(stop, item.stop)]
    if not inside:
        return None
    least = min(inside, key=lambda item: (item.stop - item.start, item.start))
    times = max(item.time for item in inside if (item.start, item.stop) == (least.start, least.stop))
    return max(start, least.start), min(stop, least.stop), times


def first_suspect(tried: Sequence[AttemptMark], start: int, stop: int) -> tuple[int, int, int] | None:
    """The narrowest attempt within [start, stop), unless there are others before it."""
    found = narrowest_attempt(tried, start, stop)
    if found is None or found[0] == start:
        return found
    before = [item for item in tried if item.start >= start and item.stop <= found[0]]
    return first_suspect(before, start, found[0]) or found


@dataclass(frozen=True, slots=True)
class NextStep:
    """Rows that are computed next where a worker died."""

    start: int
    stop: int
    rows: int
    """Rows per step."""
    attempt: int = 1
    """Number of the attempt at a single row."""
    is_fatal: bool = False
    """The row `start` is to blame and is not computed again."""


def next_step(tried: Sequence[AttemptMark], start: int, stop: int) -> NextStep | None:
    """The next step within [start, stop), by the marks of workers that died; None: there are none."""
    suspect = first_suspect(tried, start, stop)
    if suspect is None:
        return None
    first, last, deaths = suspect
    is_single = last - first == 1
    if is_single and deaths >= MIN_DEATHS_TO_BLAME:
        return NextStep(first, last, 1, is_fatal=True)
    if first > start:
        return NextStep(start, first, first - start)
    return NextStep(first, last, max(1, (last - first) // BISECTION_STEPS), deaths + 1 if is_single else 1)
