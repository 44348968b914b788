"""How do rows become pieces of a table, although nobody said what their columns are?"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from dovetail.control.writing import Unwritable
from dovetail.data.writing.csvs import columns_of
from dovetail.data.writing.parts import PartWriter

if TYPE_CHECKING:
    from pathlib import Path

NOT_IN_LANCE = ("_rowid", "_rowaddr", "_rowoffset")
"""Names that Lance keeps for itself."""
PLAIN = (str, int, float, bool, bytes, type(None))


class ArrowWriter(PartWriter):
    """Pieces are Arrow IPC streams; their `meta` is a short name of their schema."""

    def __init__(
        self, folder: Path, run_id: str, *, ordered: bool, columns: tuple[str, ...] | None, lance: bool = False
    ) -> None:
        super().__init__(folder, run_id, ordered=ordered)
        self._columns = columns
        self._lance = lance
        self._types: dict[str, Any] = {}
        """What columns were so far, in this worker."""
        self._names: dict[Any, str] = {}

    def encode(self, items: list[Any]) -> tuple[bytes, str]:
        import pyarrow as pa

        found = columns_of(items)
        columns = list(self._columns) if self._columns is not None else found
        if self._lance:
            _check_names(columns, items)
        arrays = [self._array(name, items) for name in columns]
        # a row without any value is a row nevertheless; a column of nothing keeps count
        batch = pa.RecordBatch.from_arrays(arrays, names=columns) if columns else _without_columns(len(items))
        stream = pa.BufferOutputStream()
        codec = "lz4" if batch.nbytes > 4096 and pa.Codec.is_available("lz4") else None
        with pa.ipc.new_stream(stream, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_batch(batch)
        return stream.getvalue().to_pybytes(), self._name(batch.schema)

    def _name(self, schema: Any) -> str:
        name = self._names.get(schema)
        if name is None:
            name = hashlib.blake2b(schema.serialize(), digest_size=8).hexdigest()
            self._names[schema] = name
        return name

    def _array(self, name: str, items: list[Any]) -> Any:
        import pyarrow as pa

        values = [row.get(name) for row in items]
        try:
            array = pa.array(values)
        except Exception:  # pyarrow, and values themselves, raise all sorts
            values = [plain(value) for value in values]
            try:
                array = pa.array(values)
            except Exception:  # as above
                raise self._unwritable(name, values) from None
        known = self._types.get(name)
        if known is None:
            self._types[name] = array.type
        elif known != array.type:
            both = merged(known, array.type)
            if both is None:
                raise self._unwritable(name, values)
            self._types[name] = both
        return array

    def _unwritable(self, name: str, values: list[Any]) -> Unwritable:
        """Who is to blame: the first that is not what this column was before, or not what those before it are."""
        import pyarrow as pa

        known = self._types.get(name)
        for index, value in enumerate(values):
            try:
                kind = pa.array([value]).type
            except Exception as error:  # as above
                return Unwritable(index, f"{type(error).__name__}: {error} (column {name!r})")
            both = kind if known is None else merged(known, kind)
            if both is None:
                text = f"TypeError: column {name!r} is {kind} here and was {known} before"
                return Unwritable(index, text)
            known = both
        for index in range(1, len(values) + 1):
            try:
                pa.array(values[:index])
            except Exception as error:  # as above
                return Unwritable(index - 1, f"{type(error).__name__}: {error} (column {name!r})")
        return Unwritable(-1, f"column {name!r} has no form in a table")


def _check_names(columns: list[str], items: list[Any]) -> None:
    """Now, and not at the end, when all the work is done."""
    for name in columns:
        if "." in name or name in NOT_IN_LANCE:
            index = next((at for at, row in enumerate(items) if name in row), 0)
            raise Unwritable(index, f"ValueError: Lance has no column of the name {name!r}: give it another")


def _without_columns(rows: int) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.nulls(rows)], names=[NOTHING])


NOTHING = "__no_columns__"
"""Stands for the columns of rows that have none, in pieces only."""


def plain(value: Any) -> Any:
    """The value without numpy in it."""
    if type(value) in PLAIN:
        return value
    if type(value).__module__ == "numpy":
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def merged(one: Any, other: Any) -> Any | None:
    """The type that has room for both, or None."""
    import pyarrow as pa

    if one == other:
        return one
    try:
        schemas = [pa.schema([pa.field("x", kind)]) for kind in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
