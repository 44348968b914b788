"""Observer that writes the run folder: run.json, plan.json, the journal, resource use and failed items.

`on_step` is called for every step of a run, mostly with one batch that ended and one that starts: those types are
skipped by one set lookup. Totals come from the view, which is taken about once per second.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, fields
from threading import Event as Event_
from typing import TYPE_CHECKING, Any

from dovetail.control import commands as c
from dovetail.control import events as e
from dovetail.control.lifecycle import FINAL_RUN_STATES
from dovetail.observe.failed_items import MAX_ERRORS_BYTES, FailedItemLog
from dovetail.observe.journal import Journal, ViewInterval, last_line_time
from dovetail.observe.run_folder import (
    cannot_write_error,
    number_field,
    overwrite_in_place,
    read_json_object,
    write_atomically,
)
from dovetail.observe.run_header import UNSTARTED_KEY, header_text, make_header, write_secrets
from dovetail.streaming.view import StreamView, UnitView, WorkerView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.control.payload import SegmentSlice
    from dovetail.observe.run_folder import RunFolder
    from dovetail.observe.run_header import RunDescription
    from dovetail.observe.telemetry import NodeTelemetry, Telemetry

USAGE_INTERVAL_S = 5.0
MAX_GPUS_WRITTEN = 16
MAX_NODES_WRITTEN = 64
MAX_NODE_GPUS_WRITTEN = 64
"""Limit for all nodes of a cluster together."""
ROUND_DIGITS = 3
HEARTBEAT_S = 2.0
FLUSH_S = 1.0
CHECK_EVERY_STEPS = 256
WORKERS_EVERY_VIEWS = 10
MAX_WORKERS_WRITTEN = 200
WORKER_SAMPLE_INTERVAL = 50
"""With more than MAX_WORKERS_WRITTEN workers, one in this many has lines of its own."""
MAX_VIEW_INTERVAL_S = 60.0
"""Upper limit of the interval between two views of a real run; a simulated run has no such limit."""

HOT_PATH_TYPES = frozenset({e.BatchesDone, e.BatchesReturned, e.ItemsArrived, c.RunBatches, c.Cancel, c.Pull})
UNIT_FIELDS = tuple(item.name for item in fields(UnitView))
WORKER_FIELDS = tuple(item.name for item in fields(WorkerView))
RUN_FIELDS = tuple(item.name for item in fields(StreamView) if item.name not in ("now", "units", "use"))
ENDED_STATES = frozenset(state.value for state in FINAL_RUN_STATES)


class UsageWriter:
    """Writes the telemetry of a run; nothing without telemetry."""

    def __init__(self, telemetry: Telemetry | None) -> None:
        self._telemetry = telemetry
        self._due = float("-inf")

    def worker_fields(self, worker: int) -> dict[str, Any]:
        """Fields to add to its line."""
        use = self._telemetry.latest().get(worker) if self._telemetry is not None else None
        return (
            {} if use is None else {key: it for key, it in _known_fields(use).items() if key not in ("worker", "unit")}
        )

    def write(self, now: float, journal: Journal, *, last: bool = False) -> int:
        """Write units, cards, nodes and host if due, and new advice. Returns the number of bytes."""
        if self._telemetry is None:
            return 0
        size = 0
        if now >= self._due or last:
            self._due = now + USAGE_INTERVAL_S
            size = self._write_all(now, journal, self._telemetry)
        for advice in self._telemetry.advice():
            data = {"unit": advice.unit, "about": advice.about, "used": round(advice.used, ROUND_DIGITS)}
            data |= {"reason": advice.reason, "value": advice.value}
            journal.try_write(now, "note", {"what": "advice", "text": advice.text, "data": data})
        return size

    def _write_all(self, now: float, journal: Journal, telemetry: Telemetry) -> int:
        seen = telemetry.snapshot()
        size = sum(journal.write(now, "unit_use", _known_fields(use)) for use in seen.units.values())
        size += sum(journal.write(now, "gpu_use", _known_fields(card)) for card in seen.gpus[:MAX_GPUS_WRITTEN])
        if seen.machine is not None:
            nodes = {"nodes": len(seen.nodes)} if seen.nodes else {}
            size += journal.write(now, "machine_use", _known_fields(seen.machine) | nodes)
        return size + (self._write_nodes(now, journal, seen.nodes) if seen.nodes else 0)

    def _write_nodes(self, now: float, journal: Journal, nodes: Mapping[str, NodeTelemetry]) -> int:
        """On a large cluster always the same nodes, the first by name, so that each has a history."""
        size, left = 0, MAX_NODE_GPUS_WRITTEN
        for name, use in list(nodes.items())[:MAX_NODES_WRITTEN]:
            host = {} if use.host is None else _known_fields(use.host)
            size += journal.write(now, "node_use", {"node": name, "workers": dict(use.workers), **host})
            cards, left = use.gpus[:left], max(0, left - len(use.gpus))
            size += sum(journal.write(now, "gpu_use", {"node": name, **_known_fields(card)}) for card in cards)
        return size


def _known_fields(use: Any) -> dict[str, Any]:
    """The known values."""
    return {
        name: round(value, ROUND_DIGITS) if isinstance(value, float) else value
        for name, value in asdict(use).items()
        if value is not None
    }


class Recorder:
    """Writes run.json, plan.json, events.jsonl and errors/."""

    def __init__(
        self,
        folder: RunFolder,
        about: RunDescription,
        view: Callable[[float], StreamView],
        workers: Callable[[], Sequence[WorkerView]] = tuple,
        *,
        plan: str | None = None,
        item: Callable[[SegmentSlice], object] | None = None,
        key: Callable[[SegmentSlice], tuple[int, ...]] | None = None,
        wall: Callable[[], float] = time.time,
        telemetry: Telemetry | None = None,
        errors_bytes: int = MAX_ERRORS_BYTES,
    ) -> None:
        """`plan` is Plan.to_json(); `item` loads a part, so that failed items can be kept; the caller starts and stops
        `telemetry`."""
        self.folder = folder
        self._usage_writer = UsageWriter(telemetry)
        self._view, self._workers, self._wall = view, workers, wall
        self._due = self._look_at = float("-inf")
        self._flushed_at = self._beaten_at = started = wall()
        self._steps = CHECK_EVERY_STEPS
        self._view_requests: list[Event_] = []
        self._zero: float | None = None
        self._seconds_before = 0.0
        self._closed = False
        self._views = self._starts = self._rotations = 0
        self._pace = ViewInterval(most_s=float("inf") if about.virtual else MAX_VIEW_INTERVAL_S)
        self._last: dict[str, UnitView] = {}
        self._known_workers: dict[int, tuple[str, str, bool]] = {}
        self._worker_starts: dict[int, dict[str, dict[str, Any]]] = {}
        """Live worker with individual lines -> its lines `start` and `ready`, to be repeated after a rotation."""
        self._counts: Counter[tuple[str, str]] = Counter()
        self._handlers_by_type = self._handlers()
        try:
            self._journal = Journal(folder.events, folder.rotated_events)
            self._failed_items = FailedItemLog(folder.errors, item, key, limit_bytes=errors_bytes)
            if plan is not None:
                write_atomically(folder.plan, plan)
            self._header = self._first_header(about, started)
            write_secrets(folder, about)
            self._write_heartbeat(started)
        except OSError as error:
            raise cannot_write_error(folder.path, error) from None

    def watch(self, telemetry: Telemetry) -> None:
        """Record resource use from now on. Thread: any."""
        self._usage_writer = UsageWriter(telemetry)

    def request_view(self) -> Event_:
        """An event that is set after the next step has written the current state. Thread: any."""
        written = Event_()
        self._view_requests.append(written)
        return written

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        hot, handle = HOT_PATH_TYPES, self._handlers_by_type
        if self._zero is None:
            self._begin(now)
        try:
            for event in events:
                if type(event) not in hot and (note := handle.get(type(event))):
                    note(now, event)
            for command in commands:
                if type(command) not in hot and (note := handle.get(type(command))):
                    note(now, command)
            self._steps -= 1
            if now >= self._look_at or self._steps <= 0:
                self._check_timers(now)
            if self._view_requests:
                self._answer_requests(now)
        except BaseException:
            self._close_files()
            raise

    def _begin(self, now: float) -> float:
        """Engine time to run time: lines count from the start of the run; a resumed run continues its clock."""
        self._zero = self._journal.started_at = now - self._seconds_before
        return self._zero

    def close(self, now: float) -> None:
        """Write the last view and the final status, and close all files. Idempotent; also after a failure."""
        if self._header["status"] == "running":
            self._end(now, *self._outcome(now))

    def _outcome(self, now: float) -> tuple[str, str]:
        """Status and error. A run whose state is unknown has failed."""
        try:
            view = self._view(now)
        except Exception as error:
            return "failed", f"{type(error).__name__}: {error}"
        return (view.state, view.error) if view.state in ENDED_STATES else ("failed", f"it ended while {view.state}")

    def set_place_lookup(self, place: Callable[[int], str]) -> None:
        """`place`: number of a source item -> its place in the source, for people."""
        self._failed_items.place = place

    def abort(self, now: float, reason: str, status: str = "failed") -> None:
        """Record the end of a run outside of its loop: after an exception, or because it could not start."""
        if self._header["status"] == "running":
            self._end(now, status, reason)

    def _end(self, now: float, status: str, error: str) -> None:
        wall = self._wall()
        if self._zero is None:  # it ends before its first step
            self._begin(now)
        left_out = {"errors": self._failed_items.left_out, **self._journal.left_out}
        try:
            if not self._closed:
                self._last.clear()
                self._take_view(now, last=True)
                self._journal.flush()
        finally:
            # the status is written even if there was no space for the last lines
            self._header |= {"status": status, "error": error[:4000], "ended": wall, "left_out": left_out}
            self._close_files()
            try:
                self._write_heartbeat(wall)
            except OSError:  # no space for another file: overwrite the existing one
                overwrite_in_place(self.folder.header, header_text(self._header))
                raise

    def _close_files(self) -> None:
        """Close the files. Buffered data may not fit on a full disk; that must not hide the reason."""
        self._closed = True
        with suppress(OSError):
            self._journal.close()

    # --- periodic

    def _check_timers(self, now: float) -> None:
        self._steps = CHECK_EVERY_STEPS
        if now >= self._due:
            self._take_view(now)
        self._look_at = min(self._due, now + FLUSH_S)
        wall = self._wall()
        if wall - self._flushed_at >= FLUSH_S or wall < self._flushed_at:
            self._flushed_at = wall
            self._journal.flush()
        if wall - self._beaten_at >= HEARTBEAT_S or wall < self._beaten_at:
            self._write_heartbeat(wall)

    def _answer_requests(self, now: float) -> None:
        asked, self._view_requests = self._view_requests, []
        self._take_view(now)
        self._journal.flush()
        self._write_heartbeat(self._wall())
        for written in asked:
            written.set()

    def _take_view(self, now: float, *, last: bool = False) -> None:
        view = self._view(now)
        size = 0
        if self._rotations != self._journal.rotations:
            # unchanged units are not written again, unless their last line could rotate away
            self._rotations = self._journal.rotations
            self._last.clear()
            self._repeat_worker_starts(now)
        for unit in view.units:
            if self._last.get(unit.name) != unit:
                self._last[unit.name] = unit
                size += self._journal.write(now, "unit", {name: getattr(unit, name) for name in UNIT_FIELDS})
        if self._counts:
            size += self._write_counts(now)
        if self._views % WORKERS_EVERY_VIEWS == 0:
            size += self._write_workers(now)
        size += self._usage_writer.write(now, self._journal, last=last)
        self._views += 1
        # the last line of a view, so that a reader can detect a complete view
        run = {name: getattr(view, name) for name in RUN_FIELDS}
        size += self._journal.write(now, "run", {**run, "use": {name: list(pair) for name, pair in view.use.items()}})
        self._due = self._pace.next_due(now, size)
        self._header["progress"] = {
            name: run[name] for name in ("read", "total", "finished", "delivered", "failed", "noun")
        }
        self._header["progress"] |= {"seconds": round(self._run_seconds(now), 6), "state": view.state}

    def _run_seconds(self, now: float) -> float:
        return now - (self._begin(now) if self._zero is None else self._zero)

    def _write_counts(self, now: float) -> int:
        by_unit: dict[str, dict[str, int]] = {}
        for (unit, what), count in self._counts.items():
            by_unit.setdefault(unit, {})[what] = count
        self._counts.clear()
        return self._journal.write(now, "workers", {"units": by_unit})

    def _write_workers(self, now: float) -> int:
        workers = self._workers()
        shown = workers
        if len(workers) > MAX_WORKERS_WRITTEN:
            unknown = ("", "", False)
            own = [worker for worker in workers if self._known_workers.get(worker.worker, unknown)[2]]
            shown = (own or workers)[:MAX_WORKERS_WRITTEN]
        size = 0
        for worker in shown:
            line = {name: getattr(worker, name) for name in WORKER_FIELDS}
            size += self._journal.write(now, "worker_use", line | self._usage_writer.worker_fields(worker.worker))
        return size

    def _first_header(self, about: RunDescription, started: float) -> dict[str, Any]:
        before = read_json_object(self.folder.header)
        progress, earlier = before.get("progress"), before.get("resumed")
        recorded_s = number_field(progress, "seconds") if isinstance(progress, dict) else 0.0
        # views are flushed more often than the header: a resumed run must not begin before the last of them
        self._seconds_before = max(recorded_s, last_line_time(self.folder.events)) if before else 0.0
        resumed = list(earlier) if isinstance(earlier, list) else []
        if before and UNSTARTED_KEY not in before:
            resumed.append(before.get("started"))
        return make_header(self.folder, about, started) | ({"resumed": resumed} if resumed else {})

    def _write_heartbeat(self, wall: float) -> None:
        self._beaten_at = wall
        self._header["heartbeat"] = wall
        write_atomically(self.folder.header, header_text(self._header))

    # --- events

    def _handlers(self) -> dict[type[Any], Callable[[float, Any], None]]:
        return {
            c.StartWorker: self._on_start_worker,
            c.StopWorker: self._on_stop_worker,
            c.Note: self._on_note,
            c.Deliver: self._on_deliver,
            c.ReportFailure: self._on_report_failure,
            e.WorkerReady: self._on_worker_ready,
            e.WorkerStopped: self._on_worker_stopped,
            e.WorkerLost: self._on_worker_lost,
            e.NodeJoined: lambda now, it: self._write_event(now, "node", {"node": it.node.name, "do": "joined"}),
            e.NodeLeft: lambda now, it: self._write_event(
                now, "node", {"node": it.node, "do": "left", "why": it.reason}
            ),
            e.Drain: lambda now, it: self._write_event(now, "asked", {"do": "drain", "why": it.reason}),
            e.CancelRun: lambda now, it: self._write_event(now, "asked", {"do": "cancel", "why": it.reason}),
            e.PinWorkers: lambda now, it: self._write_event(
                now, "asked", {"do": "repin", "unit": it.unit, "to": it.workers}
            ),
            e.InputEnded: lambda now, it: self._write_event(now, "input", {"items": it.items}),
            e.CapacityReserved: lambda now, it: self._write_event(
                now, "reserved", {"seats": [seat.to_dict() for seat in it.seats]}
            ),
        }

    def _write_event(self, now: float, kind: str, data: Mapping[str, Any]) -> None:
        self._journal.try_write(now, kind, data)

    def _on_note(self, now: float, note: c.Note) -> None:
        if note.kind == "worker" and len(self._known_workers) > MAX_WORKERS_WRITTEN:
            self._journal.left_out["note"] += 1  # the worker counts report it in one line
            return
        self._journal.try_write(now, "note", {"what": note.kind, "text": note.text[:4000], "data": dict(note.data)})

    def _on_deliver(self, now: float, deliver: c.Deliver) -> None:
        if deliver.failed_items:
            self._failed_items.write(self._run_seconds(now), deliver.failed_items)

    def _on_report_failure(self, now: float, report: c.ReportFailure) -> None:
        self._failed_items.write(self._run_seconds(now), report.items, ended_run=True)

    def _on_start_worker(self, now: float, start: c.StartWorker) -> None:
        seat = start.seats[0] if start.seats else None
        unit = "+".join(one.name for one in start.hosted)
        self._starts += 1
        own = len(self._known_workers) < MAX_WORKERS_WRITTEN or self._starts % WORKER_SAMPLE_INTERVAL == 0
        self._known_workers[start.worker] = unit, seat.node if seat else "", own
        nodes = [it.node for it in start.seats]
        apart: dict[str, Any] = {"nodes": nodes} if len(set(nodes)) > 1 else {}  # a gang: the node of each rank
        placed = {"gpus": list(seat.gpus) if seat else [], **apart}
        self._write_worker_event(now, start.worker, "start", **placed)
        if own:
            self._worker_starts[start.worker] = {"start": {**placed, "at": self._run_seconds(now)}}

    def _on_worker_ready(self, now: float, event: e.WorkerReady) -> None:
        self._write_worker_event(now, event.worker, "ready", setup_s=event.setup_s)
        if event.worker in self._worker_starts:
            done = {"setup_s": event.setup_s, "at": self._run_seconds(now)}
            self._worker_starts[event.worker]["ready"] = done

    def _repeat_worker_starts(self, now: float) -> None:
        """Write the placement of all live workers again, before their lines rotate away."""
        for worker, lines in self._worker_starts.items():
            unit, node, _ = self._known_workers[worker]
            for did, data in lines.items():
                self._journal.write(now, "worker", {"do": did, "w": worker, "unit": unit, "node": node, **data})

    def _on_stop_worker(self, now: float, command: c.StopWorker) -> None:
        self._write_worker_event(now, command.worker, "stop", drain=command.drain, why=command.reason)

    def _on_worker_stopped(self, now: float, event: e.WorkerStopped) -> None:
        self._write_worker_event(now, event.worker, "stopped")
        self._forget_worker(event.worker)

    def _on_worker_lost(self, now: float, event: e.WorkerLost) -> None:
        why = f"{event.cause.value}: {event.detail}" if event.detail else event.cause.value
        self._write_worker_event(now, event.worker, "lost", always=True, why=why[:500], peak_bytes=event.peak_bytes)
        self._forget_worker(event.worker)

    def _forget_worker(self, worker: int) -> None:
        self._known_workers.pop(worker, None)
        self._worker_starts.pop(worker, None)

    def _write_worker_event(self, now: float, worker: int, did: str, *, always: bool = False, **data: Any) -> None:
        """Write an individual line, or increment the count that is written with the next view."""
        unit, node, own = self._known_workers.get(worker, ("", "", True))
        line = {"do": did, "w": worker, "unit": unit, "node": node, **data}
        if not ((own or always) and self._journal.try_write(now, "worker", line)):
            self._counts[unit, did] += 1
