"""Input queues of a unit, one per epoch, and the batches that can be taken from them.

There is one queue per epoch, because a command never mixes epochs.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from dovetail.control.payload import total_bytes, total_items

if TYPE_CHECKING:
    from dovetail.control.payload import Segment, SegmentSlice


class EpochQueue:
    """Items of one epoch that wait for a unit."""

    __slots__ = ("arrival_times", "arrived_items", "input_complete", "items", "parts", "segment_offsets", "stale_until")

    def __init__(self) -> None:
        self.parts: deque[SegmentSlice] = deque()
        self.arrival_times: deque[float] = deque()
        """Arrival time of each slice."""
        self.items = 0
        self.input_complete = False
        """No more input will arrive: an incomplete batch may be sent."""
        self.segment_offsets: dict[int, int] = {}
        """If order is kept: segment -> position of its first item among all items of the epoch that arrived."""
        self.arrived_items = 0
        """Items that arrived, without those that were put back."""
        self.stale_until = -math.inf
        """Items that arrived until this time have waited long enough and are sent in an incomplete batch."""

    def record_position(self, part: SegmentSlice) -> None:
        segment, start, stop = part
        self.segment_offsets.setdefault(segment.id, self.arrived_items - start)
        self.arrived_items += stop - start

    def position_of(self, part: SegmentSlice) -> int:
        return self.segment_offsets[part[0].id] + part[1]

    def contiguous_items(self, most: int) -> int:
        """Number of consecutive items at the front, up to `most`: a message must not skip items that are elsewhere at
        present."""
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
        """Whether an incomplete batch may be sent."""
        return self.input_complete or (bool(self.arrival_times) and self.arrival_times[0] <= self.stale_until)


class UnitQueue:
    """Items that wait for one unit. `ready` contains the epochs from which a message can be taken now."""

    __slots__ = ("batch_size", "by_epoch", "bytes", "in_order", "items", "ready")

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.by_epoch: dict[int, EpochQueue] = {}
        self.ready: dict[int, EpochQueue] = {}
        self.items = 0
        self.bytes = 0
        self.in_order = False
        """Items that are put back return to their position, not just to the front."""

    def keep_order(self, in_order: bool) -> None:
        self.in_order = in_order

    def add(self, epoch: int, segment: Segment, now: float) -> None:
        """Append a segment. Same as `add_part` for the whole segment, inlined because it runs for every message."""
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
        """Append a slice."""
        waiting = self.by_epoch.setdefault(epoch, EpochQueue())
        waiting.parts.append(part)
        waiting.arrival_times.append(now)
        if self.in_order:
            waiting.record_position(part)
        self._count_added(epoch, [part])

    def put_back(self, epoch: int, parts: list[SegmentSlice], now: float) -> None:
        """Insert slices at the front, or at their original position if order is kept."""
        waiting = self.by_epoch.setdefault(epoch, EpochQueue())
        waiting.parts.extendleft(reversed(parts))
        # at least as old as the waiting items, because they arrived before them
        waiting.arrival_times.extendleft([waiting.arrival_times[0] if waiting.arrival_times else now] * len(parts))
        if self.in_order:
            pairs = sorted(
                zip(waiting.parts, waiting.arrival_times, strict=True), key=lambda pair: waiting.position_of(pair[0])
            )
            waiting.parts = deque(part for part, _ in pairs)
            waiting.arrival_times = deque(when for _, when in pairs)
        self._count_added(epoch, parts)

    def _count_added(self, epoch: int, parts: list[SegmentSlice]) -> None:
        """Update the counters for slices that were added."""
        waiting = self.by_epoch[epoch]
        items = total_items(parts)
        waiting.items += items
        self.items += items
        self.bytes += total_bytes(parts)
        if waiting.items >= self.batch_size or waiting.input_complete:
            self.ready[epoch] = waiting

    def sendable_items(self, epoch: int, items: int) -> int:
        """How many of `items` one message can contain: if order is kept, only consecutive ones."""
        waiting = self.by_epoch[epoch]
        return min(items, waiting.contiguous_items(items)) if self.in_order and len(waiting.parts) > 1 else items

    def take(self, epoch: int, items: int) -> tuple[list[SegmentSlice], int]:
        """Remove and return the first `items` items of an epoch, and their bytes."""
        waiting = self.by_epoch[epoch]
        parts: list[SegmentSlice] = []
        missing = items
        size = 0
        waiting_parts, arrival_times = waiting.parts, waiting.arrival_times
        while missing:
            part = waiting_parts.popleft()
            when = arrival_times.popleft()
            segment, start, stop = part
            length = stop - start
            if length > missing:
                waiting_parts.appendleft((segment, start + missing, stop))
                arrival_times.appendleft(when)
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
            self.bytes = 0  # sizes of slices are rounded down: without items the sum must be 0
        return parts, size

    def flush_epoch(self, epoch: int) -> None:
        """No more input of this epoch will arrive."""
        waiting = self.by_epoch.get(epoch)
        if waiting is None:
            waiting = self.by_epoch[epoch] = EpochQueue()
        waiting.input_complete = True
        if waiting.items:
            self.ready[epoch] = waiting

    def flush_stale(self, epoch: int) -> None:
        """The oldest items of this epoch have waited long enough: send them in an incomplete batch."""
        waiting = self.by_epoch[epoch]
        waiting.stale_until = waiting.arrival_times[0]
        self.ready[epoch] = waiting

    def remove_epoch(self, epoch: int) -> list[SegmentSlice]:
        """Remove an epoch that is finished or restarts, and return the slices that still waited."""
        waiting = self.by_epoch.pop(epoch, None)
        self.ready.pop(epoch, None)
        if waiting is None:
            return []
        parts = list(waiting.parts)
        self.items -= waiting.items
        self.bytes = max(0, self.bytes - total_bytes(parts)) if self.items else 0
        return parts

    def resize(self, batch_size: int) -> None:
        """Change the batch size, and update which epochs have a full batch."""
        self.batch_size = batch_size
        for epoch, waiting in self.by_epoch.items():
            if waiting.items >= batch_size or (waiting.items and waiting.can_send_partial):
                self.ready[epoch] = waiting
            else:
                self.ready.pop(epoch, None)
