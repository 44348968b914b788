"""Sink that makes results durable epoch by epoch in its own thread: sync part files, then append to the commit log.

The loop only hands epochs over. Workers have written files and tables; their part files are synced here. A callable
sink gets the results of an epoch before that epoch counts as committed.
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dovetail.control.commands import Deliver
from dovetail.control.engine import UnreadableItem
from dovetail.control.events import FailRun
from dovetail.control.payload import PartFileRange, SourceSinkError
from dovetail.data.commit_log import CommitEntry, read_commit_log
from dovetail.data.iterator_sink import (
    MAX_FAILED_ITEMS_IN_MEMORY,
    MAX_QUEUED_BYTES,
    MAX_QUEUED_ITEMS,
    load_in_order,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from dovetail.control.commands import FailedItem
    from dovetail.control.payload import Segment
    from dovetail.data.commit_log import CommitLog
    from dovetail.data.interfaces import PayloadStore, RunOutputs
    from dovetail.data.iterator_sink import IteratorSink

MAX_PENDING_EPOCHS = 64
"""Epochs that may wait for the disk before the source is paused."""
MAX_PENDING_SEGMENTS = 2048
"""Segments that may wait for a function, because each may hold a descriptor."""


class SpoolRecords(Protocol):
    """Spool records of an engine, which outlive the driver."""

    def spool_record(self, segment: Segment) -> list[Any] | None: ...


@runtime_checkable
class SeekableSource(Protocol):
    """A source that can return the position of a row, so that a resume does not read up to it."""

    def mark_of(self, row: int) -> object | None: ...
    def forget(self, below_row: int) -> None: ...


class CommitSink:
    """Commits epochs as the loop delivers them. Results without a sink go to the iterator of the run."""

    def __init__(
        self,
        log: CommitLog,
        outputs: RunOutputs,
        iterator: IteratorSink,
        store: PayloadStore,
        keeping: SpoolRecords,
        spool: Path,
        *,
        ordered: bool = False,
        done: Iterable[tuple[int, int]] = (),
    ) -> None:
        """`done`: ranges of the source that are already committed."""
        self._log = log
        self._outputs = outputs
        self._iterator = iterator
        self._store = store
        self._spool_records = keeping
        self._spool = spool
        self._ordered = ordered
        self.source: SeekableSource | None = None
        self.on_space: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self.failed_items: list[FailedItem] = iterator.failed_items
        self._queue: SimpleQueue[Deliver | None] = SimpleQueue()
        self._waiting = 0
        self._waiting_bytes = self._waiting_items = self._waiting_segments = 0
        """Results that wait for a function."""
        self._lock = Lock()
        self._committed_below = 0
        """All rows below this one are committed."""
        self._committed_ranges: list[tuple[int, int]] = sorted(done)
        self._thread = Thread(target=self._commit_all, name="dovetail-commits", daemon=True)
        self._thread.start()

    # --- loop thread

    def take(self, deliver: Deliver) -> None:
        self.failed_items += deliver.failed_items[: max(0, MAX_FAILED_ITEMS_IN_MEMORY - len(self.failed_items))]
        self._count_waiting(deliver, 1)
        self._queue.put(deliver)

    def has_space(self) -> bool:
        return (
            self._waiting < MAX_PENDING_EPOCHS
            and self._waiting_bytes < MAX_QUEUED_BYTES
            and self._waiting_items < MAX_QUEUED_ITEMS
            and self._waiting_segments < MAX_PENDING_SEGMENTS
            and self._iterator.has_space()
        )

    def _count_waiting(self, deliver: Deliver, sign: int) -> None:
        """Count an epoch that waits, and its results for functions; with -1: it waits no longer."""
        label_of, functions = self._outputs.label_of, self._outputs.functions
        segments = [
            one for unit, out in deliver.outputs.items() if functions and label_of.get(unit) in functions for one in out
        ]
        with self._lock:
            self._waiting += sign
            self._waiting_bytes += sign * sum(one.size_bytes for one in segments)
            self._waiting_items += sign * sum(one.items for one in segments)
            self._waiting_segments += sign * len(segments)

    # --- end of the run

    def finish(self, *, complete: bool) -> list[str]:
        """Wait until everything is committed; if the run is complete, publish the final files. Raises any error of the
        sink."""
        self._queue.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error
        if not complete:
            return []
        committed = read_commit_log(self._log.path)
        names: list[str] = []
        for label, sink in self._outputs.files.items():
            pieces = [piece for entry in committed.entries.values() for piece in entry.outputs.get(label, ())]
            names += sink.finish(pieces)
        self._log.finish(names)
        for sink in self._outputs.files.values():
            sink.discard()
        return names

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._log.close()
        for sink in self._outputs.files.values():
            sink.close()

    # --- commit thread

    def _commit_all(self) -> None:
        over = False
        while not over:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            over = None in batch
            epochs = deque(deliver for deliver in batch if deliver is not None)
            batch.clear()  # or it would hold the results until all of them are committed
            while epochs:
                # a function may be slow: the results that it took are released and committed at once
                together = [epochs.popleft() for _ in range(1 if self._outputs.functions else len(epochs))]
                try:
                    if self.error is None:
                        self._commit(together)
                except BaseException as error:
                    self._fail(error)
                for deliver in together:
                    self._count_waiting(deliver, -1)
                together.clear()
                self.on_space()

    def _commit(self, epochs: list[Deliver]) -> None:
        entries = [self._entry(deliver) for deliver in epochs]
        self._sync(epochs)
        given = 0
        try:
            for deliver in epochs:
                self._call_functions(deliver)
                given += 1
        finally:  # results that a function took before it raised are not passed to it again
            self._log.write(*(entry.to_dict() for entry in entries[:given]))
        for deliver in epochs:
            left = {unit: out for unit, out in deliver.outputs.items() if unit not in self._outputs.label_of}
            if left:
                self._iterator.take(Deliver(deliver.wave, deliver.epoch, deliver.first, deliver.last, left))
        self._release_marks([one for deliver in epochs if not deliver.wave for one in deliver.ranges])

    def _entry(self, deliver: Deliver) -> CommitEntry:
        spooled = {
            unit: [self._spool_records.spool_record(one) for one in out] for unit, out in deliver.spooled.items()
        }
        lasting = all(None not in kept for kept in spooled.values())
        mark = self.source.mark_of(deliver.first) if self.source is not None and not deliver.wave else None
        return CommitEntry(
            deliver.wave,
            deliver.epoch,
            deliver.first,
            deliver.last,
            self._pieces(deliver),
            sum(segment.items for out in deliver.outputs.values() for segment in out),
            spooled if lasting else {},
            self._failed_keys(deliver),
            mark,
            lasting,
            deliver.also,
        )

    def _failed_keys(self, deliver: Deliver) -> list[Any]:
        """Unit and key of every failed item. Payloads are opened once for all their items."""
        found: list[Any] = []
        opened: dict[int, Any] = {}
        for failed in deliver.failed_items:
            key: Any = failed.key
            if key is None:
                segment, start, _ = failed.part
                with suppress(Exception):  # its payload cannot be read, for any reason
                    if segment.id not in opened:
                        opened[segment.id] = self._store.load(segment)[0]
                    key = opened[segment.id][start]
            found.append([failed.unit, key if key is None else list(key) if isinstance(key, tuple) else [key]])
        return found

    def _pieces(self, deliver: Deliver) -> dict[str, list[PartFileRange]]:
        """Pieces by sink; several leaves may share one."""
        found: dict[str, list[PartFileRange]] = {}
        for unit, segments in deliver.outputs.items():
            label = self._outputs.label_of.get(unit)
            if label in self._outputs.files:
                refs = (segment.ref for segment in segments)
                found.setdefault(label, []).extend(ref for ref in refs if isinstance(ref, PartFileRange))
        return found

    def _sync(self, epochs: list[Deliver]) -> None:
        parts: dict[str, set[str]] = {}
        for deliver in epochs:
            for label, pieces in self._pieces(deliver).items():
                parts.setdefault(label, set()).update(piece.part for piece in pieces)
        for label, names in parts.items():
            self._outputs.files[label].sync(names)
        if any(deliver.failed_items for deliver in epochs):
            with suppress(OSError):  # items that cannot be pickled are reported by --retry-errors
                _sync_file(self._log.path.parent / "errors" / "errors.jsonl")
        kept = (self._spool_records.spool_record(one) for it in epochs for out in it.spooled.values() for one in out)
        for name in {one[0] for one in kept if one is not None}:
            try:
                _sync_file(self._spool / name)
            except OSError as error:
                message = f"the spool cannot be written: {error.strerror}"
                raise SourceSinkError(
                    "DT381", message, "free disk space or repair the disk", str(self._spool)
                ) from None

    def _call_functions(self, deliver: Deliver) -> None:
        """Pass results to callables. After a kill before the line is written they are passed again: at least once, not
        exactly once."""
        for label, function in self._outputs.functions.items():
            units = [unit for unit in deliver.outputs if self._outputs.label_of.get(unit) == label]
            segments = [segment for unit in units for segment in deliver.outputs[unit]]
            if segments:
                items = load_in_order(self._store, segments) if self._ordered else _load_items(self._store, segments)
                bad = [item for item in items if isinstance(item, UnreadableItem)] if self._store.unreadable else []
                if bad:
                    message = f"{len(bad)} results cannot be unpickled in the driver: {bad[0].error_text}"
                    raise SourceSinkError("DT336", message, "return plain values, or objects of importable classes")
                function(items)

    def _release_marks(self, done: list[tuple[int, int]]) -> None:
        for pair in done:
            heapq.heappush(self._committed_ranges, pair)
        while self._committed_ranges and self._committed_ranges[0][0] <= self._committed_below:
            self._committed_below = max(self._committed_below, heapq.heappop(self._committed_ranges)[1])
        if self.source is not None:
            self.source.forget(self._committed_below)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        if isinstance(error, SourceSinkError):
            self._store.post(FailRun(str(error), code=error.code, fix=error.fix))
        else:
            self._store.post(FailRun(f"the sink raised {type(error).__name__}: {error}"))


def _load_items(store: PayloadStore, segments: Iterable[Segment]) -> list[Any]:
    return [item for segment in segments for item in store.load(segment)[1]]


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
