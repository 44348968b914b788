"""What does somebody hold who asked a service for something? A future, and errors that say what became of it."""

from __future__ import annotations

import heapq
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Condition, Thread
from typing import Any

from dovetail.errors import Problem, RunError

EARLY = 64
"""Deadlines that are kept however few requests are pending."""
DETAIL_LINES = 12


class ItemFailed(RunError):
    """This one item could not be done; the service goes on."""

    def __init__(self, problem: Problem, stage: str = "", error: str = "", traceback: str = "") -> None:
        super().__init__(problem)
        self.stage = stage
        """The unit: fused stages are joined by +. Empty: it never came to one."""
        self.error = error
        """Type and message of what was raised."""
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[ItemFailed], tuple[Any, ...]]:
        return type(self), (self.problems[0], self.stage, self.error, self.traceback)


class TooManyRequests(RunError):
    """As many requests are pending as the service was told to keep."""


class ServiceClosed(RunError):
    """The service is drained, cancelled or failed, and answers no more."""


class Ticket(Future[Any]):
    """One request. `result(timeout)` is what the pipeline made of the item; `cancel()` gives it up."""

    def __init__(self, item: Any, *, many: bool = False, deadline_s: float | None = None) -> None:
        super().__init__()
        self.item = item
        """Until it is sent."""
        self.many = many
        self.due = None if deadline_s is None else time.monotonic() + deadline_s
        self.deadline_s = deadline_s
        self.exact = 0
        """Results that came by a way on which nothing was dropped or multiplied."""
        self.found: list[tuple[tuple[int, ...], str, Any]] = []
        """Results so far, while more may come: key, leaf, result."""

    def give(self, result: Any) -> None:
        with suppress(InvalidStateError):  # it was given up, or its deadline passed
            self.set_result(result)

    def refuse(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.set_exception(error)

    def complete(self) -> None:
        """Nothing more comes: what there is is the answer."""
        found = self.found
        if len(found) > 1:
            found.sort(key=lambda one: one[:2])
        results = [result for _, _, result in found]
        if self.many:
            self.give(results)
        elif len(results) > 1:
            self.refuse(_several(len(results)))
        else:
            self.give(results[0] if results else None)


def _several(count: int) -> ItemFailed:
    message = f"the pipeline made {count} results of this item, and one was asked for"
    fixes = ("submit(item, many=True) gives the list of them",)
    return ItemFailed(Problem("DT379", message, fixes=fixes))


def item_failed(stage: str, error: str, traceback: str, attempts: int) -> ItemFailed:
    lines = tuple([line for line in traceback.splitlines() if line.strip()][-DETAIL_LINES:])
    times = f", {attempts} times" if attempts > 1 else ""
    problem = Problem("DT378", f"this item failed in {stage}{times}: {error}", lines, ("mend the item or the stage",))
    return ItemFailed(problem, stage, error, traceback)


class Deadlines:
    """Refuses tickets whose time is over. One thread, from the first deadline on, that sleeps until the next."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket]] = []
        self._changed = Condition()
        self._numbers = 0
        self._purged = EARLY
        self._thread: Thread | None = None
        self._closed = False

    def watch(self, ticket: Ticket) -> None:
        assert ticket.due is not None, "a ticket without a deadline"
        with self._changed:
            self._numbers += 1
            heapq.heappush(self._heap, (ticket.due, self._numbers, ticket))
            if len(self._heap) > self._purged:  # most were answered long ago
                self._heap = [entry for entry in self._heap if not entry[2].done()]
                heapq.heapify(self._heap)
                self._purged = max(EARLY, 2 * len(self._heap))
            if self._thread is None:
                self._thread = Thread(target=self._wait, name="dovetail-deadlines", daemon=True)
                self._thread.start()
            if self._heap and self._heap[0][2] is ticket:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _wait(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._heap or (left := self._heap[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left if self._heap else None)
                    continue
                ticket = heapq.heappop(self._heap)[2]
            ticket.refuse(TimeoutError(f"no result within {ticket.deadline_s:g} s"))
