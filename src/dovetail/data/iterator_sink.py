"""Sink that queues results for the iterator of a run, with backpressure."""

from __future__ import annotations

from collections import deque
from itertools import chain
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import UnreadableItem

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.commands import Deliver, FailedItem
    from dovetail.control.payload import Segment
    from dovetail.data.interfaces import PayloadStore

MAX_QUEUED_BYTES = 256 << 20
MAX_QUEUED_ITEMS = 1 << 17
"""Results that may wait for the reader before the source is paused."""

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
        self._unread: deque[list[Segment]] = deque()
        """Results that the reader took from the queue and has not loaded yet."""
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
            waiting = list(self._unread)
            self._unread.clear()
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
            self._unread.extend([segments] if self._ordered else [[segment] for segment in segments])
        with self._reading:
            if not self._unread:
                return []  # another reader was faster
            segments = self._unread[0]
            items = load_in_order(self._store, segments) if self._ordered else self._store.load(segments[0])[1]
            if self._store.unreadable:
                items = self._readable(items)
            self._unread.popleft()
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


def load_in_order(store: PayloadStore, segments: list[Segment]) -> list[Any]:
    """Epochs arrive in order; within an epoch, items are sorted by key."""
    keys: list[Any] = []
    items: list[Any] = []
    for segment in segments:
        its_keys, its_items = store.load(segment)
        keys += its_keys
        items += its_items
    order = sorted(range(len(items)), key=lambda at: keys[at] if isinstance(keys[at], tuple) else (keys[at],))
    return [items[at] for at in order]
