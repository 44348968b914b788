"""Attachment of this process to one Ray: attach, reuse, detach, and the switch for Ray's implicit ray.init().

Dovetail never attaches to a Ray cluster unless you ask it to. `runtime` calls `attach`; this module calls `gcs_probe`
for a cluster that runs, or `local_cluster` for a private Ray. The attachment lasts until `detach` or the end of the
process."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray import ray_private
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


class AutoInitSwitch:
    """Counts the users that need Ray's implicit ray.init() off; the last one restores the previous setting. One per
    process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: bool | None = None
        """None: nothing to restore."""

    def disable(self) -> None:
        """Until `restore` has been called as often."""
        with self._lock:
            if self._before is None:  # also where Ray was not imported when the first user came
                self._before = ray_private.set_auto_init(False)
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users = max(0, self._users - 1)
            if not self._users and self._before is not None:
                ray_private.set_auto_init(self._before)
                self._before = None

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
    """Whether Dovetail started it; then it ends with this process."""
    node_id: str
    """Ray's id of the node that this process is on."""
    session: str
    is_ours: bool = True
    """Whether Dovetail attached; otherwise other code in this process did, and Dovetail never detaches it."""
    namespace: str = ""
    """Ray's namespace of this process, in which its named actors are."""


class _AttachState:
    """One per process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.current: Attachment | None = None
        self.pid = 0
        self.auth_mode: str | None = None
        """RAY_AUTH_MODE before the attachment."""
        self.inherited: Any = None
        """Connection of the process that this one was forked from; it does not work here."""

    def on_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        ray = sys.modules.get("ray")
        self.lock = threading.RLock()
        self.current = None
        if ray is not None and ray.is_initialized():
            self.inherited = ray_private.current_node()


_STATE = _AttachState()
os.register_at_fork(after_in_child=_STATE.on_fork)


def attach(where: RayAddress) -> Attachment:
    """Start or attach to this Ray, once per process. Raises EngineError with the reason if that is not possible."""
    ray = import_ray()
    _register_exit_hook()
    with _STATE.lock:
        if _is_inherited(ray):
            raise EngineError(_forked_problem())
        if ray.is_initialized():
            return _reuse(ray, where)
        if _STATE.current is not None:  # the program called ray.shutdown()
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
    """The Ray that this process uses now, attached by Dovetail or by other code."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or _is_inherited(ray):
        return None
    with _STATE.lock:
        return _known_attachment(ray)


def detach() -> None:
    """Detach from the Ray that Dovetail attached to, and stop a private one. A Ray that other code attached stays."""
    ray = sys.modules.get("ray")
    with _STATE.lock:
        if _STATE.current is None or _STATE.pid != os.getpid():
            return
        ours, _STATE.current = _STATE.current.session, None
        initialized = ray is not None and ray.is_initialized()
        if initialized and _session() != ours:
            return
        if ray is not None and initialized:
            with suppress_warnings(), keep_signal_handlers():
                ray.shutdown()
        restore_auth_mode(_STATE.auth_mode)


def _detach_at_exit() -> None:
    """Also prevent late calls into Ray from starting another one, as Ray's implicit ray.init() would."""
    detach()
    if _STATE.pid == os.getpid():
        AUTO_INIT.disable()


def _register_exit_hook() -> None:
    """Exit hooks run in reverse order, and Ray registered its own when it was imported: this one must be later."""
    atexit.unregister(_detach_at_exit)
    atexit.register(_detach_at_exit)


def _known_attachment(ray: Any) -> Attachment:
    """Dovetail's attachment, or one that other code made with ray.init."""
    current = _STATE.current
    if current is not None and current.session == _session():
        return current
    _STATE.current = None
    return _attachment(ray, private=False, ours=False)


def _attachment(ray: Any, *, private: bool, ours: bool = True) -> Attachment:
    context = ray.get_runtime_context()
    return Attachment(
        context.gcs_address, private, context.get_node_id(), _session(), ours, str(context.namespace or "")
    )


def _session() -> str:
    return ray_private.session_name() or ""


def _is_inherited(ray: Any) -> bool:
    """Whether Ray's connection belongs to the process that this one was forked from."""
    return _STATE.inherited is not None and ray.is_initialized() and ray_private.current_node() is _STATE.inherited


def _forked_problem() -> Problem:
    message = "this process was forked from one that uses Ray and cannot use its connection"
    fixes = ('start it with spawn: multiprocessing.get_context("spawn")', "use Ray only after the fork")
    return Problem("DT394", message, fixes=fixes)


def _reuse(ray: Any, where: RayAddress) -> Attachment:
    """The current attachment, if it is the requested Ray."""
    known = _known_attachment(ray)
    match where.kind:
        case AddressKind.PRIVATE:
            fits = known.is_private
        case AddressKind.AUTO:  # in a program that uses Ray, "auto" is that Ray
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
        whose, same = "that an earlier run started", "ray"
    message = f"engine {where} is not the Ray {whose}, at {known.address}; a process uses one Ray at a time"
    return Problem("DT394", message, fixes=(f'engine="{same}" uses that one', f"detach first: {leave}"))


def _is_same_head(ray: Any, where: RayAddress, address: str) -> bool:
    """Whether two addresses are of one head: names are resolved, and localhost is the address that Ray uses for it."""
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
    require_local_node(where, require_head(where))
    try:
        with suppress_warnings(), keep_signal_handlers():
            ray.init(address=where.address, log_to_driver=False, logging_level=LOG_LEVEL)
    except BaseException as error:  # also Ctrl-C: never leave it half attached
        with suppress_warnings(), keep_signal_handlers():
            ray.shutdown()
        if isinstance(error, Exception):
            raise EngineError(attach_problem(where, error)) from error
        raise


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 - a progress message
