"""Set-up of the driver process: descriptor limit, temporary folder."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

WANTED_DESCRIPTORS = 1 << 16
"""Wanted limit of open descriptors."""


def raise_descriptor_limit() -> None:
    """Payloads are descriptors; the default soft limit of 1024 is meant for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_temporary_folder() -> Path:
    """Create a temporary folder for an engine without a run folder."""
    from tempfile import mkdtemp  # late: not needed with a run folder

    return Path(mkdtemp(prefix="dovetail-"))


def remove_folder(folder: Path) -> None:
    """Remove a folder and its contents, if it exists."""
    if folder.exists():
        from shutil import rmtree

        rmtree(folder, ignore_errors=True)
