"""Progress display of a run: live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.control.lifecycle import FINAL_RUN_STATES
from dovetail.observe.terminal import is_terminal, may_colour, raw_terminal, terminal_width
from dovetail.pipeline.units import short_unit_name
from dovetail.streaming.view import rate_label, unit_word
from dovetail.text_format import (
    MIN_CUT_CHARS,
    cut_text,
    format_duration,
    format_number,
    format_percent,
    format_rate,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TextIO

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.streaming.view import StreamView, UnitView

LIVE_INTERVAL_S = 0.25
PLAIN_INTERVAL_S = 10.0
RATE_WINDOW_S = 10.0
"""Rates are averages over this many seconds of the run's clock."""
CHECK_EVERY_STEPS = 64
CHECK_INTERVAL_S = 0.25


FINAL_STATES = frozenset(state.value for state in FINAL_RUN_STATES)


@dataclass(frozen=True, slots=True)
class StageRow:
    """One row of the table."""

    unit: UnitView
    rate: float | None
    busy: float | None
    most_workers: int = 0
    """Maximum over the whole run, in the last table."""


class RateWindow:
    """The last views, and the rates between the oldest and the newest of them."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self.window_s = window_s
        self._views: deque[StreamView] = deque()

    def add(self, view: StreamView) -> None:
        views = self._views
        views.append(view)
        while len(views) > 2 and view.now - views[1].now >= self.window_s:
            views.popleft()

    @property
    def rate(self) -> float | None:
        """Source items per second."""
        old, new = self._views[0], self._views[-1]
        return (new.finished - old.finished) / (new.now - old.now) if new.now > old.now else None

    @property
    def eta_s(self) -> float | None:
        new, speed = self._views[-1], self.rate
        total = new.total if new.total is not None else new.expected
        return max(0, total - new.finished) / speed if total is not None and speed else None

    def rows(self) -> list[StageRow]:
        old, new = self._views[0], self._views[-1]
        before = {unit.name: unit for unit in old.units}
        return [_row(before.get(unit.name, unit), unit, new.now - old.now) for unit in new.units]


class RunTotals:
    """Figures of the whole run, for the last picture: by then the rates of the last seconds are those of its tail."""

    def __init__(self) -> None:
        self._first: StreamView | None = None
        self._last: StreamView | None = None
        self._worker_s: dict[str, float] = {}
        self._most_workers: dict[str, int] = {}

    def add(self, view: StreamView) -> None:
        seconds = 0.0 if self._last is None else view.now - self._last.now
        before = {} if self._last is None else {unit.name: unit for unit in self._last.units}
        for unit in view.units:
            old = before.get(unit.name, unit)
            workers = (old.ready + old.draining + unit.ready + unit.draining) / 2
            self._worker_s[unit.name] = self._worker_s.get(unit.name, 0.0) + workers * seconds
            least = max(unit.ready + unit.draining, int(unit.taken_total > 0))  # it may end before the first view
            self._most_workers[unit.name] = max(self._most_workers.get(unit.name, 0), least)
        self._first, self._last = self._first or view, view

    @property
    def rate(self) -> float | None:
        """Source items per second; of a resumed run, since the resume."""
        if self._first is None or self._last is None or self._last.now <= self._first.now:
            return None
        return (self._last.finished - self._first.finished) / (self._last.now - self._first.now)

    def rows(self) -> list[StageRow]:
        if self._first is None or self._last is None:
            return []
        seconds = self._last.now - self._first.now
        before = {unit.name: unit for unit in self._first.units}
        return [self._row(before.get(unit.name, unit), unit, seconds) for unit in self._last.units]

    def _row(self, old: UnitView, new: UnitView, seconds: float) -> StageRow:
        worker_s = self._worker_s[new.name]
        busy = min(1.0, (new.busy_s_total - old.busy_s_total) / worker_s) if worker_s else None
        rate = (new.taken_total - old.taken_total) / seconds if seconds > 0 else None
        return StageRow(new, rate, busy, self._most_workers[new.name])


def _row(old: UnitView, new: UnitView, seconds: float) -> StageRow:
    if seconds <= 0:
        return StageRow(new, None, None)
    workers = (old.ready + old.draining + new.ready + new.draining) / 2
    busy = (new.busy_s_total - old.busy_s_total) / (workers * seconds) if workers else None
    return StageRow(new, (new.taken_total - old.taken_total) / seconds, None if busy is None else min(1.0, busy))


class ProgressDisplay:
    """Observer that displays the run on stderr."""

    def __init__(
        self,
        view: Callable[[float], StreamView],
        *,
        name: str = "",
        virtual: bool = False,
        stream: TextIO | None = None,
        live: bool | None = None,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        """`live`: None: whether the stream is a terminal."""
        self._view, self._wall = view, wall
        self._name, self._virtual = name, virtual
        self._stream = stream or sys.stderr
        self._rate_window, self._totals = RateWindow(), RunTotals()
        self._stopped_by = ""
        """The signal that made the run stop, whose second one stops it at once."""
        self._began: float | None = None
        self._printed = False
        self._steps = 0
        self._look_at = float("-inf")
        is_live = is_terminal(self._stream) if live is None else live
        self._live = _open_live_display(self._stream) if is_live else None
        self._interval_s = LIVE_INTERVAL_S if is_live else PLAIN_INTERVAL_S
        # plain lines start after a while, when there is something to report; a table is shown at once
        self._show_at = wall() + (0.0 if is_live else PLAIN_INTERVAL_S)

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002 - the port's
        self._steps -= 1
        if self._steps <= 0 or now >= self._look_at:
            self._check_timers(now)

    def _check_timers(self, now: float) -> None:
        self._steps, self._look_at = CHECK_EVERY_STEPS, now + CHECK_INTERVAL_S
        if self._began is None:
            self._began = now
            self._add(self._view(now))
        wall = self._wall()
        if wall >= self._show_at:
            self._show_at = wall + self._interval_s
            self._show(now)

    def _add(self, view: StreamView) -> None:
        self._rate_window.add(view)
        self._totals.add(view)

    def _show(self, now: float) -> None:
        view = self._view(now)
        self._add(view)
        since = now - (self._began or 0.0)
        if self._live is None:
            self._printed = True
            print(progress_line(view, self._rate_window, since, self._name), file=self._stream, flush=True)
        else:
            self._live.start()
            notice = stop_notice(view.drain_s, self._stopped_by) if self._stopped_by else ""
            table = _render_table(view, self._rate_window, since, self._title(), notice)
            self._live.update(table, refresh=True)

    def _show_end(self, now: float) -> None:
        """The last picture: the whole run."""
        view = self._view(now)
        self._add(view)
        text = end_text(view, self._totals, now - (self._began or 0.0))
        if self._live is None:
            line = f"{self._name}: {text}" if self._name else text
            print(cut_text(line, terminal_width()), file=self._stream, flush=True)
        else:
            self._live.start()
            self._live.update(_render_end(view, self._totals, text, self._title()), refresh=True)

    def _title(self) -> str:
        return f"{self._name} (simulated)" if self._virtual else self._name

    def show_stop(self, signal_name: str) -> bool:
        """Show below the table, from now on, that the run stops. False: there is no table, so the caller has to print
        it. Thread: any."""
        if self._live is None or not self._interval_s:
            return False
        self._stopped_by = signal_name
        return True

    def close(self, now: float) -> None:
        """Leave the result on the screen, unless the run ended before its first plain line. Idempotent."""
        try:
            shown = self._printed or self._live is not None
            if self._began is not None and self._interval_s and shown:
                self._show_end(now)
        finally:
            self._interval_s = 0.0
            if self._live is not None:
                self._live.stop()


def progress_text(view: StreamView, pulse: RateWindow, since_s: float) -> str:
    """'1200 of 5000 items (24 %), 41.2/s, 1 min 32 s left, bottleneck caption'."""
    return ", ".join([*_essential_parts(view, pulse), *_optional_parts(view, since_s)])


def _count_text(view: StreamView) -> str:
    if view.total is not None:
        share = f" ({format_percent(view.finished / view.total)})" if view.total else ""
        return f"{view.finished} of {view.total} {view.noun}{share}"
    if view.expected:
        expected = max(view.expected, view.read)
        return f"{view.finished} of about {expected} items ({format_percent(view.finished / expected)})"
    return f"{view.finished} items ({view.read} read)"


def _essential_parts(view: StreamView, pulse: RateWindow) -> list[str]:
    parts = [_count_text(view), format_rate(pulse.rate)]
    left = pulse.eta_s
    if view.state != "running":
        parts.append(view.state)
    elif left is not None:
        parts.append(f"{format_duration(left)} left")
    if view.waves > 1:
        parts.append(f"wave {view.wave + 1} of {view.waves}")
    if view.failed:
        parts.append(f"{view.failed} failed")
    return parts


def end_text(view: StreamView, totals: RunTotals, since_s: float) -> str:
    """'5000 of 5000 items (100 %), 41.2/s, finished after 2 min 01 s': rates over the whole run."""
    parts = [_count_text(view), format_rate(totals.rate)]
    ended = view.state if view.state in FINAL_STATES else "stopped"
    parts += [f"{view.failed} failed"] if view.failed else []
    return ", ".join([*parts, f"{ended} after {format_duration(since_s)}"])


def stop_notice(drain_s: float | None, signal_name: str = "Ctrl-C") -> str:
    """The text after the first Ctrl-C. `drain_s`: seconds until the run ends; None: unknown."""
    about = "" if drain_s is None else f", about {_whole_seconds(drain_s)} left"
    return f"stopping at the next epoch{about}; {signal_name} again stops now"


def _whole_seconds(seconds: float) -> str:
    whole = max(1, round(seconds))
    return f"{whole} s" if whole < 60 else format_duration(whole)


def _optional_parts(view: StreamView, since_s: float) -> list[str]:
    bottleneck = [f"bottleneck {short_unit_name(view.bottleneck)}"] if view.bottleneck else []
    return [*view.details, *bottleneck, f"{format_duration(since_s)} so far"]


def progress_line(view: StreamView, pulse: RateWindow, since_s: float, name: str = "", width: int | None = None) -> str:
    """One line; optional parts and the stages are left out if they do not fit the terminal."""
    width = width or terminal_width()
    stages = (
        f"{short_unit_name(row.unit.name)} {row.unit.ready}w {format_rate(row.rate)}"
        for row in pulse.rows()
        if row.unit.wave == view.wave
    )
    line = ", ".join(_essential_parts(view, pulse))
    if name:
        line = f"{cut_text(name, max(MIN_CUT_CHARS, width - len(line) - 2))}: {line}"
    for part in (*(f", {text}" for text in _optional_parts(view, since_s)), f" | {', '.join(stages)}"):
        if len(line) + len(part) <= width:
            line += part
    return line


def workers_text(unit: UnitView) -> str:
    """'12 +3 -1': ready, starting, draining."""
    starting = f" +{unit.starting}" if unit.starting else ""
    draining = f" -{unit.draining}" if unit.draining else ""
    return f"{unit.ready}{starting}{draining}"


def _open_live_display(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=raw_terminal(stream), force_terminal=True, no_color=not may_colour(stream), highlight=False)
    # stdout is data and must not be redirected through the console; other output on stderr appears above the table
    return Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=stream is sys.stderr)


def _render_table(view: StreamView, pulse: RateWindow, since_s: float, title: str, notice: str) -> Any:
    from rich.console import Group
    from rich.text import Text

    rows = []
    for row in pulse.rows():
        unit = row.unit
        mark = " *" if unit.name == view.bottleneck else ""
        cells = (
            f"{short_unit_name(unit.name)}{mark}",
            _rate_cell(row),
            format_number(unit.queued),
            format_number(unit.in_flight),
            workers_text(unit),
            format_percent(row.busy),
            format_number(unit.failed_total) if unit.failed_total else "",
        )
        rows.append(("yellow" if mark else "dim" if unit.finished else "", cells))
    table = _stage_table(view.noun, (rate_label(view.noun), "queue", "in flight", "workers", "busy", "failed"), rows)
    lines = [_title_text(title, progress_text(view, pulse, since_s)), table]
    if view.use:
        held = ", ".join(f"{name} {format_percent(used / total)}" for name, (used, total) in view.use.items() if total)
        lines.append(Text(f"held  {held}", style="dim", no_wrap=True, overflow="ellipsis"))
    if notice:
        lines.append(Text(notice, style="bold yellow"))
    return Group(*lines)


def _render_end(view: StreamView, totals: RunTotals, text: str, title: str) -> Any:
    from rich.console import Group

    rows = [
        (
            "",
            (
                short_unit_name(row.unit.name),
                format_number(row.unit.taken_total),
                format_number(row.unit.given_total),
                _rate_cell(row),
                str(row.most_workers),
                format_percent(row.busy),
                format_number(row.unit.failed_total) if row.unit.failed_total else "",
            ),
        )
        for row in totals.rows()
    ]
    table = _stage_table(view.noun, ("in", "out", rate_label(view.noun), "workers", "busy", "failed"), rows)
    return Group(_title_text(title, text, END_STYLES.get(view.state, "")), table)


END_STYLES = {"finished": "green", "failed": "red", "drained": "yellow", "cancelled": "yellow"}


def _rate_cell(row: StageRow) -> str:
    return "-" if row.rate is None else format_number(float(row.rate))


def _title_text(title: str, text: str, style: str = "") -> Any:
    from rich.text import Text

    found = Text(f"{title}: " if title else "", style="bold", no_wrap=True, overflow="ellipsis")
    return found.append(text, style=style)


def _stage_table(noun: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Any:
    """A table with a row per stage or role, each with its style; names are cut if it does not fit."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(unit_word(noun), no_wrap=True, overflow="ellipsis")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    for style, (name, *cells) in rows:
        table.add_row(Text(name), *cells, style=style)
    return table
