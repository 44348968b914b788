"""How does a barrier get everything without holding everything?

It is given `AllRows`: its input, passed over as often as it likes, of which one payload is in memory at a time. What it
yields is taken in chunks, and each chunk is gone before the next is made. An item that it yields while it is at that
very item keeps its key, so that a row is still known by its number behind a barrier that only leaves rows out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, overload

from dovetail.control.splits import Unusable
from dovetail.engines.failures import Failures
from dovetail.engines.keys import child
from dovetail.engines.returns import iterator_of

if TYPE_CHECKING:
    from dovetail.control.events import Failure
    from dovetail.engines.batches import Visit
    from dovetail.engines.keys import Key, Keys
    from dovetail.engines.loops import Step

Load = Callable[[int], tuple["Keys", list[Any], Callable[[], object]]]
"""Keys and items of one payload, and what to call when they are not needed any more."""
Give = Callable[["Keys", list[Any]], None]
Part = tuple[int, int, int]
"""Number of a payload, and from where to where in it."""


class AllRows(Sequence[Any]):
    """A sequence that is read anew whenever it is passed over. Its items are fresh ones each time."""

    def __init__(
        self, load: Load, parts: Sequence[Part], odd: Callable[[Any], bool], *, from_files: bool = False
    ) -> None:
        self._load = load
        self._from_files = from_files
        self._parts = parts
        self._odd = odd
        self.odd: dict[int, Any] = {}
        """Place in the message -> what stands there and is no item; known once it was passed over."""
        self.at = -1
        self.key: Key = 0
        self.item: Any = None
        """Where the last pass is now."""
        self._length: int | None = None

    def __iter__(self) -> Iterator[Any]:
        place = number = 0
        for keys, items in self._pieces():
            for key, item in zip(keys, items, strict=True):
                if self._odd(item):
                    self.odd[place] = item
                else:
                    self.at, self.key, self.item = number, key, item
                    number += 1
                    yield item
                place += 1
            del items
        self._length = number
        self.item = None

    def __len__(self) -> int:
        """Only the lines of a file can stand for no row: without any, nothing has to be read for this."""
        if self._length is None:
            if not self._from_files:
                return sum(stop - start for _, start, stop in self._parts) - len(self.odd)
            self._length = sum(not self._odd(item) for _, items in self._pieces() for item in items)
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Slow: everything before it is read."""
        if isinstance(index, slice):
            return list(self)[index]
        wanted = index if index >= 0 else len(self) + index
        for number, item in enumerate(self):
            if number == wanted:
                return item
        raise IndexError(f"row {index} of {len(self)}")

    def keys(self) -> list[Key]:
        """Of everything in the message, items or not."""
        return [key for keys, _ in self._pieces() for key in keys]

    def _pieces(self) -> Iterator[tuple[Keys, list[Any]]]:
        for payload, start, stop in self._parts:
            keys, items, close = self._load(payload)
            yield keys[start:stop], items[start:stop]
            del items
            close()


class Numbering:
    """Which key does each result get? That of the item it is, or those of children of the item that was reached; they
    only ever grow. The last result waits until it is known whether it is the only one there."""

    def __init__(self) -> None:
        self._at = -1
        self._key: Key = 0
        self._held: list[tuple[Any, bool]] = []
        self._children = 0

    def add(self, at: int, key: Key, item: Any, *, same: bool) -> list[tuple[Key, Any]]:
        """What can leave now that this one came."""
        if at > self._at or not (self._held or self._children):
            ready = self.rest()
            self._at, self._key, self._held = max(at, self._at), key, [(item, same)]
            return ready
        found = [self._child(one) for one, _ in self._held]
        self._held.clear()
        return [*found, self._child(item)]

    def rest(self) -> list[tuple[Key, Any]]:
        ready = [(self._key if same else child(self._key, 0), item) for item, same in self._held]
        self._held, self._children = [], 0
        return ready

    def _child(self, item: Any) -> tuple[Key, Any]:
        self._children += 1
        return child(self._key, self._children - 1), item


def run_whole(step: Step, rows: AllRows, visit: Visit, chunk: int, give: Give) -> tuple[int, float, list[Failure]]:
    """How much came out, how long the step itself took, and whether it failed: all of it, or nothing."""
    numbering = Numbering()
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

    visit.crumb[1], visit.crumb[2], visit.crumb[3] = 0, 1, 0
    try:
        for item in iterator_of(step.fn(rows), step.name):
            waiting += numbering.add(rows.at, rows.key, item, same=item is rows.item)
            if len(waiting) >= chunk:
                gave()
        waiting += numbering.rest()
        if waiting:
            gave()
    except Unusable:
        raise
    except BaseException as error:  # the user's
        keys = rows.keys()
        failures = Failures(keys)
        failures.add(0, len(keys), error)
        return 0, perf_counter() - began - given_s, failures.found
    return count, perf_counter() - began - given_s, []


def chunk_of(cut: int, items: int, size: int, most: int, most_bytes: int) -> int:
    """Results that are kept at a time: not more than the next stage wants, nor than weigh too much."""
    each = max(1, size // max(1, items))
    return max(1, min(cut, most, most_bytes // each))
