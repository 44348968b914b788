"""BackfillResult: rows, fragments, commits, errors and time by phase of a finished backfill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.backfill.task import PhaseTimes
from dovetail.errors import PYTHON, Call
from dovetail.text_format import format_count, format_duration, format_number

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.errors import Surface

PHASE_NAMES = {
    "read": "reading the table",
    "compute": "the function",
    "checkpoint": "checkpoints",
    "write": "writing data files",
    "commit": "commits",
    "start": "starting the workers",
}
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

    def render(self, surface: Surface) -> str:
        """The summary, with calls as this surface spells them."""
        lines = [self._headline()]
        if self.rows:
            lines.append(f"  time of {format_count(self.workers, 'worker')}: {time_breakdown_text(self.times)}")
            lines.append(f"  slowest: {PHASE_NAMES[self.slowest]}")
        if self.errors:
            rows = format_rows(self.errors)
            calls = [surface.call(Call(f"table.{name}", (self.column,))) for name in ("errors", "retry_errors")]
            lines.append(f"  {rows} failed: {', '.join(calls)}")
        return "\n".join(lines + [f"  note: {surface.text(note)}" for note in self.notes])

    def _headline(self) -> str:
        if not self.rows and not self.fragments:
            failed = f", {self.failed_before:,} of them failed (NULL)" if self.failed_before else ""
            are = "is" if self.done_before == 1 else "are"
            done = f", {format_rows(self.done_before)} {are} already filled{failed}" if self.done_before else ""
            return f"{self.column}: nothing to do{done}"
        text = f"{self.column}: {self.status}, {format_rows(self.rows)} in {format_duration(self.seconds)}"
        if self.rows:
            text += f" ({format_number(self.rows_per_s)} rows/s)"
        text += f", {format_count(self.fragments, 'fragment')} in {format_count(self.commits, 'commit')}"
        if self.kept or self.done_before:
            earlier = self.done_before + self.kept
            text += f"; {format_rows(earlier)} {'was' if earlier == 1 else 'were'} already filled"
        return text


def time_breakdown_text(times: PhaseTimes) -> str:
    """'the function 78 %, reading the table 12 %; starting the workers 0.6 s': shares of the workers' time, largest
    first, then the times of the driver."""
    parts = times.parts()
    driver_times = {name: parts.pop(name) for name in ("start", "commit")}
    total = sum(parts.values()) or 1.0
    shares = sorted(((seconds / total, name) for name, seconds in parts.items()), reverse=True)
    worker_text = ", ".join(f"{PHASE_NAMES[name]} {100 * share:.0f} %" for share, name in shares if share >= 0.005)
    return f"{worker_text}; " + ", ".join(
        f"{PHASE_NAMES[name]} {format_duration(seconds)}" for name, seconds in driver_times.items()
    )
