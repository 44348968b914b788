"""How are tables in memory read? Slices of them travel as they are, and workers make rows of them."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.data.reading.cursor import fewer
from dovetail.data.reading.parquet import rows_of
from dovetail.data.reading.trouble import NOT_AS_SAID
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.control.splits import Split


@dataclass(slots=True)
class Slice:
    """Rows of a table: what `pack` made of them, and who opens it."""

    items: int
    opener: Callable[[Any], list[Any]]
    packed: Any
    """A buffer, or whatever pickles well."""

    def read(self) -> list[Any]:
        return self.opener(self.packed)

    def __reduce_ex__(self, protocol: Any) -> Any:
        packed = self.packed
        if isinstance(packed, memoryview):
            packed = pickle.PickleBuffer(packed) if protocol >= 5 else bytes(packed)
        return Slice, (self.items, self.opener, packed)


def arrow_bytes(table: Any) -> memoryview:
    """Only the rows that it shows: a pickled slice would bring the whole table along."""
    import pyarrow

    into = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(into, table.schema) as writer:
        writer.write(table)
    return memoryview(into.getvalue())


def open_arrow(packed: Any) -> list[Any]:
    import pyarrow

    with pyarrow.ipc.open_stream(pyarrow.py_buffer(packed)) as reader:
        return [row for batch in reader for row in rows_of(batch)]


def open_polars(packed: Any) -> list[Any]:
    import polars

    return polars.read_ipc_stream(io.BytesIO(packed)).to_dicts()


def open_pandas(packed: Any) -> list[Any]:
    rows: list[Any] = packed.to_dict("records")
    return rows


def as_it_is(packed: Any) -> list[Any]:
    return list(packed)


class TableCursor:
    """A table that can be sliced anywhere."""

    coarse = False

    def __init__(self, kind: str, rows: int, schema: str, size: int, cut: Callable[[int, int], Slice]) -> None:
        """`size`: about how many bytes it has. `cut`: rows from, to."""
        self.kind = kind
        self.row = 0
        self._rows = rows
        self._schema = schema
        self._cut = cut
        self._row_bytes = size / max(1, rows)
        self.content = ""
        """What else tells this table from another one."""

    @property
    def total(self) -> int | None:
        return self._rows

    expected = total

    def take(self, rows: int) -> Split | None:
        start = self.row
        self.row = min(start + fewer(rows, self._row_bytes), self._rows)
        return self._cut(start, self.row) if self.row > start else None

    def mark(self) -> object:
        return self.row

    def seek(self, row: int, marks: Mapping[int, object]) -> None:  # noqa: ARG002 - rows are places here
        self.row = min(row, self._rows)

    def fingerprint(self) -> dict[str, object]:
        found: dict[str, object] = {"kind": self.kind, "rows": self._rows, "schema": self._schema}
        return {**found, "content": self.content} if self.content else found

    def describe(self) -> str:
        return f"a {self.kind} table: {self._rows:,} rows"

    def close(self) -> None: ...


def table_cursor(value: Any) -> TableCursor | None:
    """By duck type; None if it is no table. A package that is not imported has made none."""
    module = type(value).__module__.partition(".")[0]
    name = type(value).__name__
    if module == "pyarrow" and name in ("Table", "RecordBatch"):
        return _arrow(value)
    if module == "polars" and name in ("DataFrame", "LazyFrame"):
        return _polars(value.collect() if name == "LazyFrame" else value)
    if module == "pandas" and hasattr(value, "iloc") and hasattr(value, "columns"):
        return _pandas(value)
    if module == "datasets" and name in ("Dataset", "DatasetDict", "IterableDatasetDict"):
        from dovetail.data.reading.datasets_tables import datasets_cursor

        return datasets_cursor(value)
    return None


def _arrow(table: Any) -> TableCursor:
    _no_twins(list(table.schema.names), "select the columns that are wanted")

    def cut(start: int, stop: int) -> Slice:
        return Slice(stop - start, open_arrow, arrow_bytes(table.slice(start, stop - start)))

    return TableCursor("arrow", table.num_rows, str(table.schema), table.nbytes, cut)


def _polars(frame: Any) -> TableCursor:
    def cut(start: int, stop: int) -> Slice:
        into = io.BytesIO()
        frame.slice(start, stop - start).write_ipc_stream(into)
        return Slice(stop - start, open_polars, into.getbuffer())

    return TableCursor("polars", frame.height, str(frame.schema), int(frame.estimated_size()), cut)


def _pandas(frame: Any) -> TableCursor:
    _no_twins(list(frame.columns), "df = df.loc[:, ~df.columns.duplicated()]")

    def cut(start: int, stop: int) -> Slice:
        return Slice(stop - start, open_pandas, frame.iloc[start:stop])

    schema = ", ".join(f"{name}: {dtype}" for name, dtype in frame.dtypes.items())
    return TableCursor("pandas", len(frame), schema, _pandas_bytes(frame), cut)


def _pandas_bytes(frame: Any) -> int:
    """By some rows: it is what objects hold that counts."""
    some = frame.iloc[:: max(1, len(frame) // 100)]
    return int(some.memory_usage(index=False, deep=True).sum() * (len(frame) / max(1, len(some))))


def _no_twins(names: list[Any], fix: str) -> None:
    twice = list(dict.fromkeys(name for name in names if names.count(name) > 1)) if len(set(names)) < len(names) else []
    if twice:
        message = f"the table has two columns of one name: {', '.join(map(str, twice))}"
        raise ConfigError(Problem(NOT_AS_SAID, message, fixes=(fix,)))
