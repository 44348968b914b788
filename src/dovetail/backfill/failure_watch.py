"""Whether rows that fail in succession are bad rows, or their worker is broken.

A streak that is longer than bad rows explain (`is_suspicious`) is examined by calling a row again that passed in this
worker before: if it fails now, the worker is broken. A run that ends within a streak is examined before its failed rows
are saved: the row that passed is called again until it passes, or has made the streak suspicious. A worker in which no
row has passed since it computed a suspect row alone, the row before a streak in another worker, was broken by that row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.streaming.failure_streak import is_suspicious

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_STREAK = 3
MIN_REPEATED_CALLS = 8
"""Failed calls of a row that passed, before a run that ends within a streak is the fault of the worker."""


class FailureWatch:
    """Counts the rows of one worker in the order of their calls. Rows are numbered within one `UdfCaller.run`."""

    __slots__ = (
        "_batch",
        "_cleared",
        "_failed",
        "_passed",
        "_rows",
        "_streak",
        "first_failed",
        "last_failed",
        "suspect_failed",
        "was_doubtful",
    )

    def __init__(self) -> None:
        self._rows = 0
        """Rows before the streak."""
        self._failed = 0
        """Of these, rows that failed."""
        self._streak = 0
        self._cleared = 0
        """Length of the longest streak that was the fault of its rows."""
        self._batch: Any = None
        self.last_failed = -1
        """Last row of the current run that failed; -1: none."""
        self._passed: tuple[Any, int] | None = None
        """Batch and row of a call that passed; None: no row has passed in this worker."""
        self.first_failed = 0
        """First row of the streak in the current run."""
        self.suspect_failed = False
        """Whether a suspect row failed, and no row has passed since."""
        self.was_doubtful = False
        """Whether rows failed before the current run, and no row has ever passed: the failures of this run show nothing
        about its rows."""

    def begin(self, batch: Any) -> None:
        self._batch, self.last_failed, self.first_failed = batch, -1, 0
        self.was_doubtful = self._streak > 0 and self._passed is None

    def end(self, rows: int, call: Callable[[Any, int], object] | None) -> bool:
        """All calls of a run are made. Whether its last rows failed because the worker is broken; without `call`, which
        calls a row of a batch, this is not examined."""
        self._count_passed(rows)
        is_broken = call is not None and self.last_failed >= 0 and self._streak > 0 and self._keeps_failing(call)
        if self._passed is not None and self._passed[0] is self._batch:
            batch, row = self._passed
            self._passed = batch.take([row]), 0  # a slice would keep the whole batch
        self._batch = None
        return is_broken

    def _count_passed(self, row: int) -> None:
        """All rows before this one, and after the last failure, passed."""
        count = row - self.last_failed - 1
        if count > 0:
            self._rows += self._streak + count
            self._failed += self._streak
            self._streak, self.suspect_failed, self.was_doubtful = 0, False, False
            self._passed = self._batch, row - 1

    def is_broken(self, row: int, call: Callable[[Any, int], object]) -> bool:
        """Count a row that failed. Whether the worker is broken; `call` calls a row of a batch."""
        self._count_passed(row)
        self.last_failed = row
        self._streak += 1
        if self._streak == 1:
            self.first_failed = row
        if not self._is_suspicious(self._streak):
            return False
        if self.suspect_failed if self._passed is None else self._fails_again(call):
            return True
        self._cleared = self._streak
        return False

    def _is_suspicious(self, streak: int) -> bool:
        looks = 1 + (self._rows + streak) // MIN_STREAK
        return streak >= MIN_STREAK and is_suspicious(streak, self._failed, self._rows, looks, self._cleared)

    def _keeps_failing(self, call: Callable[[Any, int], object]) -> bool:
        """Extend the streak by calls of the row that passed, until it passes or the streak is suspicious."""
        if self._passed is None:
            return self.suspect_failed
        repeated = 0
        while self._fails_again(call):
            repeated += 1
            if repeated >= MIN_REPEATED_CALLS and self._is_suspicious(self._streak + repeated):
                return True
        return False

    def _fails_again(self, call: Callable[[Any, int], object]) -> bool:
        """Whether the row fails that passed before."""
        assert self._passed is not None
        try:
            call(*self._passed)
        except BaseException:  # user code may raise anything
            return True
        return False
