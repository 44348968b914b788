"""Ordered output equals the sorted rows, however keys are distributed over pieces."""

from __future__ import annotations

import random
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sink_aids import opened, rows_of, tear, through_log, writers
from dovetail.control.payload import PartFileRange
from dovetail.data.writers.piece_merge import decode_keys, encode_keys, merge_in_order


def as_tuple(key: Any) -> tuple[int, ...]:
    return key if isinstance(key, tuple) else (key,)


@st.composite
def dealt(draw: st.DrawFn) -> tuple[list[Any], list[list[Any]]]:
    """Keys, no one the beginning of another, and how they are dealt to pieces."""
    keys: list[Any] = []
    for number in range(draw(st.integers(1, 30))):
        kind = draw(st.sampled_from(["plain", "plain", "children", "deep", "dropped"]))
        if kind == "plain":
            keys.append(number)
        elif kind == "children":
            keys += [(number, child) for child in range(draw(st.integers(1, 4)))]
        elif kind == "deep":
            keys += [(number, 0, child) for child in range(2)] + [(number, 1)]
    if not keys:
        keys = [0]
    owner = draw(st.lists(st.integers(0, 5), min_size=len(keys), max_size=len(keys)))
    pieces = [[key for key, its in zip(keys, owner, strict=True) if its == number] for number in range(6)]
    return keys, [draw(st.permutations(piece)) for piece in pieces if piece]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@settings(max_examples=settings().max_examples // 3)  # each writes files
@given(case=dealt(), seed=st.integers(0, 1000))
def test_ordered_output_is_the_sorted_rows(kind: str, case: tuple[list[Any], list[list[Any]]], seed: int) -> None:
    keys, pieces = case
    with tempfile.TemporaryDirectory() as folder:
        target = opened(Path(folder) / f"x.{kind}", ordered=True)
        workers = writers(target, 3)
        chance = random.Random(seed)
        chance.shuffle(pieces)
        made = [chance.choice(workers).write(some, [{"k": f"{as_tuple(key)}\n"} for key in some]) for some in pieces]
        for worker in workers:
            worker.end()
        tear(target)
        target.finish(through_log(made))
        found = [row["k"] for row in rows_of(Path(folder) / f"x.{kind}")]
        target.close()
    assert found == [f"{as_tuple(key)}\n" for key in sorted(keys, key=as_tuple)]


@given(st.lists(st.one_of(st.integers(0, 2**60), st.tuples(st.integers(0, 9), st.integers(0, 2**60))), min_size=1))
def test_keys_are_reported_unchanged(keys: list[Any]) -> None:
    first, last, encoded, order = encode_keys(keys)
    in_their_order = [keys[at] for at in order] if order is not None else keys
    expected = sorted(map(as_tuple, keys))
    assert [as_tuple(key) for key in in_their_order] == expected
    assert (tuple(first), tuple(last)) == (expected[0], expected[-1])
    if encoded:
        assert [as_tuple(key) for key in decode_keys(encoded)] == expected
    else:
        assert [(number,) for number in range(first[0], last[0] + 1)] == expected


def test_a_range_costs_nothing() -> None:
    assert encode_keys(range(5, 9)) == ([5], [8], b"", None)


def test_pieces_that_do_not_overlap_are_not_opened() -> None:
    pieces = [PartFileRange("w", 0, 1, 3, [at], [at + 2], [5, 5]) for at in (9, 0, 3, 6)]

    def fail(piece: PartFileRange) -> bytes:
        raise AssertionError(piece)

    found = [(opened.piece.first, start, stop) for opened, start, stop in merge_in_order(pieces, fail)]
    assert found == [([0], 0, 3), ([3], 0, 3), ([6], 0, 3), ([9], 0, 3)]


def test_the_same_key_in_two_pieces_loses_nothing(tmp_path: Path) -> None:
    """An item that took two ways through a pipeline comes out twice, with one key."""
    target = opened(tmp_path / "x.csv", ordered=True)
    one, other = writers(target, 2)
    pieces = [one.write(range(3), [{"a": f"one\n{at}"} for at in range(3)])]
    pieces.append(other.write(range(3), [{"a": f"other\n{at}"} for at in range(3)]))
    target.finish(through_log(pieces))
    found = [row["a"].split("\n") for row in rows_of(tmp_path / "x.csv")]
    assert [number for _, number in found] == ["0", "0", "1", "1", "2", "2"]
    assert sorted(found) == [[who, str(at)] for who in ("one", "other") for at in range(3)]


@pytest.mark.long
def test_a_million_pieces_in_any_order_need_little_memory() -> None:
    chance = random.Random(1)
    numbers = list(range(0, 3_000_000, 3))
    chance.shuffle(numbers)
    pieces = [PartFileRange("w", at, 1, 3, [at], [at + 2]) for at in numbers]
    tracemalloc.start()
    last = -1
    for opened_piece, _, _ in merge_in_order(pieces, lambda piece: b""):
        assert opened_piece.piece.first[0] > last
        last = opened_piece.piece.first[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert last == 2_999_997
    assert peak < 100 << 20
