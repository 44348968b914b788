"""Attachment of this process to one Ray: attach, reuse, detach, and the switch for Ray's own auto-init."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.address import AddressKind, RayAddress
from dovetail.engines.ray.gcs_probe import (
    AUTH_MODE,
    attach_problem,
    find_running_cluster,
    require_head,
    require_local_node,
    restore_auth_mode,
)
from dovetail.engines.ray.local_cluster import start_local_ray
from dovetail.engines.ray.ray_import import LOG_LEVEL, import_ray, keep_signal_handlers, suppress_warnings
from dovetail.errors import EngineError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

AUTO_INIT_HOOK = "ray._private.auto_init_hook"


class AutoInitSwitch:
    """One per process. Ray's own setting is put back when nobody wants it to be off any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    def disable(self) -> None:
        """Until `back` is called as often."""
        with self._lock:
            hook = sys.modules.get(AUTO_INIT_HOOK)
            if hook is not None and not self._users:
                self._before = bool(hook.enable_auto_connect)
                hook.enable_auto_connect = False  # type: ignore[attr-defined]
            self._users += hook is not None

    def restore(self) -> None:
        with self._lock:
            self._users = max(0, self._users - 1)
            hook = sys.modules.get(AUTO_INIT_HOOK)
            if hook is not None and not self._users:
                hook.enable_auto_connect = self._before  # type: ignore[attr-defined]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        self.disable()
        try:
            yield
        finally:
            self.restore()


AUTO_INIT = AutoInitSwitch()


__all__ = ["Attachment", "RayAddress", "attach", "current_attachment", "detach"]


@dataclass(frozen=True, slots=True)
class Attachment:
    """The Ray that this process uses."""

    address: str
    """HOST:PORT of its head."""
    is_private: bool
    """Whether we started it; then it ends with this process."""
    node_id: str
    """Of the node that this process is on."""
    session: str
    is_ours: bool = True
    """Whether we attached; else somebody in this process did, and it is theirs to leave."""


class _AttachState:
    """One per process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.current: Attachment | None = None
        self.pid = 0
        self.auth_mode: str | None = None
        """As it was before."""
        self.inherited: Any = None
        """The connection of the process that this one was forked from, which does not work here."""

    def on_fork(self) -> None:
        """In the child: somebody may have held the lock."""
        ray = sys.modules.get("ray")
        self.lock = threading.RLock()
        self.current = None
        if ray is not None and ray.is_initialized():
            self.inherited = ray._private.worker.global_worker.node  # noqa: SLF001 - see `_session`


_STATE = _AttachState()
os.register_at_fork(after_in_child=_STATE.on_fork)


def attach(where: RayAddress) -> Attachment:
    """Starts or joins the Ray that was named, once per process; what stands in the way is an EngineError."""
    ray = import_ray()
    _register_exit_hook()
    with _STATE.lock:
        if _is_inherited(ray):
            raise EngineError(_forked_problem())
        if ray.is_initialized():
            return _reuse(ray, where)
        if _STATE.current is not None:  # the user has left it by ray.shutdown()
            _STATE.current = None
            restore_auth_mode(_STATE.auth_mode)
        _STATE.pid, _STATE.auth_mode = os.getpid(), os.environ.get(AUTH_MODE)
        try:
            if where.kind is AddressKind.PRIVATE:
                start_local_ray(ray, _say)
            else:
                _join(ray, find_running_cluster() if where.kind is AddressKind.AUTO else where)
        except BaseException:
            restore_auth_mode(_STATE.auth_mode)
            raise
        _STATE.current = _attachment(ray, private=where.kind is AddressKind.PRIVATE)
        return _STATE.current


def current_attachment() -> Attachment | None:
    """What this process uses now, whoever attached it."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or _is_inherited(ray):
        return None
    with _STATE.lock:
        return _known_attachment(ray)


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
            with suppress_warnings(), keep_signal_handlers():
                ray.shutdown()
        restore_auth_mode(_STATE.auth_mode)


def _detach_at_exit() -> None:
    """The program ends: whoever still asks Ray for something must not start another one, as Ray does by itself."""
    detach()
    if _STATE.pid == os.getpid():
        AUTO_INIT.disable()


def _register_exit_hook() -> None:
    """What was registered last runs first: Ray registered its own end when it was imported."""
    atexit.unregister(_detach_at_exit)
    atexit.register(_detach_at_exit)


def _known_attachment(ray: Any) -> Attachment:
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


def _forked_problem() -> Problem:
    message = "this process was forked from one that uses Ray, and cannot use its connection"
    fixes = ('start it with spawn: multiprocessing.get_context("spawn")', "or use Ray only after the fork")
    return Problem("DT394", message, fixes=fixes)


def _reuse(ray: Any, where: RayAddress) -> Attachment:
    """What this process has, if that is what was asked for."""
    known = _known_attachment(ray)
    match where.kind:
        case AddressKind.PRIVATE:
            fits = known.is_private
        case AddressKind.AUTO:  # inside of a program that uses Ray, that is the one which runs
            fits = not known.is_private or _is_same_head(ray, find_running_cluster(), known.address)
        case _:
            fits = _is_same_head(ray, where, known.address)
    if fits:
        return known
    raise EngineError(_other_ray_problem(where, known))


def _other_ray_problem(where: RayAddress, known: Attachment) -> Problem:
    whose, same, leave = "that this program attached to with ray.init", "ray:auto", "ray.shutdown()"
    if known.is_ours:
        whose, same = "that an earlier run attached to", f"ray:{known.address}"
        leave = "dovetail.engines.ray.attachment.detach()"
    if known.is_private:
        whose, same = "that an earlier run has started for itself", "ray"
    message = f"engine {where} is another Ray than the one {whose}, at {known.address}: a process has one at a time"
    return Problem("DT394", message, fixes=(f'engine="{same}" uses that one', f"or leave it first: {leave}"))


def _is_same_head(ray: Any, where: RayAddress, address: str) -> bool:
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


def _join(ray: Any, where: RayAddress) -> None:
    require_head(where)
    require_local_node(where)
    try:
        with suppress_warnings(), keep_signal_handlers():
            ray.init(address=where.address, log_to_driver=False, logging_level=LOG_LEVEL)
    except BaseException as error:  # also Ctrl-C: nothing is half attached
        with suppress_warnings(), keep_signal_handlers():
            ray.shutdown()
        if isinstance(error, Exception):
            raise EngineError(attach_problem(where, error)) from error
        raise


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 - this is talk, not data
