"""`dovetail rm`."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from cli.jobs import CLUSTER, CommandFolder
from command import run_command
from dovetail.machine.processes import process_start_time
from dovetail.observe.run_folder import RunFolder
from dovetail.runtime.run_lock import RunLock

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

DAY_S = 86_400


def stored_run(home: Path, day: int, *, status: str = "finished", **header: Any) -> str:
    """A run that ended this many days ago."""
    folder = home / "runs" / f"202601{30 - day:02d}-000000-aaa{day}-video"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "1.log").write_text("some output\n" * 1000)
    ended = time.time() - day * DAY_S
    about = {"name": "video", "status": status, "started": ended - 60, "ended": ended} | header
    (folder / "run.json").write_text(json.dumps(about))
    return folder.name


@pytest.fixture
def ids(tmp_path: Path) -> list[str]:
    """Five runs, the latest first."""
    return [stored_run(tmp_path, day, status="failed" if day == 3 else "finished") for day in (1, 2, 3, 8, 9)]


def rm(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("rm", *arguments, DOVETAIL_HOME=str(home))


def remaining_runs(home: Path) -> list[str]:
    return sorted((path.name for path in (home / "runs").iterdir()), reverse=True)


def test_named_runs_are_removed_without_a_question(tmp_path: Path, ids: list[str]) -> None:
    done = rm(tmp_path, "aaa3", ids[4], ids[4])
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["run", ids[2], ids[4]]
    assert "removed 2 runs, " in done.stderr
    assert remaining_runs(tmp_path) == [ids[0], ids[1], ids[3]]


@pytest.mark.parametrize(
    ("options", "removed"),
    [
        (("--older-than", "7d"), [3, 4]),
        (("--keep", "2"), [2, 3, 4]),
        (("--older-than", "36h", "--keep", "4"), [4]),
        (("--status", "failed"), [2]),
        (("--status", "finished", "--keep", "1"), [1, 3, 4]),
        (("--name", "audio"), []),
        (("--kind", "pipeline", "--older-than", "8d12h"), [4]),
    ],
)
def test_runs_are_selected_by_options(
    tmp_path: Path, ids: list[str], options: tuple[str, ...], removed: list[int]
) -> None:
    expected = [ids[number] for number in removed]
    for way in ("--dry-run", "--yes"):
        data = json.loads(rm(tmp_path, *options, way, "--json").stdout)
        assert [entry["id"] for entry in data["removed"]] == expected
        assert data["bytes"] == sum(entry["bytes"] for entry in data["removed"])
        assert all(entry["bytes"] >= 12_000 for entry in data["removed"])
        assert remaining_runs(tmp_path) == (ids if way == "--dry-run" else [run for run in ids if run not in expected])


def test_without_a_terminal_options_need_yes(tmp_path: Path, ids: list[str]) -> None:
    done = rm(tmp_path, "--keep", "1")
    assert done.returncode == 2
    assert "DT307" in done.stderr
    assert "this removes 4 runs" in done.stderr
    assert remaining_runs(tmp_path) == ids


@pytest.mark.parametrize(("typed", "code"), [("n\n", 130), ("", 130), ("y\n", 0)])
def test_in_a_terminal_options_are_confirmed(
    tmp_path: Path, ids: list[str], monkeypatch: pytest.MonkeyPatch, typed: str, code: int
) -> None:
    monkeypatch.setattr("dovetail.cli.rm._is_interactive", lambda: True)
    done = run_command("rm", "--keep", "4", stdin=typed, DOVETAIL_HOME=str(tmp_path))
    assert done.returncode == code, done.stderr
    assert ids[4] in done.stderr
    assert "remove 1 run, " in done.stderr
    assert remaining_runs(tmp_path) == (ids[:4] if code == 0 else ids)


def test_a_running_run_is_never_removed(tmp_path: Path, ids: list[str]) -> None:
    alive = {"pid": os.getpid(), "pid_started": process_start_time(os.getpid()), "host": socket.gethostname()}
    running = stored_run(tmp_path, 20, status="running", **alive)
    refused = rm(tmp_path, ids[0], running, "nothing")
    assert refused.returncode == 2
    assert f"run {running} is running" in refused.stderr
    assert "there is no run 'nothing'" in refused.stderr
    assert remaining_runs(tmp_path) == [*ids, running]
    assert rm(tmp_path, "--keep", "0", "--yes").returncode == 0
    assert remaining_runs(tmp_path) == [running]


def test_a_run_that_was_resumed_meanwhile_stays(tmp_path: Path, ids: list[str]) -> None:
    lock = RunLock(RunFolder(tmp_path / "runs" / ids[0]))
    try:
        done = rm(tmp_path, ids[0], ids[1])
    finally:
        lock.release()
    assert done.returncode == 2
    assert f"run {ids[0]} was not removed: run {ids[0]} is still running" in done.stderr
    assert "removed 1 run, " in done.stderr
    assert (tmp_path / "runs" / ids[0] / "run.json").exists()


def test_other_files_in_a_folder_of_the_user_stay(tmp_path: Path) -> None:
    place = CommandFolder(tmp_path / "jobs")
    assert place.run("run", "p.yaml", *CLUSTER, "--run-dir", "mine").returncode == 0
    (place.folder / "mine" / "thesis.tex").write_text("mine")
    done = place.run("rm", "./mine")
    assert done.returncode == 0, done.stderr
    assert "note: 1 other file or folder in" in done.stderr
    assert [path.name for path in (place.folder / "mine").iterdir()] == ["thesis.tex"]
    assert len(place.result()) == 20  # the output stays


def test_unfinished_results_are_removed_with_their_run(tmp_path: Path) -> None:
    place = CommandFolder(tmp_path / "jobs")
    place.file("source: in.jsonl\nsink: out.jsonl", "double", "no_sevens", more=", batch_size: 1")
    assert place.run("run", "p.yaml", *CLUSTER).returncode == 1
    assert list(place.folder.glob(".out.jsonl.*.parts"))
    assert place.run("rm", "last").returncode == 0
    assert not list(place.folder.glob(".out.jsonl.*.parts"))
    assert place.runs() == []
