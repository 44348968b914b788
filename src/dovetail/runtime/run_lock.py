"""Exclusive lock on a run folder, held by one driver at a time, and the check of its owner."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, Problem
from dovetail.observe.run_folder import read_json_object

if TYPE_CHECKING:
    from dovetail.observe.run_folder import RunFolder

LOCK_FILE = "lock"
_HELD_LOCKS: set[RunLock] = set()


class RunLock:
    """An exclusive lock on a run folder. The kernel releases it when the driver ends."""

    def __init__(self, folder: RunFolder) -> None:
        self._fd = os.open(folder.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            pid = read_json_object(folder.header).get("pid")
            message = f"run {folder.id} is still running in process {pid}"
            fixes = (f"dovetail drain {folder.id}", f"dovetail status {folder.id}")
            raise ConfigError(Problem("DT382", message, fixes=fixes)) from None

        _HELD_LOCKS.add(self)

    def release(self) -> None:
        _HELD_LOCKS.discard(self)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_owner(folder: RunFolder) -> None:
    """Raises if another user could write to the folder: a resume unpickles its files."""
    found = folder.path.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & stat.S_IWOTH:
        message = f"the folder of run {folder.id} belongs to another user, or is writable by everyone"
        fixes = (
            "resume it as its owner",
            f"take ownership: chown -R $USER {folder.path}; chmod o-w {folder.path}",
        )
        raise ConfigError(Problem("DT382", message, fixes=fixes, place=str(folder.path)))


def _release_after_fork() -> None:
    """A forked child may live longer than the driver, so it must not hold its locks."""
    for lock in list(_HELD_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_release_after_fork)
