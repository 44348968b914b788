"""How is a Hugging Face dataset read? As Arrow slices, of which workers make datasets that give the same items."""

from __future__ import annotations

from typing import Any

from dovetail.data.reading.tables import Slice, TableCursor, arrow_bytes, as_it_is
from dovetail.data.reading.trouble import SETTING
from dovetail.errors import ConfigError, Problem


def datasets_cursor(dataset: Any) -> TableCursor:
    if isinstance(dataset, dict):
        keys = ", ".join(map(repr, dataset))
        fixes = tuple(f"source[{key!r}]" for key in list(dataset)[:3])
        message = f"this is a dictionary of datasets ({keys}): say which of them"
        raise ConfigError(Problem(SETTING, message, fixes=fixes))
    form = dict(dataset.format)
    kind = form["type"]
    arrow = dataset.with_format("arrow")  # of all columns, also those that the format leaves out

    def cut(start: int, stop: int) -> Slice:
        if kind == "custom":  # a function of the user's that may hold anything
            return Slice(stop - start, as_it_is, [dataset[at] for at in range(start, stop)])
        return Slice(stop - start, open_dataset, (arrow_bytes_of(arrow[start:stop]), dataset.features, form))

    size = int(dataset.data.nbytes * (len(dataset) / max(1, len(dataset.data))))  # it may show only some of its rows
    cursor = TableCursor("datasets", len(dataset), str(dataset.features), size, cut)
    cursor.content = str(getattr(dataset, "_fingerprint", ""))
    return cursor


def arrow_bytes_of(table: Any) -> Any:
    """Inside a tuple only such a buffer travels beside the pickle."""
    import pickle

    return pickle.PickleBuffer(arrow_bytes(table))


def open_dataset(packed: tuple[Any, Any, dict[str, Any]]) -> list[Any]:
    import datasets
    import pyarrow

    buffer, features, form = packed
    with pyarrow.ipc.open_stream(pyarrow.py_buffer(buffer)) as reader:
        table = reader.read_all()
    info = datasets.DatasetInfo(features=features)
    dataset = datasets.Dataset(datasets.table.InMemoryTable(table), info=info, fingerprint="slice")
    if form["type"] is not None:
        return _formatted(dataset, form)
    dataset = dataset.select_columns(form["columns"]) if form["columns"] != dataset.column_names else dataset
    columns = dataset[:]
    if not columns:
        return [{} for _ in range(len(dataset))]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _formatted(dataset: Any, form: dict[str, Any]) -> list[Any]:
    """Tensors and the like: a row of a batch is not always what a single row is."""
    shown = dataset.with_format(
        form["type"], columns=form["columns"], output_all_columns=form["output_all_columns"], **form["format_kwargs"]
    )
    return [shown[at] for at in range(len(shown))]
