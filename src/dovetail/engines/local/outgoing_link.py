"""Calling end of a socket between two processes of a run: what is sent, what waits, and what was not answered.

`peer_links` has the links of a worker, `ray.call_links` those of the driver of a Ray engine; the called worker has an
`IncomingLink` for either.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.control.engine import CallNotSentError
from dovetail.engines.local.protocol import DONT_WAIT, Channel, LinkState, close_descriptors

if TYPE_CHECKING:
    import socket

    from dovetail.engines.local.call_body import CallBody
    from dovetail.engines.local.protocol import Frame


class OutgoingCall(NamedTuple):
    """A call, a question about one, or the cancellation of one."""

    head: tuple[Any, ...]
    """Kind and number, then what the kind needs."""
    body: CallBody

    @property
    def number(self) -> int:
        number: int = self.head[1]
        return number


class OutgoingLink:
    """Calls of this process to one process of a worker. Hold its lock, unless stated otherwise."""

    def __init__(self, sock: socket.socket, worker: int, rank: int) -> None:
        """`sock`: this end of the connection."""
        self.worker = worker
        self.rank = rank
        sock.setblocking(False)
        self.channel = Channel(sock)
        self.lock = Lock()
        self.reading = Lock()
        """Held by the thread that receives answers."""
        self.is_read_by_caller = False
        """Whether a thread that waits for an answer receives them."""
        self.state = LinkState.REQUESTED
        self.names: frozenset[str] = frozenset()
        """Objects that the worker hosts."""
        self.requested_at = time.monotonic()
        self.waiting: deque[OutgoingCall] = deque()
        """Calls that were not sent yet."""
        self.sending: OutgoingCall | None = None
        """The call that the channel has not sent completely."""
        self.unanswered: set[int] = set()
        self.is_full = False
        """Whether the socket was full and is polled for writing."""
        self.failed: list[tuple[OutgoingCall, BaseException]] = []
        """Calls to be ended with an error once no lock is held: their callbacks may make calls."""

    def flush(self) -> bool:
        """Send as much as possible without blocking. False: the socket is full."""
        while True:
            if not self.channel.flush():
                return False
            if self.channel.is_broken:
                return True
            if self.sending is not None:
                close_descriptors(self.sending.body.descriptors)
                self.sending = None
            if not self.waiting:
                return True
            self.sending = call = self.waiting.popleft()
            if call.head[0] != "cancel_call":
                self.unanswered.add(call.number)
            self.channel.put(call.head, [call.body.data], call.body.descriptors)

    @property
    def has_unsent(self) -> bool:
        return bool(self.waiting) or self.sending is not None

    def fail_unsent(self, why: str) -> None:
        """End the calls that were not sent completely."""
        unsent = [*([] if self.sending is None else [self.sending]), *self.waiting]
        self.failed += [(call, CallNotSentError(why)) for call in unsent]
        self.waiting.clear()
        self.sending = None


def receive_once(channel: Channel) -> tuple[list[Frame], bool]:
    """Frames of one read; and whether the peer is still connected."""
    with suppress(BlockingIOError):
        return channel.receive(DONT_WAIT)
    return [], True
