"""Can a Ray cluster be reached from here? Told in a second, where Ray itself would try for a minute."""

from __future__ import annotations

import logging
import os
import re
import socket

from dovetail.engines.ray.asking import ANSWER_S, Answer, ask
from dovetail.engines.ray.library import TOLD, module, quiet
from dovetail.engines.ray.where import GCS_PORT, Where, address_of
from dovetail.errors import EngineError, Problem

NODES_S = 5
AUTH_MODE = "RAY_AUTH_MODE"
START = "ray start --head"


def running_here() -> Where:
    """The cluster that RAY_ADDRESS names, or that the last `ray start` on this machine made or joined. Ray's own
    "auto" would also take any other Ray that runs here, even one that belongs to somebody else's program."""
    named = os.environ.get("RAY_ADDRESS", "").strip()
    if named and named != "auto":
        found = address_of(named)
        if found is None:
            message = f"RAY_ADDRESS={named} is not the address of a cluster's head"
            fixes = (f"export RAY_ADDRESS=HOST:{GCS_PORT}", "or unset RAY_ADDRESS, and name it: ray:HOST:PORT")
            raise EngineError(Problem("DT393", message, fixes=fixes))
        return found
    text = _last_started()
    found = address_of(text) if text else None
    if found is None:
        message = "ray:auto: no Ray runs on this machine, and RAY_ADDRESS names none"
        fixes = (f"{START} here, or: ray start --address=HOST:{GCS_PORT}", "or engine ray, which starts one for itself")
        raise EngineError(Problem("DT393", message, fixes=fixes))
    return found


def _last_started() -> str:
    try:
        return str(module("ray._private.utils").read_ray_address() or "")
    except OSError:
        return ""


def require_answer(where: Where) -> None:
    """An EngineError unless the head of a cluster listens there that takes what we can show."""
    try:
        answer = ask(where.host, where.port)
    except socket.gaierror as error:
        raise _unreachable(where, f"the name {where.host} is not known: {error.strerror}") from None
    except TimeoutError:
        raise _unreachable(where, f"no answer in {ANSWER_S:g} s") from None
    except OSError as error:
        raise _unreachable(where, error.strerror or str(error)) from None
    if answer is Answer.OTHER:
        raise _unreachable(where, "what listens there is not the head of a Ray cluster", _OTHER_PORT)
    _agree_on_tokens(where, asks=answer is Answer.TOKEN)


def _agree_on_tokens(where: Where, *, asks: bool) -> None:
    """A driver that shows tokens to a cluster without them hangs, and one that shows none to a cluster with them is
    refused. What this user has is shown on this machine, elsewhere only if RAY_AUTH_MODE says so: as Ray does."""
    said = os.environ.get(AUTH_MODE)
    shows = said is not None and said.lower() == "token"
    if asks == shows:
        return
    if asks and said is None and _is_here(where.host):
        logging.getLogger("ray").setLevel(TOLD)
        setup = module("ray._private.authentication.authentication_token_setup")
        if setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
            return
    if asks:
        raise EngineError(_token(where, "RAY_AUTH_MODE is " + (said or "not set")))
    message = f"the Ray cluster at {where.address} knows no tokens, and RAY_AUTH_MODE={said} would wait for some"
    raise EngineError(Problem("DT393", message, fixes=("unset RAY_AUTH_MODE",)))


def auth_back(before: str | None) -> None:
    """RAY_AUTH_MODE as it was: ray.init sets it for a Ray of its own, and that would hold for the next one, too."""
    if os.environ.get(AUTH_MODE) == before:
        return
    if before is None:
        del os.environ[AUTH_MODE]
    else:
        os.environ[AUTH_MODE] = before
    module("ray._raylet").Config.initialize("")


def _token(where: Where, evidence: str) -> Problem:
    message = f"the Ray cluster at {where.address} asks for a token"
    fixes = (
        "export RAY_AUTH_MODE=token, with the token of the cluster in ~/.ray/auth_token",
        "on its head `ray get-auth-token` prints it",
    )
    return Problem("DT393", message, (evidence,), fixes)


def _is_here(host: str) -> bool:
    """Only an address of this machine can be bound."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as test:
            test.bind(address)
    except OSError:
        return False
    return True


_OTHER_PORT = (
    f"name the port of the head (GCS), usually {GCS_PORT}; 8265 is its dashboard, 10001 Ray Client",
    "`ray start --head` has printed it as --address='HOST:PORT'",
)


def _unreachable(where: Where, why: str, fixes: tuple[str, ...] = ()) -> EngineError:
    usual = (
        f"see whether it runs, on its head: ray status --address {where.address}",
        f"start one: {START} --port {where.port}",
        "or engine ray, which starts one on this machine",
    )
    return EngineError(Problem("DT393", f"no Ray can be reached at {where.address}: {why}", fixes=fixes or usual))


def require_node_here(where: Where) -> None:
    """A driver works through the Ray processes of its own machine: there must be some, of that cluster."""
    here = set(module("ray._private.services").find_node_ids())
    if here & _nodes_of(where) if here else False:
        return
    message = f"this machine is not a node of the Ray cluster at {where.address}"
    evidence = ["a driver needs Ray's processes on its own machine"]
    evidence += ["those that run here belong to another cluster"] if here else []
    fixes = (
        f"join it first: ray start --address={where.address} --num-cpus=0",
        "or run this on one of its nodes: ssh, kubectl exec, srun, or ray job submit -- dovetail run ...",
    )
    raise EngineError(Problem("DT393", message, tuple(evidence), fixes))


def _nodes_of(where: Where) -> set[str]:
    try:
        with quiet():
            rows = module("ray._raylet").GcsClient(address=where.address).get_all_node_info(timeout=NODES_S)
    except Exception as error:  # of Ray, of which there are many kinds
        raise EngineError(refusal(where, error)) from error
    return {node_id.hex() for node_id in rows}


def refusal(where: Where, error: BaseException) -> Problem:
    """Why a cluster that answers does not take us."""
    text = " ".join(str(part) for part in (error, error.__cause__) if part is not None)
    if "ersion mismatch" in text or "was started with" in text:
        return _other_versions(where, text)
    if "uthenticat" in text or "auth token" in text.lower():
        return _token(where, _line(text))
    message = f"the Ray cluster at {where.address} answers, and attaching failed"
    fixes = (f"see how it does: ray status --address {where.address}", "or engine local on this machine alone")
    return Problem("DT393", message, (_line(text) or type(error).__name__,), fixes)


def _other_versions(where: Where, text: str) -> Problem:
    rays, pythons = re.findall(r"Ray: *(\S+)", text), re.findall(r"Python: *(\S+)", text)
    message = f"the Ray cluster at {where.address} has other versions than this process"
    evidence = tuple(
        f"{who}: Ray {one}, Python {other}" for who, one, other in zip(("cluster", "here"), rays, pythons, strict=False)
    )
    fixes = [f"pip install 'ray=={rays[0]}'"] if len(set(rays)) > 1 else []
    fixes += [f"use Python {pythons[0]} here"] if len(set(pythons)) > 1 else []
    return Problem("DT391", message, evidence or (_line(text),), tuple(fixes) or ("use the same versions on both",))


def _line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
