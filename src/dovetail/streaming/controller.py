"""The controller of a stream: events and the time in, commands out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.commands import Cancel
from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    CancelRun,
    Drain,
    InputEnded,
    ItemsArrived,
    NodeJoined,
    NodeLeft,
    Repin,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.lifecycle import ENDED, RunState
from dovetail.scheduling.snapshot import Start
from dovetail.streaming.balance import Balance
from dovetail.streaming.board import Board
from dovetail.streaming.dispatch import sweep, tune
from dovetail.streaming.feeding import Feeder
from dovetail.streaming.fleet import Fleet
from dovetail.streaming.lane import Lane
from dovetail.streaming.losses import Losses
from dovetail.streaming.options import Options
from dovetail.streaming.progress import Progress
from dovetail.streaming.sight import view_of, workers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.control.commands import Command, Deliver
    from dovetail.control.events import Event
    from dovetail.control.segments import Segment
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.messages import Message
    from dovetail.streaming.view import View, WorkerView
    from dovetail.streaming.work import Work
    from dovetail.streaming.workers import Worker

TUNE_EVERY = 32


class Stream:
    """Runs the units of a plan, wave after wave, over a source. Pure: see `control.engine.Controller`."""

    def __init__(
        self, works: Sequence[Work], plan: Plan, options: Options | None = None, resume: Sequence[Deliver] = ()
    ) -> None:
        self.plan = plan
        self.board = Board([Lane(work) for work in works], options or Options())
        self.progress = Progress(self.board, self._lane_finished)
        self.feeder = Feeder(self.board, self.progress)
        self.fleet = Fleet(self.board, plan.cluster, self.fail)
        self.losses = Losses(self.board, self.fail)
        self.balance = Balance(self.board, self.fleet, self.fail)
        self.waves = max(work.wave for work in works) + 1
        self._verdict = RunState.FINISHED
        self._resume = list(resume)
        self._begun = False
        self._drained = False
        self._handlers: dict[type, Callable[..., None]] = {
            BatchesDone: self._done,
            BatchesReturned: self._returned,
            WorkerReady: self.fleet.ready,
            WorkerStopped: lambda event: self.fleet.stopped(event.worker),
            WorkerLost: self._lost,
            ItemsArrived: self._arrived,
            InputEnded: lambda event: self.feeder.ended(event.items),
            NodeJoined: self._joined,
            NodeLeft: self._left,
            Drain: self._drain,
            CancelRun: lambda event: self._end(RunState.CANCELLED, f"cancelled: {event.reason}"),
            Repin: self._repin,
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
            if self._drained or board.wave + 1 >= self.waves:
                self._end(RunState.FINISHED, "")
                return
            self._next_wave()

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
        self.progress.input_ended = False
        self._begin_input(lanes)
        if self.waves > 1:
            board.note("wave", f"wave {board.wave + 1} of {self.waves}: {', '.join(sorted(inside))}", wave=board.wave)
        self._first_workers(lanes)

    def _begin_input(self, lanes: list[Lane]) -> None:
        board, wave = self.board, self.board.wave
        before = [deliver for deliver in self._resume if deliver.wave == wave]
        done = [(deliver.first, deliver.last) for deliver in before if deliver.last > deliver.first]
        if not wave:
            entries = [lane for lane in lanes if not lane.work.parents]
            later = [lane.name for lane in board.all_lanes if not lane.work.parents and lane.work.wave]
            self.feeder.begin(entries, later, done)
            board.finished_items = sum(last - first for first, last in done)
            board.read = board.finished_items
        else:
            spool = self.progress.spool
            entries = [lane for lane in lanes if lane.name in spool]
            mixed = _mixed([(lane.name, spool.pop(lane.name)) for lane in entries])
            self.feeder.begin_spooled(entries, mixed, done)
        for deliver in before:
            for name, segments in deliver.spooled.items():
                self.progress.spool.setdefault(name, []).extend(segments)
            board.delivered += sum(segment.items for out in deliver.outputs.values() for segment in out)
            board.aside += len(deliver.aside)

    def _first_workers(self, lanes: list[Lane]) -> None:
        """The plan's, if the speeds behind it are known or it is to be followed; otherwise by replanning from empty."""
        known = all(lane.work.rate is not None for lane in lanes) or self.board.options.follow_plan
        inside = {lane.name for lane in lanes}
        if not (known and self.fleet.cluster is self.plan.cluster):
            self.fleet.wants_replan = False
            self.balance.now_at_once()
            return
        starts = []
        for unit in self.plan.units:
            if unit.name not in inside:
                continue
            seats = self.plan.seats[unit.stages[0]]
            ranks = unit.shape.ranks
            starts += [
                Start(unit.name, seats[first : first + ranks], "planned") for first in range(0, len(seats), ranks)
            ]
        self.balance.predicted = self.plan.rate if self.waves == 1 else 0.0
        self.balance.bottleneck = self.plan.bottleneck if self.plan.bottleneck in inside else ""
        text = f"{len(starts)} workers as planned"
        self.board.note("decision", text, starts=len(starts), stops=0, rate_after=self.balance.predicted)
        self.fleet.start_all([*self.fleet.waiting, *starts])

    # --- messages

    def _done(self, event: BatchesDone) -> None:
        worker = self.board.workers.get(event.worker)
        message = worker.messages.get(event.message) if worker is not None else None
        if worker is None or message is None:
            return
        board = self.board
        lane = board.lane_of[worker.unit]
        self._back_in_pool(lane, worker, message)
        epoch = message.epoch
        failures = event.failures
        failed = sum(failure.stop - failure.start for failure in failures) if failures else 0
        calls = -(-message.items // message.batch_size)
        worker.batches += calls
        worker.busy_s += event.seconds
        lane.batches += calls
        lane.busy_s += event.seconds
        lane.crashes = 0
        if not epoch.dead:
            given = self.progress.route(lane, epoch, event.segments)
            settled = message.items - failed
            for failure in failures:
                settled += self.losses.raised(lane, message, failure, event.peak_bytes)
            if lane.grown:
                self.fleet.wants_replan = True
            lane.taken += settled
            lane.given += given
            epoch.pending[lane.index] -= settled
            if message.items > failed and message.suspect is None:
                lane.speeds.add(message.items - failed, event.seconds, given)
            elif message.suspect is not None and not failures:
                self._suspect_passed(lane, message)
            if not epoch.pending[lane.index] and epoch.closed:
                self.progress.settle(epoch, lane)
        board.dirty[lane.index] = True
        if lane.speeds.messages >= lane.tuned_at:
            lane.tuned_at = max(2 * lane.tuned_at, 1) if lane.tuned_at < TUNE_EVERY else lane.tuned_at + TUNE_EVERY
            tune(board, lane)
        limit = lane.work.recycle_batches
        if limit is not None and worker.batches >= limit:
            self.fleet.recycle(worker)
        self.fleet.gone_if_empty(worker)

    def _back_in_pool(self, lane: Lane, worker: Worker, message: Message) -> None:
        """One message less in hand."""
        pool = lane.pool
        in_pool = not worker.exclusive
        if in_pool:
            pool.remove(worker)
        del worker.messages[message.id]
        if worker.exclusive and not worker.messages:
            worker.exclusive = False
            if lane.reserved is worker:
                lane.reserved = None
        if not worker.exclusive and worker.state.value == "ready":
            pool.add(worker)
        lane.just_ended = True
        lane.in_flight -= message.items
        lane.in_flight_messages -= 1
        self.board.fewer_coming(lane)
        for parent in lane.parents:
            if parent.blocked:
                self.board.dirty[parent.index] = True

    def _suspect_passed(self, lane: Lane, message: Message) -> None:
        """A half that fitted where the whole did not is the new limit."""
        suspect = message.suspect
        if suspect is not None and suspect.memory_bytes:
            lane.shape_before = None
        if suspect is None or not suspect.halves or suspect.batch_size >= lane.batch_size:
            return
        old = lane.batch_size
        lane.queue.resize(suspect.batch_size)
        lane.message_items = suspect.batch_size
        tune(self.board, lane)
        text = f"{lane.name}: out of memory with {old} items per batch; from now on {suspect.batch_size}"
        self.board.note("decision", text, unit=lane.name, batch_size=suspect.batch_size, was=old)

    def _returned(self, event: BatchesReturned) -> None:
        worker = self.board.workers.get(event.worker)
        message = worker.messages.get(event.message) if worker is not None else None
        if worker is None or message is None:
            return
        lane = self.board.lane_of[worker.unit]
        self._back_in_pool(lane, worker, message)
        if not message.epoch.dead:
            if message.input_lost or not self._all_there(message):
                self._begin_again(message.epoch)
            elif message.suspect is not None:
                lane.suspects.append(message.suspect)
            else:
                lane.queue.put_back(message.epoch.id, message.parts, self.board.now)
        self.board.dirty[lane.index] = True
        self.fleet.gone_if_empty(worker)

    def _all_there(self, message: Message) -> bool:
        knows = self.fleet.ledger.knows
        return all(not segment.node or knows(segment.node) for segment, _, _ in message.parts)

    # --- workers and nodes

    def _lost(self, event: WorkerLost) -> None:
        worker = self.board.workers.get(event.worker)
        if worker is None:
            return
        lane = self.board.lane_of[worker.unit]
        lane.pool.remove(worker)
        lane.peak_bytes = max(lane.peak_bytes, event.peak_bytes)
        open_epochs = [message.epoch for message in worker.messages.values()]
        torn = [message.epoch for message in worker.messages.values() if message.input_lost]
        blamed = self.losses.died(lane, worker, event)
        for epoch in dict.fromkeys(open_epochs):
            if not epoch.dead and not epoch.pending[lane.index]:
                self.progress.settle(epoch, lane)
        self.fleet.lost(worker, event, blamed=blamed)
        for epoch in dict.fromkeys(torn):
            if epoch.id in self.board.epochs and not self.board.ending:
                self._begin_again(epoch)

    def _joined(self, event: NodeJoined) -> None:
        self.board.note("node", f"node {event.node.name} joined", node=event.node.name)
        self.fleet.joined(event.node)

    def _left(self, event: NodeLeft) -> None:
        """Its workers were reported before; what lay there is lost, and the epochs it belonged to begin anew."""
        board = self.board
        why = f" ({event.reason})" if event.reason else ""
        board.note("node", f"node {event.node} is gone{why}", node=event.node)
        self.fleet.left(event.node)
        if board.ending:
            return
        for worker in board.workers.values():
            for message in worker.messages.values():
                if any(segment.node == event.node for segment, _, _ in message.parts):
                    message.input_lost = True
        for epoch in list(board.epochs.values()) + list(self.progress.held.values()):
            if self._touched(epoch, event.node):
                self._begin_again(epoch)

    def _touched(self, epoch: Epoch, node: str) -> bool:
        if epoch.lies_on(node):
            return True
        for lane in self.board.lanes:
            waiting = lane.queue.by_epoch.get(epoch.id)
            if waiting is not None and any(segment.node == node for segment, _, _ in waiting.parts):
                return True
            for suspect in lane.suspects:
                if suspect.epoch is epoch and any(segment.node == node for segment, _, _ in suspect.parts):
                    return True
        return False

    def _begin_again(self, epoch: Epoch) -> None:
        """Drops everything of an epoch and takes its input once more."""
        board = self.board
        epoch.dead = True
        board.epochs.pop(epoch.id, None)
        self.progress.held.pop(epoch.first, None)
        board.aside -= len(epoch.aside)
        for lane in board.lanes:
            lane.queue.forget(epoch.id)
            kept = [suspect for suspect in lane.suspects if suspect.epoch is not epoch]
            lane.suspects.clear()
            lane.suspects.extend(kept)
            board.dirty[lane.index] = True
            if lane.finished:
                lane.finished = False
            lane.no_more_input = False
        for worker in board.workers.values():
            for message in worker.messages.values():
                if message.epoch is epoch and not message.cancelled:
                    message.cancelled = True
                    board.out.append(Cancel(message.id, worker.id))
        items = epoch.last - epoch.first
        board.note("epoch", f"{items} source items begin again: some of their results were lost", first=epoch.first)
        self.fleet.wants_replan = True
        self.feeder.begin_again(epoch)

    def _lane_finished(self, lane: Lane) -> None:
        """Nothing will come to it any more: everything it has is given back."""
        for worker in list(lane.workers.values()):
            self.fleet.drain(worker, "finished")
        self.fleet.waiting = [start for start in self.fleet.waiting if start.unit != lane.name]
        if any(other.waits_for_seats for other in self.board.lanes):
            self.fleet.wants_replan = True

    # --- input, and the end

    def _arrived(self, event: ItemsArrived) -> None:
        if not self.board.ending and not self.feeder.stopped:
            self.feeder.arrived(event)

    def _repin(self, event: Repin) -> None:
        lane = self.board.lane_of.get(event.unit)
        if lane is not None:
            pinned = event.workers
            # a unit without workers would hold up everything before and after it
            lane.low, lane.high = (
                (lane.work.low, lane.work.high) if pinned is None else (max(1, pinned), max(1, pinned))
            )
            self.fleet.wants_replan = True

    def _drain(self, event: Drain) -> None:
        if self.board.state is RunState.RUNNING:
            self.board.move(RunState.DRAINING)
            self.board.note("run", f"draining ({event.reason}): nothing new is read, what is in hand is finished")
            self._drained = True
            if not self.feeder.stopped:
                self.feeder.leave_unfinished_barrier()
                self.feeder.end()

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
        self.fleet.stop_all(why or "finished", now=verdict is not RunState.FINISHED)

    def _close(self) -> None:
        self.board.move(self._verdict)
        self.board.note("run", self._verdict.value, error=self.board.error)


def _mixed(spools: list[tuple[str, list[Segment]]]) -> list[tuple[str, Segment]]:
    """Several units' inputs, evenly one after another, so that they all have something to do; always the same way."""
    keyed = [
        (position / len(segments), order, position, name, segment)
        for order, (name, segments) in enumerate(spools)
        for position, segment in enumerate(segments)
    ]
    keyed.sort(key=lambda entry: entry[:3])
    return [(name, segment) for _, _, _, name, segment in keyed]
