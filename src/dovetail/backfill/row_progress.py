"""Progress of a backfill in rows and fragments, for the display and the run folder, and notes on stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from dovetail.backfill.result import PHASE_NAMES
from dovetail.errors import PYTHON
from dovetail.streaming.view import WorkCounts
from dovetail.text_format import terminal_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dovetail.backfill.result import BackfillResult
    from dovetail.errors import Renderer

SILENCE_S = 10.0
"""Time without a result that is displayed. Tasks take one or two seconds, unless a single row takes longer."""


class RowProgress:
    """Rows and fragments of the current round. Thread: the driver writes, the loop of the run calls `counts`."""

    def __init__(
        self,
        filled: BackfillResult,
        show: bool | None,
        stream: TextIO | None = None,
        renderer: Renderer = PYTHON,
    ) -> None:
        """`show` False: print no notes. `renderer`: the spelling of calls in notes."""
        self._filled = filled
        self._renderer = renderer
        self._stream = stream or sys.stderr
        self._prints_notes = show is not False
        self._last = time.monotonic()
        """Time of the last result, or of the start."""
        self.rows_total = self.fragments_total = self.committed = 0
        self.count_rows_left: Callable[[], int] = lambda: 0

    def start_round(self, rows: int, left: int, fragments: int) -> None:
        """Start a round of `rows` rows: `left` of them are to be computed, the others are in checkpoints."""
        self.rows_total, self.fragments_total, self.committed = rows, fragments, 0
        self.count_rows_left = lambda: left
        self._last = time.monotonic()

    def on_result(self) -> None:
        self._last = time.monotonic()

    def print_note(self, text: str) -> None:
        """Print a line of its own, also outside of a terminal."""
        if self._prints_notes:
            line = f"{self._filled.column}: {self._renderer.text(text)}"
            print(terminal_text(line), file=self._stream, flush=True)

    def counts(self) -> WorkCounts:
        done = self.rows_total - self.count_rows_left()
        return WorkCounts("rows", done, self.rows_total, self._filled.errors, tuple(self._details()))

    def _details(self) -> Iterator[str]:
        silence_s = time.monotonic() - self._last
        if silence_s >= SILENCE_S and self.count_rows_left():
            yield f"no results for {silence_s:.0f} s"
            yield "use a timeout to stop rows that hang"
        yield f"{self.committed} of {self.fragments_total} fragments committed"
        if self._filled.rows:
            yield f"slowest: {PHASE_NAMES[self._filled.slowest]}"
