"""Which rows are next? Ranges are handed out as workers come back, in pieces of about a second of work.

The source of a backfill's run. It never hands out more than workers can begin soon, because what a task leaves undone
comes back as a new one, and near the end what is left is cut finer, so that all workers end at the same time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from threading import Condition
from typing import TYPE_CHECKING

from dovetail.backfill.ranges import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.backfill.job import Done, Task

BUDGET_S = 1.5
"""What a kill costs, and one call more: at most 2 s of a worker."""
FIRST_BUDGET_S = 0.5
LEAST_BUDGET_S = 0.15
IN_HAND = 2
"""Tasks per slot: one runs, one waits."""
LONG_S = 0.3
"""Beside a task that takes so long, the way of the next one to its worker is nothing."""
MORE = 1
"""And one for a worker that may just come."""
LEAST_ROWS = 64
"""A fragment is not cut into smaller pieces while nobody knows how long a row takes."""
LEAST_S = 0.1
"""Nor into pieces of less work than this when somebody does."""


@dataclass(slots=True)
class Measured:
    """What workers did until now."""

    rows: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Rows per second of one slot."""
        return self.rows / self.seconds if self.rows and self.seconds > 0 else None


class Dealer:
    """Iterate over it for tasks; `settle` what came back, from any thread."""

    def __init__(self, tasks: Sequence[Task], workers: int, slots: int = 1, rate: float | None = None) -> None:
        """`slots`: tasks that one worker does at once. `rate`: rows per second of one slot, if it is known."""
        self._per_worker = slots
        self._slots = max(1, workers * slots)
        self._known_rate = rate
        self.measured = Measured()
        self._changed = Condition()
        self._out = 0
        self._took_s = 0.0
        """The last task."""
        self._workers: set[tuple[str, int]] = set()
        self._stopped = False
        self._error: BaseException | None = None
        self.rows_left = sum(task.stop - task.start for task in tasks)
        self._queue = deque(self._at_first(tasks))

    def _at_first(self, tasks: Sequence[Task]) -> Iterator[Task]:
        """Whole ranges, unless they are too few for all workers."""
        rows = max(1, self.rows_left)
        for task in tasks:
            share = (task.stop - task.start) / rows
            pieces = round(share * IN_HAND * self._slots) if len(tasks) < IN_HAND * self._slots else 1
            for start, stop in cut(task.start, task.stop, pieces, self._least_rows()):
                yield replace(task, start=start, stop=stop)

    @property
    def rate(self) -> float | None:
        return self.measured.rate or self._known_rate

    def _least_rows(self) -> int:
        rate = self.rate
        return LEAST_ROWS if rate is None else max(1, int(rate * LEAST_S))

    def __iter__(self) -> Iterator[Task]:
        while (task := self._next()) is not None:
            yield task
        if self._error is not None:
            raise self._error

    def _next(self) -> Task | None:
        """Waits until there is one; None: there is no more."""
        with self._changed:
            while True:
                if self._stopped or not self._queue:
                    if not self._out:
                        return None
                elif self._out < self._most():
                    self._out += 1
                    return replace(self._queue.popleft(), budget_s=self._budget())
                self._changed.wait()

    def _most(self) -> int:
        """Tasks that may be out. While one takes long, a second one that waits for its worker only opens one more
        fragment, and none of them is finished soon."""
        long = self._took_s >= LONG_S
        return self._slots * (1 if long else IN_HAND) + MORE

    def _budget(self) -> float:
        rate = self.rate
        if rate is None:
            return FIRST_BUDGET_S
        seconds = self.rows_left / rate / self._slots
        return min(BUDGET_S, max(LEAST_BUDGET_S, seconds / 3))

    def settle(self, done: Done) -> None:
        """A task came back; what it left undone goes first, so that fragments are finished one after another."""
        task = done.task
        with self._changed:
            self._out -= 1
            self._workers.add(done.worker)  # there may be more of them by now
            self._slots = max(self._slots, len(self._workers) * self._per_worker)
            self.rows_left -= done.reached - task.start
            self.measured.rows += done.computed
            self.measured.seconds += done.busy_s
            self._took_s = done.busy_s
            if done.reached < task.stop and done.failed is None:
                idle = self._slots - self._out - len(self._queue)
                pieces = cut(done.reached, task.stop, idle + 1 if idle > 0 else 1, self._least_rows())
                self._queue.extendleft(replace(task, start=start, stop=stop) for start, stop in reversed(pieces))
            self._changed.notify_all()

    def add(self, task: Task) -> None:
        """One more, and before all others."""
        with self._changed:
            self._queue.appendleft(task)
            self.rows_left += task.stop - task.start
            self._changed.notify_all()

    def expect(self, workers: int) -> None:
        """There will be so many."""
        with self._changed:
            self._slots = max(self._slots, workers * self._per_worker)
            self._changed.notify_all()

    @property
    def has_more(self) -> bool:
        """Whether there is something that nobody has done, or that has not come back."""
        with self._changed:
            return bool(self._queue or self._out)

    def stop(self, error: BaseException | None = None) -> None:
        """Hands out nothing more; whoever iterates gets the error when all that is out has come back."""
        with self._changed:
            self._stopped = True
            self._error = self._error or error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nothing comes back any more: the run is over."""
        with self._changed:
            self._stopped, self._out, self._error = True, 0, None
            self._changed.notify_all()
