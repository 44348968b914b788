"""What is lost with a node, and how does it come again? Epochs of which something lay there begin anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.commands import Cancel

if TYPE_CHECKING:
    from dovetail.control.events import NodeLeft
    from dovetail.streaming.board import Board
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.feeding import Feeder
    from dovetail.streaming.fleet import Fleet
    from dovetail.streaming.progress import Progress


class Restarts:
    """Drops what cannot be trusted any more, and takes its input once more."""

    def __init__(self, board: Board, fleet: Fleet, progress: Progress, feeder: Feeder) -> None:
        self.board = board
        self.fleet = fleet
        self.progress = progress
        self.feeder = feeder

    def left(self, event: NodeLeft) -> None:
        """Its workers were reported before; what lay there is lost, and the epochs it belonged to begin anew."""
        board = self.board
        why = f" ({event.reason})" if event.reason else ""
        board.note("node", f"node {event.node} is gone{why}", node=event.node)
        self.fleet.left(event.node, returns=event.returns)
        if board.ending:
            return
        for worker in board.workers.values():
            for message in worker.messages.values():
                if any(segment.node == event.node for segment, _, _ in message.parts):
                    message.input_lost = True
        for epoch in list(board.epochs.values()) + list(self.progress.held.values()):
            if self._touched(epoch, event.node):
                self.begin_again(epoch)

    def _touched(self, epoch: Epoch, node: str) -> bool:
        if epoch.lies_on(node):
            return True
        for lane in self.board.lanes:
            waiting = lane.queue.by_epoch.get(epoch.id)
            if waiting is not None and any(segment.node == node for segment, _, _ in waiting.parts):
                return True
            for suspect in lane.suspects:
                if suspect.epoch is epoch and any(segment.node == node for segment, _, _ in suspect.parts):
                    return True
        return False

    def begin_again(self, epoch: Epoch) -> None:
        """Drops everything of an epoch and takes its input once more."""
        board = self.board
        epoch.dead = True
        board.epochs.pop(epoch.id, None)
        self.progress.held.pop(epoch.first, None)
        board.held_bytes -= epoch.bytes
        board.aside -= len(epoch.aside)
        for record in epoch.aside:
            board.lane_of[record.unit].aside -= 1
        for lane in board.lanes:
            lane.queue.forget(epoch.id)
            kept = [suspect for suspect in lane.suspects if suspect.epoch is not epoch]
            lane.suspects.clear()
            lane.suspects.extend(kept)
            board.dirty[lane.index] = True
            lane.finished = lane.no_more_input = False
        for worker in board.workers.values():
            for message in worker.messages.values():
                if message.epoch is epoch and not message.cancelled:
                    message.cancelled = True
                    board.out.append(Cancel(message.id, worker.id))
        items = epoch.last - epoch.first
        board.note("epoch", f"{items} source items begin again: some of their results were lost", first=epoch.first)
        self.fleet.wants_replan = True
        self.feeder.begin_again(epoch)
