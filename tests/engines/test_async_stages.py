"""Async stages: awaited batches, keys and breadcrumbs of concurrent calls, cancellation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.engines.unit_executor import UnitExecutor, make_executor
from dovetail.engines.worker_context import Worker
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_function import each

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dovetail.engines.stage_chain import MessageOutcome


def crumb() -> memoryview:
    return memoryview(bytearray(64)).cast("q")


def host(work: Any, batch_size: int = 1) -> UnitExecutor:
    hosted = make_executor((Stage("a", work, batch_size=batch_size),), Worker(1, "a"))
    hosted.setup()
    assert hosted.is_async
    return hosted


def run(hosted: UnitExecutor, items: list[Any], batch_size: int = 1) -> MessageOutcome:
    return asyncio.run(hosted.run_async(range(len(items)), items, batch_size, crumb(), 1))


async def odd(items: list[int]) -> list[int]:
    await asyncio.sleep(0)
    if 5 in items:
        raise ValueError("five")
    return [item for item in items if item % 2]


def test_batches_of_an_async_stage_are_awaited_in_order() -> None:
    outcome = run(host(odd, 2), list(range(8)), 2)
    assert outcome.items == [1, 3, 7]
    assert outcome.keys == [(0, 0), (2, 0), (6, 0)]
    assert [(failure.start, failure.stop, failure.error) for failure in outcome.failures] == [
        (4, 6, "ValueError: five")
    ]
    assert [stage[:2] for stage in outcome.stages] == [(6, 3)]
    assert "in odd" in outcome.failures[0].detail
    assert "/dovetail/engines/" not in outcome.failures[0].detail


def test_async_generators_yield_items() -> None:
    class Spreads:
        async def __call__(self, items: list[int]) -> AsyncIterator[int]:
            for item in items:
                await asyncio.sleep(0)
                yield item
                yield -item

    assert run(host(Spreads), [1, 2]).items == [1, -1, 2, -2]
    assert run(host(Spreads), [1, 2]).keys == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_each_with_an_async_function_drops_fans_out_and_fails_per_item() -> None:
    async def one(item: int) -> Any:
        await asyncio.sleep(0)
        if item == 3:
            raise SystemExit(item)
        return None if item == 1 else iter([item, item]) if item == 2 else item

    for batch_size in (1, 3, 10):
        outcome = run(host(each(one), batch_size), list(range(5)), batch_size)
        assert outcome.items == [0, 2, 2, 4]
        assert outcome.keys == [0, (2, 0), (2, 1), 4]
        assert [(failure.start, failure.stop, failure.error) for failure in outcome.failures] == [
            (3, 4, "SystemExit: 3")
        ]


def test_each_with_an_async_generator_fans_out() -> None:
    async def spread(item: int) -> AsyncIterator[int]:
        for number in range(item):
            yield number

    assert run(host(each(spread), 4), [2, 0, 1], 4).keys == [(0, 0), (0, 1), (2, 0)]


def test_items_of_a_batch_are_awaited_concurrently_with_their_own_keys() -> None:
    class Meets:
        def setup(self, worker: Worker) -> None:
            self.worker = worker
            self.inside = self.most = 0

        async def __call__(self, item: int) -> Any:
            self.inside += 1
            self.most = max(self.most, self.inside)
            await asyncio.sleep(0)
            self.inside -= 1
            return self.worker.item_keys

    hosted = host(each(Meets), 4)
    assert run(hosted, list(range(6)), 4).items == [((i,),) for i in range(6)]
    assert hosted.target.most == 4
    assert run(hosted, list(range(6)), 1).items == [((i,),) for i in range(6)]


def test_concurrent_messages_have_their_own_keys_and_breadcrumbs() -> None:
    places = {100: crumb(), 200: crumb()}
    seen: list[tuple[int, int, int]] = []

    class ReturnsKeys:
        def setup(self, worker: Worker) -> None:
            self.worker = worker

        async def __call__(self, items: list[int]) -> list[Any]:
            for _ in range(items[0] % 2 + 1):
                await asyncio.sleep(0)
            keys = self.worker.item_keys
            place = places[keys[0][0] // 100 * 100]
            assert place.tolist()[:4] == [place[0], keys[0][0] % 100, 1, 0]
            seen.append((place[0], place[1], len(keys)))
            return list(keys)

    hosted = host(ReturnsKeys, 3)

    async def both() -> list[MessageOutcome]:
        runs = [
            hosted.run_async(range(first, first + 8), list(range(8)), 3, places[first], first + 7) for first in places
        ]
        return await asyncio.gather(*runs)

    for first, outcome in zip(places, asyncio.run(both()), strict=True):
        assert outcome.failures == []
        assert outcome.items == [(first + i,) for i in range(8)]
        assert places[first][0] == -1
        assert [one[1:] for one in seen if one[0] == first + 7] == [(0, 3), (3, 3), (6, 2)]
    assert [one[0] for one in seen] != sorted(one[0] for one in seen)


def test_cancelling_the_task_ends_the_message() -> None:
    place = crumb()

    async def waits(item: Any) -> Any:
        await asyncio.Event().wait()

    async def cancelled(work: Any, batch_size: int) -> None:
        task = asyncio.create_task(host(work, batch_size).run_async(range(3), [1, 2, 3], batch_size, place, 1))
        await asyncio.sleep(0.01)
        assert place[0] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert place[0] == -1

    for work in (waits, each(waits)):
        for batch_size in (1, 3):
            asyncio.run(cancelled(work, batch_size))


def test_a_call_that_raises_cancelled_error_is_a_failed_call() -> None:
    async def gives_up(item: Any) -> Any:
        raise asyncio.CancelledError("tired")

    for work in (gives_up, each(gives_up)):
        for batch_size in (1, 2):
            failures = run(host(work, batch_size), [1, 2], batch_size).failures
            assert {failure.error for failure in failures} == {"CancelledError: tired"}
            assert sum(failure.stop - failure.start for failure in failures) == 2


def test_a_plain_function_can_run_in_an_event_loop() -> None:
    hosted = make_executor(lambda items: items, Worker(1, "a"))
    assert run(hosted, [1, 2], 2).items == [1, 2]


def test_invalid_return_values_of_async_functions_are_rejected() -> None:
    async def nothing(items: Any) -> Any:
        return None

    (failure,) = run(host(nothing), [1]).failures
    assert failure.error.startswith("TypeError: stage 'a' returned None; return a list")


def test_closing_a_slot_ends_its_message() -> None:
    class Stuck:
        def __await__(self) -> Any:
            yield None

    async def waits(items: Any) -> Any:
        await Stuck()

    place = crumb()
    running = host(waits).run_async(range(2), [1, 2], 1, place, 4)
    running.send(None)
    assert place[0] == 4
    running.close()
    assert place[0] == -1
