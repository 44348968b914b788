"""Cursors over tables in memory: Arrow, pandas, Polars, Hugging Face datasets."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.data.io_errors import CONTENT_MISMATCH, INVALID_SETTING
from dovetail.data.readers.cursor import limit_rows_by_bytes
from dovetail.data.readers.parquet import rows_from_batch
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.control.payload import Split


@dataclass(slots=True)
class TableSlice:
    """Rows of a table: packed data, and the function that unpacks it."""

    items: int
    opener: Callable[[Any], list[Any]]
    packed: Any
    """A buffer, or another value that pickles well."""

    def read(self) -> list[Any]:
        return self.opener(self.packed)

    def __reduce_ex__(self, protocol: Any) -> Any:
        packed = self.packed
        if isinstance(packed, memoryview):
            packed = pickle.PickleBuffer(packed) if protocol >= 5 else bytes(packed)
        return TableSlice, (self.items, self.opener, packed)


def arrow_ipc_bytes(table: Any) -> memoryview:
    """Copy only the visible rows: a pickled slice would contain the whole table."""
    import pyarrow

    into = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(into, table.schema) as writer:
        writer.write(table)
    return memoryview(into.getvalue())


def read_arrow_rows(packed: Any) -> list[Any]:
    import pyarrow

    with pyarrow.ipc.open_stream(pyarrow.py_buffer(packed)) as reader:
        return [row for batch in reader for row in rows_from_batch(batch)]


def read_polars_rows(packed: Any) -> list[Any]:
    import polars

    return polars.read_ipc_stream(io.BytesIO(packed)).to_dicts()


def read_pandas_rows(packed: Any) -> list[Any]:
    rows: list[Any] = packed.to_dict("records")
    return rows


def read_list_rows(packed: Any) -> list[Any]:
    return list(packed)


class TableCursor:
    """A table that can be sliced anywhere."""

    prefers_large_splits = False

    def __init__(self, kind: str, rows: int, schema: str, size: int, cut: Callable[[int, int], TableSlice]) -> None:
        """`size`: approximate bytes. `cut`: function of start and stop row."""
        self.kind = kind
        self.row = 0
        self._rows = rows
        self._schema = schema
        self._cut = cut
        self._row_bytes = size / max(1, rows)
        self.content = ""
        """Further properties that distinguish this table."""

    @property
    def total(self) -> int | None:
        return self._rows

    expected = total

    def take(self, rows: int) -> Split | None:
        start = self.row
        self.row = min(start + limit_rows_by_bytes(rows, self._row_bytes), self._rows)
        return self._cut(start, self.row) if self.row > start else None

    def mark(self) -> object:
        return self.row

    def seek(self, row: int, marks: Mapping[int, object]) -> None:  # noqa: ARG002 - rows are places here
        self.row = min(row, self._rows)

    def place_of(self, row: int, marks: Mapping[int, object]) -> str:  # noqa: ARG002 - rows are places here
        return f"row {row}"

    def fingerprint(self) -> dict[str, object]:
        found: dict[str, object] = {"kind": self.kind, "rows": self._rows, "schema": self._schema}
        return {**found, "content": self.content} if self.content else found

    def describe(self) -> str:
        return f"a {self.kind} table: {self._rows:,} rows"

    def close(self) -> None: ...


def table_cursor(value: Any) -> TableCursor | None:
    """A cursor by duck type; None if it is not a table. A package that is not imported cannot have created it."""
    module = type(value).__module__.partition(".")[0]
    name = type(value).__name__
    if module == "pyarrow" and name in ("Table", "RecordBatch"):
        return _arrow_cursor(value)
    if module == "polars" and name in ("DataFrame", "LazyFrame"):
        return _polars_cursor(value.collect() if name == "LazyFrame" else value)
    if module == "pandas" and hasattr(value, "iloc") and hasattr(value, "columns"):
        return _pandas_cursor(value)
    if module == "datasets" and name in ("Dataset", "DatasetDict", "IterableDatasetDict"):
        from dovetail.data.readers.dataframes import huggingface_cursor

        return huggingface_cursor(value)
    return None


def _arrow_cursor(table: Any) -> TableCursor:
    _check_unique_columns(list(table.schema.names), "select the columns to read")

    def cut(start: int, stop: int) -> TableSlice:
        return TableSlice(stop - start, read_arrow_rows, arrow_ipc_bytes(table.slice(start, stop - start)))

    return TableCursor("arrow", table.num_rows, str(table.schema), table.nbytes, cut)


def _polars_cursor(frame: Any) -> TableCursor:
    def cut(start: int, stop: int) -> TableSlice:
        into = io.BytesIO()
        frame.slice(start, stop - start).write_ipc_stream(into)
        return TableSlice(stop - start, read_polars_rows, into.getbuffer())

    return TableCursor("polars", frame.height, str(frame.schema), int(frame.estimated_size()), cut)


def _pandas_cursor(frame: Any) -> TableCursor:
    _check_unique_columns(list(frame.columns), "df = df.loc[:, ~df.columns.duplicated()]")

    def cut(start: int, stop: int) -> TableSlice:
        return TableSlice(stop - start, read_pandas_rows, frame.iloc[start:stop])

    schema = ", ".join(f"{name}: {dtype}" for name, dtype in frame.dtypes.items())
    return TableCursor("pandas", len(frame), schema, _pandas_bytes(frame), cut)


def _pandas_bytes(frame: Any) -> int:
    """Estimate from some rows, because objects have different sizes."""
    some = frame.iloc[:: max(1, len(frame) // 100)]
    return int(some.memory_usage(index=False, deep=True).sum() * (len(frame) / max(1, len(some))))


def _check_unique_columns(names: list[Any], fix: str) -> None:
    twice = list(dict.fromkeys(name for name in names if names.count(name) > 1)) if len(set(names)) < len(names) else []
    if twice:
        message = f"duplicate column names: {', '.join(map(str, twice))}"
        raise ConfigError(Problem(CONTENT_MISMATCH, message, fixes=(fix,)))


def huggingface_cursor(dataset: Any) -> TableCursor:
    if isinstance(dataset, dict):
        keys = ", ".join(map(repr, dataset))
        fixes = tuple(f"source[{key!r}]" for key in list(dataset)[:3])
        message = f"this is a dictionary of datasets ({keys}): select one of them"
        raise ConfigError(Problem(INVALID_SETTING, message, fixes=fixes))
    form = dict(dataset.format)
    kind = form["type"]
    arrow = dataset.with_format("arrow")  # all columns, including those that the format leaves out

    def cut(start: int, stop: int) -> TableSlice:
        if kind == "custom":  # a user's function that may hold anything
            return TableSlice(stop - start, read_list_rows, [dataset[at] for at in range(start, stop)])
        return TableSlice(
            stop - start, read_huggingface_rows, (arrow_pickle_buffer(arrow[start:stop]), dataset.features, form)
        )

    size = int(dataset.data.nbytes * (len(dataset) / max(1, len(dataset.data))))  # it may show only some of its rows
    cursor = TableCursor("datasets", len(dataset), str(dataset.features), size, cut)
    cursor.content = str(getattr(dataset, "_fingerprint", ""))
    return cursor


def arrow_pickle_buffer(table: Any) -> Any:
    """Only such a buffer inside a tuple is sent out of band."""
    import pickle

    return pickle.PickleBuffer(arrow_ipc_bytes(table))


def read_huggingface_rows(packed: tuple[Any, Any, dict[str, Any]]) -> list[Any]:
    import datasets
    import pyarrow

    buffer, features, form = packed
    with pyarrow.ipc.open_stream(pyarrow.py_buffer(buffer)) as reader:
        table = reader.read_all()
    info = datasets.DatasetInfo(features=features)
    dataset = datasets.Dataset(datasets.table.InMemoryTable(table), info=info, fingerprint="slice")
    if form["type"] is not None:
        return _formatted_rows(dataset, form)
    dataset = dataset.select_columns(form["columns"]) if form["columns"] != dataset.column_names else dataset
    columns = dataset[:]
    if not columns:
        return [{} for _ in range(len(dataset))]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _formatted_rows(dataset: Any, form: dict[str, Any]) -> list[Any]:
    """Tensors and similar: a row of a batch may differ from a single row."""
    shown = dataset.with_format(
        form["type"], columns=form["columns"], output_all_columns=form["output_all_columns"], **form["format_kwargs"]
    )
    return [shown[at] for at in range(len(shown))]
