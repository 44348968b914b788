"""Replay of a recorded run: same commands, or the first difference."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.control.commands import Command, Note, Pull, RunBatches
from dovetail.control.events import BatchesDone, Event, ItemsArrived
from dovetail.control.payload import Segment
from dovetail.errors import ConfigError
from dovetail.observe.replay import REPLAY_VERSION, ReplayRecorder, replay

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Echo:
    """Sends each segment that arrives to worker 1, in batches of a given size; odd from a given step on."""

    def __init__(self, batch_size: int, odd_from: int = 1 << 30) -> None:
        self.batch_size = batch_size
        self.odd_from = odd_from
        self.steps = 0

    @property
    def done(self) -> bool:
        return False

    def wake_at(self) -> float | None:
        return None

    def step(self, now: float, events: Sequence[Event]) -> list[Command]:
        self.steps += 1
        made: list[Command] = [Note("decision", "at", {"now": now, "pair": (1, {2: 3})})]
        for event in events:
            if isinstance(event, ItemsArrived):
                size = self.batch_size + (self.steps > self.odd_from)
                parts = [(segment, 0, segment.items) for segment in event.segments]
                made.append(RunBatches(self.steps, 1, "a", parts, 8, size, 8))
        return made if len(made) > 1 else [Pull(0, 8)]


def recording(path: Path, steps: int = 10) -> Path:
    controller = Echo(4)
    written = ReplayRecorder(path, {"batch_size": 4})
    for step in range(steps):
        events: list[Event] = [ItemsArrived(step, [Segment(step, 8, 80, "n", ref=object())])] if step % 2 else []
        events.append(BatchesDone(1, step, [], 0.1))
        written.on_step(step / 10, events, controller.step(step / 10, events))
    written.close(1.0)
    return path


def again(header: dict[str, Any]) -> Echo:
    return Echo(header["batch_size"])


def test_the_same_controller_decides_the_same(tmp_path: Path) -> None:
    found = replay(recording(tmp_path / "replay.log"), again)
    assert found.is_same
    assert found.steps == 10
    assert found.commands == 15
    assert found.header == {"batch_size": 4}


def test_the_first_difference_is_shown_with_both_sides(tmp_path: Path) -> None:
    found = replay(recording(tmp_path / "replay.log"), lambda header: Echo(header["batch_size"], odd_from=5))
    assert not found.is_same
    assert found.difference is not None
    assert (found.difference.step, found.difference.now) == (5, 0.5)
    head, then, now = found.difference.lines()
    assert head == "step 5 at 0.5 s, command 1 of 2 then, 2 now"
    assert '"batch_size": 4' in then
    assert '"batch_size": 5' in now


def test_a_command_more_or_less_is_a_difference(tmp_path: Path) -> None:
    class Silent(Echo):
        def step(self, now: float, events: Sequence[Event]) -> list[Command]:
            return super().step(now, events)[:1]

    found = replay(recording(tmp_path / "replay.log"), lambda header: Silent(4))
    assert found.difference is not None
    assert found.difference.lines()[2] == "  now   nothing"


def test_a_recording_torn_at_any_byte_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    path = recording(tmp_path / "replay.log", steps=4)
    whole = path.read_bytes()
    first = whole.index(b"\n")
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        found = replay(path, again)
        assert found.is_same
        assert found.steps in (whole[:cut].count(b"\n") - 1, whole[:cut].count(b"\n"))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"version": 9, "header": {}}\n', "\xff"])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "replay.log").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="DT305"):
        replay(tmp_path / "replay.log", again)
    with pytest.raises(ConfigError, match="DT305"):
        replay(tmp_path / "missing.log", again)


def test_a_recording_of_another_format_version_is_refused_and_both_versions_are_named(tmp_path: Path) -> None:
    path = recording(tmp_path / "replay.log")
    path.write_text(path.read_text().replace(f'"version":{REPLAY_VERSION}', f'"version":{REPLAY_VERSION - 1}', 1))
    made: list[dict[str, Any]] = []

    def never(header: dict[str, Any]) -> Echo:
        made.append(header)
        return Echo(4)

    with pytest.raises(ConfigError, match="DT305") as refused:
        replay(path, never)
    text = str(refused.value)
    assert "recording format version 1" in text
    assert "replays only version 2" in text
    assert "record the run again" in text
    assert made == []


def test_a_missing_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DT303"):
        ReplayRecorder(tmp_path / "no" / "replay.log", {})


def test_a_step_is_one_line_of_json(tmp_path: Path) -> None:
    lines = recording(tmp_path / "replay.log").read_text().splitlines()
    assert len(lines) == 11
    assert json.loads(lines[2])[0] == 0.1
