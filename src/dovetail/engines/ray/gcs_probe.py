"""Probe of a Ray head (GCS) before attaching: find it, check that it answers, its token authentication, and a node on
this machine.

own client asks for 40 s and writes its failures to stderr. And a driver that shows tokens to a cluster without them
hangs later, so that it must be known before.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
from enum import Enum

from dovetail.engines.ray.address import DEFAULT_GCS_PORT, RayAddress, parse_address
from dovetail.engines.ray.ray_import import LOG_LEVEL, ray_module, suppress_warnings
from dovetail.errors import EngineError, Problem

PROBE_TIMEOUT_S = 2.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
HEAD = 9
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4
UNAUTHENTICATED = b"16"
STATUS = b"grpc-status"


class ProbeResult(Enum):
    """Of whoever listens."""

    OPEN = "the head of a cluster"
    NEEDS_TOKEN = "the head of a cluster that asks for a token"  # noqa: S105 - words
    NOT_RAY = "something else"


def probe(host: str, port: int) -> ProbeResult:
    """An OSError, if nobody listens or answers in time."""
    with socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S) as connection:
        connection.settimeout(PROBE_TIMEOUT_S)
        connection.sendall(question(f"{host}:{port}"))
        try:
            return _answer(connection)
        except (ConnectionError, EOFError):
            return ProbeResult.NOT_RAY


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


def _answer(connection: socket.socket) -> ProbeResult:
    """Until the call is answered; the first frame of a server is its settings."""
    first = True
    while True:
        head = _exactly(connection, HEAD)
        kind, flags, stream = head[3], head[4], struct.unpack(">I", head[5:])[0]
        if first and kind != SETTINGS:
            return ProbeResult.NOT_RAY
        first = False
        body = _exactly(connection, int.from_bytes(head[:3], "big"))
        if kind == SETTINGS and not flags & ACK:
            connection.sendall(_frame(SETTINGS, ACK, 0))
        if stream == 1 and kind == HEADERS and flags & END_STREAM:
            return _by_status(body)
        if stream == 1 and kind not in (HEADERS, DATA):
            return ProbeResult.NOT_RAY


def _by_status(headers: bytes) -> ProbeResult:
    """From the trailers, in which a short status stands as it is."""
    _, found, rest = headers.partition(STATUS)
    status = rest[1 : 1 + rest[0]] if found and rest else b""
    return (
        ProbeResult.OPEN
        if status == b"0"
        else ProbeResult.NEEDS_TOKEN
        if status == UNAUTHENTICATED
        else ProbeResult.NOT_RAY
    )


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(min(size - len(found), 1 << 16))
        if not more:
            raise EOFError
        found += more
    return found


NODES_TIMEOUT_S = 5
AUTH_MODE = "RAY_AUTH_MODE"
START_COMMAND = "ray start --head"


def find_running_cluster() -> RayAddress:
    """The cluster that RAY_ADDRESS names, or that the last `ray start` on this machine made or joined. Ray's own
    "auto" would also take any other Ray that runs here, even one that belongs to somebody else's program."""
    named = os.environ.get("RAY_ADDRESS", "").strip()
    if named and named != "auto":
        found = parse_address(named)
        if found is None:
            message = f"RAY_ADDRESS={named} is not the address of a cluster's head"
            fixes = (f"export RAY_ADDRESS=HOST:{DEFAULT_GCS_PORT}", "or unset RAY_ADDRESS, and name it: ray:HOST:PORT")
            raise EngineError(Problem("DT393", message, fixes=fixes))
        return found
    text = _last_started_address()
    found = parse_address(text) if text else None
    if found is None:
        message = "ray:auto: no Ray runs on this machine, and RAY_ADDRESS names none"
        fixes = (
            f"{START_COMMAND} here, or: ray start --address=HOST:{DEFAULT_GCS_PORT}",
            "or engine ray, which starts one for itself",
        )
        raise EngineError(Problem("DT393", message, fixes=fixes))
    return found


def _last_started_address() -> str:
    try:
        return str(ray_module("ray._private.utils").read_ray_address() or "")
    except OSError:
        return ""


def require_head(where: RayAddress) -> None:
    """An EngineError unless the head of a cluster listens there that takes what we can show."""
    try:
        answer = probe(where.host, where.port)
    except socket.gaierror as error:
        raise _unreachable_error(where, f"the name {where.host} is not known: {error.strerror}") from None
    except TimeoutError:
        raise _unreachable_error(where, f"no answer in {PROBE_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise _unreachable_error(where, error.strerror or str(error)) from None
    if answer is ProbeResult.NOT_RAY:
        raise _unreachable_error(where, "what listens there is not the head of a Ray cluster", _PORT_FIXES)
    _check_token_auth(where, asks=answer is ProbeResult.NEEDS_TOKEN)


def _check_token_auth(where: RayAddress, *, asks: bool) -> None:
    """A driver that shows tokens to a cluster without them hangs, and one that shows none to a cluster with them is
    refused. What this user has is shown on this machine, elsewhere only if RAY_AUTH_MODE says so: as Ray does."""
    said = os.environ.get(AUTH_MODE)
    shows = said is not None and said.lower() == "token"
    if asks == shows:
        return
    if asks and said is None and _is_local_host(where.host):
        logging.getLogger("ray").setLevel(LOG_LEVEL)
        setup = ray_module("ray._private.authentication.authentication_token_setup")
        if setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
            return
    if asks:
        raise EngineError(_token_problem(where, "RAY_AUTH_MODE is " + (said or "not set")))
    message = f"the Ray cluster at {where.address} knows no tokens, and RAY_AUTH_MODE={said} would wait for some"
    raise EngineError(Problem("DT393", message, fixes=("unset RAY_AUTH_MODE",)))


def restore_auth_mode(before: str | None) -> None:
    """RAY_AUTH_MODE as it was: ray.init sets it for a Ray of its own, and that would hold for the next one, too."""
    if os.environ.get(AUTH_MODE) == before:
        return
    if before is None:
        del os.environ[AUTH_MODE]
    else:
        os.environ[AUTH_MODE] = before
    ray_module("ray._raylet").Config.initialize("")


def _token_problem(where: RayAddress, evidence: str) -> Problem:
    message = f"the Ray cluster at {where.address} asks for a token"
    fixes = (
        "export RAY_AUTH_MODE=token, with the token of the cluster in ~/.ray/auth_token",
        "on its head `ray get-auth-token` prints it",
    )
    return Problem("DT393", message, (evidence,), fixes)


def _is_local_host(host: str) -> bool:
    """Only an address of this machine can be bound."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as test:
            test.bind(address)
    except OSError:
        return False
    return True


_PORT_FIXES = (
    f"name the port of the head (GCS), usually {DEFAULT_GCS_PORT}; 8265 is its dashboard, 10001 Ray Client",
    "`ray start --head` has printed it as --address='HOST:PORT'",
)


def _unreachable_error(where: RayAddress, why: str, fixes: tuple[str, ...] = ()) -> EngineError:
    usual = (
        f"see whether it runs, on its head: ray status --address {where.address}",
        f"start one: {START_COMMAND} --port {where.port}",
        "or engine ray, which starts one on this machine",
    )
    return EngineError(Problem("DT393", f"no Ray can be reached at {where.address}: {why}", fixes=fixes or usual))


def require_local_node(where: RayAddress) -> None:
    """A driver works through the Ray processes of its own machine: there must be some, of that cluster."""
    here = set(ray_module("ray._private.services").find_node_ids())
    if here & _node_ids(where) if here else False:
        return
    message = f"this machine is not a node of the Ray cluster at {where.address}"
    evidence = ["a driver needs Ray's processes on its own machine"]
    evidence += ["those that run here belong to another cluster"] if here else []
    fixes = (
        f"join it first: ray start --address={where.address} --num-cpus=0",
        "or run this on one of its nodes: ssh, kubectl exec, srun, or ray job submit -- dovetail run ...",
    )
    raise EngineError(Problem("DT393", message, tuple(evidence), fixes))


def _node_ids(where: RayAddress) -> set[str]:
    try:
        with suppress_warnings():
            rows = ray_module("ray._raylet").GcsClient(address=where.address).get_all_node_info(timeout=NODES_TIMEOUT_S)
    except Exception as error:  # of Ray, of which there are many kinds
        raise EngineError(attach_problem(where, error)) from error
    return {node_id.hex() for node_id in rows}


def attach_problem(where: RayAddress, error: BaseException) -> Problem:
    """Why a cluster that answers does not take us."""
    text = " ".join(str(part) for part in (error, error.__cause__) if part is not None)
    if "ersion mismatch" in text or "was started with" in text:
        return _version_problem(where, text)
    if "uthenticat" in text or "auth token" in text.lower():
        return _token_problem(where, _first_line(text))
    message = f"the Ray cluster at {where.address} answers, and attaching failed"
    fixes = (f"see how it does: ray status --address {where.address}", "or engine local on this machine alone")
    return Problem("DT393", message, (_first_line(text) or type(error).__name__,), fixes)


def _version_problem(where: RayAddress, text: str) -> Problem:
    rays, pythons = re.findall(r"Ray: *(\S+)", text), re.findall(r"Python: *(\S+)", text)
    message = f"the Ray cluster at {where.address} has other versions than this process"
    evidence = tuple(
        f"{who}: Ray {one}, Python {other}" for who, one, other in zip(("cluster", "here"), rays, pythons, strict=False)
    )
    fixes = [f"pip install 'ray=={rays[0]}'"] if len(set(rays)) > 1 else []
    fixes += [f"use Python {pythons[0]} here"] if len(set(pythons)) > 1 else []
    return Problem(
        "DT391", message, evidence or (_first_line(text),), tuple(fixes) or ("use the same versions on both",)
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
