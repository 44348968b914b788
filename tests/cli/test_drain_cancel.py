"""Stopping a run: Ctrl-C, SIGTERM, `dovetail drain` and `cancel`; and resuming it."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import termios
from array import array
from functools import partial
from typing import TYPE_CHECKING

import pytest

from cli.jobs import CLUSTER, CommandFolder
from runtime.aids import marked_pids
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 4_000


@pytest.fixture
def place(tmp_path: Path) -> CommandFolder:
    """A run of more than half a minute, so that it is still running when the test stops it."""
    made = CommandFolder(tmp_path / "a job")
    made.rows("in.jsonl", COUNT)
    made.file("source: in.jsonl\nsink: out.jsonl", "slowly")
    return made


def resumed_to_the_end(place: CommandFolder, run: Path) -> None:
    assert not (place.folder / "out.jsonl").exists()
    place.hurry()
    done = place.run("run", "--resume", run.name)
    assert done.returncode == 0, done.stderr
    assert sorted(row["n"] for row in place.result()) == list(range(COUNT))
    assert place.runs() == [run]


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")], ids=["int", "term"]
)
def test_a_signal_drains_and_the_run_can_be_resumed(place: CommandFolder, number: int, code: int, word: str) -> None:
    with place.started("run", "p.yaml", *CLUSTER) as started:
        run = started.goes()
        started.process.send_signal(number)
        assert started.ended() == code, started.err
        assert f"; {word} again stops now" in started.err
        assert f"dovetail run --resume {run.name}" in started.err
        assert "Traceback" not in started.err
    assert place.status() == "drained"
    resumed_to_the_end(place, run)


def test_a_second_signal_stops_now(place: CommandFolder) -> None:
    place.file("source: in.jsonl\nsink: out.jsonl", "held")  # which never finishes its work in flight
    with place.started("run", "p.yaml", *CLUSTER) as started:
        run = started.goes()
        until((place.folder / "held").exists, "the work that does not end has begun")
        started.process.send_signal(signal.SIGINT)
        until(lambda: "stopping at the next epoch" in started.err, "it drains")
        started.process.send_signal(signal.SIGINT)
        assert started.ended() == 130, started.err
        assert "Traceback" not in started.err
    until(lambda: not marked_pids(str(place.folder)), "no process is left")
    assert place.status() == "cancelled"
    assert not (run / "control.sock").exists()
    assert not (place.folder / "out.jsonl").exists()


def test_ctrl_c_before_it_begins_leaves_nothing(place: CommandFolder) -> None:
    (place.folder / "late.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    place.file("source: {run: 'late:rows'}\nsink: out.jsonl", "slowly")
    with place.started("run", "p.yaml", *CLUSTER) as started:
        until(lambda: "here" in started.out, "it imports the module")
        started.process.send_signal(signal.SIGINT)
        assert started.ended() == 130
        assert "interrupted" in started.err
        assert "Traceback" not in started.err
    assert place.runs() == []


def test_a_run_is_drained_from_another_process(place: CommandFolder) -> None:
    with place.started("run", "p.yaml", *CLUSTER) as started:
        run = started.goes()
        result = place.run("drain", "last", "--wait")
        assert (result.returncode, result.stdout) == (0, ""), result.stderr
        assert f"dovetail run --resume {run.name}" in result.stderr
        assert "is drained" in result.stderr
        assert started.ended() == 130, started.err
    header = json.loads((run / "run.json").read_text())
    assert header["status"] == "drained"
    over = place.run("drain", run.name)
    assert over.returncode == 2
    assert "is not running: it is drained" in over.stderr
    resumed_to_the_end(place, run)


def test_a_run_is_cancelled_from_another_process(place: CommandFolder) -> None:
    with place.started("run", "p.yaml", *CLUSTER) as started:
        run = started.goes()
        result = place.run("cancel", str(run))
        assert result.returncode == 0, result.stderr
        assert f"sent cancel to run {run.name}" in result.stderr
        assert started.ended() == 130, started.err
    assert place.status() == "cancelled"
    resumed_to_the_end(place, run)


def test_a_killed_run_is_lost_and_can_be_resumed(place: CommandFolder) -> None:
    with place.started("run", "p.yaml", *CLUSTER) as started:
        run = started.goes()
        started.process.kill()
        assert started.ended() == -signal.SIGKILL
    result = place.run("cancel", "last")
    assert result.returncode == 2
    assert "lost: its process exited" in result.stderr
    assert f"dovetail run --resume {run.name}" in result.stderr
    assert f"dovetail run --resume {run.name}" in place.run("status", "last").stderr
    resumed_to_the_end(place, run)


def test_a_run_resumes_from_any_folder_with_its_original_options(place: CommandFolder, tmp_path: Path) -> None:
    (place.folder / "sub").mkdir()
    place.file("name: mine", "slowly")
    typed = ("--source", "in.jsonl", "--set", "sink.path=sub/out.jsonl", "--set", "sink.ordered=true")
    with place.started("run", "p.yaml", *CLUSTER, *typed) as started:
        run = started.goes()
        started.process.kill()
        started.ended()
    place.hurry()
    done = place.run("run", "--resume", "last", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["n"] for row in place.result("sub/out.jsonl")] == list(range(COUNT))
    assert place.runs() == [run]
    again = place.run("run", "--resume", "last")
    assert again.returncode == 2
    assert "is already finished" in again.stderr


def test_a_reader_that_does_not_read_does_not_block_the_second_ctrl_c(place: CommandFolder) -> None:
    place.rows("in.jsonl", 200_000)
    place.file("source: in.jsonl", "double")
    talk = place.folder / "err.txt"
    with (
        talk.open("wb") as err,
        subprocess.Popen(
            [sys.executable, "-m", "dovetail", "run", "p.yaml", *CLUSTER],
            stdout=subprocess.PIPE,
            stderr=err,
            env=place.environment(),
            cwd=place.folder,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.read(1)
        waiting = array("i", [0])
        filled = partial(fcntl.ioctl, process.stdout, termios.FIONREAD, waiting)
        until(lambda: filled() == 0 and waiting[0] > 60_000, "the pipe is full")
        process.send_signal(signal.SIGINT)
        until(lambda: "stopping at the next epoch" in talk.read_text(), "it drains")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_no_wait_reports_the_runs_that_hold_the_resources(place: CommandFolder) -> None:
    place.rows("in.jsonl", 20_000)
    with place.started("run", "p.yaml", *CLUSTER) as started:
        run = started.goes()
        done = place.run("run", "p.yaml", *CLUSTER, "--sink", "other.jsonl", "--no-wait")
        assert done.returncode == 3, done.stderr
        assert "omit --no-wait" in done.stderr
        assert f"fix  dovetail drain {run.name}" in done.stderr
        assert place.run("cancel", run.name, "--wait").returncode == 0


@pytest.mark.parametrize("command", ["drain", "cancel"])
def test_an_unknown_run_is_an_error(place: CommandFolder, command: str) -> None:
    done = place.run(command, "nothing")
    assert done.returncode == 2
    assert "DT301" in done.stderr
