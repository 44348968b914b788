"""Whose is the folder of a run? One driver's at a time."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, Problem
from dovetail.observe.folder import read_object

if TYPE_CHECKING:
    from dovetail.observe.folder import RunFolder

LOCK = "lock"


class Hold:
    """The folder of a run belongs to one driver at a time; to nobody, when that is gone."""

    def __init__(self, folder: RunFolder) -> None:
        self._fd = os.open(folder.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            pid = read_object(folder.header).get("pid")
            message = f"run {folder.id} is still going, in process {pid}"
            fixes = (f"dovetail drain {folder.id}", f"dovetail status {folder.id}")
            raise ConfigError(Problem("DT382", message, fixes=fixes)) from None

    def let_go(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
