"""Functions as sinks: what waits for a slow function is bounded, and released as soon as the function took it."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any, cast

import pytest

from dovetail.control.commands import Deliver
from dovetail.control.payload import Segment
from dovetail.data.commit_log import CommitLog, read_commit_log
from dovetail.data.commit_sink import MAX_PENDING_SEGMENTS, CommitSink
from dovetail.data.interfaces import RunOutputs
from dovetail.data.iterator_sink import MAX_QUEUED_BYTES, MAX_QUEUED_ITEMS, IteratorSink
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Store:
    """Payloads whose items are their names."""

    unreadable = False

    def load(self, segment: Segment) -> tuple[list[int], list[int]]:
        return [segment.id], [segment.id]

    def spool_record(self, segment: Segment) -> None:
        return None

    def release_mappings(self) -> None: ...
    def post(self, event: object) -> None: ...


class SlowSink:
    """A commit sink whose function takes one epoch each time it is allowed to."""

    def __init__(self, folder: Path) -> None:
        self.taken: list[list[int]] = []
        self.allowed: SimpleQueue[None] = SimpleQueue()
        self.began = Event()
        self.log = folder / "commit.log"
        log = CommitLog(self.log)
        log.begin({"run": "x"})
        outputs = RunOutputs(functions={"": self._take})
        outputs.label_of["leaf"] = ""
        store = cast("Any", Store())
        self.sink = CommitSink(log, outputs, IteratorSink(store), store, store, folder)

    def _take(self, items: list[int]) -> None:
        self.began.set()
        self.allowed.get()
        self.taken.append(items)

    def deliver(self, epoch: int, *segments: Segment) -> None:
        self.sink.take(Deliver(0, epoch, epoch, epoch + 1, {"leaf": list(segments)}))


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowSink]:
    found = SlowSink(tmp_path)
    yield found
    for _ in range(100):
        found.allowed.put(None)
    found.sink.close()


@pytest.mark.parametrize(
    ("items", "size", "segments"),
    [(1, MAX_QUEUED_BYTES // 2, 1), (MAX_QUEUED_ITEMS // 2, 1, 1), (1, 1, MAX_PENDING_SEGMENTS // 2)],
    ids=["bytes", "items", "descriptors"],
)
def test_the_source_is_paused_while_a_function_has_enough_to_do(
    slow: SlowSink, items: int, size: int, segments: int
) -> None:
    for epoch in range(2):
        assert slow.sink.has_space()
        slow.deliver(epoch, *[Segment(1000 * epoch + n, items, size) for n in range(segments)])
    assert not slow.sink.has_space()
    slow.allowed.put(None)
    until(slow.sink.has_space, "the function took an epoch, although another one waits")


def test_epochs_are_committed_one_by_one_as_a_function_takes_them(slow: SlowSink) -> None:
    slow.deliver(0, Segment(0, 1))
    slow.began.wait()
    for epoch in range(1, 4):
        slow.deliver(epoch, Segment(epoch, 1))
    slow.allowed.put(None)
    slow.allowed.put(None)
    until(lambda: len(read_commit_log(slow.log).entries) == 2, "two epochs are committed while the third waits")
    assert slow.taken == [[0], [1]]
