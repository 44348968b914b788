"""Source of range tasks for workers, cut to about a second of work, and the tracker of which fragments are complete.

The source of a backfill's run. It never hands out more than workers can begin soon, because what a task leaves undone
comes back as a new one, and near the end what is left is cut finer, so that all workers end at the same time.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from threading import Condition
from typing import TYPE_CHECKING

from dovetail.backfill.checkpoints import split_range

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dovetail.backfill.task import RangeResult, RangeTask

TASK_BUDGET_S = 1.5
"""What a kill costs, and one call more: at most 2 s of a worker."""
FIRST_TASK_BUDGET_S = 0.5
MIN_TASK_BUDGET_S = 0.15
TASKS_PER_SLOT = 2
"""Tasks per slot: one runs, one waits."""
LONG_TASK_S = 0.3
"""Beside a task that takes so long, the way of the next one to its worker is nothing."""
SPARE_TASKS = 1
"""And one for a worker that may just come."""
MIN_ROWS_PER_TASK = 64
"""A fragment is not cut into smaller pieces while nobody knows how long a row takes."""
MIN_TASK_S = 0.1
"""Nor into pieces of less work than this when somebody does."""


@dataclass(slots=True)
class MeasuredRate:
    """What workers did until now."""

    rows: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Rows per second of one slot."""
        return self.rows / self.seconds if self.rows and self.seconds > 0 else None


class TaskQueue:
    """Iterate over it for tasks; `settle` what came back, from any thread."""

    def __init__(self, tasks: Sequence[RangeTask], workers: int, slots: int = 1, rate: float | None = None) -> None:
        """`slots`: tasks that one worker does at once. `rate`: rows per second of one slot, if it is known."""
        self._per_worker = slots
        self._slots = max(1, workers * slots)
        self._known_rate = rate
        self.measured = MeasuredRate()
        self._changed = Condition()
        self._outstanding = 0
        self._last_task_s = 0.0
        """The last task."""
        self._workers: set[tuple[str, int]] = set()
        self._stopped = False
        self._error: BaseException | None = None
        self.rows_left = sum(task.stop - task.start for task in tasks)
        self._queue = deque(self._initial_tasks(tasks))

    def _initial_tasks(self, tasks: Sequence[RangeTask]) -> Iterator[RangeTask]:
        """Whole ranges, unless they are too few for all workers."""
        rows = max(1, self.rows_left)
        for task in tasks:
            share = (task.stop - task.start) / rows
            pieces = round(share * TASKS_PER_SLOT * self._slots) if len(tasks) < TASKS_PER_SLOT * self._slots else 1
            for start, stop in split_range(task.start, task.stop, pieces, self._min_rows()):
                yield replace(task, start=start, stop=stop)

    @property
    def rate(self) -> float | None:
        return self.measured.rate or self._known_rate

    def _min_rows(self) -> int:
        rate = self.rate
        return MIN_ROWS_PER_TASK if rate is None else max(1, int(rate * MIN_TASK_S))

    def __iter__(self) -> Iterator[RangeTask]:
        while (task := self._take()) is not None:
            yield task
        if self._error is not None:
            raise self._error

    def _take(self) -> RangeTask | None:
        """Waits until there is one; None: there is no more."""
        with self._changed:
            while True:
                if self._stopped or not self._queue:
                    if not self._outstanding:
                        return None
                elif self._outstanding < self._max_outstanding():
                    self._outstanding += 1
                    return replace(self._queue.popleft(), budget_s=self._budget())
                self._changed.wait()

    def _max_outstanding(self) -> int:
        """Tasks that may be out. While one takes long, a second one that waits for its worker only opens one more
        fragment, and none of them is finished soon."""
        long = self._last_task_s >= LONG_TASK_S
        return self._slots * (1 if long else TASKS_PER_SLOT) + SPARE_TASKS

    def _budget(self) -> float:
        rate = self.rate
        if rate is None:
            return FIRST_TASK_BUDGET_S
        seconds = self.rows_left / rate / self._slots
        return min(TASK_BUDGET_S, max(MIN_TASK_BUDGET_S, seconds / 3))

    def task_done(self, done: RangeResult) -> None:
        """A task came back; what it left undone goes first, so that fragments are finished one after another."""
        task = done.task
        with self._changed:
            self._outstanding -= 1
            self._workers.add(done.worker)  # there may be more of them by now
            self._slots = max(self._slots, len(self._workers) * self._per_worker)
            self.rows_left -= done.reached - task.start
            self.measured.rows += done.computed
            self.measured.seconds += done.busy_s
            self._last_task_s = done.busy_s
            if done.reached < task.stop and done.failed is None:
                idle = self._slots - self._outstanding - len(self._queue)
                pieces = split_range(done.reached, task.stop, idle + 1 if idle > 0 else 1, self._min_rows())
                self._queue.extendleft(replace(task, start=start, stop=stop) for start, stop in reversed(pieces))
            self._changed.notify_all()

    def add(self, task: RangeTask) -> None:
        """One more, and before all others."""
        with self._changed:
            self._queue.appendleft(task)
            self.rows_left += task.stop - task.start
            self._changed.notify_all()

    def expect_workers(self, workers: int) -> None:
        """There will be so many."""
        with self._changed:
            self._slots = max(self._slots, workers * self._per_worker)
            self._changed.notify_all()

    @property
    def has_more(self) -> bool:
        """Whether there is something that nobody has done, or that has not come back."""
        with self._changed:
            return bool(self._queue or self._outstanding)

    def stop(self, error: BaseException | None = None) -> None:
        """Hands out nothing more; whoever iterates gets the error when all that is out has come back."""
        with self._changed:
            self._stopped = True
            self._error = self._error or error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nothing comes back any more: the run is over."""
        with self._changed:
            self._stopped, self._outstanding, self._error = True, 0, None
            self._changed.notify_all()


MAX_TASK_FAILURES = 3
"""Of a range that cannot be read or written."""


class FragmentTracker:
    """Told of every task that came back."""

    def __init__(self, tasks: Iterable[RangeTask] = ()) -> None:
        self._fragments: dict[str, int] = {}
        self._rows_left: Counter[str] = Counter()
        """Rows of each fragment that nobody has done."""
        self._settled: set[str] = set()
        """Fragments that have their file, or need none."""
        self._failures: Counter[str] = Counter()
        for task in tasks:
            self._fragments[task.key] = task.fragment
            self._rows_left[task.key] += task.stop - task.start

    def on_result(self, done: RangeResult) -> list[RangeTask] | None:
        """More tasks; None: its fragment is settled already, and what it brings is not needed. One file for each
        fragment: of two workers that saw it complete the first one's, and if none did, one is asked."""
        task = done.task
        if task.key in self._settled:
            return None
        self._rows_left[task.key] += sum(stop - start for start, stop in done.missing) - (done.reached - task.start)
        more = [replace(task, start=start, stop=stop) for start, stop in done.missing]
        if done.file or done.untouched or done.fragment_changed:
            self._settled.add(task.key)
        elif done.failed is None and not self._rows_left[task.key] and (done.worker_error or task.start < task.stop):
            more.append(replace(task, start=task.rows, stop=task.rows))
        return more

    def has_failed_repeatedly(self, done: RangeResult) -> bool:
        """What hindered its worker hindered others before it, and none got any further."""
        key = done.task.key
        if done.worker_error:
            self._failures[key] += 1
        elif done.reached > done.task.start:
            self._failures.pop(key, None)
        return self._failures[key] >= MAX_TASK_FAILURES

    def incomplete_fragments(self) -> set[int]:
        return {fragment for key, fragment in self._fragments.items() if key not in self._settled}
