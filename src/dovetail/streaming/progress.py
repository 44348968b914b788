"""How far is each epoch: what is complete at which unit, and what can leave the run?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.commands import Deliver

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.segments import Part, Segment
    from dovetail.streaming.board import Board
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.lane import Lane


class Progress:
    """Carries completeness from parents to children, and delivers epochs."""

    def __init__(self, board: Board, lane_finished: Callable[[Lane], None]) -> None:
        self.board = board
        self.lane_finished = lane_finished
        self.held: dict[int, Epoch] = {}
        """With ordered output: finished ones that wait for an earlier one, by where they begin."""
        self.input_ended = False
        """Of the wave that runs."""
        self.spool: dict[str, list[Segment]] = {}
        """Unit of a later wave -> what it will get, in the order in which it was delivered."""

    def route(self, lane: Lane, epoch: Epoch, segments: list[Segment], begin: Part) -> int:
        """Sends the output of a message on; how many items that were. `begin`: the first part of its input."""
        board = self.board
        given = 0
        for number, segment in enumerate(segments):
            items = segment.items
            if not items:
                continue
            given += items
            for child in lane.children:
                if child.sorts:
                    place = segment.first or (*(begin[0].first or ()), begin[1], number)
                    segment.first = place
                    epoch.unsorted.setdefault(child.index, []).append((place, segment))
                else:
                    child.queue.add(epoch.id, segment, board.now)
                epoch.pending[child.index] += items
                board.dirty[child.index] = True
            for name in lane.spools:
                epoch.spooled.setdefault(name, []).append(segment)
            if lane.is_leaf:
                epoch.outputs.setdefault(lane.name, []).append(segment)
                epoch.bytes += segment.size_bytes
                board.held_bytes += segment.size_bytes
        if lane.is_leaf and given and board.options.eager:
            self._deliver_early(lane, epoch)
        return given

    def _deliver_early(self, lane: Lane, epoch: Epoch) -> None:
        outputs = {lane.name: epoch.outputs.pop(lane.name)}
        size = sum(segment.size_bytes for segment in outputs[lane.name])
        epoch.bytes -= size
        self.board.held_bytes -= size
        self.board.delivered += sum(segment.items for segment in outputs[lane.name])
        self.board.out.append(Deliver(self.board.wave, epoch.id, epoch.first, epoch.first, outputs))

    def close(self, epoch: Epoch) -> None:
        """No more input for this epoch."""
        epoch.closed = True
        for lane in self.board.lanes:
            self._may_flush(epoch, lane)
            self.settle(epoch, lane)

    def settle(self, epoch: Epoch, lane: Lane) -> None:
        """If nothing of the epoch is left at this lane and nothing more can come, say so to those after it."""
        if epoch.pending[lane.index] or epoch.complete[lane.index] or not epoch.closed or epoch.dead:
            return
        if not all(epoch.complete[parent.index] for parent in lane.parents):
            return
        epoch.complete[lane.index] = True
        epoch.left -= 1
        lane.queue.forget(epoch.id)
        for child in lane.children:
            self._may_flush(epoch, child)
            self.settle(epoch, child)
        if not epoch.left:
            self._finish(epoch)
        if self.input_ended:
            self.look_for_ends()

    def _may_flush(self, epoch: Epoch, lane: Lane) -> None:
        if not epoch.complete[lane.index] and all(epoch.complete[parent.index] for parent in lane.parents):
            for _, segment in sorted(epoch.unsorted.pop(lane.index, ()), key=lambda pair: pair[0]):
                lane.queue.add(epoch.id, segment, self.board.now)
            lane.queue.flush(epoch.id)
            self.board.dirty[lane.index] = True

    def _finish(self, epoch: Epoch) -> None:
        if self.board.epochs.pop(epoch.id, None) is None:
            return
        if not self.board.options.ordered:
            self._deliver(epoch)
            return
        self.held[epoch.first] = epoch
        self.release()

    def release(self) -> None:
        """Ordered: every finished epoch before which nothing is open any more."""
        oldest = min((epoch.first for epoch in self.board.epochs.values()), default=None)
        for first in sorted(self.held):
            if oldest is not None and first > oldest:
                break
            self._deliver(self.held.pop(first))

    def _deliver(self, epoch: Epoch) -> None:
        board = self.board
        epoch.source.clear()
        board.held_bytes -= epoch.bytes
        board.delivered += sum(segment.items for segments in epoch.outputs.values() for segment in segments)
        if not board.wave:
            board.finished_items += epoch.last - epoch.first
        for name, segments in epoch.spooled.items():
            self.spool.setdefault(name, []).extend(segments)
        board.out.append(
            Deliver(board.wave, epoch.id, epoch.first, epoch.last, epoch.outputs, epoch.spooled, epoch.aside)
        )

    def look_for_ends(self) -> None:
        """After the input's end: which lanes have everything, and which are finished for good?"""
        epochs = [epoch for epoch in self.board.epochs.values() if not epoch.dead]
        for lane in self.board.lanes:
            if lane.finished:
                continue
            if not lane.no_more_input:
                lane.no_more_input = all(
                    epoch.closed and all(epoch.complete[parent.index] for parent in lane.parents) for epoch in epochs
                )
            if lane.no_more_input and all(epoch.complete[lane.index] for epoch in epochs):
                lane.finished = True
                self.lane_finished(lane)
