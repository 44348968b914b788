"""Cursor interface of all sources, the row limit, and source fingerprints and their differences."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.control.payload import Split
    from dovetail.data.readers.file_discovery import FileRef

MAX_FILES_LISTED = 1000
"""Maximum number of files listed in a fingerprint; for more it has a digest."""

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


def files_fingerprint(files: Sequence[FileRef]) -> dict[str, object]:
    # without the inode: a file restored from a backup with its time is unchanged
    listed = [[ref.path, ref.size, list(ref.stamp[:2]) if isinstance(ref.stamp, tuple) else ref.stamp] for ref in files]
    if len(files) <= MAX_FILES_LISTED:
        return {"files": listed}
    digest = hashlib.sha256()
    for one in listed:
        digest.update(repr(one).encode("utf-8", "surrogateescape"))
    return {"count": len(files), "bytes": sum(ref.size for ref in files), "digest": digest.hexdigest()}


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


MAX_DIFFERENCES_SHOWN = 10
FIELD_TEXTS = {
    "count": "the number of files",
    "bytes": "the bytes of all files together",
    "digest": "the list of files",
}


def fingerprint_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if before.get("kind") != now.get("kind"):
        return [f"the source was {before.get('kind')} and is {now.get('kind')} now"]
    found: list[str] = []
    for key in sorted({*before, *now} - {"kind"}):
        old, new = before.get(key), now.get(key)
        if key == "files" and old is not None and new is not None:
            found += _file_differences(old, new)
        elif key == "tables":
            found += _table_differences(old or [], new or [])
        elif _as_lists(old) != _as_lists(new):
            found.append(_field_difference(key, old, new))
    if len(found) > MAX_DIFFERENCES_SHOWN:
        return [*found[:MAX_DIFFERENCES_SHOWN], f"and {len(found) - MAX_DIFFERENCES_SHOWN} more changes"]
    return found


def _field_difference(key: str, old: Any, new: Any) -> str:
    if key == "dataset":
        return "a Ray Dataset ends with its driver; when computed again, its rows may be in another order"
    if key in ("files", "digest", "content", "schema"):
        what = {"files": "the list of files", "content": "the content of the table", "schema": "the table's columns"}
        return f"{what.get(key, FIELD_TEXTS.get(key, key))} changed"
    return f"{FIELD_TEXTS.get(key, key)} was {_value_text(old)} and is {_value_text(new)} now"


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not given" if value is None else f"{value:,}" if type(value) is int else str(value)


def _file_differences(old: list[Any], new: list[Any]) -> list[str]:
    was, now = {one[0]: one for one in old}, {one[0]: one for one in new}
    found = [f"{path} is gone" for path in was if path not in now]
    found += [f"{path} was not there" for path in now if path not in was]
    for path in was:
        if path in now and _as_lists(was[path]) != _as_lists(now[path]):
            found.append(f"{path} {_file_difference(was[path], now[path])}")
    if not found and [one[0] for one in old] != [one[0] for one in new]:
        found.append("the order of the files changed")
    return found


def _file_difference(was: list[Any], now: list[Any]) -> str:
    if was[1] != now[1]:
        before, after = format_size(was[1]), format_size(now[1])
        if before == after:
            before, after = f"{was[1]:,} bytes", f"{now[1]:,} bytes"
        return f"was {before} and is {after} now"
    return "was written to or replaced (same size, another time)"


def _table_differences(old: list[Any], new: list[Any]) -> list[str]:
    was, now = dict(old), dict(new)
    found = [f"the table {uri} is no longer a source" for uri in was if uri not in now]
    found += [f"the table {uri} is new" for uri in now if uri not in was]
    for uri in was:
        if uri in now and was[uri] != now[uri]:
            found.append(f"the table {uri} was read at version {was[uri]} and is at version {now[uri]} now")
    return found


def _as_lists(value: Any) -> Any:
    """Convert tuples to lists, as JSON does."""
    return [_as_lists(one) for one in value] if isinstance(value, list | tuple) else value
