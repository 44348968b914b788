"""Log files of workers: find them, read new lines, follow them until the run ends, and print them during a run."""

from __future__ import annotations

import heapq
import sys
import time
from collections import deque
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

from dovetail.control.commands import StartWorker
from dovetail.control.log_lines import split_log_line
from dovetail.errors import ConfigError, Problem, did_you_mean
from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import read_json_object
from dovetail.observe.run_status import run_status
from dovetail.text_format import terminal_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import TextIO

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.observe.run_folder import RunFolder

POLL_INTERVAL_S = 0.2
READ_BYTES = 1 << 16


@dataclass(slots=True)
class WorkerLog:
    """Log file of one worker process, and the position up to which it was read."""

    path: Path
    worker: int
    rank: int
    unit: str
    node: str = ""
    offset: int = 0
    partial_line: bytes = b""
    show_node: bool = False
    """Whether the run has several nodes."""

    @property
    def label(self) -> str:
        where = f" on {self.node}" if self.node and self.show_node else ""
        return f"{self.unit} {self.worker}" + (f" rank {self.rank}" if self.rank else "") + where

    def read(self) -> Iterator[str]:
        """New complete lines; an incomplete last line is kept for the next read."""
        before = -1
        while self.offset != before:
            before = self.offset
            yield from self.read_block()

    def read_block(self) -> list[str]:
        """New complete lines of at most READ_BYTES."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *lines, self.partial_line = (self.partial_line + data).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def remainder(self) -> Iterator[str]:
        if self.partial_line:
            yield self.partial_line.decode(errors="replace")
            self.partial_line = b""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a worker printed."""

    log: WorkerLog
    time: str
    """As in the file, in UTC; empty if it is not known."""
    text: str


def log_lines(log: WorkerLog, *, ended: bool, tail: int | None = None) -> Iterator[LogLine]:
    """New lines of a log, or the last `tail` of them; `ended`: also an incomplete last line."""
    lines: Iterable[str] = chain(log.read(), log.remainder() if ended else ())
    for line in lines if tail is None else deque(lines, tail):
        yield LogLine(log, *split_log_line(line))


def merge_by_time(logs: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    """Lines of several workers in the order of their times; a line without a time follows the line above it."""
    timed = (_with_known_times(lines) for lines in logs)
    return (line for _, line in heapq.merge(*timed, key=itemgetter(0)))


def _with_known_times(lines: Iterable[LogLine]) -> Iterator[tuple[str, LogLine]]:
    known = ""
    for line in lines:
        known = line.time or known
        yield known, line


def find_worker_logs(
    folder: RunFolder, wanted: str | None = None, known: dict[Path, WorkerLog] | None = None
) -> list[WorkerLog]:
    """Logs of one worker, of the workers of a stage or unit, or of all, in start order. `known`: logs found before,
    which are returned if there are no others."""
    paths = log_paths(folder.logs)
    if known is not None and all(path in known for path in paths):
        return list(known.values())
    lives = RunHistory.load(folder.path).worker_lifetimes
    units = {number: life.unit for number, life in lives.items()}
    several = len({node for life in lives.values() for node in (life.nodes or (life.node,))}) > 1
    found = []
    for path, (worker, rank) in paths.items():
        node = lives[worker].node_of(rank) if worker in lives else ""
        found.append(WorkerLog(path, worker, rank, units.get(worker, "worker"), node, show_node=several))
    if wanted is None:
        return found
    chosen = [log for log in found if wanted == str(log.worker) or wanted in (log.unit, *log.unit.split("+"))]
    if not chosen:
        _check_worker_exists(folder, wanted, found, units)
    return chosen


def follow_worker_logs(folder: RunFolder, wanted: str | None, known: dict[Path, WorkerLog]) -> Iterator[LogLine]:
    """Yield new lines until the run has ended and all output was read."""
    while True:
        running = run_status(read_json_object(folder.header), time.time()) == "running"
        logs = [known.setdefault(found.path, found) for found in find_worker_logs(folder, wanted, known)]
        yield from merge_by_time(log_lines(log, ended=not running) for log in logs)
        if not running:
            return
        time.sleep(POLL_INTERVAL_S)


def log_paths(folder: Path) -> dict[Path, tuple[int, int]]:
    """Log file -> worker and rank, in start order."""
    paths = folder.glob("*.log") if folder.is_dir() else ()
    found = {path: place for path in paths if (place := _worker_and_rank(path)) is not None}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _worker_and_rank(path: Path) -> tuple[int, int] | None:
    """(worker, rank) of a file such as 12.log or 12.1.log."""
    worker, _, rank = path.stem.partition(".")
    try:
        return int(worker), int(rank or 0)
    except ValueError:
        return None


def _check_worker_exists(folder: RunFolder, wanted: str, logs: list[WorkerLog], units: dict[int, str]) -> None:
    names = sorted({name for unit in units.values() for name in (unit, *unit.split("+"))})
    if wanted in names or (wanted.isdigit() and int(wanted) in units):
        return  # it exists and has printed nothing yet
    numbers = sorted({log.worker for log in logs} | set(units))
    known = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else ", ".join(map(str, numbers)) or "none"
    evidence = (f"workers: {known}", f"stages: {', '.join(names) or 'none'}")
    message = f"run {folder.id} has no worker {wanted!r}{did_you_mean(wanted, names)}"
    raise ConfigError(Problem("DT368", message, evidence, (f"dovetail logs {folder.id}",)))


class LogPrinter:
    """Observer that prints the output of workers during a run."""

    def __init__(self, logs: Path, to: TextIO | None = None) -> None:
        self._folder = logs
        self._stream = to or sys.stderr
        self._units: dict[int, str] = {}
        self._logs: dict[Path, WorkerLog] = {}
        self._next = float("-inf")

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002
        for command in commands:
            if type(command) is StartWorker:
                self._units[command.worker] = "+".join(hosted.name for hosted in command.hosted)
        if now >= self._next:
            self._next = now + POLL_INTERVAL_S
            self._poll()

    def close(self, now: float) -> None:  # noqa: ARG002
        while self._poll():
            pass
        for log in self._logs.values():
            self._print(log, list(log.remainder()))

    def _poll(self) -> bool:
        """Print at most one block of every file, because more is not readable; returns whether there was output."""
        new = False
        for path, (worker, rank) in log_paths(self._folder).items():
            log = self._logs.get(path)
            if log is None:
                log = self._logs[path] = WorkerLog(path, worker, rank, self._units.get(worker, "worker"))
            before = log.offset
            self._print(log, log.read_block())
            new = new or log.offset > before
        return new

    def _print(self, log: WorkerLog, lines: Sequence[str]) -> None:
        for line in lines:
            self._stream.write(f"[{log.label}] {terminal_text(split_log_line(line)[1])}\n")
        self._stream.flush()
