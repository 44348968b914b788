"""Row encoders of part files: JSONL, CSV and TSV, Arrow."""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import json
import json.encoder
from array import array
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import UnwritableItemError
from dovetail.data.writers.worker_parts import PartWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

LINE_END = "\n"


def to_json_value(value: Any) -> Any:
    """Convert a value without a JSON form: numpy values, dates, times. Raises TypeError for others."""
    kind = type(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if kind.__module__ == "numpy":
        found = value.tolist()
        if type(found) is not kind:
            return found
    hint = ": decode it or encode it as base64" if isinstance(value, bytes | bytearray | memoryview) else ""
    hint = ": convert it to a sorted list" if isinstance(value, set | frozenset) else hint
    raise TypeError(f"not JSON serializable: {kind.__name__}{hint}")


def make_json_encoder() -> Callable[[Any], str]:
    """Exactly the text of json.dumps(row, ensure_ascii=False), with an encoder that is created once."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return json.JSONEncoder(ensure_ascii=False, default=to_json_value).encode
    parts = make({}, to_json_value, json.encoder.encode_basestring, None, ": ", ", ", False, False, True)
    join = "".join
    return lambda row: join(parts(row, 0))


class JsonlWriter(PartWriter):
    """One JSON value per line."""

    _encode: Callable[[Any], str] | None = None

    def encode(self, items: list[Any]) -> tuple[bytes, None]:
        one = self._encode
        if one is None:
            one = self._encode = make_json_encoder()
        try:
            lines = [one(row) for row in items]
        except Exception:  # encoding an item may raise anything: find which one
            self._encode = None  # it keeps state of the interrupted call
            raise _find_unwritable_row(items) from None
        lines.append("")
        # an unpaired surrogate has no UTF-8 form, but a JSON escape, which Python also writes
        return LINE_END.join(lines).encode("utf-8", "backslashreplace"), None


def _find_unwritable_row(items: list[Any]) -> UnwritableItemError:
    for index, row in enumerate(items):
        try:
            make_json_encoder()(row)
        except Exception as error:  # as above
            return UnwritableItemError(index, f"{type(error).__name__}: {error}")
    return UnwritableItemError(-1, "encoding a row failed, and succeeded when it was repeated")


CSV_DELIMITERS = {"csv": ",", "tsv": "\t"}
CSV_CELL_TYPES = (str, int, float, bool, type(None), Decimal)
CSV_CELL_TYPE_SET = frozenset(CSV_CELL_TYPES)


class CsvWriter(PartWriter):
    """The `meta` of its pieces is their columns."""

    def __init__(self, folder: Path, *, ordered: bool, delimiter: str, columns: tuple[str, ...] | None) -> None:
        super().__init__(folder, ordered=ordered)
        self._delimiter = delimiter
        self._columns = columns
        self._nested: Callable[[Any], str] | None = None

    def encode(self, items: list[Any]) -> tuple[bytes, list[str]]:
        columns = list(self._columns) if self._columns is not None else collect_columns(items)
        try:
            cell = self._cell
            rows = [
                [value if type(value := row.get(name)) in CSV_CELL_TYPE_SET else cell(value) for name in columns]
                for row in items
            ]
            return encode_csv(rows, self._delimiter), columns
        except Exception:  # encoding an item may raise anything: find which one
            self._nested = None
        raise self._unwritable(items, columns)

    def _cell(self, value: Any) -> Any:
        if isinstance(value, dict | list | tuple):
            return self._json(value)
        if isinstance(value, CSV_CELL_TYPES):
            return value
        value = to_json_value(value)
        return self._json(value) if isinstance(value, list) else value

    def _json(self, value: Any) -> str:
        if self._nested is None:
            self._nested = make_json_encoder()
        return self._nested(value)

    def _unwritable(self, items: list[Any], columns: list[str]) -> UnwritableItemError:
        for index, row in enumerate(items):
            name = ""
            try:
                if not isinstance(row, Mapping):
                    return not_a_row_error(index, row)
                for name in columns:
                    encode_csv([[self._cell(row.get(name))]], self._delimiter)
            except Exception as error:  # as above
                self._nested = None
                return UnwritableItemError(index, f"{type(error).__name__}: {error} (column {name!r})")
        return UnwritableItemError(-1, "encoding a row failed, and succeeded when it was repeated")


def collect_columns(items: Iterable[Any]) -> list[str]:
    """Keys of all rows, in order of first appearance. Raises UnwritableItemError for a row without keys or with other
    keys."""
    columns: dict[str, None] = {}
    for index, row in enumerate(items):
        if not isinstance(row, Mapping):
            raise not_a_row_error(index, row)
        if row.keys() <= columns.keys():
            continue
        for name in row:
            if not isinstance(name, str):
                raise UnwritableItemError(
                    index, f"TypeError: a column name must be a str, not {type(name).__name__}: {name!r}"
                )
            columns[name] = None
    return list(columns)


def not_a_row_error(index: int, row: Any) -> UnwritableItemError:
    return UnwritableItemError(index, f"TypeError: a row of a table must be a dict, not {type(row).__name__}")


def encode_csv(rows: Iterable[Sequence[Any]], delimiter: str) -> bytes:
    """Lines end with a newline; values with a carriage return are quoted, too."""
    lines: list[str] = []

    class Lines:
        write = lines.append

    csv.writer(Lines, delimiter=delimiter, lineterminator="\r\n").writerows(rows)
    return "".join([line[:-2] + "\n" for line in lines]).encode()


def csv_row_ends(data: bytes) -> array[int]:
    """End of each row: a newline outside of quotes, that is, after an even number of quotes."""
    ends = array("q")
    begin = 0
    quotes = 0
    while (end := data.find(b"\n", begin)) >= 0:
        quotes += data.count(b'"', begin, end)
        begin = end + 1
        if quotes % 2 == 0:
            ends.append(begin)
    return ends


def reorder_csv_columns(data: bytes, columns: Sequence[str], wanted: Sequence[str], delimiter: str) -> bytes:
    """The same rows with other columns; missing columns are empty."""
    places = {name: at for at, name in enumerate(columns)}
    chosen = [places.get(name, -1) for name in wanted]
    rows = [[row[at] if 0 <= at < len(row) else "" for at in chosen] for row in parse_csv(data, delimiter)]
    return encode_csv(rows, delimiter)


def parse_csv(data: bytes, delimiter: str) -> list[list[str]]:
    """The rows of a piece of CSV; a blank line is a row without values."""
    limit = csv.field_size_limit(1 << 40)  # no limit on the length of a value
    try:
        return list(csv.reader(io.StringIO(data.decode(), newline=""), delimiter=delimiter))
    finally:
        csv.field_size_limit(limit)


LANCE_RESERVED_NAMES = ("_rowid", "_rowaddr", "_rowoffset")
"""Names reserved by Lance."""
ARROW_NATIVE_TYPES = (str, int, float, bool, bytes, type(None))


class ArrowWriter(PartWriter):
    """Pieces are Arrow IPC streams; their `meta` is a short name of their schema."""

    def __init__(self, folder: Path, *, ordered: bool, columns: tuple[str, ...] | None, lance: bool = False) -> None:
        super().__init__(folder, ordered=ordered)
        self._columns = columns
        self._lance = lance
        self._types: dict[str, Any] = {}
        """Column types so far, in this worker."""
        self._names: dict[Any, str] = {}

    def encode(self, items: list[Any]) -> tuple[bytes, str]:
        import pyarrow as pa

        found = collect_columns(items)
        columns = list(self._columns) if self._columns is not None else found
        if self._lance:
            _check_lance_names(columns, items)
        arrays = [self._array(name, items) for name in columns]
        # a placeholder column counts rows that have no values
        batch = pa.RecordBatch.from_arrays(arrays, names=columns) if columns else _batch_without_columns(len(items))
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
        except Exception:  # pyarrow and the values themselves raise various types
            values = [strip_numpy(value) for value in values]
            try:
                array = pa.array(values)
            except Exception:  # as above
                raise self._unwritable(name, values) from None
        known = self._types.get(name)
        if known is None:
            self._types[name] = array.type
        elif known != array.type:
            both = merge_types(known, array.type)
            if both is None:
                raise self._unwritable(name, values)
            self._types[name] = both
        return array

    def _unwritable(self, name: str, values: list[Any]) -> UnwritableItemError:
        """The failing row: the first whose type differs from earlier values of the column or from the rows before
        it."""
        import pyarrow as pa

        known = self._types.get(name)
        for index, value in enumerate(values):
            try:
                kind = pa.array([value]).type
            except Exception as error:  # as above
                return UnwritableItemError(index, f"{type(error).__name__}: {error} (column {name!r})")
            both = kind if known is None else merge_types(known, kind)
            if both is None:
                text = f"TypeError: column {name!r} is {kind} here and was {known} before"
                return UnwritableItemError(index, text)
            known = both
        for index in range(1, len(values) + 1):
            try:
                pa.array(values[:index])
            except Exception as error:  # as above
                return UnwritableItemError(index - 1, f"{type(error).__name__}: {error} (column {name!r})")
        return UnwritableItemError(-1, f"column {name!r} has no Arrow type")


def _check_lance_names(columns: list[str], items: list[Any]) -> None:
    """Check column names now, not at the end of the run."""
    for name in columns:
        if "." in name or name in LANCE_RESERVED_NAMES:
            index = next((at for at, row in enumerate(items) if name in row), 0)
            raise UnwritableItemError(index, f"ValueError: Lance does not support the column name {name!r}: rename it")


def _batch_without_columns(rows: int) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.nulls(rows)], names=[NO_COLUMNS])


NO_COLUMNS = "__no_columns__"
"""Placeholder column of rows without columns, in pieces only."""


def strip_numpy(value: Any) -> Any:
    """The value with numpy types converted."""
    if type(value) in ARROW_NATIVE_TYPES:
        return value
    if type(value).__module__ == "numpy":
        return value.tolist()
    if isinstance(value, dict):
        return {key: strip_numpy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strip_numpy(inner) for inner in value]
    return value


def merge_types(one: Any, other: Any) -> Any | None:
    """The common type of both, or None."""
    import pyarrow as pa

    if one == other:
        return one
    try:
        schemas = [pa.schema([pa.field("x", kind)]) for kind in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
