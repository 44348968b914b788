"""Control characters in data never reach a terminal, whatever command shows them."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sys
import threading
import tty
from typing import TYPE_CHECKING

import click
import pytest

from backfill_aids import HALF, create_table
from dovetail.cli import main
from dovetail.cli.colour import paint
from dovetail.observe.terminal import ProtectedTerminal, protect_terminals, raw_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("in_process")
ATTACK = "\x1b]0;owned\x07\x1b[2J\x1bc\x9b31m\u202e"
STEPS = f"""
def fails(row):
    print({ATTACK!r}, flush=True)
    raise ValueError({ATTACK!r})


def fill(id: int) -> int:
    raise ValueError({ATTACK!r})
"""
PIPELINE = """
name: attack
source: in.jsonl
sink: out.jsonl
stages:
  - name: fails
    run: terminal_steps:fails
    on_error: {on_error}
"""


class Screen:
    """Terminal that records the output of the program."""

    def __init__(self) -> None:
        self._controller, self._terminal = pty.openpty()
        tty.setraw(self._terminal)
        self._read: list[bytes] = []
        self._reader = threading.Thread(target=self._follow)
        self._reader.start()

    def stream(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(os.fdopen(os.dup(self._terminal), "wb"), encoding="utf-8", line_buffering=True)

    def _follow(self) -> None:
        while True:
            try:
                data = os.read(self._controller, 65536)
            except OSError:  # all streams are closed
                return
            self._read.append(data)

    def close(self) -> str:
        """Everything that was written."""
        os.close(self._terminal)
        for stream in {sys.stdout, sys.stderr}:
            raw = raw_terminal(stream)
            if raw.isatty():
                raw.close()
        self._reader.join()
        os.close(self._controller)
        return b"".join(self._read).decode()


def open_screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Called in tests, not a fixture: pytest replaces the streams after the fixtures."""
    opened = Screen()
    monkeypatch.setattr(sys, "stdout", opened.stream())
    monkeypatch.setattr(sys, "stderr", opened.stream())
    monkeypatch.setenv("TERM", "xterm")
    return opened


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "terminal_steps.py").write_text(STEPS)
    (tmp_path / "in.jsonl").write_text(json.dumps({"n": 1}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    yield tmp_path
    sys.modules.pop("terminal_steps", None)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["dovetail", *words])
    with pytest.raises(SystemExit):
        main()


def without_own_sequences(shown: str) -> str:
    """The text without the colours of the command line and the movements of its display."""
    return re.sub(r"\x1b\[[0-9;?]*[mAKhl]|\r", "", shown)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_no_command_shows_control_characters_of_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    screen = open_screen(monkeypatch)
    (folder / "p.yaml").write_text(PIPELINE.format(on_error=on_error))
    command(monkeypatch, "run", "p.yaml", "--verbose", "--cluster", "1x(2cpu, 4GB)")
    command(monkeypatch, "status")
    command(monkeypatch, "errors", "--traceback")
    command(monkeypatch, "logs")
    shown = without_own_sequences(screen.close())
    assert shown.count("\\x1b]0;owned\\x07\\x1b[2J\\x1bc\\x9b31m\\u202e") >= 3
    assert re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown) == []


def test_no_command_of_a_backfill_shows_control_characters_of_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = create_table(folder, 2, 2)
    screen = open_screen(monkeypatch)
    fill = ("--udf", "terminal_steps:fill", "--cluster", HALF)
    command(monkeypatch, "backfill", "run", uri, "n", *fill)
    command(monkeypatch, "backfill", "run", uri, "n", *fill, "--on-error", "skip")
    command(monkeypatch, "backfill", "errors", uri, "n")
    command(monkeypatch, "backfill", "history", uri)
    shown = without_own_sequences(screen.close())
    assert shown.count("\\x1b]0;owned\\x07") >= 3
    assert re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown) == []


def test_own_colours_pass_and_those_of_data_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    protect_terminals()
    assert isinstance(sys.stdout, ProtectedTerminal)
    click.echo(paint("bad", "bad") + paint("dim", "dim") + "\x1b[8mhidden\x1b[5m")
    raw_terminal(sys.stdout).write("\x1b[2A")
    shown = screen.close()
    assert shown == "\x1b[31m\x1b[1mbad\x1b[0m\x1b[2mdim\x1b[0m\\x1b[8mhidden\\x1b[5m\n\x1b[2A"


def test_a_file_gets_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        protect_terminals()
        assert sys.stdout is file
