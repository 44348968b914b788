"""How does any iterable become the input of a run? It is read as far as the run asks, and never held as a whole."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from threading import Event, Lock, Thread
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import Unsendable
from dovetail.control.events import FailRun, InputEnded, ItemsArrived
from dovetail.errors import Problem, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.control.commands import Pull
    from dovetail.data.ends import Store

AT_HAND = (list, tuple, range)
"""Reading these cannot block, so that it needs no thread."""
SEGMENT_BYTES = 8 << 20
"""A segment of the source is no larger than about this, if its items are not."""
FIRST_CUT = 64
"""Items of the first segments, while nothing is known of their size."""
PATIENCE_S = 0.01
"""What was read goes on after this time, although its segment is not full: the next item may take long."""


def is_at_hand(items: object) -> bool:
    return type(items) in AT_HAND  # others may do anything when they are read


class IterableSource:
    """Items one after another, in segments as large as the first stage's messages."""

    def __init__(self, items: Iterator[Any], store: Store, *, at_hand: bool = False, ours: bool = False) -> None:
        """`at_hand`: reading cannot block. `ours`: nobody else has this iterator."""
        self._ours = ours
        self._items = items
        self._store = store
        self.error: BaseException | None = None
        """What the iterable raised; the run then ends."""
        self._position = 0
        """Items that have gone on, or were skipped."""
        self._item_bytes = 0.0
        self._read: deque[Any] = deque()
        """Items that were read and have not gone on."""
        self._going_on = Lock()
        self._some = Event()
        self._told = False
        self._closed = False
        self._pulls: SimpleQueue[Pull | None] | None = None
        if not at_hand:
            self._pulls = SimpleQueue()
            for work in (self._answer, self._hurry):
                Thread(target=work, name="dovetail-source", daemon=True).start()

    def pull(self, pull: Pull) -> None:
        if self._pulls is None:
            self._bring(pull)
        else:
            self._pulls.put(pull)

    def close(self) -> None:
        self._closed = True
        self._some.set()
        if self._pulls is not None:
            self._pulls.put(None)

    def _answer(self) -> None:
        assert self._pulls is not None
        while (pull := self._pulls.get()) is not None:
            self._bring(pull)
        if self._ours and isinstance(self._items, GeneratorType):
            with suppress(Exception):
                self._items.close()  # what it holds open is let go now, and not some time later

    def _hurry(self) -> None:
        """What was read must not wait for an item that takes long."""
        while True:
            self._some.wait()
            time.sleep(PATIENCE_S)
            self._some.clear()
            self._told = False
            if self._closed:
                return
            try:
                while self._read:
                    self._go_on(1 << 20)
            except BaseException as error:
                self._fail(error)

    def _bring(self, pull: Pull) -> None:
        try:
            self._skip_to(pull.first)
            read, alone = self._read, self._pulls is None
            cut = self._cut(pull.cut)
            got = 0
            for item in islice(self._items, pull.items):
                got += 1
                read.append(item)
                if self._closed:
                    return
                if len(read) >= cut:
                    self._go_on(cut)
                    cut = self._cut(pull.cut)
                elif not (alone or self._told):
                    self._told = True
                    self._some.set()
            while read:
                self._go_on(cut)
            if got < pull.items:
                with self._going_on:  # what the other thread took has gone on by now
                    self._store.post(InputEnded(self._position))
        except BaseException as error:  # the user's iterable
            self._fail(error)

    def _go_on(self, most: int) -> None:
        """As one segment. By whoever comes first: the lock keeps the order."""
        with self._going_on:
            items = [self._read.popleft() for _ in range(min(most, len(self._read)))]
            if not items:
                return
            first = self._position
            self._position += len(items)
            try:
                segment = self._store.store(range(first, self._position), items)
            except Unsendable as error:
                raise _unsendable(first, len(items), error) from None
            self._item_bytes = segment.size_bytes / len(items)
            self._store.post(ItemsArrived(first, [segment]))

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        try:
            why = f"the source raised {type(error).__name__}: {error}"
        except Exception:
            why = f"the source raised {type(error).__name__}"
        self._store.post(FailRun(why))

    def _cut(self, cut: int) -> int:
        if not self._item_bytes:
            return max(1, min(cut, FIRST_CUT))
        return max(1, min(cut, int(SEGMENT_BYTES / self._item_bytes)))

    def _skip_to(self, first: int) -> None:
        """A resumed run begins later; an iterable can only be read through."""
        while self._position < first:
            skipped = sum(1 for _ in islice(self._items, min(first - self._position, 10_000)))
            if not skipped:
                return
            self._position += skipped


def _unsendable(first: int, count: int, error: Unsendable) -> RunError:
    place = f"item {first + error.index}" if error.index >= 0 else f"one of items {first} to {first + count - 1}"
    message = f"{place} of the source cannot be sent to a worker: {error.error_text}"
    return RunError(Problem("DT335", message, fixes=("what a worker needs to make it there: a path, a key",)))
