"""Flow control (backpressure): how large a message is, whether a worker gets one in advance, and how many items and
bytes may wait in front of a unit. Pure.

`UnitState` keeps the results, `dispatch` and `feeder` obey them. The least numbers of waiting messages and the bytes of
all queues together are in `settings.StreamOptions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.streaming.settings import StreamOptions, UnitSpec

MIN_HOPS_PER_MESSAGE = 20
"""Least work per message, as a multiple of the time that the message takes to reach the worker."""
PREFETCH_HOP_SHARE = 0.01
"""Workers get a message in advance when the transport costs more than this share of the work."""
MESSAGES_PER_TUNING = 32
"""Messages between two adjustments of the message size; at the beginning fewer."""
MAX_MESSAGE_BYTES = 4 << 20
"""Maximum input or output per message, unless a single batch is larger."""
MAX_QUEUE_BYTES = 32 << 20
"""Maximum of the bytes that wait in front of a unit, unless the next messages of its workers are larger."""
FIRST_BATCHES_BEFORE_REGROW = 100
"""Batches that must succeed after an out-of-memory error before a larger batch is tried again."""


# --- messages


def message_items(
    spec: UnitSpec, options: StreamOptions, batch_size: int, seconds_per_item: float, bytes_per_item: float
) -> int:
    """Items per message: whole batches, enough work for the cost of the transport, and not too many bytes."""
    per_batch = seconds_per_item * batch_size
    message_s = max(options.target_message_s, MIN_HOPS_PER_MESSAGE * options.hop_s)
    batches = 1 if per_batch >= message_s else int(message_s / max(per_batch, 1e-9)) or 1
    if bytes_per_item:
        batches = max(1, min(batches, int(MAX_MESSAGE_BYTES / (bytes_per_item * batch_size))))
    if spec.recycle_batches is not None:
        batches = min(batches, spec.recycle_batches)
    return max(1, min(batches, options.max_message_items // batch_size or 1)) * batch_size


def gets_message_ahead(spec: UnitSpec, options: StreamOptions, message_s: float) -> bool:
    """Whether a worker gets its next message, of this much work, before it has finished the current one."""
    may_wait = spec.timeout_s is None and spec.recycle_batches is None
    return may_wait and options.hop_s > PREFETCH_HOP_SHARE * message_s


def messages_until_tuning(last_due: int) -> int:
    """Number of the message after which the size is adjusted next: soon at the beginning, then every
    MESSAGES_PER_TUNING messages."""
    return max(2 * last_due, 1) if last_due < MESSAGES_PER_TUNING else last_due + MESSAGES_PER_TUNING


def regrown_batch_size(batch_size: int, configured: int) -> int:
    """The batch size that is tried when FIRST_BATCHES_BEFORE_REGROW batches, or more, have succeeded with this one: the
    batch that did not fit may have been rare."""
    return min(2 * batch_size, configured)


# --- queues


def preferred_queue_items(options: StreamOptions, slots: int, items: int) -> float:
    """Items that wait when every slot of the workers has some messages in store. `items`: per message."""
    return max(options.queued_messages_per_slot * slots, options.min_queued_messages) * items


def queue_limit_items(batch_size: int, preferred: float, slots: int, produced: float) -> int:
    """Items that may wait, so that no worker starves and little waits: some messages per worker slot, and what the
    parents produce in two rounds, because one of their messages may produce many items."""
    return max(2 * batch_size, int(preferred), int(2 * produced) if produced > slots else 0)


def guaranteed_queue_bytes(slots: int, items: int, bytes_per_item: float) -> int:
    """Bytes that may wait in any case: the next messages of the workers."""
    return int(2 * slots * items * bytes_per_item)


def queue_limit_bytes(byte_share: int, guaranteed_bytes: int) -> int:
    """Bytes that may wait. `byte_share`: the unit's share of the bytes of all queues."""
    return min(byte_share, max(MAX_QUEUE_BYTES, guaranteed_bytes))
