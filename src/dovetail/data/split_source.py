"""Source that hands out splits of files and tables, which workers read themselves."""

from __future__ import annotations

import time
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING

from dovetail.control.events import FailRun, InputEnded, InputExpected, ItemsArrived
from dovetail.control.payload import SourceSinkError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.control.commands import Pull
    from dovetail.control.payload import Segment
    from dovetail.data.interfaces import PayloadStore
    from dovetail.data.readers.cursor import Cursor

COARSE_SPLIT_FACTOR, MAX_COARSE_SPLIT_ROWS = 16, 8192
"""Where opening a split is expensive, it has this many times the rows of a message, up to this maximum."""
MIN_ESTIMATE_CHANGE_SHARE = 0.02
"""Relative change of the expected row count that is worth reporting."""
MAX_SEGMENTS_PER_EVENT = 16
"""Segments that are posted at once, ..."""
MAX_EVENT_WAIT_S = 0.002
"""... unless finding them takes longer."""


class SplitSource:
    """Splits in segments of about as many rows as the first stage's messages have items."""

    def __init__(self, cursor: Cursor, store: PayloadStore, marks: Mapping[int, object] | None = None) -> None:
        """`marks`: row -> result of `mark_of` there, in an earlier run."""
        self._cursor = cursor
        self._store = store
        self._marks = dict(marks or {})
        self._lock = Lock()
        self.error: BaseException | None = None
        """The error; the run then ends."""
        self._closed = False
        self._posted_estimate = 0
        """Last reported number of expected rows."""
        self._pulls: SimpleQueue[Pull | None] = SimpleQueue()
        Thread(target=self._read_loop, name="dovetail-source", daemon=True).start()

    def pull(self, pull: Pull) -> None:
        self._pulls.put(pull)

    def close(self) -> None:
        self._closed = True
        self._pulls.put(None)

    def mark_of(self, row: int) -> object | None:
        """Position from which a later run can start at this row; None unless a segment started there."""
        with self._lock:
            return self._marks.get(row)

    def place_of(self, row: int) -> str:
        with self._lock:
            marks = dict(self._marks)
        return self._cursor.place_of(row, marks)

    def forget(self, below_row: int) -> None:
        """Forget marks before this row; the last one before it is kept, because the row may lie behind it."""
        with self._lock:
            below = sorted(row for row in self._marks if row < below_row)
            for row in below[:-1]:
                del self._marks[row]

    def _read_loop(self) -> None:
        while (pull := self._pulls.get()) is not None:
            if self.error is None and not self._closed:
                try:
                    self._read_splits(pull)
                except BaseException as error:
                    self._fail(error)
        self._cursor.close()

    def _read_splits(self, pull: Pull) -> None:
        cursor = self._cursor
        if cursor.row != pull.first:
            with self._lock:
                marks = dict(self._marks)
            cursor.seek(pull.first, marks)
        rows = (
            max(
                pull.segment_items,
                min(COARSE_SPLIT_FACTOR * pull.segment_items, MAX_COARSE_SPLIT_ROWS, pull.max_segment_items),
            )
            if cursor.prefers_large_splits
            else max(1, pull.segment_items)
        )
        end = pull.first + pull.items
        found: list[Segment] = []
        first, since = cursor.row, time.monotonic()
        while cursor.row < end and not self._closed:
            at, mark = cursor.row, cursor.mark()
            split = cursor.take(min(rows, end - at))
            if split is None:
                break
            with self._lock:
                self._marks[at] = mark
            found.append(self._store.store_split(range(at, cursor.row), split))
            if len(found) >= MAX_SEGMENTS_PER_EVENT or time.monotonic() - since > MAX_EVENT_WAIT_S:
                self._store.post(ItemsArrived(first, found))
                found, first, since = [], cursor.row, time.monotonic()
        if found:
            self._store.post(ItemsArrived(first, found))
        self._post_estimate()
        if cursor.row < end and not self._closed:
            self._store.post(InputEnded(cursor.row))

    def _post_estimate(self) -> None:
        """Post the expected row count when it has changed."""
        now = self._cursor.total if self._cursor.total is not None else self._cursor.expected
        if now is not None and abs(now - self._posted_estimate) > MIN_ESTIMATE_CHANGE_SHARE * self._posted_estimate:
            self._posted_estimate = now
            self._store.post(InputExpected(now))

    def _fail(self, error: BaseException) -> None:
        if self._closed:
            return  # the run has ended
        self.error = error
        try:
            why = str(error) if isinstance(error, SourceSinkError) else f"{type(error).__name__}: {error}"
        except Exception:
            why = type(error).__name__
        self._store.post(FailRun(f"the source cannot be read: {why}"))
