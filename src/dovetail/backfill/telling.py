"""How far is it? One line: rows, fragments, commits, speed, the time that is left, and the slowest part. It is told
also when nothing comes back: then for how long, and what to do about it."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TextIO

from dovetail.backfill.filled import PARTS, Filled
from dovetail.observe.words import duration, number

EVERY_S, EVERY_IN_TERMINAL_S = 10.0, 0.5
WINDOW_S = 30.0
QUIET_S = 10.0
"""Tasks come back after a second or two, unless a row takes longer."""


class Telling:
    """Told of every task that came back; writes on stderr, in a terminal over and over the same line."""

    def __init__(self, filled: Filled, show: bool | None, stream: TextIO | None = None) -> None:
        """`show` None: how far it is only in a terminal; False: nothing at all."""
        self._filled = filled
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._shown = self._live if show is None else show
        self._says = show is not False
        self._every_s = EVERY_IN_TERMINAL_S if self._live else EVERY_S
        self._width = 0
        self._last = time.monotonic()
        """When something came back, or began."""
        self._seen: deque[tuple[float, int]] = deque([(self._last, 0)])
        self.rows_total = self.rows_left = self.fragments_total = 0
        self.committed = 0
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="dovetail-progress", daemon=True)

    def begin(self, rows: int, left: int, fragments: int) -> None:
        """A round: of so many rows some may be kept from before, which says nothing of how fast it is."""
        with self._lock:
            self.rows_total, self.rows_left, self.fragments_total = rows, left, fragments
            self.committed = 0
            self._last = time.monotonic()
            self._seen = deque([(self._last, rows - left)])
        if self._shown and self._thread.ident is None:
            self._thread.start()

    def say(self, text: str) -> None:
        """A line of its own, whoever looks."""
        if self._says:
            with self._lock:
                self._line("")
                print(f"{self._filled.column}: {text}", file=self._stream, flush=True)

    def saw(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._last = now
            self._seen.append((now, self.rows_total - self.rows_left))
            while len(self._seen) > 2 and self._seen[0][0] < now - WINDOW_S:
                self._seen.popleft()

    def _go_on(self) -> None:
        while not self._closed.wait(self._every_s):
            with self._lock:
                self._line(self.line(time.monotonic()))

    def line(self, now: float) -> str:
        done = self.rows_total - self.rows_left
        share = done / self.rows_total if self.rows_total else 1.0
        told = f"{self._filled.column}: {100 * share:.0f} %  {done:,} of {self.rows_total:,} rows"
        told += f", {self.committed} of {self.fragments_total} fragments committed"
        rate = self._rate(now)
        if rate:
            told += f", {number(rate)} rows/s, {duration(self.rows_left / rate)} left"
        if self._filled.rows:
            told += f"; slowest: {PARTS[self._filled.slowest]}"
        if self._filled.errors:
            told += f"; {self._filled.errors:,} errors"
        quiet = now - self._last
        if quiet >= QUIET_S and self.rows_left:
            told += f"; nothing came back for {quiet:.0f} s: rows that never do are ended by a timeout"
        return told

    def _rate(self, now: float) -> float:
        first, rows = self._seen[0]
        return (self.rows_total - self.rows_left - rows) / (now - first) if now > first else 0.0

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._shown:
            self._line("")

    def _line(self, text: str) -> None:
        if self._live:
            self._stream.write("\r" + text.ljust(self._width) + ("\r" if not text else ""))
            self._width = len(text)
            self._stream.flush()
        elif text:
            print(text, file=self._stream, flush=True)
