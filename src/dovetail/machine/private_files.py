"""Files and folders that only this user can read and write, and the check whether other users could change a path."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import BufferedWriter
    from os import PathLike

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private_folder(path: str | PathLike[str], *, exist_ok: bool = True) -> None:
    """Create a folder of mode 0700, and missing parents with the usual mode. An existing folder stays as it is."""
    parent = os.path.dirname(os.path.abspath(path))  # noqa: PTH100, PTH120 - pathlib would be imported for this alone
    if not os.path.isdir(parent):  # noqa: PTH112
        os.makedirs(parent, exist_ok=True)  # noqa: PTH103
    try:
        os.mkdir(path, FOLDER_MODE)  # noqa: PTH102
    except FileExistsError:
        if not exist_ok or not os.path.isdir(path):  # noqa: PTH112
            raise


def open_private(path: str | PathLike[str], flags: int) -> int:
    """Descriptor of a file, which is created with mode 0600 if it is missing."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


def append_to_private(path: str | PathLike[str], buffering: int = -1) -> BufferedWriter:
    """Open a file to append to it; it is created with mode 0600 if it is missing."""
    descriptor = open_private(path, os.O_WRONLY | os.O_APPEND)
    return os.fdopen(descriptor, "ab", buffering)  # type: ignore[return-value]  # not a raw file: buffering is not 0


def foreign_access(path: str | PathLike[str]) -> str:
    """How users other than this one and root could have changed the file or folder; "" if they could not.

    In a folder with the sticky bit, users can change only their own files.
    """
    user = os.geteuid()
    found = os.stat(path)  # noqa: PTH116
    for owner in (os.lstat(path).st_uid, found.st_uid):
        if owner not in (user, 0):
            return f"belongs to user {owner}"
    shared = found.st_mode & _WRITABLE_BY_OTHERS
    if not shared or (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
        return ""
    return "is writable by everyone" if shared & stat.S_IWOTH else "is writable by its group"
