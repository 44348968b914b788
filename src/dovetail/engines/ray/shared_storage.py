"""Shared storage check: whether a node sees the run folder, the source and the sink of the driver.

The driver leaves a mark in the run's folder and says what it knows of the source's files; an agent looks for both.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from dovetail.errors import ConfigError, Problem

MARKER_PREFIX = ".shared-"
MAX_SHOWN = 5


def write_marker(folder: str | Path) -> str:
    """A new file in a folder, by which other machines can tell that they see the same one. What its name ends in.

    The name is new every time, too: a network file system may remember for a minute that there was no such file.
    """
    remove_markers(folder)
    token = secrets.token_hex(8)
    Path(folder, MARKER_PREFIX + token).write_text(token, encoding="ascii")
    return token


def remove_markers(folder: str | Path) -> None:
    """Removes all marks; it does not matter whether there are any."""
    for path in Path(folder).glob(f"{MARKER_PREFIX}*"):
        path.unlink(missing_ok=True)


def sees_marker(folder: str | Path, token: str) -> bool:
    """Whether the folder of this name here is the one that was marked, and may be written."""
    try:
        same = Path(folder, MARKER_PREFIX + token).read_text(encoding="ascii") == token
    except (OSError, ValueError):
        return False
    return same and os.access(folder, os.W_OK | os.X_OK)


def file_sizes(paths: Iterable[str]) -> dict[str, int | None]:
    """Absolute path -> the bytes of a file, None of a folder. Addresses such as s3://... are left out."""
    absolute = (str(Path(path).absolute()) for path in paths if "://" not in path)
    return {path: _file_size(path) for path in absolute}


def missing_files(paths: Iterable[str] | Mapping[str, int | None]) -> list[str]:
    """Which of these cannot be read here; as `described` at the driver, also those that are other files here."""
    sizes = paths if isinstance(paths, Mapping) else dict.fromkeys(path for path in paths if "://" not in path)
    return [path for path, size in sizes.items() if not _is_readable(path, size)]


def _is_readable(path: str, size: int | None) -> bool:
    if Path(path).is_dir():
        return size is None and os.access(path, os.R_OK | os.X_OK)
    try:
        # opened, because a network file system may answer from memory what is only asked about
        with Path(path).open("rb") as file:
            return size is None or os.fstat(file.fileno()).st_size == size
    except (OSError, ValueError):
        return False


def _file_size(path: str) -> int | None:
    try:
        return None if Path(path).is_dir() else Path(path).stat().st_size
    except (OSError, ValueError):
        return None


def unseen_files_error(missing_at: Mapping[str, list[str]]) -> ConfigError:
    """Node -> what it does not see: the error that says so."""
    nodes = [f"node {node} does not see {_first_paths(paths)}" for node, paths in sorted(missing_at.items()) if paths]
    more = (f"and {len(nodes) - MAX_SHOWN} more nodes",) if len(nodes) > MAX_SHOWN else ()
    first = next((path for _, paths in sorted(missing_at.items()) for path in paths), "")
    of = "one node does" if len(nodes) == 1 else f"{len(nodes)} nodes do"
    fixes = (
        f"put {first} on storage that all nodes share, under the same path, or name an address such as s3://",
        'dt.run(..., engine="local") or --engine local runs it on this machine alone',
    )
    message = f"{of} not see files of the source"
    return ConfigError(Problem("DT405", message, (*nodes[:MAX_SHOWN], *more), fixes))


def _first_paths(paths: list[str]) -> str:
    more = f" and {len(paths) - MAX_SHOWN} more" if len(paths) > MAX_SHOWN else ""
    return ", ".join(paths[:MAX_SHOWN]) + more
