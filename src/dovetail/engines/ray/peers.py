"""How do workers of one agent call those of another? Agents ask each other directly, and no thread waits for an answer:
it comes by a call the other way. Only the driver knows who is where, and who is lost with a node."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import ray

from dovetail.control.engine import WorkerGone
from dovetail.engines.ray.wire import Told

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.ray.wire import Op

    Peer = tuple[Any, str]
    """An agent, and the session there."""

SENDERS = 2


class Peers:
    """For the thread of the agent's loop, but for `ask` and `answer`, which Ray's threads call."""

    def __init__(self, engine: LocalEngine, session: str, tell: Callable[[list[Told]], None]) -> None:
        """`tell`: something to the driver."""
        self._engine = engine
        self._session = session
        self._tell = tell
        self._sending = ThreadPoolExecutor(SENDERS, "call")
        self._known: dict[int, Peer] = {}
        """Worker of another agent -> that agent."""
        self._sought: dict[int, list[Op]] = {}
        """Worker of another agent -> calls that wait until it is known which."""
        self._asked: dict[int, tuple[Any, int, int]] = {}
        """Our number of a call -> the process that asked, its number, the worker."""
        self._numbers = count(1)
        self.heard: Callable[[Op], None] = lambda _op: None
        """Gets what is to be done by the thread of the loop."""

    # --- our workers ask

    def call(self, token: Any, number: int, worker: int, hosted: str, method: str, body: bytes) -> None:
        """From a worker of ours to one that is not."""
        mine = next(self._numbers)
        self._asked[mine] = token, number, worker
        call = (mine, worker, hosted, method, body)
        if worker in self._known:
            self._send(self._known[worker], call)
            return
        if worker not in self._sought:
            self._tell([Told(("seek", worker))])
        self._sought.setdefault(worker, []).append(call)

    def found(self, worker: int, peer: Peer | None) -> None:
        calls = self._sought.pop(worker, [])
        if peer is None:
            self.gone(worker)
            return
        self._known[worker] = peer
        for call in calls:
            self._send(peer, call)

    def gone(self, worker: int) -> None:
        """With its node: nobody there will answer."""
        self._known.pop(worker, None)
        self._sought.pop(worker, None)
        why = pickle.dumps(WorkerGone(f"worker {worker} is gone"))
        for mine in [mine for mine, (_, _, asked) in self._asked.items() if asked == worker]:
            self.answered(mine, False, why)

    def answered(self, mine: int, fine: bool, body: bytes) -> None:
        token, number, _ = self._asked.pop(mine, (None, 0, 0))
        if token is not None:
            self._engine.answer_foreign(token, number, fine, body)

    def _send(self, peer: Peer, call: Op) -> None:
        agent, session = peer
        back = ray.get_runtime_context().current_actor, self._session
        self._sending.submit(agent.ask.remote, session, back, *call)

    # --- others ask

    def ask(self, back: Peer, theirs: int, worker: int, hosted: str, method: str, body: bytes) -> None:
        def answer(future: Any) -> None:
            agent, session = back
            with suppress(RuntimeError):  # we are closing
                self._sending.submit(agent.answer.remote, session, theirs, *future.result())

        self._engine.call_packed(worker, hosted, method, body).add_done_callback(answer)

    def answer(self, mine: int, fine: bool, body: bytes) -> None:
        self.heard(("answered", mine, fine, body))

    def close(self) -> None:
        self._sending.shutdown(wait=False)
