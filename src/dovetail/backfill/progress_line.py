"""Progress line of a running backfill on stderr: rows, fragments, rate, time left, slowest phase.

If no results arrive, the line shows for how long."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from typing import TextIO

from dovetail.backfill.result import PHASE_NAMES, BackfillResult
from dovetail.observe.text_format import format_count, format_duration, format_number

INTERVAL_S, TERMINAL_INTERVAL_S = 10.0, 0.5
RATE_WINDOW_S = 30.0
SILENCE_S = 10.0
"""Tasks take one or two seconds, unless a single row takes longer."""


class ProgressLine:
    """Writes the progress to stderr: one line that is overwritten in a terminal, else a line every 10 s."""

    def __init__(self, filled: BackfillResult, show: bool | None, stream: TextIO | None = None) -> None:
        """`show` None: progress only in a terminal, notes always; False: neither."""
        self._filled = filled
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._is_shown = self._live if show is None else show
        self._prints_notes = show is not False
        self._every_s = TERMINAL_INTERVAL_S if self._live else INTERVAL_S
        self._width = 0
        self._last = time.monotonic()
        """Time of the last result, or of the start."""
        self._samples: deque[tuple[float, int]] = deque([(self._last, 0)])
        self.rows_total = self.rows_left = self.fragments_total = 0
        self.committed = 0
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dovetail-progress", daemon=True)

    def start_round(self, rows: int, left: int, fragments: int) -> None:
        """Start a round of `rows` rows of which `left` are to be computed; the others do not count for the rate."""
        with self._lock:
            self.rows_total, self.rows_left, self.fragments_total = rows, left, fragments
            self.committed = 0
            self._last = time.monotonic()
            self._samples = deque([(self._last, rows - left)])
        if self._is_shown and self._thread.ident is None:
            self._thread.start()

    def print_note(self, text: str) -> None:
        """Print a line of its own, also outside of a terminal."""
        if self._prints_notes:
            with self._lock:
                self._line("")
                print(f"{self._filled.column}: {text}", file=self._stream, flush=True)

    def on_result(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._last = now
            self._samples.append((now, self.rows_total - self.rows_left))
            while len(self._samples) > 2 and self._samples[0][0] < now - RATE_WINDOW_S:
                self._samples.popleft()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            with self._lock:
                self._line(self.text(time.monotonic()))

    def text(self, now: float) -> str:
        done = self.rows_total - self.rows_left
        share = done / self.rows_total if self.rows_total else 1.0
        text = f"{self._filled.column}: {100 * share:.0f} %  {done:,} of {self.rows_total:,} rows"
        text += f", {self.committed} of {self.fragments_total} fragments committed"
        rate = self._rate(now)
        if rate:
            text += f", {format_number(rate)} rows/s, {format_duration(self.rows_left / rate)} left"
        if self._filled.rows:
            text += f"; slowest: {PHASE_NAMES[self._filled.slowest]}"
        if self._filled.errors:
            text += f"; {format_count(self._filled.errors, 'error')}"
        quiet = now - self._last
        if quiet >= SILENCE_S and self.rows_left:
            text += f"; no results for {quiet:.0f} s; use a timeout to stop rows that hang"
        return text

    def _rate(self, now: float) -> float:
        first, rows = self._samples[0]
        return (self.rows_total - self.rows_left - rows) / (now - first) if now > first else 0.0

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._is_shown:
            self._line("")

    def _line(self, text: str) -> None:
        if self._live:
            text = text[: shutil.get_terminal_size().columns - 1]
            self._stream.write("\r" + text.ljust(self._width) + ("\r" if not text else ""))
            self._width = len(text)
            self._stream.flush()
        elif text:
            print(text, file=self._stream, flush=True)
