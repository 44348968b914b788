"""Is there the head of a Ray cluster at an address, and does it ask for a token? One raw question, without Ray: Ray's
own client asks for 40 s and writes its failures to stderr. And a driver that shows tokens to a cluster without them
hangs later, so that it must be known before."""

from __future__ import annotations

import socket
import struct
from enum import Enum

ANSWER_S = 2.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
HEAD = 9
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4
UNAUTHENTICATED = b"16"
STATUS = b"grpc-status"


class Answer(Enum):
    """Of whoever listens."""

    OPEN = "the head of a cluster"
    TOKEN = "the head of a cluster that asks for a token"  # noqa: S105 - words
    OTHER = "something else"


def ask(host: str, port: int) -> Answer:
    """An OSError, if nobody listens or answers in time."""
    with socket.create_connection((host, port), timeout=ANSWER_S) as connection:
        connection.settimeout(ANSWER_S)
        connection.sendall(question(f"{host}:{port}"))
        try:
            return _answer(connection)
        except (ConnectionError, EOFError):
            return Answer.OTHER


def question(authority: str) -> bytes:
    """A call of gRPC with an empty message, in HTTP/2 without compression."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": QUESTION,
        ":authority": authority[:120],
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    return (
        PREFACE
        + _frame(SETTINGS, 0, 0)
        + _frame(HEADERS, END_HEADERS, 1, block)
        + _frame(DATA, END_STREAM, 1, b"\0" * 5)
    )


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode("ascii", "replace")


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body


def _answer(connection: socket.socket) -> Answer:
    """Until the call is answered; the first frame of a server is its settings."""
    first = True
    while True:
        head = _exactly(connection, HEAD)
        kind, flags, stream = head[3], head[4], struct.unpack(">I", head[5:])[0]
        if first and kind != SETTINGS:
            return Answer.OTHER
        first = False
        body = _exactly(connection, int.from_bytes(head[:3], "big"))
        if kind == SETTINGS and not flags & ACK:
            connection.sendall(_frame(SETTINGS, ACK, 0))
        if stream == 1 and kind == HEADERS and flags & END_STREAM:
            return _by_status(body)
        if stream == 1 and kind not in (HEADERS, DATA):
            return Answer.OTHER


def _by_status(headers: bytes) -> Answer:
    """From the trailers, in which a short status stands as it is."""
    _, found, rest = headers.partition(STATUS)
    status = rest[1 : 1 + rest[0]] if found and rest else b""
    return Answer.OPEN if status == b"0" else Answer.TOKEN if status == UNAUTHENTICATED else Answer.OTHER


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(min(size - len(found), 1 << 16))
        if not more:
            raise EOFError
        found += more
    return found
