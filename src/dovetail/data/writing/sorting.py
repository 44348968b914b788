"""In which order do results come when they shall be in the order of the source, whoever made them and whenever?

A key is a number or a tuple of numbers; all are compared as tuples.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dovetail.control.writing import Piece

NUMBERS = b"\x01"
TUPLES = b"\x02"


def arranged(keys: Any) -> tuple[list[int], list[int], bytes, list[int] | None]:
    """The least and the greatest key, the bytes that tell all of them (none: consecutive numbers), and the order in
    which they come (None: as they are)."""
    if isinstance(keys, range):
        assert keys.step == 1
        return [keys.start], [keys.stop - 1], b"", None
    try:
        numbers = array("q", keys)
    except TypeError:
        return _arranged_tuples([key if isinstance(key, tuple) else (key,) for key in keys])
    keys = list(keys)
    order = None
    in_order = sorted(keys)
    if in_order != keys:
        order = sorted(range(len(keys)), key=keys.__getitem__)
        numbers = array("q", in_order)
    first, last = in_order[0], in_order[-1]
    consecutive = last - first + 1 == len(keys) == len(set(keys))  # of two ways to here keys may be equal
    told = b"" if consecutive else NUMBERS + numbers.tobytes()
    return [first], [last], told, order


def _arranged_tuples(keys: list[tuple[int, ...]]) -> tuple[list[int], list[int], bytes, list[int] | None]:
    order = None
    in_order = sorted(keys)
    if in_order != keys:
        order = sorted(range(len(keys)), key=keys.__getitem__)
    lengths = array("H", map(len, in_order)).tobytes()
    told = TUPLES + len(keys).to_bytes(8, "little") + lengths + array("q", chain.from_iterable(in_order)).tobytes()
    return list(in_order[0]), list(in_order[-1]), told, order


def told_keys(told: bytes) -> Sequence[int] | list[tuple[int, ...]]:
    """Keys from the bytes of `arranged`: numbers, or tuples."""
    if told[:1] == NUMBERS:
        return array("q", told[1:])
    count = int.from_bytes(told[1:9], "little")
    lengths = array("H", told[9 : 9 + 2 * count])
    numbers = array("q", told[9 + 2 * count :])
    keys = []
    begin = 0
    for length in lengths:
        keys.append(tuple(numbers[begin : begin + length]))
        begin += length
    return keys


class Opened:
    """A piece while its rows are given out. `notes`: whatever its reader wants to remember about it until then."""

    __slots__ = ("_keys", "given", "notes", "piece")

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.given = 0
        self.notes: Any = None
        self._keys: Any = None

    def keys(self, told: Callable[[Piece], bytes]) -> Any:
        if self._keys is None:
            piece = self.piece
            self._keys = range(piece.first[0], piece.last[0] + 1) if piece.keys is None else told_keys(told(piece))
            assert len(self._keys) == piece.items
        return self._keys


Stretch = tuple[Opened, int, int]
"""Rows [from, to) of a piece."""


def as_they_came(pieces: Sequence[Piece]) -> Iterator[Stretch]:
    for piece in pieces:
        yield Opened(piece), 0, piece.items


def in_order(pieces: Sequence[Piece], told: Callable[[Piece], bytes]) -> Iterator[Stretch]:
    """All rows, in the order of their keys. The keys of a piece are only looked at if others lie between them; what is
    held are the keys of such pieces, not their rows. `told`: the bytes that tell the keys of a piece."""
    order = by_first(pieces)
    waiting: list[tuple[list[int], int, Opened]] = []
    at = 0
    while at < len(order) or waiting:
        if at < len(order) and (not waiting or order[at].first < waiting[0][0]):
            opened = Opened(order[at])
            rank = at
            at += 1
        else:
            _, rank, opened = heappop(waiting)
        limit = order[at].first if at < len(order) else None
        if waiting and (limit is None or waiting[0][0] < limit):
            limit = waiting[0][0]
        start, piece = opened.given, opened.piece
        if limit is None or piece.last < limit:
            yield opened, start, piece.items
            continue
        keys = opened.keys(told)
        opened.given = max(start + 1, _rows_below(keys, tuple(limit), start))
        yield opened, start, opened.given
        if opened.given < piece.items:
            head = keys[opened.given]
            heappush(waiting, (list(head) if isinstance(head, tuple) else [head], rank, opened))


def by_first(pieces: Sequence[Piece]) -> list[Piece]:
    """In the order of their least keys; numbers are compared faster than lists of them."""
    if all(len(piece.first) == 1 for piece in pieces):
        return sorted(pieces, key=lambda piece: piece.first[0])
    return sorted(pieces, key=lambda piece: piece.first)


def _rows_below(keys: Any, limit: tuple[int, ...], start: int) -> int:
    if isinstance(keys, list):
        return bisect_left(keys, limit, start)
    # (5,) comes before (5, 0)
    return (bisect_left if len(limit) == 1 else bisect_right)(keys, limit[0], start)
