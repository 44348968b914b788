"""The descriptors 0 to 2, which a process keeps open so that no other file gets these numbers."""

from __future__ import annotations

import os


def open_standard_descriptors() -> None:
    """Open closed standard descriptors, as in a daemon.

    Otherwise the next socket or file gets such a number, and a stage that closes its standard files closes it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
