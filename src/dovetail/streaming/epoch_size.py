"""Size of epochs: about half a second of work, or a batch while the speed of a unit is unknown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.streaming.state import StreamState, UnitState

    ReachedUnits = list[tuple[UnitState, float]]
    """Units that get items, with their items per item of the wave's input."""

MAX_EPOCH_ITEMS = 1_000_000
MAX_OPEN_EPOCHS = 8
"""Approximate number of open epochs that the work in flight is spread over."""
MAX_UNMEASURED_EPOCHS = 64
"""Number of open epochs while the speed of a unit is unknown."""
MIN_BATCHES_PER_EPOCH = 4
"""Least number of batches per epoch of a unit whose last batch may be incomplete, about half full on average."""
MAX_RELEVANT_SPEED_FACTOR = 2.0
"""A unit that is faster than the slowest by this factor has time for incomplete batches."""
DURABLE_EPOCH_S = 1.0
"""Upper limit of the work in one epoch of a run that can be resumed: what a kill costs at most per worker."""
DURABLE_MESSAGE_S = 0.02
"""No reader waits for single results of a durable run, and larger messages cost less per item."""
SERVICE_EPOCH_BATCHES = 8
"""Epoch size of a service under full load. A dropped request is answered at the end of its epoch, after about this many
batches; about one batch per epoch is not full."""


class EpochSize:
    """Computes the size of epochs of the current wave from the measured speeds of its units."""

    def __init__(self, state: StreamState) -> None:
        self.state = state
        self._input_shares: Mapping[str, float] = {}

    def set_input_shares(self, shares: Mapping[str, float]) -> None:
        """Items that each unit gets directly per item of the wave's input: 1 for source items, its share of a spool."""
        self._input_shares = shares

    def items_per_input_item(self) -> dict[UnitState, float]:
        """The number of items that each unit gets per item of the wave's input."""
        return self._items_per_input_item(lambda unit: unit.throughput.returns)

    def _items_per_input_item(self, returns: Callable[[UnitState], float]) -> dict[UnitState, float]:
        found: dict[UnitState, float] = {}
        for unit in self.state.units:
            from_parents = sum(found[parent] * returns(parent) for parent in unit.parents)
            found[unit] = from_parents + self._input_shares.get(unit.name, 0.0)
        return found

    def target_items(self, processed_items: int, filled_items: int = 0) -> int:
        """Items per epoch: about `target_epoch_s` of source work, at least some full batches of every unit, and a fixed
        share of the items in flight, so that a thousand workers do not have hundreds of epochs open. While the speed of
        a unit is unknown, it may be slow, and an epoch contains as little as is useful.

        `filled_items`: the least that is useful for an epoch that has these items already."""
        if self.has_unknown_speed():
            reached = self._possibly_reached_units()
            return _round_to_batches(reached, max(filled_items, self._unmeasured_items(reached, processed_items)))
        reached = self._reached_units()
        options = self.state.options
        rate = _known_rate(reached)
        preferred = minimum = 1.0
        slowest_queue = 0.0
        for unit, items in reached:
            preferred = max(preferred, options.target_epoch_batches * unit.batch_size / items)
            seconds = (unit.throughput.seconds_per_item or 0.0) * items
            if unit.total_slots > MAX_RELEVANT_SPEED_FACTOR * rate * seconds:
                continue  # it is fast enough for incomplete batches
            fills_batches = unit.batch_size == 1 or items == 1.0
            batches = 1 if fills_batches else min(MIN_BATCHES_PER_EPOCH, options.target_epoch_batches)
            minimum = max(minimum, batches * unit.batch_size / items)
            if unit.total_slots <= rate * seconds * (1 + 1e-9):
                slowest_queue = unit.preferred_queue_items / items
        if rate == math.inf:
            return _round_to_batches(reached, max(filled_items, preferred))
        goal = max(
            filled_items,
            min(preferred, max(minimum, options.max_epoch_s * rate)),
            slowest_queue / MAX_OPEN_EPOCHS,
            options.target_epoch_s * rate,
        )
        return _round_to_batches(reached, goal)

    def max_unmeasured_items(self, processed_items: int) -> int:
        """Items that all open epochs may have together while the speed of a unit is unknown."""
        items = self._unmeasured_items(self._possibly_reached_units(), processed_items)
        return int(min(MAX_UNMEASURED_EPOCHS * items, MAX_EPOCH_ITEMS))

    def slowest_units(self) -> list[UnitState]:
        """The unit with the lowest throughput, and all units after it. An unknown speed counts as the lowest."""
        throughput: dict[UnitState, float] = {}
        for unit, items in self._reached_units():
            seconds = unit.throughput.seconds_per_item
            throughput[unit] = 0.0 if seconds is None else unit.total_slots / (seconds * items) if seconds else math.inf
        slowest = min(throughput, key=throughput.__getitem__, default=None)
        found: list[UnitState] = []
        for unit in self.state.units:
            if unit is slowest or any(parent in found for parent in unit.parents):
                found.append(unit)
        return found

    def _reached_units(self) -> ReachedUnits:
        """The units that get items, with their items per item of the wave's input."""
        return [(unit, items) for unit, items in self.items_per_input_item().items() if items]

    def _possibly_reached_units(self) -> ReachedUnits:
        """Also the units that got no item because those before them have dropped the few that they got."""
        items = self._items_per_input_item(lambda unit: unit.throughput.possible_returns)
        return [(unit, each) for unit, each in items.items() if each]

    def has_unknown_speed(self) -> bool:
        """Whether epochs must be small because a unit may be slow. With a barrier there is only one epoch, and when
        serving, epochs end by age."""
        units = self.state.units
        if all(unit.throughput.seconds_per_item is not None for unit in units):
            return False
        if self.state.options.serving or any(unit.spec.barrier for unit in units):
            return False
        return any(unit.throughput.seconds_per_item is None for unit, _ in self._possibly_reached_units())

    def _unmeasured_items(self, reached: ReachedUnits, processed_items: int) -> float:
        """Items per epoch while the speed of a unit is unknown: a batch, or a share of the messages that such units may
        have in store. More if few items reach it: a share of those that were processed already, and at most of those
        that the known units process in `target_epoch_s`."""
        goal = min(_known_rate(reached) * self.state.options.target_epoch_s, processed_items) / MAX_OPEN_EPOCHS
        for unit, items in reached:
            goal = max(goal, unit.batch_size / max(1.0, items))
            if unit.throughput.seconds_per_item is None:
                goal = max(goal, unit.preferred_queue_items / max(1.0, items) / MAX_OPEN_EPOCHS)
        return goal


def _known_rate(reached: ReachedUnits) -> float:
    """Input items per second of the slowest unit whose speed is known; infinite if none is."""
    rate = math.inf
    for unit, items in reached:
        if unit.throughput.seconds_per_item:
            rate = min(rate, unit.total_slots / (unit.throughput.seconds_per_item * items))
    return rate


def _round_to_batches(reached: ReachedUnits, items: float) -> int:
    """Whole batches of units that get one item per input item, so that an epoch ends with full batches."""
    batch = max((unit.batch_size for unit, each in reached if each == 1.0), default=1)
    return max(1, int(min(batch * math.ceil(items / batch - 1e-9), MAX_EPOCH_ITEMS)))
