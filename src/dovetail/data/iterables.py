"""How does any iterable become the input of a run? It is read as far as the run asks, and never held as a whole."""

from __future__ import annotations

from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from dovetail.control.engine import Unsendable
from dovetail.control.events import CancelRun, InputEnded, ItemsArrived
from dovetail.errors import Problem, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.control.commands import Pull
    from dovetail.control.segments import Segment
    from dovetail.data.ends import Store

AT_HAND = (list, tuple, range)
"""Reading these cannot block, so that it needs no thread."""
SEGMENT_BYTES = 8 << 20
"""A segment of the source is no larger than about this, if its items are not."""


class IterableSource:
    """Items one after another, in segments as large as the first stage's messages."""

    def __init__(self, items: Iterable[Any], store: Store, failed: Callable[[BaseException], None]) -> None:
        """`failed` is told what the iterable raised; the run then ends."""
        self._items = iter(items)
        self._store = store
        self._failed = failed
        self._position = 0
        self._item_bytes = 0.0
        self._pulls: SimpleQueue[Pull | None] | None = None
        if not isinstance(items, AT_HAND):
            self._pulls = SimpleQueue()
            Thread(target=self._read, name="dovetail-source", daemon=True).start()

    def pull(self, pull: Pull) -> None:
        if self._pulls is None:
            self._bring(pull)
        else:
            self._pulls.put(pull)

    def close(self) -> None:
        if self._pulls is not None:
            self._pulls.put(None)

    def _read(self) -> None:
        assert self._pulls is not None
        while (pull := self._pulls.get()) is not None:
            self._bring(pull)

    def _bring(self, pull: Pull) -> None:
        try:
            self._skip_to(pull.first)
            last = pull.first + pull.items
            while self._position < last:
                count = min(last - self._position, self._cut(pull.cut))
                items = list(islice(self._items, count))
                if items:
                    first = self._position
                    self._position += len(items)
                    segment = self._stored(first, items)
                    self._item_bytes = segment.size_bytes / len(items)
                    self._store.post(ItemsArrived(first, [segment]))
                if len(items) < count:
                    self._store.post(InputEnded(self._position))
                    return
        except BaseException as error:  # the user's iterable
            self._failed(error)
            self._store.post(CancelRun(f"the source raised {type(error).__name__}: {error}"))

    def _stored(self, first: int, items: list[Any]) -> Segment:
        try:
            return self._store.store(range(first, first + len(items)), items)
        except Unsendable as error:
            place = (
                f"item {first + error.index}" if error.index >= 0 else f"one of items {first} to {self._position - 1}"
            )
            message = f"{place} of the source cannot be sent to a worker: {error.error_text}"
            raise RunError(
                Problem("DT335", message, fixes=("what a worker needs to make it there: a path, a key",))
            ) from None

    def _cut(self, cut: int) -> int:
        if not self._item_bytes:
            return max(1, min(cut, 64))  # nothing is known of their size yet
        return max(1, min(cut, int(SEGMENT_BYTES / self._item_bytes)))

    def _skip_to(self, first: int) -> None:
        """A resumed run begins later; an iterable can only be read through."""
        while self._position < first:
            skipped = sum(1 for _ in islice(self._items, min(first - self._position, 10_000)))
            if not skipped:
                return
            self._position += skipped
