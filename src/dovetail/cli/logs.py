"""`dovetail logs`: output of the workers of a run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from dovetail.cli.options import json_option, run_argument
from dovetail.errors import ConfigError, Problem, did_you_mean
from dovetail.observe.history import RunHistory, run_status
from dovetail.observe.run_folder import LAST_RUN, find_run, read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.observe.run_folder import RunFolder

POLL_S = 0.2
READ_BYTES = 1 << 16


@dataclass(slots=True)
class WorkerLog:
    """Log file of one worker process, and the position up to which it was printed."""

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
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                while data := file.read(READ_BYTES):
                    self.offset += len(data)
                    *lines, self.partial_line = (self.partial_line + data).split(b"\n")
                    yield from (line.decode(errors="replace").rstrip("\r") for line in lines)
        except FileNotFoundError:
            return

    def remainder(self) -> Iterator[str]:
        if self.partial_line:
            yield self.partial_line.decode(errors="replace")
            self.partial_line = b""


@click.command(
    epilog="""\b
Examples:
  dovetail logs last                     # all workers, each line with its worker
  dovetail logs last caption -f          # the workers of one stage, continuously
  dovetail logs 20261116-0305 12 --tail 50
"""
)
@run_argument(default=LAST_RUN)
@click.argument("worker", required=False)
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the run ends.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines of each worker.")
@json_option("Print one JSON object per line.")
def logs(run: str, worker: str | None, follow: bool, tail: int | None, as_json: bool) -> None:
    """Print the output of the workers of RUN (an id, the start of one, `last`, or a folder; default: the latest run).

    WORKER selects one worker by number, or the workers of a stage by name.
    """
    folder = find_run(run)
    found = _find_logs(folder, worker)
    if not found and not follow:
        click.echo(f"no output from workers of run {folder.id}" + (f" (worker {worker})" if worker else ""), err=True)
        return
    one = len({(log.worker, log.rank) for log in found}) == 1 and worker is not None and worker.isdigit()
    for log in found:
        lines = [*log.read(), *(() if follow else log.remainder())]
        for line in lines[max(0, len(lines) - tail) :] if tail is not None else lines:
            _print_line(log, line, as_json, plain=one)
    if follow:
        _follow(folder, worker, {log.path: log for log in found}, as_json, plain=one)


def _follow(folder: RunFolder, worker: str | None, known: dict[Path, WorkerLog], as_json: bool, *, plain: bool) -> None:
    """Prints until the run has ended and all output is shown."""
    while True:
        running = run_status(read_json_object(folder.header), time.time()) == "running"
        for log in _find_logs(folder, worker, quick=known):
            log = known.setdefault(log.path, log)
            for line in [*log.read(), *(() if running else log.remainder())]:
                _print_line(log, line, as_json, plain=plain)
        if not running:
            return
        time.sleep(POLL_S)


def _print_line(log: WorkerLog, line: str, as_json: bool, *, plain: bool) -> None:
    if as_json:
        about = {"worker": log.worker, "rank": log.rank, "unit": log.unit, "node": log.node}
        click.echo(json.dumps({**about, "line": line}))
    else:
        click.echo(line if plain else f"[{log.label}] {line}")


def _find_logs(folder: RunFolder, wanted: str | None, quick: dict[Path, WorkerLog] | None = None) -> list[WorkerLog]:
    """Logs of one worker, of the workers of a stage or unit, or of all, in start order."""
    paths = (
        [path for path in folder.logs.glob("*.log") if _worker_and_rank(path) is not None]
        if folder.logs.is_dir()
        else []
    )
    if quick is not None and all(path in quick for path in paths):
        return list(quick.values())
    lives = RunHistory.load(folder.path).worker_lifetimes
    units = {number: life.unit for number, life in lives.items()}
    several = len({node for life in lives.values() for node in (life.nodes or (life.node,))}) > 1
    found = []
    for path in sorted(paths, key=lambda path: _worker_and_rank(path) or (0, 0)):
        worker, rank = _worker_and_rank(path) or (0, 0)
        node = lives[worker].node_of(rank) if worker in lives else ""
        found.append(WorkerLog(path, worker, rank, units.get(worker, "worker"), node, show_node=several))
    if wanted is None:
        return found
    chosen = [log for log in found if wanted == str(log.worker) or wanted in (log.unit, *log.unit.split("+"))]
    if not chosen:
        _check_worker_exists(folder, wanted, found, units)
    return chosen


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
