"""The stream controller: takes events and the time, returns commands (`step(now, events) -> commands`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    CancelRun,
    CapacityReserved,
    Drain,
    FailRun,
    InputEnded,
    InputExpected,
    ItemsArrived,
    NodeJoined,
    NodeLeft,
    PinWorkers,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.lifecycle import FINAL_RUN_STATES, RunState
from dovetail.scheduling.replan.snapshot import PlannedStart
from dovetail.streaming.dispatch import dispatch_ready
from dovetail.streaming.epochs import EpochRestarter, EpochTracker
from dovetail.streaming.feeder import Feeder
from dovetail.streaming.fleet import Fleet
from dovetail.streaming.replanner import Replanner
from dovetail.streaming.reserved_capacity import ReservedCapacity
from dovetail.streaming.result_handler import ResultHandler
from dovetail.streaming.retry import FailureHandler
from dovetail.streaming.settings import StreamOptions
from dovetail.streaming.state import StreamState, UnitState
from dovetail.streaming.view import make_view, make_worker_views

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.control.commands import Command, Deliver
    from dovetail.control.events import Event
    from dovetail.control.payload import Segment
    from dovetail.resources.seat import Seats
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import UnitSpec
    from dovetail.streaming.view import StreamView, WorkerView


class StreamController:
    """Runs the units of a plan, wave after wave, over a source. Pure: see `control.engine.Controller`."""

    def __init__(
        self,
        works: Sequence[UnitSpec],
        plan: Plan,
        options: StreamOptions | None = None,
        resume: Sequence[Deliver] = (),
        reserved: Seats = (),
    ) -> None:
        """`resume`: what is done already; of wave -1, what is its input instead of a source: unit -> segments, as
        `spooled`. `reserved`: what others hold when it begins, as in `control.events.Reserved`."""
        self.plan = plan
        self.state = StreamState([UnitState(work) for work in works], options or StreamOptions())
        self.epoch_tracker = EpochTracker(self.state, self._on_unit_finished)
        self.feeder = Feeder(self.state, self.epoch_tracker)
        self.fleet = Fleet(self.state, plan.cluster, self.fail)
        self.fleet.reserved_capacity = ReservedCapacity(reserved)
        self.failure_handler = FailureHandler(self.state, self.fail)
        self.replanner = Replanner(self.state, self.fleet, self.feeder, self.fail)
        self.epoch_restarter = EpochRestarter(self.state, self.fleet, self.epoch_tracker, self.feeder)
        self.result_handler = ResultHandler(
            self.state, self.fleet, self.epoch_tracker, self.failure_handler, self.epoch_restarter
        )
        self.waves = max(work.wave for work in works) + 1
        self._final_state = RunState.FINISHED
        self._resume = list(resume)
        self._given_input = [deliver for deliver in resume if deliver.wave < 0]
        """Its input, if there is no source."""
        for deliver in self._given_input:
            for name, segments in deliver.spooled.items():
                self.epoch_tracker.spool.setdefault(name, []).extend(segments)
        self._started = False
        self._drained = False
        self._cut_short = False
        """Drained before all of its input was there."""
        self._handlers: dict[type, Callable[..., None]] = {
            BatchesDone: self.result_handler.on_batches_done,
            BatchesReturned: self.result_handler.on_batches_returned,
            WorkerReady: self.fleet.on_worker_ready,
            WorkerStopped: lambda event: self.fleet.on_worker_stopped(event.worker),
            WorkerLost: self.result_handler.on_worker_lost,
            ItemsArrived: self._on_items_arrived,
            InputExpected: self._on_input_expected,
            InputEnded: self._on_input_ended,
            NodeJoined: self._on_node_joined,
            NodeLeft: self.epoch_restarter.on_node_left,
            Drain: self._on_drain,
            CancelRun: self._on_cancel,
            FailRun: lambda event: self.fail(event.error, event.detail),
            PinWorkers: self._on_pin_workers,
            CapacityReserved: self.fleet.on_capacity_reserved,
        }
        largest = max(node.memory_bytes for node in plan.cluster.nodes)
        for lane in self.state.all_units:
            lane.max_node_memory_bytes = largest

    # --- the port

    @property
    def done(self) -> bool:
        return self.state.run_state in FINAL_RUN_STATES

    def step(self, now: float, events: Sequence[Event]) -> list[Command]:
        board = self.state
        board.now = now
        if not self._started:
            self._started = True
            self._start_next_wave()
            self.replanner.start_timer()
        handlers = self._handlers
        for event in events:
            handlers[type(event)](event)
        board.run_timers()
        if not board.is_ending:
            self._advance()
        if board.is_ending and not board.workers and not self.done:
            self._finish_run()
        out, board.commands = board.commands, []
        return out

    def wake_at(self) -> float | None:
        return self.state.next_timer_at()

    def view(self, now: float) -> StreamView:
        return make_view(self.state, self.replanner, self.waves, now)

    def workers(self) -> list[WorkerView]:
        return make_worker_views(self.state)

    # --- one step

    def _advance(self) -> None:
        board = self.state
        while True:
            self.replanner.replan_if_due()
            dispatch_ready(board)
            self.feeder.feed()
            if any(board.dirty):
                dispatch_ready(board)
            if not self.epoch_tracker.input_ended or board.epochs or board.is_ending:
                return
            last = board.wave + 1 >= self.waves
            if (self._drained and not self._runs_later_waves()) or last:
                complete = last and (not self._cut_short or board.options.serving)
                self._end_run(RunState.FINISHED if complete else RunState.DRAINED, "")
                return
            self._start_next_wave()

    def _runs_later_waves(self) -> bool:
        """Whether later waves still run over what was read before a drain; a barrier would take it for everything."""
        barriers = any(lane.spec.barrier for lane in self.state.all_units if lane.spec.wave > self.state.wave)
        return self.state.options.drain_finishes_waves and not (self._cut_short and barriers)

    def _start_next_wave(self) -> None:
        board = self.state
        board.wave += 1
        lanes = [lane for lane in board.all_units if lane.spec.wave == board.wave]
        board.units = lanes
        board.dirty = [True] * len(lanes)
        inside = {lane.name for lane in lanes}
        for index, lane in enumerate(lanes):
            lane.index = index
            lane.parents = [board.units_by_name[name] for name in lane.spec.parents if name in inside]
            consumers = [other for other in board.all_units if lane.name in other.spec.parents]
            lane.children = [other for other in consumers if other.name in inside]
            lane.later_consumers = [other.name for other in consumers if other.name not in inside]
            lane.is_leaf = not consumers
            lane.queue.in_order = self._needs_order(lane) and not lane.spec.barrier
            lane.sorts_input = bool(lane.parents) and self._needs_order(lane)
        self.epoch_tracker.input_ended = False
        self._begin_input(lanes)
        if self.waves > 1:
            board.add_note(
                "wave", f"wave {board.wave + 1} of {self.waves}: {', '.join(sorted(inside))}", wave=board.wave
            )
        self._start_first_workers(lanes)

    def _needs_order(self, lane: UnitState) -> bool:
        """Whether it, or one after it, is called with several items: what comes of those is kept together."""
        if not (self.state.options.ordered or self.state.options.ordered_batches):
            return False
        after = [other for other in self.state.all_units if lane.name in other.spec.parents]
        return lane.spec.batch_size > 1 or lane.spec.barrier or any(map(self._needs_order, after))

    def _begin_input(self, lanes: list[UnitState]) -> None:
        board, wave = self.state, self.state.wave
        before = [deliver for deliver in self._resume if deliver.wave == wave]
        done = [(deliver.first, deliver.last) for deliver in before if deliver.last > deliver.first]
        if not wave and not self._given_input:
            entries = [lane for lane in lanes if not lane.spec.parents]
            later = [lane.name for lane in board.all_units if not lane.spec.parents and lane.spec.wave]
            self.feeder.begin_source_wave(entries, later, done)
            board.finished_items = sum(last - first for first, last in done)
            board.items_read = board.finished_items
        else:
            spool = self.epoch_tracker.spool
            entries = [lane for lane in lanes if lane.name in spool]
            mixed = _interleave([(lane.name, _sort_by_first_key(spool.pop(lane.name))) for lane in entries])
            if not wave:
                board.items_read = board.total_items = sum(segment.items for _, segment in mixed)
            self.feeder.begin_spooled_wave(entries, mixed, done)
        for deliver in before:
            for name, segments in deliver.spooled.items():
                self.epoch_tracker.spool.setdefault(name, []).extend(segments)
            board.items_delivered += sum(segment.items for out in deliver.outputs.values() for segment in out)
            board.items_failed += len(deliver.failed_items)

    def _start_first_workers(self, lanes: list[UnitState]) -> None:
        """The plan's, if the speeds behind it are known or it is to be followed, and there is room for it; otherwise
        by replanning from empty."""
        known = all(lane.spec.rate is not None for lane in lanes) or self.state.options.follow_plan
        inside = {lane.name for lane in lanes}
        starts = self._planned_starts(inside)
        seats = (seat for start in starts for seat in start.seats)
        there = self.fleet.cluster is self.plan.cluster and self.fleet.reserved_capacity.allows_all(
            self.plan.cluster, seats
        )
        if not (known and there):
            self.fleet.replan_requested = False
            self.replanner.replan_now()
            return
        self.replanner.predicted_rate = self.plan.rate if self.waves == 1 else 0.0
        self.replanner.bottleneck = self.plan.bottleneck if self.plan.bottleneck in inside else ""
        text = f"{len(starts)} workers as planned"
        self.state.add_note("decision", text, starts=len(starts), stops=0, rate_after=self.replanner.predicted_rate)
        self.fleet.start_all([*self.fleet.waiting_starts.values(), *starts])

    def _planned_starts(self, inside: set[str]) -> list[PlannedStart]:
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
                PlannedStart(unit.name, seats[first : first + ranks], "planned")
                for first in range(0, len(seats), ranks)
            ]
        return starts

    # --- workers and nodes

    def _on_node_joined(self, event: NodeJoined) -> None:
        self.state.add_note("node", f"node {event.node.name} joined", node=event.node.name)
        self.fleet.on_node_joined(event.node)

    def _on_unit_finished(self, lane: UnitState) -> None:
        """Nothing will come to it any more: everything it has is given back."""
        for worker in list(lane.workers.values()):
            self.fleet.drain(worker, "finished")
        self.fleet.cancel_starts(lane.name)
        if any(other.waits_for_seats for other in self.state.units):
            self.fleet.replan_requested = True

    # --- input, and the end

    def _on_items_arrived(self, event: ItemsArrived) -> None:
        if not self.state.is_ending and not self.feeder.stopped:
            self.feeder.on_items_arrived(event)

    def _on_input_expected(self, event: InputExpected) -> None:
        self.state.expected_items = event.items

    def _on_pin_workers(self, event: PinWorkers) -> None:
        lane = self.state.units_by_name.get(event.unit)
        if lane is not None:
            pinned = event.workers
            # a unit without workers would hold up everything before and after it
            least = None if pinned is None else max(1, pinned)
            lane.low, lane.high = (lane.spec.low, lane.spec.high) if least is None else (least, least)
            self.fleet.replan_requested = True

    def _on_drain(self, event: Drain) -> None:
        if self.state.run_state is RunState.RUNNING:
            self.state.transition_to(RunState.DRAINING)
            self.state.add_note("run", f"draining ({event.reason}): nothing new is read, what is in hand is finished")
            self._drained = True
            spool_is_in_hand = self.feeder.spooled_input is not None and self.state.options.drain_finishes_waves
            if not (self.feeder.stopped or spool_is_in_hand):
                self._cut_short = True
                self.feeder.discard_unfinished_barrier()
                self.feeder.end_input()

    def _on_cancel(self, event: CancelRun) -> None:
        if self.state.is_ending:
            self.fleet.stop_all(f"cancelled: {event.reason}", now=True)
        else:
            self._end_run(RunState.CANCELLED, f"cancelled: {event.reason}")

    def _on_input_ended(self, event: InputEnded) -> None:
        self.feeder.on_input_ended(event.items)
        self.failure_handler.check_error_budget()

    def fail(self, error: str, detail: str) -> None:
        """The run cannot go on."""
        if not self.state.is_ending:
            self.state.error, self.state.error_detail = error, detail
            self._end_run(RunState.FAILED, error)

    def _end_run(self, verdict: RunState, why: str) -> None:
        board = self.state
        if board.is_ending:
            return
        self._final_state = verdict
        board.transition_to(RunState.STOPPING)
        if why:
            board.add_note("run", why, verdict=verdict.value)
        self.fleet.stop_all(why or "finished", now=verdict not in (RunState.FINISHED, RunState.DRAINED))

    def _finish_run(self) -> None:
        self.state.transition_to(self._final_state)
        self.state.add_note("run", self._final_state.value, error=self.state.error)


def _sort_by_first_key(segments: list[Segment]) -> list[Segment]:
    """By the keys of their first items, so that it does not matter who was finished first."""
    if any(segment.first is None for segment in segments):
        return segments
    return sorted(segments, key=lambda segment: segment.first or ())


def _interleave(spools: list[tuple[str, list[Segment]]]) -> list[tuple[str, Segment]]:
    """Several units' inputs, evenly one after another, so that they all have something to do; always the same way."""
    keyed = [
        (position / len(segments), order, position, name, segment)
        for order, (name, segments) in enumerate(spools)
        for position, segment in enumerate(segments)
    ]
    keyed.sort(key=lambda entry: entry[:3])
    return [(name, segment) for _, _, _, name, segment in keyed]
