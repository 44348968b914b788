"""Is there room for more in front of a unit? By items and by bytes, and never so that everything waits for everything.

What waits is limited, not what is on its way: each worker of the parents may bring one more message, or those with
large messages would take turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.streaming.board import Board
    from dovetail.streaming.lane import Lane


def has_room(board: Board, lane: Lane) -> bool:
    """Whether a parent may send one more message whose output will wait here."""
    if lane.waits_for_seats:
        return True
    queue = lane.queue
    room = min(board.options.byte_budget // len(board.lanes), max(board.options.queue_bytes, lane.cap_bytes))
    if queue.items < lane.cap and queue.bytes + lane.coming_bytes < room:
        return True
    # When nothing happens there, more must come: what waits may be the ends of several epochs, of which no batch can be
    # made, or a single batch may be larger than the budget.
    return not (lane.has_work or lane.in_flight or lane.incoming)


def room_after(board: Board, lane: Lane) -> bool:
    """Whether there is room in front of everyone who gets this lane's output."""
    for child in lane.children:  # noqa: SIM110 - a loop costs half of what all() does, and this runs per message
        if not has_room(board, child):
            return False
    return True


def set_cap(board: Board, lane: Lane) -> None:
    """How much may wait: enough that no worker of the lane runs dry, little enough to stay fresh; and what its parents
    bring in two rounds, because one message of theirs may be many items."""
    slots = max(1, len(lane.workers)) * lane.pool.depth
    before = lane.cap
    brought = sum(
        max(1, len(parent.workers)) * parent.pool.depth * parent.message_items * parent.speeds.returns
        for parent in lane.parents
    )
    messages = max(board.options.queue_factor * slots, board.options.queue_least)
    lane.cap = max(2 * lane.batch_size, int(messages * lane.message_items), int(2 * brought) if brought > slots else 0)
    lane.cap_bytes = int(2 * slots * lane.message_items * lane.item_bytes)
    if lane.cap > before:
        board.stir(lane)
