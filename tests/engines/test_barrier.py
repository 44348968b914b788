"""Barriers: reading all rows with little memory, and keys of their results."""

from __future__ import annotations

import json
import resource
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.engines.barrier import BarrierRows, KeyAssigner
from dovetail.engines.item_keys import as_tuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MEGABYTE = 1 << 20


def rows_of(*payloads: list[Any]) -> BarrierRows:
    starts = [sum(map(len, payloads[:number])) for number in range(len(payloads))]

    def load(number: int) -> tuple[range, list[Any], Any]:
        items = list(payloads[number])
        return range(starts[number], starts[number] + len(items)), items, lambda: None

    return BarrierRows(
        load, [(number, 0, len(items)) for number, items in enumerate(payloads)], lambda item: item is None
    )


def test_barrier_rows_are_a_sequence_that_can_be_read_repeatedly() -> None:
    rows = rows_of([1, 2], [3], [], [4, 5])
    assert list(rows) == list(rows) == [1, 2, 3, 4, 5]
    assert (len(rows), rows[0], rows[-1], rows[1:3]) == (5, 1, 5, [2, 3])
    with pytest.raises(IndexError, match="row 5 of 5"):
        rows[5]


def test_rows_that_are_no_items_are_skipped_and_recorded_with_their_position() -> None:
    rows = rows_of([1, None], [None, 4])
    assert list(rows) == [1, 4]
    assert rows.skipped == {1: None, 2: None}
    assert len(rows) == 2


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=60))
def test_keys_increase_and_none_is_a_prefix_of_another(steps: list[tuple[int, bool]]) -> None:
    numbering = KeyAssigner()
    found = []
    for number, (at, same) in enumerate(steps):
        found += numbering.add(at, at, number, same=same)
    found += numbering.flush()
    assert [item for _, item in found] == list(range(len(steps)))
    keys = [as_tuple(key) for key, _ in found]
    assert all(one < other and other[: len(one)] != one for one, other in pairwise(keys))


def test_a_row_yielded_in_place_keeps_its_key() -> None:
    numbering = KeyAssigner()
    found = [*numbering.add(3, 30, "a", same=True), *numbering.add(5, 50, "b", same=True), *numbering.flush()]
    assert found == [(30, "a"), (50, "b")]


def every_other(rows: Any) -> Iterator[Any]:
    """Reads the rows twice and drops odd numbers."""
    count = sum(1 for _ in rows)
    assert count == len(rows)
    for row in rows:
        if row["x"] % 2 == 0:
            yield row


def fails_at_seven(row: dict[str, int]) -> dict[str, int]:
    if row["x"] == 14:
        raise ValueError("fourteen")
    return row


@pytest.mark.usefixtures("in_process")
def test_after_a_barrier_that_drops_rows_an_error_has_the_number_of_the_row(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f'{{"x": {number}}}\n' for number in range(40)))
    stages = [
        dt.Stage("whole", every_other, barrier=True),
        dt.Stage("then", dt.each(fails_at_seven), on_error="skip", retries=0),
    ]
    run = dt.run(dt.Pipeline(stages), str(source), ordered=True, progress=False, run_dir=str(tmp_path / "run"))
    assert [row["x"] for row in run] == [number for number in range(0, 40, 2) if number != 14]
    errors = [
        json.loads(line) for path in (tmp_path / "run/errors").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    assert [error["key"] for error in errors] == [[14]]


def heavy(number: int) -> dict[str, Any]:
    return {"x": number, "text": str(number % 10) * MEGABYTE}


def peak(rows: Any) -> Iterator[Any]:
    for _ in rows:
        pass
    for row in rows:
        if row["x"] % 2 == 0:
            yield row
    yield {"x": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "text": ""}


def length(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": row["x"], "size": len(row["text"])}


@pytest.mark.usefixtures("by_value")
def test_a_barrier_over_more_data_than_memory_uses_little_memory(tmp_path: Path) -> None:
    stages = [
        dt.Stage("make", dt.each(heavy)),
        dt.Stage("whole", peak, barrier=True),
        dt.Stage("then", dt.each(length)),
    ]
    found = list(dt.run(dt.Pipeline(stages), range(200), ordered=True, progress=False, run_dir=str(tmp_path / "run")))
    assert len(found) == 101
    assert found[-1]["x"] < 130, "megabytes of the barrier's worker, over 200 MB of input"


def with_a_set(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": {1} if row["x"] == 6 else row["x"]}


def everything(rows: Any) -> Iterator[Any]:
    yield from rows


@pytest.mark.usefixtures("in_process")
def test_a_result_of_a_barrier_that_cannot_be_written_fails_one_row(tmp_path: Path) -> None:
    stages = [
        dt.Stage("make", dt.each(with_a_set)),
        dt.Stage("whole", everything, barrier=True),
    ]
    sink, rows = tmp_path / "out.jsonl", [{"x": number} for number in range(20)]
    finished = dt.run(dt.Pipeline(stages), rows, sink=str(sink), progress=False, run_dir=str(tmp_path / "run")).wait()
    assert (finished.status, finished.failed) == ("finished", 1)
    assert sorted(json.loads(line)["x"] for line in sink.read_text().splitlines()) == [*range(6), *range(7, 20)]


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    row["text"] += row["text"]
    return row


def raises_for_some(row: dict[str, Any]) -> dict[str, Any]:
    if row["x"] % 10 == 5:
        raise ValueError("five")
    return row


@pytest.mark.usefixtures("in_process")
def test_rows_modified_in_place_are_modified_once_next_to_blank_and_failing_rows(tmp_path: Path) -> None:
    """A unit in which a call failed is run again with unmodified rows."""
    source = tmp_path / "rows.jsonl"
    lines = [f'{{"x": {number}, "text": "a"}}\n' + ("\n" if number % 7 == 0 else "") for number in range(100)]
    source.write_text("".join(lines))
    skip: dict[str, Any] = {"on_error": "skip", "retries": 1}
    stages = [dt.Stage("double", dt.each(doubled), **skip), dt.Stage("raises", dt.each(raises_for_some), **skip)]
    found = list(dt.run(dt.Pipeline(stages), str(source), progress=False, run_dir=str(tmp_path / "run")))
    assert {row["text"] for row in found} == {"aa"}
    assert len(found) == 90
