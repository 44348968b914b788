"""Large results of one call: stored in pieces while the call is running, so that they are never in memory as a whole.

Only iterators, such as generators, can be taken piece by piece. Each piece passes the stages that are fused behind its
own, is packed or written, and is released before the next one is taken. That begins when a call has returned more
items than it got: until then, each result may belong to one of its items, and gets the key of that item. In the list of
results, a `StoredPiece` stands for its items; it leaves the worker with the other results of its message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dovetail.engines.item_keys import as_tuple
from dovetail.engines.worker_context import CURRENT_CALL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from dovetail.engines.item_keys import Keys
    from dovetail.engines.worker_context import CallContext

MIN_ITEMS = 8
"""Results of a call before their size is estimated."""
MAX_PIECE_ITEMS = 1 << 16
MAX_PIECE_BYTES = 16 << 20
"""Estimated from one item in `SAMPLE_STEP`."""
SAMPLE_STEP = 256
MAX_MEMBERS = 64
"""Members of a list, tuple or dict whose sizes are estimated."""


class StoredPiece:
    """Consecutive results of one call that are stored already."""

    __slots__ = ("items", "place")

    def __init__(self, items: int, place: Any) -> None:
        self.items = items
        self.place = place
        """Where they are; belongs to the engine."""


class ResultsNotStoredError(Exception):
    """Results could not be stored for a reason that is not in them (the cause). It ends the message, not the call."""


StorePiece = Callable[["Keys", list[Any]], list[StoredPiece]]
RunRest = Callable[["CallContext", int, "Keys", list[Any]], list[StoredPiece]]
"""Runs the stages behind the stage at this position and stores their results."""


class StreamedCounts:
    """Items and seconds per stage that the list of results does not show."""

    __slots__ = ("items_in", "items_out", "seconds")

    def __init__(self, stages: int) -> None:
        self.items_in = [0] * stages
        self.items_out = [0] * stages
        self.seconds = [0.0] * stages

    def copy(self) -> StreamedCounts:
        found = StreamedCounts(0)
        found.items_in, found.items_out, found.seconds = self.items_in[:], self.items_out[:], self.seconds[:]
        return found


class ResultStream:
    """Stores the large results of the calls of one message."""

    __slots__ = ("_run_rest", "_store", "counts", "is_used", "position")

    def __init__(self, store: StorePiece, stages: int = 1, run_rest: RunRest | None = None) -> None:
        """`run_rest`: for several stages."""
        self._store = store
        self._run_rest = run_rest
        self.counts = StreamedCounts(stages)
        self.position = 0
        """Position of the stage whose call is running."""
        self.is_used = False
        """Whether anything was stored, perhaps by a call that failed later."""

    def store(self, keys: Keys, items: list[Any]) -> list[StoredPiece]:
        """Store results of the last stage; pieces among them stay as they are."""
        found: list[StoredPiece] = []
        begin = 0
        for end in (*stored_positions(items), len(items)):
            if begin < end:
                found += self._store(keys[begin:end], items[begin:end])
            found += items[end : end + 1]
            begin = end + 1
        return found

    def pass_on(self, call: CallContext, keys: Keys, items: list[Any]) -> list[StoredPiece]:
        """Run the stages behind the one that is running, and store what they return."""
        position, self.is_used = self.position, True
        if self._run_rest is None or position == len(self.counts.seconds) - 1:
            return self.store(keys, items)
        began = perf_counter()
        try:
            return self._run_rest(call, position, keys, items)
        finally:
            self.position = position
            self.counts.seconds[position] -= perf_counter() - began


class _PieceCollector:
    """Results of one call, which are stored once they are too many or too large."""

    __slots__ = ("_call", "_counts_before", "_items", "_number", "_sample_bytes", "_size", "_stored", "_stream")

    def __init__(self, stream: ResultStream, call: CallContext, items: list[Any]) -> None:
        self._stream = stream
        self._call = call
        self._items = items
        self._sample_bytes = estimate_bytes(items[0])
        self._size = self._sample_bytes * len(items)
        self._number = 0
        """Results that have left this collector; the stages behind may have dropped them."""
        self._stored: list[StoredPiece] = []
        self._counts_before: StreamedCounts | None = None

    def next_step(self) -> int:
        """Number of results to take next."""
        return max(1, min(SAMPLE_STEP, (MAX_PIECE_BYTES - self._size) // max(1, self._sample_bytes)))

    def add(self, items: list[Any]) -> None:
        if not items:
            return
        self._items += items
        self._sample_bytes = estimate_bytes(items[-1])
        self._size += self._sample_bytes * len(items)
        self.store_if_large()

    def store_if_large(self) -> None:
        is_large = self._size >= MAX_PIECE_BYTES or len(self._items) >= MAX_PIECE_ITEMS
        if is_large and (self._number or len(self._items) > self._call.size):
            self._store()

    def finish(self) -> list[Any]:
        """The results, or the pieces that stand for them."""
        if not self._number:
            return self._items
        if self._items:
            self._store()
        self._stream.counts.items_out[self._stream.position] += self._number
        return self._stored

    def undo_counts(self) -> None:
        """The call failed."""
        if self._counts_before is not None:
            self._stream.counts = self._counts_before

    def _store(self) -> None:
        if self._counts_before is None:
            self._counts_before = self._stream.counts.copy()
        parent = as_tuple(self._call.keys[self._call.breadcrumb[1]])
        keys: Keys = [(*parent, number) for number in range(self._number, self._number + len(self._items))]
        self._number += len(self._items)
        items, self._items, self._size = self._items, [], 0
        self._stored += self._stream.pass_on(self._call, keys, items)


def collect_results(results: Iterator[Any]) -> list[Any]:
    """All results of the running call: in a list, or stored if they are large."""
    found = list(islice(results, MIN_ITEMS))
    if len(found) < MIN_ITEMS:
        return found
    call = CURRENT_CALL.get()
    stream = call.results if call is not None else None
    if call is None or stream is None:
        found += results
        return found
    collector = _PieceCollector(stream, call, found)
    try:
        collector.store_if_large()
        while True:
            wanted = collector.next_step()
            part = list(islice(results, wanted))
            collector.add(part)
            if len(part) < wanted:
                return collector.finish()
    except BaseException:
        collector.undo_counts()
        raise


async def collect_results_async(results: AsyncIterator[Any]) -> list[Any]:
    """The same for an asynchronous iterator. Async stages are never fused."""
    call = CURRENT_CALL.get()
    stream = call.results if call is not None else None
    collector = None
    part: list[Any] = []
    wanted = MIN_ITEMS
    async for result in results:
        part.append(result)
        if len(part) < wanted or call is None or stream is None:
            continue
        if collector is None:
            collector = _PieceCollector(stream, call, part)
            collector.store_if_large()
        else:
            collector.add(part)
        part, wanted = [], collector.next_step()
    if collector is None:
        return part
    collector.add(part)
    return collector.finish()


def stored_positions(items: Sequence[Any]) -> list[int]:
    return [at for at, item in enumerate(items) if type(item) is StoredPiece]


def estimate_bytes(item: Any) -> int:
    """Roughly the memory of an item; members of its members do not count."""
    size = _own_bytes(item)
    kind = type(item)
    if kind not in (dict, list, tuple):
        return size
    members = item.values() if kind is dict else item
    return size + sum([_own_bytes(member) for member in islice(members, MAX_MEMBERS)])


def _own_bytes(item: Any) -> int:
    try:
        return sys.getsizeof(item) + int(getattr(item, "nbytes", 0))
    except Exception:  # a user's class can raise anything
        return sys.getsizeof(None)
