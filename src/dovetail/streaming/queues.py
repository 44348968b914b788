"""What waits in front of a unit, and can a full batch be made of it?

One queue per epoch, because a command never mixes epochs.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from dovetail.control.segments import bytes_in, items_in

if TYPE_CHECKING:
    from dovetail.control.segments import Part, Segment


class EpochQueue:
    """What waits of one epoch."""

    __slots__ = ("base", "came", "flush", "hurry", "items", "length", "parts")

    def __init__(self) -> None:
        self.parts: deque[Part] = deque()
        self.came: deque[float] = deque()
        """When each part came."""
        self.items = 0
        self.flush = False
        """Nothing more will come: a batch that is not full may go."""
        self.base: dict[int, int] = {}
        """In order: segment -> where its first item stands in all that ever came of the epoch."""
        self.length = 0
        """Items that ever came, without those that came back."""
        self.hurry = -math.inf
        """With what came until then: it has waited long enough, and goes although its batch is not full."""

    def came_in_order(self, part: Part) -> None:
        segment, start, stop = part
        self.base.setdefault(segment.id, self.length - start)
        self.length += stop - start

    def place(self, part: Part) -> int:
        return self.base[part[0].id] + part[1]

    def neighbours(self, most: int) -> int:
        """Items at the front that stand side by side, as far as `most` are wanted: a message must not reach over those
        that are elsewhere now."""
        found = 0
        at = self.place(self.parts[0]) if self.parts else 0
        for part in self.parts:
            if self.place(part) != at + found:
                break
            found += part[2] - part[1]
            if found >= most:
                break
        return found

    @property
    def partial(self) -> bool:
        """Whether a batch that is not full may go."""
        return self.flush or (bool(self.came) and self.came[0] <= self.hurry)


class Queue:
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
        waiting.came.append(now)
        if self.in_order:
            waiting.came_in_order((segment, 0, segment.items))
        waiting.items += segment.items
        self.items += segment.items
        self.bytes += segment.size_bytes
        if waiting.items >= self.batch_size or waiting.flush:
            self.ready[epoch] = waiting

    def add_part(self, epoch: int, part: Part, now: float) -> None:
        """At the end."""
        waiting = self.by_epoch.setdefault(epoch, EpochQueue())
        waiting.parts.append(part)
        waiting.came.append(now)
        if self.in_order:
            waiting.came_in_order(part)
        self._came(epoch, [part])

    def put_back(self, epoch: int, parts: list[Part], now: float) -> None:
        """To the front, as they were; in order, to where they were."""
        waiting = self.by_epoch.setdefault(epoch, EpochQueue())
        waiting.parts.extendleft(reversed(parts))
        # at least as old as what waits: it came before that
        waiting.came.extendleft([waiting.came[0] if waiting.came else now] * len(parts))
        if self.in_order:
            pairs = sorted(zip(waiting.parts, waiting.came, strict=True), key=lambda pair: waiting.place(pair[0]))
            waiting.parts = deque(part for part, _ in pairs)
            waiting.came = deque(when for _, when in pairs)
        self._came(epoch, parts)

    def _came(self, epoch: int, parts: list[Part]) -> None:
        """Counts what was put into a queue."""
        waiting = self.by_epoch[epoch]
        items = items_in(parts)
        waiting.items += items
        self.items += items
        self.bytes += bytes_in(parts)
        if waiting.items >= self.batch_size or waiting.flush:
            self.ready[epoch] = waiting

    def front(self, epoch: int, items: int) -> int:
        """How many of so many a message can be made of: in order, only of those that stand side by side."""
        waiting = self.by_epoch[epoch]
        return min(items, waiting.neighbours(items)) if self.in_order and len(waiting.parts) > 1 else items

    def take(self, epoch: int, items: int) -> tuple[list[Part], int]:
        """The first `items` of an epoch, and their bytes."""
        waiting = self.by_epoch[epoch]
        parts: list[Part] = []
        missing = items
        size = 0
        waiting_parts, came = waiting.parts, waiting.came
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
        if not waiting.items or (waiting.items < self.batch_size and not waiting.partial):
            self.ready.pop(epoch, None)
        if not self.items:
            self.bytes = 0  # cutting rounds down: nothing waits, so nothing weighs
        return parts, size

    def flush(self, epoch: int) -> None:
        """Nothing more comes to it of this epoch."""
        waiting = self.by_epoch.get(epoch)
        if waiting is None:
            waiting = self.by_epoch[epoch] = EpochQueue()
        waiting.flush = True
        if waiting.items:
            self.ready[epoch] = waiting

    def hurry(self, epoch: int) -> None:
        """What waits longest of this epoch has waited long enough."""
        waiting = self.by_epoch[epoch]
        waiting.hurry = waiting.came[0]
        self.ready[epoch] = waiting

    def forget(self, epoch: int) -> list[Part]:
        """The epoch is over, or begins anew; what still waits of it is given back."""
        waiting = self.by_epoch.pop(epoch, None)
        self.ready.pop(epoch, None)
        if waiting is None:
            return []
        parts = list(waiting.parts)
        self.items -= waiting.items
        self.bytes = max(0, self.bytes - bytes_in(parts)) if self.items else 0
        return parts

    def resize(self, batch_size: int) -> None:
        """From now on batches of another size; what waits may be enough now, or no longer."""
        self.batch_size = batch_size
        for epoch, waiting in self.by_epoch.items():
            if waiting.items >= batch_size or (waiting.items and waiting.partial):
                self.ready[epoch] = waiting
            else:
                self.ready.pop(epoch, None)
