"""Merge of written pieces in source order: key encoding, k-way merge, and the job that produces the final files.

A key is a number or a tuple of numbers; all are compared as tuples.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dovetail.control.payload import PartFileRange
    from dovetail.data.writers.worker_parts import PartReader

NUMBER_KEYS_TAG = b"\x01"
TUPLE_KEYS_TAG = b"\x02"


def encode_keys(keys: Any) -> tuple[list[int], list[int], bytes, list[int] | None]:
    """Smallest and largest key, the encoded keys (empty: consecutive numbers), and their order (None: sorted)."""
    if isinstance(keys, range):
        assert keys.step == 1
        return [keys.start], [keys.stop - 1], b"", None
    try:
        numbers = array("q", keys)
    except TypeError:
        return _encode_tuple_keys([key if isinstance(key, tuple) else (key,) for key in keys])
    keys = list(keys)
    order = None
    in_order = sorted(keys)
    if in_order != keys:
        order = sorted(range(len(keys)), key=keys.__getitem__)
        numbers = array("q", in_order)
    first, last = in_order[0], in_order[-1]
    consecutive = last - first + 1 == len(keys) == len(set(keys))  # keys may be equal on two paths
    encoded = b"" if consecutive else NUMBER_KEYS_TAG + numbers.tobytes()
    return [first], [last], encoded, order


def _encode_tuple_keys(keys: list[tuple[int, ...]]) -> tuple[list[int], list[int], bytes, list[int] | None]:
    order = None
    in_order = sorted(keys)
    if in_order != keys:
        order = sorted(range(len(keys)), key=keys.__getitem__)
    lengths = array("H", map(len, in_order)).tobytes()
    encoded = (
        TUPLE_KEYS_TAG + len(keys).to_bytes(8, "little") + lengths + array("q", chain.from_iterable(in_order)).tobytes()
    )
    return list(in_order[0]), list(in_order[-1]), encoded, order


def decode_keys(encoded: bytes) -> Sequence[int] | list[tuple[int, ...]]:
    """Decode keys: numbers, or tuples."""
    if encoded[:1] == NUMBER_KEYS_TAG:
        return array("q", encoded[1:])
    count = int.from_bytes(encoded[1:9], "little")
    lengths = array("H", encoded[9 : 9 + 2 * count])
    numbers = array("q", encoded[9 + 2 * count :])
    keys = []
    begin = 0
    for length in lengths:
        keys.append(tuple(numbers[begin : begin + length]))
        begin += length
    return keys


class OpenPiece:
    """A piece while its rows are merged. `notes`: data of its reader."""

    __slots__ = ("_keys", "cache", "piece", "rows_given")

    def __init__(self, piece: PartFileRange) -> None:
        self.piece = piece
        self.rows_given = 0
        self.cache: Any = None
        self._keys: Any = None

    def keys(self, encoded: Callable[[PartFileRange], bytes]) -> Any:
        if self._keys is None:
            piece = self.piece
            self._keys = range(piece.first[0], piece.last[0] + 1) if piece.keys is None else decode_keys(encoded(piece))
            assert len(self._keys) == piece.items
        return self._keys


PieceSpan = tuple[OpenPiece, int, int]
"""Rows [start, stop) of a piece."""


def in_written_order(pieces: Sequence[PartFileRange]) -> Iterator[PieceSpan]:
    for piece in pieces:
        yield OpenPiece(piece), 0, piece.items


def merge_in_order(pieces: Sequence[PartFileRange], encoded: Callable[[PartFileRange], bytes]) -> Iterator[PieceSpan]:
    """All rows in key order. The keys of a piece are decoded only if other pieces overlap it; only the keys of such
    pieces are in memory, not their rows. `encoded`: the encoded keys of a piece."""
    order = sort_by_first_key(pieces)
    waiting: list[tuple[list[int], int, OpenPiece]] = []
    at = 0
    while at < len(order) or waiting:
        if at < len(order) and (not waiting or order[at].first < waiting[0][0]):
            opened = OpenPiece(order[at])
            rank = at
            at += 1
        else:
            _, rank, opened = heappop(waiting)
        limit = order[at].first if at < len(order) else None
        if waiting and (limit is None or waiting[0][0] < limit):
            limit = waiting[0][0]
        start, piece = opened.rows_given, opened.piece
        if limit is None or piece.last < limit:
            yield opened, start, piece.items
            continue
        keys = opened.keys(encoded)
        opened.rows_given = max(start + 1, _rows_below(keys, tuple(limit), start))
        yield opened, start, opened.rows_given
        if opened.rows_given < piece.items:
            head = keys[opened.rows_given]
            heappush(waiting, (list(head) if isinstance(head, tuple) else [head], rank, opened))


def sort_by_first_key(pieces: Sequence[PartFileRange]) -> list[PartFileRange]:
    """Sorted by smallest key; numbers compare faster than lists."""
    if all(len(piece.first) == 1 for piece in pieces):
        return sorted(pieces, key=lambda piece: piece.first[0])
    return sorted(pieces, key=lambda piece: piece.first)


def _rows_below(keys: Any, limit: tuple[int, ...], start: int) -> int:
    if isinstance(keys, list):
        return bisect_left(keys, limit, start)
    # (5,) comes before (5, 0)
    return (bisect_left if len(limit) == 1 else bisect_right)(keys, limit[0], start)


@dataclass(frozen=True, slots=True)
class OldFile:
    """Existing output, which comes first."""

    path: Path
    size: int
    """Its valid bytes."""


@dataclass(frozen=True, slots=True)
class MergeJob:
    reader: PartReader
    pieces: Sequence[PartFileRange]
    out: Path
    """Folder for files before they are renamed."""
    run_id: str
    place: str
    """Name of the sink in messages."""
    kind: str
    packing: str | None
    ordered: bool
    shard_bytes: int | None
    columns: tuple[str, ...] | None
    compression: str | None
    old: OldFile | None = None

    def spans(self) -> Iterator[PieceSpan]:
        return merge_in_order(self.pieces, self.reader.read_keys) if self.ordered else in_written_order(self.pieces)

    def path(self, number: int) -> Path:
        """Temporary path of file `number`."""
        return self.out / f"{number:05d}"
