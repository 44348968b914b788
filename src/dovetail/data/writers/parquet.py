"""Final Parquet files made from Arrow pieces: schema unification, row groups, shards."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import SourceSinkError
from dovetail.data.writers.encoders import NO_COLUMNS, merge_types
from dovetail.data.writers.piece_merge import sort_by_first_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from dovetail.data.writers.piece_merge import MergeJob, OpenPiece

ROW_GROUP_BYTES = 64 << 20
MAX_ROW_GROUP_ROWS = 1 << 20
MIN_ROW_GROUP_BYTES = 1 << 16


def write_parquet(job: MergeJob) -> list[Path]:
    """Build the files and sync them; they are not renamed yet."""
    import pyarrow.parquet as pq

    old = pq.ParquetFile(job.old.path) if job.old is not None and job.old.size else None
    try:
        schema = fill_empty_structs(merge_schema(job, [old.schema_arrow] if old else []))
        files = ParquetShardWriter(job, schema)
        try:
            for table in _old_tables(old) if old else ():
                files.add(conform_table(table, schema))
            for table in iter_tables(job, schema, files.group_bytes):
                files.add(table)
            return files.close()
        finally:
            files.abandon()
    finally:
        if old:
            old.close()


def _old_tables(old: Any) -> Iterator[Any]:
    import pyarrow as pa

    for batch in old.iter_batches(batch_size=1 << 16):
        yield pa.Table.from_batches([batch])


class ParquetShardWriter:
    """One file after another; the next one starts when a file has its size."""

    def __init__(self, job: MergeJob, schema: Any) -> None:
        self._job = job
        self._schema = schema
        self._limit = job.shard_bytes
        self.group_bytes = min(ROW_GROUP_BYTES, max(MIN_ROW_GROUP_BYTES, self._limit or ROW_GROUP_BYTES))
        self._writer: Any = None
        self._file: Any = None
        self._held: list[Any] = []
        self._held_bytes = 0
        self._held_rows = 0
        self.paths: list[Path] = []

    def add(self, table: Any) -> None:
        self._held.append(table)
        self._held_bytes += table.nbytes
        self._held_rows += table.num_rows
        if self._held_bytes >= self.group_bytes or self._held_rows >= MAX_ROW_GROUP_ROWS:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa

        if self._writer is None:
            self._open()
        table = pa.concat_tables(self._held)
        self._held, self._held_bytes, self._held_rows = [], 0, 0
        self._writer.write_table(table, row_group_size=MAX_ROW_GROUP_ROWS)
        if self._limit is not None and self._file.tell() >= self._limit:
            self._close()

    def _open(self) -> None:
        import pyarrow.parquet as pq

        path = self._job.path(len(self.paths))
        self.paths.append(path)
        self._file = path.open("xb")
        self._writer = pq.ParquetWriter(self._file, self._schema, compression=self._job.compression or "zstd")

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> list[Path]:
        if self._held:
            self._write()
        if self._writer is None and not self.paths:
            self._open()
        if self._writer is not None:
            self._close()
        return self.paths

    def abandon(self) -> None:
        for thing in (self._writer, self._file):
            with contextlib.suppress(OSError):  # buffered data may not fit on the disk either
                if thing is not None:
                    thing.close()


def iter_tables(job: MergeJob, schema: Any, group_bytes: int = ROW_GROUP_BYTES) -> Iterator[Any]:
    """All rows as tables of that schema. Small pieces are combined first, because each step has a fixed cost."""
    import pyarrow as pa

    held: list[Any] = []
    size = 0
    for opened, start, stop in job.spans():
        table = _read_piece(job, opened)
        if stop - start < table.num_rows:
            table = table.slice(start, stop - start)
        held.append(table)
        size += max(64, opened.piece.length * (stop - start) // opened.piece.items)
        if size >= min(group_bytes, 4 << 20):
            yield conform_table(pa.concat_tables(held, promote_options="permissive"), schema)
            held, size = [], 0
    if held:
        yield conform_table(pa.concat_tables(held, promote_options="permissive"), schema)


def _read_piece(job: MergeJob, opened: OpenPiece) -> Any:
    import pyarrow as pa

    if opened.cache is None:
        piece = opened.piece
        with pa.ipc.open_stream(job.reader.read(piece.part, piece.offset, piece.length)) as stream:
            table = stream.read_all()
        if job.columns is not None:
            table = table.select([name for name in table.column_names if name in job.columns])
        opened.cache = table
    return opened.cache


def merge_schema(job: MergeJob, before: Iterable[Any] = ()) -> Any:
    """The common schema of all pieces and the old rows. The schema of pieces with one name is read once."""
    import pyarrow as pa

    fields: dict[str, Any] = {}
    for schema in before:
        _merge_fields(fields, schema, job)
    if job.columns is not None:
        for name in job.columns:
            fields.setdefault(name, pa.field(name, pa.null()))
    seen: set[str] = set()
    for piece in sort_by_first_key(job.pieces) if job.ordered else job.pieces:
        if piece.meta in seen:
            continue
        seen.add(piece.meta)
        with pa.ipc.open_stream(job.reader.read(piece.part, piece.offset, piece.length)) as stream:
            schema = stream.schema
        if job.columns is not None:
            schema = pa.schema([field for field in schema if field.name in job.columns])
        _merge_fields(fields, schema, job)
    if len(fields) > 1:
        fields.pop(NO_COLUMNS, None)
    return pa.schema(list(fields.values()))


def _merge_fields(fields: dict[str, Any], schema: Any, job: MergeJob) -> None:
    import pyarrow as pa

    for field in schema:
        known = fields.get(field.name)
        if known is None:
            fields[field.name] = pa.field(field.name, field.type)
            continue
        both = merge_types(known.type, field.type)
        if both is None:
            raise type_conflict_error(job, field.name, known.type, field.type)
        fields[field.name] = pa.field(field.name, both)


def type_conflict_error(job: MergeJob, name: str, one: Any, other: Any) -> SourceSinkError:
    message = f"column {name!r} is {one} in some rows and {other} in others; no common type"
    fix = f"convert it in the last stage, for example row[{name!r}] = str(row[{name!r}]), then run again"
    return SourceSinkError("DT356", message, fix, job.place)


def conform_table(table: Any, schema: Any) -> Any:
    """The table with exactly these columns and types; missing values are null."""
    import pyarrow as pa

    if table.schema == schema:
        return table
    if NO_COLUMNS in table.column_names and NO_COLUMNS not in schema.names:
        rows = pa.nulls(table.num_rows)
        table = table.append_column(schema.field(0).name, rows) if len(table.column_names) == 1 else table
        table = table.drop_columns([NO_COLUMNS])
    table = table.select([name for name in table.column_names if name in schema.names])
    return pa.concat_tables([schema.empty_table(), table], promote_options="permissive").combine_chunks()


def fill_empty_structs(schema: Any) -> Any:
    """Neither Parquet nor Lance supports a struct without fields: it gets one that is always null."""
    import pyarrow as pa

    return pa.schema([pa.field(field.name, fill_empty_struct(field.type)) for field in schema])


def fill_empty_struct(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        inner = [pa.field(field.name, fill_empty_struct(field.type)) for field in kind]
        return pa.struct(inner or [pa.field("empty", pa.null())])
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, fill_empty_struct(kind.value_type)))
    return kind
