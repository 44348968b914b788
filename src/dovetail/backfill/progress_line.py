"""Progress line of a running backfill on stderr: rows, fragments, rate, time left, slowest phase.
also when nothing comes back: then for how long, and what to do about it."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TextIO

from dovetail.backfill.result import PHASE_NAMES, BackfillResult
from dovetail.observe.text_format import format_duration, format_number

INTERVAL_S, TERMINAL_INTERVAL_S = 10.0, 0.5
RATE_WINDOW_S = 30.0
SILENCE_S = 10.0
"""Tasks come back after a second or two, unless a row takes longer."""


class ProgressLine:
    """Told of every task that came back; writes on stderr, in a terminal over and over the same line."""

    def __init__(self, filled: BackfillResult, show: bool | None, stream: TextIO | None = None) -> None:
        """`show` None: how far it is only in a terminal; False: nothing at all."""
        self._filled = filled
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._is_shown = self._live if show is None else show
        self._prints_notes = show is not False
        self._every_s = TERMINAL_INTERVAL_S if self._live else INTERVAL_S
        self._width = 0
        self._last = time.monotonic()
        """When something came back, or began."""
        self._samples: deque[tuple[float, int]] = deque([(self._last, 0)])
        self.rows_total = self.rows_left = self.fragments_total = 0
        self.committed = 0
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dovetail-progress", daemon=True)

    def start_round(self, rows: int, left: int, fragments: int) -> None:
        """A round: of so many rows some may be kept from before, which says nothing of how fast it is."""
        with self._lock:
            self.rows_total, self.rows_left, self.fragments_total = rows, left, fragments
            self.committed = 0
            self._last = time.monotonic()
            self._samples = deque([(self._last, rows - left)])
        if self._is_shown and self._thread.ident is None:
            self._thread.start()

    def print_note(self, text: str) -> None:
        """A line of its own, whoever looks."""
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
        told = f"{self._filled.column}: {100 * share:.0f} %  {done:,} of {self.rows_total:,} rows"
        told += f", {self.committed} of {self.fragments_total} fragments committed"
        rate = self._rate(now)
        if rate:
            told += f", {format_number(rate)} rows/s, {format_duration(self.rows_left / rate)} left"
        if self._filled.rows:
            told += f"; slowest: {PHASE_NAMES[self._filled.slowest]}"
        if self._filled.errors:
            told += f"; {self._filled.errors:,} errors"
        quiet = now - self._last
        if quiet >= SILENCE_S and self.rows_left:
            told += f"; nothing came back for {quiet:.0f} s: rows that never do are ended by a timeout"
        return told

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
            self._stream.write("\r" + text.ljust(self._width) + ("\r" if not text else ""))
            self._width = len(text)
            self._stream.flush()
        elif text:
            print(text, file=self._stream, flush=True)
