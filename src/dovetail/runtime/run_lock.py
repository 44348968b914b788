"""Exclusive lock on a run folder, held by one driver at a time, and the check of its owner."""

from __future__ import annotations

import fcntl
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, Problem
from dovetail.machine.private_files import foreign_access, open_private
from dovetail.observe.run_folder import LOCK_FILE, home_folder, read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.observe.run_folder import RunFolder

MAX_PATHS_SHOWN = 5
_HELD_LOCKS: set[RunLock] = set()


class RunLock:
    """An exclusive lock on a run folder. The kernel releases it when the driver ends."""

    def __init__(self, folder: RunFolder) -> None:
        self._fd = open_private(folder.path / LOCK_FILE, os.O_RDWR)
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


def check_only_owner_writes(folder: RunFolder) -> None:
    """Raises if another user could have changed the files of a run, or exchanged them, up to the home: a resume and a
    retry unpickle them, which executes code."""
    found = {path: reason for path in _paths_to_check(folder) if (reason := foreign_access(path))}
    if not found:
        return
    message = f"other users can change files of run {folder.id}, and a pickle that they put there would be executed"
    evidence = tuple(f"{path} {reason}" for path, reason in found.items())
    more = (f"and {len(found) - MAX_PATHS_SHOWN} more",) if len(found) > MAX_PATHS_SHOWN else ()
    fix = f"chmod go-w {shlex.join(map(str, found))}"
    if any(reason.startswith("belongs") for reason in found.values()):
        fix = f"resume it as its owner; if you know its contents: chown -R $USER {shlex.quote(str(folder.path))}"
    raise ConfigError(Problem("DT382", message, (*evidence[:MAX_PATHS_SHOWN], *more), (fix,), str(folder.path)))


def _paths_to_check(folder: RunFolder) -> Iterator[Path]:
    """The run folder, the folders above it up to the home, and everything in it that is not a log."""
    home = home_folder()
    if folder.path.is_relative_to(home):
        yield from (path for path in reversed(folder.path.parents) if path.is_relative_to(home))
    yield folder.path
    for place, folders, names in os.walk(folder.path):
        folders[:] = [name for name in folders if name != folder.logs.name]
        yield from (Path(place) / name for name in [*folders, *names])


def _release_after_fork() -> None:
    """A forked child may live longer than the driver, so it must not hold its locks."""
    for lock in list(_HELD_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_release_after_fork)
