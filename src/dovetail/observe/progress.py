"""Progress display of a run: live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.observe.text_format import (
    format_duration,
    format_number,
    format_percent,
    format_rate,
    terminal_width,
)
from dovetail.pipeline.units import short_unit_name

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


@dataclass(frozen=True, slots=True)
class StageRow:
    """One row of the table."""

    unit: UnitView
    rate: float | None
    busy: float | None


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
        self._rate_window = RateWindow()
        self._began: float | None = None
        self._printed = False
        self._steps = 0
        self._look_at = float("-inf")
        is_live = _is_terminal(self._stream) if live is None else live
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
            self._rate_window.add(self._view(now))
        wall = self._wall()
        if wall >= self._show_at:
            self._show_at = wall + self._interval_s
            self._show(now)

    def _show(self, now: float) -> None:
        view = self._view(now)
        self._rate_window.add(view)
        since = now - (self._began or 0.0)
        if self._live is None:
            self._printed = True
            print(progress_line(view, self._rate_window, since, self._name), file=self._stream, flush=True)
        else:
            self._live.start()
            self._live.update(_render_table(view, self._rate_window, since, self._title()), refresh=True)

    def _title(self) -> str:
        return f"{self._name} (simulated)" if self._virtual else self._name

    def close(self, now: float) -> None:
        """Leave the last state on the screen, unless the run ended before its first plain line. Idempotent."""
        try:
            shown = self._printed or self._live is not None
            if self._began is not None and self._interval_s and shown:
                self._show(now)
        finally:
            self._interval_s = 0.0
            if self._live is not None:
                self._live.stop()


def progress_text(view: StreamView, pulse: RateWindow, since_s: float) -> str:
    """'1200 of 5000 items (24 %), 41.2/s, 1 min 32 s left, bottleneck caption'."""
    return ", ".join([*_essential_parts(view, pulse), *_optional_parts(view, since_s)])


def _essential_parts(view: StreamView, pulse: RateWindow) -> list[str]:
    if view.total is not None:
        share = f" ({format_percent(view.finished / view.total)})" if view.total else ""
        parts = [f"{view.finished} of {view.total} {view.noun}{share}"]
    elif view.expected:
        expected = max(view.expected, view.read)
        parts = [f"{view.finished} of about {expected} items ({format_percent(view.finished / expected)})"]
    else:
        parts = [f"{view.finished} items ({view.read} read)"]
    parts.append(format_rate(pulse.rate))
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
    line = f"{name}: " if name else ""
    line += ", ".join(_essential_parts(view, pulse))
    for part in (*(f", {text}" for text in _optional_parts(view, since_s)), f" | {', '.join(stages)}"):
        if len(line) + len(part) <= width:
            line += part
    return line


def workers_text(unit: UnitView) -> str:
    """'12 +3 -1': ready, starting, draining."""
    starting = f" +{unit.starting}" if unit.starting else ""
    draining = f" -{unit.draining}" if unit.draining else ""
    return f"{unit.ready}{starting}{draining}"


def _is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can overwrite lines."""
    return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")


def _open_live_display(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.live import Live

    # rich honours NO_COLOR only if it is not empty, and so does this
    console = Console(file=stream, force_terminal=True, no_color=bool(os.environ.get("NO_COLOR")) or None)
    # stdout is data and must not be redirected through the console; other output on stderr appears above the table
    return Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=stream is sys.stderr)


def _render_table(view: StreamView, pulse: RateWindow, since_s: float, title: str) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage")
    for column in ("items/s", "queue", "in flight", "workers", "busy", "failed"):
        table.add_column(column, justify="right")
    for row in pulse.rows():
        unit = row.unit
        style = "yellow" if unit.name == view.bottleneck else "dim" if unit.finished else ""
        mark = " *" if unit.name == view.bottleneck else ""
        cells = (
            format_number(unit.queued),
            format_number(unit.in_flight),
            workers_text(unit),
            format_percent(row.busy),
        )
        failed = str(unit.failed_total) if unit.failed_total else ""
        speed = "-" if row.rate is None else format_number(float(row.rate))
        table.add_row(Text(f"{short_unit_name(unit.name)}{mark}"), speed, *cells, failed, style=style)
    parts = [Text(f"{title}: " if title else "", style="bold").append(progress_text(view, pulse, since_s), style="")]
    if view.use:
        held = ", ".join(f"{name} {format_percent(used / total)}" for name, (used, total) in view.use.items() if total)
        return Group(*parts, table, Text(f"held  {held}", style="dim"))
    return Group(*parts, table)
