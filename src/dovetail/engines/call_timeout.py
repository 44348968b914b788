"""Timeout of a call: interrupt it by signal, then end the process; stop a loop over rows at a deadline.

`SoftTimeout` interrupts a call of the main thread by SIGALRM. `Watchdog` ends the process if the call does not return
even then; the controller does the same for stages. `Watchdog.stop_at` stops a loop over a list from another thread: it
empties the list, which ends the loop after the current row and costs nothing per row.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar

from dovetail.control.interruption_grace import interruption_grace_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import FrameType

T = TypeVar("T")
EXIT_CODE = 70


def timeout_text(timeout_s: float) -> str:
    return f"no result within the timeout of {timeout_s:g} s"


async def call_with_timeout_async(call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """The result of a coroutine; TimeoutError if it takes longer."""
    import asyncio

    try:
        async with asyncio.timeout(timeout_s):
            return await call()
    except TimeoutError as error:
        raise TimeoutError(str(error) or timeout_text(timeout_s)) from None


class Watchdog:
    """Thread that ends the process when a call exceeds its timeout; started on first use."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._deadlines: dict[int, tuple[float, int]] = {}
        """First row of a call -> time at which the process is ended, number of rows of the call."""
        self._until = inf
        self._values: list[Any] | None = None
        self._wakes = -inf
        self._closed = False
        self.report_hang: Callable[[int], None] | None = None
        self.running: Callable[[], int | None] = lambda: None
        """Returns the row whose code is running, if several calls are in flight and that is known."""

    @contextmanager
    def stop_at(self, until: float, values: list[Any]) -> Iterator[None]:
        """Empty the list at that time."""
        with self._changed:
            self._until, self._values = until, values
            self._wake(until)
        try:
            yield
        finally:
            with self._changed:
                self._values, self._until = None, inf

    def begin(self, row: int, rows: int, allowed_s: float) -> None:
        """Start the time limit of a call of `rows` rows, the first of which is `row`."""
        end = monotonic() + allowed_s + interruption_grace_s(allowed_s)
        with self._changed:
            self._deadlines[row] = (end, rows)
            self._wake(end)

    def end(self, row: int) -> None:
        with self._changed:
            self._deadlines.pop(row, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(1.0)

    def _wake(self, at: float) -> None:
        if self._thread is None and at < inf:
            self._closed = False
            self._thread = threading.Thread(target=self._run, name="dovetail-watchdog", daemon=True)
            self._thread.start()
        if at < self._wakes:
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = monotonic()
                late = [(row, rows) for row, (end, rows) in self._deadlines.items() if end <= now]
                if late:
                    self._kill_process(late)
                if self._values is not None and self._until <= now:
                    self._values.clear()
                    self._values, self._until = None, inf
                self._wakes = min([self._until, *(end for end, _ in self._deadlines.values())], default=inf)
                wait = None if self._wakes == inf else max(0.0, min(self._wakes - now, threading.TIMEOUT_MAX))
                self._changed.wait(wait)
                self._wakes = -inf

    def _kill_process(self, late: list[tuple[int, int]]) -> None:
        """Report the row that hangs and end the process. If the call has several rows, none is reported: they are
        retried one by one."""
        try:
            with suppress(Exception):
                running = self.running()
                row, rows = next((one for one in late if one[0] == running), late[0])
                if rows == 1 and self.report_hang is not None:
                    self.report_hang(row)
        finally:
            os._exit(EXIT_CODE)


def call_interruptibly(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A call that may be interrupted: `SoftTimeout` looks for the frame of this function."""
    return call(*args)


class SoftTimeout:
    """Raises TimeoutError in a call that exceeds its time limit. Only calls of the main thread can be interrupted. The
    timer is not set for every call, because that costs more than most calls: when it fires, it is set again for the
    call that is running then."""

    def __init__(self) -> None:
        self._before: Any = None
        self._active = False
        self._allowed = 0.0
        self._began = inf
        """inf: no call is running."""
        self._due = inf
        """Time at which the timer fires; inf: it is not set."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGALRM, self._on_alarm)
            self._active = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            self._active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before if self._before is not None else signal.SIG_DFL)
            self._began = self._due = inf

    def call(self, call: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        if not self._active:
            return call(*args)
        self._allowed = timeout_s
        self._began = now = monotonic()
        if now + timeout_s < self._due:
            self._due = now + timeout_s
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return call_interruptibly(call, args)
        finally:
            self._began = inf

    def call_one(self, call: Callable[..., Any], timeout_s: float, argument: Any) -> Any:
        return self.call(call, (argument,), timeout_s)

    def _on_alarm(self, _number: int, frame: FrameType | None) -> None:
        now, end = monotonic(), self._began + self._allowed
        self._due = inf
        if now < end < inf:
            self._due = end
            signal.setitimer(signal.ITIMER_REAL, end - now)
        while end <= now and frame is not None:
            if frame.f_code is call_interruptibly.__code__:
                raise TimeoutError(timeout_text(self._allowed))
            frame = frame.f_back
