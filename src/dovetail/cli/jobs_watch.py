"""`dovetail jobs watch`: a live table of queues, workers and running jobs; plain lines where there is no terminal."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from dovetail.cli.colour import paint
from dovetail.cli.jobs_text import job_table, queue_table, summary_line, worker_table
from dovetail.cli.options import json_option
from dovetail.cli.queue_option import opened_store, queue_url_option
from dovetail.jobs.job import JobState
from dovetail.jobs.job_view import queue_data, worker_data
from dovetail.jobs.store import JobFilter, StoreUnavailableError
from dovetail.jobs.worker_liveness import live_workers
from dovetail.observe.terminal import is_terminal, may_colour, raw_terminal, terminal_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.store import QueueStats, Store, WorkerInfo
    from dovetail.text_format import Paint

INTERVAL_S = 1.0
LINE_INTERVAL_S = 10.0
RUNNING_SHOWN = 10
FINISHED_STATES = [state for state in JobState if state.is_finished]


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """What a queue has at one time."""

    queues: Sequence[QueueStats]
    workers: Sequence[WorkerInfo]
    running: Sequence[JobRecord]
    now_ms: int

    @classmethod
    def of(cls, store: Store) -> QueueSnapshot:
        running = store.find(JobFilter(frozenset({JobState.LEASED})), limit=RUNNING_SHOWN).jobs
        return cls(store.stats(), store.workers(), running, store.now_ms())

    @property
    def is_idle(self) -> bool:
        """No job waits or runs."""
        return not any(one.counts.get(state) for one in self.queues for state in JobState if not state.is_finished)

    def lines(self, width: int, paint: Paint) -> list[str]:
        live = live_workers(self.workers, self.now_ms)
        parts = [
            queue_table(self.queues, self.now_ms, width, paint) if self.queues else ["no jobs in this queue"],
            worker_table(live, self.now_ms, width, paint) if live else ["no workers"],
            job_table(self.running, self.now_ms, width, {}, paint) if self.running else [],
        ]
        return [line for part in parts if part for line in (*part, "")][:-1]


@click.command(
    epilog="""\b
Examples:
  dovetail jobs watch
  dovetail jobs watch --until-idle
  dovetail jobs watch --json | jq -c '.queues'
"""
)
@click.option("--until-idle", is_flag=True, help="End when no job waits or runs.")
@queue_url_option()
@json_option("Print one JSON object per second.")
def watch(url: str | None, until_idle: bool, as_json: bool) -> None:
    """Show queues, workers and running jobs until Ctrl-C; where there is no terminal, a line after each change, at most
    every 10 s."""
    with opened_store(url) as store:
        try:
            if not as_json and is_terminal(sys.stdout):
                _watch_live(store, until_idle=until_idle)
            else:
                _watch_lines(store, until_idle=until_idle, as_json=as_json)
        except KeyboardInterrupt:
            click.echo("", err=True)


def _watch_lines(store: Store, *, until_idle: bool, as_json: bool) -> None:
    """A line of JSON every second; or a line of text whenever it has changed, every ten seconds at most."""
    before, next_at = "", 0.0
    has_answered = is_away = False
    while True:
        try:
            now = QueueSnapshot.of(store)
        except StoreUnavailableError as error:
            if not has_answered:
                raise
            if not is_away:
                click.echo(f"note: {_no_answer(error)}", err=True)
            is_away = True
            time.sleep(INTERVAL_S)
            continue
        has_answered, is_away = True, False
        ends = until_idle and now.is_idle
        if as_json:
            about = {
                "now_ms": now.now_ms,
                "queues": [queue_data(one, now.now_ms) for one in now.queues],
                "workers": [worker_data(one, now.now_ms) for one in now.workers],
            }
            click.echo(json.dumps(about))
        else:
            line = summary_line(now.queues, now.workers, now.now_ms)
            if line != before and (ends or time.monotonic() >= next_at):
                click.echo(line)
                before, next_at = line, time.monotonic() + LINE_INTERVAL_S
        if ends:
            return
        time.sleep(INTERVAL_S)


def _watch_live(store: Store, *, until_idle: bool) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    colours = may_colour(sys.stdout)

    def drawn(snapshot: QueueSnapshot, note: str = "") -> Text:
        lines = snapshot.lines(terminal_width(), paint if colours else _plain)
        return Text.from_ansi("\n".join([*lines, "", note or "Ctrl-C ends the display, not the jobs"]), no_wrap=True)

    console = Console(file=raw_terminal(sys.stdout), no_color=not colours, highlight=False)
    snapshot = QueueSnapshot.of(store)
    with Live(drawn(snapshot), console=console, auto_refresh=False, transient=True) as live:
        while not (until_idle and snapshot.is_idle):
            time.sleep(INTERVAL_S)
            try:
                snapshot = QueueSnapshot.of(store)
                live.update(drawn(snapshot), refresh=True)
            except StoreUnavailableError as error:
                live.update(drawn(snapshot, _no_answer(error)), refresh=True)
    for line in snapshot.lines(terminal_width(), paint):
        click.echo(line)


def _no_answer(error: StoreUnavailableError) -> str:
    return f"the store does not answer: {error.problems[0].message}"


def _plain(text: str, style: str) -> str:  # noqa: ARG001 - the signature of a `Paint`
    return text
