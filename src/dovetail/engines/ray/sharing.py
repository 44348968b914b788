"""Does a node see the same files as the driver? Asked before anything runs.

The driver leaves a mark in the run's folder and says what it knows of the source's files; an agent looks for both.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from dovetail.errors import ConfigError, Problem

MARK = ".shared-"
SHOWN = 5


def mark(folder: str | Path) -> str:
    """A new file in a folder, by which other machines can tell that they see the same one. What its name ends in.

    The name is new every time, too: a network file system may remember for a minute that there was no such file.
    """
    unmark(folder)
    token = secrets.token_hex(8)
    Path(folder, MARK + token).write_text(token, encoding="ascii")
    return token


def unmark(folder: str | Path) -> None:
    """Removes all marks; it does not matter whether there are any."""
    for path in Path(folder).glob(f"{MARK}*"):
        path.unlink(missing_ok=True)


def sees(folder: str | Path, token: str) -> bool:
    """Whether the folder of this name here is the one that was marked, and may be written."""
    try:
        same = Path(folder, MARK + token).read_text(encoding="ascii") == token
    except (OSError, ValueError):
        return False
    return same and os.access(folder, os.W_OK | os.X_OK)


def described(paths: Iterable[str]) -> dict[str, int | None]:
    """Absolute path -> the bytes of a file, None of a folder. Addresses such as s3://... are left out."""
    absolute = (str(Path(path).absolute()) for path in paths if "://" not in path)
    return {path: _size(path) for path in absolute}


def missing(paths: Iterable[str] | Mapping[str, int | None]) -> list[str]:
    """Which of these cannot be read here; as `described` at the driver, also those that are other files here."""
    sizes = paths if isinstance(paths, Mapping) else dict.fromkeys(path for path in paths if "://" not in path)
    return [path for path, size in sizes.items() if not _is_here(path, size)]


def _is_here(path: str, size: int | None) -> bool:
    if Path(path).is_dir():
        return size is None and os.access(path, os.R_OK | os.X_OK)
    try:
        # opened, because a network file system may answer from memory what is only asked about
        with Path(path).open("rb") as file:
            return size is None or os.fstat(file.fileno()).st_size == size
    except (OSError, ValueError):
        return False


def _size(path: str) -> int | None:
    try:
        return None if Path(path).is_dir() else Path(path).stat().st_size
    except (OSError, ValueError):
        return None


def cannot_see(missing_at: Mapping[str, list[str]]) -> ConfigError:
    """Node -> what it does not see: the error that says so."""
    nodes = [f"node {node} does not see {_some(paths)}" for node, paths in sorted(missing_at.items()) if paths]
    more = (f"and {len(nodes) - SHOWN} more nodes",) if len(nodes) > SHOWN else ()
    first = next((path for _, paths in sorted(missing_at.items()) for path in paths), "")
    of = "one node does" if len(nodes) == 1 else f"{len(nodes)} nodes do"
    fixes = (
        f"put {first} on storage that all nodes share, under the same path, or name an address such as s3://",
        'dt.run(..., engine="local") or --engine local runs it on this machine alone',
    )
    message = f"{of} not see files of the source"
    return ConfigError(Problem("DT405", message, (*nodes[:SHOWN], *more), fixes))


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(paths[:SHOWN]) + more
