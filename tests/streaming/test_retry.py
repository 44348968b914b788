"""The retry table: the next attempt after each kind of failure, and termination."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.control.payload import Segment
from dovetail.streaming.epochs import Epoch
from dovetail.streaming.retry import (
    retry_after_failure,
    retry_after_out_of_memory,
    retry_after_unlocated_death,
    retry_whole_input,
)
from dovetail.streaming.worker_pool import Suspect

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = Epoch(1, 0, 1, target_items=1)


def suspect(items: int, batch_size: int, charged: int = 0) -> Suspect:
    half = items // 2
    parts = (
        [(Segment(1, items), 0, half), (Segment(2, items), half, items)] if half else [(Segment(2, items), 0, items)]
    )
    return Suspect(EPOCH, parts, items, batch_size, charged)


def numbers_in(found: Suspect) -> list[int]:
    return [number for _, start, stop in found.parts for number in range(start, stop)]


def story(items: int, batch: int, retries: int) -> list[tuple[int, int] | None]:
    """Attempts of a batch whose calls all fail: (items, items per call) of each, and None at the end."""
    expected: list[tuple[int, int] | None] = []
    now = suspect(items, batch)
    while True:
        again = retry_after_failure(now, retries)
        if not again:
            return [*expected, None]
        expected.append((again[0].items, again[0].batch_size))
        now = suspect(again[0].batch_size, again[0].batch_size, again[0].failed_attempts)


@pytest.mark.parametrize(
    ("retries", "expected"),
    [
        (0, [None]),
        (1, [(8, 1), (1, 1), None]),
        (2, [(8, 1), (1, 1), None]),
        (3, [(8, 8), (8, 1), (1, 1), None]),
    ],
)
def test_a_failed_batch_is_retried_alone_then_item_by_item_then_given_up(
    retries: int, expected: list[tuple[int, int] | None]
) -> None:
    assert story(8, 8, retries) == expected


@pytest.mark.parametrize(("retries", "tries"), [(0, 1), (1, 2), (2, 3), (3, 4), (5, 6)])
def test_a_single_item_is_retried_as_often_as_configured_after_its_first_attempt(retries: int, tries: int) -> None:
    assert len(story(1, 1, retries)) == tries


def test_a_death_without_a_breadcrumb_halves_the_items_of_the_worker() -> None:
    halves = retry_after_unlocated_death(suspect(20, 4), 3)
    assert [(half.items, half.batch_size, half.deaths) for half in halves] == [(8, 4, 1), (12, 4, 1)]
    inside = retry_after_unlocated_death(suspect(4, 4), 3)
    assert [(half.items, half.batch_size) for half in inside] == [(2, 2), (2, 2)]


def test_out_of_memory_halves_without_counting_an_attempt() -> None:
    halves = retry_after_out_of_memory(suspect(7, 7, charged=1), 3)
    assert [(half.items, half.batch_size, half.failed_attempts) for half in halves] == [(4, 4, 1), (3, 4, 1)]
    assert halves[0].halved_batch is halves[1].halved_batch is not None
    several = retry_after_out_of_memory(suspect(12, 3), 3)
    assert [(half.items, half.batch_size, half.halved_batch) for half in several] == [(6, 3, None), (6, 3, None)]


def test_a_single_item_out_of_memory_counts_as_an_attempt() -> None:
    again = retry_after_out_of_memory(suspect(1, 1), 3)
    assert [half.failed_attempts for half in again] == [1]
    assert retry_after_out_of_memory(suspect(1, 1), 0) == []


@pytest.mark.parametrize(("retries", "tries"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_a_barrier_is_retried_with_its_whole_input(retries: int, tries: int) -> None:
    now, count = suspect(9, 9), 1
    while again := retry_whole_input(now, retries):
        assert [half.items for half in again] == [9]
        now, count = again[0], count + 1
    assert count == tries


@given(items=st.integers(1, 60), batch=st.integers(1, 20), retries=st.integers(0, 5), seed=st.integers(0, 10**9))
def test_no_item_is_lost_or_duplicated_and_retries_are_bounded(items: int, batch: int, retries: int, seed: int) -> None:
    random = Random(seed)
    rules: list[Callable[[Suspect, int], list[Suspect]]] = [
        retry_after_failure,
        retry_after_unlocated_death,
        retry_after_out_of_memory,
    ]
    waiting = [suspect(items, batch)]
    gone: list[int] = []
    tries = 0
    while waiting:
        now = waiting.pop(random.randrange(len(waiting)))
        tries += 1
        assert tries <= items * (2 * retries + 6) + 10, "it never ends"
        assert numbers_in(now) == sorted(numbers_in(now))
        assert len(numbers_in(now)) == now.items
        again = random.choice(rules)(now, retries)
        before = sorted(numbers_in(now))
        if not again:
            gone += before
            continue
        assert sorted(number for half in again for number in numbers_in(half)) == before
        # items that are retried one by one fail one by one
        waiting += [
            Suspect(EPOCH, [part], 1, 1, half.failed_attempts, deaths=half.deaths) if half.batch_size == 1 else half
            for half in again
            for part in (
                [(segment, n, n + 1) for segment, start, stop in half.parts for n in range(start, stop)]
                if half.batch_size == 1
                else half.parts[:1]
            )
        ]
    assert sorted(gone) == list(range(items))
