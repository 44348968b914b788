"""LanceTable, one version of a Lance table: read rows, write data files, commit them with conflict retries.

Behaviour of Lance, established by experiment (pylance 14.0.2):
- A writer of data files writes under a hidden temporary name (`data/.tmpXXXXXX`) and renames when it is closed. Killed,
  it leaves that temporary file and nothing under the final name (workers therefore write into the folder of their
  checkpoints first, which is deleted); dropped without being closed, it leaves nothing. On
  object stores an unfinished upload is invisible. As a context manager it also closes after an exception, which would
  leave a truncated file; therefore it is not used as one here.
- `cleanup_old_versions`, with any arguments, reads only the folders of Lance, never `_dovetail`.
  Files below `data/` that no version references yet are kept for 7 days, unless `delete_unverified=True` is given.
- A fragment whose rows are all deleted is removed from the list of fragments.
- Data files list leaf fields: of a struct only the ids of its innermost fields; in tables of version 2.0, all ids.
- The name of a top-level column cannot contain a dot; in `where`, names with spaces or capitals need backticks.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.backfill.lance_client import (
    CANNOT_WRITE,
    as_os_error,
    check_table_exists,
    error_text,
    is_permission_error,
    legacy_fix,
    normalize_uri,
    open_dataset,
    open_dataset_uncached,
    open_file_session,
    write_error,
    write_permission_fix,
)
from dovetail.backfill.target import files_hash
from dovetail.data.readers.file_discovery import is_remote
from dovetail.errors import ConfigError, Given, Problem, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

BAD_WHERE = "DT432"

MAX_COMMIT_ATTEMPTS = 20
"""Attempts of a commit when other processes commit at the same time."""
_OFFSET_MASK = 0xFFFFFFFF
READ_BLOB_BYTES: dict[str, Any] = {"blob_handling": "all_binary"}
"""Read option: without it Lance returns the position of a blob in its file instead of its bytes."""


@dataclass(frozen=True, slots=True)
class DataFileInfo:
    path: str
    fields: tuple[int, ...]
    """Ids of the top-level columns with values in the file, also if it has only one of their inner fields."""
    size_bytes: int
    """0: unknown."""


@dataclass(frozen=True, slots=True)
class Fragment:
    id: int
    rows: int
    """Physical rows, including deleted ones."""
    deleted: int
    files: tuple[DataFileInfo, ...]


@dataclass(frozen=True, slots=True)
class NewDataFile:
    fragment: int
    name: str
    fields: tuple[int, ...]
    """Ids of the top-level columns."""
    inputs: str
    """Hash of the input files from which it was computed."""
    size_bytes: int = 0
    before: str = ""
    """Hash of the files with the values that other rows keep; "": all rows were computed."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    version: int
    inputs: Mapping[int, str]
    """Fragment -> hash of the input files of its current values."""
    changed_fragments: tuple[int, ...]
    """Fragments that were removed or whose files changed: they must be computed again."""

    @property
    def fragments(self) -> tuple[int, ...]:
        return tuple(self.inputs)


class LanceTable:
    """One version of a table. Pickling keeps only its address; unpickling opens it again."""

    def __init__(self, uri: str, storage: Mapping[str, str] | None = None, version: int | None = None) -> None:
        self.uri = normalize_uri(uri)
        self.storage = dict(storage or {})
        self.dataset = open_dataset(self.uri, self.storage, version)
        """The LanceDataset."""
        self.version = int(self.dataset.version)
        self.schema: pa.Schema = self.dataset.schema
        self._fragments: tuple[Fragment, ...] | None = None
        self._ids: dict[str, int] | None = None
        self._top_level_ids: dict[int, int] | None = None
        """Id of every field, including inner ones -> id of its top-level column."""

    def __reduce__(self) -> tuple[type[LanceTable], tuple[str, dict[str, str], int]]:
        return type(self), (self.uri, self.storage, self.version)

    def __repr__(self) -> str:
        return f"LanceTable({self.uri!r}, version={self.version})"  # storage may contain secrets

    def newest(self) -> LanceTable:
        return LanceTable(self.uri, self.storage)

    def fragments(self) -> tuple[Fragment, ...]:
        if self._fragments is None:
            self._fragments = tuple(self.describe_fragment(found.metadata) for found in self.dataset.get_fragments())
        return self._fragments

    def describe_fragment(self, metadata: Any) -> Fragment:
        """Convert the metadata of a fragment, also of an older version."""
        if self._top_level_ids is None:
            self._top_level_ids = {
                id_: top.id() for top in self.dataset.lance_schema.fields() for id_ in _nested_field_ids(top)
            }
        return _make_fragment(metadata, self._top_level_ids)

    def field_ids(self) -> dict[str, int]:
        """Name -> id of the top-level columns."""
        if self._ids is None:
            self._ids = {field.name(): field.id() for field in self.dataset.lance_schema.fields()}
        return self._ids

    def add_columns(self, fields: Sequence[pa.Field]) -> LanceTable:
        """Add columns that are NULL everywhere. Writes only metadata, for tables of any size."""
        names = [field.name for field in fields]
        return self._change_schema(f"add {_quoted_names(names)}", lambda dataset: dataset.add_columns(list(fields)))

    def drop_columns(self, names: Sequence[str]) -> LanceTable:
        return self._change_schema(f"drop {_quoted_names(names)}", lambda dataset: dataset.drop_columns(list(names)))

    def _change_schema(self, what: str, change: Callable[[Any], object]) -> LanceTable:
        from lance.commit import CommitConflictError

        for waited in _attempts():
            dataset = open_dataset_uncached(self.uri, self.storage)
            try:
                change(dataset)  # in place: the object is another version then, so it must not be a cached one
            except CommitConflictError as error:
                if waited:
                    continue
                raise write_error(
                    self.uri, f"cannot {what}, {MAX_COMMIT_ATTEMPTS} times: {error_text(error)}"
                ) from None
            except (OSError, ValueError) as error:
                message = f"cannot {what}: {error_text(error)}"
                fix = legacy_fix(dataset, message) or f"the columns are {_quoted_names(dataset.schema.names)}"
                fix = write_permission_fix(self.uri) if is_permission_error(message) else fix
                raise ConfigError(Problem(CANNOT_WRITE, message, fixes=(fix,), place=self.uri)) from None
            return self.newest()
        raise AssertionError("the last attempt returns or raises")

    def read(self, fragment: int, columns: Sequence[str], start: int, stop: int) -> tuple[pa.Table, pa.BooleanArray]:
        """Physical rows `start` to `stop` of the fragment, and which of them are not deleted.

        Returns fewer rows if the fragment ends before `stop`; values of deleted rows are arbitrary.
        """
        import numpy as np
        import pyarrow as pa

        part, names = self._fragment_of(fragment), list(columns)
        rows = max(0, min(stop, part.physical_rows) - start)
        if not part.num_deletions:
            found: pa.Table = part.scanner(columns=names, offset=start, limit=rows, **READ_BLOB_BYTES).to_table()
            return found.select(names), pa.repeat(True, found.num_rows)
        # without include_deleted_rows, with which Lance reads every row from the first row of the fragment on
        first = fragment << 32 | start
        where = f"_rowaddr >= {first} AND _rowaddr < {first + rows}"
        found = part.scanner(columns=names, filter=where, with_row_address=True, **READ_BLOB_BYTES).to_table()
        there = found.column("_rowaddr").to_numpy().astype(np.int64) - first
        places, missing = np.zeros(rows, np.int64), np.ones(rows, bool)
        places[there], missing[there] = np.arange(len(there)), False
        taken = pa.array(places, mask=missing)
        return found.select(names).take(taken), taken.is_valid()

    def any_row(self, fragment: int, columns: Sequence[str]) -> pa.Table:
        """Number of rows that match and are not deleted."""
        names = list(columns)
        found: pa.Table = self._fragment_of(fragment).scanner(columns=names, limit=1, **READ_BLOB_BYTES).to_table()
        return found.select(names)

    def matching_offsets(self, fragment: int, where: str) -> pa.UInt32Array:
        """Physical offsets of the rows that match and are not deleted, ascending."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found = self._fragment_of(fragment).scanner(columns=[], filter=where, with_row_address=True).to_table()
        offsets = pc.bit_wise_and(found.column("_rowaddr"), pa.scalar(_OFFSET_MASK, pa.uint64())).cast(pa.uint32())
        ordered: pa.UInt32Array = offsets.combine_chunks().take(pc.array_sort_indices(offsets.combine_chunks()))
        return ordered

    def undeleted_offsets(self, fragment: int, offsets: Sequence[int]) -> set[int]:
        """The rows at these offsets that are not deleted."""
        first = fragment << 32
        where = f"_rowaddr IN ({', '.join(str(first + offset) for offset in offsets)})"
        return set(self.matching_offsets(fragment, where).to_pylist()) if offsets else set()

    def count(self, where: str) -> int:
        return int(self.dataset.count_rows(filter=where))

    def check_where(self, where: str) -> None:
        """Let Lance plan the scan, which reads nothing; ConfigError if it fails."""
        try:
            self.dataset.scanner(columns=[], filter=where, with_row_address=True).explain_plan()
        except Exception as error:  # Lance raises many types; each is about this condition
            message = Text(Given("where", where), f" is not a condition on this table: {error_text(error)}")
            fix = f"columns: {_quoted_names(self.schema.names)}; write one with spaces or capitals in `backticks`"
            raise ConfigError(Problem(BAD_WHERE, message, fixes=(fix,), place=self.uri)) from None

    def columns_mentioned(self, where: str) -> tuple[str, ...]:
        """Columns whose name occurs in the text, even in quotes: one too many is harmless, one too few is not."""
        return tuple(name for name in self.schema.names if _mentions_column(name, where))

    def write(
        self,
        name: str,
        schema: pa.Schema,
        batches: Iterable[pa.RecordBatch],
        rows: int | None = None,
        scratch: str = "",
    ) -> int:
        """Write a data file that no version references yet; returns its size in bytes. After a failure no file of that
        name exists. `rows` is checked here, because Lance does not check it and the table would become unreadable.
        `scratch`: an existing folder of this machine for the file while it is written, which is deleted later: a killed
        writer leaves nothing in the table's own folders."""
        from lance.file import LanceFileWriter

        check_table_exists(self.uri)
        path = f"{self.uri}/data/{name}"
        if not _is_same_device(scratch, f"{self.uri}/data"):
            scratch = ""
        writer = LanceFileWriter(
            f"{scratch}/{name}" if scratch else path,
            schema,
            version=self.dataset.data_storage_version,
            storage_options=self.storage or None,
        )
        try:
            written = 0
            for batch in batches:
                writer.write_batch(batch)
                written += batch.num_rows
            if rows is not None and written != rows:
                raise RuntimeError(f"{name} would have {written} rows instead of {rows}")
            writer.close()
            if scratch:
                Path(scratch, name).replace(path)
            return int(writer.size_bytes or 0)
        finally:
            del writer  # deletes what it wrote if it was not closed

    def commit(self, files: Sequence[NewDataFile], inputs_of: Callable[[LanceTable, Fragment], str]) -> CommitResult:
        """Commit files to the table in one version, unless the data they were computed from changed.

        Other processes may append, delete and update meanwhile. If Lance reports a conflict, the check is repeated
        against the newest version.
        """
        from lance.commit import CommitConflictError

        for waited in _attempts():
            now = self.newest()
            self._check_columns(now, {field for file in files for field in file.fields})
            kept = _still_valid(now, files, inputs_of)
            names = {file.name for file in kept}
            gone = tuple(file.fragment for file in files if file.name not in names)
            if not kept:
                return CommitResult(now.version, {}, gone)
            try:
                version = now.commit_files(kept)
            except CommitConflictError as error:
                if waited:
                    continue
                message = f"cannot commit {len(kept)} files, {MAX_COMMIT_ATTEMPTS} times: {error_text(error)}"
                raise write_error(self.uri, message) from None
            return CommitResult(version, {file.fragment: file.inputs for file in kept}, gone)
        raise AssertionError("the last attempt returns or raises")

    def _check_columns(self, now: LanceTable, fields: set[int]) -> None:
        """Check that the columns still exist: Lance reuses the id of a dropped column for the next one added."""
        there = {id_: now.schema.field(name) for name, id_ in now.field_ids().items()}
        here = {id_: self.schema.field(name) for name, id_ in self.field_ids().items()}
        gone = [id_ for id_ in fields if id_ not in there or not there[id_].equals(here.get(id_, there[id_]))]
        if gone:
            names = _quoted_names(here[id_].name if id_ in here else f"number {id_}" for id_ in sorted(gone))
            message = (
                f"column {names} was dropped or changed while it was filled: "
                f"the table has {_quoted_names(now.schema.names)}"
            )
            raise write_error(self.uri, message, "add the column again, then repeat the backfill")

    def commit_files(self, files: Sequence[NewDataFile]) -> int:
        """Commit the files to this version, or to a newer one without conflicting changes."""
        import lance
        from lance.commit import CommitConflictError

        layouts: dict[tuple[int, ...], Any] = {}
        try:
            groups = [
                lance.LanceOperation.DataReplacementGroup(file.fragment, self._data_file(file, layouts))
                for file in files
            ]
            operation = lance.LanceOperation.DataReplacement(groups)
            options = self.storage or None
            done = lance.LanceDataset.commit(
                self.uri, operation, read_version=self.version, max_retries=MAX_COMMIT_ATTEMPTS, storage_options=options
            )
        except CommitConflictError:
            raise
        except (OSError, ValueError) as error:
            raise write_error(self.uri, f"cannot commit {len(files)} files: {error_text(error)}") from None
        return int(done.version)

    def _data_file(self, file: NewDataFile, layouts: dict[tuple[int, ...], Any]) -> Any:
        """Mapping of file columns to fields. It depends on the format version, so Lance computes it, once per set."""
        from lance.fragment import DataFile

        layout = layouts.get(file.fields)
        if layout is None:
            layout = layouts[file.fields] = DataFile.create(self.dataset, file.name)
        return DataFile(
            file.name,
            list(layout.fields),
            list(layout.column_indices),
            layout.file_major_version,
            layout.file_minor_version,
            file.size_bytes or None,
        )

    def _fragment_of(self, fragment: int) -> Any:
        found = self.dataset.get_fragment(fragment)
        if found is None:
            raise write_error(self.uri, f"version {self.version} has no fragment {fragment}")
        return found


def _still_valid(
    table: LanceTable, files: Sequence[NewDataFile], inputs_of: Callable[[LanceTable, Fragment], str]
) -> tuple[NewDataFile, ...]:
    """Whether the file exists: `cleanup_old_versions(delete_unverified=True)` removes files that no version
    references."""
    is_there = _file_exists_check(table)
    there = {fragment.id: fragment for fragment in table.fragments()}
    return tuple(
        file
        for file in files
        if (found := there.get(file.fragment)) is not None
        and inputs_of(table, found) == file.inputs
        and (not file.before or files_hash(found, file.fields) == file.before)
        and is_there(file.name)
    )


def _file_exists_check(table: LanceTable) -> Callable[[str], bool]:
    folder = f"{table.uri}/data"
    if not is_remote(folder):
        return lambda name: Path(folder, name).exists()
    session = open_file_session(folder, table.storage)

    def is_there(name: str) -> bool:
        with as_os_error():
            return bool(session.contains(name))

    return is_there


def _make_fragment(found: Any, tops: dict[int, int]) -> Fragment:
    deletions = found.deletion_file
    files = tuple(_file_info(file, tops) for file in found.files)
    return Fragment(int(found.id), int(found.physical_rows), int(deletions.num_deleted_rows) if deletions else 0, files)


def _file_info(file: Any, tops: dict[int, int]) -> DataFileInfo:
    """Fields that are valid in the file: Lance marks fields that were dropped or replaced with a negative id."""
    fields = tuple(sorted({tops[id_] for id_ in file.fields if id_ in tops}))
    return DataFileInfo(str(file.path), fields, int(file.file_size_bytes or 0))


def _nested_field_ids(field: Any) -> Iterator[int]:
    yield field.id()
    for child in field.children():
        yield from _nested_field_ids(child)


def _mentions_column(name: str, where: str) -> bool:
    if not re.fullmatch(r"\w+", name):
        return any(mark in name for mark in "`\"'\\") or name.casefold() in where.casefold()
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", where, re.IGNORECASE) is not None


def _quoted_names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _is_same_device(folder: str, other: str) -> bool:
    """Whether both folders exist on one file system of this machine, so that a file can be moved between them."""
    try:
        return bool(folder) and Path(folder).stat().st_dev == Path(other).stat().st_dev
    except OSError:
        return False


def _attempts() -> Iterator[bool]:
    """Whether to try again, after a wait that grows and is random."""
    for at in range(MAX_COMMIT_ATTEMPTS):
        if at:
            time.sleep(random.uniform(0, min(2.0, 0.05 * 2**at)))  # noqa: S311 - jitter, not a secret
        yield at < MAX_COMMIT_ATTEMPTS - 1
