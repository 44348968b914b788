"""Whether rows that fail in succession are bad rows, or their worker is broken.

A streak that is longer than bad rows explain (`is_suspicious`) is examined by calling a row again that passed in this
worker before: if it fails now, the worker is broken. A run that ends within a streak is examined before its failed rows
are saved: the row that passed is called again until it passes, or has made the streak suspicious.

A worker in which no row has passed may have been broken by the first of them. Another worker then tries that row alone.
If the next rows fail there, too, it is replaced as well, but only few workers in succession are (`may_replace`): then
the rows are to blame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.streaming.broken_worker_rule import is_suspicious, may_replace

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_STREAK = 3
MIN_REPEATED_CALLS = 8
"""Failed calls of a row that passed, before a run that ends within a streak is the fault of the worker."""


class PassedRow:
    """A row that passed in this process, in any of its slots."""

    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place: tuple[Any, int] | None = None
        """Batch and row; None: no row has passed."""


class FailureWatch:
    """Counts the rows of one slot in the order of their calls. Rows are numbered within one `UdfCaller.run`."""

    __slots__ = (
        "_batch",
        "_cleared",
        "_failed",
        "_passed",
        "_rows",
        "_streak",
        "first_failed",
        "last_failed",
        "replaced_before",
        "was_doubtful",
    )

    def __init__(self, passed: PassedRow | None = None) -> None:
        self._rows = 0
        """Rows before the streak."""
        self._failed = 0
        """Rows before the streak that failed."""
        self._streak = 0
        self._cleared = 0
        """Length of the longest streak that was the fault of its rows."""
        self._batch: Any = None
        self.last_failed = -1
        """Last row of the current run that failed; -1: none."""
        self._passed = PassedRow() if passed is None else passed
        self.first_failed = 0
        """First row of the streak in the current run."""
        self.replaced_before = 0
        """Workers in succession that were replaced before this one, with no row that passed in between."""
        self.was_doubtful = False
        """Whether rows failed before the current run, and no row has ever passed: the failures of this run show nothing
        about its rows."""

    def clone_for_thread(self) -> FailureWatch:
        """Watch of another slot of the process."""
        return FailureWatch(self._passed)

    @property
    def has_passed(self) -> bool:
        """Whether a row has passed in this process."""
        return self._passed.place is not None

    def begin(self, batch: Any) -> None:
        self._batch, self.last_failed, self.first_failed = batch, -1, 0
        self.was_doubtful = self._streak > 0 and not self.has_passed

    def end(self, call: Callable[[Any, int], object] | None) -> bool:
        """All calls of a run are made and counted. Whether its last rows failed because the worker is broken; without
        `call`, which calls a row of a batch, this is not examined."""
        is_broken = call is not None and self.last_failed >= 0 and self._streak > 0 and self._keeps_failing(call)
        place = self._passed.place
        if place is not None and place[0] is self._batch:
            self._passed.place = self._batch.take([place[1]]), 0  # a slice would keep the whole batch
        self._batch = None
        return is_broken

    def count_passed(self, row: int, count: int = 1) -> None:
        """This row passed last, of `count` rows that passed in succession."""
        self._rows += self._streak + count
        self._failed += self._streak
        self._streak, self.was_doubtful = 0, False
        self._passed.place = self._batch, row

    def count_failed(self, row: int) -> None:
        self.last_failed = row
        self._streak += 1
        if self._streak == 1:
            self.first_failed = row

    def count_passed_before(self, row: int) -> None:
        """All rows before this one, and after the last failure, passed."""
        count = row - self.last_failed - 1
        if count > 0:
            self.count_passed(row - 1, count)

    @property
    def is_suspicious(self) -> bool:
        """Whether the streak is longer than bad rows explain."""
        return self._is_suspicious(self._streak)

    def is_broken(self, row: int, call: Callable[[Any, int], object]) -> bool:
        """Count a row that failed; all rows before it are called. Whether the worker is broken; `call` calls a row of a
        batch."""
        self.count_passed_before(row)
        self.count_failed(row)
        if not self.is_suspicious:
            return False
        if self._fails_again(call) if self.has_passed else self._may_replace():
            return True
        self.clear_streak()
        return False

    def clear_streak(self) -> None:
        """The rows were to blame for a streak that looked like a broken worker."""
        self._cleared = max(self._cleared, self._streak)

    def _may_replace(self) -> bool:
        """Whether a worker in which no row has passed may be replaced: not if new workers fail, too, unless its streak
        is long."""
        return may_replace(self._streak, self.replaced_before)

    def _is_suspicious(self, streak: int) -> bool:
        comparisons = 1 + (self._rows + streak) // MIN_STREAK
        return streak >= MIN_STREAK and is_suspicious(streak, self._failed, self._rows, comparisons, self._cleared)

    def _keeps_failing(self, call: Callable[[Any, int], object]) -> bool:
        """Extend the streak by calls of the row that passed, until it passes or the streak is suspicious."""
        if not self.has_passed:
            return self._may_replace()
        repeated = 0
        while self._fails_again(call):
            repeated += 1
            if repeated >= MIN_REPEATED_CALLS and self._is_suspicious(self._streak + repeated):
                return True
        return False

    def _fails_again(self, call: Callable[[Any, int], object]) -> bool:
        """Whether the row fails that passed before."""
        assert self._passed.place is not None
        try:
            call(*self._passed.place)
        except BaseException:  # user code may raise anything
            return True
        return False
