"""Source of range tasks for workers, cut to about a second of work, and the tracker of which fragments are complete.

The source of a backfill's run. It hands out only as many tasks as workers can start soon, because the rest of an
unfinished task becomes a new task. Near the end tasks become smaller, so that all workers finish at the same time.
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
"""Time budget of a task. A kill loses that and one call: at most 2 s per worker."""
FIRST_TASK_BUDGET_S = 0.5
MIN_TASK_BUDGET_S = 0.15
TASKS_PER_SLOT = 2
"""Tasks per slot: one running, one queued."""
LONG_TASK_S = 0.3
"""For tasks of this length the time to send the next one is negligible."""
SPARE_TASKS = 1
"""One more for a worker that may just have started."""
MIN_ROWS_PER_TASK = 64
"""Minimum piece of a fragment while the time per row is unknown."""
MIN_TASK_S = 0.1
"""Minimum work of a piece when the time per row is known."""


@dataclass(slots=True)
class MeasuredRate:
    """Rows and seconds of all finished tasks."""

    rows: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Rows per second of one slot."""
        return self.rows / self.seconds if self.rows and self.seconds > 0 else None


class TaskQueue:
    """Iterate to get tasks; `task_done` may be called from any thread."""

    def __init__(self, tasks: Sequence[RangeTask], workers: int, slots: int = 1, rate: float | None = None) -> None:
        """`slots`: concurrent tasks per worker. `rate`: rows per second of one slot, if known."""
        self._per_worker = slots
        self._slots = max(1, workers * slots)
        self._known_rate = rate
        self.measured = MeasuredRate()
        self._changed = Condition()
        self._outstanding = 0
        self._last_task_s = 0.0
        """Seconds of the last task."""
        self._workers: set[tuple[str, int]] = set()
        self._stopped = False
        self._error: BaseException | None = None
        self.rows_left = sum(task.stop - task.start for task in tasks)
        self._queue = deque(self._initial_tasks(tasks))

    def _initial_tasks(self, tasks: Sequence[RangeTask]) -> Iterator[RangeTask]:
        """Whole ranges, or pieces if there are fewer ranges than workers."""
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
        """Wait for the next task; None: no more tasks."""
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
        """Maximum number of tasks in flight. While tasks are long, queueing a second one per worker would only open
        more fragments, and delay the completion of all."""
        long = self._last_task_s >= LONG_TASK_S
        return self._slots * (1 if long else TASKS_PER_SLOT) + SPARE_TASKS

    def _budget(self) -> float:
        rate = self.rate
        if rate is None:
            return FIRST_TASK_BUDGET_S
        seconds = self.rows_left / rate / self._slots
        return min(TASK_BUDGET_S, max(MIN_TASK_BUDGET_S, seconds / 3))

    def task_done(self, done: RangeResult) -> None:
        """Settle a task. Its remaining rows come first in the queue, so that fragments complete one after another."""
        task = done.task
        with self._changed:
            self._outstanding -= 1
            self._workers.add(done.worker)  # workers may have been added
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
        """Add a task at the front of the queue."""
        with self._changed:
            self._queue.appendleft(task)
            self.rows_left += task.stop - task.start
            self._changed.notify_all()

    def expect_workers(self, workers: int) -> None:
        """Set the expected number of workers."""
        with self._changed:
            self._slots = max(self._slots, workers * self._per_worker)
            self._changed.notify_all()

    @property
    def has_more(self) -> bool:
        """Whether tasks are queued or in flight."""
        with self._changed:
            return bool(self._queue or self._outstanding)

    def stop(self, error: BaseException | None = None) -> None:
        """Stop handing out tasks; iteration raises the error when all tasks in flight have returned."""
        with self._changed:
            self._stopped = True
            self._error = self._error or error
            self._changed.notify_all()

    def abandon(self) -> None:
        """End the iteration: the run is over."""
        with self._changed:
            self._stopped, self._outstanding, self._error = True, 0, None
            self._changed.notify_all()


MAX_TASK_FAILURES = 3
"""Attempts for a range that cannot be read or written."""


class FragmentTracker:
    """Tracks which rows of each fragment are done."""

    def __init__(self, tasks: Iterable[RangeTask] = ()) -> None:
        self._fragments: dict[str, int] = {}
        self._rows_left: Counter[str] = Counter()
        """Rows of each fragment that are not done."""
        self._settled: set[str] = set()
        """Fragments that have their data file, or need none."""
        self._failures: Counter[str] = Counter()
        for task in tasks:
            self._fragments[task.key] = task.fragment
            self._rows_left[task.key] += task.stop - task.start

    def on_result(self, done: RangeResult) -> list[RangeTask] | None:
        """Further tasks for the fragment; None: the fragment is already settled, and the result is ignored. Each
        fragment gets one data file: the first one if two workers wrote it; if none did, a task to write it is
        returned."""
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
        """Whether the task failed repeatedly without progress, for reasons outside of the function."""
        key = done.task.key
        if done.worker_error:
            self._failures[key] += 1
        elif done.reached > done.task.start:
            self._failures.pop(key, None)
        return self._failures[key] >= MAX_TASK_FAILURES

    def incomplete_fragments(self) -> set[int]:
        return {fragment for key, fragment in self._fragments.items() if key not in self._settled}
