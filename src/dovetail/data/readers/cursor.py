"""Cursor interface of all sources, and the row limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.control.payload import Split
    from dovetail.data.readers.file_discovery import FileRef


MAX_SPLIT_BYTES = 32 << 20
"""Maximum bytes of table rows that are sent or decompressed together."""


class Cursor(Protocol):
    """Read position in a source. Rows are numbered from 0. Thread: one at a time."""

    @property
    def kind(self) -> str:
        """jsonl, parquet, pandas, ...: for messages and profiles."""
        ...

    @property
    def prefers_large_splits(self) -> bool:
        """Whether opening a split is expensive, so that it should be large: a row group must be decompressed."""
        ...

    @property
    def row(self) -> int:
        """The number of the next row."""
        ...

    @property
    def total(self) -> int | None:
        """Number of rows, if known without reading everything."""
        ...

    @property
    def expected(self) -> int | None:
        """Estimated number of rows."""
        ...

    def seek(self, row: int, marks: Mapping[int, object]) -> None:
        """Move to this row. `marks`: row -> result of `mark` there, in this or an earlier run. Behind the end of the
        source it stays at the end."""
        ...

    def take(self, rows: int) -> Split | None:
        """The next rows: at least one, at most `rows`; None at the end."""
        ...

    def mark(self) -> object:
        """The current position; JSON."""
        ...

    def place_of(self, row: int, marks: Mapping[int, object]) -> str:
        """Where the row is, for people: "data/pages.jsonl:17". `marks` as for `seek`. Thread: any."""
        ...

    def fingerprint(self) -> dict[str, object]:
        """Fingerprint that must be unchanged for a resume; JSON."""
        ...

    def describe(self) -> str: ...

    def close(self) -> None: ...


class LimitedCursor:
    """The first rows of a source."""

    def __init__(self, cursor: Cursor, limit: int) -> None:
        self._cursor = cursor
        self._limit = limit
        self.kind = cursor.kind
        self.prefers_large_splits = cursor.prefers_large_splits

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

    def place_of(self, row: int, marks: Mapping[int, object]) -> str:
        return self._cursor.place_of(row, marks)

    def fingerprint(self) -> dict[str, object]:
        return {**self._cursor.fingerprint(), "limit": self._limit}

    def describe(self) -> str:
        return f"{self._cursor.describe()}, the first {self._limit:,} rows"

    def close(self) -> None:
        self._cursor.close()


def limit_rows_by_bytes(rows: int, row_bytes: float) -> int:
    """Limits the rows to what one worker should hold at once."""
    return max(1, min(rows, int(MAX_SPLIT_BYTES / max(1.0, row_bytes))))


def nearest_mark(row: int, marks: Mapping[int, object]) -> int | None:
    """The mark to start at: the last one not behind the row."""
    return max((at for at in marks if at <= row), default=None)


def describe_files(name: str, files: Sequence[FileRef], rows: int | None = None) -> str:
    """'data/*.jsonl: 3 files, 31 MB'"""
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    parts = [count]
    size = sum(ref.size for ref in files)
    if size:
        parts.append(format_size(size))
    if rows is not None:
        parts.append(f"{rows:,} rows")
    return f"{name}: {', '.join(parts)}"
