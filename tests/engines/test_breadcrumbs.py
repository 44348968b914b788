"""Breadcrumbs and keys of a running call."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dovetail.engines.unit_executor import UnitExecutor, make_executor
from dovetail.engines.worker_context import Worker
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_function import each
from waiting import PATIENCE_S


def crumb() -> memoryview:
    return memoryview(bytearray(64)).cast("q")


def host(*stages: Stage) -> UnitExecutor:
    hosted = make_executor(stages, Worker(1, "+".join(stage.name for stage in stages)))
    hosted.setup()
    return hosted


def test_the_breadcrumb_identifies_the_call_and_whether_that_is_exact() -> None:
    place = crumb()
    seen: list[list[int]] = []

    def look(item: int) -> int:
        seen.append(place.tolist()[:4])
        return item

    def drop_first(items: list[int]) -> list[int]:
        seen.append(place.tolist()[:4])
        return items[1:] if 0 in items else items

    stages = (Stage("a", each(look)), Stage("b", drop_first, batch_size=2), Stage("c", each(look)))
    place[0] = -1
    host(*stages).run(range(4), [0, 1, 2, 3], 2, place, 77)
    assert seen[:4] == [[77, i, 1, 0] for i in range(4)]
    assert seen[4:6] == [[77, i, 1, 1] for i in (0, 2)]
    assert seen[6:] == [[77, i, 0, 2] for i in range(3)]
    assert place[0] == -1


def test_in_the_second_run_the_breadcrumb_is_exact_after_item_counts_changed() -> None:
    place = crumb()
    seen: list[list[int]] = []

    def last(item: int) -> int:
        seen.append(place.tolist()[:4])
        if item == 5:
            raise ValueError
        return item

    stages = (Stage("a", each(lambda item: iter([item, item]))), Stage("b", each(last)))
    outcome = host(*stages).run(range(4), [2, 3, 4, 5], 1, place, 8)
    assert [(failure.start, failure.stop) for failure in outcome.failures] == [(3, 4)]
    assert seen[:7] == [[8, i, 0, 1] for i in range(7)]
    assert seen[7:] == [[8, i, 1, 1] for i in (0, 0, 1, 1, 2, 2, 3)]
    assert outcome.keys == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


class Keeps:
    """Records the keys and the items of each call."""

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.seen: list[tuple[Any, Any]] = []

    def __call__(self, items: Any) -> Any:
        self.seen.append((self.worker.item_keys, list(items) if isinstance(items, list) else [items]))
        return items


@pytest.mark.parametrize("boom", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("wrap", [each, lambda fn: fn])
def test_a_call_knows_the_keys_of_its_items(wrap: Any, batch_size: int, boom: bool) -> None:
    def spread(item: int) -> Any:
        return iter([f"({item}, 0)", f"({item}, 1)"]) if item % 2 else f"({item},)"

    stages = [Stage("a", each(spread), batch_size=batch_size), Stage("b", wrap(Keeps), batch_size=batch_size)]
    if boom:
        stages.append(Stage("c", each(lambda item: [][1] if item == "(4,)" else item), batch_size=batch_size))
    hosted = host(*stages)
    outcome = hosted.run(range(7), list(range(7)), batch_size, crumb(), 5)
    assert bool(outcome.failures) == boom
    seen = hosted._objects[1].target.seen
    assert len(seen) > 2
    for keys, items in seen:
        assert [str(key) for key in keys] == items
    assert hosted._objects[1].worker.item_keys == ()


def test_threads_see_the_keys_of_their_own_calls() -> None:
    meet = threading.Barrier(2)

    class Meets(Keeps):
        def __call__(self, items: Any) -> Any:
            meet.wait(PATIENCE_S)
            found = self.worker.item_keys
            meet.wait(PATIENCE_S)
            return [found]

    hosted = host(Stage("a", Meets))
    found: dict[int, list[Any]] = {}

    def slot(first: int) -> None:
        found[first] = hosted.run(range(first, first + 20), list(range(20)), 1, crumb(), first).items

    threads = [threading.Thread(target=slot, args=(first,)) for first in (100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for first in (100, 200):
        assert found[first] == [((first + i,),) for i in range(20)]
