"""TCP bytes sent and received per worker, from the sock_diag counters of the kernel.

The kernel counts bytes per TCP connection and reports them to any user (sock_diag); a connection is identified by the
inode of its socket, and /proc/PID/fd lists the owners. Not counted: UDP, traffic after the last sample of a connection,
and connections that opened and closed between two samples. So values are lower bounds, except for a connection that
several workers share: each is charged for all of it.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
DUMP_FLAGS = 0x1 | 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
INET_DIAG_INFO = 2
NOT_CONNECTED = (6, 7, 10, 12)
"""TIME_WAIT, CLOSE, LISTEN, NEW_SYN_RECV."""
WANTED_STATES = 0xFFF & ~sum(1 << state for state in NOT_CONNECTED)
TIMEOUT_S = 1.0

MESSAGE = struct.Struct("=IHHII")
REQUEST = struct.Struct("=BBBxI48x")
COOKIE_AT, INODE_AT, ATTRIBUTES_AT = 44, 68, 72
"""Offset in struct inet_diag_msg."""
ATTRIBUTE = struct.Struct("=HH")
COUNTERS_AT = 120
"""Offsets of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (Linux 4.1 and later)."""
COUNTERS = struct.Struct("=QQ")
SOCKET_LINK = "socket:["


@dataclass(frozen=True, slots=True)
class Traffic:
    """TCP bytes."""

    sent_bytes: int = 0
    """Bytes that the peer acknowledged."""
    received_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent_bytes + other.sent_bytes, self.received_bytes + other.received_bytes)


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection of this machine, with its totals."""

    cookie: int
    """Unique while the machine runs; inodes are reused."""
    inode: int
    traffic: Traffic


@dataclass(slots=True)
class _Session:
    open: dict[int, Traffic] = field(default_factory=dict)
    closed: Traffic = field(default_factory=Traffic)


class TcpMeter:
    """Samples sessions repeatedly. Thread: one at a time."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}

    def sample(self, sessions: Mapping[int, Iterable[int]]) -> dict[int, Traffic] | None:
        """In: session -> pids of its processes; out: session -> total bytes. None: the kernel does not report them.

        Sessions that are no longer requested are forgotten.
        """
        inodes = {number: {inode for pid in pids for inode in sockets_of(pid)} for number, pids in sessions.items()}
        found = connections() if any(inodes.values()) else []
        if found is None:
            return None
        by_inode = {connection.inode: connection for connection in found}
        self._sessions = {number: self._sessions.get(number) or _Session() for number in sessions}
        return {number: _session_traffic(it, inodes[number], by_inode) for number, it in self._sessions.items()}


def _session_traffic(session: _Session, inodes: set[int], by_inode: Mapping[int, Connection]) -> Traffic:
    here = [by_inode[inode] for inode in inodes if inode in by_inode]
    now = {connection.cookie: connection.traffic for connection in here}
    gone = (traffic for cookie, traffic in session.open.items() if cookie not in now)
    session.closed, session.open = sum(gone, session.closed), now
    return sum(now.values(), session.closed)


def sockets_of(pid: int) -> Iterator[int]:
    """Inodes of the open sockets of a process; empty if it is gone or belongs to another user."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - as below
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - a Path costs ten times as much
        except OSError:
            continue
        if target.startswith(SOCKET_LINK):
            yield int(target[len(SOCKET_LINK) : -1])


def connections() -> list[Connection] | None:
    """All TCP connections of this network namespace; None if the kernel refuses."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as asking:
            asking.settimeout(TIMEOUT_S)
            return [
                connection
                for family in (socket.AF_INET, socket.AF_INET6)
                for payload in _dump_connections(asking, family)
                if (connection := parse_connection(payload))
            ]
    except (OSError, AttributeError, struct.error):
        return None


def _dump_connections(asking: socket.socket, family: int) -> Iterator[bytes]:
    body = REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), WANTED_STATES)
    asking.send(MESSAGE.pack(MESSAGE.size + len(body), SOCK_DIAG_BY_FAMILY, DUMP_FLAGS, family, 0) + body)
    while True:
        for kind, payload in parse_messages(asking.recv(1 << 17)):
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                raise OSError("the kernel does not list its sockets")
            yield payload


def parse_messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, payload) of each netlink message; a truncated message ends the iteration."""
    at = 0
    while at + MESSAGE.size <= len(data):
        length, kind, *_ = MESSAGE.unpack_from(data, at)
        if not MESSAGE.size <= length <= len(data) - at:
            return
        yield kind, data[at + MESSAGE.size : at + length]
        at += _aligned(length)


def parse_connection(payload: bytes) -> Connection | None:
    """Parse a struct inet_diag_msg and its attributes; None if the counters or the owner are missing."""
    if len(payload) < ATTRIBUTES_AT:
        return None
    (cookie,), (inode,) = struct.unpack_from("=Q", payload, COOKIE_AT), struct.unpack_from("=I", payload, INODE_AT)
    at = ATTRIBUTES_AT
    while inode and at + ATTRIBUTE.size <= len(payload):
        length, kind = ATTRIBUTE.unpack_from(payload, at)
        if kind == INET_DIAG_INFO and length >= ATTRIBUTE.size + COUNTERS_AT + COUNTERS.size:
            counters = COUNTERS.unpack_from(payload, at + ATTRIBUTE.size + COUNTERS_AT)
            return Connection(cookie, inode, Traffic(*counters))
        at += max(ATTRIBUTE.size, _aligned(length))
    return None


def _aligned(length: int) -> int:
    return (length + 3) & ~3
