"""Arrival of simulated source items, with a rate and pauses, and a sink that counts or keeps outputs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dovetail.control.commands import Deliver, Pull
from dovetail.control.events import InputEnded, ItemsArrived
from dovetail.engines.simulated.message_execution import part_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.commands import DataCommand, FailedItem
    from dovetail.engines.simulated.engine import SimulatedEngine
    from dovetail.engines.simulated.world import Key

ARRIVALS_PER_S = 20
"""Maximum number of events per second of a source with a rate."""


class SimulatedData:
    """Answers one pull after another, at most `rate` items per second and not during pauses; None: unlimited. Items
    that are pulled again are delivered again, as by a source from which a run resumes."""

    def __init__(
        self,
        engine: SimulatedEngine,
        items: int | None,
        *,
        rate: float | None = None,
        pauses: Sequence[tuple[float, float]] = (),
        item_bytes: int = 0,
        segment_items: int = 1024,
        tracked: bool | None = None,
        keep_outputs: bool | None = None,
    ) -> None:
        """`tracked` defaults to that of the engine's world, and `keep_outputs` to `tracked`."""
        self._engine = engine
        self._items = items
        self._rate = rate
        self._pauses = sorted(pauses)
        self._item_bytes = item_bytes
        finest = segment_items if rate is None else max(int(rate / ARRIVALS_PER_S), 1)
        self._arrival_items = min(finest, segment_items)
        self._tracked = engine.world.tracked if tracked is None else tracked
        self._keep_outputs = self._tracked if keep_outputs is None else keep_outputs
        self._next_read_s = 0.0
        self._ended = False
        self.pulled = 0
        """Items that were pulled and existed."""
        self.delivered: Counter[str] = Counter()
        """Items per leaf."""
        self.spooled: Counter[str] = Counter()
        """Items per unit of a later wave."""
        self.outputs: dict[str, list[Key]] = {}
        """Keys of the outputs, if outputs are kept."""
        self.failed_items: list[FailedItem] = []
        self.log: list[Deliver] = []
        """The commit log, if outputs are kept."""

    def submit(self, commands: Sequence[DataCommand]) -> None:
        for command in commands:
            if isinstance(command, Pull):
                self._pull(command)
            else:
                self._deliver(command)

    def _pull(self, pull: Pull) -> None:
        last = pull.first + pull.items
        ends = self._items is not None and last >= self._items
        if self._items is not None:
            last = min(last, self._items)
        time = self._time_after_reading(max(self._engine.now(), self._next_read_s), 0.0)
        arrival_items = min(self._arrival_items, pull.max_segment_items)
        for first in range(pull.first, last, arrival_items):
            count = min(arrival_items, last - first)
            time = self._time_after_reading(time, 0.0 if self._rate is None else count / self._rate)
            self._engine.schedule(time, self._arrive, (first, count))
        self.pulled += max(last - pull.first, 0)
        self._next_read_s = time
        if ends and not self._ended:
            self._ended = True
            self._engine.schedule(time, self._engine.report, InputEnded(self._items or 0))

    def _arrive(self, what: tuple[int, int]) -> None:
        first, count = what
        keys = [(number,) for number in range(first, first + count)] if self._tracked else None
        segment = self._engine.new_segment(count, count * self._item_bytes, "", keys)
        self._engine.report(ItemsArrived(first, [segment]))

    def _time_after_reading(self, start: float, seconds: float) -> float:
        """The time after this number of seconds of reading; pauses do not count."""
        time = start + seconds
        for begin, end in self._pauses:
            if end <= start or begin > time:
                continue
            time += end - max(begin, start)
        return time

    def _deliver(self, deliver: Deliver) -> None:
        if self._keep_outputs:
            self.log.append(deliver)
            self.failed_items += deliver.failed_items
        for unit, segments in deliver.spooled.items():
            self.spooled[unit] += sum([segment.items for segment in segments])
        for leaf, segments in deliver.outputs.items():
            self.delivered[leaf] += sum([segment.items for segment in segments])
            if self._keep_outputs and self._tracked:
                keys = part_keys((segment, 0, segment.items) for segment in segments)
                self.outputs.setdefault(leaf, []).extend(keys)
