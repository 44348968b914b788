"""The socket at which an agent accepts connections of its driver."""

from __future__ import annotations

import os
import socket
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from dovetail.engines.local.protocol import Channel, encode_frame, send_frame
from dovetail.engines.ray.call_socket import CallSocket, LinkRequest
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

Requests = SimpleQueue[LinkRequest]


@pytest.fixture
def requests() -> Requests:
    return SimpleQueue()


@pytest.fixture
def listening(requests: Requests) -> Iterator[CallSocket]:
    made = CallSocket(requests.put)
    yield made
    made.close()


def connect(listening: CallSocket) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    sock.connect(f"\0{listening.address}")
    return sock


def test_a_request_has_the_connected_socket(listening: CallSocket, requests: Requests) -> None:
    with connect(listening) as sock:
        sock.send(encode_frame(("link", listening.secret, 3, 1, 17))[0])
        request = requests.get(timeout=PATIENCE_S)
        assert (request.worker, request.rank, request.position) == (3, 1, 17)
        assert request.sock.getblocking(), "a worker waits until its answers are sent"
        with request.sock:
            send_frame(request.sock, ("linked", "open"))
        (frame,), _ = Channel(sock).receive()
        assert frame.head == ("linked", "open")


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\n\r\n", encode_frame(("link", "wrong", 1, 0, 0))[0], encode_frame(("link",))[0]]
)
def test_other_connections_are_closed(listening: CallSocket, requests: Requests, data: bytes) -> None:
    with connect(listening) as sock:
        if data:
            sock.send(data)
        else:
            sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    assert requests.empty()


def test_a_connection_of_another_user_is_closed(
    listening: CallSocket, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with connect(listening) as sock:
        assert sock.recv(1) == b"", "its request is not even read"
    assert requests.empty()


def test_a_closed_socket_refuses_connections(requests: Requests) -> None:
    listening = CallSocket(requests.put)
    address = listening.address
    listening.close()
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError, match="refused"):
        sock.connect(f"\0{address}")
