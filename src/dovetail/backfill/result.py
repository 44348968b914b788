"""BackfillResult: rows, fragments, commits, errors and time by phase of a finished backfill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.backfill.task import PhaseTimes
from dovetail.errors import PYTHON, Call
from dovetail.observe.run_folder import run_reference
from dovetail.observe.summary_text import ShortSummary
from dovetail.text_format import format_count, format_duration, format_number, format_percent, plain

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.errors import Renderer
    from dovetail.text_format import Paint

PHASE_NAMES = {
    "read": "reading the table",
    "compute": "the function",
    "checkpoint": "checkpoints",
    "write": "writing data files",
    "commit": "commits",
    "start": "starting the workers",
}
MIN_SHOWN_SHARE = 0.05
"""Phases with a smaller share of the time are not shown."""
WORKER_PHASES = ("read", "compute", "checkpoint", "write")


def format_rows(count: int) -> str:
    """'1 row', '10,000 rows'."""
    return "1 row" if count == 1 else f"{count:,} rows"


@dataclass(frozen=True, slots=True)
class DroppedColumn:
    """A column that `table.drop` removes."""

    name: str
    type: str
    rows: int
    """Rows of the table."""
    version: int
    """Last version of the table that contains the column."""
    created: bool
    """Whether Dovetail created the column."""

    def __str__(self) -> str:
        rows = format_rows(self.rows)
        return f"{self.name}: {rows} of type {self.type}; version {self.version} of the table still contains them"


@dataclass(slots=True)
class BackfillResult:
    """Result of `table.backfill`; printing it shows a summary."""

    column: str
    status: str = "finished"
    """finished, or drained (repeat the call to resume)."""
    rows: int = 0
    """Computed by this call."""
    done_before: int = 0
    """Rows that were already filled."""
    kept: int = 0
    """Rows that were restored from checkpoints of an earlier call."""
    errors: int = 0
    """Rows that failed in this call and are NULL; `table.errors(column)` lists them."""
    fragments: int = 0
    """Committed by this call."""
    commits: int = 0
    version: int = 0
    """Version of the table after the last commit."""
    seconds: float = 0.0
    first_commit_s: float | None = None
    workers: int = 0
    times: PhaseTimes = field(default_factory=PhaseTimes)
    """Time by phase, summed over all workers; commits run concurrently in the driver."""
    failed_before: int = 0
    """Rows among those filled earlier that are NULL because they failed."""
    notes: list[str] = field(default_factory=list)
    run: str = ""
    folder: Path | None = None
    """Run folder; None: there was nothing to do."""

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else 0.0

    @property
    def slowest(self) -> str:
        """The phase that took the most wall-clock time."""
        parts = self.times.parts()
        for name in WORKER_PHASES:
            parts[name] /= max(1, self.workers)
        return max(parts, key=lambda name: parts[name])

    def __str__(self) -> str:
        return self.render(PYTHON)

    def render(self, renderer: Renderer, paint: Paint = plain) -> str:
        """The summary, at most five lines and notes, with calls as this renderer spells them."""
        if not self.rows and not self.fragments:
            lines = [self._nothing_to_do_text()]
        else:
            lines = self._short_summary(renderer).lines(paint)
        return "\n".join(lines + [f"note: {renderer.text(note)}" for note in self.notes])

    def _nothing_to_do_text(self) -> str:
        failed = f", {self.failed_before:,} of them failed (NULL)" if self.failed_before else ""
        are = "is" if self.done_before == 1 else "are"
        done = f", {format_rows(self.done_before)} {are} already filled{failed}" if self.done_before else ""
        return f"{self.column}: nothing to do{done}"

    def _short_summary(self, renderer: Renderer) -> ShortSummary:
        rate = f"{format_number(self.rows_per_s)} rows/s, {format_count(self.workers, 'worker')}"
        return ShortSummary(
            name=self.column,
            status=self.status,
            seconds=self.seconds,
            counts=self._count_text(),
            rate=rate if self.rows else "",
            limit=limit_text(self.slowest, self.times) if self.rows else "",
            next=self._next_step(renderer),
        )

    def _count_text(self) -> str:
        """'10,000 rows in 10 fragments and 2 commits, 1 failed; 200 rows were already filled'."""
        fragments, commits = format_count(self.fragments, "fragment"), format_count(self.commits, "commit")
        text = f"{format_rows(self.rows)} in {fragments} and {commits}, {self.errors:,} failed"
        earlier = self.done_before + self.kept
        if not earlier:
            return text
        return f"{text}; {format_rows(earlier)} {'was' if earlier == 1 else 'were'} already filled"

    def _next_step(self, renderer: Renderer) -> str:
        if self.status != "finished":
            return renderer.call(Call("table.backfill", (self.column,)))
        if self.errors:
            return renderer.call(Call("table.errors", (self.column,)))
        return f"dovetail status {run_reference(self.folder)}" if self.folder is not None else ""


def limit_text(slowest: str, times: PhaseTimes) -> str:
    """'the function 78 %, reading the table 12 % of the time of the workers'; the slowest phase first, which may be one
    of the driver: 'starting the workers 0.6 s; ...'."""
    parts = times.parts()
    total = sum(parts[name] for name in WORKER_PHASES) or 1.0
    shares = sorted(((parts[name] / total, name) for name in WORKER_PHASES), reverse=True)
    shown = [f"{PHASE_NAMES[name]} {format_percent(share)}" for share, name in shares if share >= MIN_SHOWN_SHARE]
    workers = f"{', '.join(shown)} of the time of the workers" if shown else ""
    if slowest in WORKER_PHASES:
        return workers
    return "; ".join(filter(None, (f"{PHASE_NAMES[slowest]} {format_duration(parts[slowest])}", workers)))
