"""Column and job records beside the table: which function fills a column, and the history of its backfills."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.backfill.lease import read_holder
from dovetail.backfill.store import column_folder
from dovetail.observe.text_format import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.backfill.store import Store
    from dovetail.backfill.udf import Udf

RUNNING, FINISHED, FAILED, DRAINED, LOST = "running", "finished", "failed", "drained", "lost"
CANCELLED = "cancelled"
MAX_PROVENANCES = 100
RecordT = TypeVar("RecordT", "ColumnRecord", "JobRecord")


@dataclass(frozen=True, slots=True)
class Provenance:
    """What values were computed from, and for which rows."""

    inputs: tuple[str, ...]
    where: str | None
    generation: int


@dataclass(slots=True)
class ColumnRecord:
    """Which function fills it, and what of it counts as done."""

    columns: list[str]
    """All that the function fills together."""
    types: list[str]
    inputs: list[str]
    name: str
    reference: str
    """"module:name" of the function; nothing if none leads to it."""
    version: str
    code: str
    generation: int = 0
    """Goes up when everything is to be computed again although the function is the same."""
    recomputing: bool = False
    """That has begun, and not come to its end."""
    where_generation: int = 0
    """The same for rows of a condition; it says nothing of what was computed without one."""
    where_recomputing: str | None = None
    """The condition of which that has begun."""
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Identity of what was computed -> `Made`, the last ones."""
    same: dict[str, str] = field(default_factory=dict)
    """Identity -> the one that it counts as: rows of an older function were kept when errors were mended."""
    rate: float | None = None
    """Rows per second of one worker, when it ran last."""

    @property
    def folder(self) -> str:
        return column_folder(self.columns[0])

    def generation_of(self, where: str | None) -> int:
        return self.generation if where is None else self.where_generation

    def start_recompute(self, where: str | None) -> None:
        """What is done is to be computed again; said once more before that came to its end, it goes on."""
        if where is None and not self.recomputing:
            self.generation, self.recomputing = self.generation + 1, True
        elif where is not None and self.where_recomputing != where:
            self.where_generation, self.where_recomputing = self.where_generation + 1, where

    def finish_recompute(self, where: str | None) -> None:
        """It came to its end."""
        if where is None:
            self.recomputing = False
        elif self.where_recomputing == where:
            self.where_recomputing = None

    def continue_from(self, before: ColumnRecord) -> None:
        """What others wrote down meanwhile counts."""
        self.generation, self.recomputing = before.generation, before.recomputing
        self.where_generation, self.where_recomputing = before.where_generation, before.where_recomputing
        self.made, self.same = dict(before.made), dict(before.same)

    def provenance_of(self, identity: str) -> Provenance:
        told = self.made.get(identity, {})
        inputs = told.get("inputs", self.inputs)
        where = told.get("where")
        return Provenance(tuple(inputs), where, told.get("generation", self.generation_of(where)))

    def add_provenance(self, identity: str, made: Provenance) -> None:
        self.made.pop(identity, None)
        self.made[identity] = {"inputs": list(made.inputs), "where": made.where, "generation": made.generation}
        for old in list(self.made)[:-MAX_PROVENANCES]:
            del self.made[old]


@dataclass(slots=True)
class JobRecord:
    """One backfill."""

    run: str
    column: str
    status: str
    began: float
    udf: str = ""
    version: str = ""
    where: str | None = None
    engine: str = "local"
    workers: int = 0
    ended: float | None = None
    written: float = 0.0
    """When this was; while it runs that is at every commit."""
    rows: int = 0
    """Computed by it."""
    errors: int = 0
    fragments: int = 0
    """Committed by it."""
    table_version: int = 0
    """After its last commit; 0: it has none."""
    message: str = ""

    def __str__(self) -> str:
        until = self.written if self.status == LOST else self.ended or time.time()
        took = format_duration(max(0.0, until - self.began))
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        told = f"{when}  {self.column}  {self.status}  {self.rows:,} rows in {took}, {self.fragments} fragments"
        return f"{told}, {self.errors:,} errors  {self.message}".rstrip() if self.errors or self.message else told


def columns_to_read(udf: Udf, there: Sequence[str], filled: Sequence[str]) -> list[str]:
    """A function of a RecordBatch that names no columns gets all that it does not fill."""
    return list(udf.inputs) or [name for name in there if name not in filled]


def make_column_record(
    udf: Udf, columns: Sequence[str], inputs: Sequence[str], before: ColumnRecord | None
) -> ColumnRecord:
    """As it is now; what was said of it before and still holds stays."""
    types = [str(kind) for _, kind in udf.outputs()]
    made = ColumnRecord(list(columns), types, list(inputs), udf.name, udf.reference, udf.version, udf.code)
    if before is not None and before.columns == made.columns:
        made.continue_from(before)
        made.rate = before.rate if before.version == made.version else None
    return made


# --- columns


def read_column(store: Store, column: str) -> ColumnRecord | None:
    """None, too, if what it was filled together with is filled without it by now."""
    told = _parse_object(store.get(_record_path(column)))
    if "see" in told:
        told = _parse_object(store.get(_record_path(str(told["see"]))))
    record = _from_dict(ColumnRecord, told)
    return record if record is not None and column in record.columns else None


def write_column(store: Store, record: ColumnRecord) -> None:
    store.put(_record_path(record.columns[0]), _to_json(asdict(record)))
    for other in record.columns[1:]:
        store.put(_record_path(other), _to_json({"see": record.columns[0]}))


def columns_filled_together(store: Store, record: ColumnRecord) -> list[str]:
    """Its columns, without those that another function fills by now."""
    known = {column: read_column(store, column) for column in record.columns}
    return [column for column, its in known.items() if its is not None and its.folder == record.folder]


def has_stored_state(store: Store, column: str) -> bool:
    """Whether something of it lies beside the table, which may have no such column any more."""
    return store.get(_record_path(column)) is not None or column_folder(column) in store.folders("")


def delete_column_state(store: Store, columns: Iterable[str]) -> None:
    for column in columns:
        store.delete(_record_path(column))
        store.delete_folder(column_folder(column))


def _record_path(column: str) -> str:
    return f"columns/{column_folder(column)}.json"


# --- jobs


def write_job(store: Store, job: JobRecord) -> None:
    job.written = time.time()
    store.put(f"{column_folder(job.column)}/jobs/{job.run}.json", _to_json(asdict(job)))


def read_jobs(store: Store, column: str | None = None) -> list[JobRecord]:
    """The oldest first. One that says it is running and whose owner is gone is lost."""
    folders = [column_folder(column)] if column is not None else [it for it in store.folders("") if it.startswith("c-")]
    found = []
    for folder in folders:
        names = [name for name in store.names(f"{folder}/jobs") if name.endswith(".json")]
        for name in names:
            job = _from_dict(JobRecord, _parse_object(store.get(f"{folder}/jobs/{name}")))
            if job is not None:
                found.append(_with_current_status(store, job))
    return sorted(found, key=lambda job: job.began)


def _with_current_status(store: Store, job: JobRecord) -> JobRecord:
    if job.status == RUNNING:
        owner = read_holder(store, job.column)
        if owner is None or owner.run != job.run or not owner.alive:
            job.status, job.message = LOST, "its process is gone; the same call again goes on"
    return job


# --- as files


def _to_json(told: dict[str, Any]) -> bytes:
    return json.dumps(told, indent=1).encode()


def _parse_object(data: bytes | None) -> dict[str, Any]:
    try:
        told = json.loads(data or b"{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _from_dict(kind: type[RecordT], told: dict[str, Any]) -> RecordT | None:
    """Of what a file says; None if it is none of those. What a later version added is left out."""
    known = {item.name for item in fields(kind)}
    try:
        return kind(**{name: value for name, value in told.items() if name in known})
    except TypeError:
        return None
