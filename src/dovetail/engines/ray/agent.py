"""Who starts workers on a node of a Ray cluster? One agent there, an actor, that hosts a local engine for a run.

A driver keeps its agents for its next run. Ray's calls name the run they are for: one that comes late finds nobody.
"""

from __future__ import annotations

import pickle
import traceback
from threading import Condition
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from dovetail.engines.ray.hosting import Host
from dovetail.engines.ray.wire import BEAT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.ray.logs import Piece
    from dovetail.engines.ray.wire import Setup

GROUPS = {"do": 1, "listen": 1, "give": 4, "peer": 2}
Method = TypeVar("Method", bound="Callable[..., Any]")


def _in_group(name: str) -> Callable[[Method], Method]:
    """Calls of different groups do not wait for each other."""
    found: Callable[[Method], Method] = ray.method(concurrency_group=name)
    return found


class Agent:
    """`session` is one run's use of it."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._failed: dict[str, str] = {}
        """Session -> why it could not begin."""
        self._over: set[str] = set()
        """Sessions that were closed: what still comes for them is dropped at once."""
        self._begun = Condition()

    @_in_group("give")
    def begin(self, setup: Setup) -> None:
        try:
            host = Host(setup)
        except Exception:
            self._failed[setup.session] = traceback.format_exc()
            return
        with self._begun:
            self._hosts[setup.session] = host
            self._begun.notify_all()

    def _host(self, session: str, wait_s: float = BEAT_S) -> Host | None:
        """None: it is over, or not begun yet."""
        with self._begun:
            self._begun.wait_for(lambda: session in self._hosts or session in self._over, wait_s)
            return self._hosts.get(session)

    @_in_group("do")
    def do(self, session: str, number: int, frame: bytes, beside: Any = ()) -> None:
        """The numbered frames of the driver; `beside` is what only Ray can carry."""
        host = self._host(session)
        if host is not None:
            host.do(number, frame, beside)

    @_in_group("listen")
    def listen(self, session: str) -> bytes:
        """What happened; after a beat also nothing."""
        host = self._host(session)
        if host is None:
            return pickle.dumps([("broken", self._failed[session])] if session in self._failed else [], 5)
        return pickle.dumps(host.listen(), 5)

    @_in_group("give")
    def give(self, session: str, keys: list[int]) -> bytes:
        """Payloads, one behind another."""
        return self._hosts[session].give(keys)

    @_in_group("give")
    def running(self, session: str, worker: int) -> tuple[int, ...]:
        host = self._host(session)
        return host.running(worker) if host is not None else ()

    @_in_group("peer")
    def ask(self, session: str, back: Any, *call: Any) -> None:
        """For a worker of another agent; answered by a call of `back`, an agent and its session."""
        host = self._hosts.get(session)
        if host is not None:
            host.peers.ask(back, *call)

    @_in_group("peer")
    def answer(self, session: str, number: int, fine: bool, body: bytes) -> None:
        """To what we asked."""
        host = self._hosts.get(session)
        if host is not None:
            host.peers.answer(number, fine, body)

    @_in_group("give")
    def close(self, session: str) -> list[Piece]:
        """Everybody gone; what workers printed last, if only this node sees it."""
        self._over.add(session)
        host = self._hosts.pop(session, None)
        return host.close() if host is not None else []
