"""`dovetail status --watch`: the state of a run until it ends, redrawn in a terminal, as lines elsewhere."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli.run_filter import run_entry
from dovetail.observe.history import RunHistory
from dovetail.observe.summary import summarize_run
from dovetail.observe.summary_text import result_lines
from dovetail.observe.terminal import is_terminal, raw_terminal
from dovetail.text_format import cut_text, format_duration, format_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.observe.run_folder import RunFolder

INTERVAL_S = 1.0
LINE_INTERVAL_S = 10.0
MIN_PAUSE_PER_READ_S = 10.0
"""Seconds of pause per second of reading: watching a run with a long event log stays cheap."""
CLEAR_BELOW = "\x1b[J"


def watch_run(folder: RunFolder, show_end: Callable[[], None], *, as_json: bool) -> None:
    """Shows the run until it ends, then calls `show_end`. Ctrl-C ends the display, not the run."""
    show = JsonLines(folder) if as_json else Redrawn(folder) if is_terminal(sys.stdout) else PlainLines(folder)
    try:
        while (entry := run_entry(folder, time.time()))["status"] == "running":
            began = time.monotonic()
            show(entry)
            time.sleep(max(INTERVAL_S, MIN_PAUSE_PER_READ_S * (time.monotonic() - began)))
    except KeyboardInterrupt:
        click.echo(f"\nno longer watching; run {folder.id} continues", err=True)
        return
    if isinstance(show, Redrawn):
        show.erase()
    show_end()


class PlainLines:
    """A line when the run has made progress, every few seconds."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._next = 0.0
        self._before: dict[str, Any] | None = None

    def __call__(self, entry: dict[str, Any]) -> None:
        if time.monotonic() < self._next or entry == self._before:
            return
        self._next = time.monotonic() + LINE_INTERVAL_S
        click.echo(progress_line(entry, self._before))
        self._before = entry


def progress_line(entry: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """'video: running for 42 s, 1200 of 4000 items, 31/s'; the rate is that since the entry before."""
    of_all = f" of {entry['total']}" if entry["total"] is not None else ""
    rate = entry["rate"]
    if before is not None and entry["seconds"] > before["seconds"]:
        rate = (entry["items"] - before["items"]) / (entry["seconds"] - before["seconds"])
    running = f"running for {format_duration(entry['seconds'])}"
    return f"{entry['name'] or entry['id']}: {running}, {entry['items']}{of_all} {entry['unit']}, {format_rate(rate)}"


class JsonLines:
    """A line of JSON with all figures, as `dovetail status --json` prints them."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __call__(self, entry: dict[str, Any]) -> None:  # noqa: ARG002 - the figures are read again
        print_json_line(self._folder)


def print_json_line(folder: RunFolder) -> None:
    click.echo(json.dumps(summarize_run(RunHistory.load(folder.path)).to_dict()))


class Redrawn:
    """The summary so far, drawn over the one before."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._height = 0

    def __call__(self, entry: dict[str, Any]) -> None:  # noqa: ARG002 - the figures are read again
        size = shutil.get_terminal_size()
        lines = result_lines(summarize_run(RunHistory.load(self._folder.path)), size.columns)
        lines = [*lines[: max(1, size.lines - 3)], "", "Ctrl-C ends the display, not the run"]
        text = "\n".join(cut_text(line, size.columns) for line in lines)
        self.erase()
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        self._height = len(lines)

    def erase(self) -> None:
        """Moves to the first line of the drawing and clears the screen below it."""
        if self._height:
            # not click.echo, which removes all control sequences where there are no colours
            raw_terminal(sys.stdout).write(f"\x1b[{self._height}A\r{CLEAR_BELOW}")
        self._height = 0
