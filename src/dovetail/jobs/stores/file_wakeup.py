"""Wake-ups between processes: each waiting thread has a FIFO in a folder beside the database.

A thread that waits blocks in `poll` on its FIFO; a process that has something for it writes one byte. So a wait costs
no CPU, there is no thread that listens, and a wake-up concerns exactly the waiters that the database names. Bytes that
were written before the wait began stay in the FIFO, so that no wake-up is missed.

Why FIFOs: inotify on the write-ahead log would wake every process at every commit, and the kernel limits its instances
per user. Paths of Unix sockets are limited to 108 characters, and abstract ones do not reach from one container to
another that shares the folder. A FIFO without a reader is recognised when it is opened, so the files of killed
processes are removed by the next process that writes to them or starts to wait.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from dovetail.machine.private_files import FILE_MODE, make_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LONGEST_POLL_S = 86_400.0
SENDERS_KEPT = 128
"""Maximum number of FIFOs of other waiters that stay open."""
CREATION_S = 60.0
"""Age from which a FIFO under its temporary name counts as left behind by a killed process."""
CREATION_ATTEMPTS = 100
DRAINED_BYTES = 65_536


class Waiter:
    """The FIFO of one waiting thread. One thread waits at a time; any thread may call the other methods."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.address = path.name
        self._path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._waiting = False
        self._closed = False

    @property
    def is_reachable(self) -> bool:
        """Whether its file still exists: programs that clean up old files may remove it."""
        return self._path.exists()

    def wait(self, timeout_s: float) -> bool:
        """Block until there is a wake-up, also one since the last wait; False after the timeout."""
        with self._lock:
            if self._closed:
                return True
            self._waiting = True
        try:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            woken = bool(poll.poll(math.ceil(min(max(timeout_s, 0.0), LONGEST_POLL_S) * 1000)))
            if woken:
                with suppress(BlockingIOError):
                    os.read(self._descriptor, DRAINED_BYTES)
            return woken
        finally:
            self._end_wait()

    def _end_wait(self) -> None:
        with self._lock:
            self._waiting = False
            if self._closed:
                os.close(self._descriptor)

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                self._write()

    def close(self) -> None:
        """Remove the FIFO; a wait ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._path.unlink(missing_ok=True)
            if self._waiting:
                self._write()  # the waiting thread closes the descriptor: it must not be another file before
            else:
                os.close(self._descriptor)

    def abandon(self) -> None:
        """In a forked child: the FIFO is the parent's. A copy of its descriptor would make it look alive."""
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)

    def _write(self) -> None:
        with suppress(BlockingIOError):  # full of wake-ups
            os.write(self._descriptor, b".")


class WakeupFolder:
    """The waiters of one database. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._senders: dict[str, int] = {}

    def open_waiter(self) -> Waiter:
        """A new waiter; raises OSError."""
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        hidden, final = self.path / f".{name}", self.path / name
        for attempt in range(CREATION_ATTEMPTS):
            try:
                make_private_folder(self.path)
                os.mkfifo(hidden, FILE_MODE)
                break
            except (FileNotFoundError, FileExistsError):  # another process has removed the empty folder meanwhile
                if attempt == CREATION_ATTEMPTS - 1:
                    raise
        descriptor = os.open(hidden, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # never at its end
        hidden.rename(final)  # under this name it always has a reader, while its process lives
        return Waiter(final, descriptor)

    def notify(self, addresses: Iterable[str]) -> list[str]:
        """Wake waiters. Returns those that no longer exist."""
        with self._lock:
            return [address for address in addresses if not self._notify(address)]

    def remove_stale(self) -> list[str]:
        """Remove the FIFOs of processes that have ended. Returns their addresses."""
        try:
            found = list(self.path.iterdir())
        except OSError:
            return []
        return [path.name for path in found if self._is_stale(path)]

    def close(self) -> None:
        """Close connections to waiters, and remove the folder if it is empty."""
        self.abandon()
        with suppress(OSError):
            self.path.rmdir()

    def abandon(self) -> None:
        """Close connections to waiters, as a forked child."""
        senders, self._senders = self._senders, {}
        for descriptor in senders.values():
            os.close(descriptor)

    def _notify(self, address: str) -> bool:
        """Write one byte to a FIFO. Returns False if the waiter no longer exists."""
        for _ in range(2):
            descriptor = self._senders.pop(address, None)
            try:
                descriptor = descriptor or _open_sender(self.path / address)
            except OSError:  # too many open files: waiters look again after a while
                return True
            if descriptor is None:
                return False
            try:
                os.write(descriptor, b".")
            except BlockingIOError:
                pass  # full of wake-ups
            except OSError:  # its reader has ended
                os.close(descriptor)
                continue
            self._senders[address] = descriptor
            if len(self._senders) > SENDERS_KEPT:
                os.close(self._senders.pop(next(iter(self._senders))))
            return True
        return False

    def _is_stale(self, path: Path) -> bool:
        with suppress(OSError):
            if not path.is_fifo() or (path.name.startswith(".") and time.time() - path.stat().st_mtime < CREATION_S):
                return False
            descriptor = _open_sender(path)
            if descriptor is None:
                return True
            os.close(descriptor)
        return False


def _open_sender(path: Path) -> int | None:
    """Descriptor to write to a waiter; None if it does not exist, or if its process has ended: then it is removed."""
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        path.unlink(missing_ok=True)
        return None
