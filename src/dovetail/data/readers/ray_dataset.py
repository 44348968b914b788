"""Cursor over a Ray Dataset, whose blocks stay in Ray's object store.

Ray is not imported here: references are passed on, and the engine fetches the blocks and calls `cut`.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from dovetail.control.payload import SourceSinkError
from dovetail.data.readers.cursor import limit_rows_by_bytes
from dovetail.data.readers.dataframes import TableSlice, arrow_ipc_bytes, read_arrow_rows, read_pandas_rows

if TYPE_CHECKING:
    from collections.abc import Mapping


class BlockRange(NamedTuple):
    """Start and stop row of a block."""

    ref: Any
    start: int
    stop: int


class BlockSplit:
    """Never pickled: the engine passes the reference on, and slices the rows where they are needed."""

    __slots__ = ("block", "cut", "items", "start", "stop")

    def __init__(self, block: Any, start: int, stop: int) -> None:
        self.block = block
        self.start = start
        self.stop = stop
        self.items = stop - start
        self.cut = slice_block

    def read(self) -> list[Any]:
        raise SourceSinkError("DT406", "blocks of a Ray Dataset can only be read on Ray nodes", 'engine="ray:auto"')


def is_ray_dataset(value: object) -> bool:
    """Whether it is a Ray Dataset, by duck typing: Ray is not imported for this."""
    return type(value).__module__.startswith("ray.data.") and hasattr(value, "iter_internal_ref_bundles")


def slice_block(block: Any, start: int, stop: int) -> TableSlice | list[Any]:
    """Rows of a fetched block: a table from which workers create rows, or rows."""
    if type(block).__module__.partition(".")[0] == "pyarrow":
        table = block.slice(start, stop - start)
        if any(hasattr(column, "extension_name") for column in table.schema.types):
            rows: list[Any] = table.to_pylist()  # tensors: their type is only known here
            return rows
        return TableSlice(stop - start, read_arrow_rows, arrow_ipc_bytes(table))
    return TableSlice(stop - start, read_pandas_rows, block.iloc[start:stop])


class RayDatasetCursor:
    """The blocks of a computed dataset, one after another."""

    kind = "ray"
    prefers_large_splits = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.materialize()
        """Keeps the blocks alive."""
        self._blocks = [
            block
            for bundle in self._dataset.iter_internal_ref_bundles()
            for block in _block_ranges(bundle)
            if block.stop > block.start
        ]
        self._starts = [0, *accumulate(block.stop - block.start for block in self._blocks)]
        self._row_bytes = (self._dataset.size_bytes() or 0) / max(1, self._starts[-1])
        self._schema = str(self._dataset.schema())
        self._content = uuid4().hex
        self.row = 0

    @property
    def total(self) -> int | None:
        return self._starts[-1]

    expected = total

    def take(self, rows: int) -> BlockSplit | None:
        at = bisect_right(self._starts, self.row) - 1
        if at >= len(self._blocks):
            return None
        block = self._blocks[at]
        start = block.start + self.row - self._starts[at]
        stop = min(start + limit_rows_by_bytes(rows, self._row_bytes), block.stop)
        self.row += stop - start
        return BlockSplit(block.ref, start, stop)

    def mark(self) -> object:
        return self.row

    def seek(self, row: int, marks: Mapping[int, object]) -> None:  # noqa: ARG002 - rows are places here
        self.row = min(row, self._starts[-1])

    def place_of(self, row: int, marks: Mapping[int, object]) -> str:  # noqa: ARG002 - rows are places here
        return f"row {row}"

    def fingerprint(self) -> dict[str, object]:
        """Different each time: a dataset is computed again, and the order of its rows is not guaranteed."""
        return {"kind": "ray", "rows": self._starts[-1], "schema": self._schema, "dataset": self._content}

    def describe(self) -> str:
        return f"a Ray Dataset: {len(self._blocks):,} blocks, {self._starts[-1]:,} rows"

    def close(self) -> None: ...


def _block_ranges(bundle: Any) -> list[BlockRange]:
    slices = bundle.slices or [None] * len(bundle.blocks)
    found = []
    for entry, part in zip(bundle.blocks, slices, strict=True):
        rows = entry.metadata.num_rows
        found.append(
            BlockRange(entry.ref, 0, rows)
            if part is None
            else BlockRange(entry.ref, part.start_offset, part.end_offset)
        )
    return found
