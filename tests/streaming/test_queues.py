"""Queues of units: counts, bytes, order and readiness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dovetail.control.payload import Segment, total_items
from dovetail.streaming.epochs import Epoch, missing_ranges
from dovetail.streaming.queues import UnitQueue

if TYPE_CHECKING:
    from dovetail.control.payload import SegmentSlice

EPOCHS = st.integers(0, 3)


class QueueAgainstLists(RuleBasedStateMachine):
    """A queue, compared with plain lists of (segment, item)."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = UnitQueue(4)
        self.model: dict[int, list[tuple[int, int]]] = {}
        self.flushed: set[int] = set()
        self.out: list[tuple[int, list[SegmentSlice]]] = []
        self.numbers = 0
        self.now = 0.0

    @rule(epoch=EPOCHS, items=st.integers(1, 9), each=st.sampled_from([0, 10]))
    def add(self, epoch: int, items: int, each: int) -> None:
        self.numbers += 1
        self.now += 1
        self.queue.add(epoch, Segment(self.numbers, items, items * each), self.now)
        self.model.setdefault(epoch, []).extend((self.numbers, item) for item in range(items))

    @rule(epoch=EPOCHS, share=st.floats(0.01, 1))
    def take(self, epoch: int, share: float) -> None:
        there = self.model.get(epoch)
        if not there:
            return
        wanted = max(1, round(share * len(there)))
        parts, size = self.queue.take(epoch, wanted)
        got = [(segment.id, item) for segment, start, stop in parts for item in range(start, stop)]
        assert got == there[:wanted]
        assert size == sum((stop - start) * (segment.size_bytes // segment.items) for segment, start, stop in parts)
        del there[:wanted]
        self.out.append((epoch, parts))

    @rule()
    def put_back(self) -> None:
        if self.out:
            epoch, parts = self.out.pop()
            self.queue.put_back(epoch, parts, self.now)
            back = [(segment.id, item) for segment, start, stop in parts for item in range(start, stop)]
            self.model[epoch] = back + self.model.get(epoch, [])

    @rule(epoch=EPOCHS)
    def flush(self, epoch: int) -> None:
        self.queue.flush_epoch(epoch)
        self.flushed.add(epoch)

    @rule(epoch=EPOCHS)
    def hurry(self, epoch: int) -> None:
        if self.model.get(epoch):
            self.queue.flush_stale(epoch)
            assert epoch in self.queue.ready

    @rule(epoch=EPOCHS)
    def remove_epoch(self, epoch: int) -> None:
        given_back = self.queue.remove_epoch(epoch)
        assert total_items(given_back) == len(self.model.pop(epoch, []))
        self.flushed.discard(epoch)
        self.out = [(number, parts) for number, parts in self.out if number != epoch]

    @rule()
    def resize(self) -> None:
        self.queue.resize(max(1, self.queue.batch_size // 2))

    @invariant()
    def counts_are_right(self) -> None:
        there = [part for waiting in self.queue.by_epoch.values() for part in waiting.parts]
        assert self.queue.items == sum(map(len, self.model.values())) == total_items(there)
        each = {segment.id: segment.size_bytes // segment.items for segment, _, _ in there}
        assert self.queue.bytes == sum(each[number] for items in self.model.values() for number, _ in items)
        assert all(len(waiting.arrival_times) == len(waiting.parts) for waiting in self.queue.by_epoch.values())

    @invariant()
    def ready_iff_a_message_can_be_made(self) -> None:
        for epoch, waiting in self.queue.by_epoch.items():
            hurried = bool(waiting.arrival_times) and waiting.arrival_times[0] <= waiting.stale_until
            can = waiting.items >= self.queue.batch_size or bool(waiting.items and (waiting.input_complete or hurried))
            assert (epoch in self.queue.ready) == can
            assert waiting.input_complete == (epoch in self.flushed)
        assert self.queue.ready.keys() <= self.queue.by_epoch.keys()


QueueAgainstLists.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestQueueAgainstLists = QueueAgainstLists.TestCase


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_queued_bytes_never_become_negative_and_end_at_zero(sizes: list[int], data: st.DataObject) -> None:
    queue = UnitQueue(1)
    for number, items in enumerate(sizes):
        queue.add(0, Segment(number, items, 1001), 0.0)
    while queue.items:
        wanted = data.draw(st.integers(1, queue.items))
        parts, _ = queue.take(0, wanted)
        if data.draw(st.booleans()):
            queue.put_back(0, parts, 0.0)
            queue.take(0, wanted)
        assert queue.bytes >= 0
    assert queue.bytes == 0


def test_a_stale_part_is_flushed_and_later_parts_wait() -> None:
    queue = UnitQueue(10)
    queue.add(0, Segment(1, 3), 1.0)
    queue.flush_stale(0)
    assert queue.can_send_partial(queue.by_epoch[0])
    queue.take(0, 3)
    queue.add(0, Segment(2, 3), 2.0)
    assert not queue.ready


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12))
def test_gaps_are_the_unfinished_ranges_below_the_highest_end(pieces: list[tuple[int, int]]) -> None:
    done = [(first, first + length) for first, length in pieces if length]
    gaps, reached = missing_ranges(done)
    covered = {number for first, last in done for number in range(first, last)}
    assert reached == max((last for _, last in done), default=0)
    missing = [number for first, last in gaps for number in range(first, last)]
    assert missing == [number for number in range(reached) if number not in covered]


def test_the_nodes_of_an_epoch_are_those_that_hold_its_results() -> None:
    epoch = Epoch(1, 0, 2, target_items=1)
    epoch.outputs["leaf"] = [Segment(1, 1, node="n1")]
    epoch.spooled["later"] = [Segment(2, 1, node="n2"), Segment(3, 1)]
    assert [node for node in ("n1", "n2", "n3", "") if epoch.has_output_on(node)] == ["n1", "n2", ""]
    assert epoch.incomplete_units == 2


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    steps=st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 5)), max_size=40),
)
def test_an_ordered_queue_puts_items_back_in_place_and_no_message_spans_a_gap(
    sizes: list[int], steps: list[tuple[int, bool, int]]
) -> None:
    queue = UnitQueue(1)
    queue.in_order = True
    segments = [Segment(number, size) for number, size in enumerate(sizes, 1)]
    before = {segment.id: sum(sizes[: segment.id - 1]) for segment in segments}
    for segment in segments:
        queue.add(0, segment, 0.0)
    out: list[list[SegmentSlice]] = []
    for items, gives_back, which in steps:
        if gives_back and out:
            queue.put_back(0, out.pop(which % len(out)), 1.0)
        elif queue.items:
            taken, _ = queue.take(0, queue.sendable_items(0, min(items, queue.items)))
            places = [before[segment.id] + item for segment, start, stop in taken for item in range(start, stop)]
            assert places == list(range(places[0], places[0] + len(places)))
            out.append(taken)
        waits = [before[segment.id] + start for segment, start, _ in queue.by_epoch[0].parts]
        assert waits == sorted(waits)
    gone = sum(total_items(parts) for parts in out)
    assert queue.items == sum(sizes) - gone


def test_items_put_back_into_a_flushed_epoch_are_sent_as_partial_batches() -> None:
    queue = UnitQueue(4)
    segment = Segment(1, 6)
    queue.add(1, segment, 0.0)
    taken, _ = queue.take(1, 4)
    queue.flush_stale(1)
    queue.put_back(1, taken[:1], 5.0)
    queue.resize(8)
    assert list(queue.ready) == [1]
    assert queue.can_send_partial(queue.by_epoch[1])
