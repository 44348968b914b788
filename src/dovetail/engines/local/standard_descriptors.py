"""The descriptors 0 to 2, which a process keeps open so that no other file gets these numbers."""

from __future__ import annotations

import fcntl
import os
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def open_standard_descriptors() -> None:
    """Open closed standard descriptors, as in a daemon.

    Otherwise the next socket or file gets such a number, and a stage that closes its standard files closes it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def move_from_standard_descriptors(fds: Iterable[int]) -> array[int]:
    """Descriptors that were received while standard descriptors were closed, with other numbers than those."""
    moved = array("i")
    for fd in fds:
        if fd > 2:
            moved.append(fd)
        else:
            moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
            os.close(fd)
    open_standard_descriptors()
    return moved
