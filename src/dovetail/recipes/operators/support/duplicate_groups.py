"""Groups of equal hashes: first equal digests by sorting, and union-find over MinHash bands spilled to disk.

Exact hashes take 16 bytes per row. With several hashes per row (`BandColumns`), one column at a time is in memory and
the rest in a file if it is large: about 40 bytes per row."""

from __future__ import annotations

import tempfile
from array import array
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from numpy.typing import NDArray

BLOCK_ROWS = 1 << 16
MAX_BYTES_IN_MEMORY = 256 << 20


def first_equal(digests: Iterable[bytes]) -> array[int]:
    """For each digest of 16 bytes the number of the first one that is equal."""
    joined = bytearray()
    for digest in digests:
        joined += digest
    halves = np.frombuffer(joined, dtype="<u8").reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    begins = np.ones(len(order), dtype=bool)
    # column by column: sorting both at once would copy everything
    begins[1:] = False
    for column in (0, 1):
        ordered = halves[order, column]
        begins[1:] |= ordered[1:] != ordered[:-1]
    return to_int_array(_first_positions(order, begins))


def _first_positions(order: NDArray[Any], begins: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`order` has equal digests side by side, the earliest first; `begins` marks the start of each group."""
    starts = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    firsts = np.empty(len(order), dtype=np.int64)
    firsts[order] = order[starts]
    return firsts


def to_int_array(numbers: NDArray[np.int64]) -> array[int]:
    """An array of Python integers, which a process without NumPy can unpickle."""
    plain = array("q")
    plain.frombytes(numbers.data.cast("B"))
    return plain


class BandColumns:
    """Rows of `width` integers of 8 bytes, read column by column; `with` closes the file."""

    def __init__(self, rows: Iterable[bytes], width: int) -> None:
        self.width = width
        self.size = 0
        self._file = tempfile.SpooledTemporaryFile(max_size=MAX_BYTES_IN_MEMORY)  # noqa: SIM115
        remaining = iter(rows)
        while block := b"".join(islice(remaining, BLOCK_ROWS)):
            table = np.frombuffer(block, dtype="<u8").reshape(-1, width)
            self.size += len(table)
            self._file.write(table.T.tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._file.close()

    def columns(self) -> Iterator[NDArray[np.uint64]]:
        for number in range(self.width):
            column = np.empty(self.size, dtype="<u8")
            for start in range(0, self.size, BLOCK_ROWS):
                rows = min(BLOCK_ROWS, self.size - start)
                self._file.seek(8 * (start * self.width + number * rows))
                column[start : start + rows] = np.frombuffer(self._file.read(8 * rows), dtype="<u8")
            yield column


class UnionFind:
    """Union-find over row numbers; the smallest number represents its cluster."""

    def __init__(self, size: int) -> None:
        self._representatives = np.arange(size, dtype=np.int64)
        """Number -> representative of its cluster."""

    def join_equal(self, column: NDArray[np.uint64]) -> None:
        """Join the numbers of rows with the same value in a column."""
        order = np.argsort(column, kind="stable")
        ordered = column[order]
        repeating = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        begins = np.ones(len(repeating), dtype=bool)
        begins[1:] = repeating[1:] != repeating[:-1] + 1
        firsts = np.maximum.accumulate(np.where(begins, repeating - 1, 0))
        self._join(order[firsts], order[repeating])

    def _join(self, ones: NDArray[np.int64], others: NDArray[np.int64]) -> None:
        while True:
            ones, others = self._representatives[ones], self._representatives[others]
            apart = ones != others
            if not apart.any():
                return
            ones, others = ones[apart], others[apart]
            # of several candidates the smallest; the others are joined in the next round
            np.minimum.at(self._representatives, np.maximum(ones, others), np.minimum(ones, others))
            self._flatten()

    def _flatten(self) -> None:
        """Path halving: a chain of a million rows takes twenty steps."""
        while True:
            above = self._representatives[self._representatives]
            if np.array_equal(above, self._representatives):
                return
            self._representatives = above

    def representatives(self) -> array[int]:
        return to_int_array(self._representatives)
