"""Cursor over Lance tables by fragment, at a fixed version."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import SourceSinkError
from dovetail.data.io_errors import CONTENT_MISMATCH, cannot_read, missing_source_package, source_changed
from dovetail.data.readers.cursor import limit_rows_by_bytes
from dovetail.data.readers.file_discovery import local_path
from dovetail.data.readers.parquet import rows_from_batch
from dovetail.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.control.payload import Split

_last_table: tuple[tuple[str, int], Any] | None = None
"""The table that this process opened last."""


def import_lance() -> Any:
    try:
        import lance
    except ImportError:
        raise missing_source_package("pylance", "lance", "a Lance table") from None
    return lance


@dataclass(slots=True)
class LanceRows:
    """Rows of a fragment that are not deleted, starting at the `start`-th."""

    items: int
    uri: str
    version: int
    fragment: int
    start: int
    columns: tuple[str, ...] | None

    def read(self) -> list[Any]:
        try:
            fragment = _open_table(self.uri, self.version).get_fragment(self.fragment)
            columns = None if self.columns is None else list(self.columns)
            found = fragment.scanner(columns=columns, offset=self.start, limit=self.items).to_table()
            rows = [row for batch in found.to_batches() for row in rows_from_batch(batch)]
        except (SourceSinkError, ConfigError, MemoryError):
            raise
        except Exception as error:
            raise cannot_read(self.uri, error) from None
        if len(rows) != self.items:
            raise source_changed(
                self.uri, f"fragment {self.fragment} of version {self.version} has fewer rows than it had"
            )
        return rows


def _fragment_bytes(fragment: Any) -> int:
    """Bytes on disk of all columns; 0: unknown."""
    return sum(getattr(file, "file_size_bytes", None) or 0 for file in fragment.data_files())


def _open_table(uri: str, version: int) -> Any:
    global _last_table
    opened = _last_table
    if opened is None or opened[0] != (uri, version):
        _last_table = opened = ((uri, version), import_lance().dataset(uri, version=version))
    return opened[1]


class LanceCursor:
    """One or several tables, one after another."""

    kind = "lance"
    prefers_large_splits = True

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        columns: tuple[str, ...] | None,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        """`versions`: URI -> version, if not the latest: a resumed run reads the version that it started with."""
        self._name = name
        self._columns = columns
        self._versions = versions or {}
        self.row = 0
        self._tables: list[tuple[str, int]] = []
        self._pieces: list[tuple[int, int]] = []
        """Table, fragment."""
        self._row_bytes: list[float] = []
        counts: list[int] = []
        problems: list[Problem] = []
        for path in paths:
            counts += self._add(local_path(path), problems)
        if problems:
            raise ConfigError(problems)
        self._ends = list(accumulate(counts))

    def _add(self, uri: str, problems: list[Problem]) -> list[int]:
        module = import_lance()
        try:
            table = module.dataset(uri, version=self._versions.get(uri))
        except Exception as error:
            fix = "check the name; a table is a folder with _versions/ in it"
            message = f"is not a Lance table that can be read: {str(error).splitlines()[0] if str(error) else error!r}"
            problems.append(Problem(CONTENT_MISMATCH, message, fixes=(fix,), place=uri))
            return []
        names = table.schema.names
        for name in self._columns or ():
            if name not in names:
                fix = f"one of {', '.join(names)}{did_you_mean(name, names)}"
                problems.append(Problem(CONTENT_MISMATCH, f"there is no column {name!r}", fixes=(fix,), place=uri))
        self._tables.append((uri, int(table.version)))
        fragments = [(fragment, fragment.count_rows()) for fragment in table.get_fragments()]
        self._row_bytes += [_fragment_bytes(fragment) / max(1, rows) for fragment, rows in fragments]
        self._pieces += [(len(self._tables) - 1, fragment.fragment_id) for fragment, _ in fragments]
        return [rows for _, rows in fragments]

    @property
    def total(self) -> int | None:
        return self._ends[-1] if self._ends else 0

    expected = total

    def take(self, rows: int) -> Split | None:
        index = bisect_right(self._ends, self.row)
        if index >= len(self._ends):
            return None
        table, fragment = self._pieces[index]
        start = self.row - (self._ends[index - 1] if index else 0)
        count = min(limit_rows_by_bytes(rows, self._row_bytes[index]), self._ends[index] - self.row)
        self.row += count
        uri, version = self._tables[table]
        return LanceRows(count, uri, version, fragment, start, self._columns)

    def mark(self) -> object:
        return self.row

    def seek(self, row: int, marks: Mapping[int, object]) -> None:  # noqa: ARG002 - fragments say where rows are
        self.row = min(row, self.total or 0)

    def place_of(self, row: int, marks: Mapping[int, object]) -> str:  # noqa: ARG002 - fragments say where rows are
        table = self._pieces[bisect_right(self._ends, row)][0]
        first = next(index for index, piece in enumerate(self._pieces) if piece[0] == table)
        return f"{self._tables[table][0]}, row {row - (self._ends[first - 1] if first else 0)}"

    def fingerprint(self) -> dict[str, object]:
        columns = None if self._columns is None else list(self._columns)
        tables = [[uri, version] for uri, version in self._tables]
        return {"kind": self.kind, "columns": columns, "tables": tables, "rows": self.total}

    def describe(self) -> str:
        versions = ", ".join(f"version {version}" for _, version in self._tables)
        return f"{self._name}: {self.total:,} rows in {len(self._pieces):,} fragments, {versions}"

    def close(self) -> None: ...
