"""Who gets the next message, and how fast are they said to be?"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.resources.seat import Seat
from dovetail.streaming.throughput import MIN_MESSAGES, OUTLIER_FACTOR, WINDOW_MESSAGES, ThroughputEstimator
from dovetail.streaming.worker_pool import Worker, WorkerPool

if TYPE_CHECKING:
    from dovetail.streaming.worker_pool import Message

A_MESSAGE = cast("Message", object())


def worker(number: int, node: str) -> Worker:
    return Worker(number, "u", (Seat(node, cpu_milli=1000),), 0.0)


@given(slots=st.integers(1, 4), seed=st.integers(0, 10**9))
def test_free_is_always_the_number_of_workers_that_can_take_one_more(slots: int, seed: int) -> None:
    random = Random(seed)
    pool = WorkerPool(slots)
    inside: dict[int, Worker] = {}
    outside = {number: worker(number, f"n{number % 3}") for number in range(6)}
    for _ in range(60):
        action = random.randrange(5)
        if action == 0 and outside:
            number = random.choice(list(outside))
            inside[number] = outside.pop(number)
            pool.add(inside[number])
        elif action == 1 and inside:
            number = random.choice(list(inside))
            outside[number] = inside.pop(number)
            pool.remove(outside[number])
            pool.remove(outside[number])
        elif action == 2 and pool.free_count:
            node = f"n{random.randrange(3)}"
            best = pool.least_loaded(node)
            assert best is not None
            least = min(len(w.messages) for w in inside.values())
            assert len(best.messages) == least
            here = [w for w in inside.values() if w.node == node and len(w.messages) == least]
            assert not here or best.node == node
            pool.remove(best)
            best.messages[len(best.messages) + 1000 * random.randrange(10**6)] = A_MESSAGE
            pool.add(best)
        elif action == 3:
            busy = [w for w in inside.values() if w.messages]
            if busy:
                chosen = random.choice(busy)
                pool.remove(chosen)
                chosen.messages.popitem()
                pool.add(chosen)
        else:
            pool.set_max_messages(slots + random.randrange(2))
        can = [w for w in inside.values() if len(w.messages) < pool.max_messages]
        assert pool.free_count == len(can)
        assert (pool.least_loaded("n0") is None) == (not can)
        assert (pool.find_idle() is None) == all(w.messages for w in inside.values())
        laden = next(pool.with_prefetched(), None)
        assert (laden is None) == all(len(w.messages) <= slots for w in inside.values())


def test_a_pool_prefers_the_node_of_the_data_only_among_those_with_the_least_in_hand() -> None:
    pool = WorkerPool(2)
    here, there = worker(1, "here"), worker(2, "there")
    here.messages[1] = A_MESSAGE
    pool.add(here)
    pool.add(there)
    assert pool.least_loaded("here") is there
    pool.remove(there)
    there.messages[2] = A_MESSAGE
    pool.add(there)
    assert pool.least_loaded("here") is here


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 10), st.integers(0, 90)), min_size=1, max_size=400))
def test_what_is_remembered_is_the_last_messages(messages: list[tuple[int, float, int]]) -> None:
    speeds = ThroughputEstimator(None, None)
    for message in messages:
        speeds.add(*message)
    last = messages[-WINDOW_MESSAGES:]
    assert speeds.messages == len(messages)
    assert speeds.returns == sum(out for _, _, out in last) / sum(items for items, _, _ in last)
    seconds = sum(s for _, s, _ in last) / sum(items for items, _, _ in last)
    assert speeds.seconds_per_item == pytest.approx(seconds, abs=1e-9)


def test_what_was_given_counts_until_enough_is_measured() -> None:
    speeds = ThroughputEstimator(5.0, 2.0)
    assert speeds.rate()[0] == 5.0
    assert speeds.returns == 2.0
    for _ in range(MIN_MESSAGES):
        speeds.add(10, 1.0, 10)
    assert speeds.rate()[0] == pytest.approx(10.0)
    assert speeds.returns == 1.0


def test_one_hung_call_does_not_make_a_stage_slow() -> None:
    speeds = ThroughputEstimator(None, None)
    for _ in range(99):
        speeds.add(1, 1.0, 1)
    speeds.add(1, 100_000.0, 1)
    rate, _ = speeds.rate()
    assert rate == pytest.approx(1 / ((99 + OUTLIER_FACTOR) / 100))


def test_a_stage_that_became_slow_is_seen_before_its_first_slow_message_ends() -> None:
    speeds = ThroughputEstimator(None, None)
    for _ in range(100):
        speeds.add(1, 1.0, 1)
    quick, _ = speeds.rate([(1, 0.5)] * 10)
    slow, _ = speeds.rate([(1, 10.0)] * 10)
    assert quick == pytest.approx(1.0)
    assert slow is not None
    assert slow < 0.2


def test_alike_messages_make_a_rate_sure_and_unlike_ones_do_not() -> None:
    alike, unlike = ThroughputEstimator(None, None), ThroughputEstimator(None, None)
    for number in range(20):
        alike.add(1, 1.0, 1)
        unlike.add(1, 15.0 if number % 7 == 0 else 0.1, 1)
    assert alike.rate()[1] == 1.0
    assert unlike.rate()[1] < 0.5


def test_nothing_is_known_before_anything_was_said_or_measured() -> None:
    speeds = ThroughputEstimator(None, None)
    rate, _ = speeds.rate()
    found: tuple[Any, ...] = (rate, speeds.seconds_per_item, speeds.returns, speeds.is_measured)
    assert found == (None, None, 1.0, False)
