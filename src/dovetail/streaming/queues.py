"""Input queues of a unit, one per epoch, and the batches that can be taken from them.

A message contains items of one epoch, as far as they fill batches. What is left at the end of an epoch (its tail, less
than a batch) is sent together with items of other epochs, so that only the end of the input leaves a partial batch.
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
        """No more input will arrive."""
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
    def is_stale(self) -> bool:
        """Whether its oldest items have waited long enough to be sent in an incomplete batch."""
        return bool(self.arrival_times) and self.arrival_times[0] <= self.stale_until


class UnitQueue:
    """Items that wait for one unit. `ready` contains the epochs from which a message can be taken now."""

    __slots__ = (
        "batch_size",
        "by_epoch",
        "bytes",
        "fills_batches",
        "in_order",
        "input_ended",
        "items",
        "ready",
        "tails",
    )

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.by_epoch: dict[int, EpochQueue] = {}
        self.ready: dict[int, EpochQueue] = {}
        self.tails: dict[int, EpochQueue] = {}
        """Epochs that get no more input and have less than a batch left, if batches are filled across epochs."""
        self.fills_batches = False
        """Whether a batch may contain items of several epochs. If not, the last batch of an epoch may be partial."""
        self.input_ended = False
        """No more input of any epoch will arrive: the last batch may be partial."""
        self.items = 0
        self.bytes = 0
        self.in_order = False
        """Items that are put back return to their position, not just to the front."""

    def begin_wave(self, *, in_order: bool, fills_batches: bool) -> None:
        self.in_order = in_order
        self.fills_batches = fills_batches

    def set_input_ended(self, ended: bool) -> None:
        self.input_ended = ended

    def can_send_partial(self, waiting: EpochQueue) -> bool:
        """Whether an incomplete batch of this epoch alone may be sent."""
        return (waiting.input_complete and not self.fills_batches) or waiting.is_stale

    @property
    def has_mixed_batch(self) -> bool:
        """Whether the tails and items of other epochs make a batch."""
        return bool(self.tails) and (self.items >= self.batch_size or self.input_ended)

    def _update(self, epoch: int, waiting: EpochQueue) -> None:
        """Update whether a message can be taken from an epoch, and whether the rest of it is a tail."""
        is_partial = waiting.items < self.batch_size
        if waiting.items and (not is_partial or self.can_send_partial(waiting)):
            self.ready[epoch] = waiting
        else:
            self.ready.pop(epoch, None)
        if self.fills_batches:
            if waiting.items and is_partial and waiting.input_complete:
                self.tails[epoch] = waiting
            else:
                self.tails.pop(epoch, None)

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
        if waiting.input_complete:
            self._update(epoch, waiting)
        elif waiting.items >= self.batch_size:
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
        self._update(epoch, waiting)

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
        if waiting.items < self.batch_size:
            self._update(epoch, waiting)
        if not self.items:
            self.bytes = 0  # sizes of slices are rounded down: without items the sum must be 0
        return parts, size

    def flush_epoch(self, epoch: int) -> None:
        """No more input of this epoch will arrive."""
        waiting = self.by_epoch.get(epoch)
        if waiting is None:
            waiting = self.by_epoch[epoch] = EpochQueue()
        waiting.input_complete = True
        self._update(epoch, waiting)

    def flush_tails(self) -> None:
        """Send all tails in incomplete batches."""
        for epoch in list(self.tails):
            self.flush_stale(epoch)

    def flush_stale(self, epoch: int) -> None:
        """The oldest items of this epoch have waited long enough: send them in an incomplete batch."""
        waiting = self.by_epoch[epoch]
        waiting.stale_until = waiting.arrival_times[-1] if waiting.input_complete else waiting.arrival_times[0]
        self._update(epoch, waiting)

    def remove_epoch(self, epoch: int) -> list[SegmentSlice]:
        """Remove an epoch that is finished or restarts, and return the slices that still waited."""
        waiting = self.by_epoch.pop(epoch, None)
        self.ready.pop(epoch, None)
        self.tails.pop(epoch, None)
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
            self._update(epoch, waiting)
