"""Cursor over files as items: their paths, or their contents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import BadRow
from dovetail.data.readers.cursor import describe_files
from dovetail.data.readers.file_discovery import file_system, is_remote
from dovetail.data.readers.fingerprint import files_fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.control.payload import Split
    from dovetail.data.readers.file_discovery import FileRef

MAX_CONTENT_BYTES_PER_SPLIT = 64 << 20
"""Maximum bytes of files that are read for one segment, unless a single file is larger."""


@dataclass(slots=True)
class PathList:
    items: int
    paths: list[str]
    contents: bool

    def read(self) -> list[Any]:
        return [_read_content(path) for path in self.paths] if self.contents else list(self.paths)


def _read_content(path: str) -> dict[str, object] | BadRow:
    try:
        if is_remote(path):
            fs, name = file_system(path)
            return {"path": path, "bytes": fs.cat_file(name)}
        return {"path": path, "bytes": Path(path).read_bytes()}
    except MemoryError:
        raise
    except Exception as error:  # one file of many: it fails, and the others continue
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return BadRow(f"the file cannot be read: {reason}", path, path)


class PathCursor:
    prefers_large_splits = False

    def __init__(self, name: str, files: Sequence[FileRef], *, contents: bool) -> None:
        self.kind = "bytes" if contents else "paths"
        self.row = 0
        self._name = name
        self._files = files

    @property
    def total(self) -> int | None:
        return len(self._files)

    expected = total

    def take(self, rows: int) -> Split | None:
        contents, size = self.kind == "bytes", 0
        paths: list[str] = []
        for ref in self._files[self.row : self.row + rows]:
            size += ref.size
            if paths and contents and size > MAX_CONTENT_BYTES_PER_SPLIT:
                break
            paths.append(ref.path)
        self.row += len(paths)
        return PathList(len(paths), paths, contents) if paths else None

    def mark(self) -> object:
        return self.row

    def seek(self, row: int, marks: Mapping[int, object]) -> None:  # noqa: ARG002 - rows are places here
        self.row = min(row, len(self._files))

    def place_of(self, row: int, marks: Mapping[int, object]) -> str:  # noqa: ARG002 - rows are places here
        return self._files[row].path

    def fingerprint(self) -> dict[str, object]:
        return {"kind": self.kind, **files_fingerprint(self._files)}

    def describe(self) -> str:
        return describe_files(self._name, self._files)

    def close(self) -> None: ...
