"""History of a run read back from its journal: views, worker lifetimes, events, resource use, status."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, Problem
from dovetail.observe.failed_items import read_failures
from dovetail.observe.journal import read_lines_from
from dovetail.observe.run_folder import RunFolder, number_field, read_json_object
from dovetail.observe.run_status import run_status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.observe.failed_items import RecordedFailure
    from dovetail.scheduling.plan import Plan

MIN_INTERVAL_S = 1e-9


@dataclass(frozen=True, slots=True)
class UnitPoint:
    """One unit between two views: rates are differences of totals."""

    t: float
    """End of the interval, in seconds of the run's clock."""
    rate: float
    """Input items per second."""
    queued: int
    in_flight: int
    ready: int
    starting: int
    draining: int
    busy: float | None
    """Share of its ready workers' time spent in user code; above 1 with several slots. None: no worker."""


@dataclass(frozen=True, slots=True)
class ViewRecord:
    """One view: the run, and the last known state of every unit."""

    t: float
    run: Mapping[str, Any]
    units: Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class WorkerLifetime:
    """Start and end of a worker, if it was recorded individually."""

    worker: int
    unit: str
    node: str
    """Node; for a gang that of rank 0."""
    gpus: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    """Node of each rank, for a gang on several nodes."""
    started: float | None = None
    ready: float | None = None
    ended: float | None = None
    end: str = ""
    """stopped, lost, or empty while it exists."""
    why: str = ""

    def node_of(self, rank: int) -> str:
        return self.nodes[rank] if rank < len(self.nodes) else self.node


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """An event line: a note, a node, a request, the loss of a worker."""

    t: float
    kind: str
    text: str
    data: Mapping[str, Any]


@dataclass(slots=True)
class RunHistory:
    """The contents of a run folder except the plan, which is read on demand."""

    folder: RunFolder
    header: Mapping[str, Any]
    ticks: list[ViewRecord] = field(default_factory=list)
    timeline: list[TimelineEvent] = field(default_factory=list)
    worker_lifetimes: dict[int, WorkerLifetime] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(unit, start | ready | stop | stopped | lost) -> number of workers without individual lines."""
    unit_uses: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Unit -> resource use of its workers over time; empty in a simulated run. Fields as in
    observe.telemetry.UnitUse."""
    gpu_uses: dict[tuple[str, int], list[Mapping[str, Any]]] = field(default_factory=dict)
    """GPU use by node ("" on one machine) and card number, as in machine.gpus.CardUse."""
    machine_uses: list[Mapping[str, Any]] = field(default_factory=list)
    """Host use, as in machine.host_usage.HostUse; on a cluster, the sum of all machines."""
    node_uses: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Host use by node of a cluster, with `workers`: unit -> number of workers."""

    @classmethod
    def load(cls, path: str | Path) -> RunHistory:
        """Read whatever is readable; raises ConfigError only if this is not a run folder."""
        return HistoryReader(path).read()

    @classmethod
    def open(cls, path: str | Path) -> RunHistory:
        """Only the header; raises ConfigError if this is not a run folder."""
        folder = RunFolder(Path(path))
        header = read_json_object(folder.header)
        if not header:
            message = "is not a run folder: no readable run.json"
            raise ConfigError(Problem("DT302", message, fixes=("dovetail ls lists all runs",), place=str(path)))
        return cls(folder, header)

    def update_header(self, header: Mapping[str, Any]) -> None:
        self.header = header

    @property
    def id(self) -> str:
        return self.folder.id

    @property
    def name(self) -> str:
        return str(self.header.get("name", ""))

    @property
    def virtual(self) -> bool:
        return bool(self.header.get("virtual"))

    @property
    def run(self) -> Mapping[str, Any]:
        """The last view of the run."""
        return self.ticks[-1].run if self.ticks else {}

    @property
    def units(self) -> Mapping[str, Mapping[str, Any]]:
        """The last view of each unit."""
        return self.ticks[-1].units if self.ticks else {}

    @property
    def seconds(self) -> float:
        """Elapsed seconds on the run's own clock."""
        return self.ticks[-1].t if self.ticks else 0.0

    def status(self, wall: float | None = None) -> str:
        return run_status(self.header, time.time() if wall is None else wall)

    def plan(self) -> Plan | None:
        """The plan at the start, if it exists and is readable."""
        from dovetail.scheduling.plan import Plan

        try:
            return Plan.from_json(self.folder.plan.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError):
            return None

    def series(self, unit: str) -> list[UnitPoint]:
        """One point per interval between two views that include the unit."""
        return [
            unit_point(unit, before, after)
            for before, after in pairwise(self.ticks)
            if unit in after.units and after.t - before.t > MIN_INTERVAL_S
        ]

    def rates(self, what: str = "finished") -> list[tuple[float, float]]:
        """(time, source items per second up to it) between two views."""
        return [
            (after.t, max(0.0, (number_field(after.run, what) - number_field(before.run, what)) / (after.t - before.t)))
            for before, after in pairwise(self.ticks)
            if after.t - before.t > MIN_INTERVAL_S
        ]

    def bottlenecks(self) -> dict[str, float]:
        """Unit -> share of the time in which it was the bottleneck, largest first."""
        held: dict[str, float] = {}
        for before, after in pairwise(self.ticks):
            name = str(after.run.get("bottleneck") or "")
            if name:
                held[name] = held.get(name, 0.0) + max(0.0, after.t - before.t)
        total = sum(held.values())
        shares = ((name, seconds / total) for name, seconds in held.items() if total > 0)
        return dict(sorted(shares, key=lambda pair: -pair[1]))

    def notes(self, what: str) -> list[TimelineEvent]:
        """Notes of one kind: decision, error, ..."""
        return [it for it in self.timeline if it.kind == "note" and it.data.get("what") == what]

    def failures(self) -> list[RecordedFailure]:
        """The failed items that were recorded. An item that ended an earlier attempt was processed again since."""
        has_failed = self.header.get("status") == "failed"
        return [failure for failure in read_failures(self.folder.errors) if has_failed or not failure.ended_run]


class HistoryReader:
    """History of a run that is still being written: every `read` parses only the lines since the one before it."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._history: RunHistory | None = None
        self._seen: dict[str, Mapping[str, Any]] = {}
        self._file_id = 0
        self._offset = 0

    def read(self) -> RunHistory:
        """The same object each time, with everything that was written so far."""
        if self._history is None:
            self._history = RunHistory.open(self._path)
            self._add_lines(self._history.folder.rotated_events, 0)
        else:
            self._history.update_header(read_json_object(self._history.folder.header) or self._history.header)
        folder = self._history.folder
        current = _file_id(folder.events)
        if current != self._file_id:
            if self._file_id and self._file_id == _file_id(folder.rotated_events):
                self._add_lines(folder.rotated_events, self._offset)
            self._file_id, self._offset = current, 0
        self._offset = self._add_lines(folder.events, self._offset)
        return self._history

    def _add_lines(self, path: Path, offset: int) -> int:
        """Add the complete lines after `offset`; returns where they end."""
        assert self._history is not None
        lines, end = read_lines_from(path, offset)
        for line in lines:
            _apply_line(self._history, line, self._seen)
        return end


def _file_id(path: Path) -> int:
    """Changes when the file is replaced; 0: there is no such file."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def unit_point(unit: str, before: ViewRecord, after: ViewRecord) -> UnitPoint:
    old, new = before.units.get(unit, {}), after.units[unit]
    seconds = after.t - before.t
    workers = (
        number_field(old, "ready")
        + number_field(old, "draining")
        + number_field(new, "ready")
        + number_field(new, "draining")
    ) / 2
    busy = max(0.0, number_field(new, "busy_s_total") - number_field(old, "busy_s_total"))
    return UnitPoint(
        t=after.t,
        rate=max(0.0, number_field(new, "taken_total") - number_field(old, "taken_total")) / seconds,
        queued=int(number_field(new, "queued")),
        in_flight=int(number_field(new, "in_flight")),
        ready=int(number_field(new, "ready")),
        starting=int(number_field(new, "starting")),
        draining=int(number_field(new, "draining")),
        busy=busy / (workers * seconds) if workers else None,
    )


def _apply_line(history: RunHistory, line: Mapping[str, Any], seen: dict[str, Mapping[str, Any]]) -> None:
    t, kind = line.get("t"), line.get("k")
    if not isinstance(t, int | float):
        return
    if kind == "unit" and isinstance(line.get("name"), str):
        seen[line["name"]] = line
    elif kind == "run":
        if not history.ticks or t >= history.ticks[-1].t:
            history.ticks.append(ViewRecord(float(t), line, dict(seen)))
    elif kind == "worker" and isinstance(line.get("w"), int):
        _apply_worker(history, float(t), line)
    elif kind == "workers" and isinstance(line.get("units"), dict):
        for unit, counts in line["units"].items():
            for did, count in counts.items() if isinstance(counts, dict) else ():
                history.counts[unit, did] = history.counts.get((unit, did), 0) + int(
                    number_field(counts, did) and count
                )
    elif kind in ("unit_use", "gpu_use", "machine_use", "node_use"):
        _apply_usage(history, line)
    elif kind in ("note", "node", "asked", "input"):
        history.timeline.append(TimelineEvent(float(t), str(kind), _event_text(line), line))


def _apply_usage(history: RunHistory, line: Mapping[str, Any]) -> None:
    match line:
        case {"k": "unit_use", "unit": str(unit)}:
            history.unit_uses.setdefault(unit, []).append(line)
        case {"k": "gpu_use", "index": int(card)}:
            history.gpu_uses.setdefault((str(line.get("node", "")), card), []).append(line)
        case {"k": "node_use", "node": str(node)}:
            history.node_uses.setdefault(node, []).append(line)
        case {"k": "machine_use"}:
            history.machine_uses.append(line)


def _event_text(line: Mapping[str, Any]) -> str:
    match line.get("k"):
        case "note":
            return str(line.get("text", ""))
        case "node":
            why = f": {line['why']}" if line.get("why") else ""
            return f"node {line.get('node')} {line.get('do')}{why}"
        case "asked":
            about = f" {line['unit']} to {line.get('to')}" if line.get("unit") else ""
            return f"asked to {line.get('do')}{about}" + (f": {line['why']}" if line.get("why") else "")
        case _:
            return f"the input ended after {line.get('items')} items"


def _apply_worker(history: RunHistory, t: float, line: Mapping[str, Any]) -> None:
    worker, did = line["w"], line.get("do")
    at = line.get("at")
    t = float(at) if isinstance(at, int | float) else t  # repeated after a rotation
    life = history.worker_lifetimes.get(worker)
    if life is None:
        life = history.worker_lifetimes[worker] = WorkerLifetime(
            worker, str(line.get("unit", "")), str(line.get("node", ""))
        )
    match did:
        case "start":
            gpus, nodes = line.get("gpus"), line.get("nodes")
            life.started, life.gpus = t, tuple(gpus) if isinstance(gpus, list) else ()
            life.nodes = tuple(map(str, nodes)) if isinstance(nodes, list) else ()
        case "ready":
            life.ready = t
        case "stop":
            life.why = str(line.get("why") or "")
        case "stopped" | "lost":
            life.ended, life.end = t, str(did)
            life.why = str(line.get("why") or life.why)
            if did == "lost":
                text = f"worker {worker} of {life.unit} on {life.node} was lost: {life.why}"
                history.timeline.append(TimelineEvent(t, "lost", text, line))
