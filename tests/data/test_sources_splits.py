"""SplitSource: pulls, the end of the source, and marks to return to."""

from __future__ import annotations

import json
import pickle
import threading
from queue import Queue
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.aids import opened
from dovetail.control.commands import Pull
from dovetail.control.events import FailRun, InputEnded, InputExpected, ItemsArrived
from dovetail.control.payload import Segment, SourceSinkError
from dovetail.data import split_source
from dovetail.data.split_source import SplitSource

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.control.events import Event
    from dovetail.control.payload import Split

PATIENCE_S = 30
SCENES: list[Scene] = []


class ListStore:
    """Keeps what is stored as the bytes that would travel."""

    unreadable = False

    def __init__(self) -> None:
        self.events: Queue[Event] = Queue()

    def store_split(self, keys: range, split: Split) -> Segment:
        beside: list[pickle.PickleBuffer] = []
        inside = pickle.dumps((keys, split), 5, buffer_callback=beside.append)
        ref = (inside, [bytes(buffer.raw()) for buffer in beside])
        assert len(keys) == split.items
        return Segment(0, split.items, len(inside), ref=ref)

    def store(self, keys: Any, items: list[Any]) -> Segment:
        raise AssertionError("items are not opened in the driver")

    def load(self, segment: Segment) -> tuple[Any, list[Any]]:
        assert isinstance(segment.ref, tuple)
        keys, split = pickle.loads(segment.ref[0], buffers=segment.ref[1])
        return keys, split.read()

    def release_mappings(self) -> None: ...

    def post(self, event: Event) -> None:
        self.events.put(event)


class Scene:
    def __init__(self, value: object, marks: dict[int, object] | None = None) -> None:
        self.expected: list[int] = []
        self.store = ListStore()
        self.source = SplitSource(opened(value), self.store, marks)
        SCENES.append(self)

    def event(self) -> Event:
        """The next one that is more than a guess."""
        while isinstance(event := self.store.events.get(timeout=PATIENCE_S), InputExpected):
            self.expected.append(event.items)
        return event

    def pull(self, first: int, items: int, cut: int) -> tuple[list[Any], list[int], int | None]:
        """Rows, the sizes of segments, and the total if the end came. Keys must be the numbers of the rows."""
        self.source.pull(Pull(first, items, cut))
        rows: list[Any] = []
        sizes: list[int] = []
        while len(rows) < items:
            event = self.event()
            if isinstance(event, InputEnded):
                return rows, sizes, event.items
            assert isinstance(event, ItemsArrived), event
            assert event.first == first + len(rows)
            for segment in event.segments:
                keys, some = self.store.load(segment)
                assert keys == range(first + len(rows), first + len(rows) + len(some))
                rows += some
                sizes.append(len(some))
        return rows, sizes, None


@pytest.fixture(params=["a.jsonl", "a.csv", "a.jsonl.gz", "a.parquet"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, list[Any]]]:
    import gzip

    others = set(threading.enumerate())
    path = tmp_path / request.param
    found: list[Any] = [{"n": number} for number in range(1000)]
    lines = "".join(f"{json.dumps(row)}\n" for row in found)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"n": range(1000)}), path, row_group_size=300)
    elif path.suffix == ".csv":
        found = [{"n": str(number)} for number in range(1000)]
        path.write_text("n\n" + "".join(f"{number}\n" for number in range(1000)))
    else:
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    yield path, found
    while SCENES:
        SCENES.pop().source.close()
    left = [thread for thread in threading.enumerate() if thread.name == "dovetail-source" and thread not in others]
    for thread in left:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_all_that_was_asked_for_and_then_the_end(rows: tuple[Path, list[Any]]) -> None:
    path, expected = rows
    scene = Scene(path)
    assert scene.pull(0, 100, 7)[0] == expected[:100]
    found, sizes, ended = scene.pull(100, 400, 16)
    assert (found, ended) == (expected[100:500], None)
    assert max(sizes) == (200 if path.suffix == ".parquet" else 16)
    assert scene.pull(500, 500, 1000)[0] == expected[500:]
    assert scene.pull(1000, 5, 10) == ([], [], 1000)
    assert all(900 < guess < 1500 for guess in scene.expected)  # rows grow a little longer
    assert 970 < scene.expected[-1] < 1030
    scene.source.close()


def test_a_resumed_run_fills_gaps_and_continues(rows: tuple[Path, list[Any]]) -> None:
    path, expected = rows
    scene = Scene(path)
    scene.pull(0, 640, 10)
    marks = {row: scene.source.mark_of(row) for row in (0, 300, 600)}
    assert None not in marks.values()
    assert scene.source.mark_of(305) is None
    scene.source.forget(600)
    assert scene.source.mark_of(300) is None
    assert scene.source.mark_of(600) == marks[600]
    scene.source.close()
    kept = {int(row): mark for row, mark in json.loads(json.dumps(marks)).items()}
    resumed = Scene(path, kept)
    assert resumed.pull(305, 20, 10)[0] == expected[305:325]
    assert resumed.pull(612, 20, 10)[0] == expected[612:632]
    assert resumed.pull(640, 1000, 64) == (expected[640:], resumed_sizes(path), 1000)
    assert resumed.pull(5, 3, 1)[0] == expected[5:8]  # also backwards, where nothing was kept
    assert resumed.pull(2000, 3, 1) == ([], [], 1000)
    resumed.source.close()


def resumed_sizes(path: Path) -> list[int]:
    """Parquet: to the end of row groups, 300 rows each."""
    return [260, 100] if path.suffix == ".parquet" else [64] * 5 + [40]


def test_an_empty_source_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    scene = Scene(tmp_path / "a.jsonl")
    assert scene.pull(0, 10, 10) == ([], [], 0)
    scene.source.close()


def test_many_small_segments_are_posted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_source, "MAX_EVENT_WAIT_S", 1e9)
    (tmp_path / "a.jsonl").write_text("1\n" * 100)
    scene = Scene(tmp_path / "a.jsonl")
    scene.source.pull(Pull(0, 1000, 1))
    counts = []
    while isinstance(event := scene.event(), ItemsArrived):
        counts.append(len(event.segments))
    assert counts == [split_source.MAX_SEGMENTS_PER_EVENT] * 6 + [4]
    assert event == InputEnded(100)
    scene.source.close()


def test_a_source_that_fails_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("1\n" * 10)
    scene = Scene(path)
    scene.pull(0, 5, 5)
    path.write_text("1\n" * 9)
    cursor = opened(path)
    path.unlink()
    late = SplitSource(cursor, scene.store)
    late.pull(Pull(0, 5, 5))
    event = scene.event()
    assert isinstance(event, FailRun)
    assert event.error == f"the source cannot be read: {path}: changed while it was read: it is gone"
    assert isinstance(late.error, SourceSinkError)
    late.pull(Pull(5, 5, 5))  # no thread answers any more
    for source in (late, scene.source):
        source.close()
