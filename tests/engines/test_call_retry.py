"""Retries with backoff and timeouts of stage calls in the worker: `Stage(on_error=dt.Retry(...), timeout=...)`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.engines.unit_executor import make_executor
from dovetail.engines.worker_context import Worker
from runtime.aids import run_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.stage_chain import MessageOutcome

pytestmark = pytest.mark.time_limit

POLICY = dt.Retry(ConnectionError, times=2, backoff="500ms", then="skip")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between retries, which take no time here."""
    found: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        found.append(seconds)
        await real(0)

    monkeypatch.setattr("dovetail.engines.call_retry.time", SimpleNamespace(sleep=found.append))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


class Flaky:
    """Item 1 fails twice, item 2 with an exception that is not retried, item 3 always; every item is changed in
    place by each attempt."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()

    def one(self, item: list[int]) -> list[int]:
        number = item[0]
        self.calls[number] += 1
        item.append(number)
        if number == 1 and self.calls[1] <= 2:
            raise ConnectionResetError("again")
        if number == 2:
            raise ValueError("never retried")
        if number == 3:
            raise ConnectionError("always")
        return item


def run_stage(stage: dt.Stage, items: Callable[[], list[Any]], batch_size: int) -> MessageOutcome:
    executor = make_executor((stage,), Worker(0, stage.name))
    call = (range(len(items())), items(), batch_size, [-1, 0, 0, 0], 7, items)
    return asyncio.run(executor.run_async(*call)) if executor.is_async else executor.run(*call)


def five() -> list[list[int]]:
    return [[number] for number in range(5)]


@pytest.mark.parametrize("how", ["each", "lists", "async each", "async lists"])
def test_listed_exceptions_are_retried_with_backoff_on_unchanged_items(how: str, waits: list[float]) -> None:
    flaky = Flaky()

    async def awaited(item: list[int]) -> list[int]:
        return flaky.one(item)

    async def awaited_list(items: list[list[int]]) -> list[list[int]]:
        return [flaky.one(item) for item in items]

    functions: dict[str, Any] = {
        "each": dt.each(flaky.one),
        "lists": lambda items: [flaky.one(item) for item in items],
        "async each": dt.each(awaited),
        "async lists": awaited_list,
    }
    outcome = run_stage(dt.Stage("flaky", functions[how], on_error=POLICY), five, 1)
    assert outcome.items == [[0, 0], [1, 1], [4, 4]], "a retry gets the item as it came"
    assert list(outcome.keys) == [0, 1, 4]
    assert [(failure.start, failure.stop) for failure in outcome.failures] == [(2, 3), (3, 4)]
    assert [failure.error for failure in outcome.failures] == ["ValueError: never retried", "ConnectionError: always"]
    assert flaky.calls == {0: 1, 1: 3, 2: 1, 3: 3, 4: 1}
    assert sorted(waits) == [0.5, 0.5, 1.0, 1.0]


def test_a_batch_is_retried_as_a_whole(waits: list[float]) -> None:
    calls: list[list[int]] = []

    def batches(items: list[int]) -> list[int]:
        calls.append(list(items))
        if len(calls) == 1:
            items.clear()
            raise ConnectionError("once")
        return [10 * item for item in items if item != 1]

    outcome = run_stage(dt.Stage("batches", batches, batch_size=3, on_error=POLICY), lambda: [0, 1, 2, 3], 3)
    assert calls == [[0, 1, 2], [0, 1, 2], [3]]
    assert (outcome.items, outcome.failures, waits) == ([0, 20, 30], [], [0.5])
    assert list(outcome.keys) == [(0, 0), (0, 1), 3]


def test_a_call_knows_its_keys_in_a_retry(waits: list[float]) -> None:
    seen: list[tuple[tuple[int, ...], ...]] = []

    class Keyed:
        def setup(self, worker: Worker) -> None:
            self.worker = worker

        def __call__(self, items: list[int]) -> list[int]:
            seen.append(self.worker.item_keys)
            if len(seen) == 2:
                raise ConnectionError("once")
            return items

    executor = make_executor((dt.Stage("keyed", Keyed, on_error=POLICY),), Worker(0, "keyed"))
    executor.setup()
    executor.run(range(10, 13), [0, 1, 2], 1, [-1, 0, 0, 0], 7)
    assert seen == [((10,),), ((11,),), ((11,),), ((12,),)]
    assert waits == [0.5]


@pytest.mark.parametrize("how", ["each", "lists", "async each"])
def test_a_call_that_exceeds_its_timeout_raises_in_its_worker_and_may_be_retried(how: str) -> None:
    calls: Counter[int] = Counter()

    def slow(item: int) -> int:
        calls[item] += 1
        if item == 1 and calls[1] == 1:
            time.sleep(60)
        return item

    async def slow_async(item: int) -> int:
        calls[item] += 1
        if item == 1 and calls[1] == 1:
            await asyncio.sleep(60)
        return item

    functions: dict[str, Any] = {
        "each": dt.each(slow),
        "lists": lambda items: [slow(item) for item in items],
        "async each": dt.each(slow_async),
    }
    stage = dt.Stage("slow", functions[how], timeout="200ms", on_error=dt.Retry(TimeoutError, backoff=0))
    outcome = run_stage(stage, lambda: [0, 1, 2], 1)
    assert (outcome.items, outcome.failures) == ([0, 1, 2], [])
    assert calls == {0: 1, 1: 2, 2: 1}
    calls.clear()
    outcome = run_stage(dt.Stage("slow", functions[how], timeout="200ms"), lambda: [0, 1, 2], 1)
    assert outcome.items == [0, 2]
    assert outcome.failures[0].error == "TimeoutError: no result within the timeout of 0.2 s"


class FailsTwice:
    """Each item fails twice in the same process; one always does."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()

    def __call__(self, items: list[int]) -> list[int]:
        for item in items:
            self.calls[item] += 1
            if item == 13 or self.calls[item] <= 2:
                raise ConnectionError(f"attempt {self.calls[item]} of {item}")
        return items


def test_a_run_retries_in_its_workers_and_records_items_that_keep_failing() -> None:
    retry = dt.Retry(ConnectionError, times=2, backoff=0, then="skip")
    run = run_of(dt.Stage("api", FailsTwice, on_error=retry, workers=1), source=range(20))
    assert sorted(run) == [number for number in range(20) if number != 13]
    (error,) = run.errors
    assert (error.item, error.error) == (13, "ConnectionError: attempt 3 of 13")


def test_a_batch_that_keeps_failing_is_retried_item_by_item() -> None:
    def refuses(items: list[int]) -> list[int]:
        if 13 in items:
            raise ConnectionError("13")
        return items

    retry = dt.Retry(times=1, backoff=0, then="skip")
    run = run_of(dt.Stage("api", refuses, batch_size=5, on_error=retry), source=range(20))
    assert sorted(run) == [number for number in range(20) if number != 13]
    assert [error.item for error in run.errors] == [13]


def test_without_skip_the_run_fails_with_the_last_exception() -> None:
    def refuses(items: list[int]) -> list[int]:
        raise ConnectionError(f"no {items}")

    with pytest.raises(dt.RunError, match="ConnectionError: no"):
        run_of(dt.Stage("api", refuses, on_error=dt.Retry(times=1, backoff=0)), source=range(3)).wait()
