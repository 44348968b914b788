"""Records beside the table: which function fills a column, and the history of its backfills."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.backfill.lease import read_holder
from dovetail.backfill.result import format_rows
from dovetail.backfill.store import column_folder
from dovetail.text_format import format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.backfill.store import TableStore
    from dovetail.backfill.udf import Udf

RUNNING, FINISHED, FAILED, DRAINED, LOST = "running", "finished", "failed", "drained", "lost"
CANCELLED = "cancelled"
MAX_PROVENANCES = 100
RecordT = TypeVar("RecordT", "ColumnRecord", "BackfillRecord")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Inputs and rows from which values were computed, and the version of the function."""

    inputs: tuple[str, ...]
    where: str | None
    generation: int
    version: str = ""
    """"": unknown."""


@dataclass(slots=True)
class ColumnRecord:
    """Record of a column: its function, and which values count as complete."""

    columns: list[str]
    """All columns that the function fills together."""
    types: list[str]
    inputs: list[str]
    name: str
    reference: str
    """"module:name" of the function; "" if it cannot be imported by name."""
    version: str
    code: str
    generation: int = 0
    """Incremented to compute everything again with the same function."""
    recomputing: bool = False
    """Generation of an unfinished recomputation."""
    where_generation: int = 0
    """The same for the rows of a condition."""
    where_recomputing: str | None = None
    """Condition of the unfinished recomputation."""
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Identity of values -> `Provenance`; the most recent ones."""

    @property
    def folder(self) -> str:
        return column_folder(self.columns[0])

    @property
    def was_filled_without_condition(self) -> bool:
        """Whether a backfill of all rows was started; one with a condition leaves values of others in place."""
        return any(made.get("where") is None for made in self.made.values())

    def generation_of(self, where: str | None) -> int:
        return self.generation if where is None else self.where_generation

    def start_recompute(self, where: str | None) -> None:
        """Request a recomputation; an unfinished one is resumed."""
        if where is None and not self.recomputing:
            self.generation, self.recomputing = self.generation + 1, True
        elif where is not None and self.where_recomputing != where:
            self.where_generation, self.where_recomputing = self.where_generation + 1, where

    def finish_recompute(self, where: str | None) -> None:
        """Record the end of a recomputation."""
        if where is None:
            self.recomputing = False
        elif self.where_recomputing == where:
            self.where_recomputing = None

    def continue_from(self, before: ColumnRecord) -> None:
        """Merge changes that other processes saved meanwhile."""
        self.generation, self.recomputing = before.generation, before.recomputing
        self.where_generation, self.where_recomputing = before.where_generation, before.where_recomputing
        self.made = dict(before.made)

    def provenance_of(self, identity: str) -> Provenance:
        content = self.made.get(identity, {})
        inputs = content.get("inputs", self.inputs)
        where = content.get("where")
        generation = content.get("generation", self.generation_of(where))
        return Provenance(tuple(inputs), where, generation, content.get("version", ""))

    def add_provenance(self, identity: str, made: Provenance) -> None:
        self.made.pop(identity, None)
        self.made[identity] = asdict(made) | {"inputs": list(made.inputs)}
        for old in list(self.made)[:-MAX_PROVENANCES]:
            del self.made[old]


@dataclass(slots=True)
class BackfillRecord:
    """Record of one backfill."""

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
    """Time of the end; of the last commit while it runs."""
    rows: int = 0
    """Rows computed by this backfill."""
    errors: int = 0
    fragments: int = 0
    """Fragments committed by this backfill."""
    table_version: int = 0
    """Table version after the last commit; 0: no commit."""
    message: str = ""

    def __str__(self) -> str:
        until = self.written if self.status == LOST else self.ended or time.time()
        took = format_duration(max(0.0, until - self.began))
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        rows, fragments = format_rows(self.rows), format_count(self.fragments, "fragment")
        text = f"{when}  {self.column}  {self.status}  {rows} in {took}, {fragments}"
        if self.errors or self.message:
            text = f"{text}, {format_count(self.errors, 'error')}  {self.message}".rstrip()
        return text


def columns_to_read(udf: Udf, there: Sequence[str], filled: Sequence[str]) -> list[str]:
    """Input columns; a function of a RecordBatch without input_columns= gets all columns that it does not fill."""
    return list(udf.inputs) or [name for name in there if name not in filled]


def make_column_record(
    udf: Udf, columns: Sequence[str], inputs: Sequence[str], before: ColumnRecord | None
) -> ColumnRecord:
    """The current record; settings of the previous one that still apply are kept."""
    types = [str(kind) for _, kind in udf.outputs()]
    made = ColumnRecord(list(columns), types, list(inputs), udf.name, udf.reference, udf.version, udf.code)
    if before is not None and before.columns == made.columns:
        made.continue_from(before)
    return made


# --- columns


def read_column(store: TableStore, column: str) -> ColumnRecord | None:
    """The record of a column; None also if the columns it was filled with are now filled without it."""
    content = _parse_object(store.get(_record_path(column)))
    if "see" in content:
        content = _parse_object(store.get(_record_path(str(content["see"]))))
    record = _from_dict(ColumnRecord, content)
    return record if record is not None and column in record.columns else None


def write_column(store: TableStore, record: ColumnRecord) -> None:
    store.put(_record_path(record.columns[0]), _to_json(asdict(record)))
    for other in record.columns[1:]:
        store.put(_record_path(other), _to_json({"see": record.columns[0]}))


def columns_filled_together(store: TableStore, record: ColumnRecord) -> list[str]:
    """Columns of the record, without those that another function fills now."""
    known = {column: read_column(store, column) for column in record.columns}
    return [column for column, its in known.items() if its is not None and its.folder == record.folder]


def has_stored_state(store: TableStore, column: str) -> bool:
    """Whether records of the column exist; the table may no longer have the column."""
    return store.get(_record_path(column)) is not None or column_folder(column) in store.folders("")


def delete_column_state(store: TableStore, columns: Iterable[str]) -> None:
    for column in columns:
        store.delete(_record_path(column))
        store.delete_folder(column_folder(column))


def _record_path(column: str) -> str:
    return f"columns/{column_folder(column)}.json"


# --- backfills


def write_backfill(store: TableStore, record: BackfillRecord) -> None:
    record.written = time.time()
    store.put(f"{column_folder(record.column)}/jobs/{record.run}.json", _to_json(asdict(record)))


def read_backfills(store: TableStore, column: str | None = None) -> list[BackfillRecord]:
    """Records of all backfills, oldest first. A running one whose process is dead has the status lost."""
    folders = [column_folder(column)] if column is not None else [it for it in store.folders("") if it.startswith("c-")]
    found = []
    for folder in folders:
        names = [name for name in store.names(f"{folder}/jobs") if name.endswith(".json")]
        for name in names:
            record = _from_dict(BackfillRecord, _parse_object(store.get(f"{folder}/jobs/{name}")))
            if record is not None:
                found.append(_with_current_status(store, record))
    return sorted(found, key=lambda record: record.began)


def _with_current_status(store: TableStore, record: BackfillRecord) -> BackfillRecord:
    if record.status == RUNNING:
        owner = read_holder(store, record.column)
        if owner is None or owner.run != record.run or not owner.alive:
            record.status, record.message = LOST, "its process is dead; repeat the backfill to resume"
    return record


# --- as files


def _to_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


def _parse_object(data: bytes | None) -> dict[str, Any]:
    try:
        content = json.loads(data or b"{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _from_dict(kind: type[RecordT], content: dict[str, Any]) -> RecordT | None:
    """Dataclass of the content of a file; None if it does not match. Fields of later versions are ignored."""
    known = {item.name for item in fields(kind)}
    try:
        return kind(**{name: value for name, value in content.items() if name in known})
    except TypeError:
        return None
