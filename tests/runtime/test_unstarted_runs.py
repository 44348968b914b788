"""A run exists before anything else of it does: it is listed while it waits, and resumed after a kill before its start.

A kill is played by a copy of all files at that moment, which replaces what the aborted start left. Claims are left out:
their process is dead after a kill, and here it is not.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.data.commit_log import CommitLog
from dovetail.data.sinks import FileSink
from dovetail.observe.recorder import Recorder
from dovetail.observe.run_folder import create_run, find_run, list_runs, read_json_object
from dovetail.observe.run_status import run_status
from dovetail.runtime.run_removal import find_run_files, remove_run_files
from dovetail.runtime.sites import LocalSite

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("in_process")
ROWS = [{"n": n} for n in range(20)]
MOMENTS: dict[str, tuple[type, str, bool]] = {
    "waits for resources": (LocalSite, "admit", True),
    "before the sink is prepared": (FileSink, "prepare", True),
    "after the sink is prepared": (FileSink, "prepare", False),
    "before the engine starts": (LocalSite, "start_engine", True),
    "before the commit log": (CommitLog, "__init__", True),
    "before the commit log begins": (CommitLog, "begin", True),
    "after the commit log has begun": (CommitLog, "begin", False),
    "before the recorder": (Recorder, "__init__", True),
}


class Killed(BaseException):
    """Ends the start of a run."""


class RunFolder:
    """A folder with a home, a source and a sink."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder / "world", monkeypatch
        self.folder.mkdir()
        self._copy = folder / "copy"
        monkeypatch.setenv("DOVETAIL_HOME", str(self.folder / "home"))
        (self.folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def start(self, **more: Any) -> dt.Run:
        arguments: dict[str, Any] = {"sink": str(self.folder / "out.jsonl"), "ordered": True} | more
        return dt.run([dt.each(doubled)], str(self.folder / "in.jsonl"), cluster="1x(2cpu, 4GB)", **arguments)

    def kill(self, moment: str, look: Callable[[], None] = lambda: None, **more: Any) -> None:
        owner, method, before = MOMENTS[moment]
        real = getattr(owner, method)

        def killing(*args: Any, **named: Any) -> None:
            if not before:
                real(*args, **named)
            look()
            shutil.copytree(self.folder, self._copy, ignore=shutil.ignore_patterns("ledger.db"))
            raise Killed

        with self._monkeypatch.context() as patch:
            patch.setattr(owner, method, killing)
            with pytest.raises(Killed):
                self.start(**more)
        shutil.rmtree(self.folder)
        self._copy.rename(self.folder)

    def rows(self) -> list[dict[str, int]]:
        return [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]

    def parts(self) -> list[Path]:
        return list(self.folder.glob(".*.parts"))


def doubled(row: dict[str, int]) -> dict[str, int]:
    return {"n": 2 * row["n"]}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    return RunFolder(tmp_path, monkeypatch)


def test_a_run_that_waits_is_listed_and_has_nothing_but_its_header(world: RunFolder) -> None:
    def look() -> None:
        (run,) = list_runs()
        assert run_status(read_json_object(run.header), 0.0) == "running"
        assert sorted(path.name for path in run.path.iterdir()) == ["lock", "run.json"]
        assert world.parts() == []

    world.kill("waits for resources", look)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_was_killed_before_its_start_is_resumed(world: RunFolder, moment: str) -> None:
    world.kill(moment)
    (run,) = list_runs()
    assert run.is_resumable
    world.start(resume="last").wait()
    assert world.rows() == [{"n": 2 * row["n"]} for row in ROWS]
    assert (len(list_runs()), world.parts()) == (1, [])
    header = read_json_object(run.header)
    assert (header["status"], "unstarted" in header) == ("finished", False)


@pytest.mark.parametrize("moment", ["waits for resources", "after the sink is prepared"])
def test_a_run_that_was_killed_before_its_start_is_removed_with_its_part_files(world: RunFolder, moment: str) -> None:
    world.kill(moment)
    remove_run_files(find_run_files(find_run("last")))
    assert (list_runs(), world.parts()) == ([], [])


def test_results_that_were_added_meanwhile_are_kept_by_a_resume(world: RunFolder) -> None:
    out = world.folder / "out.jsonl"
    out.write_text('{"n": -2}\n')
    sink = dt.sink(str(out), exists="append")
    world.kill("after the sink is prepared", sink=sink)
    with out.open("a") as file:
        file.write('{"n": -1}\n')
    world.start(sink=sink, resume="last").wait()
    assert world.rows()[:3] == [{"n": -2}, {"n": -1}, {"n": 0}]
    assert len(world.rows()) == len(ROWS) + 2


def test_a_retry_that_was_killed_before_its_start_is_resumed_as_a_retry(world: RunFolder) -> None:
    fussy = dt.Pipeline([dt.Stage("fussy", dt.each(only_small), on_error="skip")])
    source, out = str(world.folder / "in.jsonl"), world.folder / "out.jsonl"
    first = dt.run(fussy, source, sink=str(out), cluster="1x(2cpu, 4GB)").wait()
    assert len(world.rows()) == 3
    relaxed = dt.Pipeline([dt.Stage("fussy", dt.each(doubled), on_error="skip")])
    world.start = lambda **more: dt.run(relaxed, **{"cluster": "1x(2cpu, 4GB)", **more})  # type: ignore[method-assign]
    world.kill("waits for resources", retry_errors=str(first.folder))
    world.start(resume="last").wait()
    assert len(world.rows()) == len(ROWS)


def only_small(row: dict[str, int]) -> dict[str, int]:
    if row["n"] > 2:
        raise ValueError("too large")
    return row


def test_a_run_without_a_sink_that_was_killed_before_its_start_cannot_be_resumed(world: RunFolder) -> None:
    world.kill("waits for resources", sink=None)
    with pytest.raises(dt.ConfigError, match="DT383"):
        world.start(resume="last")


def test_the_folder_of_a_run_that_was_killed_before_its_start_is_refused_with_the_resume(world: RunFolder) -> None:
    folder = world.folder / "mine"
    world.kill("waits for resources", run_dir=folder)
    with pytest.raises(dt.ConfigError, match="already contains a run") as caught:
        world.start(run_dir=folder)
    assert caught.value.problems[0].fix_texts[1] == f'dt.run(..., resume="{folder}") with the same arguments'


def test_a_folder_with_nothing_but_a_lock_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / ".run.json.4711.tmp").touch()
    assert create_run("x", tmp_path).path == tmp_path
