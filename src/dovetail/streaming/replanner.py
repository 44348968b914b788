"""Replanning: decide when to replan, take the snapshot for the scheduler, and apply its result."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.control.events import RunFailure
from dovetail.control.lifecycle import WorkerState
from dovetail.scheduling.replan.cost_benefit import rules_above_noise
from dovetail.scheduling.replan.snapshot import Snapshot, UnitSnapshot, WorkerPhase, WorkerSnapshot
from dovetail.scheduling.replan.steps import replan
from dovetail.streaming.reserved_capacity import is_staying
from dovetail.text_format import format_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.scheduling.replan.snapshot import Replan
    from dovetail.streaming.feeder import Feeder
    from dovetail.streaming.fleet import Fleet
    from dovetail.streaming.state import StreamState, UnitState
    from dovetail.streaming.worker_pool import Worker

PHASE_OF_STATE = {
    WorkerState.STARTING: WorkerPhase.STARTING,
    WorkerState.READY: WorkerPhase.READY,
    WorkerState.DRAINING: WorkerPhase.DRAINING,
}
MAX_INTERVALS_BETWEEN_REPLANS = 12
"""Longest time between two replans of a pipeline that does not change, in intervals."""
MIN_RATE_CHANGE_SHARE = 0.05
"""A rate counts as changed if it differs from the last replan by more than this share."""
MIN_REPLAN_GAP_S = 0.2
"""Least time between two replans, so that workers lost together lead to one replan."""
SOURCE_WINDOW_S = 4.0
MIN_SOURCE_WAIT_SHARE = 0.9
SOURCE_MARGIN_FACTOR = 1.5
"""Worker counts are sized for this multiple of the source's rate."""
MIN_ENDS_FOR_BACKLOG = 8
MIN_BACKLOG_SHARE = 0.8
MESSAGES_PER_REPLAN = 2
MAX_INTERVAL_S = 60.0
DEFAULT_HORIZON_S = 600.0
MAX_CHANGES_IN_NOTE = 20


class Replanner:
    """Replans every few seconds and on request, and applies the result."""

    def __init__(self, state: StreamState, fleet: Fleet, feeder: Feeder, fail: Callable[[RunFailure], None]) -> None:
        self.state = state
        self.fleet = fleet
        self.feeder = feeder
        self.fail = fail
        self.replans = 0
        self.predicted_rate = 0.0
        self.bottleneck = ""
        self._replan_due = False
        self._intervals_left = 1
        """Intervals until the next replan."""
        self._calm_intervals = 1
        """Intervals between replans; doubles while nothing changes."""
        self._last_seen: dict[str, tuple[float | None, bool, bool, int]] = {}
        self._timer_running = False
        self._last_replan_at = -math.inf
        self._cooling_down = False
        self._source_sample = (0.0, 0, 0.0)
        """Last measurement of the source: time, items read, seconds waited for items."""
        self._source_rate = math.inf
        """Source items per second if the source is the bottleneck, else infinity."""

    def start_timer(self) -> None:
        """Begin periodic replanning."""
        if self.state.options.replan and not self._timer_running:
            self._timer_running = True
            first = self.state.options.first_replan_s
            self.state.call_at(self.state.now + (self._interval_s() if first is None else first), self._tick)

    def _interval_s(self) -> float:
        """Seconds between checks: a few, and more if messages take longer, because nothing changes before some end."""
        slowest = max(unit.message_items * (unit.throughput.seconds_per_item or 0.0) for unit in self.state.units)
        return max(self.state.options.replan_every_s, min(MESSAGES_PER_REPLAN * slowest, MAX_INTERVAL_S))

    def _tick(self) -> None:
        state = self.state
        if state.is_ending:
            self._timer_running = False
            return
        state.call_at(state.now + self._interval_s(), self._tick)
        self._intervals_left -= 1
        fed = self._source_rate < math.inf and any(self._is_backlogged(unit) for unit in state.units)
        if self._intervals_left <= 0 or fed or self._has_changed():
            self._replan_due = True

    def replan_if_due(self) -> None:
        """Replan if the interval has passed or a replan was requested, at most once per MIN_REPLAN_GAP_S."""
        requested = self.state.replan_requested
        if self.state.is_ending or not (self._replan_due or requested):
            return
        self._measure_source()
        if self.state.now < self._last_replan_at + MIN_REPLAN_GAP_S:
            if not self._cooling_down:
                self._cooling_down = True
                self.state.call_at(self._last_replan_at + MIN_REPLAN_GAP_S, self._end_cooldown)
            return
        self._replan_due = False
        if requested or not self._is_source_limited():
            self.replan_now()

    def _measure_source(self) -> None:
        """Measure the rate of the source, if the run waited for it nearly all the time."""
        when, read, awaited = self._source_sample
        passed = self.state.now - when
        if passed >= SOURCE_WINDOW_S:
            self._source_sample = (self.state.now, self.state.items_read, self.feeder.source_wait_s())
            slow = self._source_sample[2] - awaited >= MIN_SOURCE_WAIT_SHARE * passed
            self._source_rate = (self.state.items_read - read) / passed if slow else math.inf

    def _end_cooldown(self) -> None:
        self._cooling_down = False

    def _is_source_limited(self) -> bool:
        """Whether all units wait for the source: then more workers would not help, and none is stopped either."""
        state = self.state
        rate = self._source_rate
        if rate == math.inf or any(self._is_backlogged(unit) or not unit.workers for unit in state.units):
            return False
        self.predicted_rate, self.bottleneck = rate, "source"
        self._calm_intervals = min(2 * self._calm_intervals, MAX_INTERVALS_BETWEEN_REPLANS)
        self._intervals_left = self._calm_intervals
        text = f"the source is the bottleneck: {format_number(rate)} items/s, and every unit waits for it"
        state.add_note("look", text, rate=rate, bottleneck="source")
        for unit in state.units:
            unit.reset_message_ends()
        return True

    def adopt_plan(self, rate: float, bottleneck: str) -> None:
        """Use the prediction of the plan that the run starts with."""
        self.predicted_rate, self.bottleneck = rate, bottleneck

    def replan_now(self) -> None:
        """Replan and apply the result; satisfies pending requests."""
        requests = self.state.take_replan_reasons()
        self._last_replan_at = self.state.now
        snapshot = self._moved_off_reserved(self.snapshot())
        result = self._replan_what_fits(snapshot)
        self.replans += 1
        if result is None:
            return
        self.predicted_rate, self.bottleneck = result.rate_after, result.bottleneck
        changed = self._apply(result, "; ".join(requests) or "interval")
        self._calm_intervals = 1 if changed else min(2 * self._calm_intervals, MAX_INTERVALS_BETWEEN_REPLANS)
        self._intervals_left = self._calm_intervals
        self._last_seen = {unit.name: self._fingerprint(unit) for unit in self.state.units}
        for unit in self.state.units:
            unit.reset_message_ends()
        self._relax_memory(snapshot)

    def _moved_off_reserved(self, snapshot: Snapshot) -> Snapshot:
        """Move workers off capacity that is reserved for other runs, if all units still get workers then."""
        if not self.fleet.overcommitted:
            return snapshot
        moving = self.fleet.reserved_capacity.apply_to(snapshot)
        counts = replan(moving, rules_above_noise(self.state.options.rules, moving)).counts
        return moving if all(counts.get(unit.name) or unit.finished for unit in snapshot.units) else snapshot

    def _replan_what_fits(self, snapshot: Snapshot) -> Replan | None:
        """Replan so that every unit that takes part gets a worker.

        After a loss the capacity may be too small for all units at once. Then the last units wait, and their input is
        kept, until the units before them are finished and release their seats.
        """
        rules = rules_above_noise(self.state.options.rules, snapshot)
        result = replan(snapshot, rules)
        seated = [unit.name for unit in snapshot.units if not unit.finished]
        while seated and not all(result.counts.get(name) for name in seated):
            missing = next(name for name in reversed(seated) if not result.counts.get(name))
            if self.state.options.serving and not self.fleet.reserved_capacity.amounts:
                self.fail(RunFailure(f"no seats for {missing}, and a run that serves requests cannot wait for them"))
                return None
            seated.pop()
            kept = frozenset(seated)
            units = tuple(unit if unit.name in kept else replace(unit, finished=True) for unit in snapshot.units)
            if not seated:
                self._on_nothing_fits(snapshot, result)
                return None
            result = replan(replace(snapshot, units=units), rules)
        for seen in snapshot.units:
            unit = self.state.units_by_name[seen.name]
            waits = not seen.finished and seen.name not in seated
            if waits and not unit.waits_for_seats:
                text = f"{unit.name} waits until the units before it are finished: not all units fit at once"
                self.state.add_note("decision", text, unit=unit.name)
                unit.mark_dirty_with_parents()
            unit.set_waits_for_seats(waits)
        return result

    def _on_nothing_fits(self, snapshot: Snapshot, result: Replan) -> None:
        """Not even the first unit fits: try later if a worker cannot be moved now or a node is down, else fail the
        run."""
        if all(worker.movable for worker in snapshot.workers) and not self.fleet.health.down_until:
            first = next(unit.name for unit in snapshot.units if not unit.finished)
            self.fail(RunFailure(f"no node can seat a worker of {first}: {'; '.join(result.reasons)}"))
        else:
            self.state.call_at(self.state.now + self.state.options.replan_every_s, self._set_due)

    def _set_due(self) -> None:
        self._replan_due = True

    def _fingerprint(self, unit: UnitState) -> tuple[float | None, bool, bool, int]:
        return (unit.throughput.rate()[0], self._is_backlogged(unit), unit.finished, len(unit.workers))

    def _has_changed(self) -> bool:
        """Whether rates, queues or worker counts changed since the last replan."""
        return any(self._differs(unit, self._last_seen.get(unit.name)) for unit in self.state.units)

    def _differs(self, unit: UnitState, before: tuple[float | None, bool, bool, int] | None) -> bool:
        rate, backlogged, finished, workers = self._fingerprint(unit)
        if before is None or (rate is None) != (before[0] is None) or (finished, workers) != before[2:]:
            return True
        noise = 2 * (1 - unit.throughput.rate()[1])
        if (
            rate is not None
            and before[0] is not None
            and abs(rate - before[0]) > (MIN_RATE_CHANGE_SHARE + noise) * before[0]
        ):
            return True
        return backlogged != before[1] and not unit.throughput.is_measured

    # --- snapshot

    def snapshot(self) -> Snapshot:
        per_source = self.feeder.epoch_size.items_per_input_item()
        ancestors = _ancestors(self.state.units)
        units = tuple(self._unit_snapshot(unit, per_source[unit], ancestors[unit.name]) for unit in self.state.units)
        names = {unit.name for unit in units}
        cluster = self.fleet.reachable_cluster()
        down = self.fleet.health.down_until
        workers = tuple(
            _worker_snapshot(worker)
            for worker in self.state.workers.values()
            if worker.unit in names
            and (worker.state in PHASE_OF_STATE or worker.will_be_replaced)
            and not any(seat.node in down for seat in worker.seats)
        )
        staying = [seat for worker in self.state.workers.values() if is_staying(worker) for seat in worker.seats]
        external = self.fleet.reserved_capacity.external_workers(cluster, staying)
        return Snapshot(cluster, units, (*external, *workers), self._horizon_s())

    def _unit_snapshot(self, unit: UnitState, per_source: float, ancestors: frozenset[str]) -> UnitSnapshot:
        now = self.state.now
        ages = [
            (message.items, now - message.sent_at)
            for worker in unit.workers.values()
            for message in list(worker.messages.values())[: unit.spec.slots]
        ]
        unit.throughput.adjust_window(len(ages))
        rate, sure = unit.throughput.rate(ages)
        seconds = unit.throughput.seconds_per_item or 0.0
        return UnitSnapshot(
            name=unit.name,
            shape=unit.shape,
            rate=rate,
            per_source=per_source,
            low=unit.low,
            high=self._max_workers(unit, rate, per_source),
            per_node=unit.spec.plan.per_node,
            confidence=sure,
            queued=unit.queue.items,
            backlogged=self._is_backlogged(unit),
            starved_s=unit.update_idle_s(now),
            setup_s=unit.throughput.setup_s or 0.0,
            drain_s=seconds * unit.message_items,
            finished=unit.finished,
            ancestors=ancestors,
        )

    def _max_workers(self, unit: UnitState, rate: float | None, per_source: float) -> int | None:
        """Upper limit of workers: as configured, and no more than a slow source can feed."""
        if self._source_rate == math.inf or not rate or unit.low == unit.high:
            return unit.high
        fed = math.ceil(SOURCE_MARGIN_FACTOR * self._source_rate * per_source / rate) + 1
        fed = max(fed, unit.low, len(unit.workers))
        return fed if unit.high is None else min(fed, unit.high)

    def _is_backlogged(self, unit: UnitState) -> bool:
        """Whether its workers always had more work: then the unit limits the rate, not its neighbours."""
        seen = unit.saturated_ends + unit.starved_ends
        if seen >= MIN_ENDS_FOR_BACKLOG:
            return unit.saturated_ends >= MIN_BACKLOG_SHARE * seen
        return unit.queue.items >= max(unit.batch_size, len(unit.workers) * unit.spec.slots * unit.message_items)

    def _horizon_s(self) -> float:
        state = self.state
        if state.wave or state.total_items is None or not self.predicted_rate:
            return DEFAULT_HORIZON_S
        return max(1.0, (state.total_items - state.finished_items) / self.predicted_rate)

    # --- result

    def _apply(self, result: Replan, trigger: str) -> bool:
        """Carry out a replan and write the note about it. Returns whether anything changes."""
        state, fleet = self.state, self.fleet
        for number in result.cancelled_drains:
            fleet.cancel_drain(state.workers[number])
        for stop in result.stops:
            fleet.drain(state.workers[stop.worker], stop.reason)
        postponed = fleet.start_all(result.starts)
        changed = result.changes > postponed or bool(result.cancelled_drains)
        changes = [f"start {start.unit}: {start.reason}" for start in result.starts[:MAX_CHANGES_IN_NOTE]]
        changes += [f"stop {stop.worker}: {stop.reason}" for stop in result.stops[:MAX_CHANGES_IN_NOTE]]
        text = "; ".join(result.reasons) or "nothing to change"
        if changed:
            state.add_note(
                "decision",
                text,
                starts=len(result.starts),
                stops=len(result.stops),
                kept=len(result.cancelled_drains),
                rate_before=result.rate_before,
                rate_after=result.rate_after,
                bottleneck=result.bottleneck,
                counts=dict(result.counts),
                changes=changes,
                trigger=trigger,
            )
        else:
            state.add_note("look", text, rate=result.rate_after, bottleneck=result.bottleneck, trigger=trigger)
        return changed

    def _relax_memory(self, snapshot: Snapshot) -> None:
        """Let a suspect run on any worker if the larger worker that it waits for cannot be started."""
        for seen in snapshot.units:
            unit = self.state.units_by_name[seen.name]
            unit.acknowledge_shape()
            coming = [start.seats for start in self.fleet.waiting_starts.values() if start.unit == unit.name]
            seats = [*(worker.seats for worker in _staying_workers(unit)), *coming]
            largest = max((held[0].memory_bytes for held in seats), default=0)
            for suspect in unit.suspects:
                if suspect.memory_bytes > largest:
                    suspect.accept_any_worker()
                    unit.mark_dirty_with_parents()


def _worker_snapshot(worker: Worker) -> WorkerSnapshot:
    """A worker whose seats a replacement takes counts as one that stays."""
    if worker.will_be_replaced:
        return WorkerSnapshot(worker.id, worker.unit, worker.seats, WorkerPhase.READY, movable=False)
    alone = worker.exclusive and bool(worker.messages)
    return WorkerSnapshot(worker.id, worker.unit, worker.seats, PHASE_OF_STATE[worker.state], not alone)


def _staying_workers(unit: UnitState) -> list[Worker]:
    return [worker for worker in unit.workers.values() if worker.state in (WorkerState.STARTING, WorkerState.READY)]


def _ancestors(units: Sequence[UnitState]) -> dict[str, frozenset[str]]:
    """Unit -> all units before it; parents come before their children."""
    found: dict[str, frozenset[str]] = {}
    for unit in units:
        parents = [parent.name for parent in unit.parents]
        found[unit.name] = frozenset(parents).union(*(found.get(name, frozenset()) for name in parents))
    return found
