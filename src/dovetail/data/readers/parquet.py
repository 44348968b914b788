"""Cursor over Parquet files: footers read in the driver, row groups decompressed by workers."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import SourceSinkError
from dovetail.data.io_errors import CONTENT_MISMATCH, cannot_read, missing_source_package, source_changed
from dovetail.data.readers.cursor import describe_files, limit_rows_by_bytes
from dovetail.data.readers.file_discovery import check_unchanged, file_system, is_remote
from dovetail.data.readers.fingerprint import files_fingerprint
from dovetail.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.control.payload import Split
    from dovetail.data.readers.file_discovery import FileRef, FileStamp

BATCH_ROWS = 4096
BATCH_BYTES = 32 << 20
"""Maximum bytes of rows that are decompressed at once."""
_last_file: _OpenParquetFile | None = None
"""Read position in the last file of this process: splits of a row group arrive one after another."""


def parquet_module() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_source_package("pyarrow", "tables", "a Parquet file") from None
    return pyarrow.parquet


def open_parquet(path: str) -> Any:
    """The file, with its footer read."""
    module = parquet_module()
    if not is_remote(path):
        return module.ParquetFile(path)
    fs, name = file_system(path)
    return module.ParquetFile(fs.open(name, "rb"), pre_buffer=True)


@dataclass(slots=True)
class ParquetRows:
    """Rows `start` to `start + items` of a file."""

    items: int
    path: str
    stamp: FileStamp
    start: int
    columns: tuple[str, ...] | None

    def read(self) -> list[Any]:
        global _last_file
        reading, _last_file = _last_file, None  # another thread opens its own file
        try:
            if reading is None or not reading.is_for(self):
                check_unchanged(self.path, self.stamp)
                reading = _OpenParquetFile(self)
            rows = reading.rows(self.start, self.items)
        except (SourceSinkError, ConfigError, MemoryError):
            raise
        except Exception as error:
            check_unchanged(self.path, self.stamp)
            raise cannot_read(self.path, error) from None
        if not is_remote(self.path):
            check_unchanged(self.path, self.stamp)
        if len(rows) != self.items:
            raise source_changed(self.path, f"it has no row {self.start + self.items - 1}")
        _last_file = reading
        return rows


class _OpenParquetFile:
    """A file that is decompressed forwards, batch by batch. Memory use does not grow with its row groups."""

    def __init__(self, split: ParquetRows) -> None:
        self._key = (split.path, split.stamp, split.columns)
        self._file = open_parquet(split.path)
        self._columns = None if split.columns is None else list(split.columns)
        metadata = self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        size = sum(group.total_byte_size for group in groups)
        self._batch = max(1, min(BATCH_ROWS, BATCH_BYTES * max(1, metadata.num_rows) // max(1, size)))
        self._at = 0
        self._batches: Iterator[Any] = iter(())
        self._batch_rest: Any = None
        """Decompressed rows, starting at row `_at`."""
        self._goto(split.start)

    def is_for(self, split: ParquetRows) -> bool:
        return self._key == (split.path, split.stamp, split.columns)

    def _goto(self, row: int) -> None:
        group = bisect_right(self._ends, row)
        self._at = self._ends[group - 1] if group else 0
        self._batch_rest = None
        wanted = list(range(group, len(self._ends)))
        self._batches = self._file.iter_batches(self._batch, wanted, self._columns, use_threads=False)

    def rows(self, start: int, count: int) -> list[Any]:
        group = bisect_right(self._ends, start)
        group_start = self._ends[group - 1] if group else 0
        if start < self._at or group_start > self._at + (len(self._batch_rest) if self._batch_rest is not None else 0):
            self._goto(start)
        found: list[Any] = []
        while len(found) < count:
            if self._batch_rest is None or not len(self._batch_rest):
                self._batch_rest = next(self._batches, None)
                if self._batch_rest is None:
                    break
            skip = min(start - self._at, len(self._batch_rest))
            use = min(count - len(found), len(self._batch_rest) - skip)
            found += rows_from_batch(self._batch_rest.slice(skip, use))
            self._batch_rest = self._batch_rest.slice(skip + use)
            self._at += skip + use
            start = max(start, self._at)
        return found


def rows_from_batch(batch: Any) -> list[Any]:
    """Arrow rows as dicts, column by column."""
    names = batch.schema.names
    if not names:
        return [{} for _ in range(batch.num_rows)]
    columns = [column.to_pylist() for column in batch.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


class ParquetCursor:
    kind = "parquet"
    prefers_large_splits = True

    def __init__(self, name: str, files: Sequence[FileRef], columns: tuple[str, ...] | None) -> None:
        self._name = name
        self._files = files
        self._columns = columns
        self.row = 0
        self._groups: list[list[int]] = []
        """Per file, the last row of each row group."""
        self._row_bytes: list[float] = []
        problems: list[Problem] = []
        for ref in files:
            ends, size = _read_footer(ref.path, columns, problems)
            self._groups.append(ends)
            self._row_bytes.append(size / max(1, ends[-1]) if ends else 0)
        if problems:
            raise ConfigError(problems)
        self._ends = list(accumulate(ends[-1] if ends else 0 for ends in self._groups))

    @property
    def total(self) -> int | None:
        return self._ends[-1] if self._ends else 0

    expected = total

    def take(self, rows: int) -> Split | None:
        """Up to the end of a row group; of several, if they are small."""
        index = bisect_right(self._ends, self.row)
        if index >= len(self._files):
            return None
        ref, groups = self._files[index], self._groups[index]
        start = self.row - (self._ends[index - 1] if index else 0)
        rows = limit_rows_by_bytes(rows, self._row_bytes[index])
        end = groups[bisect_right(groups, start)]
        if end - start < rows // 4:
            end = groups[-1]
        count = min(rows, end - start)
        self.row += count
        return ParquetRows(count, ref.path, ref.stamp, start, self._columns)

    def mark(self) -> object:
        return self.row

    def seek(self, row: int, marks: Mapping[int, object]) -> None:  # noqa: ARG002 - footers say where rows are
        self.row = min(row, self.total or 0)

    def place_of(self, row: int, marks: Mapping[int, object]) -> str:  # noqa: ARG002 - footers say where rows are
        index = bisect_right(self._ends, row)
        return f"{self._files[index].path}, row {row - (self._ends[index - 1] if index else 0)}"

    def fingerprint(self) -> dict[str, object]:
        columns = None if self._columns is None else list(self._columns)
        return {"kind": self.kind, "columns": columns, **files_fingerprint(self._files)}

    def describe(self) -> str:
        return describe_files(self._name, self._files, self.total)

    def close(self) -> None: ...


def _read_footer(path: str, columns: tuple[str, ...] | None, problems: list[Problem]) -> tuple[list[int], int]:
    """Last rows of its row groups, and the decompressed bytes of all rows."""
    try:
        with open_parquet(path) as file:
            metadata, names = file.metadata, file.schema_arrow.names
    except ConfigError:
        raise
    except Exception as error:
        fix = "check that the file is complete, or set another format="
        message = f"is not a Parquet file that can be read: {error}"
        problems.append(Problem(CONTENT_MISMATCH, message, fixes=(fix,), place=path))
        return [], 0
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice and columns is None:
        fix = "set columns= without these"
        problems.append(Problem(CONTENT_MISMATCH, f"has two columns {', '.join(twice)}", fixes=(fix,), place=path))
    for name in columns or ():
        if name not in names:
            fix = f"one of {', '.join(names)}{did_you_mean(name, names)}"
            problems.append(Problem(CONTENT_MISMATCH, f"there is no column {name!r}", fixes=(fix,), place=path))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return list(accumulate(group.num_rows for group in groups)), sum(group.total_byte_size for group in groups)
