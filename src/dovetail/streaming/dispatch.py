"""Dispatch of messages to workers, downstream units first, limited by backpressure.

The limit applies to items that wait, not to items in flight: each worker of a parent may produce one more message, or
units with large messages would take turns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import Cancel, RunBatches, StopWorker
from dovetail.control.interruption_grace import interruption_grace_s
from dovetail.control.lifecycle import WorkerState
from dovetail.control.payload import total_bytes
from dovetail.streaming.epochs import can_join
from dovetail.streaming.worker_pool import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.control.payload import SegmentSlice
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.state import StreamState, UnitState
    from dovetail.streaming.worker_pool import Suspect, Worker

UNLIMITED_ITEMS = 1 << 40
MAX_OUTPUT_SEGMENT_ITEMS = 1 << 16
"""Items per segment of results that leave the run, which the driver loads as a whole."""
SPOOL_SEGMENT_ITEMS = 256
"""Items per segment of a spool: the epochs of a later wave consist of whole segments, and a barrier returns all at
once."""


def dispatch_ready(state: StreamState) -> None:
    """Send what can be sent, in one pass over the units that changed, last stage first."""
    for unit in reversed(state.units):
        if unit.dirty:
            _dispatch_unit(state, unit)


def _dispatch_unit(state: StreamState, unit: UnitState) -> None:
    unit.begin_dispatch()
    if unit.suspects:
        _dispatch_suspects(state, unit)
    if state.options.max_wait_s is not None and unit.queue.items and not unit.spec.barrier:
        _flush_stale(state, unit, state.options.max_wait_s)
    pool = unit.pool
    queue = unit.queue
    ready = queue.ready
    sent = False
    while pool.free_count and (ready or queue.has_mixed_batch):
        if unit.children and not unit.has_space_downstream():
            unit.mark_blocked()
            break
        if queue.tails and queue.has_mixed_batch:
            _send_mixed_batch(state, unit)
            sent = True
            continue
        number = min(ready) if len(ready) > 1 else next(iter(ready))
        waiting = ready[number]
        worker = pool.least_loaded(waiting.parts[0][0].node)
        assert worker is not None, f"{unit} counts free workers and has none"
        items = (
            waiting.items
            if unit.spec.barrier
            else _next_message_items(unit, waiting.items, queue.can_send_partial(waiting))
        )
        items = queue.sendable_items(number, items)
        parts, size = queue.take(number, items)
        _send_message(state, unit, worker, state.epochs[number], parts, items, size, None)
        sent = True
    unit.end_dispatch(sent=sent)
    if unit.input_complete and pool.by_load[0] and not ready:
        _steal_prefetched(state, unit)


def _send_mixed_batch(state: StreamState, unit: UnitState) -> None:
    """Send a batch that begins with the tails of epochs, oldest first, and is filled with items of other epochs."""
    queue = unit.queue
    others = [number for number, waiting in queue.by_epoch.items() if waiting.items and number not in queue.tails]
    parts: list[SegmentSlice] = []
    epochs: list[tuple[int, Epoch]] = []
    items = size = 0
    can_mix_all = state.options.eager or not unit.changes_counts
    small_items = _small_epoch_items(state, unit)
    for number in (*sorted(queue.tails), *sorted(others)):
        epoch = state.epochs[number]
        if not (can_mix_all or can_join([other for _, other in epochs], epoch, small_items)):
            continue  # the batch stays partial, because its epochs are delivered together
        count = min(queue.batch_size - items, queue.by_epoch[number].items)
        taken, taken_bytes = queue.take(number, count)
        epochs.append((items, epoch))
        parts += taken
        items += count
        size += taken_bytes
        if items == queue.batch_size:
            break
    worker = unit.pool.least_loaded(parts[0][0].node)
    assert worker is not None, f"{unit} counts free workers and has none"
    _send_message(state, unit, worker, epochs[0][1], parts, items, size, None, tuple(epochs[1:]))


def _small_epoch_items(state: StreamState, unit: UnitState) -> int:
    """Input items of epochs that may be joined in any case, because epochs are small at the beginning: as much as the
    unit processes in the usual time of an epoch, or some batches while its speed is unknown."""
    seconds = unit.throughput.seconds_per_item
    items = float(state.options.target_epoch_batches * unit.batch_size)
    if seconds:
        items = state.options.target_epoch_s * unit.total_slots / seconds
    received = unit.items_taken + unit.items_in_flight + unit.queue.items
    input_per_item = 1.0 if state.wave else max(1.0, state.items_read / max(1, received))
    return int(min(items * input_per_item, UNLIMITED_ITEMS))


def _flush_stale(state: StreamState, unit: UnitState, max_wait_s: float) -> None:
    """Release incomplete batches that have waited long enough, and set a timer for the next one."""
    queue = unit.queue
    next_at = None
    for number, waiting in queue.by_epoch.items():
        if waiting.items and number not in queue.ready:
            due = waiting.arrival_times[0] + max_wait_s
            if due <= state.now:
                queue.flush_stale(number)
            elif next_at is None or due < next_at:
                next_at = due
    if next_at is not None and (unit.flush_at is None or next_at < unit.flush_at):
        unit.set_flush_timer(next_at)
        state.call_at(next_at, unit.on_flush_due)


def _next_message_items(unit: UnitState, waiting: int, flush: bool) -> int:
    """Items of the next message: whole batches, and few enough that every free worker gets some."""
    batch = unit.queue.batch_size
    items = unit.message_items
    if items > batch and unit.pool.free_count > 1:
        share = -(-waiting // unit.pool.free_count)
        items = min(items, -(-share // batch) * batch)
    if items >= waiting:
        return waiting if flush else waiting - waiting % batch
    return items


def _send_message(
    state: StreamState,
    unit: UnitState,
    worker: Worker,
    epoch: Epoch,
    parts: list[SegmentSlice],
    items: int,
    size: int,
    suspect: Suspect | None,
    more_epochs: tuple[tuple[int, Epoch], ...] = (),
) -> None:
    spec = unit.spec
    batch_size = suspect.batch_size if suspect is not None else items if spec.barrier else unit.queue.batch_size
    number = state.next_id()
    expected = unit.output_bytes_per_message if unit.children else 0
    message = Message(number, epoch, parts, items, size, batch_size, state.now, suspect, expected)
    starts: tuple[int, ...] = ()
    if more_epochs:
        message.set_more_epochs(more_epochs)
        starts = tuple(start for start, _ in more_epochs)
        for one in message.epochs:
            one.mark_mixed(unit.index)
    unit.send(worker, message)
    epoch.mark_begun(unit.index)
    limit = MAX_OUTPUT_SEGMENT_ITEMS
    spool = bool(unit.later_consumers)
    for child in unit.children:
        limit = min(limit, child.message_items)
        spool = spool or child.waits_for_seats
    if spool:
        limit = min(limit, SPOOL_SEGMENT_ITEMS)
    state.emit(RunBatches(number, worker.id, spec.hosted.name, parts, items, batch_size, limit, spool, starts))
    if spec.timeout_s is not None:
        message.set_timeout(state.now + _time_limit_s(unit, spec.timeout_s, items, batch_size))
        if not worker.has_timeout_timer:
            worker.set_timeout_timer(True)
            state.call_at(message.timeout_at, partial(_on_timeout, state, worker))


def _time_limit_s(unit: UnitState, timeout_s: float, items: int, batch_size: int) -> float:
    """Time limit of a message whose calls each have a timeout.

    The time of a single call among several is unknown, so the limit of the message can exceed one timeout. A message
    that is stopped for it runs alone next time, call by call, and then exactly the timeout applies.
    """
    retry_s = unit.spec.retry_s
    calls = -(-items // batch_size)
    grace_s = interruption_grace_s(timeout_s) + unit.options.hop_s
    if calls == 1 or retry_s:
        return (timeout_s + retry_s) * calls + grace_s
    usual_s = items * (unit.throughput.seconds_per_item or 0.0)
    return min(2 * timeout_s + 10 * usual_s, timeout_s * calls) + grace_s


def _dispatch_suspects(state: StreamState, unit: UnitState) -> None:
    """Send each suspect to an idle worker, alone. If none is idle, one worker gets no further messages until it is."""
    for _ in range(len(unit.suspects)):
        suspect = unit.suspects[0]
        worker = _idle_worker_for(unit, suspect)
        if worker is None:
            if unit.quarantine_worker is None and (busy := _busy_worker_for(unit, suspect)) is not None:
                unit.quarantine(busy)
            if suspect.memory_bytes or suspect.needs_sound_worker:
                unit.rotate_suspects()  # other suspects need not wait for such a worker
                continue
            return
        unit.take_suspect()
        size = total_bytes(suspect.parts)
        _send_message(state, unit, worker, suspect.epoch, suspect.parts, suspect.items, size, suspect)


def _idle_worker_for(unit: UnitState, suspect: Suspect) -> Worker | None:
    """A worker without messages. The first retry prefers another worker than the one where the items failed, in case
    that one is broken; later ones do not, in case the items break workers."""
    if suspect.memory_bytes:
        return _large_worker(unit.pool.by_load[:1], suspect)
    if suspect.needs_sound_worker:
        return _sound_worker(unit, suspect, unit.pool.idle_workers())
    first = unit.pool.find_idle()
    if not suspect.failed_on or first is None:
        return first
    if suspect.failed_attempts > 1:
        before = unit.workers.get(suspect.failed_on)
        return before if before is not None and unit.pool.is_idle(before) else first
    return next((worker for worker in unit.pool.idle_workers() if worker.id != suspect.failed_on), first)


def _sound_worker(unit: UnitState, suspect: Suspect, workers: Iterable[Worker]) -> Worker | None:
    """The first worker that can show what is wrong with items. Items that may break workers wait for the end of a
    trial, which needs sound workers, too."""
    if suspect.broke_worker and unit.failures.trial is not None:
        return None
    waits = unit.waits_for_sound_worker(suspect)
    return next((worker for worker in workers if not waits or unit.is_sound(worker)), None)


def _busy_worker_for(unit: UnitState, suspect: Suspect) -> Worker | None:
    """The worker with the fewest messages that has the memory that the suspect needs."""
    pool = unit.pool
    if suspect.memory_bytes:
        return _large_worker(pool.by_load[1 : pool.max_messages], suspect)
    if suspect.needs_sound_worker:
        busy = (
            worker
            for by_node in pool.by_load[1 : pool.max_messages]
            for on_node in by_node.values()
            for worker in on_node.values()
        )
        return _sound_worker(unit, suspect, busy)
    worker = pool.least_loaded("")
    return worker if worker is not None and worker.messages else None


def _large_worker(by_load: Iterable[dict[str, dict[int, Worker]]], suspect: Suspect) -> Worker | None:
    """The first worker with the memory that the suspect needs."""
    for by_node in by_load:
        for on_node in by_node.values():
            for worker in on_node.values():
                if worker.seats[0].memory_bytes >= suspect.memory_bytes:
                    return worker
    return None


def _steal_prefetched(state: StreamState, unit: UnitState) -> None:
    """At the end of the input: take prefetched messages back, so that idle workers can run them."""
    idle = sum(len(on_node) for on_node in unit.pool.by_load[0].values())
    for worker in unit.pool.with_prefetched():
        last = next(reversed(worker.messages.values()))
        if not last.cancelled and last.suspect is None:
            last.mark_cancelled()
            state.emit(Cancel(last.id, worker.id))
        idle -= 1
        if not idle:
            return


def _on_timeout(state: StreamState, worker: Worker) -> None:
    """Stop a worker whose batch exceeded its timeout; the batch becomes a suspect. There is one timer per worker."""
    worker.set_timeout_timer(False)
    if not worker.messages or worker.state is WorkerState.STOPPING or worker.id not in state.workers:
        return
    due = min(message.timeout_at for message in worker.messages.values())
    if due > state.now:
        worker.set_timeout_timer(True)
        state.call_at(due, partial(_on_timeout, state, worker))
        return
    unit = state.units_by_name[worker.unit]
    unit.pool.remove(worker)
    replaced = worker.will_be_replaced or worker.state is WorkerState.READY
    reason = f"a batch took longer than its timeout of {unit.spec.timeout_s:g} s"
    worker.transition_to(WorkerState.STOPPING, reason)
    worker.set_will_be_replaced(replaced)
    state.add_note("worker", f"worker {worker.id} of {unit.name}: {reason}", worker=worker.id, unit=unit.name)
    state.emit(StopWorker(worker.id, drain=False, reason=reason))
