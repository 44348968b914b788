"""Final Lance dataset, or a new version of one, made from Arrow pieces."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import SourceSinkError
from dovetail.data.writers import parquet
from dovetail.data.writers.encoders import NO_COLUMNS, merge_types

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.data.writers.piece_merge import MergeJob

RUN_PROPERTY = "dovetail.run"
"""Property of a version: the run that created it."""


def dataset_version(url: str) -> int | None:
    """The version of a dataset; None if it does not exist."""
    import lance

    try:
        return int(lance.dataset(url, storage_options=storage_options(url)).version)
    except (ValueError, FileNotFoundError):
        return None


def storage_options(url: str) -> dict[str, str] | None:
    """Storage options: a loopback S3 server is accessed without TLS; its address is that of the standard environment
    variables."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    if url.startswith("s3://") and endpoint.startswith("http://"):
        return {"aws_endpoint": endpoint, "allow_http": "true"}
    return None


def write_dataset(job: MergeJob, url: str, *, mode: str) -> None:
    """Write a dataset of all rows: `create` if there is none, or `overwrite` as a new version."""
    _write(job, parquet.fill_empty_structs(parquet.merge_schema(job)), url, mode)


def append_rows(job: MergeJob, url: str, base: int) -> None:
    """Append these rows to version `base` as a new version; nothing if this run already did."""
    import lance
    import pyarrow as pa

    dataset = lance.dataset(url, storage_options=storage_options(url))
    if dataset.version < base:
        text = f"it is at version {dataset.version} and was at {base} when the run started"
        raise SourceSinkError("DT357", text, "restore it, or start a new run", job.place)
    if _is_appended(dataset, base, job.run_id) or not job.pieces:
        return
    have = dataset.schema
    schema = parquet.fill_empty_structs(parquet.merge_schema(job))
    fresh = [field for field in schema if field.name not in have.names and field.name != NO_COLUMNS]
    for field in schema:
        its = have.field(field.name).type if field.name in have.names else field.type
        if merge_types(its, field.type) != its:
            raise parquet.type_conflict_error(job, field.name, its, field.type)
    if fresh:
        dataset.add_columns(pa.schema(fresh))
    _write(job, pa.schema([pa.field(field.name, field.type) for field in [*have, *fresh]]), url, "append")


def _is_appended(dataset: Any, base: int, run_id: str) -> bool:
    newer = dataset.version - base
    if newer <= 0:
        return False
    for transaction in dataset.get_transactions(newer):
        if transaction is not None and (transaction.transaction_properties or {}).get(RUN_PROPERTY) == run_id:
            return True
    return False


def _write(job: MergeJob, schema: Any, url: str, mode: str) -> None:
    import lance
    import pyarrow as pa

    trouble: list[BaseException] = []
    reader = pa.RecordBatchReader.from_batches(schema, _batches(job, schema, trouble))
    more: dict[str, Any] = {"max_bytes_per_file": job.shard_bytes} if job.shard_bytes else {}
    try:
        lance.write_dataset(
            reader,
            url,
            schema=schema,
            mode=mode,
            storage_options=storage_options(url),
            transaction_properties={RUN_PROPERTY: job.run_id},
            **more,
        )
    except Exception:
        if trouble:
            raise trouble[0] from None  # lance reports it only as text
        raise


def _batches(job: MergeJob, schema: Any, trouble: list[BaseException]) -> Iterator[Any]:
    try:
        for table in parquet.iter_tables(job, schema):
            yield from table.to_batches()
    except Exception as error:
        trouble.append(error)
        raise


def sync_tree(folder: Path) -> None:
    """Sync all files and folders below it."""
    for path, _, names in os.walk(folder):
        for name in [*names, "."]:
            fd = os.open(os.path.join(path, name), os.O_RDONLY | os.O_CLOEXEC)  # noqa: PTH118
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
