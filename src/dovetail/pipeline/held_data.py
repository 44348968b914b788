"""Which data is this? A text that is the same in every process and on every version of Python.

Only kinds of data that are known: pickles of other objects have the order of sets in them, addresses, seeds and names
that move between versions, and would tell the same thing differently every time.
"""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import hashlib
import re
import sys
import uuid
from collections import deque
from types import MappingProxyType, SimpleNamespace
from typing import Any

PLAIN = (type(None), bool, int, float, complex, str, bytes)
CONTAINERS = (dict, list, tuple, set, frozenset)
SHOWN = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    range,
)
"""Their `repr` says all."""
AS_BYTES = "biufcmMSU"
"""Kinds of numpy's types whose bytes are their values; others hold pointers, or gaps."""
DEPTH = 16
LARGE = 1000
"""Containers of more are told as a hash, with only the type of what is no data."""

Known = dict[int, tuple[object, str]]
"""Large containers by their id, and what was told of them; the object, so that none gets its id."""


def told_data(value: object) -> str | None:
    """None: it is no such data. Never raises."""
    return _data(value, DEPTH, {})


def told_large(value: Any) -> str:
    """Of a large container: all of the data in it, of other objects the type."""
    return _large(value, DEPTH, {})


def _data(value: Any, depth: int, known: Known) -> str | None:
    try:
        return _of_python(value, depth, known) or _of_others(value, depth, known)
    except Exception:  # whatever numpy and others make of odd data
        return None


def _of_python(value: Any, depth: int, known: Known) -> str | None:
    if isinstance(value, SHOWN) or _is_path(value):
        shown = repr(value)
        return shown if " at 0x" not in shown else None
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, re.Pattern):
        return f"pattern({value.pattern!r}, {value.flags})"
    if isinstance(value, bytearray | memoryview | array.array):
        view = memoryview(value)
        return _hashed(f"{type(value).__name__} {view.format} {view.shape}", view.tobytes())
    if isinstance(value, deque):
        return f"deque{_item(list(value), depth, known)}"
    if isinstance(value, MappingProxyType):
        return _item(dict(value), depth, known)
    if type(value) is SimpleNamespace:
        return f"namespace{_item(vars(value), depth, known)}"
    return None


def _is_path(value: Any) -> bool:
    pathlib = sys.modules.get("pathlib")
    return pathlib is not None and isinstance(value, pathlib.PurePath)


def _of_others(value: Any, depth: int, known: Known) -> str | None:
    return _numpy(value, depth, known) or _arrow(value, depth, known) or _pandas(value, depth, known)


def _numpy(value: Any, depth: int, known: Known) -> str | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    about = f"{type(value).__name__} {value.dtype} {value.shape}"
    if value.dtype.char in "gG":
        value = value.astype(str)  # long doubles have gaps
    if value.dtype.kind in AS_BYTES:
        return _hashed(about, value.tobytes())
    return f"{about} {_item(value.tolist(), depth - 1, known)}"


def _arrow(value: Any, depth: int, known: Known) -> str | None:
    pa = sys.modules.get("pyarrow")
    if pa is None:
        return None
    if isinstance(value, pa.DataType | pa.Field | pa.Schema):
        return f"{type(value).__name__} {value}"
    if isinstance(value, pa.Scalar):
        return f"{value.type} {_item(value.as_py(), depth - 1, known)}"
    if isinstance(value, pa.Array | pa.ChunkedArray):
        table = pa.table({"": value})
    elif isinstance(value, pa.RecordBatch | pa.Table):
        table = pa.table(value) if isinstance(value, pa.Table) else pa.Table.from_batches([value])
    else:
        return None
    table = table.replace_schema_metadata(None).combine_chunks()  # how it was cut, and by which pandas, does not count
    told = pa.BufferOutputStream()
    with pa.ipc.new_stream(told, table.schema) as stream:
        stream.write_table(table, max_chunksize=65_536)
    return _hashed(f"{type(value).__name__} {table.num_rows}", told.getvalue())


def _pandas(value: Any, depth: int, known: Known) -> str | None:
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, pandas.DataFrame | pandas.Series | pandas.Index):
        return None
    if isinstance(value, pandas.Index):
        return f"index {value.name!r} {_item(value.to_numpy(), depth - 1, known)}"
    if isinstance(value, pandas.Series):
        return f"series {value.name!r} {_item([value.index, value.to_numpy()], depth - 1, known)}"
    columns = [value.iloc[:, place].to_numpy() for place in range(value.shape[1])]
    return f"frame {_item([value.index, value.columns, *columns], depth - 1, known)}"


def _item(value: Any, depth: int, known: Known) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if depth <= 0:
        return f"a {type(value).__qualname__}"
    if not isinstance(value, CONTAINERS):
        return _data(value, depth, known) or f"a {type(value).__module__}.{type(value).__qualname__}"
    if len(value) > LARGE:
        return _large(value, depth, known)
    told = _items(value, depth, known)
    return f"{type(value).__name__}({', '.join(told)})"


def _large(value: Any, depth: int, known: Known) -> str:
    about = f"{type(value).__name__} of {len(value)}"
    if id(value) not in known:
        known[id(value)] = value, about  # what is inside of itself is not told again
        items = "\n".join(_items(value, depth, known)).encode("utf-8", "surrogatepass")
        known[id(value)] = value, _hashed(about, items)
    return known[id(value)][1]


def _items(value: Any, depth: int, known: Known) -> list[str]:
    if isinstance(value, dict):
        return sorted(f"{_item(key, depth - 1, known)}: {_item(it, depth - 1, known)}" for key, it in value.items())
    told = [_item(it, depth - 1, known) for it in value]
    return told if isinstance(value, list | tuple) else sorted(told)


def _hashed(about: str, data: Any) -> str:
    return f"{about} {hashlib.sha256(data).hexdigest()}"
