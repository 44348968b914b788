"""Commit log of a run (commit.log): one durable line per finished epoch, and its reader.

The first line describes the run at its start: its source, sinks and units. A partial line at the end is ignored. Items
without a line are computed again when the run resumes.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import PartFileRange, SourceSinkError
from dovetail.machine.private_files import open_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

LOG_VERSION = 1


@dataclass(slots=True)
class CommitEntry:
    """A finished epoch: see `control.commands.Deliver`."""

    wave: int
    epoch: int
    first: int
    last: int
    outputs: dict[str, list[PartFileRange]] = field(default_factory=dict)
    """Sink -> location of its results."""
    result_count: int = 0
    """Number of results that left the run."""
    spooled: dict[str, list[Any]] = field(default_factory=dict)
    """Unit of a later wave -> its input, as spool records of the engine."""
    failed_items: list[Any] = field(default_factory=list)
    """Unit and key of every failed item; `aside` in the file, so that runs of earlier versions can be resumed."""
    mark: Any = None
    """Position of `first` in the source."""
    durable: bool = True
    """False: part of it was in memory only and must be computed again."""
    also: list[tuple[int, int]] = field(default_factory=list)
    """Further ranges that it finishes; see `control.commands.Deliver`."""

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"wave": self.wave, "epoch": self.epoch, "first": self.first, "last": self.last}
        found["out"] = {sink: [list(piece) for piece in pieces] for sink, pieces in self.outputs.items()}
        found |= {"items": self.result_count, "spool": self.spooled, "aside": self.failed_items, "mark": self.mark}
        if self.also:
            found["also"] = self.also
        return found if self.durable else found | {"lasting": False}


def parse_entry(data: Mapping[str, Any]) -> CommitEntry:
    return CommitEntry(
        data["wave"],
        data["epoch"],
        data["first"],
        data["last"],
        {sink: [PartFileRange(*piece) for piece in pieces] for sink, pieces in data["out"].items()},
        data["items"],
        data["spool"],
        data["aside"],
        data["mark"],
        data.get("lasting", True),
        [(first, last) for first, last in data.get("also", ())],
    )


@dataclass(slots=True)
class CommitLogContents:
    """Contents of the commit.log of a run."""

    header: dict[str, Any] = field(default_factory=dict)
    entries: dict[int, CommitEntry] = field(default_factory=dict)
    """Entries by number in the file."""
    lines: int = 0
    """Number of entries ever written."""
    finished: list[str] | None = None
    """Final files that the run published; None: not published yet."""


def read_commit_log(path: Path) -> CommitLogContents:
    """Empty if the file does not exist."""
    contents = CommitLogContents()
    for data in _read_lines(path):
        if "begin" in data:
            contents.header = contents.header or data
        elif "finished" in data:
            contents.finished = data["finished"]
        elif "units" in data:
            contents.header["units"] = data["units"]
        elif "void" in data:
            for number in data["void"]:
                contents.entries.pop(number, None)
        elif "out" in data and contents.header:
            contents.entries[contents.lines] = parse_entry(data)
            contents.lines += 1
    return contents


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    continue  # a partial line, even if it parses: a resume truncates it
                try:
                    data = json.loads(line)
                except ValueError:
                    continue  # a partial line
                if isinstance(data, dict):
                    yield data
    except FileNotFoundError:
        return


class CommitLog:
    """Appends to the log. Thread: one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            whole = _complete_line_bytes(path)
            self._file = open_private(path, os.O_WRONLY)
            os.ftruncate(self._file, whole)
            os.lseek(self._file, whole, os.SEEK_SET)
        except OSError as error:
            raise _write_error(path, error) from None

    def write(self, *entries: Mapping[str, Any]) -> None:
        """All entries are on disk when it returns."""
        data = b"".join(json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in entries)
        at = os.lseek(self._file, 0, os.SEEK_CUR)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, at)
            os.lseek(self._file, at, os.SEEK_SET)
            raise _write_error(self.path, error) from None

    def begin(self, about: Mapping[str, Any]) -> None:
        self.write({"begin": LOG_VERSION, **about})

    def units(self, units: Sequence[tuple[str, int]]) -> None:
        """Record the units that the spool is for: a run may resume with other units until it has spooled something."""
        self.write({"units": units})

    def void_entries(self, numbers: list[int]) -> None:
        """Mark entries as void, because their results are lost."""
        self.write({"void": numbers})

    def finish(self, files: list[str]) -> None:
        self.write({"finished": files})

    def close(self) -> None:
        os.close(self._file)


def _complete_line_bytes(path: Path) -> int:
    """Number of bytes in complete lines: the last line may be partial."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    return data.rfind(b"\n") + 1


def _write_error(path: Path, error: OSError) -> SourceSinkError:
    message = f"the commit log cannot be written: {error.strerror}"
    return SourceSinkError("DT380", message, "free disk space or repair the disk", str(path))
