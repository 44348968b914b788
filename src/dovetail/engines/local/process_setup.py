"""Set-up of the driver process: descriptor limit, standard descriptors, temporary folder, memory for payloads."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

WANTED_DESCRIPTORS = 1 << 16
"""Descriptors."""
PAYLOAD_MEMORY_DIVISOR = 4
"""Payloads may fill one part in so many of the memory."""


def total_memory_bytes() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def raise_descriptor_limit() -> None:
    """Payloads are descriptors; the soft limit of 1024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_temporary_folder() -> Path:
    """A new one, for things that have no place of their own."""
    from tempfile import mkdtemp  # late: with a folder of a run it is not needed

    return Path(mkdtemp(prefix="dovetail-"))


def remove_folder(folder: Path) -> None:
    """With all that is in it, if it is there."""
    if folder.exists():
        from shutil import rmtree

        rmtree(folder, ignore_errors=True)


def open_standard_descriptors() -> None:
    """Where stdin, stdout or stderr is closed, as in a daemon, sockets of ours would come under their numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
