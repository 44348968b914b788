"""State of a running stream: StreamState (clock, timers, workers, open epochs) and one UnitState per unit.

An attribute is assigned only by methods of its own class; other modules call those methods.
`tests/test_architecture.py` checks this.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.control.commands import Note
from dovetail.control.lifecycle import LEGAL_RUN_MOVES, RunState, WorkerState, checked_move
from dovetail.streaming import flow_control
from dovetail.streaming.failure_streak import UnitFailures
from dovetail.streaming.queues import UnitQueue
from dovetail.streaming.throughput import ThroughputEstimator
from dovetail.streaming.worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dovetail.control.commands import Command
    from dovetail.control.events import RunFailure
    from dovetail.resources.shape import Shape
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.failure_streak import Trial
    from dovetail.streaming.settings import StreamOptions, UnitSpec
    from dovetail.streaming.worker_pool import Message, Suspect, Worker


class StreamState:
    """Units, open epochs, workers, the clock, pending replan requests, and the commands of the current step."""

    __slots__ = (
        "_commands",
        "_last_id",
        "_replan_reasons",
        "_timers",
        "all_units",
        "epochs",
        "expected_items",
        "failure",
        "finished_items",
        "held_bytes",
        "is_ending",
        "items_delivered",
        "items_failed",
        "items_read",
        "now",
        "options",
        "replan_requested",
        "run_state",
        "total_items",
        "units",
        "units_by_name",
        "wave",
        "workers",
    )

    def __init__(self, specs: Sequence[UnitSpec], options: StreamOptions) -> None:
        self.options = options
        self.all_units = [UnitState(spec, options) for spec in specs]
        """Units of all waves, parents before children."""
        self.units_by_name = {unit.name: unit for unit in self.all_units}
        self.units: list[UnitState] = []
        """Units of the current wave, parents before children."""
        self.wave = -1
        self.workers: dict[int, Worker] = {}
        self.epochs: dict[int, Epoch] = {}
        """Open epochs by id."""
        self.now = 0.0
        self.run_state = RunState.RUNNING
        self.is_ending = False
        """No message is sent and no worker is started any more. Cached, because it is read several times per event."""
        self.failure: RunFailure | None = None
        self.total_items: int | None = None
        """Number of source items, once known."""
        self.expected_items: int | None = None
        """Estimated number of source items, if the source reported one."""
        self.held_bytes = 0
        """Bytes of input and results of all epochs that are not delivered."""
        self.items_read = self.finished_items = self.items_delivered = self.items_failed = 0
        self._commands: list[Command] = []
        self.replan_requested = False
        self._replan_reasons: dict[str, None] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._last_id = 0

    # --- the step

    def begin_step(self, now: float) -> None:
        self.now = now

    def take_commands(self) -> list[Command]:
        """Return the commands since the last call, those from between two steps included."""
        commands, self._commands = self._commands, []
        return commands

    def next_id(self) -> int:
        """Return a new id. Timers, epochs, messages and workers share one sequence."""
        self._last_id += 1
        return self._last_id

    def emit(self, command: Command) -> None:
        """Add a command to those that the current step returns."""
        self._commands.append(command)

    def add_note(self, kind: str, text: str, **data: object) -> None:
        self._commands.append(Note(kind, text, data))

    def call_at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time, self.next_id(), action))

    def next_timer_at(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def run_timers(self) -> None:
        """Run every timer that is due."""
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()

    # --- the run

    def transition_to(self, new: RunState) -> None:
        self.run_state = checked_move(LEGAL_RUN_MOVES, self.run_state, new, "run")
        self.is_ending = new not in (RunState.RUNNING, RunState.DRAINING)

    def record_failure(self, failure: RunFailure) -> None:
        self.failure = failure

    @property
    def error(self) -> str:
        """Why the run failed; empty otherwise."""
        return "" if self.failure is None else str(self.failure)

    def request_replan(self, reason: str) -> None:
        """Ask for a replan soon. The reason becomes part of the note about that replan."""
        self._replan_reasons[reason] = None
        self.replan_requested = True

    def take_replan_reasons(self) -> list[str]:
        """Return why a replan was requested since the last one, and clear the request."""
        reasons = list(self._replan_reasons)
        self._replan_reasons.clear()
        self.replan_requested = False
        return reasons

    def begin_wave(self) -> None:
        """Advance to the next wave and connect its units."""
        self.wave += 1
        self.units = [unit for unit in self.all_units if unit.spec.wave == self.wave]
        inside = {unit.name for unit in self.units}
        byte_share = self.options.byte_budget // max(1, len(self.units))
        for index, unit in enumerate(self.units):
            consumers = [other for other in self.all_units if unit.name in other.spec.parents]
            unit.begin_wave(
                index,
                parents=[self.units_by_name[name] for name in unit.spec.parents if name in inside],
                children=[other for other in consumers if other.name in inside],
                later_consumers=[other.name for other in consumers if other.name not in inside],
                needs_order=self._needs_order(unit),
                byte_share=byte_share,
            )

    def _needs_order(self, unit: UnitState) -> bool:
        """Whether this unit or one downstream is called with several items: their order is kept."""
        if not (self.options.ordered or self.options.ordered_batches):
            return False
        consumers = [other for other in self.all_units if unit.name in other.spec.parents]
        return unit.spec.batch_size > 1 or unit.spec.barrier or any(map(self._needs_order, consumers))

    def set_max_node_memory(self, memory_bytes: int) -> None:
        for unit in self.all_units:
            unit.max_node_memory_bytes = memory_bytes

    # --- workers and epochs

    def add_worker(self, worker: Worker) -> None:
        self.workers[worker.id] = worker
        self.units_by_name[worker.unit].add_worker(worker)

    def remove_worker(self, worker: Worker) -> None:
        del self.workers[worker.id]
        self.units_by_name[worker.unit].remove_worker(worker)

    def add_epoch(self, epoch: Epoch) -> None:
        self.epochs[epoch.id] = epoch

    def remove_epoch(self, epoch: Epoch) -> bool:
        """Whether the epoch was open."""
        return self.epochs.pop(epoch.id, None) is not None

    # --- counters

    def add_held_bytes(self, size: int) -> None:
        """Account for bytes that are held from now on; negative: for bytes that were released."""
        self.held_bytes += size

    def set_total_items(self, items: int) -> None:
        self.total_items = items

    def set_expected_items(self, items: int) -> None:
        self.expected_items = items

    def resume_at(self, finished_items: int) -> None:
        """Count source items that an earlier run finished as read and finished."""
        self.items_read = self.finished_items = finished_items

    def count_read(self, items: int) -> None:
        self.items_read += items

    def count_finished(self, items: int) -> None:
        self.finished_items += items

    def count_delivered(self, items: int) -> None:
        self.items_delivered += items

    def count_failed(self, items: int) -> None:
        """Add failed items; a negative number when their epoch restarts and they are tried again."""
        self.items_failed += items


BARRIER_BATCH_ITEMS = 1 << 40
"""Batch size of a barrier: its batch is sent when its input is complete, and not before."""
MIN_SAME_COUNT_CALLS = 16
"""Calls in succession, from the first one, that return as many items as they get before a unit is taken to return one
result per item, in their order."""


class UnitState:
    """State of one unit: its links in the current wave, queue, workers, flow control and counters."""

    __slots__ = (
        "batches",
        "batches_before_regrow",
        "batches_since_shrink",
        "blocked",
        "busy_s",
        "byte_share",
        "bytes_per_item",
        "changes_counts",
        "children",
        "dirty",
        "failures",
        "finished",
        "flush_at",
        "guaranteed_queue_bytes",
        "high",
        "idle_deaths",
        "idle_since",
        "incoming_bytes",
        "incoming_messages",
        "index",
        "input_complete",
        "is_leaf",
        "items_failed",
        "items_given",
        "items_in_flight",
        "items_taken",
        "later_consumers",
        "low",
        "max_node_memory_bytes",
        "max_queued_items",
        "message_items",
        "message_just_ended",
        "name",
        "next_tuning_messages",
        "options",
        "output_bytes_per_message",
        "parents",
        "pool",
        "quarantine_worker",
        "queue",
        "recycling_workers",
        "retries",
        "same_count_calls",
        "saturated_ends",
        "setup_failures_in_a_row",
        "setup_s",
        "setups_done",
        "setups_failed",
        "shape",
        "shape_before_growth",
        "shape_changed",
        "sorts_input",
        "spec",
        "stage_totals",
        "starved_ends",
        "suspects",
        "throughput",
        "waits_for_seats",
        "workers",
        "workers_lost",
        "workers_started",
        "workers_stopped",
    )

    def __init__(self, spec: UnitSpec, options: StreamOptions) -> None:
        self.spec = spec
        self.name = spec.name
        self.options = options
        self.shape: Shape = spec.plan.shape
        """Resources per worker; grows when workers run out of memory."""
        self.low, self.high = spec.plan.low, spec.plan.high
        """Range of worker counts; differs from the spec while the count is pinned."""
        self.queue = UnitQueue(spec.batch_size if not spec.barrier else BARRIER_BATCH_ITEMS)
        self.suspects: deque[Suspect] = deque()
        self.failures = UnitFailures()
        self.pool = WorkerPool(spec.slots)
        self.workers: dict[int, Worker] = {}
        """All workers that are not stopped or lost."""
        self.throughput = ThroughputEstimator(spec.rate, spec.returns, spec.slots)
        self._init_links()
        self._init_flow()
        self._init_counters()

    def _init_links(self) -> None:
        self.index = 0
        """Position in the current wave."""
        self.parents: list[UnitState] = []
        self.children: list[UnitState] = []
        """Parents and children in the same wave."""
        self.later_consumers: list[str] = []
        """Units of later waves that get its output."""
        self.is_leaf = False
        self.sorts_input = False
        """The input of an epoch is sorted before the unit gets any of it."""
        self.input_complete = False
        """No further input will arrive."""
        self.finished = False
        self.waits_for_seats = False
        """There are no seats for its workers at present; its input is kept until there are."""

    def _init_flow(self) -> None:
        self.dirty = True
        """The unit may be able to send a message: dispatch looks at it in this step."""
        self.blocked = False
        """It has input and free workers, and a queue downstream is full."""
        self.message_items = self.spec.batch_size
        self.next_tuning_messages = 0
        self.byte_share = 0
        """Its share of the byte budget for queues."""
        self.max_queued_items = 2 * self.queue.batch_size
        self.guaranteed_queue_bytes = 0
        """Bytes that may be queued in any case: the next messages of its workers."""
        self.incoming_messages = 0
        """Messages at the parents' workers."""
        self.incoming_bytes = 0
        """Expected output of those messages."""
        self.output_bytes_per_message = 0
        """Moving average."""
        self.bytes_per_item = 0.0
        """Moving average of input or output, whichever is larger."""
        self.items_in_flight = 0
        self.flush_at: float | None = None
        """Time of the pending flush timer for incomplete batches; None: no timer."""
        self.changes_counts = self.spec.returns not in (None, 1.0)
        """Whether calls return more or fewer items than they get."""
        self.same_count_calls = 0
        """Calls so far that returned as many items as they got."""
        self.quarantine_worker: Worker | None = None
        """Gets no further messages, so that a suspect can run on it alone."""
        self.message_just_ended = False
        self.saturated_ends = self.starved_ends = 0
        """Messages since the last replan after whose end every worker had more to do, or at least one had not."""
        self.batches_since_shrink = 0
        """Batches that succeeded since the batch size was reduced."""
        self.batches_before_regrow = flow_control.FIRST_BATCHES_BEFORE_REGROW
        self.idle_since: float | None = None

    def _init_counters(self) -> None:
        self.idle_deaths = 0
        """Consecutive worker deaths without a suspect, since the last message that finished."""
        self.recycling_workers = 0
        """Workers that are being replaced because of their age."""
        self.setups_failed = self.setups_done = self.setup_failures_in_a_row = 0
        self.items_taken = self.items_given = self.batches = self.items_failed = self.retries = 0
        self.busy_s = self.setup_s = 0.0
        self.workers_started = self.workers_stopped = self.workers_lost = 0
        self.stage_totals = [[0, 0, 0.0] for _ in self.spec.stages]
        """Items in, items out and seconds of each fused stage."""
        self.max_node_memory_bytes = 0
        self.shape_before_growth: Shape | None = None
        """Shape before it grew, until it is known whether the growth helps."""
        self.shape_changed = False
        """The shape changed since the last replan."""

    def __repr__(self) -> str:
        waiting = f"{self.queue.items}+{sum(s.items for s in self.suspects)} waiting, {self.items_in_flight} in flight"
        return f"<{self.name}: {waiting}, {len(self.workers)} workers, {self.pool.free_count} free>"

    @property
    def batch_size(self) -> int:
        """The configured batch size, or less after the unit ran out of memory."""
        return self.queue.batch_size

    @property
    def is_empty(self) -> bool:
        return not (self.queue.items or self.suspects or self.items_in_flight or self.failures.holds_items)

    # --- waves and completion

    def begin_wave(
        self,
        index: int,
        parents: list[UnitState],
        children: list[UnitState],
        later_consumers: list[str],
        *,
        needs_order: bool,
        byte_share: int,
    ) -> None:
        self.index = index
        self.parents = parents
        self.children = children
        self.later_consumers = later_consumers
        self.is_leaf = not (children or later_consumers)
        self.sorts_input = bool(parents) and needs_order
        ends_with_epoch = needs_order or self.spec.partial_in_epoch
        fills_batches = not (ends_with_epoch or self.spec.barrier or self.options.serving)
        self.queue.begin_wave(in_order=needs_order and not self.spec.barrier, fills_batches=fills_batches)
        self.byte_share = byte_share
        self.dirty = True

    def mark_input_complete(self) -> None:
        self.input_complete = self.dirty = True
        self.queue.set_input_ended(True)

    def mark_finished(self) -> None:
        self.finished = True

    def reopen(self) -> None:
        """Expect input again: an epoch restarts."""
        self.finished = self.input_complete = False
        self.queue.set_input_ended(False)
        self.dirty = True

    def set_waits_for_seats(self, waits: bool) -> None:
        self.waits_for_seats = waits

    def pin_workers(self, workers: int | None) -> None:
        """Fix the number of workers; None: use the configured range again."""
        plan = self.spec.plan
        self.low, self.high = (plan.low, plan.high) if workers is None else (workers, workers)

    # --- dispatch

    def mark_dirty(self) -> None:
        self.dirty = True

    def mark_dirty_with_parents(self) -> None:
        """Something changed here: this unit, or parents that wait for space in its queue, may be able to send."""
        self.dirty = True
        for parent in self.parents:
            parent.dirty = True

    def begin_dispatch(self) -> None:
        self.dirty = self.blocked = False

    def mark_blocked(self) -> None:
        self.blocked = True

    def end_dispatch(self, *, sent: bool) -> None:
        """After dispatch: if a message has ended, record whether a worker is left without work; if messages were sent,
        parents that wait for space may send."""
        if self.message_just_ended:
            self.message_just_ended = False
            if self.pool.by_load[0]:
                self.starved_ends += 1
            else:
                self.saturated_ends += 1
        if sent:
            for parent in self.parents:
                if parent.blocked:
                    parent.dirty = True

    def reset_message_ends(self) -> None:
        self.saturated_ends = self.starved_ends = 0

    def set_flush_timer(self, at: float) -> None:
        self.flush_at = at

    def on_flush_due(self) -> None:
        self.flush_at = None
        self.mark_dirty_with_parents()

    def send(self, worker: Worker, message: Message) -> None:
        """Account for a message that is sent to a worker. A suspect gets the worker for itself."""
        self.pool.assign(worker, message)
        self.items_in_flight += message.items
        for child in self.children:
            child.incoming_messages += 1
            child.incoming_bytes += message.expected_bytes

    def take_back(self, worker: Worker, message: Message) -> None:
        """Account for a message that its worker finished or returned."""
        if self.pool.release(worker, message) and self.quarantine_worker is worker:
            self.quarantine_worker = None
        self.message_just_ended = self.dirty = True
        self.end_flight(message)
        for parent in self.parents:
            if parent.blocked:
                parent.dirty = True

    def end_flight(self, message: Message) -> None:
        """A message is no longer at a worker: parents of its consumers that wait for space may send."""
        self.items_in_flight -= message.items
        for child in self.children:
            child.incoming_messages -= 1
            child.incoming_bytes -= message.expected_bytes
            for parent in child.parents:
                if parent.blocked:
                    parent.dirty = True

    def quarantine(self, worker: Worker) -> None:
        """Send nothing further to a worker, so that a suspect can run on it alone."""
        self.pool.remove(worker)
        worker.make_exclusive()
        self.quarantine_worker = worker

    def add_suspects(self, suspects: Iterable[Suspect]) -> None:
        self.suspects.extend(suspects)
        self.dirty = True

    def take_suspect(self) -> Suspect:
        return self.suspects.popleft()

    def rotate_suspects(self) -> None:
        self.suspects.rotate(-1)

    def flush_tails(self) -> None:
        self.queue.flush_tails()
        self.dirty = True

    def drop_epoch(self, epoch: Epoch) -> None:
        """Drop everything of an epoch that waits here."""
        self.queue.remove_epoch(epoch.id)
        self.suspects = deque(suspect for suspect in self.suspects if suspect.epoch is not epoch)
        self.failures.drop_epoch(epoch)

    # --- broken workers

    def begin_trial(self, trial: Trial) -> None:
        self.failures.begin_trial(trial)
        self.add_suspects(trial.open)

    def end_trial(self) -> list[Suspect]:
        """End the trial without a result, and return its items that are not at a worker."""
        trial = self.failures.trial
        self.failures.end_trial()
        if trial is None:
            return []
        queued = [suspect for suspect in self.suspects if suspect.trial is trial]
        self.suspects = deque(suspect for suspect in self.suspects if suspect.trial is not trial)
        return [replace(suspect, trial=None) for suspect in (*trial.take_waiting(), *queued)]

    def pause(self, worker: Worker) -> None:
        """Send nothing further to a worker until it is known whether it is broken."""
        if not worker.paused:
            self.pool.remove(worker)
            worker.pause()

    def resume(self, worker: Worker) -> None:
        if worker.paused:
            worker.resume()
            if worker.state is WorkerState.READY and not worker.exclusive:
                self.pool.add(worker)
            self.mark_dirty_with_parents()

    def is_sound(self, worker: Worker) -> bool:
        """Whether a worker can show what is wrong with items: its last call passed, or it has had none."""
        return worker.state is WorkerState.READY and not worker.paused and worker.id not in self.failures.streaks

    def has_sound_worker(self) -> bool:
        """Whether a worker can show what is wrong with items, now or when it has started."""
        return any(
            self.is_sound(worker) or worker.will_be_replaced or worker.state is WorkerState.STARTING
            for worker in self.workers.values()
        )

    def waits_for_sound_worker(self, suspect: Suspect) -> bool:
        """Whether items that need a sound worker wait for one, instead of running on any worker."""
        return self.has_sound_worker() or (suspect.trial is not None and not self.failures.replaced_enough)

    def waiting_suspects(self) -> Iterator[Suspect]:
        """All failed items that are not at a worker."""
        yield from self.suspects
        yield from self.failures.waiting()

    # --- flow control

    def has_space(self) -> bool:
        """Whether a parent may send one more message whose output will be queued here."""
        if self.waits_for_seats:
            return True
        queue = self.queue
        limit = flow_control.queue_limit_bytes(self.byte_share, self.guaranteed_queue_bytes)
        if queue.items < self.max_queued_items and queue.bytes + self.incoming_bytes < limit:
            return True
        # If nothing happens here, more input must arrive: the queue may hold the ends of several epochs, which make no
        # batch, or a single batch may be larger than the byte limit.
        return not (self.can_proceed or self.incoming_messages)

    @property
    def can_proceed(self) -> bool:
        """Whether the unit has work or something to begin with, without more input."""
        queue = self.queue
        return bool(queue.ready or queue.has_mixed_batch or self.suspects or self.items_in_flight)

    def has_space_downstream(self) -> bool:
        """Whether every child has space for the output of one more message."""
        for child in self.children:  # noqa: SIM110 - a loop costs half of what all() does, and this runs per message
            if not child.has_space():
                return False
        return True

    @property
    def total_slots(self) -> int:
        """Calls that all its workers run at the same time; of one worker if there is none yet."""
        return max(1, len(self.workers)) * self.spec.slots

    @property
    def preferred_queue_items(self) -> float:
        """Items that wait when every slot of its workers has some messages in store."""
        slots = max(1, len(self.workers)) * self.pool.max_messages
        return flow_control.preferred_queue_items(self.options, slots, self.message_items)

    def update_queue_limit(self) -> None:
        """Set the limits of the queue (`flow_control`)."""
        slots = max(1, len(self.workers)) * self.pool.max_messages
        before = self.max_queued_items
        produced = sum(
            max(1, len(parent.workers)) * parent.pool.max_messages * parent.message_items * parent.throughput.returns
            for parent in self.parents
        )
        preferred = self.preferred_queue_items
        self.max_queued_items = flow_control.queue_limit_items(self.batch_size, preferred, slots, produced)
        self.guaranteed_queue_bytes = flow_control.guaranteed_queue_bytes(
            slots, self.message_items, self.bytes_per_item
        )
        if self.max_queued_items > before:
            self.mark_dirty_with_parents()

    def tune_messages_and_schedule(self) -> None:
        """Adjust the message size, and set when to do so next."""
        self.next_tuning_messages = flow_control.messages_until_tuning(self.next_tuning_messages)
        self.tune_messages()

    def tune_messages(self) -> None:
        """Set the message size, and whether workers get a message in advance, from the measured throughput."""
        seconds = self.throughput.seconds_per_item
        if seconds is None or self.spec.barrier:
            return
        spec, options = self.spec, self.options
        self.message_items = flow_control.message_items(spec, options, self.batch_size, seconds, self.bytes_per_item)
        prefetch = flow_control.gets_message_ahead(spec, options, seconds * self.message_items)
        depth = spec.slots + prefetch
        if depth != self.pool.max_messages:
            self.pool.set_max_messages(depth)
            self.dirty = True
        self.update_queue_limit()

    def resize_batch(self, batch_size: int) -> None:
        self.batches_since_shrink = 0
        self.queue.resize(batch_size)
        self.message_items = batch_size
        self.tune_messages()

    def delay_regrow(self) -> None:
        """Wait twice as long before a larger batch is tried again."""
        self.batches_before_regrow *= 2

    # --- results

    def count_batches(self, batches: int, seconds: float) -> None:
        """Count the calls of a message that finished."""
        self.batches += batches
        self.busy_s += seconds
        self.idle_deaths = 0

    def count_small_batches(self, batches: int) -> bool:
        """Count batches below the configured size that succeeded; True: a larger size should be tried again."""
        self.batches_since_shrink += batches
        return self.batches_since_shrink >= self.batches_before_regrow

    def record_output(self, items: int, input_bytes: int, output_bytes: int | None, taken: int, given: int) -> None:
        """Count the items of a message that finished, and update the moving averages of bytes; `output_bytes` is None
        for a message without output."""
        self.items_taken += taken
        self.items_given += given
        size = input_bytes
        if output_bytes is not None:
            known = self.output_bytes_per_message
            self.output_bytes_per_message = output_bytes if not known else (3 * known + output_bytes) // 4
            size = max(size, output_bytes)
        per_item = size / items
        self.bytes_per_item = (3 * self.bytes_per_item + per_item) / 4 if self.bytes_per_item else per_item

    def count_stages(self, counts: list[tuple[int, int, float]]) -> None:
        for total, (taken, given, seconds) in zip(self.stage_totals, counts, strict=False):
            total[0] += taken
            total[1] += given
            total[2] += seconds

    @property
    def joins_epochs(self) -> bool:
        """Whether the results of a batch with items of several epochs cannot be separated. A batch whose results are
        as many as its items proves nothing alone: one item may have returned two results, and another one none."""
        return self.changes_counts or self.same_count_calls < MIN_SAME_COUNT_CALLS

    def record_counts(self, calls: int, *, same: bool) -> None:
        """Add calls: whether each returned as many items as it got."""
        if same:
            self.same_count_calls += calls
        else:
            self.changes_counts = True

    def count_failed(self, items: int) -> None:
        """Add failed items; a negative number when their epoch restarts."""
        self.items_failed += items

    def count_taken(self, items: int) -> None:
        """Count items that failed some time after their message."""
        self.items_taken += items

    def count_retry(self) -> None:
        self.retries += 1

    # --- memory

    def can_grow(self, memory_bytes: int) -> bool:
        """Whether some node could seat a worker with this much memory."""
        return memory_bytes <= self.max_node_memory_bytes

    def grow_memory(self, memory_bytes: int) -> None:
        self.shape_before_growth = self.shape_before_growth or self.shape
        self.shape = replace(self.shape, memory_bytes=memory_bytes)
        self.shape_changed = True

    def confirm_growth(self) -> None:
        """The larger shape helped: keep it."""
        self.shape_before_growth = None

    def undo_growth(self) -> Shape | None:
        """Return to the shape before it grew; None: it did not grow, or the growth was confirmed."""
        before = self.shape_before_growth
        if before is not None:
            self.shape, self.shape_before_growth = before, None
            self.shape_changed = True
        return before

    def acknowledge_shape(self) -> None:
        """A replan has seen the current shape."""
        self.shape_changed = False

    # --- workers

    def add_worker(self, worker: Worker) -> None:
        self.workers[worker.id] = worker
        self.workers_started += 1
        self.update_queue_limit()

    def remove_worker(self, worker: Worker) -> None:
        del self.workers[worker.id]
        if self.quarantine_worker is worker:
            self.quarantine_worker = None

    def count_worker_stopped(self) -> None:
        self.workers_stopped += 1

    def count_worker_lost(self) -> None:
        self.workers_lost += 1

    def count_setup_done(self) -> None:
        self.setups_done += 1
        self.setup_failures_in_a_row = 0

    def count_setup_failed(self) -> None:
        self.setups_failed += 1
        self.setup_failures_in_a_row += 1

    def add_setup_time(self, seconds: float) -> None:
        self.throughput.add_setup(seconds)
        self.setup_s += seconds

    def count_idle_death(self) -> None:
        self.idle_deaths += 1

    def reset_idle_deaths(self) -> None:
        self.idle_deaths = 0

    def begin_recycling(self, worker: Worker) -> None:
        self.recycling_workers += 1
        worker.begin_recycling()

    def end_recycling(self, worker: Worker) -> None:
        """The worker, or the one that replaced it, is ready or gone."""
        if worker.recycling:
            worker.end_recycling()
            self.recycling_workers -= 1

    def update_idle_s(self, now: float) -> float:
        """Return for how many seconds the unit has had nothing to do, as seen by successive calls."""
        if not self.is_empty:
            self.idle_since = None
            return 0.0
        self.idle_since = now if self.idle_since is None else self.idle_since
        return now - self.idle_since
