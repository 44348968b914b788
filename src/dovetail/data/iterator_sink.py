"""Sink that queues results for the iterator of a run, with backpressure."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import chain, pairwise
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.control.engine import UnreadableItem

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.commands import Deliver, FailedItem
    from dovetail.control.payload import Segment
    from dovetail.data.interfaces import PayloadStore

OrderKey = tuple[int, ...]

MAX_QUEUED_BYTES = 256 << 20
MAX_QUEUED_ITEMS = 1 << 17
"""Results that may wait for the reader before the source is paused."""

MAX_SORTED_ITEMS = 1 << 17
MAX_SORTED_BYTES = 64 << 20
"""Results of an epoch that are loaded at the same time to bring them into order."""

SIGNAL_CHECK_S = 0.5
"""Longest single wait of a thread that Ctrl-C should interrupt. Python runs signal handlers between two instructions: a
signal that arrives just before the main thread blocks on a lock, or in another thread, does not interrupt the wait."""

MAX_FAILED_ITEMS_IN_MEMORY = 10_000
"""Failed items that a run keeps in memory; `errors/` in its folder has more."""


class IteratorSink:
    """The iterator of the run as its sink."""

    def __init__(self, store: PayloadStore, *, ordered: bool = False, most_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._store = store
        self._ordered = ordered
        self._most_bytes = most_bytes
        self._queue: SimpleQueue[list[Segment] | None] = SimpleQueue()
        self._lock = Lock()
        self._reading = Lock()
        self._items = 0
        self._bytes = 0
        self._may_drop = False
        self._unread: deque[_Unread] = deque()
        """Results that the reader took from the queue and has not loaded yet."""
        self._later: tuple[list[OrderKey], list[Any]] = ([], [])
        """Loaded results, with their keys, that come after some that are not loaded yet."""
        self.dropped = 0
        """Results that were dropped because they were not read."""
        self.on_space: Callable[[], None] = lambda: None
        """Called when there may be space again."""
        self.failed_items: list[FailedItem] = []
        self.unreadable: list[str] = []
        """Why results could not be loaded."""

    # --- loop thread

    def take(self, deliver: Deliver) -> None:
        self.failed_items += deliver.failed_items[: max(0, MAX_FAILED_ITEMS_IN_MEMORY - len(self.failed_items))]
        segments = list(chain.from_iterable(segments for _, segments in sorted(deliver.outputs.items())))
        if not segments:
            return
        with self._lock:
            self._items += sum(segment.items for segment in segments)
            self._bytes += sum(segment.size_bytes for segment in segments)
        self._queue.put(segments)
        if self._may_drop and not self.has_space():
            self._drop()

    def has_space(self) -> bool:
        return self._items < MAX_QUEUED_ITEMS and self._bytes < self._most_bytes

    def end(self) -> None:
        """No more results will come."""
        self._queue.put(None)

    # --- reader thread

    def set_may_drop(self, yes: bool = True) -> None:
        """No reader: when the queue is full, drop its contents so that the run continues."""
        self._may_drop = yes
        if yes and not self.has_space():
            self._drop()

    def _drop(self) -> None:
        with self._reading:
            waiting = [one.segments for one in self._unread]
            self._unread.clear()
            self.dropped += len(self._later[1])
            self._later = ([], [])
            while not self._queue.empty():
                segments = self._queue.get()
                if segments is None:
                    self._queue.put(None)
                    break
                waiting.append(segments)
            self.dropped += sum(segment.items for segments in waiting for segment in segments)
            for segments in waiting:
                self._mark_read(segments)

    def next_batch(self) -> list[Any] | None:
        """Some results, or None at the end. After an interrupt, call it again: nothing is lost."""
        if not self._unread:
            segments = self._next_segments()
            if segments is None:
                self._queue.put(None)
                self._store.release_mappings()
                return None
            self._unread.extend([_Unread(segments)] if self._ordered else [_Unread([one]) for one in segments])
        with self._reading:
            if not self._unread:
                return []  # another reader was faster
            if self._ordered and _is_large(self._unread[0].segments):
                parts = _split_in_order(self._store, self._unread[0].segments)
                self._unread = deque([*parts, *list(self._unread)[1:]])
            segments, until = self._unread[0]
            if self._ordered:
                keys, items = _load_sorted(self._store, segments, self._later)
                end = len(keys) if until is None else bisect_left(keys, until)
                later, items = (keys[end:], items[end:]), items[:end]
            else:
                later, items = self._later, self._store.load(segments[0])[1]
            if self._store.unreadable:
                items = self._readable(items)
            self._unread.popleft()
            self._later = later
        self._mark_read(segments)
        return items

    def _next_segments(self) -> list[Segment] | None:
        while True:
            try:
                return self._queue.get(timeout=SIGNAL_CHECK_S)
            except Empty:
                continue

    def _readable(self, items: list[Any]) -> list[Any]:
        """The readable results; errors are raised at the end."""
        bad = [item for item in items if isinstance(item, UnreadableItem)]
        self.unreadable += [item.error_text for item in bad]
        return [item for item in items if not isinstance(item, UnreadableItem)] if bad else items

    def _mark_read(self, segments: list[Segment]) -> None:
        with self._lock:
            self._items -= sum(segment.items for segment in segments)
            self._bytes -= sum(segment.size_bytes for segment in segments)
        if self.has_space():
            self.on_space()


class _Unread(NamedTuple):
    segments: list[Segment]
    until: OrderKey | None = None
    """With ordered results: the first key of the results that are loaded after these; None: there are none."""


def _is_large(segments: list[Segment]) -> bool:
    items, size = sum(segment.items for segment in segments), sum(segment.size_bytes for segment in segments)
    return len(segments) > 1 and (items > MAX_SORTED_ITEMS or size > MAX_SORTED_BYTES)


def _split_in_order(store: PayloadStore, segments: list[Segment]) -> list[_Unread]:
    """The results of an epoch by their lowest keys, so that they need not be in memory as a whole. They are loaded one
    further time, because a segment may contain items in any order."""
    lowest = [(min(_sortable(store.load(segment)[0])), number) for number, segment in enumerate(segments)]
    lowest.sort()
    found = [_Unread([segments[number]], after) for (_, number), (after, _) in pairwise(lowest)]
    return [*found, _Unread([segments[lowest[-1][1]]])]


def _sortable(keys: range | list[Any]) -> list[OrderKey]:
    return [key if isinstance(key, tuple) else (key,) for key in keys]


def load_in_order(store: PayloadStore, segments: list[Segment]) -> list[Any]:
    """Epochs arrive in order; within an epoch, items are sorted by key."""
    return _load_sorted(store, segments, ([], []))[1]


def _load_sorted(
    store: PayloadStore, segments: list[Segment], loaded: tuple[list[OrderKey], list[Any]]
) -> tuple[list[OrderKey], list[Any]]:
    """Keys and items, sorted by key, with those that were loaded before."""
    keys, items = list(loaded[0]), list(loaded[1])
    for segment in segments:
        its_keys, its_items = store.load(segment)
        keys += _sortable(its_keys)
        items += its_items
    order = sorted(range(len(items)), key=keys.__getitem__)
    return [keys[at] for at in order], [items[at] for at in order]
