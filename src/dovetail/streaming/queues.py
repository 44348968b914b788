"""Input queues of a unit, one per epoch, and the batches that can be made of them.

One queue per epoch, because a command never mixes epochs.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from dovetail.control.payload import total_bytes, total_items

if TYPE_CHECKING:
    from dovetail.control.payload import Segment, SegmentSlice


class EpochQueue:
    """What waits of one epoch."""

    __slots__ = ("arrival_times", "arrived_items", "input_complete", "items", "parts", "segment_offsets", "stale_until")

    def __init__(self) -> None:
        self.parts: deque[SegmentSlice] = deque()
        self.arrival_times: deque[float] = deque()
        """When each part came."""
        self.items = 0
        self.input_complete = False
        """Nothing more will come: a batch that is not full may go."""
        self.segment_offsets: dict[int, int] = {}
        """In order: segment -> where its first item stands in all that ever came of the epoch."""
        self.arrived_items = 0
        """Items that ever came, without those that came back."""
        self.stale_until = -math.inf
        """With what came until then: it has waited long enough, and goes although its batch is not full."""

    def record_position(self, part: SegmentSlice) -> None:
        segment, start, stop = part
        self.segment_offsets.setdefault(segment.id, self.arrived_items - start)
        self.arrived_items += stop - start

    def position_of(self, part: SegmentSlice) -> int:
        return self.segment_offsets[part[0].id] + part[1]

    def contiguous_items(self, most: int) -> int:
        """Items at the front that stand side by side, as far as `most` are wanted: a message must not reach over those
        that are elsewhere now."""
        found = 0
        at = self.position_of(self.parts[0]) if self.parts else 0
        for part in self.parts:
            if self.position_of(part) != at + found:
                break
            found += part[2] - part[1]
            if found >= most:
                break
        return found

    @property
    def can_send_partial(self) -> bool:
        """Whether a batch that is not full may go."""
        return self.input_complete or (bool(self.arrival_times) and self.arrival_times[0] <= self.stale_until)


class UnitQueue:
    """What waits in front of one unit. `ready` are the epochs that a message can be made of now."""

    __slots__ = ("batch_size", "by_epoch", "bytes", "in_order", "items", "ready")

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.by_epoch: dict[int, EpochQueue] = {}
        self.ready: dict[int, EpochQueue] = {}
        self.items = 0
        self.bytes = 0
        self.in_order = False
        """What comes back goes to where it was, and not just to the front."""

    def add(self, epoch: int, segment: Segment, now: float) -> None:
        """At the end. The same as `add_part` of the whole, written out because it runs for every message."""
        waiting = self.by_epoch.get(epoch)
        if waiting is None:
            waiting = self.by_epoch[epoch] = EpochQueue()
        waiting.parts.append((segment, 0, segment.items))
        waiting.arrival_times.append(now)
        if self.in_order:
            waiting.record_position((segment, 0, segment.items))
        waiting.items += segment.items
        self.items += segment.items
        self.bytes += segment.size_bytes
        if waiting.items >= self.batch_size or waiting.input_complete:
            self.ready[epoch] = waiting

    def add_part(self, epoch: int, part: SegmentSlice, now: float) -> None:
        """At the end."""
        waiting = self.by_epoch.setdefault(epoch, EpochQueue())
        waiting.parts.append(part)
        waiting.arrival_times.append(now)
        if self.in_order:
            waiting.record_position(part)
        self._count_added(epoch, [part])

    def put_back(self, epoch: int, parts: list[SegmentSlice], now: float) -> None:
        """To the front, as they were; in order, to where they were."""
        waiting = self.by_epoch.setdefault(epoch, EpochQueue())
        waiting.parts.extendleft(reversed(parts))
        # at least as old as what waits: it came before that
        waiting.arrival_times.extendleft([waiting.arrival_times[0] if waiting.arrival_times else now] * len(parts))
        if self.in_order:
            pairs = sorted(
                zip(waiting.parts, waiting.arrival_times, strict=True), key=lambda pair: waiting.position_of(pair[0])
            )
            waiting.parts = deque(part for part, _ in pairs)
            waiting.arrival_times = deque(when for _, when in pairs)
        self._count_added(epoch, parts)

    def _count_added(self, epoch: int, parts: list[SegmentSlice]) -> None:
        """Counts what was put into a queue."""
        waiting = self.by_epoch[epoch]
        items = total_items(parts)
        waiting.items += items
        self.items += items
        self.bytes += total_bytes(parts)
        if waiting.items >= self.batch_size or waiting.input_complete:
            self.ready[epoch] = waiting

    def sendable_items(self, epoch: int, items: int) -> int:
        """How many of so many a message can be made of: in order, only of those that stand side by side."""
        waiting = self.by_epoch[epoch]
        return min(items, waiting.contiguous_items(items)) if self.in_order and len(waiting.parts) > 1 else items

    def take(self, epoch: int, items: int) -> tuple[list[SegmentSlice], int]:
        """The first `items` of an epoch, and their bytes."""
        waiting = self.by_epoch[epoch]
        parts: list[SegmentSlice] = []
        missing = items
        size = 0
        waiting_parts, came = waiting.parts, waiting.arrival_times
        while missing:
            part = waiting_parts.popleft()
            when = came.popleft()
            segment, start, stop = part
            length = stop - start
            if length > missing:
                waiting_parts.appendleft((segment, start + missing, stop))
                came.appendleft(when)
                part = (segment, start, start + missing)
                length = missing
            size += segment.size_bytes if length == segment.items else segment.size_bytes * length // segment.items
            parts.append(part)
            missing -= length
        waiting.items -= items
        self.items -= items
        self.bytes -= size
        if not waiting.items or (waiting.items < self.batch_size and not waiting.can_send_partial):
            self.ready.pop(epoch, None)
        if not self.items:
            self.bytes = 0  # cutting rounds down: nothing waits, so nothing weighs
        return parts, size

    def flush_epoch(self, epoch: int) -> None:
        """Nothing more comes to it of this epoch."""
        waiting = self.by_epoch.get(epoch)
        if waiting is None:
            waiting = self.by_epoch[epoch] = EpochQueue()
        waiting.input_complete = True
        if waiting.items:
            self.ready[epoch] = waiting

    def flush_stale(self, epoch: int) -> None:
        """What waits longest of this epoch has waited long enough."""
        waiting = self.by_epoch[epoch]
        waiting.stale_until = waiting.arrival_times[0]
        self.ready[epoch] = waiting

    def remove_epoch(self, epoch: int) -> list[SegmentSlice]:
        """The epoch is over, or begins anew; what still waits of it is given back."""
        waiting = self.by_epoch.pop(epoch, None)
        self.ready.pop(epoch, None)
        if waiting is None:
            return []
        parts = list(waiting.parts)
        self.items -= waiting.items
        self.bytes = max(0, self.bytes - total_bytes(parts)) if self.items else 0
        return parts

    def resize(self, batch_size: int) -> None:
        """From now on batches of another size; what waits may be enough now, or no longer."""
        self.batch_size = batch_size
        for epoch, waiting in self.by_epoch.items():
            if waiting.items >= batch_size or (waiting.items and waiting.can_send_partial):
                self.ready[epoch] = waiting
            else:
                self.ready.pop(epoch, None)
