"""Log files of workers: lines are read once, in start order, and printed during a run."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from dovetail.control.commands import HostedObject, StartWorker
from dovetail.observe.worker_logs import READ_BYTES, LogPrinter, WorkerLog, log_paths

if TYPE_CHECKING:
    from pathlib import Path


def test_complete_lines_are_read_once_and_the_rest_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    log = WorkerLog(path, 1, 0, "a")
    assert list(log.read()) == []
    path.write_bytes(b"one\r\ntwo\nthr")
    assert list(log.read()) == ["one", "two"]
    with path.open("ab") as file:
        file.write(b"ee\nrest")
    assert list(log.read()) == ["three"]
    assert list(log.remainder()) == ["rest"]
    assert list(log.remainder()) == []


def test_a_line_that_is_longer_than_a_block_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    path.write_bytes(b"x" * (2 * READ_BYTES) + b"\nend\n")
    assert [len(line) for line in WorkerLog(path, 1, 0, "a").read()] == [2 * READ_BYTES, 3]


def test_logs_are_in_start_order_and_other_files_are_ignored(tmp_path: Path) -> None:
    for name in ("10.log", "9.log", "9.1.log", "notes.log", "9.txt"):
        (tmp_path / name).touch()
    assert list(log_paths(tmp_path).values()) == [(9, 0), (9, 1), (10, 0)]
    assert log_paths(tmp_path / "missing") == {}


def test_output_is_printed_during_a_run_with_the_name_of_the_unit(tmp_path: Path) -> None:
    screen = io.StringIO()
    printer = LogPrinter(tmp_path, screen)
    printer.on_step(0.0, [], [StartWorker(3, (), (HostedObject("caption"),))])
    (tmp_path / "3.log").write_text("loaded\nhalf")
    printer.on_step(1.0, [], [])
    assert screen.getvalue() == "[caption 3] loaded\n"
    printer.close(2.0)
    assert screen.getvalue() == "[caption 3] loaded\n[caption 3] half\n"
