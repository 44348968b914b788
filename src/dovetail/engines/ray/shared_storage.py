"""Shared storage check: whether a node sees the run folder, the source and the sink of the driver.

The driver writes a marker file into its folders, and an agent looks for it (`agent.AgentSession`); `message_handlers`
refuses nodes that do not see them, by `storage_problem`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.engines.ray.protocol import AgentHello

MARKER_PREFIX = ".shared-"
_FIX_SOURCE = "put it on storage that all nodes share, under the same path, or use an address such as s3://"
_FIX_SINK = (
    'write to storage that all nodes share, under the same path: sink="/shared/out.jsonl", --sink /shared/out.jsonl'
)
_FIX_RUN_DIR = 'use a run folder on storage that all nodes share: run_dir="/shared/run" or --run-dir /shared/run'


def write_marker(folder: str | Path) -> str:
    """Write a file by which other machines recognize the folder; return the suffix of its name, which is its content.

    The name is new every time: a network file system may cache for a minute that a file does not exist.
    """
    remove_markers(folder)
    token = secrets.token_hex(8)
    Path(folder, MARKER_PREFIX + token).write_text(token, encoding="ascii")
    return token


def remove_markers(folder: str | Path) -> None:
    """Remove all marker files."""
    for path in Path(folder).glob(f"{MARKER_PREFIX}*"):
        path.unlink(missing_ok=True)


def sees_marker(folder: str | Path, token: str) -> bool:
    """Whether the folder on this machine has the marker file, and is writable."""
    try:
        same = Path(folder, MARKER_PREFIX + token).read_text(encoding="ascii") == token
    except (OSError, ValueError):
        return False
    return same and os.access(folder, os.W_OK | os.X_OK)


def missing_files(paths: Iterable[str]) -> list[str]:
    """The paths that are not readable here. Addresses such as s3://... are not checked."""
    return [path for path in paths if "://" not in path and not _is_readable(path)]


def _is_readable(path: str) -> bool:
    if Path(path).is_dir():
        return os.access(path, os.R_OK | os.X_OK)
    try:
        Path(path).open("rb").close()  # opened, because a network file system may answer `stat` from its cache
    except (OSError, ValueError):
        return False
    return True


def storage_problem(node: str, hello: AgentHello, folder: Path) -> tuple[str, str, str] | None:
    """Error code, message and fix; None if the node sees everything it needs."""
    if hello.missing_sources:
        more = f" and {len(hello.missing_sources) - 3} more" if len(hello.missing_sources) > 3 else ""
        missing = f"{', '.join(hello.missing_sources[:3])}{more}"
        return "DT405", f"node {node} does not see the source: {missing}", _FIX_SOURCE
    if hello.unwritable_folders:
        is_run_folder = str(folder) in hello.unwritable_folders[0]
        where = hello.unwritable_folders[0] if is_run_folder else hello.unwritable_folders[0].rpartition("/")[0]
        return (
            "DT401",
            f"node {node} does not see {where}, into which workers write results",
            _FIX_RUN_DIR if is_run_folder else _FIX_SINK,
        )
    return None
