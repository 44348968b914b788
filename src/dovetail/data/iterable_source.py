"""Source that reads any Python iterable on demand, in a thread if reading can block."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from threading import Event, Lock, Thread
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import UnsendableItemError
from dovetail.control.events import FailRun, InputEnded, ItemsArrived
from dovetail.errors import DovetailError, Problem, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.control.commands import Pull
    from dovetail.data.interfaces import PayloadStore

NON_BLOCKING_TYPES = (list, tuple, range)
"""Types whose iteration cannot block, so that it needs no thread."""
MAX_SEGMENT_BYTES = 8 << 20
"""Maximum size of a source segment, unless a single item is larger."""
FIRST_SEGMENT_ITEMS = 64
"""Items of the first segments, while item sizes are unknown."""
MAX_SEGMENT_WAIT_S = 0.01
"""A partial segment is sent after this time: the next item may take long."""


def is_non_blocking(items: object) -> bool:
    return type(items) in NON_BLOCKING_TYPES  # other types may run any code when they are iterated


class IterableSource:
    """Items in segments of the size of the first stage's messages."""

    def __init__(self, items: Iterator[Any], store: PayloadStore, *, at_hand: bool = False, ours: bool = False) -> None:
        """`at_hand`: iteration cannot block. `ours`: this iterator has no other user."""
        self._owns_iterator = ours
        self._items = items
        self._store = store
        self.error: BaseException | None = None
        """The exception of the iterable; the run then ends."""
        self._position = 0
        """Items that were sent or skipped."""
        self._item_bytes = 0.0
        self._read: deque[Any] = deque()
        """Items that were read and not sent yet."""
        self._send_lock = Lock()
        self._has_items = Event()
        self._flush_requested = False
        self._closed = False
        self._pulls: SimpleQueue[Pull | None] | None = None
        if not at_hand:
            self._pulls = SimpleQueue()
            for work in (self._read_loop, self._flush_loop):
                Thread(target=work, name="dovetail-source", daemon=True).start()

    def pull(self, pull: Pull) -> None:
        if self._pulls is None:
            self._read_items(pull)
        else:
            self._pulls.put(pull)

    def place_of(self, row: int) -> str:
        return f"item {row}"

    def close(self) -> None:
        self._closed = True
        self._has_items.set()
        if self._pulls is not None:
            self._pulls.put(None)

    def _read_loop(self) -> None:
        assert self._pulls is not None
        while (pull := self._pulls.get()) is not None:
            self._read_items(pull)
        if self._owns_iterator and isinstance(self._items, GeneratorType):
            with suppress(Exception):
                self._items.close()  # release what it holds open now

    def _flush_loop(self) -> None:
        """Send a partial segment: it must not wait for a slow item."""
        while True:
            self._has_items.wait()
            time.sleep(MAX_SEGMENT_WAIT_S)
            self._has_items.clear()
            self._flush_requested = False
            if self._closed:
                return
            try:
                while self._read:
                    self._send_segment(1 << 20)
            except BaseException as error:
                self._fail(error)

    def _read_items(self, pull: Pull) -> None:
        try:
            self._skip_to(pull.first)
            read, alone = self._read, self._pulls is None
            cut = self._segment_items(pull.segment_items)
            got = 0
            for item in islice(self._items, pull.items):
                got += 1
                read.append(item)
                if self._closed:
                    return
                if len(read) >= cut:
                    self._send_segment(cut)
                    cut = self._segment_items(pull.segment_items)
                elif not (alone or self._flush_requested):
                    self._flush_requested = True
                    self._has_items.set()
            while read:
                self._send_segment(cut)
            if got < pull.items:
                with self._send_lock:  # the other thread has sent what it took
                    self._store.post(InputEnded(self._position))
        except BaseException as error:  # raised by the user's iterable
            self._fail(error)

    def _send_segment(self, most: int) -> None:
        """Send all buffered items as one segment. Either thread; the lock keeps the order."""
        with self._send_lock:
            items = [self._read.popleft() for _ in range(min(most, len(self._read)))]
            if not items:
                return
            first = self._position
            self._position += len(items)
            try:
                segment = self._store.store(range(first, self._position), items)
            except UnsendableItemError as error:
                raise _unsendable_error(first, len(items), error) from None
            self._item_bytes = segment.size_bytes / len(items)
            self._store.post(ItemsArrived(first, [segment]))

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        try:
            why = f"the source raised {type(error).__name__}: {error}"
            if isinstance(error, DovetailError):  # which says itself what it is about
                why = "; ".join(problem.message for problem in error.problems)
        except Exception:
            why = f"the source raised {type(error).__name__}"
        self._store.post(FailRun(why))

    def _segment_items(self, cut: int) -> int:
        if not self._item_bytes:
            return max(1, min(cut, FIRST_SEGMENT_ITEMS))
        return max(1, min(cut, int(MAX_SEGMENT_BYTES / self._item_bytes)))

    def _skip_to(self, first: int) -> None:
        """Skip items that are already done: an iterable can only be read from its start."""
        while self._position < first:
            skipped = sum(1 for _ in islice(self._items, min(first - self._position, 10_000)))
            if not skipped:
                return
            self._position += skipped


def _unsendable_error(first: int, count: int, error: UnsendableItemError) -> RunError:
    place = f"item {first + error.index}" if error.index >= 0 else f"one of items {first} to {first + count - 1}"
    message = f"{place} of the source cannot be pickled: {error.error_text}"
    return RunError(Problem("DT335", message, fixes=("a path or a key from which a worker can load it",)))
