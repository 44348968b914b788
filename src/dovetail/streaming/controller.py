"""The controller of a stream: events and the time in, commands out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    CancelRun,
    Drain,
    FailRun,
    InputEnded,
    InputExpected,
    ItemsArrived,
    NodeJoined,
    NodeLeft,
    Repin,
    Reserved,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.lifecycle import ENDED, RunState
from dovetail.scheduling.snapshot import Start
from dovetail.streaming.balance import Balance
from dovetail.streaming.board import Board
from dovetail.streaming.dispatch import sweep
from dovetail.streaming.feeding import Feeder
from dovetail.streaming.fleet import Fleet
from dovetail.streaming.lane import Lane
from dovetail.streaming.losses import Losses
from dovetail.streaming.options import Options
from dovetail.streaming.progress import Progress
from dovetail.streaming.reserve import Reserve
from dovetail.streaming.restarts import Restarts
from dovetail.streaming.results import Results
from dovetail.streaming.sight import view_of, workers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.control.commands import Command, Deliver
    from dovetail.control.events import Event
    from dovetail.control.segments import Segment
    from dovetail.resources.seat import Seats
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.view import View, WorkerView
    from dovetail.streaming.work import Work


class Stream:
    """Runs the units of a plan, wave after wave, over a source. Pure: see `control.engine.Controller`."""

    def __init__(
        self,
        works: Sequence[Work],
        plan: Plan,
        options: Options | None = None,
        resume: Sequence[Deliver] = (),
        reserved: Seats = (),
    ) -> None:
        """`resume`: what is done already; of wave -1, what is its input instead of a source: unit -> segments, as
        `spooled`. `reserved`: what others hold when it begins, as in `control.events.Reserved`."""
        self.plan = plan
        self.board = Board([Lane(work) for work in works], options or Options())
        self.progress = Progress(self.board, self._lane_finished)
        self.feeder = Feeder(self.board, self.progress)
        self.fleet = Fleet(self.board, plan.cluster, self.fail)
        self.fleet.reserve = Reserve(reserved)
        self.losses = Losses(self.board, self.fail)
        self.balance = Balance(self.board, self.fleet, self.feeder, self.fail)
        self.restarts = Restarts(self.board, self.fleet, self.progress, self.feeder)
        self.results = Results(self.board, self.fleet, self.progress, self.losses, self.restarts)
        self.waves = max(work.wave for work in works) + 1
        self._verdict = RunState.FINISHED
        self._resume = list(resume)
        self._given = [deliver for deliver in resume if deliver.wave < 0]
        """Its input, if there is no source."""
        for deliver in self._given:
            for name, segments in deliver.spooled.items():
                self.progress.spool.setdefault(name, []).extend(segments)
        self._begun = False
        self._drained = False
        self._cut_short = False
        """Drained before all of its input was there."""
        self._handlers: dict[type, Callable[..., None]] = {
            BatchesDone: self.results.done,
            BatchesReturned: self.results.returned,
            WorkerReady: self.fleet.ready,
            WorkerStopped: lambda event: self.fleet.stopped(event.worker),
            WorkerLost: self.results.lost,
            ItemsArrived: self._arrived,
            InputExpected: self._expected,
            InputEnded: lambda event: self.feeder.ended(event.items),
            NodeJoined: self._joined,
            NodeLeft: self.restarts.left,
            Drain: self._drain,
            CancelRun: self._cancel,
            FailRun: lambda event: self.fail(event.error, event.detail),
            Repin: self._repin,
            Reserved: self.fleet.reserved,
        }
        largest = max(node.memory_bytes for node in plan.cluster.nodes)
        for lane in self.board.all_lanes:
            lane.largest_memory = largest

    # --- the port

    @property
    def done(self) -> bool:
        return self.board.state in ENDED

    def step(self, now: float, events: Sequence[Event]) -> list[Command]:
        board = self.board
        board.now = now
        if not self._begun:
            self._begun = True
            self._next_wave()
            self.balance.begin()
        handlers = self._handlers
        for event in events:
            handlers[type(event)](event)
        board.ring()
        if not board.ending:
            self._go_on()
        if board.ending and not board.workers and not self.done:
            self._close()
        out, board.out = board.out, []
        return out

    def wake_at(self) -> float | None:
        return self.board.next_timer()

    def view(self, now: float) -> View:
        return view_of(self.board, self.balance, self.waves, now)

    def workers(self) -> list[WorkerView]:
        return workers_of(self.board)

    # --- one step

    def _go_on(self) -> None:
        board = self.board
        while True:
            self.balance.look()
            sweep(board)
            self.feeder.feed()
            if any(board.dirty):
                sweep(board)
            if not self.progress.input_ended or board.epochs or board.ending:
                return
            last = board.wave + 1 >= self.waves
            if (self._drained and not self._goes_on()) or last:
                complete = last and (not self._cut_short or board.options.serving)
                self._end(RunState.FINISHED if complete else RunState.DRAINED, "")
                return
            self._next_wave()

    def _goes_on(self) -> bool:
        """Whether later waves still run over what was read before a drain; a barrier would take it for everything."""
        barriers = any(lane.work.barrier for lane in self.board.all_lanes if lane.work.wave > self.board.wave)
        return self.board.options.finish_waves and not (self._cut_short and barriers)

    def _next_wave(self) -> None:
        board = self.board
        board.wave += 1
        lanes = [lane for lane in board.all_lanes if lane.work.wave == board.wave]
        board.lanes = lanes
        board.dirty = [True] * len(lanes)
        inside = {lane.name for lane in lanes}
        for index, lane in enumerate(lanes):
            lane.index = index
            lane.parents = [board.lane_of[name] for name in lane.work.parents if name in inside]
            consumers = [other for other in board.all_lanes if lane.name in other.work.parents]
            lane.children = [other for other in consumers if other.name in inside]
            lane.spools = [other.name for other in consumers if other.name not in inside]
            lane.is_leaf = not consumers
            lane.queue.in_order = self._needs_order(lane) and not lane.work.barrier
            lane.sorts = bool(lane.parents) and self._needs_order(lane)
        self.progress.input_ended = False
        self._begin_input(lanes)
        if self.waves > 1:
            board.note("wave", f"wave {board.wave + 1} of {self.waves}: {', '.join(sorted(inside))}", wave=board.wave)
        self._first_workers(lanes)

    def _needs_order(self, lane: Lane) -> bool:
        """Whether it, or one after it, is called with several items: what comes of those is kept together."""
        if not (self.board.options.ordered or self.board.options.in_order):
            return False
        after = [other for other in self.board.all_lanes if lane.name in other.work.parents]
        return lane.work.batch_size > 1 or lane.work.barrier or any(map(self._needs_order, after))

    def _begin_input(self, lanes: list[Lane]) -> None:
        board, wave = self.board, self.board.wave
        before = [deliver for deliver in self._resume if deliver.wave == wave]
        done = [(deliver.first, deliver.last) for deliver in before if deliver.last > deliver.first]
        if not wave and not self._given:
            entries = [lane for lane in lanes if not lane.work.parents]
            later = [lane.name for lane in board.all_lanes if not lane.work.parents and lane.work.wave]
            self.feeder.begin(entries, later, done)
            board.finished_items = sum(last - first for first, last in done)
            board.read = board.finished_items
        else:
            spool = self.progress.spool
            entries = [lane for lane in lanes if lane.name in spool]
            mixed = _mixed([(lane.name, _in_order(spool.pop(lane.name))) for lane in entries])
            if not wave:
                board.read = board.total = sum(segment.items for _, segment in mixed)
            self.feeder.begin_spooled(entries, mixed, done)
        for deliver in before:
            for name, segments in deliver.spooled.items():
                self.progress.spool.setdefault(name, []).extend(segments)
            board.delivered += sum(segment.items for out in deliver.outputs.values() for segment in out)
            board.aside += len(deliver.aside)

    def _first_workers(self, lanes: list[Lane]) -> None:
        """The plan's, if the speeds behind it are known or it is to be followed, and there is room for it; otherwise
        by replanning from empty."""
        known = all(lane.work.rate is not None for lane in lanes) or self.board.options.follow_plan
        inside = {lane.name for lane in lanes}
        starts = self._planned(inside)
        seats = (seat for start in starts for seat in start.seats)
        there = self.fleet.cluster is self.plan.cluster and self.fleet.reserve.leaves_all(self.plan.cluster, seats)
        if not (known and there):
            self.fleet.wants_replan = False
            self.balance.now_at_once()
            return
        self.balance.predicted = self.plan.rate if self.waves == 1 else 0.0
        self.balance.bottleneck = self.plan.bottleneck if self.plan.bottleneck in inside else ""
        text = f"{len(starts)} workers as planned"
        self.board.note("decision", text, starts=len(starts), stops=0, rate_after=self.balance.predicted)
        self.fleet.start_all([*self.fleet.waiting.values(), *starts])

    def _planned(self, inside: set[str]) -> list[Start]:
        """The workers that the plan has for these units."""
        starts = []
        for unit in self.plan.units:
            if unit.name not in inside:
                continue
            ranks = unit.shape.ranks
            seats = self.plan.seats[unit.stages[0]]
            if unit.barrier:
                seats = seats[:ranks]  # it is called once, with everything
            starts += [
                Start(unit.name, seats[first : first + ranks], "planned") for first in range(0, len(seats), ranks)
            ]
        return starts

    # --- workers and nodes

    def _joined(self, event: NodeJoined) -> None:
        self.board.note("node", f"node {event.node.name} joined", node=event.node.name)
        self.fleet.joined(event.node)

    def _lane_finished(self, lane: Lane) -> None:
        """Nothing will come to it any more: everything it has is given back."""
        for worker in list(lane.workers.values()):
            self.fleet.drain(worker, "finished")
        self.fleet.give_up(lane.name)
        if any(other.waits_for_seats for other in self.board.lanes):
            self.fleet.wants_replan = True

    # --- input, and the end

    def _arrived(self, event: ItemsArrived) -> None:
        if not self.board.ending and not self.feeder.stopped:
            self.feeder.arrived(event)

    def _expected(self, event: InputExpected) -> None:
        self.board.expected = event.items

    def _repin(self, event: Repin) -> None:
        lane = self.board.lane_of.get(event.unit)
        if lane is not None:
            pinned = event.workers
            # a unit without workers would hold up everything before and after it
            least = None if pinned is None else max(1, pinned)
            lane.low, lane.high = (lane.work.low, lane.work.high) if least is None else (least, least)
            self.fleet.wants_replan = True

    def _drain(self, event: Drain) -> None:
        if self.board.state is RunState.RUNNING:
            self.board.move(RunState.DRAINING)
            self.board.note("run", f"draining ({event.reason}): nothing new is read, what is in hand is finished")
            self._drained = True
            spool_is_in_hand = self.feeder.spooled is not None and self.board.options.finish_waves
            if not (self.feeder.stopped or spool_is_in_hand):
                self._cut_short = True
                self.feeder.leave_unfinished_barrier()
                self.feeder.end()

    def _cancel(self, event: CancelRun) -> None:
        if self.board.ending:
            self.fleet.stop_all(f"cancelled: {event.reason}", now=True)
        else:
            self._end(RunState.CANCELLED, f"cancelled: {event.reason}")

    def fail(self, error: str, detail: str) -> None:
        """The run cannot go on."""
        if not self.board.ending:
            self.board.error, self.board.error_detail = error, detail
            self._end(RunState.FAILED, error)

    def _end(self, verdict: RunState, why: str) -> None:
        board = self.board
        if board.ending:
            return
        self._verdict = verdict
        board.move(RunState.STOPPING)
        if why:
            board.note("run", why, verdict=verdict.value)
        self.fleet.stop_all(why or "finished", now=verdict not in (RunState.FINISHED, RunState.DRAINED))

    def _close(self) -> None:
        self.board.move(self._verdict)
        self.board.note("run", self._verdict.value, error=self.board.error)


def _in_order(segments: list[Segment]) -> list[Segment]:
    """By the keys of their first items, so that it does not matter who was finished first."""
    if any(segment.first is None for segment in segments):
        return segments
    return sorted(segments, key=lambda segment: segment.first or ())


def _mixed(spools: list[tuple[str, list[Segment]]]) -> list[tuple[str, Segment]]:
    """Several units' inputs, evenly one after another, so that they all have something to do; always the same way."""
    keyed = [
        (position / len(segments), order, position, name, segment)
        for order, (name, segments) in enumerate(spools)
        for position, segment in enumerate(segments)
    ]
    keyed.sort(key=lambda entry: entry[:3])
    return [(name, segment) for _, _, _, name, segment in keyed]
