"""`dovetail status --watch`."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from command import run_command
from dovetail.cli import status_watch
from dovetail.machine.processes import process_start_time
from observe.made import recorded
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ID = "20260101-000000-aaaa-video"
RUNNING = {
    "status": "running",
    "pid": os.getpid(),
    "pid_started": process_start_time(os.getpid()),
    "host": socket.gethostname(),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that is running in this process."""
    folder = tmp_path / "runs" / ID
    recorded(folder)
    change(folder, **RUNNING)
    return folder


def change(folder: Path, **changes: object) -> None:
    header = folder / "run.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | changes))


def watch(run: Path, pauses: Callable[[int], None], *options: str) -> subprocess.CompletedProcess[str]:
    """Watches the run; `pauses(n)` is called instead of the n-th pause."""
    count = 0

    def sleep(seconds: float) -> None:
        nonlocal count
        assert seconds >= 1
        count += 1
        pauses(count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(status_watch, "time", FakeTime(sleep))
        return run_command("status", "--watch", *options, DOVETAIL_HOME=str(run.parent.parent))


class FakeTime:
    """A clock that pauses move."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep
        self._now = time.time()

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._sleep(seconds)

    def time(self) -> float:
        return self._now

    monotonic = time


def test_outside_of_a_terminal_a_line_is_printed_every_ten_seconds_until_the_end(run: Path) -> None:
    def pause(count: int) -> None:
        progress = {"finished": 100 * count, "seconds": 10.0 * count, "total": 4000, "noun": "items"}
        change(run, progress=progress, status="finished" if count == 25 else "running")

    shown = watch(run, pause)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    watched = [line for line in lines if line.startswith("video: running for")]
    assert len(watched) == 3
    assert watched[1] == "video: running for 1 min 40 s, 1000 of 4000 items, 10/s"
    assert "video: finished after" in lines[3]
    assert "\x1b" not in shown.stdout


def test_as_json_there_is_one_object_per_update(run: Path) -> None:
    shown = watch(run, lambda count: change(run, status="finished" if count == 2 else "running"), "--json")
    assert [json.loads(line)["status"] for line in shown.stdout.splitlines()] == ["running", "running", "finished"]


def test_a_run_that_has_ended_is_shown_at_once(run: Path) -> None:
    change(run, status="failed")
    shown = watch(run, lambda _: pytest.fail("it waits"))
    assert shown.returncode == 0
    assert "video: failed after" in shown.stdout


def test_in_a_terminal_the_summary_is_redrawn_and_ctrl_c_ends_only_the_watching(run: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"DOVETAIL_HOME": str(run.parent.parent), "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "dovetail", "status", "-w"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = b""

    def shown(text: bytes) -> bool:
        nonlocal seen
        with suppress(BlockingIOError, OSError):
            seen += os.read(ours, 1 << 16)
        return text in seen

    try:
        until(lambda: shown(b"Ctrl-C ends the display"), "it shows the run")
        until(lambda: shown(b"\x1b[J"), "it draws again")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        until(lambda: shown(b"no longer watching"), "it says so")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"Traceback" not in seen
