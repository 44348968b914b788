"""The memory store against the contract of the store port."""

from __future__ import annotations

import pytest

from dovetail.jobs.stores.memory_store import MemoryStore
from jobs.store_contract import StoreContract, StoreScene


class ManualClock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, milliseconds: int) -> None:
        self.now_ms += milliseconds


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def scene(self) -> StoreScene:
        clock = ManualClock()
        store = MemoryStore(clock)
        return StoreScene(store, clock.advance, lambda: store)
