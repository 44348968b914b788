"""A unit at work: what waits for it, who works for it, how fast, and what it did so far."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.streaming.queues import Queue
from dovetail.streaming.speeds import Speeds
from dovetail.streaming.workers import Pool

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape
    from dovetail.streaming.messages import Suspect
    from dovetail.streaming.work import Work
    from dovetail.streaming.workers import Worker


EVERYTHING = 1 << 40
"""A barrier's batch: it goes when nothing more comes, and not before."""


class Lane:
    """The live state of one unit. Modules of this package act on it; it decides nothing itself."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.name = work.name
        self.shape: Shape = work.shape
        """What a worker needs; grows when it turns out that its author asked for too little memory."""
        self.low, self.high = work.low, work.high
        self.index = 0
        """Its place in the wave that runs."""
        self.parents: list[Lane] = []
        self.children: list[Lane] = []
        """Of the same wave."""
        self.spools: list[str] = []
        """Units of later waves that get its output."""
        self.is_leaf = False
        self.sorts = False
        """Its input of an epoch is put in order before it gets any of it."""
        self.queue = Queue(work.batch_size if not work.barrier else EVERYTHING)
        self.suspects: deque[Suspect] = deque()
        self.pool = Pool(work.slots)
        self.workers: dict[int, Worker] = {}
        """All that are not gone."""
        self.speeds = Speeds(work.rate, work.returns, work.slots)
        self._nothing_on_its_way()
        self._nobody_there()

    def _nothing_on_its_way(self) -> None:
        self.message_items = self.work.batch_size
        self.tuned_at = 0
        self.cap = 2 * self.queue.batch_size
        """Items that may wait or be on their way to it."""
        self.cap_bytes = 0
        """Bytes that may wait in any case: what its workers take next."""
        self.incoming = 0
        """Messages that its parents' workers have."""
        self.coming_bytes = 0
        """What those messages will probably bring."""
        self.out_bytes = 0
        """What one of its own messages gives, about."""
        self.item_bytes = 0.0
        """What one item brings or gives, whichever is more; of late."""
        self.in_flight = 0
        self.hurries_at: float | None = None
        """When a batch that is not full has waited long enough; None: nobody looks at that."""
        self.blocked = False
        """It has work and workers, and what comes after it has no room."""
        self.finished = False
        self.reserved: Worker | None = None
        """Gets nothing new, so that a suspect can run alone."""
        self.no_more_input = False
        """Everything that will ever come to it is here."""
        self.just_ended = False
        self.went_on = self.ran_dry = 0
        """Since the last look: messages after whose end every worker had more to do, and those after which one had not
        (for want of work, or of room after it)."""
        self.passes = 0
        """Batches that passed since they became smaller than asked for."""
        self.passes_needed = 100
        self.waits_for_seats = False
        """There is no room for it now; what comes to it is kept until there is."""
        self.idle_since: float | None = None
        """Since when it has had nothing to do."""

    def _nobody_there(self) -> None:
        self.crashes = 0
        """Deaths that nobody is suspected of, since the last message that came to its end."""
        self.recycling = 0
        """Workers that are being replaced by age."""
        self.setups_failed = 0
        self.setups_done = 0
        self.failed_in_a_row = 0
        self.taken = self.given = self.batches = self.aside = self.retries = 0
        self.busy_s = self.setup_s = 0.0
        self.started = self.stopped = self.lost = 0
        self.stages = [[0, 0, 0.0] for _ in self.work.stages]
        """Per fused stage: items in, items out, seconds."""
        self.largest_memory = 0
        self.shape_before: Shape | None = None
        """What it was before it grew, as long as nobody knows whether that helps."""
        self.grown = False
        """Its workers need more than they were given: replan."""

    def __repr__(self) -> str:
        waiting = f"{self.queue.items}+{sum(s.items for s in self.suspects)} waiting, {self.in_flight} in flight"
        return f"<{self.name}: {waiting}, {len(self.workers)} workers, {self.pool.free} free>"

    def count_stages(self, counts: list[tuple[int, int, float]]) -> None:
        for total, (taken, given, seconds) in zip(self.stages, counts, strict=False):
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
    def empty(self) -> bool:
        return not (self.queue.items or self.suspects or self.in_flight)

    def may_grow(self, memory_bytes: int) -> bool:
        """Whether there is a node on which a worker with so much memory could sit."""
        return memory_bytes <= self.largest_memory

    def grow(self, memory_bytes: int) -> None:
        self.shape_before = self.shape_before or self.shape
        self.shape = replace(self.shape, memory_bytes=memory_bytes)
        self.grown = True
