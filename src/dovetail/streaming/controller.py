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
    RunFailure,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.lifecycle import FINAL_RUN_STATES, RunState
from dovetail.scheduling.replan.snapshot import PlannedStart
from dovetail.streaming.broken_workers import BrokenWorkers
from dovetail.streaming.dispatch import dispatch_ready
from dovetail.streaming.epochs import EpochRestarter, EpochTracker
from dovetail.streaming.feeder import Feeder
from dovetail.streaming.fleet import Fleet
from dovetail.streaming.replanner import Replanner
from dovetail.streaming.result_handler import ResultHandler
from dovetail.streaming.retry import FailureHandler
from dovetail.streaming.settings import StreamOptions
from dovetail.streaming.state import StreamState
from dovetail.streaming.view import make_view, make_worker_views
from dovetail.text_format import format_count

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
        specs: Sequence[UnitSpec],
        plan: Plan,
        options: StreamOptions | None = None,
        resume: Sequence[Deliver] = (),
        reserved: Seats = (),
    ) -> None:
        """`resume`: epochs that an earlier run delivered; those of wave -1 contain the input (`spooled`: unit ->
        segments), and then there is no source. `reserved`: capacity of other runs at the start, as in
        `CapacityReserved`."""
        self.plan = plan
        self.state = StreamState(specs, options or StreamOptions())
        self.epoch_tracker = EpochTracker(self.state)
        self.feeder = Feeder(self.state, self.epoch_tracker)
        self.fleet = Fleet(self.state, plan.cluster, self.fail, reserved)
        self.failure_handler = FailureHandler(self.state, self.fail)
        self.replanner = Replanner(self.state, self.fleet, self.feeder, self.fail)
        self.epoch_restarter = EpochRestarter(self.state, self.fleet, self.epoch_tracker, self.feeder)
        self.broken_workers = BrokenWorkers(self.state, self.fleet, self.epoch_tracker, self.failure_handler)
        self.result_handler = ResultHandler(
            self.state,
            self.fleet,
            self.epoch_tracker,
            self.failure_handler,
            self.epoch_restarter,
            self.broken_workers,
        )
        self.waves = max(spec.wave for spec in specs) + 1
        self._final_state = RunState.FINISHED
        self._resume = list(resume)
        self._given_input = [deliver for deliver in resume if deliver.wave < 0]
        """Input, if there is no source."""
        for deliver in self._given_input:
            self.epoch_tracker.add_to_spool(deliver.spooled)
        self._started = False
        self._drained = False
        self._cut_short = False
        """Drained before all input was read."""
        self._handlers: dict[type, Callable[..., None]] = {
            BatchesDone: self.result_handler.on_batches_done,
            BatchesReturned: self.result_handler.on_batches_returned,
            WorkerReady: self.fleet.on_worker_ready,
            WorkerStopped: self.result_handler.on_worker_stopped,
            WorkerLost: self.result_handler.on_worker_lost,
            ItemsArrived: self._on_items_arrived,
            InputExpected: self._on_input_expected,
            InputEnded: self._on_input_ended,
            NodeJoined: self.fleet.on_node_joined,
            NodeLeft: self.epoch_restarter.on_node_left,
            Drain: self._on_drain,
            CancelRun: self._on_cancel,
            FailRun: self._on_fail_run,
            PinWorkers: self._on_pin_workers,
            CapacityReserved: self.fleet.on_capacity_reserved,
        }

    # --- the port

    @property
    def done(self) -> bool:
        return self.state.run_state in FINAL_RUN_STATES

    def step(self, now: float, events: Sequence[Event]) -> list[Command]:
        state = self.state
        state.begin_step(now)
        if not self._started:
            self._started = True
            self._start_next_wave()
            self.replanner.start_timer()
        handlers = self._handlers
        for event in events:
            handlers[type(event)](event)
            if self.epoch_tracker.finished_units:
                self._release_finished_units()
        state.run_timers()
        if self.epoch_tracker.finished_units:
            self._release_finished_units()
        if not state.is_ending:
            self._advance()
        if state.is_ending and not state.workers and not self.done:
            self._finish_run()
        return state.take_commands()

    def wake_at(self) -> float | None:
        return self.state.next_timer_at()

    def view(self, now: float) -> StreamView:
        return make_view(self.state, self.replanner, self.waves, now)

    def workers(self) -> list[WorkerView]:
        return make_worker_views(self.state)

    # --- one step

    def _advance(self) -> None:
        state = self.state
        while True:
            self.replanner.replan_if_due()
            dispatch_ready(state)
            self.feeder.feed()
            if self.epoch_tracker.finished_units:
                self._release_finished_units()
            dispatch_ready(state)
            if self.broken_workers.units and self.broken_workers.advance():
                continue
            if not self.epoch_tracker.input_ended or state.epochs or state.is_ending:
                return
            last = state.wave + 1 >= self.waves
            if (self._drained and not self._runs_later_waves()) or last:
                complete = last and (not self._cut_short or state.options.serving)
                self._end_run(RunState.FINISHED if complete else RunState.DRAINED, "")
                return
            self._start_next_wave()

    def _runs_later_waves(self) -> bool:
        """Whether later waves still process what was read before a drain. Not if a barrier would get incomplete
        input."""
        barriers = any(unit.spec.barrier for unit in self.state.all_units if unit.spec.wave > self.state.wave)
        return self.state.options.drain_finishes_input and not (self._cut_short and barriers)

    def _start_next_wave(self) -> None:
        state = self.state
        state.begin_wave()
        self.epoch_tracker.begin_wave()
        self._begin_input()
        if self.waves > 1:
            names = ", ".join(sorted(unit.name for unit in state.units))
            state.add_note("wave", f"wave {state.wave + 1} of {self.waves}: {names}", wave=state.wave)
        self._start_first_workers()

    def _begin_input(self) -> None:
        state = self.state
        before = [deliver for deliver in self._resume if deliver.wave == state.wave]
        done = [(first, last) for deliver in before for first, last in deliver.ranges if last > first]
        if not state.wave and not self._given_input:
            entries = [unit for unit in state.units if not unit.spec.parents]
            later = [unit.name for unit in state.all_units if not unit.spec.parents and unit.spec.wave]
            self.feeder.begin_source_wave(entries, later, done)
            state.resume_at(sum(last - first for first, last in done))
        else:
            spooled = self.epoch_tracker.take_spool(state.units)
            mixed = _interleave([(unit.name, _sort_by_first_key(segments)) for unit, segments in spooled])
            if not state.wave:
                items = sum(segment.items for _, segment in mixed)
                state.count_read(items)
                state.set_total_items(items)
            self.feeder.begin_spooled_wave([unit for unit, _ in spooled], mixed, done)
        for deliver in before:
            self.epoch_tracker.add_to_spool(deliver.spooled)
            state.count_delivered(sum(segment.items for out in deliver.outputs.values() for segment in out))
            state.count_failed(len(deliver.failed_items))

    def _start_first_workers(self) -> None:
        """Start the workers of the plan if its rates are known (or the plan is to be followed) and they fit; else
        replan without workers."""
        units = self.state.units
        known = all(unit.spec.rate is not None for unit in units) or self.state.options.follow_plan
        names = {unit.name for unit in units}
        starts = self._planned_starts(names)
        seats = (seat for start in starts for seat in start.seats)
        fits = self.fleet.cluster is self.plan.cluster and self.fleet.reserved_capacity.allows_all(
            self.plan.cluster, seats
        )
        if not (known and fits):
            self.replanner.replan_now()
            return
        rate = self.plan.rate or 0.0 if self.waves == 1 else 0.0
        bottleneck = self.plan.bottleneck or ""
        self.replanner.adopt_plan(rate, bottleneck if bottleneck in names else "")
        text = f"{format_count(len(starts), 'worker')} as planned"
        self.state.add_note("decision", text, starts=len(starts), stops=0, rate_after=rate)
        self.fleet.start_all([*self.fleet.waiting_starts.values(), *starts])

    def _planned_starts(self, names: set[str]) -> list[PlannedStart]:
        """Starts of the workers that the plan contains for these units."""
        starts = []
        for unit in self.plan.units:
            if unit.name not in names:
                continue
            ranks = unit.shape.ranks
            seats = self.plan.seats[unit.stages[0]]
            starts += [
                PlannedStart(unit.name, seats[first : first + ranks], "planned")
                for first in range(0, len(seats), ranks)
            ]
        return starts

    def _release_finished_units(self) -> None:
        """Drain the workers of units that finished, and use their seats for units that wait for some."""
        for unit in self.epoch_tracker.take_finished_units():
            for worker in list(unit.workers.values()):
                self.fleet.drain(worker, "finished")
            self.fleet.cancel_starts(unit.name)
            if any(other.waits_for_seats for other in self.state.units):
                self.state.request_replan(f"{unit.name} finished")

    # --- input and the end of the run

    def _on_items_arrived(self, event: ItemsArrived) -> None:
        if not self.state.is_ending and not self.feeder.stopped:
            self.feeder.on_items_arrived(event)

    def _on_input_expected(self, event: InputExpected) -> None:
        self.state.set_expected_items(event.items)

    def _on_pin_workers(self, event: PinWorkers) -> None:
        unit = self.state.units_by_name.get(event.unit)
        if unit is not None:
            # a unit without workers would block every unit before and after it
            unit.pin_workers(None if event.workers is None else max(1, event.workers))
            self.state.request_replan(f"workers of {unit.name} pinned")

    def _on_drain(self, event: Drain) -> None:
        if self.state.run_state is RunState.RUNNING:
            self.state.transition_to(RunState.DRAINING)
            finishes_input = self.state.options.drain_finishes_input
            what = "everything that was read" if finishes_input else "the work in flight"
            self.state.add_note("run", f"draining ({event.reason}): no more input is read, {what} is finished")
            self._drained = True
            if not (self.feeder.stopped or (finishes_input and self.feeder.spooled_input is not None)):
                self._cut_short = True
                self.feeder.discard_unfinished_barrier()
                self.feeder.end_input()
            if not finishes_input and self.feeder.discard_waiting_epochs():
                self._cut_short = True

    def _on_cancel(self, event: CancelRun) -> None:
        if self.state.is_ending:
            self.fleet.stop_all(f"cancelled: {event.reason}", now=True)
        else:
            self._end_run(RunState.CANCELLED, f"cancelled: {event.reason}")

    def _on_input_ended(self, event: InputEnded) -> None:
        self.feeder.on_input_ended(event)
        self.failure_handler.check_error_budget()

    def _on_fail_run(self, event: FailRun) -> None:
        self.fail(RunFailure(event.error, event.detail, code=event.code, fix=event.fix))

    def fail(self, failure: RunFailure) -> None:
        """End the run with an error."""
        if not self.state.is_ending:
            self.state.record_failure(failure)
            self._end_run(RunState.FAILED, str(failure))

    def _end_run(self, verdict: RunState, reason: str) -> None:
        state = self.state
        if state.is_ending:
            return
        self._final_state = verdict
        state.transition_to(RunState.STOPPING)
        if reason:
            state.add_note("run", reason, verdict=verdict.value)
        self.fleet.stop_all(reason or "finished", now=verdict not in (RunState.FINISHED, RunState.DRAINED))

    def _finish_run(self) -> None:
        self.state.transition_to(self._final_state)
        self.state.add_note("run", self._final_state.value, error=self.state.error)


def _sort_by_first_key(segments: list[Segment]) -> list[Segment]:
    """Sort by the keys of the first items, so that the order in which segments were finished does not matter."""
    if any(segment.first is None for segment in segments):
        return segments
    return sorted(segments, key=lambda segment: segment.first or ())


def _interleave(spools: list[tuple[str, list[Segment]]]) -> list[tuple[str, Segment]]:
    """Interleave the inputs of several units evenly and deterministically, so that all of them have work."""
    keyed = [
        (position / len(segments), order, position, name, segment)
        for order, (name, segments) in enumerate(spools)
        for position, segment in enumerate(segments)
    ]
    keyed.sort(key=lambda entry: entry[:3])
    return [(name, segment) for _, _, _, name, segment in keyed]
