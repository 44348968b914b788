"""When is the allocation looked at again, what is it shown, and what becomes of the answer?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState
from dovetail.scheduling.replan import replan
from dovetail.scheduling.snapshot import Seated, Snapshot, Standing, UnitNow
from dovetail.streaming.reserve import stays

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.scheduling.rules import Rules
    from dovetail.scheduling.snapshot import Replan
    from dovetail.streaming.board import Board
    from dovetail.streaming.feeding import Feeder
    from dovetail.streaming.fleet import Fleet
    from dovetail.streaming.lane import Lane
    from dovetail.streaming.workers import Worker

STANDINGS = {
    WorkerState.STARTING: Standing.STARTING,
    WorkerState.READY: Standing.READY,
    WorkerState.DRAINING: Standing.DRAINING,
}
LONGEST_WAIT = 12
"""Times the usual interval: how rarely a pipeline that does not change is looked at."""
WORTH_A_LOOK = 0.05
"""A rate that changed by more than this share since the last look."""
SOONEST_S = 0.2
"""Between two replans: what is lost together is looked at together."""
SOURCE_SEEN_S = 4.0
NEARLY_ALWAYS = 0.9
SOURCE_MARGIN = 1.5
"""Workers are sized for this much more than the source gives."""
SEEN_ENOUGH = 8
ALWAYS = 0.8
MESSAGES_PER_LOOK = 2
LONGEST_INTERVAL_S = 60.0
MOST_NOISE = 0.1
"""A gain above this is never put down to noise."""
DEFAULT_HORIZON_S = 600.0
TELL_AT_MOST = 20


class Balance:
    """Replans, every few seconds and on every loss, and carries the result out."""

    def __init__(self, board: Board, fleet: Fleet, feeder: Feeder, fail: Callable[[str, str], None]) -> None:
        self.board = board
        self.fleet = fleet
        self.feeder = feeder
        self.fail = fail
        self.replans = 0
        self.predicted = 0.0
        self.bottleneck = ""
        self._due = False
        self._patience = 1
        """Intervals until the next look."""
        self._calm = 1
        """How many they are at the next time; grows while nothing changes."""
        self._seen: dict[str, tuple[float | None, bool, bool, int]] = {}
        self._repeating = False
        self._looked_at = -math.inf
        self._will_look = False
        self._source = (0.0, 0, 0.0)
        """When it was last looked at, how much it had given, and for how long it had been waited for."""
        self._arriving = math.inf
        """Source items per second, as far as the source limits them."""

    def begin(self) -> None:
        """Keeps looking from now on."""
        if self.board.options.replan and not self._repeating:
            self._repeating = True
            first = self.board.options.first_replan_s
            self.board.at(self.board.now + (self._interval() if first is None else first), self._tick)

    def _interval(self) -> float:
        """Every few seconds; where messages take longer, there is nothing new to see before some have ended."""
        slowest = max(lane.message_items * (lane.speeds.seconds_per_item or 0.0) for lane in self.board.lanes)
        return max(self.board.options.replan_every_s, min(MESSAGES_PER_LOOK * slowest, LONGEST_INTERVAL_S))

    def _tick(self) -> None:
        board = self.board
        if board.ending:
            self._repeating = False
            return
        board.at(board.now + self._interval(), self._tick)
        self._patience -= 1
        fed = self._arriving < math.inf and any(self._backlogged(lane) for lane in board.lanes)
        if self._patience <= 0 or fed or self._changed():
            self._due = True

    def look(self) -> None:
        """Replans if it is time, or if somebody was lost; but not for each of many who are lost together."""
        lost = self.fleet.wants_replan
        if self.board.ending or not (self._due or lost):
            return
        self._look_at_source()
        if self.board.now < self._looked_at + SOONEST_S:
            if not self._will_look:
                self._will_look = True
                self.board.at(self._looked_at + SOONEST_S, self._may_look)
            return
        self._due = False
        self.fleet.wants_replan = False
        if lost or not self._source_limits():
            self.now_at_once()

    def _look_at_source(self) -> None:
        """How much it gives, if it was nearly always asked for more than it had."""
        when, read, awaited = self._source
        passed = self.board.now - when
        if passed >= SOURCE_SEEN_S:
            self._source = (self.board.now, self.board.read, self.feeder.awaited_s())
            slow = self._source[2] - awaited >= NEARLY_ALWAYS * passed
            self._arriving = (self.board.read - read) / passed if slow else math.inf

    def _may_look(self) -> None:
        self._will_look = False

    def _source_limits(self) -> bool:
        """Whether everybody waits for the source: then more workers would wait too, and none is given away either."""
        board = self.board
        rate = self._arriving
        if rate == math.inf or any(self._backlogged(lane) or not lane.workers for lane in board.lanes):
            return False
        self.predicted, self.bottleneck = rate, "source"
        self._calm = min(2 * self._calm, LONGEST_WAIT)
        self._patience = self._calm
        text = f"the source limits the pipeline: it gives {rate:.4g} items/s, and every unit waits for it"
        board.note("look", text, rate=rate, bottleneck="source")
        for lane in board.lanes:
            lane.went_on = lane.ran_dry = 0
        return True

    def now_at_once(self) -> None:
        self._looked_at = self.board.now
        snapshot = self._moving(self.snapshot())
        result = self._with_what_fits(snapshot)
        self.replans += 1
        if result is None:
            return
        self.predicted, self.bottleneck = result.rate_after, result.bottleneck
        changed = self._carry_out(result)
        self._calm = 1 if changed else min(2 * self._calm, LONGEST_WAIT)
        self._patience = self._calm
        self._seen = {lane.name: self._key(lane) for lane in self.board.lanes}
        for lane in self.board.lanes:
            lane.went_on = lane.ran_dry = 0
        self._loosen(snapshot)

    def _moving(self, snapshot: Snapshot) -> Snapshot:
        """Whoever sits on what others hold moves, if there is another place for them all."""
        if not self.fleet.pressed:
            return snapshot
        moving = self.fleet.reserve.squeezed(snapshot)
        counts = replan(moving, self._rules(moving)).counts
        return moving if all(counts.get(unit.name) or unit.finished for unit in snapshot.units) else snapshot

    def _with_what_fits(self, snapshot: Snapshot) -> Replan | None:
        """A replan in which everybody it counts on has a worker.

        After a loss there may be too little for all units at once. Then the last ones wait, and what comes to them is
        kept, until those before them are finished and give their room back.
        """
        rules = self._rules(snapshot)
        result = replan(snapshot, rules)
        seated = [unit.name for unit in snapshot.units if not unit.finished]
        while seated and not all(result.counts.get(name) for name in seated):
            missing = next(name for name in reversed(seated) if not result.counts.get(name))
            if self.board.options.serving and not self.fleet.reserve.amounts:
                self.fail(f"{missing} has no room, and a run without an end cannot wait for it", "")
                return None
            seated.pop()
            kept = frozenset(seated)
            units = tuple(unit if unit.name in kept else replace(unit, finished=True) for unit in snapshot.units)
            if not seated:
                self._nobody_fits(snapshot, result)
                return None
            result = replan(replace(snapshot, units=units), rules)
        for unit in snapshot.units:
            lane = self.board.lane_of[unit.name]
            waits = not unit.finished and unit.name not in seated
            if waits and not lane.waits_for_seats:
                text = f"{lane.name} waits until those before it are finished: there is no room for all at once"
                self.board.note("decision", text, unit=lane.name)
                self.board.stir(lane)
            lane.waits_for_seats = waits
        return result

    def _nobody_fits(self, snapshot: Snapshot, result: Replan) -> None:
        """Not even the first unit: later, if somebody sits there who cannot be moved now; else never."""
        if all(worker.moveable for worker in snapshot.workers) and not self.fleet.health.down:
            first = next(unit.name for unit in snapshot.units if not unit.finished)
            self.fail(f"no node can seat a worker of {first}: {'; '.join(result.reasons)}", "")
        else:
            self.board.at(self.board.now + self.board.options.replan_every_s, self._soon)

    def _soon(self) -> None:
        self._due = True

    def _rules(self, snapshot: Snapshot) -> Rules:
        """What is won must be more than what the rates are uncertain by, or noise would move workers."""
        rules = self.board.options.rules
        noise = 2 - 2 * min((unit.sure for unit in snapshot.units if unit.rate is not None), default=1.0)
        return replace(rules, min_gain=max(rules.min_gain, min(noise, MOST_NOISE)))

    def _key(self, lane: Lane) -> tuple[float | None, bool, bool, int]:
        return (lane.speeds.rate()[0], self._backlogged(lane), lane.finished, len(lane.workers))

    def _changed(self) -> bool:
        """Whether speeds, queues or members are not what the last replan saw."""
        return any(self._differs(lane, self._seen.get(lane.name)) for lane in self.board.lanes)

    def _differs(self, lane: Lane, before: tuple[float | None, bool, bool, int] | None) -> bool:
        rate, backlogged, finished, workers = self._key(lane)
        if before is None or (rate is None) != (before[0] is None) or (finished, workers) != before[2:]:
            return True
        noise = 2 * (1 - lane.speeds.rate()[1])
        if rate is not None and before[0] is not None and abs(rate - before[0]) > (WORTH_A_LOOK + noise) * before[0]:
            return True
        return backlogged != before[1] and not lane.speeds.measured

    # --- what a replan is shown

    def snapshot(self) -> Snapshot:
        lanes = self.board.lanes
        per_source = self._per_source()
        units = tuple(self._unit(lane, per_source[lane.name]) for lane in lanes)
        names = {lane.name for lane in lanes}
        cluster = self.fleet.believed()
        down = self.fleet.health.down
        workers = tuple(
            _seated(worker)
            for worker in self.board.workers.values()
            if worker.unit in names
            and (worker.state in STANDINGS or worker.replaced)
            and not any(seat.node in down for seat in worker.seats)
        )
        staying = [seat for worker in self.board.workers.values() if stays(worker) for seat in worker.seats]
        strangers = self.fleet.reserve.strangers(cluster, staying)
        return Snapshot(cluster, units, (*strangers, *workers), self._horizon())

    def _unit(self, lane: Lane, per_source: float) -> UnitNow:
        now = self.board.now
        ages = [
            (message.items, now - message.sent_at)
            for worker in lane.workers.values()
            for message in list(worker.messages.values())[: lane.work.slots]
        ]
        lane.speeds.remember(len(ages))
        rate, sure = lane.speeds.rate(ages)
        if lane.empty:
            lane.idle_since = now if lane.idle_since is None else lane.idle_since
        else:
            lane.idle_since = None
        seconds = lane.speeds.seconds_per_item or 0.0
        return UnitNow(
            name=lane.name,
            shape=lane.shape,
            rate=rate,
            per_source=per_source,
            low=lane.low,
            high=self._most(lane, rate, per_source),
            per_node=lane.work.per_node,
            sure=sure,
            queued=lane.queue.items,
            backlogged=self._backlogged(lane),
            starved_s=0.0 if lane.idle_since is None else now - lane.idle_since,
            setup_s=lane.speeds.setup_s or 0.0,
            drain_s=seconds * lane.message_items,
            finished=lane.finished,
        )

    def _most(self, lane: Lane, rate: float | None, per_source: float) -> int | None:
        """No more than its author allows, nor than a slow source can feed."""
        if self._arriving == math.inf or not rate or lane.low == lane.high:
            return lane.high
        fed = math.ceil(SOURCE_MARGIN * self._arriving * per_source / rate) + 1
        fed = max(fed, lane.low, len(lane.workers))
        return fed if lane.high is None else min(fed, lane.high)

    def _backlogged(self, lane: Lane) -> bool:
        """Whether its workers always had more to do: then it sets the pace, and not what is before or after it."""
        seen = lane.went_on + lane.ran_dry
        if seen >= SEEN_ENOUGH:
            return lane.went_on >= ALWAYS * seen
        return lane.queue.items >= max(lane.batch_size, len(lane.workers) * lane.work.slots * lane.message_items)

    def _per_source(self) -> dict[str, float]:
        """Items that each unit of the wave gets per item of its input."""
        found: dict[str, float] = {}
        for lane in self.board.lanes:
            from_parents = sum(found[parent.name] * parent.speeds.returns for parent in lane.parents)
            found[lane.name] = from_parents + self.feeder.share_of(lane)
        return found

    def _horizon(self) -> float:
        board = self.board
        if board.wave or board.total is None or not self.predicted:
            return DEFAULT_HORIZON_S
        return max(1.0, (board.total - board.finished_items) / self.predicted)

    # --- what becomes of the answer

    def _carry_out(self, result: Replan) -> bool:
        """Whether anything changes by it."""
        board, fleet = self.board, self.fleet
        for number in result.keeps:
            fleet.take_back(board.workers[number])
        for stop in result.stops:
            fleet.drain(board.workers[stop.worker], stop.reason)
        postponed = fleet.start_all(result.starts)
        changed = result.changes > postponed or bool(result.keeps)
        changes = [f"start {start.unit}: {start.reason}" for start in result.starts[:TELL_AT_MOST]]
        changes += [f"stop {stop.worker}: {stop.reason}" for stop in result.stops[:TELL_AT_MOST]]
        text = "; ".join(result.reasons) or "nothing to change"
        if changed:
            board.note(
                "decision",
                text,
                starts=len(result.starts),
                stops=len(result.stops),
                kept=len(result.keeps),
                rate_before=result.rate_before,
                rate_after=result.rate_after,
                bottleneck=result.bottleneck,
                counts=dict(result.counts),
                changes=changes,
            )
        else:
            board.note("look", text, rate=result.rate_after, bottleneck=result.bottleneck)
        return changed

    def _loosen(self, snapshot: Snapshot) -> None:
        """A suspect that waits for a larger worker which nobody can start takes what there is."""
        for unit in snapshot.units:
            lane = self.board.lane_of[unit.name]
            lane.grown = False
            coming = [start.seats for start in self.fleet.waiting.values() if start.unit == lane.name]
            seats = [*(worker.seats for worker in _staying(lane)), *coming]
            largest = max((held[0].memory_bytes for held in seats), default=0)
            for suspect in lane.suspects:
                if suspect.memory_bytes > largest:
                    suspect.memory_bytes = 0
                    self.board.stir(lane)


def _seated(worker: Worker) -> Seated:
    """One that leaves because another takes its seats stays, as far as a replan cares."""
    if worker.replaced:
        return Seated(worker.id, worker.unit, worker.seats, Standing.READY, moveable=False)
    alone = worker.exclusive and bool(worker.messages)
    return Seated(worker.id, worker.unit, worker.seats, STANDINGS[worker.state], not alone)


def _staying(lane: Lane) -> list[Worker]:
    return [worker for worker in lane.workers.values() if worker.state in (WorkerState.STARTING, WorkerState.READY)]
