"""Handling of messages that finished, were returned, or were lost with their worker."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from dovetail.control.events import JOINED
from dovetail.streaming.flow_control import regrown_batch_size

if TYPE_CHECKING:
    from dovetail.control.events import BatchesDone, BatchesReturned, WorkerLost, WorkerStopped
    from dovetail.streaming.broken_workers import BrokenWorkers
    from dovetail.streaming.epochs import EpochRestarter, EpochTracker
    from dovetail.streaming.fleet import Fleet
    from dovetail.streaming.retry import FailureHandler
    from dovetail.streaming.state import StreamState, UnitState
    from dovetail.streaming.worker_pool import Message, Suspect, Worker


class ResultHandler:
    """Removes messages from workers, passes their output on, and has failed items retried."""

    def __init__(
        self,
        state: StreamState,
        fleet: Fleet,
        epoch_tracker: EpochTracker,
        failure_handler: FailureHandler,
        epoch_restarter: EpochRestarter,
        broken_workers: BrokenWorkers,
    ) -> None:
        self.state = state
        self.fleet = fleet
        self.epoch_tracker = epoch_tracker
        self.failure_handler = failure_handler
        self.epoch_restarter = epoch_restarter
        self.broken_workers = broken_workers

    def on_batches_done(self, event: BatchesDone) -> None:
        state = self.state
        worker = state.workers.get(event.worker)
        message = worker.messages.get(event.message) if worker is not None else None
        if worker is None or message is None:
            return
        unit = state.units_by_name[worker.unit]
        unit.take_back(worker, message)
        calls = -(-message.items // message.batch_size)
        worker.count_batches(calls, event.seconds)
        unit.count_batches(calls, event.seconds)
        if event.failures and message.input_lost:
            self._restart_epochs(message)  # failed items cannot be sent again without their input
        if message.more_epochs:
            self._join_epochs(unit, message, event)
        if not message.is_discarded:
            self._route_output(unit, worker, message, event, calls)
        self.broken_workers.on_message_ended(message)
        if unit.throughput.messages >= unit.next_tuning_messages:
            unit.tune_messages_and_schedule()
        limit = unit.spec.recycle_batches
        if limit is not None and worker.batches >= limit:
            self.fleet.recycle(worker)
        self.fleet.stop_if_drained(worker)

    def _restart_epochs(self, message: Message) -> None:
        for epoch in message.epochs:
            if not epoch.discarded:
                self.epoch_restarter.restart_epoch(epoch)

    def _join_epochs(self, unit: UnitState, message: Message, event: BatchesDone) -> None:
        """If a call with items of several epochs returned another number of items, it is unknown which of them belong
        to which epoch: the epochs are delivered together, and restart together if one of them restarts."""
        if self.state.options.eager or not event.segments:
            return
        if unit.joins_epochs or JOINED in (event.epoch_segments or ()):
            if any(epoch.discarded for epoch in message.epochs):
                self._restart_epochs(message)
            for epoch in message.epochs[1:]:
                message.epoch.join(epoch)

    def _route_output(self, unit: UnitState, worker: Worker, message: Message, event: BatchesDone, calls: int) -> None:
        """Pass the output on, retry what failed, and settle the rest in its epoch."""
        failures = event.failures
        failed = sum(failure.stop - failure.start for failure in failures) if failures else 0
        if message.more_epochs:
            given = self._route_by_epoch(unit, message, event)
        else:
            given = self.epoch_tracker.route(unit, message.epoch, event.segments, message.parts[0])
            message.epoch.settle(unit.index, message.items - failed)
        unit.record_counts(calls, same=_has_same_counts(event, message.items - failed, given))
        settled = message.items - failed
        if failures:
            settled += self.broken_workers.on_calls_failed(unit, worker, message, failures, event.peak_bytes)
        elif unit.failures.awaits_success or message.suspect is not None:
            self.broken_workers.on_message_passed(unit, worker, message)
        output_bytes = sum([segment.size_bytes for segment in event.segments]) if given else None
        if event.stages is not None:
            unit.count_stages(event.stages)
        if unit.shape_changed:
            self.state.request_replan(f"memory per worker of {unit.name} changed")
        unit.record_output(message.items, message.size_bytes, output_bytes, settled, given)
        if message.suspect is None:
            if message.items > failed:
                unit.throughput.add(message.items - failed, event.seconds, given)
            if not failures and unit.batch_size < unit.spec.batch_size:
                self._on_small_batches_passed(unit, calls)
        elif not failures:
            self._on_suspect_passed(unit, message.suspect)
        for epoch in message.epochs:
            if epoch.closed and not epoch.pending[unit.index]:
                self.epoch_tracker.propagate_completion(epoch, unit)

    def _route_by_epoch(self, unit: UnitState, message: Message, event: BatchesDone) -> int:
        """Pass the output on and settle the items that did not fail, each in its epoch. Returns the number of items
        passed on."""
        counts = event.epoch_segments or [0] * len(message.epochs)
        segments = iter(event.segments)
        own = {
            epoch: list(islice(segments, max(0, count))) for epoch, count in zip(message.epochs, counts, strict=True)
        }
        given = 0
        for start, part in message.by_epoch():
            stop = start + part.items
            failed = sum(max(0, min(one.stop, stop) - max(one.start, start)) for one in event.failures)
            given += self.epoch_tracker.route(unit, part.epoch, own[part.epoch], part.parts[0])
            part.epoch.settle(unit.index, part.items - failed)
        return given

    def _on_suspect_passed(self, unit: UnitState, suspect: Suspect) -> None:
        if suspect.memory_bytes:
            unit.confirm_growth()
        halved = suspect.halved_batch
        if halved is not None and halved.count_passed() and halved.batch_size < unit.batch_size:
            text = (
                f"{unit.name}: out of memory with {unit.batch_size} items per batch; "
                f"batch size reduced to {halved.batch_size}"
            )
            self._resize_batch(unit, halved.batch_size, text)
            unit.delay_regrow()

    def _on_small_batches_passed(self, unit: UnitState, calls: int) -> None:
        """After many small batches try a larger one: the batch that did not fit may have been rare."""
        if unit.count_small_batches(calls):
            larger = regrown_batch_size(unit.batch_size, unit.spec.batch_size)
            text = (
                f"{unit.name}: {unit.batches_since_shrink} batches succeeded with {unit.batch_size} items; "
                f"batch size raised to {larger}"
            )
            self._resize_batch(unit, larger, text)

    def _resize_batch(self, unit: UnitState, batch_size: int, text: str) -> None:
        self.state.add_note("decision", text, unit=unit.name, batch_size=batch_size, was=unit.batch_size)
        unit.resize_batch(batch_size)

    def on_batches_returned(self, event: BatchesReturned) -> None:
        worker = self.state.workers.get(event.worker)
        message = worker.messages.get(event.message) if worker is not None else None
        if worker is None or message is None:
            return
        unit = self.state.units_by_name[worker.unit]
        unit.take_back(worker, message)
        if not message.is_discarded:
            if message.input_lost or not self._has_all_input(message):
                self._restart_epochs(message)
            else:
                self.failure_handler.put_back(unit, message)
        self.fleet.stop_if_drained(worker)

    def _has_all_input(self, message: Message) -> bool:
        has_node = self.fleet.ledger.has_node
        return all(not segment.node or has_node(segment.node) for segment, _, _ in message.parts)

    def on_worker_stopped(self, event: WorkerStopped) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is not None and not self.state.is_ending:
            self.broken_workers.on_worker_gone(worker, died=False)
        self.fleet.on_worker_stopped(event)

    def on_worker_lost(self, event: WorkerLost) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is None:
            return
        unit = self.state.units_by_name[worker.unit]
        unit.pool.remove(worker)
        open_epochs = [epoch for message in worker.messages.values() for epoch in message.epochs]
        torn = [epoch for message in worker.messages.values() if message.input_lost for epoch in message.epochs]
        messages = list(worker.messages.values())
        blamed = self.failure_handler.on_worker_died(unit, worker, event)
        for message in messages:
            if message.suspect not in unit.suspects:
                self.broken_workers.on_message_ended(message)
        self.broken_workers.on_worker_gone(worker, died=True)
        for epoch in dict.fromkeys(open_epochs):
            if not epoch.discarded and not epoch.pending[unit.index]:
                self.epoch_tracker.propagate_completion(epoch, unit)
        self.fleet.on_worker_lost(worker, event, blamed=blamed)
        for epoch in dict.fromkeys(torn):
            if epoch.id in self.state.epochs and not self.state.is_ending:
                self.epoch_restarter.restart_epoch(epoch)


def _has_same_counts(event: BatchesDone, taken: int, given: int) -> bool:
    """Whether every stage returned as many items as it got, apart from those that failed, and in their order as far as
    that is known."""
    if given != taken or JOINED in (event.epoch_segments or ()):
        return False
    return all(items_in == items_out for items_in, items_out, _ in event.stages or ())
