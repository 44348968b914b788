"""Positions of epoch starts among the items of a message and among their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.control.events import JOINED
from dovetail.engines.epoch_starts import EpochStarts, join_starts

if TYPE_CHECKING:
    from dovetail.engines.item_keys import CountChange

COUNTS = st.lists(st.sampled_from([0, 1, 1, 1, 2, 3]), min_size=1, max_size=30)


@given(COUNTS, st.data())
def test_calls_with_one_item_never_join_epochs(counts: list[int], data: st.DataObject) -> None:
    positions = sorted(data.draw(st.lists(st.integers(1, len(counts)), max_size=4)))
    starts = EpochStarts(positions)
    starts.apply([(at, at + 1, count) for at, count in enumerate(counts) if count != 1])
    assert starts.positions == [sum(counts[:position]) for position in positions]
    assert not any(starts.joined)


@given(COUNTS, st.integers(2, 7), st.data())
def test_a_call_on_both_sides_joins_epochs_if_it_returns_another_number(
    counts: list[int], size: int, data: st.DataObject
) -> None:
    positions = sorted(data.draw(st.lists(st.integers(1, len(counts) - 1), max_size=4))) if len(counts) > 1 else []
    changes: list[CountChange] = []
    for start in range(0, len(counts), size):
        stop = min(start + size, len(counts))
        if sum(counts[start:stop]) != stop - start:
            changes.append((start, stop, sum(counts[start:stop])))
    starts = EpochStarts(positions)
    starts.apply(changes)
    assert starts.positions == sorted(starts.positions)
    for number, position in enumerate(positions):
        inside = [change for change in changes if change[0] < position < change[1]]
        assert starts.joined[number] == any(count for _, _, count in inside)
        if not inside:
            start = position - position % size
            assert starts.positions[number] == sum(counts[:start]) + position - start


def test_segments_are_counted_per_epoch() -> None:
    starts = EpochStarts([3, 3, 8])
    assert starts.segment_counts([0, 3, 5, 8]) == [1, 0, 2, 1]
    starts.joined[2] = True
    assert starts.segment_counts([0, 3, 5, 8]) == [1, 0, 3, JOINED]


@pytest.mark.parametrize(
    ("results", "joined"),
    [(lambda rows: rows, False), (lambda rows: rows[::-1], True), (lambda rows: [{} for _ in rows], False)],
)
def test_rows_that_change_sides_join_epochs(results: Any, joined: bool) -> None:
    rows = [{"n": number} for number in range(4)]
    starts = EpochStarts([1])
    starts.apply_call([], rows, results(rows))
    assert starts.joined == [joined]


def test_small_numbers_and_texts_are_values() -> None:
    starts = EpochStarts([2])
    starts.apply_call([], [1, 2, 3, 4], [4, 3, 2, 1])
    assert starts.joined == [False]


def test_a_message_that_runs_in_pieces_has_the_starts_of_all_pieces() -> None:
    whole = EpochStarts([2, 5, 7])
    pieces = []
    for begin, end, change in ((0, 4, (0, 1, 3)), (5, 8, (0, 1, 0))):
        inside = whole.inside(begin, end)
        inside.apply([change])
        pieces.append((begin, end, inside, end - begin + change[2] - 1))
    found = join_starts(whole, pieces)
    assert found.positions == [4, 6, 7]
    assert not any(found.joined)
