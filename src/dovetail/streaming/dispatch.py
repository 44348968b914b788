"""Which items go to which worker now? Downstream first, so that finished work leaves before new work enters."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import Cancel, RunBatches, StopWorker
from dovetail.control.lifecycle import WorkerState
from dovetail.control.segments import bytes_in
from dovetail.streaming.backpressure import room_after, set_cap
from dovetail.streaming.messages import Message

if TYPE_CHECKING:
    from dovetail.control.segments import Part
    from dovetail.streaming.board import Board
    from dovetail.streaming.epochs import Epoch
    from dovetail.streaming.lane import Lane
    from dovetail.streaming.messages import Suspect
    from dovetail.streaming.workers import Worker

UNCUT = 1 << 40
SPOOL_CUT = 256
"""Items per segment of a spool: the epochs of a later wave are made of whole ones, and a barrier gives all at once."""
HOPS = 20
"""A message is at least so many times as much work as its way to the worker takes."""
ADVANCE = 0.01
"""A message in advance is worth it when the way to the worker costs more than this share of the work."""


def sweep(board: Board) -> None:
    """One pass over the lanes that could send something, last stage first."""
    dirty = board.dirty
    lanes = board.lanes
    for index in range(len(lanes) - 1, -1, -1):
        if dirty[index]:
            dirty[index] = False
            _serve(board, lanes[index])


def _serve(board: Board, lane: Lane) -> None:
    if lane.suspects:
        _serve_suspects(board, lane)
    if board.options.max_wait_s is not None and lane.queue.items and not lane.work.barrier:
        _hurry(board, lane, board.options.max_wait_s)
    pool = lane.pool
    queue = lane.queue
    ready = queue.ready
    lane.blocked = False
    sent = False
    while ready and pool.free:
        if lane.children and not room_after(board, lane):
            lane.blocked = True
            break
        number = min(ready) if len(ready) > 1 else next(iter(ready))
        waiting = ready[number]
        worker = pool.best(waiting.parts[0][0].node)
        assert worker is not None, f"{lane} counts free workers and has none"
        items = waiting.items if lane.work.barrier else _how_many(lane, waiting.items, waiting.partial)
        items = queue.front(number, items)
        parts, size = queue.take(number, items)
        pool.remove(worker)
        _send(board, lane, worker, board.epochs[number], parts, items, size, None)
        pool.add(worker)
        sent = True
    if lane.just_ended:
        lane.just_ended = False
        if pool.levels[0]:
            lane.ran_dry += 1
        else:
            lane.went_on += 1
    if sent:
        for parent in lane.parents:
            if parent.blocked:
                board.dirty[parent.index] = True
    if lane.no_more_input and pool.levels[0] and not ready:
        _steal(board, lane)


def _hurry(board: Board, lane: Lane, max_wait_s: float) -> None:
    """Batches that are not full go when they have waited long enough; for the others somebody looks again then."""
    queue = lane.queue
    next_at = None
    for number, waiting in queue.by_epoch.items():
        if waiting.items and number not in queue.ready:
            due = waiting.came[0] + max_wait_s
            if due <= board.now:
                queue.hurry(number)
            elif next_at is None or due < next_at:
                next_at = due
    if next_at is not None and (lane.hurries_at is None or next_at < lane.hurries_at):
        lane.hurries_at = next_at
        board.at(next_at, partial(_look_again, board, lane))


def _look_again(board: Board, lane: Lane) -> None:
    lane.hurries_at = None
    board.stir(lane)


def _how_many(lane: Lane, waiting: int, flush: bool) -> int:
    """Items of the next message: whole batches, and not so many that other free workers get none."""
    batch = lane.queue.batch_size
    items = lane.message_items
    if items > batch and lane.pool.free > 1:
        share = -(-waiting // lane.pool.free)
        items = min(items, -(-share // batch) * batch)
    if items >= waiting:
        return waiting if flush else waiting - waiting % batch
    return items


def _send(
    board: Board,
    lane: Lane,
    worker: Worker,
    epoch: Epoch,
    parts: list[Part],
    items: int,
    size: int,
    suspect: Suspect | None,
) -> None:
    batch_size = suspect.batch_size if suspect is not None else items if lane.work.barrier else lane.queue.batch_size
    number = board.number()
    message = worker.messages[number] = Message(number, epoch, parts, items, size, batch_size, board.now, suspect)
    lane.in_flight += items
    limit = UNCUT
    spool = bool(lane.spools)
    if lane.children:
        expected = message.expected_bytes = lane.out_bytes
        for child in lane.children:
            child.incoming += 1
            child.coming_bytes += expected
            limit = min(limit, child.message_items)
            spool = spool or child.waits_for_seats
    if spool:
        limit = min(limit, SPOOL_CUT)
    board.out.append(RunBatches(number, worker.id, lane.work.hosted.name, parts, items, batch_size, limit, spool))
    if lane.work.deadline_s is not None:
        message.due = board.now + _patience(board, lane, items, batch_size)
        if not worker.watched:
            worker.watched = True
            board.at(message.due, partial(_overdue, board, worker))


def _patience(board: Board, lane: Lane, items: int, batch_size: int) -> float:
    """How long a message may take when every call has a deadline.

    Of several calls only a sum is known: that may be somewhat more than one deadline. Whoever is stopped for it runs
    alone next time, and then exactly the deadline counts.
    """
    deadline_s = lane.work.deadline_s or 0.0
    if items <= batch_size:
        return deadline_s + board.options.hop_s
    usual_s = items * (lane.speeds.seconds_per_item or 0.0)
    return min(2 * deadline_s + 10 * usual_s, deadline_s * -(-items // batch_size)) + board.options.hop_s


def _serve_suspects(board: Board, lane: Lane) -> None:
    """Each alone on a worker that does nothing else meanwhile. If none is idle, one gets nothing new until it is."""
    pool = lane.pool
    for _ in range(len(lane.suspects)):
        suspect = lane.suspects[0]
        worker = _idle_for(lane, suspect)
        if worker is None:
            busy = pool.best("")
            if busy is not None and lane.reserved is None and busy.messages:
                pool.remove(busy)
                busy.exclusive = True
                lane.reserved = busy
            if suspect.memory_bytes:
                lane.suspects.rotate(-1)  # others need not wait for the larger worker
                continue
            return
        lane.suspects.popleft()
        pool.remove(worker)
        worker.exclusive = True
        _send(board, lane, worker, suspect.epoch, suspect.parts, suspect.items, bytes_in(suspect.parts), suspect)


def _idle_for(lane: Lane, suspect: Suspect) -> Worker | None:
    if not suspect.memory_bytes:
        return lane.pool.idle()
    for there in lane.pool.levels[0].values():
        for worker in there.values():
            if worker.seats[0].memory_bytes >= suspect.memory_bytes:
                return worker
    return None


def _steal(board: Board, lane: Lane) -> None:
    """At the tail: what waits in advance with some workers goes to others that have nothing left to do."""
    idle = sum(len(there) for there in lane.pool.levels[0].values())
    for worker in lane.pool.laden():
        last = next(reversed(worker.messages.values()))
        if not last.cancelled and last.suspect is None:
            last.cancelled = True
            board.out.append(Cancel(last.id, worker.id))
        idle -= 1
        if not idle:
            return


def _overdue(board: Board, worker: Worker) -> None:
    """A batch past its deadline: the worker is stopped, and what it was doing is the suspect. One timer per worker."""
    worker.watched = False
    if not worker.messages or worker.state is WorkerState.STOPPING or worker.id not in board.workers:
        return
    due = min(message.due for message in worker.messages.values())
    if due > board.now:
        worker.watched = True
        board.at(due, partial(_overdue, board, worker))
        return
    lane = board.lane_of[worker.unit]
    lane.pool.remove(worker)
    ready = worker.state is WorkerState.READY
    worker.move(WorkerState.STOPPING)
    worker.reason = f"a batch took longer than its deadline of {lane.work.deadline_s:g} s"
    worker.replaced = worker.replaced or ready
    board.note("worker", f"worker {worker.id} of {lane.name}: {worker.reason}", worker=worker.id, unit=lane.name)
    board.out.append(StopWorker(worker.id, drain=False, reason=worker.reason))


def tune(board: Board, lane: Lane) -> None:
    """How much goes into a message, and whether workers get one in advance, by what is measured."""
    seconds = lane.speeds.seconds_per_item
    if seconds is None or lane.work.barrier:
        return
    options = board.options
    batch = lane.batch_size
    per_batch = seconds * batch
    message_s = max(options.message_s, HOPS * options.hop_s)
    batches = 1 if per_batch >= message_s else int(message_s / max(per_batch, 1e-9)) or 1
    if lane.item_bytes:
        batches = max(1, min(batches, int(options.message_bytes / (lane.item_bytes * batch))))
    recycle = lane.work.recycle_batches
    if recycle is not None:
        batches = min(batches, recycle)
    lane.message_items = max(1, min(batches, options.message_items // batch or 1)) * batch
    message_s = seconds * lane.message_items
    may_wait = lane.work.deadline_s is None and recycle is None
    in_advance = may_wait and options.hop_s > ADVANCE * message_s
    depth = lane.work.slots + in_advance
    if depth != lane.pool.depth:
        lane.pool.set_depth(depth)
        board.dirty[lane.index] = True
    set_cap(board, lane)
