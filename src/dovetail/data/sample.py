"""Sample of a source: pieces of neighbouring rows, spread over the whole source."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.control.payload import Split
    from dovetail.data.readers.cursor import Cursor

PIECES = 10
"""Places of the source at which each pass takes rows."""
MAX_SEEK_S = 3.0
"""Time for finding places in a source without an index; then rows follow each other."""


@dataclass(frozen=True, slots=True)
class Sample:
    """At most `limit` items of a source, in pieces of `piece_items`; the first ones if the source cannot seek."""

    source: Any
    limit: int
    piece_items: int


def sampled_items(items: Sequence[Any], sample: Sample) -> list[Any]:
    """The sample of a list or another sequence; the whole of a short one."""
    if len(items) <= sample.limit:
        return list(items)
    found: list[Any] = []
    for start in sample_starts(len(items), sample.piece_items):
        found += items[start : start + sample.piece_items]
        if len(found) >= sample.limit:
            break
    return found[: sample.limit]


def sample_starts(total: int, piece_rows: int) -> Iterator[int]:
    """First rows of the pieces: passes from the first to the last row, with one piece at a random place of each tenth.
    Equal distances would miss what repeats in the source with the same period."""
    dice = Random(total)  # noqa: S311 - the same sample every time
    gap = max(piece_rows, total // PIECES)
    last = max(0, total - piece_rows)
    yield 0
    for _ in count():
        for begin in range(0, last + 1, gap):
            yield min(last, begin + dice.randrange(max(1, gap - piece_rows + 1)))


class SampledCursor:
    """Cursor over a sample. Rows are numbered in the order in which they are read."""

    def __init__(self, cursor: Cursor, limit: int, piece_rows: int) -> None:
        self._cursor = cursor
        self._limit = limit
        self._piece_rows = piece_rows
        self.kind = cursor.kind
        self.prefers_large_splits = False
        self.row = 0
        self._starts: Iterator[int] | None = None
        self._left_in_piece = 0
        self._marks: dict[int, object] = {}
        self._sought_s = 0.0
        self._places: list[tuple[int, int]] = []
        """First row of each piece: in the sample, and in the source."""

    @property
    def total(self) -> int | None:
        return None

    @property
    def expected(self) -> int | None:
        return self._limit

    def seek(self, row: int, marks: Mapping[int, object]) -> None:  # noqa: ARG002 - the interface of cursors
        assert row == self.row, "a sample is read once, in order"

    def take(self, rows: int) -> Split | None:
        split = None
        for _ in range(PIECES):
            split = self._take_from_piece(rows)
            if split is not None or self._starts is None or self.row >= self._limit:
                break
            self._left_in_piece = 0  # the source has fewer rows than estimated
        return split

    def _take_from_piece(self, rows: int) -> Split | None:
        if self.row >= self._limit:
            return None
        if not self._left_in_piece:
            self._begin_piece()
        before = self._cursor.row
        split = self._cursor.take(min(rows, self._left_in_piece, self._limit - self.row))
        taken = self._cursor.row - before
        self.row += taken
        self._left_in_piece -= taken
        return split

    def _begin_piece(self) -> None:
        self._left_in_piece = self._piece_rows
        if len(self._places) == 1:  # files tell how many rows they have after the first ones were read
            self._starts = self._find_starts()
        if self._starts is not None and self._sought_s < MAX_SEEK_S:
            began = time.monotonic()
            self._cursor.seek(next(self._starts), self._marks)
            self._sought_s += time.monotonic() - began
        self._marks[self._cursor.row] = self._cursor.mark()
        self._places.append((self.row, self._cursor.row))

    def _find_starts(self) -> Iterator[int] | None:
        total = self._cursor.total if self._cursor.total is not None else self._cursor.expected
        if total is None or total <= self._limit:
            return None
        return islice(sample_starts(total, self._piece_rows), 1, None)

    def mark(self) -> object:
        return None

    def place_of(self, row: int, marks: Mapping[int, object]) -> str:  # noqa: ARG002
        first, place = max(piece for piece in self._places if piece[0] <= row)
        return self._cursor.place_of(place + row - first, dict(self._marks))

    def fingerprint(self) -> dict[str, object]:
        return {**self._cursor.fingerprint(), "limit": self._limit}

    def describe(self) -> str:
        return f"{self._cursor.describe()}, a sample of at most {self._limit:,} rows"

    def close(self) -> None:
        self._cursor.close()
