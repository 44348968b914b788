"""Timeouts of UDF calls: interrupt by signal, then end the process; stop a loop over rows at a deadline.

A loop through a list that does nothing of its own per row ends after the row it is in when the list is emptied:
`Watchdog.stop_at` does that from its thread. A call that is over its time is interrupted by a signal (`Soft`), where
the main thread makes it; one that does not come back even so takes the process with it, after its row was condemned.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

EXIT_CODE = 70
MIN_GRACE_S = 1.0


def grace_s(timeout_s: float) -> float:
    """How much longer than its time a call may take before the process ends."""
    return max(MIN_GRACE_S, timeout_s / 2)


class Watchdog:
    """One thread, started when it is first needed, for everything that a Caller waits for."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._deadlines: dict[int, tuple[float, int]] = {}
        """First row of a call -> when the process ends, the rows of the call."""
        self._until = inf
        self._values: list[Any] | None = None
        self._wakes = -inf
        self._closed = False
        self.report_hang: Callable[[int], None] | None = None
        self.running: Callable[[], int | None] = lambda: None
        """The row whose code runs right now, if several are under way and that is known."""

    @contextmanager
    def stop_at(self, until: float, values: list[Any]) -> Iterator[None]:
        """This list is emptied then."""
        with self._changed:
            self._until, self._values = until, values
            self._wake(until)
        try:
            yield
        finally:
            with self._changed:
                self._values, self._until = None, inf

    def begin(self, row: int, rows: int, allowed_s: float) -> None:
        """A call of `rows` rows from `row` on begins, and may take that long."""
        end = monotonic() + allowed_s + grace_s(allowed_s)
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
        """Of a call of several rows nobody knows which it was: none is condemned, so that they are tried one by one."""
        try:
            with suppress(Exception):
                running = self.running()
                row, rows = next((one for one in late if one[0] == running), late[0])
                if rows == 1 and self.report_hang is not None:
                    self.report_hang(row)
        finally:
            os._exit(EXIT_CODE)


def call_interruptibly(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A call that may be interrupted: `Soft` looks for this function's frame."""
    return call(*args)


class SoftTimeout:
    """Raises TimeoutError in a call that is over its time; only the main thread can be interrupted. The timer is not
    set for every call, which would cost more than most calls: when it fires, it is set anew for the call of then."""

    def __init__(self) -> None:
        self._before: Any = None
        self._active = False
        self._allowed = 0.0
        self._began = inf
        """inf: no call is under way."""
        self._due = inf
        """When the timer fires; inf: it is not set."""

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

    def _on_alarm(self, _number: int, frame: FrameType | None) -> None:
        now, end = monotonic(), self._began + self._allowed
        self._due = inf
        if now < end < inf:
            self._due = end
            signal.setitimer(signal.ITIMER_REAL, end - now)
        while end <= now and frame is not None:
            if frame.f_code is call_interruptibly.__code__:
                raise TimeoutError(f"not done after {self._allowed:g} s")
            frame = frame.f_back
