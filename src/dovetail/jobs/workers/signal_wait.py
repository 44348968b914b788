"""Wait of the main thread that ends at every signal.

The kernel may deliver a signal to any thread of a process. Python runs the handler in the main thread, and a main
thread that waits for a lock does not see a signal that another thread got (after SIGCONT, for example). So it waits for
a pipe that the C handler writes to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class SignalWait:
    """Signal handlers, and a wait that they interrupt. Thread: the main one, except `end`."""

    def __init__(self, numbers: Sequence[int], on_signal: Callable[[int], None]) -> None:
        self._numbers = numbers
        self._on_signal = on_signal
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._has_ended = False

    def end(self) -> None:
        """End the wait. Thread: any."""
        self._has_ended = True
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def wait(self) -> None:
        """Until `end` is called."""
        while not self._has_ended:
            select.select([self._read], [], [])
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The handlers apply inside; afterwards those from before."""
        before = {number: signal.signal(number, lambda number, _: self._on_signal(number)) for number in self._numbers}
        descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._read)
            os.close(self._write)
