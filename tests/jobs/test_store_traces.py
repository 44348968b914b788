"""The random traces that stores are compared with."""

from __future__ import annotations

from hypothesis import given

from dovetail.jobs.stores.memory_store import MemoryStore
from jobs.store_traces import Operation, assert_like_memory_store, traces


@given(traces())
def test_a_trace_gives_the_same_answers_again(operations: list[Operation]) -> None:
    assert_like_memory_store(MemoryStore, operations)
