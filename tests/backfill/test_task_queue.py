"""The task queue hands out every row once, whatever workers do."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.backfill.task import FailedRow, PhaseTimes, RangeResult, RangeTask
from dovetail.backfill.task_queue import (
    FIRST_TASK_BUDGET_S,
    MIN_TASK_BUDGET_S,
    SPARE_TASKS,
    TASK_BUDGET_S,
    TASKS_PER_SLOT,
    TaskQueue,
)
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


def _long(task: RangeTask) -> RangeResult:
    reached = min(task.stop, task.start + 100)
    return RangeResult(task, reached, computed=reached - task.start, times=PhaseTimes(compute=1.0), worker=("here", 0))


def _comes(handing: Iterator[RangeTask], within_s: float) -> bool:
    came = threading.Event()

    def ask() -> None:
        next(handing, None)
        came.set()

    threading.Thread(target=ask, daemon=True).start()
    return came.wait(within_s)


def tasks_of(sizes: list[int]) -> list[RangeTask]:
    return [RangeTask(number, rows, f"i{number}", 0, rows) for number, rows in enumerate(sizes)]


def result_up_to(task: RangeTask, reached: int, seconds: float = 0.1, worker: int = 0) -> RangeResult:
    return RangeResult(
        task, reached, computed=reached - task.start, times=PhaseTimes(compute=seconds), worker=("here", worker)
    )


PATIENCE_S = 30.0


def test_of_long_tasks_one_per_slot_and_one_more_is_handed_out() -> None:
    workers = 2
    dealer = TaskQueue([RangeTask(number, 1000, "inputs", 0, 1000) for number in range(50)], workers)
    handing = iter(dealer)
    out = [next(handing)]
    dealer.task_done(_long(out.pop()))
    out += [next(handing) for _ in range(workers + 1)]
    assert not _comes(handing, 0.1)
    dealer.task_done(_long(out.pop(0)))
    until(lambda: dealer._outstanding == workers + 1, "the one that was waited for is out")
    dealer.abandon()


@given(
    st.lists(st.integers(0, 400), max_size=4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.one_of(st.none(), st.floats(0.01, 1e6)),
    st.data(),
)
def test_every_row_is_handed_out_once_in_total(
    sizes: list[int], workers: int, slots: int, rate: float | None, data: st.DataObject
) -> None:
    dealer = TaskQueue(tasks_of(sizes), workers, slots, rate)
    handing = iter(dealer)
    out: list[RangeTask] = []
    computed: list[tuple[int, int]] = []
    while True:
        # it blocks when it has nothing to hand out: never ask for more than it has room for
        room = len(out) < dealer._max_outstanding()
        can_take = bool(dealer._queue) and room
        if not out and not can_take:
            break
        if can_take and (not out or data.draw(st.booleans())):
            task = next(handing)
            assert 0 < task.budget_s <= TASK_BUDGET_S
            assert task.start <= task.stop <= task.rows
            out.append(task)
            continue
        task = out.pop(data.draw(st.integers(0, len(out) - 1)))
        reached = data.draw(st.integers(min(task.start + 1, task.stop), task.stop))
        computed += [(task.fragment, row) for row in range(task.start, reached)]
        dealer.task_done(
            result_up_to(
                task, reached, data.draw(st.sampled_from([0.0, 1e-6, 0.1, 10.0])), data.draw(st.integers(0, 9))
            )
        )
    assert not dealer.has_more
    assert next(handing, None) is None
    assert sorted(computed) == [(number, row) for number, rows in enumerate(sizes) for row in range(rows)]
    assert dealer.rows_left == 0


def test_a_fragment_that_lacks_only_its_data_file_is_handed_out() -> None:
    dealer = TaskQueue([RangeTask(0, 100, "i", 100, 100)], 2)
    handing = iter(dealer)
    task = next(handing)
    assert (task.start, task.stop) == (100, 100)
    dealer.task_done(result_up_to(task, 100))
    assert next(handing, None) is None


def test_few_ranges_are_split_for_all_workers() -> None:
    dealer = TaskQueue(tasks_of([10_000]), 4)
    handing = iter(dealer)
    starts = [next(handing).start for _ in range(8)]
    assert starts == [1250 * number for number in range(8)]


def test_the_rest_of_a_task_is_handed_out_first() -> None:
    dealer = TaskQueue(tasks_of([1000] * 40), 2)
    handing = iter(dealer)
    first = next(handing)
    assert dealer.has_more
    dealer.task_done(result_up_to(first, 300))
    assert dealer.has_more
    second = next(handing)
    assert (second.fragment, second.start, second.stop) == (first.fragment, 300, 1000)


def test_only_tasks_that_workers_can_start_soon_are_handed_out() -> None:
    dealer = TaskQueue(tasks_of([1000] * 100), 2)
    handing = iter(dealer)
    out = [next(handing) for _ in range(2 * TASKS_PER_SLOT + SPARE_TASKS)]
    came = threading.Event()

    def ask() -> None:
        next(handing)
        came.set()

    threading.Thread(target=ask, daemon=True).start()
    assert not came.wait(0.1)
    dealer.task_done(result_up_to(out[0], out[0].stop))
    assert came.wait(PATIENCE_S)


def test_a_stopped_queue_raises_its_error_after_the_last_result() -> None:
    dealer = TaskQueue(tasks_of([1000] * 10), 1)
    handing = iter(dealer)
    out = [next(handing), next(handing)]
    dealer.stop(ValueError("first"))
    dealer.stop(ValueError("second"))
    ended = threading.Event()
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            next(handing)
        except BaseException as error:
            caught.append(error)
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    dealer.task_done(result_up_to(out[0], 10))
    assert not ended.wait(0.05)
    dealer.task_done(replace(result_up_to(out[1], 10), failed=FailedRow(1, 10, "ValueError", "first")))
    assert ended.wait(PATIENCE_S)
    assert [str(error) for error in caught] == ["first"]


def test_an_abandoned_queue_ends_at_once_without_an_error() -> None:
    dealer = TaskQueue(tasks_of([1000] * 10), 1)
    handing = iter(dealer)
    next(handing)
    dealer.stop(ValueError("not reported"))
    dealer.abandon()
    assert list(handing) == []


def test_abandoning_a_queue_wakes_its_reader() -> None:
    dealer = TaskQueue(tasks_of([10]), 1)
    handing = iter(dealer)
    next(handing)
    ended = threading.Event()

    def ask() -> None:
        assert list(handing) == []
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    assert not ended.wait(0.05)
    dealer.abandon()
    assert ended.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("rate", "budget"), [(None, FIRST_TASK_BUDGET_S), (1.0, TASK_BUDGET_S), (1e9, MIN_TASK_BUDGET_S)]
)
def test_the_time_budget_is_short_at_first_and_near_the_end(rate: float | None, budget: float) -> None:
    dealer = TaskQueue(tasks_of([1000] * 20), 2, rate=rate)
    assert next(iter(dealer)).budget_s == budget
