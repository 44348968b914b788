"""Requests of a service: into the stream, and results to their callers."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from dovetail.control.commands import Deliver, FailedItem, Pull
from dovetail.control.engine import UnsendableItemError
from dovetail.control.events import Event, InputEnded, ItemsArrived
from dovetail.control.payload import Segment
from dovetail.data.request_queue import (
    DeadlineWatch,
    ItemFailed,
    RequestFuture,
    RequestSource,
    ResponseSink,
    ServiceClosed,
    TooManyRequests,
    service_closed_error,
)

SOON_S = 30.0


class Memory:
    """A store that keeps payloads pickled in this process."""

    def __init__(self) -> None:
        self.posted: list[Event] = []
        self.unreadable = False
        self._storing = threading.Lock()

    def store(self, keys: Any, items: list[Any]) -> Segment:
        assert self._storing.acquire(blocking=False), "one thread at a time"
        try:
            for index, item in enumerate(items):
                try:
                    pickle.dumps(item)
                except Exception as error:
                    raise UnsendableItemError(-1 if len(items) > 2 else index, str(error)) from None
            return Segment(0, len(items), ref=pickle.dumps((keys, items)))
        finally:
            self._storing.release()

    def store_split(self, keys: range, split: Any) -> Segment:
        raise NotImplementedError

    def load(self, segment: Segment) -> tuple[Any, list[Any]]:
        assert isinstance(segment.ref, bytes)
        found: tuple[Any, list[Any]] = pickle.loads(segment.ref)
        return found

    def release_mappings(self) -> None: ...

    def post(self, event: Event) -> None:
        self.posted.append(event)

    def arrived(self) -> list[tuple[int, Any]]:
        """Number and item of all that entered the stream."""
        found: list[tuple[int, Any]] = []
        for event in self.posted:
            if isinstance(event, ItemsArrived):
                keys, items = self.load(event.segments[0])
                assert keys[0] == event.first
                found += zip(keys, items, strict=True)
        return found


class SourceAndSink:
    """A source and a sink without a run between them."""

    def __init__(self, ways: int = 1, most: int = 100) -> None:
        self.store = Memory()
        self.sink = ResponseSink(self.store, ways)
        self.source = self.sink.source = RequestSource(self.store, most, self.sink.reject)

    def submit(self, *items: Any, many: bool = False) -> list[RequestFuture]:
        tickets = [RequestFuture(item, many=many) for item in items]
        for ticket in tickets:
            self.source.submit(ticket)
        return tickets

    def deliver(self, keys: Any, items: list[Any], leaf: str = "leaf") -> None:
        self.sink.take(Deliver(0, 1, 0, 0, {leaf: [self.store.store(keys, items)]}))

    def epoch(self, first: int, last: int) -> None:
        self.sink.take(Deliver(0, 1, first, last, {}))

    def end(self) -> None:
        self.sink.end(service_closed_error("is over"))


# In


def test_requests_wait_until_they_are_asked_for_and_are_numbered_then() -> None:
    bench = SourceAndSink()
    bench.submit("a", "b", "c")
    assert bench.store.arrived() == []
    bench.source.pull(Pull(0, 2))
    assert bench.store.arrived() == [(0, "a"), (1, "b")]
    bench.source.pull(Pull(2, 5, segment_items=1))
    bench.submit("d")
    assert bench.store.arrived() == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    bench.end()


def test_a_request_cancelled_before_it_is_read_gets_no_number() -> None:
    bench = SourceAndSink()
    first, _ = bench.submit("a", "b")
    first.cancel()
    bench.source.pull(Pull(0, 10))
    assert bench.store.arrived() == [(0, "b")]
    assert bench.source.pending == 1
    bench.end()


def test_many_threads_at_once_lose_nothing_and_never_store_at_the_same_time() -> None:
    bench = SourceAndSink(most=10_000)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(bench.submit, *range(start, start + 10)) for start in range(0, 4000, 10)]
        for first in range(0, 4000, 100):
            bench.source.pull(Pull(first, 100, segment_items=7))
        for future in futures:
            future.result()
    arrived = bench.store.arrived()
    assert [number for number, _ in arrived] == list(range(4000))
    assert sorted(item for _, item in arrived) == list(range(4000))
    bench.end()


def test_an_item_that_cannot_be_sent_takes_no_number_wherever_it_is() -> None:
    bench = SourceAndSink()
    lock = threading.Lock()
    tickets = bench.submit(1, lock, 2, lock, 3)
    bench.source.pull(Pull(0, 10, segment_items=5))
    for at in (1, 3):
        error = tickets[at].exception(SOON_S)
        assert isinstance(error, ItemFailed)
        assert error.codes == ("DT378",)
    assert bench.store.arrived() == [(0, 1), (1, 2), (2, 3)]
    bench.submit(*range(10))
    assert len(bench.store.arrived()) == 10, "ten were asked for, and ten came"
    bench.end()


def test_the_input_ends_once_and_after_what_waits() -> None:
    bench = SourceAndSink()
    bench.submit("a")
    bench.source.close_intake(service_closed_error("is drained"))
    bench.source.finish()
    assert bench.store.posted == []
    bench.source.pull(Pull(0, 10))
    bench.source.finish()
    assert bench.store.posted[1:] == [InputEnded(1)]
    with pytest.raises(ServiceClosed, match="is drained"):
        bench.submit("b")
    bench.end()


def test_a_full_queue_refuses_requests_and_wakes_waiting_callers_at_the_end() -> None:
    bench = SourceAndSink(most=1)
    bench.submit("a")
    with pytest.raises(TooManyRequests):
        bench.source.submit(RequestFuture("b"), block=False)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(bench.submit, "c")
        bench.source.close_intake(service_closed_error("is drained"))
        assert isinstance(waiting.exception(SOON_S), ServiceClosed)
    bench.end()


def test_nothing_is_kept_of_an_item_that_was_sent() -> None:
    class Item:
        def __reduce__(self) -> tuple[type[int], tuple[()]]:
            return int, ()

    bench = SourceAndSink()
    item = Item()
    gone = weakref.ref(item)
    (ticket,) = bench.submit(item)
    bench.source.pull(Pull(0, 1))
    del item
    gc.collect()
    assert gone() is None
    assert not ticket.done()
    bench.end()


# Out


def test_a_plain_key_is_the_answer_and_others_wait_for_the_end_of_their_epoch() -> None:
    bench = SourceAndSink()
    bench.source.pull(Pull(0, 10))
    plain, dropped, listed = bench.submit("a", "b", "c", many=True)
    bench.deliver(range(1), ["A"])
    assert plain.result(SOON_S) == ["A"]
    bench.deliver([(2, 1), (2, 0)], ["c1", "c0"])
    bench.epoch(0, 3)
    assert listed.result(SOON_S) == ["c0", "c1"]
    assert dropped.result(SOON_S) == []
    assert not bench.source.sent
    bench.end()


def test_with_several_ways_an_answer_is_complete_when_all_have_come() -> None:
    bench = SourceAndSink(ways=2)
    bench.source.pull(Pull(0, 10))
    (ticket,) = bench.submit("a", many=True)
    bench.deliver([0], ["R"], "right")
    bench.deliver([0], ["L"], "left")
    assert ticket.result(SOON_S) == ["L", "R"]
    bench.end()


@pytest.mark.parametrize("key", [(0, 3), None])
def test_a_failed_request_is_found_by_key_or_by_its_item(key: tuple[int, ...] | None) -> None:
    bench = SourceAndSink()
    bench.source.pull(Pull(0, 10))
    (ticket,) = bench.submit("a")
    part = (bench.store.store([(0, 3)], ["piece"]), 0, 1)
    bench.sink.take(
        Deliver(0, 1, 0, 0, {}, failed_items=[FailedItem("stage", part, "ValueError: no", "trace", key, 3)])
    )
    error = ticket.exception(SOON_S)
    assert isinstance(error, ItemFailed)
    assert (error.stage, error.error, error.traceback) == ("stage", "ValueError: no", "trace")
    again = pickle.loads(pickle.dumps(error))
    assert (again.stage, again.error, str(again)) == (error.stage, error.error, str(error))
    bench.deliver([(0, 4)], ["late"])  # another piece of it: no request waits for that
    bench.epoch(0, 1)
    bench.end()


def test_every_request_gets_an_answer_at_the_end() -> None:
    bench = SourceAndSink()
    bench.source.pull(Pull(0, 1))
    tickets = bench.submit("sent", "waiting")
    bench.end()
    assert [type(ticket.exception(0)) for ticket in tickets] == [ServiceClosed] * 2
    assert bench.source.pending == 0


def test_what_is_done_when_an_answer_comes_may_ask_again() -> None:
    bench = SourceAndSink()
    bench.source.pull(Pull(0, 10))
    again: list[RequestFuture] = []
    (ticket,) = bench.submit("a")
    ticket.add_done_callback(lambda _: again.extend(bench.submit("b")))
    bench.deliver([0], ["A"])
    bench.deliver([1], ["B"])
    bench.sink.end(service_closed_error("is over"))
    assert again[0].result(0) == "B"


# Deadlines


def test_deadlines_pass_in_their_order_and_those_answered_are_forgotten() -> None:
    deadlines = DeadlineWatch()
    passed: SimpleQueue[float | None] = SimpleQueue()
    tickets = [RequestFuture(None, deadline_s=seconds) for seconds in (0.15, 0.05, 0.1)]
    for ticket in tickets:
        ticket.add_done_callback(lambda done: passed.put(done.deadline_s))  # type: ignore[attr-defined]
        deadlines.watch(ticket)
    assert isinstance(tickets[0].exception(SOON_S), TimeoutError)
    assert [passed.get(timeout=SOON_S) for _ in tickets] == [0.05, 0.1, 0.15]
    for _ in range(10_000):
        ticket = RequestFuture(None, deadline_s=1000.0)
        deadlines.watch(ticket)
        ticket.resolve(1)
    assert len(deadlines._heap) < 200
    deadlines.close()
