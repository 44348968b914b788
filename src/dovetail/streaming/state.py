"""State of a running stream: StreamState (clock, timers, workers, open epochs) and one UnitState per unit."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.control.commands import Note
from dovetail.control.lifecycle import RunState, checked_run_move
from dovetail.streaming.queues import UnitQueue
from dovetail.streaming.throughput import ThroughputEstimator
from dovetail.streaming.worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.commands import Command
    from dovetail.resources.shape import Shape
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.settings import StreamOptions, UnitSpec
    from dovetail.streaming.worker_pool import Suspect, Worker


class StreamState:
    """Lanes, open epochs, workers, the clock, and the commands of this step."""

    def __init__(self, lanes: list[UnitState], options: StreamOptions) -> None:
        self.options = options
        self.all_units = lanes
        """Parents before children, of every wave."""
        self.units_by_name = {lane.name: lane for lane in lanes}
        self.units: list[UnitState] = []
        """Those of the wave that runs."""
        self.dirty: list[bool] = []
        """Per lane of the wave: whether it could send something now."""
        self.wave = -1
        self.workers: dict[int, Worker] = {}
        self.epochs: dict[int, Epoch] = {}
        """Those that are open."""
        self.now = 0.0
        self.commands: list[Command] = []
        self.run_state = RunState.RUNNING
        self.is_ending = False
        """Nothing new is sent or started any more. Kept, because it is asked for several times per event."""
        self.error = ""
        self.error_detail = ""
        self.total_items: int | None = None
        """Source items there are, once that is known."""
        self.expected_items: int | None = None
        """About how many there are, if somebody said so."""
        self.held_bytes = 0
        """Of the input and the results of all epochs that are not delivered."""
        self.items_read = self.finished_items = self.items_delivered = self.items_failed = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._last_id = 0

    def next_id(self) -> int:
        """A new one: for timers, epochs, messages and workers alike."""
        self._last_id += 1
        return self._last_id

    def add_note(self, kind: str, text: str, **data: object) -> None:
        self.commands.append(Note(kind, text, data))

    def mark_dirty(self, lane: UnitState) -> None:
        """Something changed at this lane: it, or those who wait for room in front of it, could send something now."""
        if lane.spec.wave == self.wave:
            self.dirty[lane.index] = True
            for parent in lane.parents:
                self.dirty[parent.index] = True

    def release_incoming(self, lane: UnitState, expected_bytes: int) -> None:
        """A message of this lane is over: those who wait because something was on its way may send now."""
        for child in lane.children:
            child.incoming_messages -= 1
            child.incoming_bytes -= expected_bytes
            for parent in child.parents:
                if parent.blocked:
                    self.dirty[parent.index] = True

    def transition_to(self, new: RunState) -> None:
        self.run_state = checked_run_move(self.run_state, new)
        self.is_ending = new not in (RunState.RUNNING, RunState.DRAINING)

    def call_at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time, self.next_id(), action))

    def next_timer_at(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def run_timers(self) -> None:
        """Does whatever was to be done by now."""
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()


BARRIER_BATCH_ITEMS = 1 << 40
"""A barrier's batch: it goes when nothing more comes, and not before."""


class UnitState:
    """The live state of one unit. Modules of this package act on it; it decides nothing itself."""

    def __init__(self, work: UnitSpec) -> None:
        self.spec = work
        self.name = work.name
        self.shape: Shape = work.shape
        """What a worker needs; grows when it turns out that its author asked for too little memory."""
        self.low, self.high = work.low, work.high
        self.index = 0
        """Its place in the wave that runs."""
        self.parents: list[UnitState] = []
        self.children: list[UnitState] = []
        """Of the same wave."""
        self.later_consumers: list[str] = []
        """Units of later waves that get its output."""
        self.is_leaf = False
        self.sorts_input = False
        """Its input of an epoch is put in order before it gets any of it."""
        self.queue = UnitQueue(work.batch_size if not work.barrier else BARRIER_BATCH_ITEMS)
        self.suspects: deque[Suspect] = deque()
        self.pool = WorkerPool(work.slots)
        self.workers: dict[int, Worker] = {}
        """All that are not gone."""
        self.throughput = ThroughputEstimator(work.rate, work.returns, work.slots)
        self._reset_flow()
        self._reset_workers()

    def _reset_flow(self) -> None:
        self.message_items = self.spec.batch_size
        self.next_tuning_messages = 0
        self.max_queued_items = 2 * self.queue.batch_size
        """Items that may wait or be on their way to it."""
        self.guaranteed_queue_bytes = 0
        """Bytes that may wait in any case: what its workers take next."""
        self.incoming_messages = 0
        """Messages that its parents' workers have."""
        self.incoming_bytes = 0
        """What those messages will probably bring."""
        self.output_bytes_per_message = 0
        """What one of its own messages gives, about."""
        self.bytes_per_item = 0.0
        """What one item brings or gives, whichever is more; of late."""
        self.items_in_flight = 0
        self.flush_at: float | None = None
        """When a batch that is not full has waited long enough; None: nobody looks at that."""
        self.blocked = False
        """It has work and workers, and what comes after it has no room."""
        self.finished = False
        self.quarantine_worker: Worker | None = None
        """Gets nothing new, so that a suspect can run alone."""
        self.input_complete = False
        """Everything that will ever come to it is here."""
        self.message_just_ended = False
        self.saturated_ends = self.starved_ends = 0
        """Since the last look: messages after whose end every worker had more to do, and those after which one had not
        (for want of work, or of room after it)."""
        self.batches_since_shrink = 0
        """Batches that passed since they became smaller than asked for."""
        self.batches_before_regrow = 100
        self.waits_for_seats = False
        """There is no room for it now; what comes to it is kept until there is."""
        self.idle_since: float | None = None
        """Since when it has had nothing to do."""

    def _reset_workers(self) -> None:
        self.idle_deaths = 0
        """Deaths that nobody is suspected of, since the last message that came to its end."""
        self.recycling_workers = 0
        """Workers that are being replaced by age."""
        self.setups_failed = 0
        self.setups_done = 0
        self.setup_failures_in_a_row = 0
        self.items_taken = self.items_given = self.batches = self.items_failed = self.retries = 0
        self.busy_s = self.setup_s = 0.0
        self.workers_started = self.workers_stopped = self.workers_lost = 0
        self.stage_totals = [[0, 0, 0.0] for _ in self.spec.stages]
        """Per fused stage: items in, items out, seconds."""
        self.max_node_memory_bytes = 0
        self.shape_before_growth: Shape | None = None
        """What it was before it grew, as long as nobody knows whether that helps."""
        self.shape_changed = False
        """Its workers need more than they were given: replan."""

    def __repr__(self) -> str:
        waiting = f"{self.queue.items}+{sum(s.items for s in self.suspects)} waiting, {self.items_in_flight} in flight"
        return f"<{self.name}: {waiting}, {len(self.workers)} workers, {self.pool.free_count} free>"

    def count_stages(self, counts: list[tuple[int, int, float]]) -> None:
        for total, (taken, given, seconds) in zip(self.stage_totals, counts, strict=False):
            total[0] += taken
            total[1] += given
            total[2] += seconds

    @property
    def batch_size(self) -> int:
        """What its author asked for, or less after it ran out of memory."""
        return self.queue.batch_size

    @property
    def has_work(self) -> bool:
        return bool(self.queue.ready or self.suspects)

    @property
    def is_empty(self) -> bool:
        return not (self.queue.items or self.suspects or self.items_in_flight)

    def can_grow(self, memory_bytes: int) -> bool:
        """Whether there is a node on which a worker with so much memory could sit."""
        return memory_bytes <= self.max_node_memory_bytes

    def grow_memory(self, memory_bytes: int) -> None:
        self.shape_before_growth = self.shape_before_growth or self.shape
        self.shape = replace(self.shape, memory_bytes=memory_bytes)
        self.shape_changed = True
