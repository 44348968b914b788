"""Slots that wait for calls, and the detection of deadlocks among them. Worker side.

A thread that has waited for a call for a while asks the processes behind it what they wait for (see `call_cycles`); the
processes answer from the thread that reads their sockets. Waits with `result` and `exception` in the thread of a slot
count, and calls that an async method awaits itself; tasks and threads of the user's own are never part of a cycle.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import chain, repeat
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.engines.call_cycles import WaitingSlot, find_cycle
from dovetail.engines.local.running_slot import CURRENT_SLOT
from dovetail.errors import CallCycleError, Problem

if TYPE_CHECKING:
    from collections.abc import Generator

    from dovetail.engines.call_cycles import CallCycle, Process
    from dovetail.engines.local.running_slot import RunningSlot

CHECK_PAUSES_S = (0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
"""Seconds between the checks of a call that is waited for; the last one is repeated."""
MIN_TRACKED_TIMEOUT_S = 1.0
"""A wait with a shorter timeout ends by itself."""
ANSWER_TIMEOUT_S = 0.3
"""A process that does not say within this time what it waits for is at work."""


FINISHED = "FINISHED"
"""State of `concurrent.futures`. It is final, so that it can be read without the lock."""


class CallSender(Protocol):
    """The process that makes a call."""

    def slots_behind(self, waiting: WaitingSlot) -> Future[list[WaitingSlot]]:
        """Ask the called process for the slots that may free this one; empty if one of them is at work."""
        ...

    def waiting_slot(self, slot: RunningSlot, call: WaitableCall) -> WaitingSlot: ...


class WaitableCall(Future[Any]):
    """Future of a call that was made in a worker."""

    is_direct = False
    """Whether caller and called object are in one process."""

    def __init__(self, sender: CallSender, called: Process) -> None:
        super().__init__()
        self.sender = sender
        self.called = called
        self.number = 0
        """Unique in this process."""
        slot = CURRENT_SLOT.get()
        self.depth = 0 if slot is None else slot.depth + 1
        """How many callers wait for this call, if its own caller does."""

    def run_here(self) -> None:
        """Run the call in this thread, which waits for it, if that is possible."""

    def withdraw(self, error: BaseException) -> None:
        """End the call with this error; if it has not begun, it never does."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> Any:
        if self._state != FINISHED:
            timeout = self._wait(timeout)
        if self._state == FINISHED and self._exception is None:
            return self._result
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(timeout if self._state == FINISHED else self._wait(timeout))

    def __await__(self) -> Generator[Any, None, Any]:
        return self.awaited_as(self).__await__()

    async def awaited_as(self, future: Future[Any]) -> Any:
        """Await a future that this call ends, as the slot of the async method that awaits it."""
        slot, task = CURRENT_SLOT.get(), asyncio.current_task()
        if slot is None or slot.task is not task or self._state == FINISHED:
            return await asyncio.wrap_future(future)
        slot.waits_for = self
        checks = CycleChecks(self, slot)
        try:
            return await asyncio.wrap_future(future)
        finally:
            slot.waits_for = None
            checks.stop()

    def _wait(self, timeout: float | None) -> float | None:
        """Wait as a slot that can be part of a deadlock; returns the seconds that are left."""
        slot = CURRENT_SLOT.get()
        if slot is None or slot.thread != get_ident() or (timeout is not None and timeout <= MIN_TRACKED_TIMEOUT_S):
            if timeout is None:
                self.run_here()
            return timeout
        end = None if timeout is None else time.monotonic() + timeout
        slot.waits_for = self
        try:
            if end is None:
                self.run_here()
            if self._state != FINISHED:
                self._wait_and_check(slot, end)
        finally:
            slot.waits_for = None
        return None if end is None else max(0.0, end - time.monotonic())

    def _wait_and_check(self, slot: RunningSlot, end: float | None) -> None:
        for checks, pause_s in enumerate(chain(CHECK_PAUSES_S, repeat(CHECK_PAUSES_S[-1]))):
            self._pause(pause_s if end is None else min(pause_s, end - time.monotonic()))
            if self.done() or (end is not None and time.monotonic() >= end):
                return
            self.fail_in_cycle(slot, checks)

    def fail_in_cycle(self, slot: RunningSlot, checks: int) -> None:
        """End the call with an error if its slot is part of a cycle; at the first check only the last call of a
        chain."""
        cycle = self._find_cycle(slot)
        if cycle is not None and (cycle.is_deepest or checks) and cycle == self._find_cycle(slot):
            self.withdraw(cycle_error(cycle))

    def _pause(self, seconds: float) -> None:
        """Wait until the call is answered, at most for some seconds; may return earlier."""
        self._wait_for_notice(seconds)

    def _wait_for_notice(self, seconds: float) -> None:
        """Wait until the call is answered or `_wake` is called."""
        with suppress(TimeoutError, CancelledError):
            super().exception(max(0.0, seconds))

    def _find_cycle(self, slot: RunningSlot) -> CallCycle | None:
        return find_cycle(self.sender.waiting_slot(slot, self), self._slots_behind)

    def _slots_behind(self, waiting: WaitingSlot) -> list[WaitingSlot]:
        answer = self.sender.slots_behind(waiting)
        answer.add_done_callback(self._wake)
        end = time.monotonic() + ANSWER_TIMEOUT_S
        while not answer.done() and not self.done() and time.monotonic() < end:
            self._wait_for_notice(end - time.monotonic())
        return answer.result() if answer.done() and answer.exception() is None else []

    def _wake(self, _answer: Future[Any]) -> None:
        with self._condition:
            self._condition.notify_all()


class CycleChecks:
    """Checks of a call that an async method awaits. Nothing but a timer as long as the call is fast; a check, which
    asks other processes, runs in a thread. Thread: event loop."""

    def __init__(self, call: WaitableCall, slot: RunningSlot) -> None:
        self._call, self._slot = call, slot
        self._loop = asyncio.get_running_loop()
        self._pauses = enumerate(chain(CHECK_PAUSES_S, repeat(CHECK_PAUSES_S[-1])))
        self._is_stopped = False
        self._schedule()

    def _schedule(self) -> None:
        number, pause_s = next(self._pauses)
        self._timer = self._loop.call_later(pause_s, self._check, number)

    def _check(self, number: int) -> None:
        checked = self._loop.run_in_executor(None, self._call.fail_in_cycle, self._slot, number)
        checked.add_done_callback(self._on_checked)

    def _on_checked(self, checked: asyncio.Future[None]) -> None:
        if not self._is_stopped and not checked.cancelled() and checked.exception() is None:
            self._schedule()

    def stop(self) -> None:
        self._is_stopped = True
        self._timer.cancel()


def cycle_error(cycle: CallCycle) -> CallCycleError:
    message = f"calls wait for each other, and all slots are taken: {cycle}"
    fixes = ("give one of them more slots", "make one of the calls without waiting for its result")
    return CallCycleError(Problem("DT525", message, fixes=fixes))
