"""Read rows of a fragment in windows of some megabytes, and map results back to row positions."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.backfill.task import COMPUTED_COLUMN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.backfill.lance_table import LanceTable
    from dovetail.backfill.task import FillSpec, RangeTask

WINDOW_BYTES = 16 << 20
MAX_WINDOW_ROWS = 65_536
FIRST_WINDOW_ROWS = 16
"""Rows of the first read, while their size is unknown: each may be an image."""
MAX_WINDOW_GROWTH = 8
"""Maximum growth from one read to the next: later rows may be larger."""
MIN_SKIP_ROWS = 1_024
"""A gap of at least this many unwanted rows before the first wanted one is skipped."""


@dataclass(slots=True)
class RowWindow:
    """Consecutive rows of a fragment: which of them to compute, and their input."""

    start: int
    stop: int
    wanted: Any
    """Positions of the rows to compute, as an Arrow array; None: all."""
    batch: Any
    """Input of these rows; None: no row is computed."""

    def row_at(self, index: int) -> int:
        return self.start + (index if self.wanted is None else self.wanted[index].as_py())

    def first_uncomputed_row(self, rows: int) -> int:
        """Offset of the first row that was to be computed and was not."""
        count = self.stop - self.start if self.wanted is None else len(self.wanted)
        return self.stop if rows >= count else self.row_at(rows)

    def scatter(self, spec: FillSpec, arrays: Sequence[Any], end: int) -> Any:
        """Results as rows [start, end), NULL where nothing was computed."""
        import pyarrow as pa

        rows = end - self.start
        names = [output.name for output in spec.outputs]
        if self.wanted is None:
            made = [array.slice(0, rows) for array in arrays]
            new = pa.repeat(True, rows) if spec.masked else None
        else:
            places = self._places(rows)
            made = [array.take(places) for array in arrays]
            new = places.is_valid() if spec.masked else None
        if new is not None:
            made.append(new)
            names.append(COMPUTED_COLUMN)
        return pa.record_batch(made, names)

    def _places(self, rows: int) -> Any:
        """Row -> index among the computed rows; NULL for other rows."""
        import numpy as np
        import pyarrow as pa

        wanted = self.wanted.to_numpy(zero_copy_only=False)
        wanted = wanted[wanted < rows]
        places = np.zeros(rows, dtype=np.int64)
        missing = np.ones(rows, dtype=bool)
        places[wanted] = np.arange(len(wanted))
        missing[wanted] = False
        return pa.array(places, mask=missing)

    def null_rows(self, spec: FillSpec) -> Any:
        """The window without computed rows."""
        return null_batch(spec, self.stop - self.start)


def null_batch(spec: FillSpec, rows: int, *, new: bool = False) -> Any:
    import pyarrow as pa

    arrays = [pa.nulls(rows, output.type) for output in spec.outputs]
    names = [output.name for output in spec.outputs]
    if spec.masked:
        arrays.append(pa.repeat(new, rows))
        names.append(COMPUTED_COLUMN)
    return pa.record_batch(arrays, names)


class RowReader:
    """Reads rows in windows of some megabytes."""

    def __init__(self, table: LanceTable, spec: FillSpec) -> None:
        import pyarrow as pa

        self._table, self._spec = table, spec
        self._rows = FIRST_WINDOW_ROWS
        self._matching: tuple[int, Any] | None = None
        """Rows that match `where` in the fragment that was read last."""
        self.schema = pa.schema([table.schema.field(output.name) for output in spec.outputs])

    def window(self, task: RangeTask, start: int, stop: int) -> RowWindow:
        """The next window, from `start` on."""
        chosen = self._requested_rows(task, start, stop)
        if chosen is None:
            stop = min(stop, start + self._rows)
            return self._read(task.fragment, start, stop, None)
        if not len(chosen):
            return RowWindow(start, stop, None, None)
        # rows before the first wanted one need not be read
        first = int(chosen[0])
        if first - start >= MIN_SKIP_ROWS:
            return RowWindow(start, first, None, None)
        stop = min(stop, start + self._rows)
        return self._read(task.fragment, start, stop, chosen[chosen < stop] - start)

    def is_untouched(self, task: RangeTask) -> bool:
        """Whether `where` matches no row of the fragment."""
        if self._spec.where is None or task.only is not None:
            return False
        return not len(self._requested_rows(task, 0, task.rows))

    def _requested_rows(self, task: RangeTask, start: int, stop: int) -> Any:
        """Positions of the requested rows in [start, stop); None: all."""
        import numpy as np

        if task.only is not None:
            low, high = bisect_left(task.only, start), bisect_left(task.only, stop)
            return np.array(task.only[low:high], dtype=np.int64)
        if self._spec.where is None:
            return None
        if self._matching is None or self._matching[0] != task.fragment:
            offsets = self._table.matching_offsets(task.fragment, self._spec.where)
            self._matching = (task.fragment, offsets.to_numpy(zero_copy_only=False).astype(np.int64))
        offsets = self._matching[1]
        return offsets[np.searchsorted(offsets, start) : np.searchsorted(offsets, stop)]

    def _read(self, fragment: int, start: int, stop: int, chosen: Any) -> RowWindow:
        import numpy as np
        import pyarrow as pa

        table, alive = self._table.read(fragment, self._spec.inputs, start, stop)
        self._adapt_window(table)
        wanted = None
        if chosen is not None or alive.false_count:
            there = alive.to_numpy(zero_copy_only=False)
            places = np.flatnonzero(there) if chosen is None else chosen[there[chosen]]
            wanted = pa.array(places)
            table = table.take(wanted)
        return RowWindow(start, stop, wanted, to_single_batch(table) if table.num_rows else None)

    def _adapt_window(self, table: Any) -> None:
        if table.num_rows:
            per_row = max(1.0, table.nbytes / table.num_rows)
            self._rows = int(
                min(
                    MAX_WINDOW_ROWS, MAX_WINDOW_GROWTH * max(self._rows, table.num_rows), max(1, WINDOW_BYTES / per_row)
                )
            )

    def current_values(self, fragment: int, start: int, stop: int) -> Any:
        """Current values of the columns; arbitrary for deleted rows of columns that are not nullable."""
        import numpy as np
        import pyarrow as pa

        names = [output.name for output in self._spec.outputs]
        table, alive = self._table.read(fragment, names, start, stop)
        if alive.false_count and not all(field.nullable for field in self.schema):
            there = alive.to_numpy(zero_copy_only=False)
            places = np.where(there, np.arange(table.num_rows), table.num_rows)
            table = pa.concat_tables([table, self._table.any_row(fragment, names)]).take(pa.array(places))
        return to_single_batch(table)

    def null_rows(self, rows: int) -> Any:
        """Requested rows with NULL as value."""
        return null_batch(self._spec, rows, new=True)


def to_single_batch(table: Any) -> Any:
    """All rows of a pyarrow.Table as one batch."""
    import pyarrow as pa

    columns = [
        pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0) for column in table.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)
