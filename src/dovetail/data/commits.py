"""Which epochs of a run are done for good? One line each in commit.log, on the disk before anybody relies on it.

The first line says what the run was about when it began: its source, its sinks, its units. A line that the end of a
process tore is no line. What no line tells of is computed again by whoever goes on with the run.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.control.splits import Unusable
from dovetail.control.writing import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

VERSION = 1


@dataclass(slots=True)
class Entry:
    """An epoch that is done: see `control.commands.Deliver`."""

    wave: int
    epoch: int
    first: int
    last: int
    outputs: dict[str, list[Piece]] = field(default_factory=dict)
    """Sink -> where its results lie."""
    given: int = 0
    """How many results left the run."""
    spooled: dict[str, list[Any]] = field(default_factory=dict)
    """Unit of a later wave -> what it will get, as the engine wrote it down."""
    aside: list[Any] = field(default_factory=list)
    """Unit and key of every item that was set aside."""
    mark: Any = None
    """Where in the source `first` is."""
    lasting: bool = True
    """False: a part of it was in memory only, and it has to be done again."""

    def line(self) -> dict[str, Any]:
        found: dict[str, Any] = {"wave": self.wave, "epoch": self.epoch, "first": self.first, "last": self.last}
        found["out"] = {sink: [list(piece) for piece in pieces] for sink, pieces in self.outputs.items()}
        found |= {"items": self.given, "spool": self.spooled, "aside": self.aside, "mark": self.mark}
        return found if self.lasting else found | {"lasting": False}


def entry_of(data: Mapping[str, Any]) -> Entry:
    return Entry(
        data["wave"],
        data["epoch"],
        data["first"],
        data["last"],
        {sink: [Piece(*piece) for piece in pieces] for sink, pieces in data["out"].items()},
        data["items"],
        data["spool"],
        data["aside"],
        data["mark"],
        data.get("lasting", True),
    )


@dataclass(slots=True)
class Told:
    """What commit.log tells of a run."""

    beginning: dict[str, Any] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    """By their number in the file."""
    lines: int = 0
    """Entries that were ever written."""
    finished: list[str] | None = None
    """The files that the run has left under their final names; None: it has not come to that."""


def read(path: Path) -> Told:
    """Empty if there is no such file."""
    told = Told()
    for data in _lines(path):
        if "begin" in data:
            told.beginning = told.beginning or data
        elif "finished" in data:
            told.finished = data["finished"]
        elif "units" in data:
            told.beginning["units"] = data["units"]
        elif "void" in data:
            for number in data["void"]:
                told.entries.pop(number, None)
        elif "out" in data and told.beginning:
            told.entries[told.lines] = entry_of(data)
            told.lines += 1
    return told


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    continue  # torn, though what is there of it may be whole: it is cut off by who goes on
                try:
                    data = json.loads(line)
                except ValueError:
                    continue  # torn
                if isinstance(data, dict):
                    yield data
    except FileNotFoundError:
        return


class CommitLog:
    """Written by one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            whole = _whole_lines(path)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, whole)
            os.lseek(self._file, whole, os.SEEK_SET)
        except OSError as error:
            raise _cannot(path, error) from None

    def write(self, *entries: Mapping[str, Any]) -> None:
        """On the disk when it returns, all of them."""
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
            raise _cannot(self.path, error) from None

    def begin(self, about: Mapping[str, Any]) -> None:
        self.write({"begin": VERSION, **about})

    def units(self, units: Sequence[tuple[str, int]]) -> None:
        """From now on the spool is for these: a run may go on with other units until it has spooled something."""
        self.write({"units": units})

    def void(self, numbers: list[int]) -> None:
        """What these entries tell of is lost: they do not count any more."""
        self.write({"void": numbers})

    def finish(self, files: list[str]) -> None:
        self.write({"finished": files})

    def close(self) -> None:
        os.close(self._file)


def _whole_lines(path: Path) -> int:
    """How many bytes of it are whole lines: the last one may be torn."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    return data.rfind(b"\n") + 1


def _cannot(path: Path, error: OSError) -> Unusable:
    message = f"the commit log cannot be written: {error.strerror}"
    return Unusable("DT380", message, "make room or mend the disk", str(path))
