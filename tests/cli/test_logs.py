"""`dovetail logs`: output of all workers, of one, and live."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from cli.jobs import CLUSTER, CommandFolder
from command import run_command
from dovetail.cli.logs import local_time
from dovetail.machine.processes import process_start_time
from observe.made import recorded
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

ID = "20260101-000000-aaaa-video"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that is over, with three workers that printed."""
    folder = tmp_path / "runs" / ID
    recorded(folder)
    (folder / "logs").mkdir()
    for name, text in (("1.log", "one\ntwo\r\nthree"), ("2.log", "\xff\n"), ("10.1.log", "ten\n"), ("x.log", "no\n")):
        (folder / "logs" / name).write_bytes(text.encode("latin-1"))
    return folder


def logs(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("logs", *arguments, DOVETAIL_HOME=str(run.parent.parent))


def test_output_of_all_workers_is_shown_with_their_names(run: Path) -> None:
    shown = logs(run, "last")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert [line.partition("] ")[2] for line in lines] == ["one", "two", "three", "\N{REPLACEMENT CHARACTER}", "ten"]
    assert lines[0].startswith("[a 1 on node-0]")
    assert lines[3].startswith("[a 2 on node-1]")
    assert lines[-1].endswith("10 rank 1] ten")


def test_one_worker_is_shown_plainly(run: Path) -> None:
    assert logs(run, ID, "1").stdout == "one\ntwo\nthree\n"
    assert logs(run, ID, "1", "--tail", "1").stdout == "three\n"
    assert logs(run, ID, "1", "--tail", "0").stdout == ""


def test_the_workers_of_a_stage_are_shown(run: Path) -> None:
    assert "[a 1 on node-0] one" in logs(run, ID, "a").stdout


def test_json_has_one_object_per_line(run: Path) -> None:
    first = json.loads(logs(run, ID, "--json").stdout.splitlines()[0])
    assert first == {"time": None, "worker": 1, "rank": 0, "unit": "a", "node": "node-0", "line": "one"}


def test_lines_are_sorted_by_their_time_which_is_shown(run: Path) -> None:
    stamp = "2026-01-01T03:05:{:02d}.250Z "
    (run / "logs" / "1.log").write_text(f"{stamp.format(1)}first\n  below it\n{stamp.format(3)}third\n")
    (run / "logs" / "2.log").write_text(f"{stamp.format(2)}second\n{stamp.format(4)}fourth\n")
    (run / "logs" / "10.1.log").unlink()
    shown = logs(run, ID).stdout.splitlines()
    times = [local_time(stamp.format(second).strip(), datetime.now(UTC).date()) for second in range(1, 5)]
    assert shown == [
        f"{times[0]} [a 1 on node-0] first",
        "[a 1 on node-0]   below it",
        f"{times[1]} [a 2 on node-1] second",
        f"{times[2]} [a 1 on node-0] third",
        f"{times[3]} [a 2 on node-1] fourth",
    ]
    assert logs(run, ID, "1", "--no-timestamps", "--tail", "1").stdout == "third\n"
    assert json.loads(logs(run, ID, "2", "--json").stdout.splitlines()[0])["time"] == stamp.format(2).strip()


def test_a_time_of_today_is_shown_without_the_date_and_nonsense_as_it_is() -> None:
    noon = datetime(2026, 1, 1, 12, 0, 0, 5000, tzinfo=UTC).astimezone()
    assert local_time("2026-01-01T12:00:00.005Z", noon.date()) == f"{noon:%H:%M:%S}.005"
    assert local_time("2026-99-01T12:00:00.005Z", noon.date()) == "2026-99-01T12:00:00.005Z"


def test_the_workers_of_a_stage_are_selected_by_an_option(run: Path) -> None:
    assert logs(run, "--stage", "a").stdout == logs(run, ID, "a").stdout
    refused = logs(run, ID, "1", "--stage", "a")
    assert refused.returncode == 2
    assert "WORKER and --stage cannot be combined" in refused.stderr


def test_on_one_node_it_is_not_named_and_the_ranks_of_a_gang_may_be_on_several(run: Path) -> None:
    def begin(*seats: str) -> None:
        start = {"t": 0, "k": "worker", "do": "start", "w": 10, "unit": "train", "node": seats[0], "nodes": list(seats)}
        (run / "events.jsonl").write_text(json.dumps(start) + "\n")

    begin("node-7", "node-7")
    assert "[train 10 rank 1] ten" in logs(run, ID, "train").stdout
    begin("node-7", "node-8")
    assert "[train 10 rank 1 on node-8] ten" in logs(run, ID, "train").stdout


def test_an_unknown_worker_is_an_error_that_lists_the_workers(run: Path) -> None:
    shown = logs(run, ID, "99")
    assert shown.returncode == 2
    assert "DT368" in shown.stderr
    assert "workers: 1 to 10" in shown.stderr
    assert "DT301" in logs(run, "nothing").stderr


def test_a_run_without_logs_is_reported(run: Path) -> None:
    files = list((run / "logs").iterdir())

    def remove_files() -> None:
        for file in files:
            file.unlink()

    for file in files:
        file.write_text("")
    for then in (remove_files, (run / "logs").rmdir, lambda: None):
        shown = logs(run, ID)
        assert (shown.returncode, shown.stdout) == (0, "")
        assert "no output from workers" in shown.stderr
        then()


def test_what_comes_later_is_followed_until_the_run_is_over(run: Path, tmp_path: Path) -> None:
    header = json.loads((run / "run.json").read_text())
    alive = {
        "status": "running",
        "pid": os.getpid(),
        "pid_started": process_start_time(os.getpid()),
        "host": socket.gethostname(),
        "heartbeat": time.time(),
    }
    (run / "run.json").write_text(json.dumps(header | alive))
    out = tmp_path / "followed.txt"
    with out.open("wb") as file:
        following = subprocess.Popen(
            [sys.executable, "-m", "dovetail", "logs", ID, "-f"],
            stdout=file,
            env=os.environ | {"DOVETAIL_HOME": str(run.parent.parent)},
        )
        until(lambda: "ten" in out.read_text(), "it shows what is there")
        assert "three" not in out.read_text()
        with (run / "logs" / "1.log").open("ab") as log:
            log.write(b" and more\n")
        (run / "logs" / "11.log").write_bytes(b"new worker\nunfinished")
        until(lambda: "new worker" in out.read_text(), "it shows what came")
        assert "three and more" in out.read_text()
        assert "unfinished" not in out.read_text()
        (run / "run.json").write_text(json.dumps(header | {"status": "finished"}))
        assert following.wait(60) == 0
    assert out.read_text().splitlines()[-1].endswith("unfinished")


@pytest.mark.processes
def test_the_logs_of_a_real_run(tmp_path: Path) -> None:
    place = CommandFolder(tmp_path / "jobs")
    place.file("source: in.jsonl\nsink: out.jsonl", "Talker")
    done = place.run("run", "p.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    shown = place.run("logs", "last", "Talker")
    assert shown.returncode == 0, shown.stderr
    seen = sorted(int(line.rpartition(" ")[2]) for line in shown.stdout.splitlines() if "saw" in line)
    assert seen == list(range(20))
    assert "[Talker " in shown.stdout
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} \[", line) for line in shown.stdout.splitlines()), shown.stdout
