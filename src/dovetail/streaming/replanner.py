"""Replanning: when to replan, the snapshot the scheduler gets, and applying its answer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState
from dovetail.scheduling.replan.snapshot import Snapshot, UnitSnapshot, WorkerPhase, WorkerSnapshot
from dovetail.scheduling.replan.steps import replan
from dovetail.streaming.reserved_capacity import is_staying

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.scheduling.replan.snapshot import Replan, ReplanRules
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
"""Times the usual interval: how rarely a pipeline that does not change is looked at."""
MIN_RATE_CHANGE_SHARE = 0.05
"""A rate that changed by more than this share since the last look."""
MIN_REPLAN_GAP_S = 0.2
"""Between two replans: what is lost together is looked at together."""
SOURCE_WINDOW_S = 4.0
MIN_SOURCE_WAIT_SHARE = 0.9
SOURCE_MARGIN_FACTOR = 1.5
"""Workers are sized for this much more than the source gives."""
MIN_ENDS_FOR_BACKLOG = 8
MIN_BACKLOG_SHARE = 0.8
MESSAGES_PER_REPLAN = 2
MAX_INTERVAL_S = 60.0
MAX_NOISE_SHARE = 0.1
"""A gain above this is never put down to noise."""
DEFAULT_HORIZON_S = 600.0
MAX_CHANGES_IN_NOTE = 20


class Replanner:
    """Replans, every few seconds and on every loss, and carries the result out."""

    def __init__(self, board: StreamState, fleet: Fleet, feeder: Feeder, fail: Callable[[str, str], None]) -> None:
        self.state = board
        self.fleet = fleet
        self.feeder = feeder
        self.fail = fail
        self.replans = 0
        self.predicted_rate = 0.0
        self.bottleneck = ""
        self._replan_due = False
        self._intervals_left = 1
        """Intervals until the next look."""
        self._calm_intervals = 1
        """How many they are at the next time; grows while nothing changes."""
        self._last_seen: dict[str, tuple[float | None, bool, bool, int]] = {}
        self._timer_running = False
        self._last_replan_at = -math.inf
        self._cooling_down = False
        self._source_sample = (0.0, 0, 0.0)
        """When it was last looked at, how much it had given, and for how long it had been waited for."""
        self._source_rate = math.inf
        """Source items per second, as far as the source limits them."""

    def start_timer(self) -> None:
        """Keeps looking from now on."""
        if self.state.options.replan and not self._timer_running:
            self._timer_running = True
            first = self.state.options.first_replan_s
            self.state.call_at(self.state.now + (self._interval_s() if first is None else first), self._tick)

    def _interval_s(self) -> float:
        """Every few seconds; where messages take longer, there is nothing new to see before some have ended."""
        slowest = max(lane.message_items * (lane.throughput.seconds_per_item or 0.0) for lane in self.state.units)
        return max(self.state.options.replan_every_s, min(MESSAGES_PER_REPLAN * slowest, MAX_INTERVAL_S))

    def _tick(self) -> None:
        board = self.state
        if board.is_ending:
            self._timer_running = False
            return
        board.call_at(board.now + self._interval_s(), self._tick)
        self._intervals_left -= 1
        fed = self._source_rate < math.inf and any(self._is_backlogged(lane) for lane in board.units)
        if self._intervals_left <= 0 or fed or self._has_changed():
            self._replan_due = True

    def replan_if_due(self) -> None:
        """Replans if it is time, or if somebody was lost; but not for each of many who are lost together."""
        lost = self.fleet.replan_requested
        if self.state.is_ending or not (self._replan_due or lost):
            return
        self._measure_source()
        if self.state.now < self._last_replan_at + MIN_REPLAN_GAP_S:
            if not self._cooling_down:
                self._cooling_down = True
                self.state.call_at(self._last_replan_at + MIN_REPLAN_GAP_S, self._end_cooldown)
            return
        self._replan_due = False
        self.fleet.replan_requested = False
        if lost or not self._is_source_limited():
            self.replan_now()

    def _measure_source(self) -> None:
        """How much it gives, if it was nearly always asked for more than it had."""
        when, read, awaited = self._source_sample
        passed = self.state.now - when
        if passed >= SOURCE_WINDOW_S:
            self._source_sample = (self.state.now, self.state.items_read, self.feeder.source_wait_s())
            slow = self._source_sample[2] - awaited >= MIN_SOURCE_WAIT_SHARE * passed
            self._source_rate = (self.state.items_read - read) / passed if slow else math.inf

    def _end_cooldown(self) -> None:
        self._cooling_down = False

    def _is_source_limited(self) -> bool:
        """Whether everybody waits for the source: then more workers would wait too, and none is given away either."""
        board = self.state
        rate = self._source_rate
        if rate == math.inf or any(self._is_backlogged(lane) or not lane.workers for lane in board.units):
            return False
        self.predicted_rate, self.bottleneck = rate, "source"
        self._calm_intervals = min(2 * self._calm_intervals, MAX_INTERVALS_BETWEEN_REPLANS)
        self._intervals_left = self._calm_intervals
        text = f"the source limits the pipeline: it gives {rate:.4g} items/s, and every unit waits for it"
        board.add_note("look", text, rate=rate, bottleneck="source")
        for lane in board.units:
            lane.saturated_ends = lane.starved_ends = 0
        return True

    def replan_now(self) -> None:
        self._last_replan_at = self.state.now
        snapshot = self._moved_off_reserved(self.snapshot())
        result = self._replan_what_fits(snapshot)
        self.replans += 1
        if result is None:
            return
        self.predicted_rate, self.bottleneck = result.rate_after, result.bottleneck
        changed = self._apply(result)
        self._calm_intervals = 1 if changed else min(2 * self._calm_intervals, MAX_INTERVALS_BETWEEN_REPLANS)
        self._intervals_left = self._calm_intervals
        self._last_seen = {lane.name: self._fingerprint(lane) for lane in self.state.units}
        for lane in self.state.units:
            lane.saturated_ends = lane.starved_ends = 0
        self._relax_memory(snapshot)

    def _moved_off_reserved(self, snapshot: Snapshot) -> Snapshot:
        """Whoever sits on what others hold moves, if there is another place for them all."""
        if not self.fleet.overcommitted:
            return snapshot
        moving = self.fleet.reserved_capacity.apply_to(snapshot)
        counts = replan(moving, self._rules(moving)).counts
        return moving if all(counts.get(unit.name) or unit.finished for unit in snapshot.units) else snapshot

    def _replan_what_fits(self, snapshot: Snapshot) -> Replan | None:
        """A replan in which everybody it counts on has a worker.

        After a loss there may be too little for all units at once. Then the last ones wait, and what comes to them is
        kept, until those before them are finished and give their room back.
        """
        rules = self._rules(snapshot)
        result = replan(snapshot, rules)
        seated = [unit.name for unit in snapshot.units if not unit.finished]
        while seated and not all(result.counts.get(name) for name in seated):
            missing = next(name for name in reversed(seated) if not result.counts.get(name))
            if self.state.options.serving and not self.fleet.reserved_capacity.amounts:
                self.fail(f"{missing} has no room, and a run without an end cannot wait for it", "")
                return None
            seated.pop()
            kept = frozenset(seated)
            units = tuple(unit if unit.name in kept else replace(unit, finished=True) for unit in snapshot.units)
            if not seated:
                self._on_nothing_fits(snapshot, result)
                return None
            result = replan(replace(snapshot, units=units), rules)
        for unit in snapshot.units:
            lane = self.state.units_by_name[unit.name]
            waits = not unit.finished and unit.name not in seated
            if waits and not lane.waits_for_seats:
                text = f"{lane.name} waits until those before it are finished: there is no room for all at once"
                self.state.add_note("decision", text, unit=lane.name)
                self.state.mark_dirty(lane)
            lane.waits_for_seats = waits
        return result

    def _on_nothing_fits(self, snapshot: Snapshot, result: Replan) -> None:
        """Not even the first unit: later, if somebody sits there who cannot be moved now; else never."""
        if all(worker.movable for worker in snapshot.workers) and not self.fleet.health.down_until:
            first = next(unit.name for unit in snapshot.units if not unit.finished)
            self.fail(f"no node can seat a worker of {first}: {'; '.join(result.reasons)}", "")
        else:
            self.state.call_at(self.state.now + self.state.options.replan_every_s, self._set_due)

    def _set_due(self) -> None:
        self._replan_due = True

    def _rules(self, snapshot: Snapshot) -> ReplanRules:
        """What is won must be more than what the rates are uncertain by, or noise would move workers."""
        rules = self.state.options.rules
        noise = 2 - 2 * min((unit.confidence for unit in snapshot.units if unit.rate is not None), default=1.0)
        return replace(rules, min_gain=max(rules.min_gain, min(noise, MAX_NOISE_SHARE)))

    def _fingerprint(self, lane: UnitState) -> tuple[float | None, bool, bool, int]:
        return (lane.throughput.rate()[0], self._is_backlogged(lane), lane.finished, len(lane.workers))

    def _has_changed(self) -> bool:
        """Whether speeds, queues or members are not what the last replan saw."""
        return any(self._differs(lane, self._last_seen.get(lane.name)) for lane in self.state.units)

    def _differs(self, lane: UnitState, before: tuple[float | None, bool, bool, int] | None) -> bool:
        rate, backlogged, finished, workers = self._fingerprint(lane)
        if before is None or (rate is None) != (before[0] is None) or (finished, workers) != before[2:]:
            return True
        noise = 2 * (1 - lane.throughput.rate()[1])
        if (
            rate is not None
            and before[0] is not None
            and abs(rate - before[0]) > (MIN_RATE_CHANGE_SHARE + noise) * before[0]
        ):
            return True
        return backlogged != before[1] and not lane.throughput.is_measured

    # --- what a replan is shown

    def snapshot(self) -> Snapshot:
        lanes = self.state.units
        per_source = self._items_per_source_item()
        units = tuple(self._unit_snapshot(lane, per_source[lane.name]) for lane in lanes)
        names = {lane.name for lane in lanes}
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
        strangers = self.fleet.reserved_capacity.external_workers(cluster, staying)
        return Snapshot(cluster, units, (*strangers, *workers), self._horizon_s())

    def _unit_snapshot(self, lane: UnitState, per_source: float) -> UnitSnapshot:
        now = self.state.now
        ages = [
            (message.items, now - message.sent_at)
            for worker in lane.workers.values()
            for message in list(worker.messages.values())[: lane.spec.slots]
        ]
        lane.throughput.adjust_window(len(ages))
        rate, sure = lane.throughput.rate(ages)
        if lane.is_empty:
            lane.idle_since = now if lane.idle_since is None else lane.idle_since
        else:
            lane.idle_since = None
        seconds = lane.throughput.seconds_per_item or 0.0
        return UnitSnapshot(
            name=lane.name,
            shape=lane.shape,
            rate=rate,
            per_source=per_source,
            low=lane.low,
            high=self._max_workers(lane, rate, per_source),
            per_node=lane.spec.per_node,
            confidence=sure,
            queued=lane.queue.items,
            backlogged=self._is_backlogged(lane),
            starved_s=0.0 if lane.idle_since is None else now - lane.idle_since,
            setup_s=lane.throughput.setup_s or 0.0,
            drain_s=seconds * lane.message_items,
            finished=lane.finished,
        )

    def _max_workers(self, lane: UnitState, rate: float | None, per_source: float) -> int | None:
        """No more than its author allows, nor than a slow source can feed."""
        if self._source_rate == math.inf or not rate or lane.low == lane.high:
            return lane.high
        fed = math.ceil(SOURCE_MARGIN_FACTOR * self._source_rate * per_source / rate) + 1
        fed = max(fed, lane.low, len(lane.workers))
        return fed if lane.high is None else min(fed, lane.high)

    def _is_backlogged(self, lane: UnitState) -> bool:
        """Whether its workers always had more to do: then it sets the pace, and not what is before or after it."""
        seen = lane.saturated_ends + lane.starved_ends
        if seen >= MIN_ENDS_FOR_BACKLOG:
            return lane.saturated_ends >= MIN_BACKLOG_SHARE * seen
        return lane.queue.items >= max(lane.batch_size, len(lane.workers) * lane.spec.slots * lane.message_items)

    def _items_per_source_item(self) -> dict[str, float]:
        """Items that each unit of the wave gets per item of its input."""
        found: dict[str, float] = {}
        for lane in self.state.units:
            from_parents = sum(found[parent.name] * parent.throughput.returns for parent in lane.parents)
            found[lane.name] = from_parents + self.feeder.input_share(lane)
        return found

    def _horizon_s(self) -> float:
        board = self.state
        if board.wave or board.total_items is None or not self.predicted_rate:
            return DEFAULT_HORIZON_S
        return max(1.0, (board.total_items - board.finished_items) / self.predicted_rate)

    # --- what becomes of the answer

    def _apply(self, result: Replan) -> bool:
        """Whether anything changes by it."""
        board, fleet = self.state, self.fleet
        for number in result.cancelled_drains:
            fleet.cancel_drain(board.workers[number])
        for stop in result.stops:
            fleet.drain(board.workers[stop.worker], stop.reason)
        postponed = fleet.start_all(result.starts)
        changed = result.changes > postponed or bool(result.cancelled_drains)
        changes = [f"start {start.unit}: {start.reason}" for start in result.starts[:MAX_CHANGES_IN_NOTE]]
        changes += [f"stop {stop.worker}: {stop.reason}" for stop in result.stops[:MAX_CHANGES_IN_NOTE]]
        text = "; ".join(result.reasons) or "nothing to change"
        if changed:
            board.add_note(
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
            )
        else:
            board.add_note("look", text, rate=result.rate_after, bottleneck=result.bottleneck)
        return changed

    def _relax_memory(self, snapshot: Snapshot) -> None:
        """A suspect that waits for a larger worker which nobody can start takes what there is."""
        for unit in snapshot.units:
            lane = self.state.units_by_name[unit.name]
            lane.shape_changed = False
            coming = [start.seats for start in self.fleet.waiting_starts.values() if start.unit == lane.name]
            seats = [*(worker.seats for worker in _staying_workers(lane)), *coming]
            largest = max((held[0].memory_bytes for held in seats), default=0)
            for suspect in lane.suspects:
                if suspect.memory_bytes > largest:
                    suspect.memory_bytes = 0
                    self.state.mark_dirty(lane)


def _worker_snapshot(worker: Worker) -> WorkerSnapshot:
    """One that leaves because another takes its seats stays, as far as a replan cares."""
    if worker.will_be_replaced:
        return WorkerSnapshot(worker.id, worker.unit, worker.seats, WorkerPhase.READY, movable=False)
    alone = worker.exclusive and bool(worker.messages)
    return WorkerSnapshot(worker.id, worker.unit, worker.seats, PHASE_OF_STATE[worker.state], not alone)


def _staying_workers(lane: UnitState) -> list[Worker]:
    return [worker for worker in lane.workers.values() if worker.state in (WorkerState.STARTING, WorkerState.READY)]
