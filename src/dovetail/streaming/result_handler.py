"""Handling of messages that finished, were returned, or were lost with their worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState
from dovetail.streaming.dispatch import tune_messages

if TYPE_CHECKING:
    from dovetail.control.events import BatchesDone, BatchesReturned, WorkerLost
    from dovetail.streaming.epochs import EpochRestarter, EpochTracker
    from dovetail.streaming.fleet import Fleet
    from dovetail.streaming.retry import FailureHandler
    from dovetail.streaming.state import StreamState, UnitState
    from dovetail.streaming.worker_pool import Message, Suspect, Worker

MESSAGES_PER_TUNING = 32


class ResultHandler:
    """Takes messages off workers' hands, and passes on what they brought."""

    def __init__(
        self, board: StreamState, fleet: Fleet, progress: EpochTracker, losses: FailureHandler, restarts: EpochRestarter
    ) -> None:
        self.state = board
        self.fleet = fleet
        self.epoch_tracker = progress
        self.failure_handler = losses
        self.epoch_restarter = restarts

    def on_batches_done(self, event: BatchesDone) -> None:
        worker = self.state.workers.get(event.worker)
        message = worker.messages.get(event.message) if worker is not None else None
        if worker is None or message is None:
            return
        board = self.state
        lane = board.units_by_name[worker.unit]
        self._return_to_pool(lane, worker, message)
        calls = -(-message.items // message.batch_size)
        worker.batches += calls
        worker.busy_s += event.seconds
        lane.batches += calls
        lane.busy_s += event.seconds
        lane.idle_deaths = 0
        if event.failures and message.input_lost and not message.epoch.discarded:
            self.epoch_restarter.restart_epoch(message.epoch)  # what failed cannot be sent again
        if not message.epoch.discarded:
            self._route_output(lane, message, event, calls)
        board.dirty[lane.index] = True
        if lane.throughput.messages >= lane.next_tuning_messages:
            lane.next_tuning_messages = (
                max(2 * lane.next_tuning_messages, 1)
                if lane.next_tuning_messages < MESSAGES_PER_TUNING
                else lane.next_tuning_messages + MESSAGES_PER_TUNING
            )
            tune_messages(board, lane)
        limit = lane.spec.recycle_batches
        if limit is not None and worker.batches >= limit:
            self.fleet.recycle(worker)
        self.fleet.stop_if_drained(worker)

    def _route_output(self, lane: UnitState, message: Message, event: BatchesDone, calls: int) -> None:
        """What it brought goes on, what failed is tried again, and the epoch is told what is settled."""
        epoch, failures = message.epoch, event.failures
        failed = sum(failure.stop - failure.start for failure in failures) if failures else 0
        given = self.epoch_tracker.route(lane, epoch, event.segments, message.parts[0])
        size = message.size_bytes
        if given:
            given_bytes = sum([segment.size_bytes for segment in event.segments])
            lane.output_bytes_per_message = (
                given_bytes
                if not lane.output_bytes_per_message
                else (3 * lane.output_bytes_per_message + given_bytes) // 4
            )
            size = max(size, given_bytes)
        lane.bytes_per_item = (
            (3 * lane.bytes_per_item + size / message.items) / 4 if lane.bytes_per_item else size / message.items
        )
        if event.stages is not None:
            lane.count_stages(event.stages)
        settled = message.items - failed
        for failure in failures:
            settled += self.failure_handler.on_call_failed(lane, message, failure, event.peak_bytes)
        if lane.shape_changed:
            self.fleet.replan_requested = True
        lane.items_taken += settled
        lane.items_given += given
        epoch.pending[lane.index] -= settled
        if message.suspect is None:
            if message.items > failed:
                lane.throughput.add(message.items - failed, event.seconds, given)
            if not failures and lane.batch_size < lane.spec.batch_size:
                self._on_batches_passed(lane, calls)
        elif not failures:
            self._on_suspect_passed(lane, message.suspect)
        if not epoch.pending[lane.index] and epoch.closed:
            self.epoch_tracker.propagate_completion(epoch, lane)

    def _return_to_pool(self, lane: UnitState, worker: Worker, message: Message) -> None:
        """One message less in hand."""
        pool = lane.pool
        in_pool = not worker.exclusive
        if in_pool:
            pool.remove(worker)
        del worker.messages[message.id]
        if worker.exclusive and not worker.messages:
            worker.exclusive = False
            if lane.quarantine_worker is worker:
                lane.quarantine_worker = None
        if not worker.exclusive and worker.state is WorkerState.READY:
            pool.add(worker)
        lane.message_just_ended = True
        lane.items_in_flight -= message.items
        self.state.release_incoming(lane, message.expected_bytes)
        for parent in lane.parents:
            if parent.blocked:
                self.state.dirty[parent.index] = True

    def _on_suspect_passed(self, lane: UnitState, suspect: Suspect) -> None:
        if suspect.memory_bytes:
            lane.shape_before_growth = None
        halves = suspect.halved_batch
        if halves is None:
            return
        halves.passed += 1
        if halves.passed == 2 and halves.batch_size < lane.batch_size:
            text = f"{lane.name}: out of memory with {lane.batch_size} items per batch; from now on {halves.batch_size}"
            self._resize_batch(lane, halves.batch_size, text)
            lane.batches_before_regrow *= 2

    def _on_batches_passed(self, lane: UnitState, calls: int) -> None:
        """After many smaller batches a larger one is tried again: what did not fit may have been rare."""
        lane.batches_since_shrink += calls
        if lane.batches_since_shrink >= lane.batches_before_regrow:
            larger = min(2 * lane.batch_size, lane.spec.batch_size)
            self._resize_batch(
                lane, larger, f"{lane.name}: {lane.batches_since_shrink} batches passed; {larger} items per batch again"
            )

    def _resize_batch(self, lane: UnitState, batch_size: int, text: str) -> None:
        self.state.add_note("decision", text, unit=lane.name, batch_size=batch_size, was=lane.batch_size)
        lane.batches_since_shrink = 0
        lane.queue.resize(batch_size)
        lane.message_items = batch_size
        tune_messages(self.state, lane)

    def on_batches_returned(self, event: BatchesReturned) -> None:
        worker = self.state.workers.get(event.worker)
        message = worker.messages.get(event.message) if worker is not None else None
        if worker is None or message is None:
            return
        lane = self.state.units_by_name[worker.unit]
        self._return_to_pool(lane, worker, message)
        if not message.epoch.discarded:
            if message.input_lost or not self._has_all_input(message):
                self.epoch_restarter.restart_epoch(message.epoch)
            elif message.suspect is not None:
                lane.suspects.append(message.suspect)
            else:
                lane.queue.put_back(message.epoch.id, message.parts, self.state.now)
        self.state.dirty[lane.index] = True
        self.fleet.stop_if_drained(worker)

    def _has_all_input(self, message: Message) -> bool:
        knows = self.fleet.ledger.has_node
        return all(not segment.node or knows(segment.node) for segment, _, _ in message.parts)

    def on_worker_lost(self, event: WorkerLost) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is None:
            return
        lane = self.state.units_by_name[worker.unit]
        lane.pool.remove(worker)
        open_epochs = [message.epoch for message in worker.messages.values()]
        torn = [message.epoch for message in worker.messages.values() if message.input_lost]
        blamed = self.failure_handler.on_worker_died(lane, worker, event)
        for epoch in dict.fromkeys(open_epochs):
            if not epoch.discarded and not epoch.pending[lane.index]:
                self.epoch_tracker.propagate_completion(epoch, lane)
        self.fleet.on_worker_lost(worker, event, blamed=blamed)
        for epoch in dict.fromkeys(torn):
            if epoch.id in self.state.epochs and not self.state.is_ending:
                self.epoch_restarter.restart_epoch(epoch)
