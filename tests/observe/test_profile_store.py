"""Stored measurements of stages: found again, merged, bounded, and harmless if unreadable."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dovetail.observe import profile_store
from dovetail.observe.profile_store import (
    ProfileKey,
    StageMeasurement,
    blend,
    delete_oldest,
    profiles_folder,
    read_profile,
    write_profiles,
)

if TYPE_CHECKING:
    from pathlib import Path

KEY = ProfileKey("c0de", batch_size=16, slots=1, cpu_milli=1000, gpu="", card="")
GOOD = StageMeasurement(seconds_per_item=0.01, returns=2.0, items=1000, seconds=10.0, setup_s=1.5, peak_bytes=10**8)
LITTLE = StageMeasurement(seconds_per_item=9.0, returns=7.0, items=3, seconds=27.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_what_was_written_is_read_for_exactly_that_key() -> None:
    assert read_profile(KEY) is None
    assert write_profiles({KEY: GOOD}, wall=100.0) == ""
    assert read_profile(KEY) == replace(GOOD, when=100.0)
    others = [
        replace(KEY, code="other"),
        replace(KEY, batch_size=8),
        replace(KEY, slots=2),
        replace(KEY, cpu_milli=500),
        replace(KEY, gpu="1 x (250 0)", card="L40S"),
        replace(KEY, reads="jsonl"),
        replace(KEY, writes="jsonl"),
    ]
    assert [read_profile(key) for key in others] == [None] * len(others)


def test_later_runs_count_more() -> None:
    first, second = GOOD, replace(GOOD, seconds_per_item=0.02, returns=3.0, setup_s=2.5, peak_bytes=10**7, when=5.0)
    both = blend(first, second)
    assert 0.015 < both.seconds_per_item < 0.02
    assert 2.5 < both.returns < 3
    assert both.setup_s is not None
    assert 2 < both.setup_s < 2.5
    assert both.peak_bytes == 9 * 10**7
    assert (both.runs, both.items, both.seconds, both.when) == (2, 1250, 12.5, 5.0)


def test_a_change_of_speed_is_learned_in_a_few_runs() -> None:
    known = GOOD
    for _ in range(4):
        known = blend(known, replace(GOOD, seconds_per_item=0.05))
    assert known.seconds_per_item == pytest.approx(0.05, rel=0.01)


def test_little_does_not_take_the_place_of_much() -> None:
    assert blend(GOOD, LITTLE) == GOOD
    assert blend(GOOD, replace(GOOD, items=10**6, seconds=0.01)) == GOOD
    assert blend(LITTLE, GOOD) == GOOD
    assert blend(None, LITTLE) == LITTLE


def test_a_short_run_changes_little() -> None:
    """After `--limit 10` of a stage that seemed to be 10 times slower, the next prediction is nearly the same."""
    short = blend(GOOD, replace(GOOD, items=10, seconds=1.0, seconds_per_item=0.1))
    assert 0.01 < short.seconds_per_item < 0.0111
    assert short.items > 800


def test_many_short_runs_change_as_much_as_a_long_one() -> None:
    known = GOOD
    for _ in range(100):
        known = blend(known, replace(GOOD, items=20, seconds=1.0, seconds_per_item=0.05))
    assert known.seconds_per_item == pytest.approx(0.05, rel=0.05)


def test_a_probe_replaces_earlier_measurements() -> None:
    probed = replace(LITTLE, probed=True)
    assert blend(GOOD, probed) == probed
    assert blend(probed, GOOD) == GOOD


def test_profiles_of_two_runs_are_merged() -> None:
    bare = replace(GOOD, setup_s=None, peak_bytes=None)
    assert (blend(bare, GOOD).setup_s, blend(GOOD, bare).setup_s) == (1.5, 1.5)
    assert blend(bare, bare).peak_bytes is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"version":1}',
        "\x00\xff",
        "VERSION 99",
        "seconds_per_item 0",
        "seconds_per_item -1",
        "seconds_per_item NaN",
        'seconds_per_item "fast"',
        "items null",
        "items true",
        "when Infinity",
        "key null",
    ],
)
def test_what_cannot_be_read_was_not_measured_and_is_replaced(text: str) -> None:
    write_profiles({KEY: GOOD})
    file = profiles_folder() / KEY.file
    name, _, value = text.partition(" ")
    if value:
        data = json.loads(file.read_text())
        assert name.lower() in data
        text = json.dumps(data | {name.lower(): json.loads(value)})
    file.write_text(text, encoding="latin-1")
    assert read_profile(KEY) is None
    assert write_profiles({KEY: GOOD}, wall=1.0) == ""
    assert read_profile(KEY) == replace(GOOD, when=1.0)


def test_the_oldest_are_forgotten_and_what_is_not_ours_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_store, "MAX_FILES", 5)
    folder = home / "profiles"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    keys = [replace(KEY, code=str(number)) for number in range(9)]
    for number, key in enumerate(keys):
        write_profiles({key: GOOD})
        os.utime(folder / key.file, (number, number))
    delete_oldest(folder, 5)
    assert [key.code for key in keys if read_profile(key)] == ["4", "5", "6", "7", "8"]
    assert (folder / "notes.txt").read_text() == "mine"


def test_many_writers_at_once_leave_whole_files(home: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: write_profiles({replace(KEY, code=str(n % 3)): GOOD}), range(60)))
    assert all(read_profile(replace(KEY, code=str(number))) is not None for number in range(3))
    assert [path.name for path in (home / "profiles").iterdir() if path.suffix != ".json"] == []


def test_an_unusable_home_does_not_disturb_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("DOVETAIL_HOME", str(file))
    assert "could not be saved" in write_profiles({KEY: GOOD})
    assert read_profile(KEY) is None

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(profile_store, "write_atomically", refuse)
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "locked"))
    assert write_profiles({KEY: GOOD}) == ""


def test_the_rate_of_the_source_is_forgotten_only_by_a_run_that_was_long_enough_to_measure_it() -> None:
    slow = StageMeasurement(seconds_per_item=0.01, returns=1.0, items=1000, seconds=10.0, source_rate=50.0)
    short = replace(slow, items=20, seconds=0.2, source_rate=None)
    assert blend(slow, short).source_rate == 50.0
    assert blend(slow, replace(short, items=1000, seconds=10.0)).source_rate is None
    assert blend(slow, replace(short, source_rate=70.0)).source_rate == 70.0
