"""Removal of a run: its folder, and the part files beside its sinks if it did not finish."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.data.commit_log import read_commit_log
from dovetail.data.sinks import SinkSpec, open_sink
from dovetail.errors import DovetailError
from dovetail.observe.run_folder import runs_folder
from dovetail.observe.run_header import read_unstarted
from dovetail.runtime.run_lock import RunLock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.data.commit_log import CommitLogContents
    from dovetail.data.sinks import FileSink
    from dovetail.observe.run_folder import RunFolder

HEADER = "run.json"
OWN_ENTRIES = frozenset(
    (
        "plan.json",
        "events.jsonl",
        "events.1.jsonl",
        "errors",
        "logs",
        "commit.log",
        "control.sock",
        "spool",
        "parts",
        "replay.log",
        "lock",
        "secrets.json",
    )
)
"""What a run writes to its folder, except the header."""
DISK_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run on this machine."""

    run: RunFolder
    paths: tuple[Path, ...]
    """To remove, in this order: the header last, so that an interrupted removal can be repeated."""
    others: tuple[str, ...]
    """Names of files in the folder that Dovetail did not write; they stay, and so does the folder."""
    size_bytes: int
    """Disk space of `paths`."""


def find_run_files(run: RunFolder) -> RunFiles:
    """Everything in a folder under $DOVETAIL_HOME/runs; only Dovetail's files in another folder."""
    entries = sorted(run.path.iterdir())
    is_ours = run.path.parent == runs_folder()
    own = [path for path in entries if is_ours or path.name in OWN_ENTRIES]
    parts = [sink.parts for sink in file_sinks(run, read_commit_log(run.commit_log)) if sink.parts.is_dir()]
    paths = [*parts, *(path for path in own if path.name != HEADER), run.header]
    others = tuple(path.name for path in entries if path not in paths)
    return RunFiles(run, tuple(paths), others, sum(map(_disk_bytes, paths)))


def remove_run_files(files: RunFiles) -> None:
    """Raises ConfigError if the run is running, OSError if something cannot be removed."""
    lock = RunLock(files.run)
    try:
        for path in files.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (files.run.path / "lock").unlink(missing_ok=True)
    finally:
        lock.release()
    if not files.others:
        with suppress(OSError):  # a file that was created meanwhile
            files.run.path.rmdir()


def file_sinks(run: RunFolder, commits: CommitLogContents) -> Iterator[FileSink]:
    """The sinks in whose part files a run kept its results."""
    specs = {label: about["spec"] for label, about in (commits.header.get("sinks") or {}).items()}
    for label, spec in (specs or (read_unstarted(run) or {}).get("sinks") or {}).items():
        with suppress(OSError, DovetailError):
            yield open_sink(SinkSpec(**spec), run.id, run.path / "parts" / (label or "all"))


def _disk_bytes(path: Path) -> int:
    """Disk space of a file or folder; links are not followed."""
    try:
        total = path.lstat().st_blocks * DISK_BLOCK_BYTES
    except OSError:
        return 0
    if path.is_symlink() or not path.is_dir():
        return total
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            with suppress(OSError):
                total += (Path(folder) / name).lstat().st_blocks * DISK_BLOCK_BYTES
    return total
