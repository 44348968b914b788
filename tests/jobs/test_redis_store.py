"""The Redis store against the contract of the store port, and against the memory store in random traces."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from dovetail.jobs.stores.redis_store import RedisStore
from jobs.store_contract import StoreContract, StoreScene
from jobs.store_traces import Operation, assert_like_memory_store, traces
from jobs.test_memory_store import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redis_aids import RedisProcess

numbers = count()


class TestRedisStore(StoreContract):
    @pytest.fixture
    def scene(self, redis_server: RedisProcess) -> Iterator[StoreScene]:
        clock, prefix = ManualClock(), f"test{next(numbers)}"
        stores: list[RedisStore] = []

        def another() -> RedisStore:
            stores.append(RedisStore(redis_server.url, prefix=prefix, clock_ms=clock))
            return stores[-1]

        yield StoreScene(another(), clock.advance, another)
        for store in stores:
            store.close()

    @given(operations=traces())
    def test_random_traces_give_what_the_memory_store_gives(
        self, redis_server: RedisProcess, operations: list[Operation]
    ) -> None:
        prefix = f"test{next(numbers)}"
        assert_like_memory_store(lambda clock: RedisStore(redis_server.url, prefix=prefix, clock_ms=clock), operations)
