"""Dispatch of messages to workers, downstream units first, limited by backpressure.

What waits is limited, not what is on its way: each worker of the parents may bring one more message, or those with
large messages would take turns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import Cancel, RunBatches, StopWorker
from dovetail.control.lifecycle import WorkerState
from dovetail.control.payload import total_bytes
from dovetail.pipeline.durations import interruption_grace_s
from dovetail.streaming.worker_pool import Message

if TYPE_CHECKING:
    from dovetail.control.payload import SegmentSlice
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.state import StreamState, UnitState
    from dovetail.streaming.worker_pool import Suspect, Worker


def has_space(board: StreamState, lane: UnitState) -> bool:
    """Whether a parent may send one more message whose output will wait here."""
    if lane.waits_for_seats:
        return True
    queue = lane.queue
    room = min(
        board.options.byte_budget // len(board.units), max(board.options.max_queue_bytes, lane.guaranteed_queue_bytes)
    )
    if queue.items < lane.max_queued_items and queue.bytes + lane.incoming_bytes < room:
        return True
    # When nothing happens there, more must come: what waits may be the ends of several epochs, of which no batch can be
    # made, or a single batch may be larger than the budget.
    return not (lane.has_work or lane.items_in_flight or lane.incoming_messages)


def has_space_downstream(board: StreamState, lane: UnitState) -> bool:
    """Whether there is room in front of everyone who gets this lane's output."""
    for child in lane.children:  # noqa: SIM110 - a loop costs half of what all() does, and this runs per message
        if not has_space(board, child):
            return False
    return True


def update_queue_limit(board: StreamState, lane: UnitState) -> None:
    """How much may wait: enough that no worker of the lane runs dry, little enough to stay fresh; and what its parents
    bring in two rounds, because one message of theirs may be many items."""
    slots = max(1, len(lane.workers)) * lane.pool.max_messages
    before = lane.max_queued_items
    brought = sum(
        max(1, len(parent.workers)) * parent.pool.max_messages * parent.message_items * parent.throughput.returns
        for parent in lane.parents
    )
    messages = max(board.options.queued_messages_per_slot * slots, board.options.min_queued_messages)
    lane.max_queued_items = max(
        2 * lane.batch_size, int(messages * lane.message_items), int(2 * brought) if brought > slots else 0
    )
    lane.guaranteed_queue_bytes = int(2 * slots * lane.message_items * lane.bytes_per_item)
    if lane.max_queued_items > before:
        board.mark_dirty(lane)


UNLIMITED_ITEMS = 1 << 40
SPOOL_SEGMENT_ITEMS = 256
"""Items per segment of a spool: the epochs of a later wave are made of whole ones, and a barrier gives all at once."""
MIN_HOPS_PER_MESSAGE = 20
"""A message is at least so many times as much work as its way to the worker takes."""
PREFETCH_HOP_SHARE = 0.01
"""A message in advance is worth it when the way to the worker costs more than this share of the work."""


def dispatch_ready(board: StreamState) -> None:
    """One pass over the lanes that could send something, last stage first."""
    dirty = board.dirty
    lanes = board.units
    for index in range(len(lanes) - 1, -1, -1):
        if dirty[index]:
            dirty[index] = False
            _dispatch_unit(board, lanes[index])


def _dispatch_unit(board: StreamState, lane: UnitState) -> None:
    if lane.suspects:
        _dispatch_suspects(board, lane)
    if board.options.max_wait_s is not None and lane.queue.items and not lane.spec.barrier:
        _flush_stale(board, lane, board.options.max_wait_s)
    pool = lane.pool
    queue = lane.queue
    ready = queue.ready
    lane.blocked = False
    sent = False
    while ready and pool.free_count:
        if lane.children and not has_space_downstream(board, lane):
            lane.blocked = True
            break
        number = min(ready) if len(ready) > 1 else next(iter(ready))
        waiting = ready[number]
        worker = pool.least_loaded(waiting.parts[0][0].node)
        assert worker is not None, f"{lane} counts free workers and has none"
        items = (
            waiting.items if lane.spec.barrier else _next_message_items(lane, waiting.items, waiting.can_send_partial)
        )
        items = queue.sendable_items(number, items)
        parts, size = queue.take(number, items)
        pool.remove(worker)
        _send_message(board, lane, worker, board.epochs[number], parts, items, size, None)
        pool.add(worker)
        sent = True
    if lane.message_just_ended:
        lane.message_just_ended = False
        if pool.by_load[0]:
            lane.starved_ends += 1
        else:
            lane.saturated_ends += 1
    if sent:
        for parent in lane.parents:
            if parent.blocked:
                board.dirty[parent.index] = True
    if lane.input_complete and pool.by_load[0] and not ready:
        _steal_prefetched(board, lane)


def _flush_stale(board: StreamState, lane: UnitState, max_wait_s: float) -> None:
    """Batches that are not full go when they have waited long enough; for the others somebody looks again then."""
    queue = lane.queue
    next_at = None
    for number, waiting in queue.by_epoch.items():
        if waiting.items and number not in queue.ready:
            due = waiting.arrival_times[0] + max_wait_s
            if due <= board.now:
                queue.flush_stale(number)
            elif next_at is None or due < next_at:
                next_at = due
    if next_at is not None and (lane.flush_at is None or next_at < lane.flush_at):
        lane.flush_at = next_at
        board.call_at(next_at, partial(_on_flush_due, board, lane))


def _on_flush_due(board: StreamState, lane: UnitState) -> None:
    lane.flush_at = None
    board.mark_dirty(lane)


def _next_message_items(lane: UnitState, waiting: int, flush: bool) -> int:
    """Items of the next message: whole batches, and not so many that other free workers get none."""
    batch = lane.queue.batch_size
    items = lane.message_items
    if items > batch and lane.pool.free_count > 1:
        share = -(-waiting // lane.pool.free_count)
        items = min(items, -(-share // batch) * batch)
    if items >= waiting:
        return waiting if flush else waiting - waiting % batch
    return items


def _send_message(
    board: StreamState,
    lane: UnitState,
    worker: Worker,
    epoch: Epoch,
    parts: list[SegmentSlice],
    items: int,
    size: int,
    suspect: Suspect | None,
) -> None:
    batch_size = suspect.batch_size if suspect is not None else items if lane.spec.barrier else lane.queue.batch_size
    number = board.next_id()
    message = worker.messages[number] = Message(number, epoch, parts, items, size, batch_size, board.now, suspect)
    lane.items_in_flight += items
    limit = UNLIMITED_ITEMS
    spool = bool(lane.later_consumers)
    if lane.children:
        expected = message.expected_bytes = lane.output_bytes_per_message
        for child in lane.children:
            child.incoming_messages += 1
            child.incoming_bytes += expected
            limit = min(limit, child.message_items)
            spool = spool or child.waits_for_seats
    if spool:
        limit = min(limit, SPOOL_SEGMENT_ITEMS)
    board.commands.append(RunBatches(number, worker.id, lane.spec.hosted.name, parts, items, batch_size, limit, spool))
    if lane.spec.timeout_s is not None:
        message.deadline_at = board.now + _time_limit_s(board, lane, items, batch_size)
        if not worker.has_deadline_timer:
            worker.has_deadline_timer = True
            board.call_at(message.deadline_at, partial(_on_deadline, board, worker))


def _time_limit_s(board: StreamState, lane: UnitState, items: int, batch_size: int) -> float:
    """How long a message may take when every call has a timeout.

    Of several calls only a sum is known: that may be somewhat more than one timeout. What is stopped for it runs
    alone next time, and then exactly the timeout counts.
    """
    timeout_s, retry_s = lane.spec.timeout_s or 0.0, lane.spec.retry_s
    calls = -(-items // batch_size)
    grace_s = interruption_grace_s(timeout_s) + board.options.hop_s
    if calls == 1 or retry_s:
        return (timeout_s + retry_s) * calls + grace_s
    usual_s = items * (lane.throughput.seconds_per_item or 0.0)
    return min(2 * timeout_s + 10 * usual_s, timeout_s * calls) + grace_s


def _dispatch_suspects(board: StreamState, lane: UnitState) -> None:
    """Each alone on a worker that does nothing else meanwhile. If none is idle, one gets nothing new until it is."""
    pool = lane.pool
    for _ in range(len(lane.suspects)):
        suspect = lane.suspects[0]
        worker = _idle_worker_for(lane, suspect)
        if worker is None:
            busy = pool.least_loaded("")
            if busy is not None and lane.quarantine_worker is None and busy.messages:
                pool.remove(busy)
                busy.exclusive = True
                lane.quarantine_worker = busy
            if suspect.memory_bytes:
                lane.suspects.rotate(-1)  # others need not wait for the larger worker
                continue
            return
        lane.suspects.popleft()
        pool.remove(worker)
        worker.exclusive = True
        _send_message(
            board, lane, worker, suspect.epoch, suspect.parts, suspect.items, total_bytes(suspect.parts), suspect
        )


def _idle_worker_for(lane: UnitState, suspect: Suspect) -> Worker | None:
    if not suspect.memory_bytes:
        return lane.pool.find_idle()
    for there in lane.pool.by_load[0].values():
        for worker in there.values():
            if worker.seats[0].memory_bytes >= suspect.memory_bytes:
                return worker
    return None


def _steal_prefetched(board: StreamState, lane: UnitState) -> None:
    """At the tail: what waits in advance with some workers goes to others that have nothing left to do."""
    idle = sum(len(there) for there in lane.pool.by_load[0].values())
    for worker in lane.pool.with_prefetched():
        last = next(reversed(worker.messages.values()))
        if not last.cancelled and last.suspect is None:
            last.cancelled = True
            board.commands.append(Cancel(last.id, worker.id))
        idle -= 1
        if not idle:
            return


def _on_deadline(board: StreamState, worker: Worker) -> None:
    """A batch past its deadline: the worker is stopped, and what it was doing is the suspect. One timer per worker."""
    worker.has_deadline_timer = False
    if not worker.messages or worker.state is WorkerState.STOPPING or worker.id not in board.workers:
        return
    due = min(message.deadline_at for message in worker.messages.values())
    if due > board.now:
        worker.has_deadline_timer = True
        board.call_at(due, partial(_on_deadline, board, worker))
        return
    lane = board.units_by_name[worker.unit]
    lane.pool.remove(worker)
    ready = worker.state is WorkerState.READY
    worker.transition_to(WorkerState.STOPPING)
    worker.stop_reason = f"a batch took longer than its timeout of {lane.spec.timeout_s:g} s"
    worker.will_be_replaced = worker.will_be_replaced or ready
    board.add_note(
        "worker", f"worker {worker.id} of {lane.name}: {worker.stop_reason}", worker=worker.id, unit=lane.name
    )
    board.commands.append(StopWorker(worker.id, drain=False, reason=worker.stop_reason))


def tune_messages(board: StreamState, lane: UnitState) -> None:
    """How much goes into a message, and whether workers get one in advance, by what is measured."""
    seconds = lane.throughput.seconds_per_item
    if seconds is None or lane.spec.barrier:
        return
    options = board.options
    batch = lane.batch_size
    per_batch = seconds * batch
    message_s = max(options.target_message_s, MIN_HOPS_PER_MESSAGE * options.hop_s)
    batches = 1 if per_batch >= message_s else int(message_s / max(per_batch, 1e-9)) or 1
    if lane.bytes_per_item:
        batches = max(1, min(batches, int(options.max_message_bytes / (lane.bytes_per_item * batch))))
    recycle = lane.spec.recycle_batches
    if recycle is not None:
        batches = min(batches, recycle)
    lane.message_items = max(1, min(batches, options.max_message_items // batch or 1)) * batch
    message_s = seconds * lane.message_items
    may_wait = lane.spec.timeout_s is None and recycle is None
    in_advance = may_wait and options.hop_s > PREFETCH_HOP_SHARE * message_s
    depth = lane.spec.slots + in_advance
    if depth != lane.pool.max_messages:
        lane.pool.set_max_messages(depth)
        board.dirty[lane.index] = True
    update_queue_limit(board, lane)
