"""Helpers for tests of sources: everything from a cursor is pickled, as in a run."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from dovetail.control.payload import BLANK_ROW, BadRow
from dovetail.data.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.control.payload import Split
    from dovetail.data.readers.cursor import Cursor


def opened(value: object, limit: int | None = None) -> Cursor:
    cursor = open_source(value, limit)
    assert cursor is not None
    return cursor


def send(split: Split) -> tuple[Split, int]:
    """Payload as a worker receives it, and the number of bytes inside the pickle."""
    beside: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(split, 5, buffer_callback=beside.append)
    arrived: Split = pickle.loads(inside, buffers=[bytes(buffer.raw()) for buffer in beside])
    return arrived, len(inside)


def rows_from(cursor: Cursor, sizes: Iterable[int] = (), then: int = 1000) -> list[Any]:
    """All rows from where it stands: takes of these sizes, then of `then`. BLANK rows are left in."""
    found: list[Any] = []
    ahead = iter(sizes)
    while True:
        at, most = cursor.row, next(ahead, then)
        split = cursor.take(most)
        if split is None:
            return found
        assert 1 <= split.items <= most
        assert cursor.row == at + split.items
        rows = send(split)[0].read()
        assert len(rows) == split.items
        found += rows


def rows_of(value: object, sizes: Iterable[int] = (), limit: int | None = None, then: int = 1000) -> list[Any]:
    """Rows that stages receive from a source."""
    cursor = opened(value, limit)
    try:
        return [row for row in rows_from(cursor, sizes, then) if row is not BLANK_ROW]
    finally:
        cursor.close()


def plain(row: Any) -> Any:
    """A row as it can be compared."""
    if row is BLANK_ROW:
        return "BLANK"
    return ("bad", row.place) if isinstance(row, BadRow) else row


def check_seeks(value: object, sizes: list[int], seeks: list[tuple[int, list[bool]]]) -> None:
    """Whatever marks are known, and wherever it stood: from a row on come the rows from that row on."""
    cursor = opened(value)
    marks: dict[int, object] = {}
    rows: list[Any] = []
    ahead = iter(sizes)
    while True:
        marks[cursor.row] = cursor.mark()
        split = cursor.take(next(ahead, 7))
        if split is None:
            break
        rows += [plain(row) for row in send(split)[0].read()]
    for row, kept in seeks:
        row %= len(rows) + 2
        some = {at: mark for (at, mark), keep in zip(marks.items(), kept + [False] * len(marks), strict=False) if keep}
        cursor.seek(row, some)
        assert cursor.row == min(row, len(rows))
        first = cursor.take(3)
        seen = [] if first is None else [plain(one) for one in send(first)[0].read()]
        assert seen == rows[row : row + len(seen)]
        assert seen or row >= len(rows)
    cursor.close()
