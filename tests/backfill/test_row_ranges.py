"""Arithmetic of parts and gaps of a row range."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.backfill.checkpoints import (
    MIN_PARTS_TO_MERGE,
    AttemptMark,
    BrokenMark,
    FragmentFiles,
    HangMark,
    Part,
    covering_parts,
    finished_file_name,
    parse_file_names,
    parts_to_merge,
    split_range,
    uncovered_ranges,
)
from dovetail.backfill.fatal_rows import first_suspect, narrowest_attempt

MOST = 60
numbers = st.integers(0, MOST)
some_parts = st.lists(st.tuples(numbers, numbers, st.integers(0, 100)), max_size=12).map(
    lambda found: [Part(min(a, b), max(a, b), size) for a, b, size in found]
)


def rows_of(ranges: list[tuple[int, int]]) -> set[int]:
    return {row for start, stop in ranges for row in range(start, stop)}


@given(some_parts, numbers, numbers)
def test_gaps_and_parts_add_up_to_the_range(parts: list[Part], one: int, other: int) -> None:
    start, stop = min(one, other), max(one, other)
    missing = uncovered_ranges(parts, start, stop)
    assert all(low < high for low, high in missing)
    assert missing == sorted(missing)
    covered = rows_of([(part.start, part.stop) for part in parts])
    assert rows_of(missing) == set(range(start, stop)) - covered
    assert sum(high - low for low, high in missing) == len(rows_of(missing))


@given(some_parts, numbers)
def test_covering_parts_have_every_row_once_or_there_is_a_gap(parts: list[Part], rows: int) -> None:
    chosen = covering_parts(parts, rows)
    if rows and uncovered_ranges(parts, 0, rows):
        assert chosen == []
        return
    taken = [row for _, start, stop in chosen for row in range(start, stop)]
    assert taken == list(range(rows))
    assert all(part.start <= start < stop <= part.stop for part, start, stop in chosen)


@given(some_parts, numbers, st.integers(0, 500))
def test_merging_keeps_the_covered_rows(parts: list[Part], end: int, most_bytes: int) -> None:
    small = parts_to_merge(parts, end, most_bytes)
    if not small:
        return
    assert len(small) >= MIN_PARTS_TO_MERGE
    assert sum(part.size_bytes for part in small) <= most_bytes
    assert all(before.stop == after.start for before, after in pairwise(small))
    assert small[-1].stop == end
    merged = [part for part in parts if part not in small] + [Part(small[0].start, small[-1].stop)]
    assert uncovered_ranges(merged, 0, MOST) == uncovered_ranges(parts, 0, MOST)


@given(st.integers(1, 40), st.integers(0, 200))
def test_many_adjacent_parts_are_merged_and_few_are_not(count: int, end: int) -> None:
    parts = [Part(at, at + 1, 1) for at in range(count)]
    assert bool(parts_to_merge(parts, count, 1000)) == (count >= MIN_PARTS_TO_MERGE)
    assert parts_to_merge(parts, count, 0) == []


@given(numbers, numbers, st.integers(-2, 20), st.integers(-2, 20))
def test_a_range_is_split_into_pieces_that_add_up_to_it(one: int, other: int, pieces: int, least: int) -> None:
    start, stop = min(one, other), max(one, other)
    found = split_range(start, stop, pieces, least)
    assert found[0][0] == start
    assert found[-1][1] == stop
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert len(found) <= max(1, pieces)
    if len(found) > 1:
        assert all(high - low >= least for low, high in found)


@given(st.lists(st.tuples(numbers, numbers, st.integers(1, 3)), max_size=8), numbers, numbers)
def test_the_narrowest_attempt_is_within_the_requested_range(
    found: list[tuple[int, int, int]], one: int, other: int
) -> None:
    start, stop = min(one, other), max(one, other)
    tried = [AttemptMark(min(a, b), max(a, b) + 1, "run", time) for a, b, time in found]
    suspect = narrowest_attempt(tried, start, stop)
    if suspect is None:
        assert not any(max(start, item.start) < min(stop, item.stop) for item in tried)
        return
    first, last, times = suspect
    assert start <= first < last <= stop
    assert times in {item.time for item in tried}


def test_a_suspect_before_a_narrower_one_is_computed_first() -> None:
    tried = [AttemptMark(0, 150, "run"), AttemptMark(10, 13, "run", 2), AttemptMark(0, 8, "run")]
    assert first_suspect(tried[:2], 0, 150) == (10, 13, 2)
    assert first_suspect(tried, 0, 150) == (0, 8, 1)
    assert first_suspect(tried, 8, 150) == (10, 13, 2)
    assert first_suspect(tried, 13, 150) == (13, 150, 1)


@given(st.integers(1, 5000), st.data())
def test_a_row_that_kills_workers_is_found_after_few_deaths(rows: int, data: st.DataObject) -> None:
    """The narrowest range that was tried, in sixteenths, after each death of a worker."""
    killer = data.draw(st.integers(0, rows - 1))
    tried = [AttemptMark(0, rows, "run")]
    deaths = 1
    while True:
        suspect = narrowest_attempt(tried, 0, rows)
        assert suspect is not None
        first, last, times = suspect
        assert first <= killer < last
        if last - first == 1 and times >= 2:
            break
        step = max(1, (last - first) // 16)
        at = first + (killer - first) // step * step
        tried.append(AttemptMark(at, min(last, at + step), "run", times + 1 if last - first == 1 else 1))
        deaths += 1
        assert deaths <= 8


NAMES = [
    Part(0, 10, 5).name,
    AttemptMark(3, 4, "run-1", 2).name,
    AttemptMark(3, 4, "a.b.c", 1).name,
    BrokenMark(3, 5, "a.b", 2).name,
    HangMark(7, "run-1").name,
    finished_file_name("dt-a-b-c.lance"),
    finished_file_name("dt-a-b-d.lance", "0123456789abcdef"),
]


def test_file_names_are_parsed_as_they_were_written() -> None:
    found = parse_file_names(NAMES)
    assert found.parts == [Part(0, 10, 5)]
    assert found.tried == [AttemptMark(3, 4, "run-1", 2), AttemptMark(3, 4, "a.b.c", 1)]
    assert found.broken == [BrokenMark(3, 5, "a.b", 2)]
    assert found.hung == [HangMark(7, "run-1")]
    assert found.finished == [("dt-a-b-c.lance", ""), ("dt-a-b-d.lance", "0123456789abcdef")]


@pytest.mark.parametrize(
    "name", ["", "p", "p.", "p.1.2", "p.1.2.x", "p.-1.2.3", "t.1.2", "t.a.2.1.run", "b.1.2.run", "x.", "q.1.2.3"]
)
def test_unknown_file_names_are_ignored(name: str) -> None:
    found = parse_file_names([name])
    assert found == FragmentFiles()
