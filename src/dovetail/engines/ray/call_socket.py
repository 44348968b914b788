"""Socket at which a driver on the machine of an agent asks for links to workers. Node side.

A driver connects once per worker process (`call_links`) and proves with the secret of the session, which it got in the
agent's hello, that the run is its own. The agent answers, and passes the connected socket to the worker, which receives
calls over it from then on. The socket has a name in Linux's abstract namespace: no file is left behind if the agent is
killed. Other users can connect to such a name, but are refused by the user id that the kernel reports.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from contextlib import suppress
from struct import Struct
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from dovetail.engines.local.protocol import Channel

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET_BYTES = 16
REQUEST_TIMEOUT_S = 2.0
"""Limit for the request on a new connection; other ones wait meanwhile."""
BACKLOG = 1024
_CREDENTIALS = Struct("3i")
"""Process, user and group of SO_PEERCRED."""


class LinkRequest(NamedTuple):
    """Wish of a driver to call a process over a socket of its own."""

    worker: int
    rank: int
    position: int
    """Number of frames that the driver sent to the agent before: they are handled first."""
    sock: socket.socket


class CallSocket:
    """Listening socket of a session, and the thread that accepts connections."""

    def __init__(self, on_request: Callable[[LinkRequest], None]) -> None:
        """`on_request` is called by the thread."""
        self.secret = secrets.token_hex(SECRET_BYTES)
        self._on_request = on_request
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(f"\0dovetail-{secrets.token_hex(SECRET_BYTES)}")
        self._sock.listen(BACKLOG)
        self._thread = Thread(target=self._run, name="dovetail-call-socket", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The abstract name, without its first byte, which is 0."""
        return bytes(self._sock.getsockname()).decode()[1:]

    def _run(self) -> None:
        with self._sock:
            while True:
                try:
                    sock, _ = self._sock.accept()
                except OSError:  # it was closed
                    return
                try:
                    self._on_request(self._read_request(sock))
                except Exception:  # not a driver of this run, or one that has exited
                    sock.close()

    def _read_request(self, sock: socket.socket) -> LinkRequest:
        if peer_user(sock) != os.getuid():
            raise PermissionError("the peer belongs to another user")
        sock.settimeout(REQUEST_TIMEOUT_S)
        frames, _ = Channel(sock).receive()
        ((kind, secret, worker, rank, position),) = (frame.head for frame in frames)
        if kind != "link" or not hmac.compare_digest(secret, self.secret):
            raise PermissionError("the peer does not know the secret")
        sock.setblocking(True)
        return LinkRequest(worker, rank, position, sock)

    def close(self) -> None:
        """Refuse further connections; the thread ends."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def peer_user(sock: socket.socket) -> int:
    """Id of the user at the other end of a connected Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user
