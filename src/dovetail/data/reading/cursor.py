"""What must every kind of source be able to do in the driver? Say where rows lie, and where it stands."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

from dovetail.resources.sizes import about_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.control.splits import Split
    from dovetail.data.reading.files import FileRef

FILES_LISTED = 1000
"""A fingerprint lists so many files; of more it has a digest."""

SPLIT_BYTES = 32 << 20
"""Rows of a table that travel or are unpacked together have about so many bytes at most."""


class Cursor(Protocol):
    """Where reading stands. Rows are numbered from 0. Only one thread uses it."""

    @property
    def kind(self) -> str:
        """jsonl, parquet, pandas, ...: for words and profiles."""
        ...

    @property
    def coarse(self) -> bool:
        """Whether opening a split costs so much that it should be large: a row group has to be unpacked."""
        ...

    @property
    def row(self) -> int:
        """The number of the next row."""
        ...

    @property
    def total(self) -> int | None:
        """Rows there are, if that is known without reading through."""
        ...

    @property
    def expected(self) -> int | None:
        """About how many rows there are, as far as can be told by now."""
        ...

    def seek(self, row: int, marks: Mapping[int, object]) -> None:
        """The next `take` begins at this row. `marks`: row -> what `mark` gave there, in this run or an earlier one.
        Behind the end of the source it stands at the end."""
        ...

    def take(self, rows: int) -> Split | None:
        """The next rows: at least one, at most so many; None at the end."""
        ...

    def mark(self) -> object:
        """Where it stands; JSON."""
        ...

    def fingerprint(self) -> dict[str, object]:
        """What must not change for a resume; JSON."""
        ...

    def describe(self) -> str: ...

    def close(self) -> None: ...


class Limited:
    """The first rows of a source."""

    def __init__(self, cursor: Cursor, limit: int) -> None:
        self._cursor = cursor
        self._limit = limit
        self.kind = cursor.kind
        self.coarse = cursor.coarse

    @property
    def row(self) -> int:
        return min(self._cursor.row, self._limit)

    @property
    def total(self) -> int | None:
        total = self._cursor.total
        return None if total is None else min(total, self._limit)

    @property
    def expected(self) -> int | None:
        expected = self._cursor.expected
        return self._limit if expected is None else min(expected, self._limit)

    def seek(self, row: int, marks: Mapping[int, object]) -> None:
        self._cursor.seek(min(row, self._limit), marks)

    def take(self, rows: int) -> Split | None:
        left = self._limit - self._cursor.row
        return self._cursor.take(min(rows, left)) if left > 0 else None

    def mark(self) -> object:
        return self._cursor.mark()

    def fingerprint(self) -> dict[str, object]:
        return {**self._cursor.fingerprint(), "limit": self._limit}

    def describe(self) -> str:
        return f"{self._cursor.describe()}, the first {self._limit:,} rows"

    def close(self) -> None:
        self._cursor.close()


def fewer(rows: int, row_bytes: float) -> int:
    """Not more rows than one worker should hold at once."""
    return max(1, min(rows, int(SPLIT_BYTES / max(1.0, row_bytes))))


def nearest(row: int, marks: Mapping[int, object]) -> int | None:
    """The mark to begin at: the last one that is not behind the row."""
    return max((at for at in marks if at <= row), default=None)


def files_fingerprint(files: Sequence[FileRef]) -> dict[str, object]:
    # without its inode: what was put back from a backup, with its time, is what it was
    listed = [[ref.path, ref.size, list(ref.stamp[:2]) if isinstance(ref.stamp, tuple) else ref.stamp] for ref in files]
    if len(files) <= FILES_LISTED:
        return {"files": listed}
    digest = hashlib.sha256()
    for one in listed:
        digest.update(repr(one).encode("utf-8", "surrogateescape"))
    return {"count": len(files), "bytes": sum(ref.size for ref in files), "digest": digest.hexdigest()}


def describe_files(said: str, files: Sequence[FileRef], rows: int | None = None) -> str:
    """'data/*.jsonl: 3 files, 31 MB'"""
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    parts = [count]
    size = sum(ref.size for ref in files)
    if size:
        parts.append(about_size(size))
    if rows is not None:
        parts.append(f"{rows:,} rows")
    return f"{said}: {', '.join(parts)}"
