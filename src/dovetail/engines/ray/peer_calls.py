"""Calls between workers of different nodes, from agent to agent. Node side.
it comes by a call the other way. Only the driver knows who is where, and who is lost with a node."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import ray

from dovetail.control.engine import WorkerLostError
from dovetail.engines.ray.protocol import SizedOp

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.ray.protocol import Op

    PeerAddress = tuple[Any, str]
    """An agent, and the session there."""

SENDER_THREADS = 2


class PeerCalls:
    """For the thread of the agent's loop, but for `ask` and `answer`, which Ray's threads call."""

    def __init__(self, engine: LocalEngine, session: str, tell: Callable[[list[SizedOp]], None]) -> None:
        """`tell`: something to the driver."""
        self._engine = engine
        self._session = session
        self._tell = tell
        self._sending = ThreadPoolExecutor(SENDER_THREADS, "call")
        self._addresses: dict[int, PeerAddress] = {}
        """Worker of another agent -> that agent."""
        self._lookups: dict[int, list[Op]] = {}
        """Worker of another agent -> calls that wait until it is known which."""
        self._calls: dict[int, tuple[Any, int, int]] = {}
        """Our number of a call -> the process that asked, its number, the worker."""
        self._numbers = count(1)
        self.enqueue: Callable[[Op], None] = lambda _op: None
        """Gets what is to be done by the thread of the loop."""

    # --- our workers ask

    def call(self, token: Any, number: int, worker: int, hosted: str, method: str, body: bytes) -> None:
        """From a worker of ours to one that is not."""
        mine = next(self._numbers)
        self._calls[mine] = token, number, worker
        call = (mine, worker, hosted, method, body)
        if worker in self._addresses:
            self._send(self._addresses[worker], call)
            return
        if worker not in self._lookups:
            self._tell([SizedOp(("seek", worker))])
        self._lookups.setdefault(worker, []).append(call)

    def on_peer_found(self, worker: int, peer: PeerAddress | None) -> None:
        calls = self._lookups.pop(worker, [])
        if peer is None:
            self.on_worker_gone(worker)
            return
        self._addresses[worker] = peer
        for call in calls:
            self._send(peer, call)

    def on_worker_gone(self, worker: int) -> None:
        """With its node: nobody there will answer."""
        self._addresses.pop(worker, None)
        self._lookups.pop(worker, None)
        why = pickle.dumps(WorkerLostError(f"worker {worker} is gone"))
        for mine in [mine for mine, (_, _, asked) in self._calls.items() if asked == worker]:
            self.on_answer(mine, False, why)

    def on_answer(self, mine: int, fine: bool, body: bytes) -> None:
        token, number, _ = self._calls.pop(mine, (None, 0, 0))
        if token is not None:
            self._engine.answer_foreign_call(token, number, fine, body)

    def _send(self, peer: PeerAddress, call: Op) -> None:
        agent, session = peer
        back = ray.get_runtime_context().current_actor, self._session
        self._sending.submit(agent.on_peer_call.remote, session, back, *call)

    # --- others ask

    def on_peer_call(self, back: PeerAddress, theirs: int, worker: int, hosted: str, method: str, body: bytes) -> None:
        def answer(future: Any) -> None:
            agent, session = back
            with suppress(RuntimeError):  # we are closing
                self._sending.submit(agent.on_peer_answer.remote, session, theirs, *future.result())

        self._engine.call_pickled(worker, hosted, method, body).add_done_callback(answer)

    def on_peer_answer(self, mine: int, fine: bool, body: bytes) -> None:
        self.enqueue(("answered", mine, fine, body))

    def close(self) -> None:
        self._sending.shutdown(wait=False)
