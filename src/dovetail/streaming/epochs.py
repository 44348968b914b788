"""Epochs: completion tracking per unit, delivery of results, and restart of epochs that lost data with a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.commands import Cancel, Deliver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.commands import FailedItem
    from dovetail.control.events import NodeLeft
    from dovetail.control.payload import Segment, SegmentSlice
    from dovetail.streaming.feeder import Feeder
    from dovetail.streaming.fleet import Fleet
    from dovetail.streaming.state import StreamState, UnitState

OrderKey = tuple[int, ...]
"""Position in the order of the source."""


class Epoch:
    """A range [first, last) of a wave's input, and how far it is processed."""

    __slots__ = (
        "begun",
        "closed",
        "complete",
        "discarded",
        "failed_items",
        "first",
        "held_bytes",
        "id",
        "incomplete_units",
        "joined",
        "kept_input",
        "last",
        "mixed",
        "outputs",
        "pending",
        "read_bytes",
        "spooled",
        "target_items",
        "unsorted",
    )

    def __init__(self, number: int, first: int, units: int, target_items: int) -> None:
        self.id = number
        self.first = first
        self.last = first
        self.target_items = target_items
        """Number of items after which it is closed."""
        self.closed = False
        """No more input will be added."""
        self.begun = [False] * units
        """For each unit, whether a worker has got some of its items."""
        self.discarded = False
        """It restarts as another epoch: later results of this one are ignored."""
        self.mixed = False
        """Some of its items were sent in one batch with items of other epochs."""
        self.joined: list[Epoch] = [self]
        """Epochs that are delivered together, because some results of one are among those of another."""
        self.held_bytes = 0
        """Bytes of its input and of the results it holds."""
        self.read_bytes = 0
        """Bytes of its input, whether or not the input is kept."""
        self.pending = [0] * units
        """For each unit of the wave, items that wait for it or are at its workers."""
        self.complete = [False] * units
        """For each unit, whether it has nothing of the epoch and nothing more will arrive."""
        self.incomplete_units = units
        self.kept_input: list[tuple[str, SegmentSlice]] = []
        """Input, kept until the epoch is finished: (unit, or empty for source items; slice)."""
        self.outputs: dict[str, list[Segment]] = {}
        self.spooled: dict[str, list[Segment]] = {}
        self.failed_items: list[FailedItem] = []
        self.unsorted: dict[int, list[tuple[OrderKey, Segment]]] = {}
        """Unit (its index in the wave) -> segments that wait until its input is complete and can be sorted."""

    def extend_to(self, last: int) -> None:
        self.last = last

    def lower_target(self, items: int) -> None:
        self.target_items = min(self.target_items, items)

    def add_input(self, name: str, part: SegmentSlice, size: int, *, keep: bool) -> None:
        """Count input, and keep it if a lost node could make it necessary to process it again."""
        self.read_bytes += size
        if keep:
            self.kept_input.append((name, part))
            self.held_bytes += size

    def mark_begun(self, index: int) -> None:
        self.begun[index] = True

    def mark_mixed(self, index: int) -> None:
        self.mixed = self.begun[index] = True

    def join(self, other: Epoch) -> None:
        """Deliver both together, and all that are delivered with one of them."""
        if other in self.joined or self.discarded:
            return
        together = self.joined + other.joined
        for epoch in together:
            epoch.joined = together

    def has_begun_in(self, units: list[UnitState]) -> bool:
        return any(self.begun[unit.index] for unit in units)

    def add_pending(self, index: int, items: int) -> None:
        self.pending[index] += items

    def settle(self, index: int, items: int) -> None:
        """These items are done or failed at a unit: they are not pending there any more."""
        self.pending[index] -= items

    def add_spooled(self, name: str, segment: Segment) -> None:
        """Keep a segment for a unit of a later wave."""
        self.spooled.setdefault(name, []).append(segment)

    def add_failed_items(self, items: list[FailedItem]) -> None:
        self.failed_items.extend(items)

    def take_failed_items(self) -> list[FailedItem]:
        items, self.failed_items = self.failed_items, []
        return items

    def absorb(self, other: Epoch) -> None:
        """Take over the results of a finished epoch that is delivered together with this one."""
        self.held_bytes += other.held_bytes
        other.kept_input.clear()
        self.failed_items += other.failed_items
        for own, others in ((self.outputs, other.outputs), (self.spooled, other.spooled)):
            for name, segments in others.items():
                own.setdefault(name, []).extend(segments)

    def has_output_on(self, node: str) -> bool:
        """Whether a result that it holds is stored on this node."""
        held = (*self.outputs.values(), *self.spooled.values())
        waiting = (segment for pairs in self.unsorted.values() for _, segment in pairs)
        return any(one.node == node for segments in (*held, waiting) for one in segments)


MAX_JOINED_EPOCHS = 4
"""Epochs that may be delivered together: about two seconds of work."""


def can_join(epochs: list[Epoch], other: Epoch, small_items: int) -> bool:
    """Whether one more epoch may be delivered together with these. More than MAX_JOINED_EPOCHS may if they contain at
    most `small_items` items of the input."""
    together = {epoch.id: epoch for one in (*epochs, other) for epoch in one.joined}
    if not epochs or len(together) <= MAX_JOINED_EPOCHS:
        return True
    return sum(epoch.last - epoch.first for epoch in together.values()) <= small_items


def missing_ranges(done: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """Return the gaps below the highest end, and that end."""
    gaps: list[tuple[int, int]] = []
    reached = 0
    for first, last in sorted(done):
        if first > reached:
            gaps.append((reached, first))
        reached = max(reached, last)
    return gaps, reached


class EpochTracker:
    """Propagates completion from parents to children, and delivers epochs."""

    def __init__(self, state: StreamState) -> None:
        self.state = state
        self.undelivered: dict[int, Epoch] = {}
        """Finished epochs that wait for an earlier one (ordered output) or for one that is delivered with them, by
        their first item."""
        self.input_ended = False
        """Whether the current wave gets no more input."""
        self.finished_units: list[UnitState] = []
        """Units that finished and whose workers the controller has not released yet."""
        self._spool: dict[str, list[Segment]] = {}
        """Unit of a later wave -> its input, in the order of delivery."""

    def begin_wave(self) -> None:
        self.input_ended = False

    def add_to_spool(self, spooled: dict[str, list[Segment]]) -> None:
        for name, segments in spooled.items():
            self._spool.setdefault(name, []).extend(segments)

    def take_spool(self, units: list[UnitState]) -> list[tuple[UnitState, list[Segment]]]:
        """Remove and return the spooled input of those units that have some."""
        return [(unit, self._spool.pop(unit.name)) for unit in units if unit.name in self._spool]

    def take_finished_units(self) -> list[UnitState]:
        """Return units that finished since the last call and were not reopened since."""
        units, self.finished_units = self.finished_units, []
        return [unit for unit in units if unit.finished]

    def route(self, unit: UnitState, epoch: Epoch, segments: list[Segment], begin: SegmentSlice) -> int:
        """Pass the output of a message to its consumers and return the number of items. `begin` is the first slice of
        the message's input."""
        state = self.state
        given = 0
        for number, segment in enumerate(segments):
            items = segment.items
            if not items:
                continue
            given += items
            for child in unit.children:
                if child.sorts_input:
                    key = segment.default_first((*(begin[0].first or ()), begin[1], number))
                    epoch.unsorted.setdefault(child.index, []).append((key, segment))
                else:
                    child.queue.add(epoch.id, segment, state.now)
                epoch.pending[child.index] += items
                child.mark_dirty()
            for name in unit.later_consumers:
                epoch.add_spooled(name, segment)
            if unit.is_leaf:
                epoch.outputs.setdefault(unit.name, []).append(segment)
                epoch.held_bytes += segment.size_bytes
                state.add_held_bytes(segment.size_bytes)
        if unit.is_leaf and given and state.options.eager:
            self._deliver_early(unit, epoch)
        return given

    def _deliver_early(self, unit: UnitState, epoch: Epoch) -> None:
        """Deliver results before their epoch is finished."""
        state = self.state
        outputs = {unit.name: epoch.outputs.pop(unit.name)}
        size = sum(segment.size_bytes for segment in outputs[unit.name])
        epoch.held_bytes -= size
        state.add_held_bytes(-size)
        state.count_delivered(sum(segment.items for segment in outputs[unit.name]))
        state.emit(Deliver(state.wave, epoch.id, epoch.first, epoch.first, outputs))

    def end_input(self, epoch: Epoch | None) -> None:
        """The wave gets no more input; `epoch` is the one that was being filled."""
        self.input_ended = True
        if epoch is not None:
            self.close_epoch(epoch)
        self.finish_units()

    def close_epoch(self, epoch: Epoch) -> None:
        """Mark the input of an epoch as complete."""
        epoch.closed = True
        for unit in self.state.units:
            self._flush_if_complete(epoch, unit)
            self.propagate_completion(epoch, unit)
        if self.input_ended:
            self.finish_units()  # an epoch that restarted is the last input: its partial batches may be sent

    def propagate_completion(self, epoch: Epoch, unit: UnitState) -> None:
        """If the unit has nothing left of the epoch and nothing more can arrive, mark it complete and continue with its
        children."""
        if epoch.pending[unit.index] or epoch.complete[unit.index] or not epoch.closed or epoch.discarded:
            return
        if not all(epoch.complete[parent.index] for parent in unit.parents):
            return
        epoch.complete[unit.index] = True
        epoch.incomplete_units -= 1
        unit.queue.remove_epoch(epoch.id)
        for child in unit.children:
            self._flush_if_complete(epoch, child)
            self.propagate_completion(epoch, child)
        if not epoch.incomplete_units:
            self._finish_epoch(epoch)
        if self.input_ended:
            self.finish_units()

    def _flush_if_complete(self, epoch: Epoch, unit: UnitState) -> None:
        if not epoch.complete[unit.index] and all(epoch.complete[parent.index] for parent in unit.parents):
            for _, segment in sorted(epoch.unsorted.pop(unit.index, ()), key=lambda pair: pair[0]):
                unit.queue.add(epoch.id, segment, self.state.now)
            unit.queue.flush_epoch(epoch.id)
            unit.mark_dirty()

    def _finish_epoch(self, epoch: Epoch) -> None:
        if not self.state.remove_epoch(epoch):
            return
        if not self.state.options.ordered and len(epoch.joined) == 1:
            self._deliver_epoch(epoch)
            return
        self.undelivered[epoch.first] = epoch
        if self.state.options.ordered:
            self.deliver_in_order()
        elif all(one.first in self.undelivered for one in epoch.joined):
            self._deliver_joined(epoch)

    def deliver_in_order(self) -> None:
        """With ordered output: deliver every finished epoch that no open epoch precedes."""
        oldest = min((epoch.first for epoch in self.state.epochs.values()), default=None)
        for first in sorted(self.undelivered):
            if oldest is not None and first > oldest:
                break
            self._deliver_epoch(self.undelivered.pop(first))

    def _deliver_joined(self, epoch: Epoch) -> None:
        """Deliver all epochs that are joined with this one, as one."""
        parts = sorted(epoch.joined, key=lambda one: one.first)
        for one in parts:
            del self.undelivered[one.first]
        self._deliver_epoch(parts[0], parts[1:])

    def _deliver_epoch(self, epoch: Epoch, joined: Sequence[Epoch] = ()) -> None:
        state = self.state
        for one in joined:
            epoch.absorb(one)
        epoch.kept_input.clear()
        state.add_held_bytes(-epoch.held_bytes)
        state.count_delivered(sum(segment.items for segments in epoch.outputs.values() for segment in segments))
        if not state.wave:
            state.count_finished(sum(one.last - one.first for one in (epoch, *joined)))
        self.add_to_spool(epoch.spooled)
        also = [(one.first, one.last) for one in joined]
        results = (epoch.outputs, epoch.spooled, epoch.failed_items)
        state.emit(Deliver(state.wave, epoch.id, epoch.first, epoch.last, *results, also))

    def finish_units(self) -> None:
        """After the end of the input: mark units that have received everything, and units that are finished."""
        epochs = [epoch for epoch in self.state.epochs.values() if not epoch.discarded]
        for unit in self.state.units:
            if unit.finished:
                continue
            if not unit.input_complete and all(
                epoch.closed and all(epoch.complete[parent.index] for parent in unit.parents) for epoch in epochs
            ):
                unit.mark_input_complete()
            if unit.input_complete and all(epoch.complete[unit.index] for epoch in epochs):
                unit.mark_finished()
                self.finished_units.append(unit)

    def discard_epoch(self, epoch: Epoch) -> None:
        """Drop an epoch, everything of it that waits at units or holds bytes, and its messages that have not begun."""
        state = self.state
        epoch.discarded = True
        state.remove_epoch(epoch)
        self.undelivered.pop(epoch.first, None)
        state.add_held_bytes(-epoch.held_bytes)
        for unit in state.units:
            unit.drop_epoch(epoch)
        state.count_failed(-len(epoch.failed_items))
        for record in epoch.failed_items:
            state.units_by_name[record.unit].count_failed(-1)
        for worker in state.workers.values():
            for message in worker.messages.values():
                if epoch in message.epochs and not message.cancelled:
                    message.mark_cancelled()
                    state.emit(Cancel(message.id, worker.id))


class EpochRestarter:
    """Discards epochs that lost data, and feeds their input again."""

    def __init__(self, state: StreamState, fleet: Fleet, epoch_tracker: EpochTracker, feeder: Feeder) -> None:
        self.state = state
        self.fleet = fleet
        self.epoch_tracker = epoch_tracker
        self.feeder = feeder

    def on_node_left(self, event: NodeLeft) -> None:
        """Restart the epochs that had data on the node. Its workers were reported lost before this event."""
        state = self.state
        reason = f" ({event.reason})" if event.reason else ""
        state.add_note("node", f"node {event.node} left{reason}", node=event.node)
        self.fleet.on_node_left(event)
        if state.is_ending:
            return
        for worker in state.workers.values():
            for message in worker.messages.values():
                if any(segment.node == event.node for segment, _, _ in message.parts):
                    message.mark_input_lost()
        for epoch in list(state.epochs.values()) + list(self.epoch_tracker.undelivered.values()):
            if not epoch.discarded and self._has_data_on(epoch, event.node):
                self.restart_epoch(epoch)

    def _has_data_on(self, epoch: Epoch, node: str) -> bool:
        if epoch.has_output_on(node):
            return True
        for unit in self.state.units:
            waiting = unit.queue.by_epoch.get(epoch.id)
            if waiting is not None and any(segment.node == node for segment, _, _ in waiting.parts):
                return True
            for suspect in unit.waiting_suspects():
                if suspect.epoch is epoch and any(segment.node == node for segment, _, _ in suspect.parts):
                    return True
        return False

    def restart_epoch(self, epoch: Epoch) -> None:
        """Discard an epoch, with those that are delivered together with it, and feed their input again."""
        for one in sorted(epoch.joined, key=lambda one: one.first):
            if not one.discarded:
                self._restart_one(one)

    def _restart_one(self, epoch: Epoch) -> None:
        state = self.state
        self.epoch_tracker.discard_epoch(epoch)
        for unit in state.units:
            unit.reopen()
        items = epoch.last - epoch.first
        state.add_note("epoch", f"{items} source items restart: some of their results were lost", first=epoch.first)
        state.request_replan("epoch restarted")
        self.feeder.refeed(epoch)
