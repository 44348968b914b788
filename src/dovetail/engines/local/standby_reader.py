"""Thread that reads the sockets of a worker while its main thread is busy with a call.

The main thread of a worker with one slot reads and runs calls itself: handing each one to another thread takes longer
than a short call. The standby thread checks every few milliseconds whether the main thread is busy, and then reads in
its place. It passes control calls, cancellations and answers on and queues calls; the main thread reads again when it
is idle and the next call has arrived. The standby thread sleeps while there are no calls.
"""

from __future__ import annotations

import traceback
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

TAKEOVER_S = 0.002
"""Interval of the checks: a main thread that is busy with one call for longer does not read."""
CHECKS_BEFORE_SLEEP = 50
"""Checks without a call after which the thread sleeps until the next one."""


class StandbyReader:
    """At any time one of the two threads has the right to read."""

    def __init__(
        self, receive: Callable[[], None], has_work: Callable[[], bool], exit_worker: Callable[[int], NoReturn]
    ) -> None:
        """`receive` waits for frames and handles them. `has_work`: whether there is work for the main thread."""
        self._receive = receive
        self._has_work = has_work
        self._exit_worker = exit_worker
        self._lock = Lock()
        self._is_reading = False
        """Whether the standby thread has the right to read."""
        self._keeps_reading = False
        self._is_main_busy = True
        self._is_main_waiting = False
        """Whether the main thread waits for work from the standby thread."""
        self._has_exited = False
        self._turn = 0
        """How often the main thread has received."""
        self._work: SimpleQueue[None] = SimpleQueue()
        """Wakes the main thread."""
        self._requests: SimpleQueue[bool | None] = SimpleQueue()
        """Wakes the standby thread. True: read at once; None: end."""
        self._is_asleep = False
        self._thread = Thread(target=self._run, name="standby-reader", daemon=True)
        self._thread.start()

    # --- main thread

    def receive(self) -> None:
        """Wait for frames and handle them, or wait for work that the standby thread has received."""
        self._is_main_busy = False
        with self._lock:
            must_wait = self._is_reading and not self._has_work()
            may_read = not self._is_reading
            self._is_main_waiting = must_wait
        if must_wait:
            self._work.get()
            if self._has_exited:
                self._exit_worker(0)
        elif may_read:
            self._receive()
        self._turn += 1
        self._is_main_busy = True
        if self._is_asleep:
            self._is_asleep = False
            self._requests.put(False)

    def keep_reading(self) -> None:
        """Let the standby thread read from now on. For the thread that has the right to read."""
        self._keeps_reading = True
        self.read_now()

    # --- any thread

    def read_now(self) -> None:
        """Let the standby thread read without delay, if the main thread is busy."""
        if not self._is_reading:
            self._requests.put(True)

    def close(self) -> None:
        """End the standby thread, unless it is reading."""
        self._requests.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until the standby thread has ended. If it reads, the caller ends the connection before."""
        self._thread.join(timeout_s)

    # --- standby thread

    def _run(self) -> None:
        try:
            self._check_and_read()
        except BaseException as error:
            self._has_exited = True
            self._work.put(None)
            if not isinstance(error, SystemExit):
                traceback.print_exc()
                self._exit_worker(70)  # a worker that does not read would block the run

    def _check_and_read(self) -> None:
        turn = idle_checks = 0
        while True:
            try:
                is_requested = self._wait_for_request(idle_checks)
            except Empty:
                is_requested = False
            if is_requested is None:
                return
            if (is_requested or self._turn == turn) and self._take_over(is_requested):
                self._read()
            idle_checks = idle_checks + 1 if self._turn == turn else 0
            turn = self._turn

    def _wait_for_request(self, idle_checks: int) -> bool | None:
        if idle_checks < CHECKS_BEFORE_SLEEP:
            return self._requests.get(timeout=TAKEOVER_S)
        self._is_asleep = True  # before the main thread is checked, which does the same in the other order
        if self._is_main_busy:
            self._is_asleep = False
            return False
        return self._requests.get()

    def _take_over(self, is_requested: bool) -> bool:
        with self._lock:
            self._is_reading = self._is_main_busy or (is_requested and self._keeps_reading)
            return self._is_reading

    def _read(self) -> None:
        """Read until the main thread waits and has got work."""
        while True:
            self._receive()
            with self._lock:
                if self._is_main_waiting and self._has_work():
                    self._is_main_waiting = False
                    self._is_reading = self._keeps_reading
                    self._work.put(None)
                if not self._is_reading:
                    return
