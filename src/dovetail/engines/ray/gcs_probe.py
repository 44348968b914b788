"""Check of a Ray cluster before attaching: find its head (GCS), list its nodes within a time limit, compare token
authentication, and require a node on this machine.

`attachment` calls `find_running_cluster`, `require_head` and `require_local_node`, in this order, before `ray.init`,
which blocks for 40 s where no head answers. A driver that sends tokens to a cluster without them hangs later, so the
first question is always asked without a token.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any

from dovetail.engines.ray import ray_private
from dovetail.engines.ray.address import DEFAULT_GCS_PORT, RayAddress, parse_address
from dovetail.engines.ray.ray_import import LOG_LEVEL
from dovetail.errors import EngineError, Problem

PROBE_TIMEOUT_S = 2.0
"""Limit for the TCP connection, and again for the answer of the head."""
PROBE_START_TIMEOUT_S = 60.0
"""Limit for the start of the process that asks: it imports Ray, which takes 0.6 s of CPU time."""
AUTH_MODE = "RAY_AUTH_MODE"
WITHOUT_TOKEN, WITH_TOKEN = "disabled", "token"
START_COMMAND = "ray start --head"


class ProbeStatus(Enum):
    """Answer of the process at an address."""

    OPEN = "the head of a cluster; it accepts this process"
    NEEDS_TOKEN = "the head of a cluster that requires a token"  # noqa: S105 - a description
    NO_ANSWER = "no head of a cluster answered in time"
    FAILED = "the head answered with another error"
    UNKNOWN = "this version of Ray has no client for the query"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Status, and what came with it."""

    status: ProbeStatus
    nodes: frozenset[str] | None = None
    """Ray's ids of all nodes; None if not known."""
    error: str = ""


def probe(address: str, auth_mode: str = WITHOUT_TOKEN) -> ProbeResult:
    """Ask the head at HOST:PORT for its nodes, in a process of its own that is killed after the time limit."""
    command = [sys.executable, "-c", ray_private.PROBE_SCRIPT, address, str(PROBE_TIMEOUT_S), json.dumps(sys.path)]
    environment = os.environ | {AUTH_MODE: auth_mode}
    with subprocess.Popen(  # noqa: S603 - our own script
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert process.stdout is not None
        threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
        try:
            if not lines.get(timeout=PROBE_START_TIMEOUT_S):
                return ProbeResult(ProbeStatus.UNKNOWN)
            return parse_probe_answer(lines.get(timeout=PROBE_TIMEOUT_S))
        except queue.Empty:
            return ProbeResult(ProbeStatus.NO_ANSWER)
        finally:
            process.kill()


def _read_lines(pipe: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """An empty line at the end."""
    try:
        for line in pipe:
            lines.put(line)
    except (OSError, ValueError):  # closed while it was read
        pass
    lines.put("")


def parse_probe_answer(line: str) -> ProbeResult:
    """Result from the line of JSON that the probe printed; an empty line if it crashed. Pure."""
    if not line:
        return ProbeResult(ProbeStatus.NO_ANSWER)
    answer: dict[str, Any] = json.loads(line)
    if "nodes" in answer:
        return ProbeResult(ProbeStatus.OPEN, frozenset(answer["nodes"]))
    error = str(answer["error"])
    return ProbeResult(ProbeStatus.NEEDS_TOKEN if is_authentication_error(error) else ProbeStatus.FAILED, error=error)


def is_authentication_error(text: str) -> bool:
    return "uthenticat" in text or "auth token" in text.lower()


# --- which cluster


def find_running_cluster() -> RayAddress:
    """Address from RAY_ADDRESS, else of the cluster that the last `ray start` on this machine created or joined. Ray's
    own "auto" would also attach to a Ray that another program started on this machine for itself."""
    named = os.environ.get("RAY_ADDRESS", "").strip()
    if named and named != "auto":
        found = parse_address(named)
        if found is None:
            message = f"RAY_ADDRESS={named} is not the address of a cluster's head"
            fixes = (f"export RAY_ADDRESS=HOST:{DEFAULT_GCS_PORT}", "unset RAY_ADDRESS and use engine ray:HOST:PORT")
            raise EngineError(Problem("DT393", message, fixes=fixes))
        return found
    text = ray_private.last_started_address()
    found = parse_address(text) if text else None
    if found is None:
        message = "ray:auto: no Ray runs on this machine, and RAY_ADDRESS is not set"
        fixes = (
            f"{START_COMMAND} here, or: ray start --address=HOST:{DEFAULT_GCS_PORT}",
            "engine ray, which starts a private Ray",
        )
        raise EngineError(Problem("DT393", message, fixes=fixes))
    return found


# --- does its head answer


def require_head(where: RayAddress) -> frozenset[str] | None:
    """Ray's ids of the nodes of the cluster at this address, None if not known; an EngineError if no head answers or
    the tokens do not match."""
    _require_listener(where)
    found = probe(where.address)
    if found.status is ProbeStatus.NO_ANSWER:
        why = f"the process that listens there did not answer as the head of a Ray cluster within {PROBE_TIMEOUT_S:g} s"
        raise _unreachable_error(where, why, _PORT_FIXES)
    if found.status is ProbeStatus.UNKNOWN:
        return None
    needs_token = found.status is ProbeStatus.NEEDS_TOKEN
    _check_token_auth(where, needs_token=needs_token)
    if needs_token:
        found = probe(where.address, WITH_TOKEN)
    if found.status is not ProbeStatus.OPEN:
        raise EngineError(attach_problem(where, found.error or found.status.value))
    return found.nodes


def _require_listener(where: RayAddress) -> None:
    """A connection that is refused is reported at once."""
    try:
        socket.create_connection((where.host, where.port), timeout=PROBE_TIMEOUT_S).close()
    except socket.gaierror as error:
        raise _unreachable_error(where, f"unknown host {where.host}: {error.strerror}") from None
    except TimeoutError:
        raise _unreachable_error(where, f"no answer within {PROBE_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise _unreachable_error(where, error.strerror or str(error)) from None


def _check_token_auth(where: RayAddress, *, needs_token: bool) -> None:
    """A driver that sends tokens to a cluster without them hangs, and a cluster with tokens rejects a driver without
    one. As Ray does, use the token of this user on this machine, elsewhere only if RAY_AUTH_MODE is set."""
    mode = os.environ.get(AUTH_MODE)
    sends_token = mode is not None and mode.lower() == WITH_TOKEN
    if needs_token == sends_token:
        return
    if needs_token and mode is None and _is_local_host(where.host):
        logging.getLogger("ray").setLevel(LOG_LEVEL)
        if ray_private.enable_token_if_available():
            return
    if needs_token:
        raise EngineError(_token_problem(where, "RAY_AUTH_MODE is " + (mode or "not set")))
    message = f"the Ray cluster at {where.address} does not use tokens, but RAY_AUTH_MODE={mode} is set"
    raise EngineError(Problem("DT393", message, fixes=("unset RAY_AUTH_MODE",)))


def restore_auth_mode(before: str | None) -> None:
    """Set RAY_AUTH_MODE to its previous value: ray.init sets it for a private Ray, and the next attachment would use
    it."""
    if os.environ.get(AUTH_MODE) == before:
        return
    if before is None:
        del os.environ[AUTH_MODE]
    else:
        os.environ[AUTH_MODE] = before
    ray_private.reload_config()


def _token_problem(where: RayAddress, evidence: str) -> Problem:
    message = f"the Ray cluster at {where.address} requires a token"
    fixes = (
        "export RAY_AUTH_MODE=token, with the token of the cluster in ~/.ray/auth_token",
        "`ray get-auth-token` on its head prints the token",
    )
    return Problem("DT393", message, (evidence,), fixes)


def _is_local_host(host: str) -> bool:
    """Whether a name is of this machine: only an address of this machine can be bound."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as test:
            test.bind(address)
    except OSError:
        return False
    return True


_PORT_FIXES = (
    f"use the port of the head (GCS), usually {DEFAULT_GCS_PORT}; 8265 is the dashboard, 10001 Ray Client",
    "`ray start --head` printed it as --address='HOST:PORT'",
)


def _unreachable_error(where: RayAddress, why: str, fixes: tuple[str, ...] = ()) -> EngineError:
    usual = (
        f"check that it runs, on its head: ray status --address {where.address}",
        f"start one: {START_COMMAND} --port {where.port}",
        "engine ray, which starts one on this machine",
    )
    return EngineError(Problem("DT393", f"cannot reach Ray at {where.address}: {why}", fixes=fixes or usual))


# --- is this machine one of its nodes


def require_local_node(where: RayAddress, nodes: frozenset[str] | None) -> None:
    """A driver needs a raylet of the same cluster on its own machine. `nodes`: from `require_head`."""
    here = ray_private.local_node_ids()
    if nodes is None or here is None or here & nodes:
        return
    message = f"this machine is not a node of the Ray cluster at {where.address}"
    evidence = ["a driver needs Ray's processes on its own machine"]
    evidence += ["the Ray processes on this machine belong to another cluster"] if here else []
    fixes = (
        f"join it first: ray start --address={where.address} --num-cpus=0",
        "run this on one of its nodes: ssh, kubectl exec, srun, or ray job submit -- dovetail run ...",
    )
    raise EngineError(Problem("DT393", message, tuple(evidence), fixes))


# --- why attaching failed


def attach_problem(where: RayAddress, error: BaseException | str) -> Problem:
    """Why a cluster whose head answers does not accept this driver."""
    parts = [error] if isinstance(error, str) else [error, error.__cause__]
    text = " ".join(str(part) for part in parts if part is not None)
    if "ersion mismatch" in text or "was started with" in text:
        return _version_problem(where, text)
    if is_authentication_error(text):
        return _token_problem(where, _first_line(text))
    message = f"the head of the Ray cluster at {where.address} answers, but attaching failed"
    fixes = (f"check the cluster: ray status --address {where.address}", "engine local, on this machine alone")
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
