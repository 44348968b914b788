"""To which Ray does this process belong? To none until somebody says so; to one at a time; reused by later runs."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

from dovetail.engines.ray.auto_init import AUTO_INIT
from dovetail.engines.ray.library import TOLD, import_ray, quiet, signals_kept
from dovetail.engines.ray.own_ray import start_own
from dovetail.engines.ray.reaching import (
    AUTH_MODE,
    auth_back,
    refusal,
    require_answer,
    require_node_here,
    running_here,
)
from dovetail.engines.ray.where import Kind, Where
from dovetail.errors import EngineError, Problem

__all__ = ["Attachment", "Where", "attach", "attached", "detach"]


@dataclass(frozen=True, slots=True)
class Attachment:
    """The Ray that this process uses."""

    address: str
    """HOST:PORT of its head."""
    private: bool
    """Whether we started it; then it ends with this process."""
    node_id: str
    """Of the node that this process is on."""
    session: str
    ours: bool = True
    """Whether we attached; else somebody in this process did, and it is theirs to leave."""


class _State:
    """One per process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.current: Attachment | None = None
        self.pid = 0
        self.auth_mode: str | None = None
        """As it was before."""
        self.inherited: Any = None
        """The connection of the process that this one was forked from, which does not work here."""

    def forked(self) -> None:
        """In the child: somebody may have held the lock."""
        ray = sys.modules.get("ray")
        self.lock = threading.RLock()
        self.current = None
        if ray is not None and ray.is_initialized():
            self.inherited = ray._private.worker.global_worker.node  # noqa: SLF001 - see `_session`


_STATE = _State()
os.register_at_fork(after_in_child=_STATE.forked)


def attach(where: Where) -> Attachment:
    """Starts or joins the Ray that was named, once per process; what stands in the way is an EngineError."""
    ray = import_ray()
    _leave_before_ray_does()
    with _STATE.lock:
        if _is_inherited(ray):
            raise EngineError(_forked())
        if ray.is_initialized():
            return _reused(ray, where)
        if _STATE.current is not None:  # the user has left it by ray.shutdown()
            _STATE.current = None
            auth_back(_STATE.auth_mode)
        _STATE.pid, _STATE.auth_mode = os.getpid(), os.environ.get(AUTH_MODE)
        try:
            if where.kind is Kind.PRIVATE:
                start_own(ray, _say)
            else:
                _join(ray, running_here() if where.kind is Kind.AUTO else where)
        except BaseException:
            auth_back(_STATE.auth_mode)
            raise
        _STATE.current = _attachment(ray, private=where.kind is Kind.PRIVATE)
        return _STATE.current


def attached() -> Attachment | None:
    """What this process uses now, whoever attached it."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or _is_inherited(ray):
        return None
    with _STATE.lock:
        return _known(ray)


def detach() -> None:
    """Leaves the Ray that we attached to, and ends one that we started; never what somebody else attached."""
    ray = sys.modules.get("ray")
    with _STATE.lock:
        if _STATE.current is None or _STATE.pid != os.getpid():
            return
        ours, _STATE.current = _STATE.current.session, None
        there = ray is not None and ray.is_initialized()
        if there and _session(ray) != ours:
            return
        if ray is not None and there:
            with quiet(), signals_kept():
                ray.shutdown()
        auth_back(_STATE.auth_mode)


def _leave_for_good() -> None:
    """The program ends: whoever still asks Ray for something must not start another one, as Ray does by itself."""
    detach()
    if _STATE.pid == os.getpid():
        AUTO_INIT.off()


def _leave_before_ray_does() -> None:
    """What was registered last runs first: Ray registered its own end when it was imported."""
    atexit.unregister(_leave_for_good)
    atexit.register(_leave_for_good)


def _known(ray: Any) -> Attachment:
    """Ours, or what somebody else attached with ray.init."""
    current = _STATE.current
    if current is not None and current.session == _session(ray):
        return current
    _STATE.current = None
    return _attachment(ray, private=False, ours=False)


def _attachment(ray: Any, *, private: bool, ours: bool = True) -> Attachment:
    context = ray.get_runtime_context()
    return Attachment(context.gcs_address, private, context.get_node_id(), _session(ray), ours)


def _session(ray: Any) -> str:
    return str(ray._private.worker.global_worker.node.session_name)  # noqa: SLF001 - nothing public says it


def _is_inherited(ray: Any) -> bool:
    """Whether Ray believes to be there, and is it in another process."""
    return (
        _STATE.inherited is not None
        and ray.is_initialized()
        and ray._private.worker.global_worker.node is _STATE.inherited  # noqa: SLF001
    )


def _forked() -> Problem:
    message = "this process was forked from one that uses Ray, and cannot use its connection"
    fixes = ('start it with spawn: multiprocessing.get_context("spawn")', "or use Ray only after the fork")
    return Problem("DT394", message, fixes=fixes)


def _reused(ray: Any, where: Where) -> Attachment:
    """What this process has, if that is what was asked for."""
    known = _known(ray)
    match where.kind:
        case Kind.PRIVATE:
            fits = known.private
        case Kind.AUTO:  # inside of a program that uses Ray, that is the one which runs
            fits = not known.private or _same(ray, running_here(), known.address)
        case _:
            fits = _same(ray, where, known.address)
    if fits:
        return known
    raise EngineError(_taken(where, known))


def _taken(where: Where, known: Attachment) -> Problem:
    whose, same, leave = "that this program attached to with ray.init", "ray:auto", "ray.shutdown()"
    if known.ours:
        whose, same = "that an earlier run attached to", f"ray:{known.address}"
        leave = "dovetail.engines.ray.attaching.detach()"
    if known.private:
        whose, same = "that an earlier run has started for itself", "ray"
    message = f"engine {where} is another Ray than the one {whose}, at {known.address}: a process has one at a time"
    return Problem("DT394", message, fixes=(f'engine="{same}" uses that one', f"or leave it first: {leave}"))


def _same(ray: Any, where: Where, address: str) -> bool:
    """Whether two addresses are of one head: names resolved, and this machine by the address that Ray calls it."""
    host, _, port = address.rpartition(":")
    if where.address == address or port != str(where.port):
        return where.address == address
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(where.host, None)}
    except OSError:
        return False
    here = {ray.util.get_node_ip_address()} if found & {"127.0.0.1", "::1"} else set()
    return host.strip("[]") in found | here


def _join(ray: Any, where: Where) -> None:
    require_answer(where)
    require_node_here(where)
    try:
        with quiet(), signals_kept():
            ray.init(address=where.address, log_to_driver=False, logging_level=TOLD)
    except BaseException as error:  # also Ctrl-C: nothing is half attached
        with quiet(), signals_kept():
            ray.shutdown()
        if isinstance(error, Exception):
            raise EngineError(refusal(where, error)) from error
        raise


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 - this is talk, not data
