"""Samples: pieces of whole batches from all over a source."""

from __future__ import annotations

import json
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.data.sample import PIECES, Sample, SampledCursor, sample_starts, sampled_items
from dovetail.data.sources import open_source
from dovetail.runtime.probe import probe
from dovetail.runtime.stage_profiles import load_profiles

if TYPE_CHECKING:
    from pathlib import Path


@given(st.integers(1, 10_000), st.integers(1, 200))
def test_every_pass_covers_the_source_and_every_piece_is_inside_it(total: int, piece: int) -> None:
    starts = list(islice(sample_starts(total, piece), 1 + PIECES))
    gap = max(piece, total // PIECES)
    assert starts[0] == 0
    assert all(0 <= start <= max(0, total - piece) for start in starts)
    assert max(starts) >= max(0, total - piece - 2 * gap)


def test_a_sample_of_a_list_has_pieces_of_neighbours_from_all_over_it() -> None:
    found = sampled_items(range(1000), Sample(None, 55, 5))
    assert len(found) == 55
    assert all(found[at : at + 5] == list(range(found[at], found[at] + 5)) for at in range(0, 55, 5))
    assert [found[at] // 100 for at in range(5, 55, 5)] == list(range(10))
    assert sampled_items([3, 1, 2], Sample(None, 50, 5)) == [3, 1, 2]


def test_a_sample_does_not_miss_what_repeats_in_the_source() -> None:
    found = sampled_items(range(10_000), Sample(None, 1000, 5))
    assert any(item % 100 == 99 for item in found)


@pytest.mark.parametrize("rows", [0, 3, 1000])
def test_a_sample_of_a_file_is_read_from_all_over_it(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"n": number, "pad": "x" * 40}) + "\n" for number in range(rows)))
    cursor = open_source(str(path))
    assert cursor is not None
    sample = SampledCursor(cursor, 60, 6)
    taken, places = 0, []
    while (split := sample.take(4)) is not None:
        assert split is not None
        places.append(sample.place_of(taken, {}))
        taken = sample.row
    assert taken == min(rows, 60)
    lines = [int(place.rsplit(":", 1)[1]) for place in places]
    if rows == 1000:
        assert min(lines) <= 2
        assert max(lines) > 800


def slow_at_the_end(items: list[Any]) -> list[Any]:
    time.sleep(sum(0.004 if item["n"] >= 500 else 0.001 for item in items))
    return items


def test_a_probe_sees_rows_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(1000)))
    pipeline = dt.Pipeline([dt.Stage("slow", slow_at_the_end)])
    probed = probe(pipeline, str(path), 400)
    assert 50 <= probed.read <= 400
    (profile,) = load_profiles(pipeline, dt.Cluster.of("auto"), "jsonl").values()
    assert 1 / profile.rate > 0.002, "the first half takes 1 ms per row, the second 4 ms"
    assert profile.standard_error is not None
