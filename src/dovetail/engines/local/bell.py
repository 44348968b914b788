"""How does another thread wake the one that polls? At the price of one system call, and of none if it rings already."""

from __future__ import annotations

import os
from contextlib import suppress
from threading import RLock, get_ident


class Bell:
    """A descriptor that can be waited for."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rings = False
        self._lock = RLock()
        """Reentrant: a signal's handler rings too, perhaps in the midst of a ring."""
        self.listener = 0
        """The thread that polls: it need not wake itself."""

    def ring(self) -> None:
        if self._rings or get_ident() == self.listener:
            return
        self._rings = True
        with self._lock:  # or its number could be somebody else's by now
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def heard(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self._rings = False  # only now: who rings meanwhile must not be taken for one that was heard

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            self.fd = -1
