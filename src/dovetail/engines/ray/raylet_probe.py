"""Probe of raylets: which nodes do not answer.

Ray schedules placement groups one after another and waits for the raylets of each: a group on a node that hangs blocks
the groups of all jobs for more than a minute, and its removal does not help. So `placement_groups` requests groups only
on nodes whose raylet answers.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Address = tuple[str, int]

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""Begin of an HTTP/2 connection with an empty SETTINGS frame: every gRPC server answers with its own settings."""


def find_silent_nodes(ids: Iterable[str], timeout_s: float) -> set[str]:
    """Ray's ids of those nodes whose raylet does not answer. With TLS it is unknown, and all count as answering."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return set()
    wanted = set(ids)
    addresses = {
        row["NodeID"]: (row["NodeManagerAddress"], row["NodeManagerPort"])
        for row in ray.nodes()
        if row["Alive"] and row["NodeID"] in wanted
    }
    return set(addresses) - find_answering(addresses, timeout_s)


def find_answering(addresses: Mapping[str, Address], timeout_s: float) -> set[str]:
    """Names of the servers that answer within the limit; all are asked at the same time."""
    answered: set[str] = set()
    until = time.monotonic() + timeout_s
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        for name, address in addresses.items():
            with suppress(OSError):
                selector.register(opened.enter_context(_connect(address)), selectors.EVENT_WRITE, name)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if _advance(selector, key):
                    answered.add(key.data)
    return answered


def _connect(address: Address) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    connection.setblocking(False)
    connection.connect_ex(address)
    return connection


def _advance(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
    """Send the preface, or read the answer; whether there is one. A connection that fails is dropped."""
    connection = key.fileobj
    assert isinstance(connection, socket.socket)
    try:
        if key.events & selectors.EVENT_WRITE:
            connection.sendall(HTTP2_PREFACE)
            selector.modify(connection, selectors.EVENT_READ, key.data)
            return False
        has_answered = bool(connection.recv(1))
    except OSError:
        has_answered = False
    selector.unregister(connection)
    return has_answered
