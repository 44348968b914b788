"""Runs from files into files: killed workers, many runs, memory of the driver, Ctrl-C, contents of the run folder."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

import dovetail as dt
from runtime.aids import Script, descriptors, kill_one, losses, numbers_in, rows_in, run_of, say_when_waiting
from stage_functions import same
from waiting import LONG, until

pytestmark = pytest.mark.time_limit(1200 if LONG else 200)


ROWS = 3000
PAD = 2000


SAME = dt.Stage("same", same, batch_size=4)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("kind", "ordered"), [("jsonl", True), ("jsonl", False), ("parquet", True)])
@pytest.mark.processes
def test_killed_workers_write_nothing_twice(kind: str, ordered: bool, tmp_path: Path) -> None:
    count, kills = (20_000, 20) if LONG else (1500, 2 if kind == "parquet" else 4)
    source, out = rows_in(tmp_path / "in.jsonl", count, 10), tmp_path / f"out.{kind}"
    allowed, calls = tmp_path / "allowed", tmp_path / "calls"
    allowed.touch()
    calls.touch()

    class Paced:
        """Limits the number of calls, so that the run lasts until the kill."""

        def __call__(self, rows: list[Any]) -> list[Any]:
            with calls.open("ab") as file:
                file.write(b".")
                number = file.tell()
            until(lambda: number <= allowed.stat().st_size, "it may continue")
            return [row for row in rows for _ in range(row["i"] % 3)]

    stages = [dt.Stage("same", same, fuse=False), dt.Stage("paced", Paced, workers=2, fuse=False)]
    run = run_of(*stages, source=source, sink=out, ordered=ordered, cluster="1x(4cpu, 8GB)")
    dice = Random(7)
    for turn in range(kills):
        os.truncate(allowed, count * turn // kills)
        # far enough apart that no item is charged three times
        until(lambda: calls.stat().st_size > allowed.stat().st_size, "it is as far as it may")
        kill_one(run, dice=dice)
    os.truncate(allowed, 1000 * count)
    run.wait()
    assert losses(run) > 0
    found = numbers_in(out)
    assert run.errors == []
    expected = [number for number in range(count) for _ in range(number % 3)]
    assert (found if ordered else sorted(found)) == expected


@pytest.mark.processes
def test_many_runs_in_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    source = rows_in(tmp_path / "in.jsonl", 50, 10)
    out = tmp_path / "out" / "x.jsonl"

    def once() -> None:
        run_of(SAME, source=source, sink=out, progress=False, cluster="1x(1cpu, 8GB)").wait()

    others = set(threading.enumerate())
    once()
    once()
    until(lambda: not _ours(others), f"threads are gone: {_ours(others)}")
    before = sorted(descriptors())
    for _ in range(50 if LONG else 3):
        once()
    until(lambda: not _ours(others), f"threads are gone: {_ours(others)}")
    until(lambda: len(descriptors()) <= len(before), f"descriptors are closed: {before} {descriptors()}")
    assert names_in(out.parent) == ["x.jsonl"]
    assert len(numbers_in(out)) == 50


def _ours(others: set[threading.Thread]) -> list[str]:
    """Threads of runs, except for those that are not of these runs."""
    return [one.name for one in threading.enumerate() if one not in others and one.name.startswith("dovetail")]


@pytest.mark.processes
def test_the_folder_of_a_run_holds_what_is_documented(tmp_path: Path) -> None:
    source = rows_in(tmp_path / "in.jsonl", 50, 10)
    run = run_of(SAME, source=source, sink=tmp_path / "out.jsonl", run_dir=tmp_path / "run")
    run.wait()
    documented = {"run.json", "plan.json", "events.jsonl", "errors", "logs", "commit.log", "control.sock", "spool"}
    assert {path.name for path in run.folder.iterdir()} <= documented | {"lock"}
    assert not any((run.folder / "spool").glob("*"))


@pytest.mark.processes
def test_memory_of_the_driver_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    rows = 300_000 if LONG else 60_000
    source, out = rows_in(tmp_path / "in.jsonl", rows, 10), tmp_path / "out.jsonl"
    small = rows_in(tmp_path / "small.jsonl", 100, 10)
    stage = dt.Stage("same", same, batch_size=50)
    run_of(stage, source=small, sink=out).wait()
    before = _rss()
    run = run_of(stage, source=source, sink=out)
    most = before

    def over() -> bool:
        nonlocal most
        most = max(most, _rss())
        return run.done

    until(over, "the run is over")
    run.wait()
    assert len(numbers_in(out)) == rows
    assert most - before < 40 << 20, f"{(most - before) >> 20} MB more"


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_runs_at_the_same_time_into_different_sinks(tmp_path: Path) -> None:
    source = rows_in(tmp_path / "in.jsonl", 400, 10)
    stage = dt.Stage("same", same, workers=1)
    runs = [run_of(stage, source=source, sink=tmp_path / f"{name}.jsonl", cluster="1x(2cpu, 8GB)") for name in "ab"]
    for run in runs:
        run.wait()
    for name in "ab":
        assert sorted(numbers_in(tmp_path / f"{name}.jsonl")) == list(range(400))


INTERRUPTED = """
import json, os, sys, time
import dovetail as dt
def slow(rows):
    while rows[-1]["i"] >= 2000 and not os.path.exists("go"):
        time.sleep(0.002)
    time.sleep(0.002)
    return rows
where = {"resume": "run"} if "again" in os.environ else {"run_dir": "run"}
pipeline = dt.Pipeline([dt.Stage("slow", slow)])
run = dt.run(pipeline, "in.jsonl", sink="out/out.jsonl", cluster="1x(2cpu, 8GB)", **where)
SAYS
print("status", run.wait().status)
""".replace("SAYS", say_when_waiting("it waits"))


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_script_that_writes_a_file(times: int, tmp_path: Path) -> None:
    count = 4000
    rows_in(tmp_path / "in.jsonl", count, 10)
    log, go = tmp_path / "run" / "commit.log", tmp_path / "go"
    with Script(tmp_path, INTERRUPTED, warm=True) as script:
        until(lambda: log.exists() and log.read_bytes().count(b'"wave"') > 1, "something is committed")
        script.says("it waits")
        script.kill(signal.SIGINT)
        script.says("stopping at the next epoch")
        if times == 2:
            script.kill(signal.SIGINT)
        else:
            go.touch()
        code = script.ended()
        script.all_gone()
        printed = script.output
    if times == 1:
        assert (code, "status drained" in printed) == (0, True), printed
    assert not (tmp_path / "out" / "out.jsonl").exists()
    go.touch()
    with Script(tmp_path, INTERRUPTED, warm=True, again="yes") as script:
        assert "status finished" in script.finish()
    assert sorted(numbers_in(tmp_path / "out" / "out.jsonl")) == list(range(count))
    assert names_in(tmp_path / "out") == ["out.jsonl"]
