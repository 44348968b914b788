"""Worker logs of nodes that do not see the run folder: read there in pieces, appended at the driver.

`node_monitor` reads new output with `LogShipper`; `message_handlers` and `engine` write it with `LogWriter`. Pieces are
bytes and end after a line where possible, so a character split between two pieces is whole in the file. Output beyond
the limits is skipped; a line in the file gives the number of bytes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.machine.private_files import append_to_private, make_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

READ_LIMIT_BYTES = 1 << 16
"""Limit per call, for all files together."""
MAX_BACKLOG_BYTES = 1 << 18
"""A file with more unread bytes grows faster than it can be sent: the oldest are skipped."""
FINAL_LIMIT_BYTES = 1 << 20
"""Limit for the last output when a session closes."""
LOG_NAME = re.compile(r"[0-9]+(\.[0-9]+)?\.log")
"""Names that the local engine gives to the files of workers and ranks."""

LogPiece = tuple[str, int, int, bytes, int]
"""File name, generation of the file, number of skipped bytes before the data, data, and offset of its end."""
ReceivedOffsets = dict[tuple[str, int], int]
"""(file name, generation) -> offset of the first byte that the driver has not received."""


@dataclass(slots=True)
class _LogFile:
    inode: int
    generation: int
    """Number of files seen so far; another one for a file that was replaced or truncated."""
    at: int = 0


class LogShipper:
    """Reads new output from the logs of a node's workers. For one thread."""

    def __init__(self, folder: str | Path) -> None:
        """`folder`: it may not exist yet."""
        self._folder = str(folder)
        self._files: dict[str, _LogFile] = {}
        self._seen = 0

    def read_new(self, limit_bytes: int = READ_LIMIT_BYTES) -> list[LogPiece]:
        """New output up to a limit, which is divided evenly among the files."""
        return self._pieces(limit_bytes, MAX_BACKLOG_BYTES)

    def read_last(self, received: ReceivedOffsets, limit_bytes: int = FINAL_LIMIT_BYTES) -> list[LogPiece]:
        """After all workers have ended: the end of the output that the driver has not received, which has the reasons
        of failures. The last pieces that were sent may not have arrived."""
        for name, file in self._files.items():
            file.at = received.get((name, file.generation), 0)
        return self._pieces(limit_bytes, 0)

    def _pieces(self, limit_bytes: int, behind_bytes: int) -> list[LogPiece]:
        waiting = self._waiting()
        found = []
        for name, share in split_limit(waiting, limit_bytes).items():
            skipped = waiting[name] - share if waiting[name] - share > behind_bytes else 0
            piece = self._read(name, skipped, share)
            if piece is not None:
                found.append(piece)
        return found

    def _waiting(self) -> dict[str, int]:
        """Name -> number of unread bytes. A file that was replaced or truncated is read from its start."""
        try:
            with os.scandir(self._folder) as entries:
                stats = {it.name: it.stat() for it in entries if LOG_NAME.fullmatch(it.name) and it.is_file()}
        except OSError:
            return {}
        for name, stat in stats.items():
            known = self._files.get(name)
            if known is None or known.inode != stat.st_ino or known.at > stat.st_size:
                self._seen += 1
                self._files[name] = _LogFile(stat.st_ino, self._seen)
        for name in self._files.keys() - stats.keys():
            del self._files[name]
        waiting = {name: stat.st_size - self._files[name].at for name, stat in stats.items()}
        return {name: size for name, size in waiting.items() if size}

    def _read(self, name: str, skipped: int, size: int) -> LogPiece | None:
        file = self._files[name]
        try:
            with Path(self._folder, name).open("rb") as opened:
                opened.seek(file.at + skipped)
                data = opened.read(size)
                at_end = not opened.read(1)
        except OSError:
            return None
        if skipped:
            begin = first_line_start(data)
            skipped, data = skipped + begin, data[begin:]
        if not at_end:
            data = data[: data.rfind(b"\n") + 1] or data
        file.at += skipped + len(data)
        return (name, file.generation, skipped, data, file.at) if data or skipped else None


def split_limit(waiting: Mapping[str, int], limit_bytes: int) -> dict[str, int]:
    """Name -> number of bytes to read: an even split, in which small files are read completely."""
    found: dict[str, int] = {}
    for place, (name, size) in enumerate(sorted(waiting.items(), key=lambda pair: pair[1])):
        share = min(size, limit_bytes // (len(waiting) - place))
        limit_bytes -= share
        if share:
            found[name] = share
    return found


def first_line_start(data: bytes) -> int:
    """Offset of the first complete line, else of the first complete character."""
    end = data.find(b"\n")
    if 0 <= end < len(data) - 1:
        return end + 1
    return next((place for place in range(min(4, len(data))) if data[place] & 0xC0 != 0x80), 0)


class LogWriter:
    """Appends pieces to the files of the same names in the run folder. For one thread."""

    def __init__(self, folder: str | Path) -> None:
        """`folder`: `logs` of the run folder."""
        self.problem = ""
        """Reason of the last failed write; the run continues."""
        self.skipped_bytes = 0
        """Bytes that are in no file: skipped, or not written."""
        self._folder = Path(folder)
        self.received: ReceivedOffsets = {}

    def write(self, pieces: Iterable[LogPiece]) -> None:
        for name, generation, skipped, data, end in pieces:
            self.received[name, generation] = end
            self.skipped_bytes += skipped
            if not LOG_NAME.fullmatch(name):
                continue
            try:
                self._append(self._folder / name, skipped, data)
            except OSError as error:
                self.problem = f"{name}: {error.strerror or error}"
                self.skipped_bytes += len(data)

    def _append(self, path: Path, skipped: int, data: bytes) -> None:
        make_private_folder(self._folder)
        with append_to_private(path) as file:
            if skipped:
                file.write(_skipped_note(skipped, new_line=_ends_with_newline(path)))
            file.write(data)


def _skipped_note(skipped: int, *, new_line: bool) -> bytes:
    text = f"[dovetail: {skipped} bytes skipped here: this node printed more than the limit]\n"
    return text.encode() if new_line else b"\n" + text.encode()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"
