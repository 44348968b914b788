"""How does a run write down what happens, at next to no cost? An observer that fills the run folder.

`saw` is called for every step of a run, mostly with a batch that came and one that went: those types are skipped by one
look into a set. Totals come from the view, which is taken about once per second.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Event as Event_
from typing import TYPE_CHECKING, Any

from dovetail.control import commands as c
from dovetail.control import events as e
from dovetail.control.lifecycle import ENDED
from dovetail.machine.processes import process_started
from dovetail.observe.folder import cannot_write, num, read_object, write_atomically, write_over
from dovetail.observe.journal import Journal, Pace
from dovetail.observe.leavings import ERRORS_BYTES, CommitLog, SetAsideItems
from dovetail.observe.use_lines import UseLines
from dovetail.streaming.view import UnitView, View, WorkerView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.control.segments import Part
    from dovetail.observe.folder import RunFolder
    from dovetail.observe.telemetry import Telemetry

HEARTBEAT_S = 2.0
FLUSH_S = 1.0
LOOK_EVERY_STEPS = 256
WORKERS_EVERY = 10
WORKERS_SHOWN = 200
SAMPLED = 50
"""Beyond WORKERS_SHOWN workers, one in so many has lines of its own."""
MOST_SECONDS = 60.0
"""Between two views of a real run; of a simulated one there is no such limit."""

HOT = frozenset({e.BatchesDone, e.BatchesReturned, e.ItemsArrived, c.RunBatches, c.Cancel, c.Pull})
UNIT_FIELDS = tuple(item.name for item in fields(UnitView))
WORKER_FIELDS = tuple(item.name for item in fields(WorkerView))
RUN_FIELDS = tuple(item.name for item in fields(View) if item.name not in ("now", "units", "use"))
ENDED_STATES = frozenset(state.value for state in ENDED)


@dataclass(frozen=True, slots=True)
class About:
    """What a run is, as its folder says it."""

    name: str
    what: str = ""
    """The file, or the command line."""
    engine: str = ""
    cluster: str = ""
    """As a spec."""
    version: str = ""
    """Of Dovetail."""
    virtual: bool = False
    """Simulated: its seconds are not those of a clock."""
    more: Mapping[str, object] = field(default_factory=dict)


class Recorder:
    """Writes run.json, plan.json, events.jsonl, commit.log and errors/."""

    def __init__(
        self,
        folder: RunFolder,
        about: About,
        view: Callable[[float], View],
        workers: Callable[[], Sequence[WorkerView]] = tuple,
        *,
        plan: str | None = None,
        durable: bool = False,
        item: Callable[[Part], object] | None = None,
        key: Callable[[Part], tuple[int, ...]] | None = None,
        wall: Callable[[], float] = time.time,
        telemetry: Telemetry | None = None,
        commits: bool = True,
        errors_bytes: int = ERRORS_BYTES,
    ) -> None:
        """`plan` is Plan.to_json(); `item` opens a part, so that items that are set aside can be kept; `telemetry` is
        started and stopped by whoever made it. `commits`: whether commit.log is ours to write; that of a durable run
        is not."""
        self.folder = folder
        self._use = UseLines(telemetry)
        self._view, self._workers, self._wall = view, workers, wall
        self._due = self._look_at = float("-inf")
        self._flushed_at = self._beaten_at = started = wall()
        self._steps = LOOK_EVERY_STEPS
        self._asked: list[Event_] = []
        self._zero: float | None = None
        self._seconds_before = 0.0
        self._gave_up = False
        self._views = self._starts = self._rotations = 0
        self._pace = Pace(most_s=float("inf") if about.virtual else MOST_SECONDS)
        self._last: dict[str, UnitView] = {}
        self._who: dict[int, tuple[str, str, bool]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._handle = self._handlers()
        try:
            self._journal = Journal(folder.events, folder.older_events)
            commit_log = folder.commit_log if commits else Path(os.devnull)
            self._commits = CommitLog(commit_log, durable=durable and commits)
            self._aside = SetAsideItems(folder.errors, item, key, limit_bytes=errors_bytes)
            if plan is not None:
                write_atomically(folder.plan, plan)
            self._header = self._first_header(about, started)
            self._beat(started)
        except OSError as error:
            raise cannot_write(folder.path, error) from None

    def watch(self, telemetry: Telemetry) -> None:
        """From now on what workers use is written, too. From any thread."""
        self._use = UseLines(telemetry)

    def look_now(self) -> Event_:
        """The next time it sees something it writes how the run stands; then this is set. From any thread."""
        written = Event_()
        self._asked.append(written)
        return written

    def saw(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        hot, handle = HOT, self._handle
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
                self._look(now)
            if self._asked:
                self._answer(now)
        except BaseException:
            self._give_up()
            raise

    def _begin(self, now: float) -> float:
        """Engines may count from anywhere, lines count from the run's beginning; a resumed run goes on where it was."""
        self._zero = self._journal.zero = now - self._seconds_before
        return self._zero

    def close(self, now: float) -> None:
        """The last view, the status it tells, and the end of every file. May be called twice, and after a failure."""
        if self._header["status"] == "running":
            self._end(now, *self._outcome(now))

    def _outcome(self, now: float) -> tuple[str, str]:
        """Status and error. A run of which nothing can be seen any more has failed."""
        try:
            view = self._view(now)
        except Exception as error:
            return "failed", f"{type(error).__name__}: {error}"
        return (view.state, view.error) if view.state in ENDED_STATES else ("failed", f"it ended while {view.state}")

    def abort(self, now: float, reason: str, status: str = "failed") -> None:
        """For a run that ended outside its loop: by an exception, or because it could not start."""
        if self._header["status"] == "running":
            self._end(now, status, reason)

    def _end(self, now: float, status: str, error: str) -> None:
        wall = self._wall()
        left_out = {"errors": self._aside.left_out, "commits": self._commits.left_out, **self._journal.left_out}
        try:
            if not self._gave_up:
                self._last.clear()
                self._take_view(now, last=True)
                self._journal.flush()
        finally:
            # even if there was no room for the last lines: the status is what matters most
            self._header |= {"status": status, "error": error[:4000], "ended": wall, "left_out": left_out}
            self._give_up()
            try:
                self._beat(wall)
            except OSError:  # no room for another file: then over the one there is
                write_over(self.folder.header, self._header_text())
                raise

    def _give_up(self) -> None:
        """Closes the files. What is still buffered may find no room on a full disk; that must not hide the reason."""
        self._gave_up = True
        for file in (self._journal, self._commits):
            try:
                file.close()
            except OSError:
                continue

    # ---- now and then

    def _look(self, now: float) -> None:
        self._steps = LOOK_EVERY_STEPS
        if now >= self._due:
            self._take_view(now)
        self._look_at = min(self._due, now + FLUSH_S)
        wall = self._wall()
        if wall - self._flushed_at >= FLUSH_S or wall < self._flushed_at:
            self._flushed_at = wall
            self._journal.flush()
            self._commits.flush()
        if wall - self._beaten_at >= HEARTBEAT_S or wall < self._beaten_at:
            self._beat(wall)

    def _answer(self, now: float) -> None:
        asked, self._asked = self._asked, []
        self._take_view(now)
        self._journal.flush()
        self._beat(self._wall())
        for written in asked:
            written.set()

    def _take_view(self, now: float, *, last: bool = False) -> None:
        view = self._view(now)
        size = 0
        if self._rotations != self._journal.rotations:
            # units that have not changed are not written again, but their last line must not rotate away
            self._rotations = self._journal.rotations
            self._last.clear()
        for unit in view.units:
            if self._last.get(unit.name) != unit:
                self._last[unit.name] = unit
                size += self._journal.keep(now, "unit", {name: getattr(unit, name) for name in UNIT_FIELDS})
        if self._counts:
            size += self._write_counts(now)
        if self._views % WORKERS_EVERY == 0:
            size += self._write_workers(now)
        size += self._use.write(now, self._journal, last=last)
        self._views += 1
        # the last line of a view, so that a reader knows that the view is whole
        run = {name: getattr(view, name) for name in RUN_FIELDS}
        size += self._journal.keep(now, "run", {**run, "use": {name: list(pair) for name, pair in view.use.items()}})
        self._due = self._pace.after(now, size)
        self._header["progress"] = {name: run[name] for name in ("read", "total", "finished", "delivered", "aside")}
        self._header["progress"] |= {"seconds": round(self._since(now), 6), "state": view.state}

    def _since(self, now: float) -> float:
        return now - (self._begin(now) if self._zero is None else self._zero)

    def _write_counts(self, now: float) -> int:
        by_unit: dict[str, dict[str, int]] = {}
        for (unit, what), count in self._counts.items():
            by_unit.setdefault(unit, {})[what] = count
        self._counts.clear()
        return self._journal.keep(now, "workers", {"units": by_unit})

    def _write_workers(self, now: float) -> int:
        workers = self._workers()
        shown = workers
        if len(workers) > WORKERS_SHOWN:
            unknown = ("", "", False)
            own = [worker for worker in workers if self._who.get(worker.worker, unknown)[2]]
            shown = (own or workers)[:WORKERS_SHOWN]
        size = 0
        for worker in shown:
            line = {name: getattr(worker, name) for name in WORKER_FIELDS}
            size += self._journal.keep(now, "worker_use", line | self._use.of_worker(worker.worker))
        return size

    def _first_header(self, about: About, started: float) -> dict[str, Any]:
        data = {**about.more, "version": 1, "id": self.folder.id, "name": about.name, "what": about.what}
        data |= {"engine": about.engine, "cluster": about.cluster, "virtual": about.virtual}
        data |= {"dovetail": about.version, "python": sys.version.split()[0]}
        data |= {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": process_started(os.getpid())}
        before = read_object(self.folder.header)
        progress, earlier = before.get("progress"), before.get("resumed")
        self._seconds_before = num(progress, "seconds") if isinstance(progress, dict) else 0.0
        resumed = (
            {"resumed": [*(earlier if isinstance(earlier, list) else ()), before.get("started")]} if before else {}
        )
        return {**data, "started": started, "ended": None, "status": "running", "error": "", **resumed}

    def _beat(self, wall: float) -> None:
        self._beaten_at = wall
        self._header["heartbeat"] = wall
        write_atomically(self.folder.header, self._header_text())

    def _header_text(self) -> str:
        return json.dumps(self._header, indent=1, default=str) + "\n"

    # ---- when it happens

    def _handlers(self) -> dict[type[Any], Callable[[float, Any], None]]:
        return {
            c.StartWorker: self._started,
            c.StopWorker: self._told_to_stop,
            c.Note: self._noted,
            c.Deliver: self._delivered,
            e.WorkerReady: self._ready,
            e.WorkerStopped: self._stopped,
            e.WorkerLost: self._lost,
            e.NodeJoined: lambda now, it: self._happened(now, "node", {"node": it.node.name, "do": "joined"}),
            e.NodeLeft: lambda now, it: self._happened(now, "node", {"node": it.node, "do": "left", "why": it.reason}),
            e.Drain: lambda now, it: self._happened(now, "asked", {"do": "drain", "why": it.reason}),
            e.CancelRun: lambda now, it: self._happened(now, "asked", {"do": "cancel", "why": it.reason}),
            e.Repin: lambda now, it: self._happened(now, "asked", {"do": "repin", "unit": it.unit, "to": it.workers}),
            e.InputEnded: lambda now, it: self._happened(now, "input", {"items": it.items}),
            e.Reserved: lambda now, it: self._happened(
                now, "reserved", {"seats": [seat.to_dict() for seat in it.seats]}
            ),
        }

    def _happened(self, now: float, kind: str, data: Mapping[str, Any]) -> None:
        self._journal.tell(now, kind, data)

    def _noted(self, now: float, note: c.Note) -> None:
        if note.kind == "worker" and len(self._who) > WORKERS_SHOWN:
            self._journal.left_out["note"] += 1  # the counts of workers say it in one line
            return
        self._journal.tell(now, "note", {"what": note.kind, "text": note.text[:4000], "data": dict(note.data)})

    def _delivered(self, now: float, deliver: c.Deliver) -> None:
        since = self._since(now)
        self._commits.write(since, deliver)
        if deliver.aside:
            self._aside.write(since, deliver.aside)

    def _started(self, now: float, start: c.StartWorker) -> None:
        seat = start.seats[0] if start.seats else None
        unit = start.hosted[0].name if start.hosted else ""
        self._starts += 1
        own = len(self._who) < WORKERS_SHOWN or self._starts % SAMPLED == 0
        self._who[start.worker] = unit, seat.node if seat else "", own
        nodes = [it.node for it in start.seats]
        apart: dict[str, Any] = {"nodes": nodes} if len(set(nodes)) > 1 else {}  # a gang: the node of each rank
        self._worker(now, start.worker, "start", gpus=list(seat.gpus) if seat else [], **apart)

    def _ready(self, now: float, event: e.WorkerReady) -> None:
        self._worker(now, event.worker, "ready", setup_s=event.setup_s)

    def _told_to_stop(self, now: float, command: c.StopWorker) -> None:
        self._worker(now, command.worker, "stop", drain=command.drain, why=command.reason)

    def _stopped(self, now: float, event: e.WorkerStopped) -> None:
        self._worker(now, event.worker, "stopped")
        self._who.pop(event.worker, None)

    def _lost(self, now: float, event: e.WorkerLost) -> None:
        why = f"{event.cause.value}: {event.detail}" if event.detail else event.cause.value
        self._worker(now, event.worker, "lost", always=True, why=why[:500], peak_bytes=event.peak_bytes)
        self._who.pop(event.worker, None)

    def _worker(self, now: float, worker: int, did: str, *, always: bool = False, **data: Any) -> None:
        """A line of its own, or one more in the count that goes with the next view."""
        unit, node, own = self._who.get(worker, ("", "", True))
        line = {"do": did, "w": worker, "unit": unit, "node": node, **data}
        if not ((own or always) and self._journal.tell(now, "worker", line)):
            self._counts[unit, did] += 1
