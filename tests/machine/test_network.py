"""Are the bytes that really went over a TCP connection put to the worker that sent them?"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dovetail.machine.network import (
    INET_DIAG_INFO,
    NLMSG_ERROR,
    Connection,
    TcpMeter,
    Traffic,
    connections,
    parse_connection,
    parse_messages,
    sockets_of,
)
from machine.sessions import Session, session
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

KB = 1024
CONNECT = """
import socket
def connect(port, family=socket.AF_INET, host="127.0.0.1"):
    made = socket.socket(family); made.connect((host, port))
    return made
def read(made, size):
    while size:
        size -= len(made.recv(min(size, 1 << 16)))
"""

needs_the_kernel = pytest.mark.skipif(connections() is None, reason="this kernel does not list its sockets")


@contextmanager
def listening(family: int = socket.AF_INET, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen(5)
        server.settimeout(30)
        yield server


def receive(peer: socket.socket, size: int) -> None:
    while size:
        size -= len(peer.recv(size))


def traffic(meter: TcpMeter, worker: Session, *more: int) -> Traffic:
    found = meter.sample({worker.pid: [worker.pid, *more]})
    assert found is not None
    return found[worker.pid]


def about(found: Traffic, sent: int, received: int) -> bool:
    """The kernel counts the beginning and the end of a connection as a byte each."""
    return 0 <= found.sent_bytes - sent <= 4 and 0 <= found.received_bytes - received <= 4


FAMILIES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


@needs_the_kernel
@pytest.mark.parametrize(("family", "host"), FAMILIES, ids=["v4", "v6"])
def test_bytes_are_counted_while_the_connection_is_open_and_kept_when_it_is_closed(family: int, host: str) -> None:
    code = f"""{CONNECT}
made = connect(int(wait()), {family}, {host!r})
made.sendall(bytes({300 * KB})); read(made, {700 * KB}); say(); wait()
made.close(); say(); wait()
"""
    try:
        opened = listening(family, host)
        with opened as server, session(code) as worker:
            meter = TcpMeter()
            worker.tell(str(server.getsockname()[1]))
            peer, _ = server.accept()
            with peer:
                receive(peer, 300 * KB)
                peer.sendall(bytes(700 * KB))
                worker.hear()
                until(lambda: about(traffic(meter, worker), 300 * KB, 700 * KB))
                worker.tell()
                worker.hear()
                assert about(traffic(meter, worker), 300 * KB, 700 * KB)
        assert about(traffic(meter, worker), 300 * KB, 700 * KB)
    except OSError as error:
        if family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            pytest.skip("no IPv6 here")
        raise


@needs_the_kernel
def test_connections_of_a_session_add_up_and_one_that_two_processes_share_counts_once() -> None:
    code = f"""{CONNECT}
port = int(wait())
first, second = connect(port), connect(port)
first.sendall(bytes({10 * KB})); second.sendall(bytes({20 * KB}))
child = os.fork()
if not child:
    time.sleep(1000)
say(child); wait()
"""
    with listening() as server, session(code) as worker:
        worker.tell(str(server.getsockname()[1]))
        (one, _), (two, _) = server.accept(), server.accept()
        with one, two:
            child = int(worker.hear())
            assert {*sockets_of(child)} == {*sockets_of(worker.pid)}
            meter = TcpMeter()
            until(lambda: about(traffic(meter, worker, child), 30 * KB, 0))


@needs_the_kernel
def test_udp_is_not_counted() -> None:
    code = f"""
import socket
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); out.connect(("127.0.0.1", 9))
try: out.send(bytes({10 * KB}))
except OSError: pass
say(); wait()
"""
    with session(code) as worker:
        worker.hear()
        assert len([*sockets_of(worker.pid)]) == 1
        assert traffic(TcpMeter(), worker) == Traffic()


def test_a_session_without_sockets_or_processes_has_no_traffic() -> None:
    assert TcpMeter().sample({}) == {}
    assert TcpMeter().sample({5: [], 6: [1 << 30]}) == {5: Traffic(), 6: Traffic()}


@needs_the_kernel
def test_a_session_that_is_not_asked_for_is_forgotten() -> None:
    with listening() as server, socket.create_connection(server.getsockname()) as mine:
        peer, _ = server.accept()
        with peer:
            peer.sendall(b"x" * KB)
            receive(mine, KB)
            meter = TcpMeter()
            known = meter.sample({1: [os.getpid()]})
            assert known is not None
            assert known[1].received_bytes >= KB
            assert meter.sample({}) == {}
            assert meter.sample({1: []}) == {1: Traffic()}


@pytest.mark.parametrize("error", [PermissionError(1, "no"), OSError(errno.EPROTONOSUPPORT, "no"), TimeoutError()])
def test_a_kernel_that_refuses_is_not_known_and_never_raises(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def refuse(*_args: Any) -> None:
        raise error

    with listening(), monkeypatch.context() as patched:
        patched.setattr("dovetail.machine.network.socket.socket", refuse)
        assert connections() is None
        assert TcpMeter().sample({1: [os.getpid()]}) is None
    with monkeypatch.context() as patched:
        patched.delattr("dovetail.machine.network.socket.AF_NETLINK")
        assert connections() is None


def test_an_error_message_of_the_kernel_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = struct.pack("=IHHIIi", 20, NLMSG_ERROR, 0, 0, 0, -1)
    monkeypatch.setattr("dovetail.machine.network.parse_messages", lambda _: parse_messages(answer))
    assert connections() is None


# ---- what the kernel says


def message(cookie: int = 9, inode: int = 77, *attributes: bytes) -> bytes:
    return bytes(44) + struct.pack("=Q", cookie) + bytes(16) + struct.pack("=I", inode) + b"".join(attributes)


def attribute(kind: int, payload: bytes) -> bytes:
    padding = -len(payload) % 4
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(padding)


INFO = attribute(INET_DIAG_INFO, bytes(120) + struct.pack("=QQ", 1000, 2000) + bytes(96))


def test_the_counters_are_found_behind_other_attributes() -> None:
    found = parse_connection(message(9, 77, attribute(15, b"\1"), attribute(3, b"cubic"), INFO))
    assert found == Connection(9, 77, Traffic(1000, 2000))


def test_a_connection_without_owner_or_counters_is_none() -> None:
    assert parse_connection(message(9, 0, INFO)) is None
    assert parse_connection(message(9, 77)) is None
    assert parse_connection(message(9, 77, attribute(INET_DIAG_INFO, bytes(104)))) is None
    assert parse_connection(b"") is None


@given(st.binary(max_size=400))
@example(struct.pack("=IHHII", 0, 20, 0, 0, 0) * 3)
@example(struct.pack("=IHHII", 15, 20, 0, 0, 0) * 3)
@example(message(9, 77, b"\0\0\0\0" * 8))
def test_no_bytes_at_all_make_the_reader_fail_or_hang(data: bytes) -> None:
    assert len([*parse_messages(data)]) <= len(data) // 16
    if len(data) < 200:
        parse_connection(data)


@given(st.binary(max_size=100))
def test_attributes_of_any_bytes_are_read(data: bytes) -> None:
    parse_connection(message(9, 77, data))
