"""Wake-up of the thread that polls an engine."""

from __future__ import annotations

import os
from contextlib import suppress
from threading import RLock, get_ident


class Wakeup:
    """A descriptor that wakes the polling thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_pending = False
        self._lock = RLock()
        """Reentrant: a signal handler may call `wake` during a call of `wake`."""
        self.polling_thread = 0
        """The polling thread; it does not need to wake itself."""

    def wake(self) -> None:
        if self._is_pending or get_ident() == self.polling_thread:
            return
        self._is_pending = True
        with self._lock:  # the descriptor may have been closed and its number reused
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self._is_pending = False  # last: a wake-up that arrives meanwhile must not be lost

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            self.fd = -1
