"""Observers in the control loop: they see a whole run and cannot end it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dovetail.control.loop import run_loop
from dovetail.observe.history import RunHistory
from dovetail.observe.progress import ProgressDisplay
from dovetail.observe.replay import ReplayRecorder, replay
from observe.made import STORY, Clock, recorder, run_at
from observe.test_progress import Screen

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

    from dovetail.control.commands import Command, DataCommand, EngineCommand
    from dovetail.control.engine import Observer
    from dovetail.control.events import Event


class ScriptedRun:
    """Controller and engine that replay the events of `made`, second by second."""

    def __init__(self) -> None:
        self.second = 0

    @property
    def done(self) -> bool:
        return self.second > 110

    def wake_at(self) -> float | None:
        return None

    def step(self, now: float, events: Sequence[Event]) -> list[Command]:
        self.second = int(now) + 1
        return STORY.get(int(now), ([], []))[1]

    def now(self) -> float:
        return float(self.second)

    def poll(self, timeout_s: float | None) -> list[Event]:
        return STORY.get(self.second, ([], []))[0]

    def submit(self, commands: Sequence[EngineCommand | DataCommand]) -> None:
        """Ignore the commands."""

    def close(self) -> None: ...

    def post(self, event: Event) -> None: ...

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Any: ...

    def call_with(self, *args: Any, **named: Any) -> Any: ...


def test_a_whole_run_is_recorded_shown_and_replayed(tmp_path: Path) -> None:
    scripted, screen, clock = ScriptedRun(), Screen(False), Clock()
    path = tmp_path / "r"
    watching: list[Observer] = [
        recorder(path),
        ReplayRecorder(path / "replay.log", {"pipeline": "video"}),
        ProgressDisplay(run_at, stream=screen, wall=lambda: clock.now + scripted.second),
    ]
    assert run_loop(scripted, scripted, scripted, watching) == []
    history = RunHistory.load(path)
    assert (history.status(), history.run["finished"], len(history.worker_lifetimes)) == ("finished", 1000, 3)
    assert "1000 of 1000" in screen.getvalue()
    found = replay(path / "replay.log", lambda header: ScriptedRun())
    assert found.is_same
    assert found.steps == 111


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = ScriptedRun()
    written = recorder(tmp_path / "r")

    def full(*_: object) -> None:
        if scripted.second > 50:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(written._journal, "flush", full)
    monkeypatch.setattr(written, "_wall", lambda: Clock().now + 10 * scripted.second)
    ((dropped, error),) = run_loop(scripted, scripted, scripted, [written])
    assert dropped is written
    assert isinstance(error, OSError)
    assert scripted.done
    written.close(110.0)
    assert json.loads((tmp_path / "r" / "run.json").read_text())["status"] == "finished"
