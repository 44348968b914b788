"""The pool of workers that can take a message."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, cast

from hypothesis import given
from hypothesis import strategies as st

from dovetail.resources.seat import Seat
from dovetail.streaming.worker_pool import Worker, WorkerPool

if TYPE_CHECKING:
    from dovetail.streaming.worker_pool import Message

A_MESSAGE = cast("Message", object())


def worker(number: int, node: str) -> Worker:
    return Worker(number, "u", (Seat(node, cpu_milli=1000),), 0.0)


@given(slots=st.integers(1, 4), seed=st.integers(0, 10**9))
def test_the_free_count_is_the_number_of_workers_that_can_take_a_message(slots: int, seed: int) -> None:
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


def test_the_node_of_the_data_is_preferred_only_among_the_least_loaded_workers() -> None:
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
