"""Barrier stages: a re-readable sequence of all input rows, and output in chunks.

The stage gets `BarrierRows`, which it can iterate any number of times; one payload is in memory at a time. Output is
taken in chunks, and each chunk is released before the next one is built. An item that the stage yields while it is
reading that same item keeps its key, so a row keeps its number behind a barrier that only filters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, overload

from dovetail.control.payload import SourceSinkError
from dovetail.engines.exception_summary import FailureCollector
from dovetail.engines.item_keys import child_key
from dovetail.engines.stage_calls import results_iterator

if TYPE_CHECKING:
    from dovetail.control.events import CallFailure
    from dovetail.engines.item_keys import Key, Keys
    from dovetail.engines.stage_calls import Step
    from dovetail.engines.stage_chain import ActiveMessage

LoadPayload = Callable[[int], tuple["Keys", list[Any], Callable[[], object]]]
"""Keys and items of one payload, and the function that releases them."""
EmitChunk = Callable[["Keys", list[Any]], None]
PayloadRange = tuple[int, int, int]
"""Number of a payload, start and stop in it."""


class BarrierRows(Sequence[Any]):
    """A sequence that is read again on every iteration. Each iteration returns new objects."""

    def __init__(
        self, load: LoadPayload, parts: Sequence[PayloadRange], odd: Callable[[Any], bool], *, from_files: bool = False
    ) -> None:
        self._load = load
        self._from_files = from_files
        self._parts = parts
        self._is_skipped = odd
        self.skipped: dict[int, Any] = {}
        """Position in the message -> the value that is not an item; complete after the first iteration."""
        self.position = -1
        self.key: Key = 0
        self.item: Any = None
        """Position of the last iteration."""
        self._length: int | None = None

    def __iter__(self) -> Iterator[Any]:
        place = number = 0
        for keys, items in self._loaded_parts():
            for key, item in zip(keys, items, strict=True):
                if self._is_skipped(item):
                    self.skipped[place] = item
                else:
                    self.position, self.key, self.item = number, key, item
                    number += 1
                    yield item
                place += 1
            del items
        self._length = number
        self.item = None

    def __len__(self) -> int:
        """Only lines of a file can be skipped. Without file input nothing is read for this."""
        if self._length is None:
            if not self._from_files:
                return sum(stop - start for _, start, stop in self._parts) - len(self.skipped)
            self._length = sum(not self._is_skipped(item) for _, items in self._loaded_parts() for item in items)
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Slow: reads everything before it."""
        if isinstance(index, slice):
            return list(self)[index]
        wanted = index if index >= 0 else len(self) + index
        for number, item in enumerate(self):
            if number == wanted:
                return item
        raise IndexError(f"row {index} of {len(self)}")

    def keys(self) -> list[Key]:
        """Keys of the whole message, including skipped rows."""
        return [key for keys, _ in self._loaded_parts() for key in keys]

    def _loaded_parts(self) -> Iterator[tuple[Keys, list[Any]]]:
        for payload, start, stop in self._parts:
            keys, items, close = self._load(payload)
            yield keys[start:stop], items[start:stop]
            del items
            close()


class KeyAssigner:
    """Assigns keys to results: the key of the input item that a result is, else a child key of the input item reached
    so far. Keys only grow. The last result is held back until it is known whether it is the only one of its item."""

    def __init__(self) -> None:
        self._position = -1
        self._key: Key = 0
        self._pending: list[tuple[Any, bool]] = []
        self._children = 0

    def add(self, at: int, key: Key, item: Any, *, same: bool) -> list[tuple[Key, Any]]:
        """Results that can be emitted after this one was added."""
        if at > self._position or not (self._pending or self._children):
            ready = self.flush()
            self._position, self._key, self._pending = max(at, self._position), key, [(item, same)]
            return ready
        found = [self._child_of_current(one) for one, _ in self._pending]
        self._pending.clear()
        return [*found, self._child_of_current(item)]

    def flush(self) -> list[tuple[Key, Any]]:
        ready = [(self._key if same else child_key(self._key, 0), item) for item, same in self._pending]
        self._pending, self._children = [], 0
        return ready

    def _child_of_current(self, item: Any) -> tuple[Key, Any]:
        self._children += 1
        return child_key(self._key, self._children - 1), item


def run_barrier(
    step: Step, rows: BarrierRows, active: ActiveMessage, chunk: int, give: EmitChunk
) -> tuple[int, float, list[CallFailure]]:
    """Number of results, seconds spent in the step, and its failures: the step succeeds or fails as a whole."""
    numbering = KeyAssigner()
    waiting: list[tuple[Key, Any]] = []
    count, given_s = 0, 0.0
    began = perf_counter()

    def gave() -> None:
        nonlocal count, given_s
        begin = perf_counter()
        count += len(waiting)
        give([key for key, _ in waiting], [item for _, item in waiting])
        waiting.clear()
        given_s += perf_counter() - begin

    active.breadcrumb[1], active.breadcrumb[2], active.breadcrumb[3] = 0, 1, 0
    try:
        for item in results_iterator(step.fn(rows), step.name):
            waiting += numbering.add(rows.position, rows.key, item, same=item is rows.item)
            if len(waiting) >= chunk:
                gave()
        waiting += numbering.flush()
        if waiting:
            gave()
    except SourceSinkError:
        raise
    except BaseException as error:  # raised by user code
        keys = rows.keys()
        failures = FailureCollector(keys, step.failure_rules)
        failures.add(0, len(keys), error)
        return 0, perf_counter() - began - given_s, failures.found
    return count, perf_counter() - began - given_s, []


def output_chunk_items(cut: int, items: int, size: int, most: int, most_bytes: int) -> int:
    """Maximum number of results held at once: the size that the next stage wants, limited by bytes."""
    each = max(1, size // max(1, items))
    return max(1, min(cut, most, most_bytes // each))
