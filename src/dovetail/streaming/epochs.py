"""Epochs: completion tracking per unit, delivery of results, and restart of epochs that lost data with a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.commands import Cancel, Deliver

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.commands import FailedItem
    from dovetail.control.events import NodeLeft
    from dovetail.control.payload import Segment, SegmentSlice
    from dovetail.streaming.feeder import Feeder
    from dovetail.streaming.fleet import Fleet
    from dovetail.streaming.state import StreamState, UnitState

OrderKey = tuple[int, ...]
"""Where in the order of the source something belongs."""


class Epoch:
    """A stretch [first, last) of the input of a wave, and how far it is."""

    __slots__ = (
        "closed",
        "complete",
        "discarded",
        "failed_items",
        "first",
        "held_bytes",
        "id",
        "incomplete_units",
        "kept_input",
        "last",
        "opened_at",
        "outputs",
        "pending",
        "read_bytes",
        "spooled",
        "target_items",
        "unsorted",
    )

    def __init__(self, number: int, first: int, units: int, now: float) -> None:
        self.id = number
        self.first = first
        self.last = first
        self.target_items = 1
        """Items after which it is closed."""
        self.opened_at = now
        self.closed = False
        """No more input will be added."""
        self.discarded = False
        """It begins anew as another epoch: whatever still comes of this one is ignored."""
        self.held_bytes = 0
        """Of its input and of the results it holds."""
        self.read_bytes = 0
        """Of its input, whether or not it is kept."""
        self.pending = [0] * units
        """Per unit of the wave: items that wait for it or are with its workers."""
        self.complete = [False] * units
        """Per unit: nothing more will come to it, and it has nothing."""
        self.incomplete_units = units
        self.kept_input: list[tuple[str, SegmentSlice]] = []
        """Its input, kept until it is finished: (unit, or empty for a source item, part)."""
        self.outputs: dict[str, list[Segment]] = {}
        self.spooled: dict[str, list[Segment]] = {}
        self.failed_items: list[FailedItem] = []
        self.unsorted: dict[int, list[tuple[OrderKey, Segment]]] = {}
        """Unit (its place in the wave) -> what waits until all of its input is there and can be sorted."""

    @property
    def finished(self) -> bool:
        return not self.incomplete_units

    def has_output_on(self, node: str) -> bool:
        """Whether a result that it holds lies on this node."""
        held = (*self.outputs.values(), *self.spooled.values())
        waiting = (segment for pairs in self.unsorted.values() for _, segment in pairs)
        return any(one.node == node for segments in (*held, waiting) for one in segments)


def missing_ranges(done: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """What is not covered below the highest end, and that end."""
    gaps: list[tuple[int, int]] = []
    reached = 0
    for first, last in sorted(done):
        if first > reached:
            gaps.append((reached, first))
        reached = max(reached, last)
    return gaps, reached


class EpochTracker:
    """Carries completeness from parents to children, and delivers epochs."""

    def __init__(self, board: StreamState, lane_finished: Callable[[UnitState], None]) -> None:
        self.state = board
        self.on_unit_finished = lane_finished
        self.undelivered: dict[int, Epoch] = {}
        """With ordered output: finished ones that wait for an earlier one, by where they begin."""
        self.input_ended = False
        """Of the wave that runs."""
        self.spool: dict[str, list[Segment]] = {}
        """Unit of a later wave -> what it will get, in the order in which it was delivered."""

    def route(self, lane: UnitState, epoch: Epoch, segments: list[Segment], begin: SegmentSlice) -> int:
        """Sends the output of a message on; how many items that were. `begin`: the first part of its input."""
        board = self.state
        given = 0
        for number, segment in enumerate(segments):
            items = segment.items
            if not items:
                continue
            given += items
            for child in lane.children:
                if child.sorts_input:
                    place = segment.first or (*(begin[0].first or ()), begin[1], number)
                    segment.first = place
                    epoch.unsorted.setdefault(child.index, []).append((place, segment))
                else:
                    child.queue.add(epoch.id, segment, board.now)
                epoch.pending[child.index] += items
                board.dirty[child.index] = True
            for name in lane.later_consumers:
                epoch.spooled.setdefault(name, []).append(segment)
            if lane.is_leaf:
                epoch.outputs.setdefault(lane.name, []).append(segment)
                epoch.held_bytes += segment.size_bytes
                board.held_bytes += segment.size_bytes
        if lane.is_leaf and given and board.options.eager:
            self._deliver_early(lane, epoch)
        return given

    def _deliver_early(self, lane: UnitState, epoch: Epoch) -> None:
        outputs = {lane.name: epoch.outputs.pop(lane.name)}
        size = sum(segment.size_bytes for segment in outputs[lane.name])
        epoch.held_bytes -= size
        self.state.held_bytes -= size
        self.state.items_delivered += sum(segment.items for segment in outputs[lane.name])
        self.state.commands.append(Deliver(self.state.wave, epoch.id, epoch.first, epoch.first, outputs))

    def close_epoch(self, epoch: Epoch) -> None:
        """No more input for this epoch."""
        epoch.closed = True
        for lane in self.state.units:
            self._flush_if_complete(epoch, lane)
            self.propagate_completion(epoch, lane)

    def propagate_completion(self, epoch: Epoch, lane: UnitState) -> None:
        """If nothing of the epoch is left at this lane and nothing more can come, say so to those after it."""
        if epoch.pending[lane.index] or epoch.complete[lane.index] or not epoch.closed or epoch.discarded:
            return
        if not all(epoch.complete[parent.index] for parent in lane.parents):
            return
        epoch.complete[lane.index] = True
        epoch.incomplete_units -= 1
        lane.queue.remove_epoch(epoch.id)
        for child in lane.children:
            self._flush_if_complete(epoch, child)
            self.propagate_completion(epoch, child)
        if not epoch.incomplete_units:
            self._finish_epoch(epoch)
        if self.input_ended:
            self.finish_units()

    def _flush_if_complete(self, epoch: Epoch, lane: UnitState) -> None:
        if not epoch.complete[lane.index] and all(epoch.complete[parent.index] for parent in lane.parents):
            for _, segment in sorted(epoch.unsorted.pop(lane.index, ()), key=lambda pair: pair[0]):
                lane.queue.add(epoch.id, segment, self.state.now)
            lane.queue.flush_epoch(epoch.id)
            self.state.dirty[lane.index] = True

    def _finish_epoch(self, epoch: Epoch) -> None:
        if self.state.epochs.pop(epoch.id, None) is None:
            return
        if not self.state.options.ordered:
            self._deliver_epoch(epoch)
            return
        self.undelivered[epoch.first] = epoch
        self.deliver_in_order()

    def deliver_in_order(self) -> None:
        """Ordered: every finished epoch before which nothing is open any more."""
        oldest = min((epoch.first for epoch in self.state.epochs.values()), default=None)
        for first in sorted(self.undelivered):
            if oldest is not None and first > oldest:
                break
            self._deliver_epoch(self.undelivered.pop(first))

    def _deliver_epoch(self, epoch: Epoch) -> None:
        board = self.state
        epoch.kept_input.clear()
        board.held_bytes -= epoch.held_bytes
        board.items_delivered += sum(segment.items for segments in epoch.outputs.values() for segment in segments)
        if not board.wave:
            board.finished_items += epoch.last - epoch.first
        for name, segments in epoch.spooled.items():
            self.spool.setdefault(name, []).extend(segments)
        board.commands.append(
            Deliver(board.wave, epoch.id, epoch.first, epoch.last, epoch.outputs, epoch.spooled, epoch.failed_items)
        )

    def finish_units(self) -> None:
        """After the input's end: which lanes have everything, and which are finished for good?"""
        epochs = [epoch for epoch in self.state.epochs.values() if not epoch.discarded]
        for lane in self.state.units:
            if lane.finished:
                continue
            if not lane.input_complete:
                lane.input_complete = all(
                    epoch.closed and all(epoch.complete[parent.index] for parent in lane.parents) for epoch in epochs
                )
            if lane.input_complete and all(epoch.complete[lane.index] for epoch in epochs):
                lane.finished = True
                self.on_unit_finished(lane)


class EpochRestarter:
    """Drops what cannot be trusted any more, and takes its input once more."""

    def __init__(self, board: StreamState, fleet: Fleet, progress: EpochTracker, feeder: Feeder) -> None:
        self.state = board
        self.fleet = fleet
        self.epoch_tracker = progress
        self.feeder = feeder

    def on_node_left(self, event: NodeLeft) -> None:
        """Its workers were reported before; what lay there is lost, and the epochs it belonged to begin anew."""
        board = self.state
        why = f" ({event.reason})" if event.reason else ""
        board.add_note("node", f"node {event.node} is gone{why}", node=event.node)
        self.fleet.on_node_left(event.node, returns=event.returns)
        if board.is_ending:
            return
        for worker in board.workers.values():
            for message in worker.messages.values():
                if any(segment.node == event.node for segment, _, _ in message.parts):
                    message.input_lost = True
        for epoch in list(board.epochs.values()) + list(self.epoch_tracker.undelivered.values()):
            if self._is_affected(epoch, event.node):
                self.restart_epoch(epoch)

    def _is_affected(self, epoch: Epoch, node: str) -> bool:
        if epoch.has_output_on(node):
            return True
        for lane in self.state.units:
            waiting = lane.queue.by_epoch.get(epoch.id)
            if waiting is not None and any(segment.node == node for segment, _, _ in waiting.parts):
                return True
            for suspect in lane.suspects:
                if suspect.epoch is epoch and any(segment.node == node for segment, _, _ in suspect.parts):
                    return True
        return False

    def restart_epoch(self, epoch: Epoch) -> None:
        """Drops everything of an epoch and takes its input once more."""
        board = self.state
        epoch.discarded = True
        board.epochs.pop(epoch.id, None)
        self.epoch_tracker.undelivered.pop(epoch.first, None)
        board.held_bytes -= epoch.held_bytes
        board.items_failed -= len(epoch.failed_items)
        for record in epoch.failed_items:
            board.units_by_name[record.unit].items_failed -= 1
        for lane in board.units:
            lane.queue.remove_epoch(epoch.id)
            kept = [suspect for suspect in lane.suspects if suspect.epoch is not epoch]
            lane.suspects.clear()
            lane.suspects.extend(kept)
            board.dirty[lane.index] = True
            lane.finished = lane.input_complete = False
        for worker in board.workers.values():
            for message in worker.messages.values():
                if message.epoch is epoch and not message.cancelled:
                    message.cancelled = True
                    board.commands.append(Cancel(message.id, worker.id))
        items = epoch.last - epoch.first
        board.add_note("epoch", f"{items} source items begin again: some of their results were lost", first=epoch.first)
        self.fleet.replan_requested = True
        self.feeder.refeed(epoch)
