"""What becomes of a message that came back, with results, without, or not at all?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState
from dovetail.streaming.dispatch import tune

if TYPE_CHECKING:
    from dovetail.control.events import BatchesDone, BatchesReturned, WorkerLost
    from dovetail.streaming.board import Board
    from dovetail.streaming.fleet import Fleet
    from dovetail.streaming.lane import Lane
    from dovetail.streaming.losses import Losses
    from dovetail.streaming.messages import Message, Suspect
    from dovetail.streaming.progress import Progress
    from dovetail.streaming.restarts import Restarts
    from dovetail.streaming.workers import Worker

TUNE_EVERY = 32


class Results:
    """Takes messages off workers' hands, and passes on what they brought."""

    def __init__(self, board: Board, fleet: Fleet, progress: Progress, losses: Losses, restarts: Restarts) -> None:
        self.board = board
        self.fleet = fleet
        self.progress = progress
        self.losses = losses
        self.restarts = restarts

    def done(self, event: BatchesDone) -> None:
        worker = self.board.workers.get(event.worker)
        message = worker.messages.get(event.message) if worker is not None else None
        if worker is None or message is None:
            return
        board = self.board
        lane = board.lane_of[worker.unit]
        self._back_in_pool(lane, worker, message)
        calls = -(-message.items // message.batch_size)
        worker.batches += calls
        worker.busy_s += event.seconds
        lane.batches += calls
        lane.busy_s += event.seconds
        lane.crashes = 0
        if event.failures and message.input_lost and not message.epoch.dead:
            self.restarts.begin_again(message.epoch)  # what failed cannot be sent again
        if not message.epoch.dead:
            self._pass_on(lane, message, event, calls)
        board.dirty[lane.index] = True
        if lane.speeds.messages >= lane.tuned_at:
            lane.tuned_at = max(2 * lane.tuned_at, 1) if lane.tuned_at < TUNE_EVERY else lane.tuned_at + TUNE_EVERY
            tune(board, lane)
        limit = lane.work.recycle_batches
        if limit is not None and worker.batches >= limit:
            self.fleet.recycle(worker)
        self.fleet.gone_if_empty(worker)

    def _pass_on(self, lane: Lane, message: Message, event: BatchesDone, calls: int) -> None:
        """What it brought goes on, what failed is tried again, and the epoch is told what is settled."""
        epoch, failures = message.epoch, event.failures
        failed = sum(failure.stop - failure.start for failure in failures) if failures else 0
        given = self.progress.route(lane, epoch, event.segments, message.parts[0])
        size = message.size_bytes
        if given:
            given_bytes = sum([segment.size_bytes for segment in event.segments])
            lane.out_bytes = given_bytes if not lane.out_bytes else (3 * lane.out_bytes + given_bytes) // 4
            size = max(size, given_bytes)
        lane.item_bytes = (3 * lane.item_bytes + size / message.items) / 4 if lane.item_bytes else size / message.items
        if event.stages is not None:
            lane.count_stages(event.stages)
        settled = message.items - failed
        for failure in failures:
            settled += self.losses.raised(lane, message, failure, event.peak_bytes)
        if lane.grown:
            self.fleet.wants_replan = True
        lane.taken += settled
        lane.given += given
        epoch.pending[lane.index] -= settled
        if message.suspect is None:
            if message.items > failed:
                lane.speeds.add(message.items - failed, event.seconds, given)
            if not failures and lane.batch_size < lane.work.batch_size:
                self._passed(lane, calls)
        elif not failures:
            self._suspect_passed(lane, message.suspect)
        if not epoch.pending[lane.index] and epoch.closed:
            self.progress.settle(epoch, lane)

    def _back_in_pool(self, lane: Lane, worker: Worker, message: Message) -> None:
        """One message less in hand."""
        pool = lane.pool
        in_pool = not worker.exclusive
        if in_pool:
            pool.remove(worker)
        del worker.messages[message.id]
        if worker.exclusive and not worker.messages:
            worker.exclusive = False
            if lane.reserved is worker:
                lane.reserved = None
        if not worker.exclusive and worker.state is WorkerState.READY:
            pool.add(worker)
        lane.just_ended = True
        lane.in_flight -= message.items
        self.board.fewer_coming(lane, message.expected_bytes)
        for parent in lane.parents:
            if parent.blocked:
                self.board.dirty[parent.index] = True

    def _suspect_passed(self, lane: Lane, suspect: Suspect) -> None:
        if suspect.memory_bytes:
            lane.shape_before = None
        halves = suspect.halves
        if halves is None:
            return
        halves.passed += 1
        if halves.passed == 2 and halves.batch_size < lane.batch_size:
            text = f"{lane.name}: out of memory with {lane.batch_size} items per batch; from now on {halves.batch_size}"
            self._resize(lane, halves.batch_size, text)
            lane.passes_needed *= 2

    def _passed(self, lane: Lane, calls: int) -> None:
        """After many smaller batches a larger one is tried again: what did not fit may have been rare."""
        lane.passes += calls
        if lane.passes >= lane.passes_needed:
            larger = min(2 * lane.batch_size, lane.work.batch_size)
            self._resize(lane, larger, f"{lane.name}: {lane.passes} batches passed; {larger} items per batch again")

    def _resize(self, lane: Lane, batch_size: int, text: str) -> None:
        self.board.note("decision", text, unit=lane.name, batch_size=batch_size, was=lane.batch_size)
        lane.passes = 0
        lane.queue.resize(batch_size)
        lane.message_items = batch_size
        tune(self.board, lane)

    def returned(self, event: BatchesReturned) -> None:
        worker = self.board.workers.get(event.worker)
        message = worker.messages.get(event.message) if worker is not None else None
        if worker is None or message is None:
            return
        lane = self.board.lane_of[worker.unit]
        self._back_in_pool(lane, worker, message)
        if not message.epoch.dead:
            if message.input_lost or not self._all_there(message):
                self.restarts.begin_again(message.epoch)
            elif message.suspect is not None:
                lane.suspects.append(message.suspect)
            else:
                lane.queue.put_back(message.epoch.id, message.parts, self.board.now)
        self.board.dirty[lane.index] = True
        self.fleet.gone_if_empty(worker)

    def _all_there(self, message: Message) -> bool:
        knows = self.fleet.ledger.knows
        return all(not segment.node or knows(segment.node) for segment, _, _ in message.parts)

    def lost(self, event: WorkerLost) -> None:
        worker = self.board.workers.get(event.worker)
        if worker is None:
            return
        lane = self.board.lane_of[worker.unit]
        lane.pool.remove(worker)
        open_epochs = [message.epoch for message in worker.messages.values()]
        torn = [message.epoch for message in worker.messages.values() if message.input_lost]
        blamed = self.losses.died(lane, worker, event)
        for epoch in dict.fromkeys(open_epochs):
            if not epoch.dead and not epoch.pending[lane.index]:
                self.progress.settle(epoch, lane)
        self.fleet.lost(worker, event, blamed=blamed)
        for epoch in dict.fromkeys(torn):
            if epoch.id in self.board.epochs and not self.board.ending:
                self.restarts.begin_again(epoch)
