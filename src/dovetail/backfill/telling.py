"""How far is it? One line: rows, fragments, commits, speed, the time that is left, and the slowest part."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

from dovetail.backfill.filled import PARTS, Filled
from dovetail.observe.words import duration, number

if TYPE_CHECKING:
    from dovetail.backfill.job import Done

EVERY_S, EVERY_IN_TERMINAL_S = 10.0, 0.5
WINDOW_S = 30.0


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
        self._began = self._due = time.monotonic()
        self._due += self._every_s
        self._width = 0
        self._seen: deque[tuple[float, int]] = deque([(self._began, 0)])
        self.rows_total = self.rows_left = self.fragments_total = 0
        self.committed = 0

    def begin(self, rows: int, left: int, fragments: int) -> None:
        """A round: of so many rows some may be kept from before, which says nothing of how fast it is."""
        self.rows_total, self.rows_left, self.fragments_total = rows, left, fragments
        self.committed = 0
        self._seen = deque([(time.monotonic(), rows - left)])

    def say(self, text: str) -> None:
        """A line of its own, whoever looks."""
        if self._says:
            self._line("")
            print(f"{self._filled.column}: {text}", file=self._stream, flush=True)

    def saw(self, _done: Done | None = None) -> None:
        now = time.monotonic()
        self._seen.append((now, self.rows_total - self.rows_left))
        while len(self._seen) > 2 and self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()
        if self._shown and now >= self._due:
            self._due = now + self._every_s
            self._line(self.line(now))

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
        return told

    def _rate(self, now: float) -> float:
        first, rows = self._seen[0]
        return (self.rows_total - self.rows_left - rows) / (now - first) if now > first else 0.0

    def close(self) -> None:
        if self._shown:
            self._line("")

    def _line(self, text: str) -> None:
        if self._live:
            self._stream.write("\r" + text.ljust(self._width) + ("\r" if not text else ""))
            self._width = len(text)
            self._stream.flush()
        elif text:
            print(text, file=self._stream, flush=True)
