"""Progress display: plain lines and the live table."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dovetail.observe.progress import (
    ProgressDisplay,
    RateWindow,
    progress_line,
    progress_text,
    stop_notice,
    workers_text,
)
from observe.made import Clock, run_at, unit, view

if TYPE_CHECKING:
    from dovetail.streaming.view import StreamView


class Screen(io.StringIO):
    """A terminal that remembers."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(screen: Screen, seconds: int = 110, name: str = "video") -> str:
    wall = Clock(0.0)
    progress = ProgressDisplay(run_at, name=name, stream=screen, wall=wall)
    for second in range(seconds + 1):
        wall.now = float(second)
        progress.on_step(float(second), [], [])
    progress.close(float(seconds))
    return screen.getvalue()


def test_without_a_terminal_a_plain_line_is_printed_every_ten_seconds() -> None:
    lines = shown(Screen(False)).splitlines()
    assert len(lines) == 12
    assert lines[4] == ("video: 400 of 1000 items (40 %), 10/s, 1 min 00 s left, 1 failed, bottleneck a")
    assert lines[-1] == "video: 1000 of 1000 items (100 %), 9.09/s, 1 failed, finished after 1 min 50 s"
    assert all("\x1b" not in line for line in lines)


def test_a_run_that_ends_before_the_first_plain_line_prints_none() -> None:
    assert shown(Screen(False), seconds=9) == ""
    assert len(shown(Screen(False), seconds=10).splitlines()) == 2


def test_a_terminal_shows_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    text = shown(Screen(True))
    assert "in flight" in text
    assert "held" in text
    assert "\x1b[" in text
    assert "a *" in text


def test_no_color_means_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(Screen(True))
    assert "in flight" in plain
    assert "\x1b[33m" not in plain
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b[33m" in shown(Screen(True))


def final_screen(text: str, lines: int) -> list[str]:
    """The last lines that a terminal shows, without styles: rich erases the table before it draws the next."""
    last = text.replace("\r\n", "\n").split("\x1b[1A\x1b[2K")[-1]
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).splitlines() if line.strip()][-lines:]


def test_the_last_picture_shows_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert final_screen(shown(Screen(True)), 4) == [
        "video: 1000 of 1000 items (100 %), 9.09/s, 1 failed, finished after 1 min 50 s",
        "stage    in   out  items/s  workers  busy  failed",
        "a      1000  1000     9.09        2  50 %",
        "b      1000  1000     9.09        1  45 %       1",
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_of_the_table_is_longer_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    text = shown(Screen(True), name="a_pipeline_with_a_name_that_is_far_too_long_for_the_terminal")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", text).splitlines()
    assert max(map(len, lines)) <= width


def test_a_notice_is_part_of_the_table_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    screen, wall = Screen(True), Clock(0.0)
    progress = ProgressDisplay(run_at, stream=screen, wall=wall)
    progress.on_step(0.0, [], [])
    assert progress.show_stop("Ctrl-C")
    wall.now = 50.0
    progress.on_step(50.0, [], [])
    assert final_screen(screen.getvalue(), 1) == [stop_notice(None)]
    progress.close(60.0)
    assert stop_notice(None) not in final_screen(screen.getvalue(), 10)
    assert not progress.show_stop("Ctrl-C")


def test_without_a_table_the_caller_prints_the_notice() -> None:
    assert not ProgressDisplay(run_at, stream=Screen(False), wall=Clock()).show_stop("Ctrl-C")


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (9.6, "10 s"), (100.0, "1 min 40 s")])
def test_the_notice_of_a_stop_has_the_time_that_is_left(seconds: float, text: str) -> None:
    assert stop_notice(seconds) == f"stopping at the next epoch, about {text} left; Ctrl-C again stops now"
    assert stop_notice(None, "SIGTERM") == "stopping at the next epoch; SIGTERM again stops now"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert len(shown(Screen(True)).splitlines()) == 12


def test_what_is_printed_to_stdout_stays_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressDisplay(run_at, stream=Screen(True), live=True, wall=Clock())
    progress.on_step(0.0, [], [])
    sys.stdout.write("data\n")
    progress.close(1.0)
    assert capsys.readouterr().out == "data\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_closing_twice_or_before_the_first_step_is_fine(terminal: bool) -> None:
    progress = ProgressDisplay(run_at, stream=Screen(terminal), wall=Clock())
    progress.close(0.0)
    progress.close(0.0)
    again = ProgressDisplay(run_at, stream=Screen(terminal), wall=Clock())
    again.on_step(0.0, [], [])
    again.close(0.0)
    again.close(0.0)


def test_the_view_is_taken_only_when_it_is_shown() -> None:
    taken: list[float] = []
    wall = Clock()

    def looked(now: float) -> StreamView:
        taken.append(now)
        return run_at(now)

    progress = ProgressDisplay(looked, stream=Screen(False), wall=wall)
    for step in range(10_000):
        progress.on_step(step / 1000, [], [])
    assert taken == [0.0]
    wall.now += 10.0
    for step in range(100):
        progress.on_step(10 + step / 1e6, [], [])
    assert len(taken) == 2


def test_rates_are_those_of_the_last_seconds_and_not_of_the_whole_run() -> None:
    pulse = RateWindow(window_s=10)
    for second in range(100):
        done = max(0, second - 80)
        pulse.add(view(float(second), unit(taken_total=done * 5), finished=done, total=100))
    assert pulse.rate == pytest.approx(1.0)
    assert pulse.eta_s == pytest.approx(81)
    assert pulse.rows()[0].rate == pytest.approx(5.0)


def test_the_headline_has_what_is_known() -> None:
    pulse = RateWindow()
    seen = view(0.0, finished=3, read=9, wave=1, waves=3)
    pulse.add(seen)
    assert progress_text(seen, pulse, 0.0) == "3 items (9 read), -, wave 2 of 3, 0.0 s so far"
    assert workers_text(unit(ready=3, starting=2, draining=1)) == "3 +2 -1"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_plain_line_fits_the_width_and_always_has_counts_and_rate(width: int) -> None:
    pulse = RateWindow()
    long = "a_name_that_is_far_too_long_for_one_line_of_a_narrow_terminal"
    seen = view(10.0, unit(long), finished=3, total=9, failed=1, bottleneck=long)
    pulse.add(seen)
    line = progress_line(seen, pulse, 10.0, long, width)
    assert len(line) <= width
    assert ": 3 of 9 items (33 %), -, 1 failed" in line
    assert line.startswith(f"{long}: ") == (width == 200)


def test_rich_is_imported_only_for_a_terminal() -> None:
    code = "import sys, dovetail.observe.progress, dovetail.observe.recorder as r; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
