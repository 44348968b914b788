"""Calls between workers of different nodes, from agent to agent. Node side.

A call is a call of Ray to the agent of the called worker, and the answer is a call in the other direction; large
values are sent in pieces. The driver knows which agent has a worker (operations "find_agent" and "agent_found"), and
reports lost workers ("worker_gone").
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from dovetail.control.engine import WorkerLostError
from dovetail.engines.ray.protocol import PieceCollector, SizedOp, earlier_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from dovetail.control.engine import CallOptions
    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.ray.protocol import Op

    PeerAddress = tuple[Any, str]
    """An agent and its session."""

SENDER_THREADS = 2


class ForeignCall(NamedTuple):
    """A call to a worker of another agent."""

    number: int
    worker: int
    hosted: str
    method: str
    options: CallOptions
    pieces: list[bytes]


class PeerCalls:
    """Thread: that of the session, except for `on_message`, which Ray's threads call."""

    def __init__(self, engine: LocalEngine, session: str, send: Callable[[list[SizedOp]], None]) -> None:
        """`send`: sends operations to the driver."""
        self._engine = engine
        self._session = session
        self._send_to_driver = send
        self._sending = ThreadPoolExecutor(SENDER_THREADS, "call")
        self._addresses: dict[tuple[int, int], PeerAddress] = {}
        """Worker of another agent and rank -> address of that agent."""
        self._lookups: dict[tuple[int, int], list[ForeignCall]] = {}
        """Worker of an unknown agent and rank -> calls that wait for its address."""
        self._calls: dict[int, tuple[int, int, int]] = {}
        """Number of a call -> calling process, its number of the call, called worker."""
        self._running: dict[tuple[str, int], Future[Any]] = {}
        """Session of another agent, and its number of a call -> call of a worker of this agent."""
        self._numbers = count(1)
        self._sent: dict[str, int] = {}
        """Session of another agent -> number of the last message sent to it."""
        self._numbering = Lock()
        self._receiving = Lock()
        self._received: dict[str, int] = {}
        """Session of another agent -> number of the next message from it."""
        self._early: dict[str, dict[int, Op]] = {}
        """Session of another agent -> messages that arrived before an earlier one."""
        self._pieces: dict[tuple[str, str], PieceCollector] = defaultdict(PieceCollector)
        """Session of another agent, and kind of message -> pieces of the next ones."""
        self.enqueue: Callable[[Op], None] = lambda _op: None
        """Passes an operation to the thread of the session."""

    # --- calls of this agent's workers

    def call(
        self,
        token: int,
        number: int,
        worker: int,
        hosted: str,
        method: str,
        pieces: list[bytes],
        options: CallOptions,
    ) -> None:
        """Call a worker of another agent, for a worker of this one."""
        mine = next(self._numbers)
        self._calls[mine] = token, number, worker
        call = ForeignCall(mine, worker, hosted, method, options, pieces)
        key = worker, options.rank
        if key in self._addresses:
            self._send_call(self._addresses[key], call)
            return
        if key not in self._lookups:
            self._send_to_driver([SizedOp(("find_agent", *key))])
        self._lookups.setdefault(key, []).append(call)

    def cancel(self, token: int, number: int) -> None:
        """Cancel a call of a worker of this agent, if it is not answered."""
        mine = next((mine for mine, call in self._calls.items() if call[:2] == (token, number)), None)
        if mine is None:
            return
        worker = self._calls.pop(mine)[2]
        for calls in self._lookups.values():
            calls[:] = [call for call in calls if call.number != mine]
        for (called, _), peer in self._addresses.items():
            if called == worker:
                self._send(peer, "cancel", mine, [b""], ())

    def on_peer_found(self, worker: int, rank: int, peer: PeerAddress | None) -> None:
        calls = self._lookups.pop((worker, rank), [])
        if peer is None:
            self._end_calls(call.number for call in calls)
            return
        self._addresses[worker, rank] = peer
        for call in calls:
            self._send_call(peer, call)

    def on_worker_gone(self, worker: int) -> None:
        """The worker is lost: end all calls to it."""
        for known in (self._addresses, self._lookups):
            for key in [key for key in known if key[0] == worker]:
                del known[key]
        self._end_calls([mine for mine, (_, _, called) in self._calls.items() if called == worker])

    def _end_calls(self, numbers: Iterable[int]) -> None:
        for mine in numbers:
            worker = self._calls[mine][2]
            self.on_answer(mine, False, [pickle.dumps(WorkerLostError(f"worker {worker} is gone"))])

    def on_answer(self, mine: int, fine: bool, pieces: list[bytes]) -> None:
        token, number, _ = self._calls.pop(mine, (None, 0, 0))
        if token is not None:
            self._engine.answer_foreign_call(token, number, fine, pieces)

    def _send_call(self, peer: PeerAddress, call: ForeignCall) -> None:
        self._send(peer, "call", call.number, call.pieces, (call.worker, call.hosted, call.method, call.options))

    # --- messages between agents

    def _send(self, peer: PeerAddress, kind: str, number: int, pieces: list[bytes], more: tuple[Any, ...]) -> None:
        """Messages are numbered by their sender: its threads and those of Ray do not keep their order."""
        agent, session = peer
        back = ray.get_runtime_context().current_actor, self._session
        earlier = [sized.op for sized in earlier_pieces(f"{kind}_piece", number, pieces)]
        with self._numbering:
            for op in (*earlier, (kind, number, pieces[-1], *more)):
                position = self._sent[session] = self._sent.get(session, -1) + 1
                self._sending.submit(agent.on_peer_message.remote, session, back, position, op)

    def on_message(self, back: PeerAddress, position: int, op: Op) -> None:
        session = back[1]
        with self._receiving:
            early = self._early.setdefault(session, {})
            early[position] = op
            following = self._received.get(session, 0)
            while following in early:
                self._handle(back, *early.pop(following))
                following += 1
            self._received[session] = following

    def _handle(self, back: PeerAddress, kind: str, number: int, piece: bytes, *more: Any) -> None:
        if kind.endswith("_piece"):
            self._pieces[back[1], kind.removesuffix("_piece")].add(number, piece)
            return
        pieces = self._pieces[back[1], kind].take(number, piece)
        if kind == "answer":
            self.enqueue(("answered", number, *more, pieces))
        elif kind == "cancel":
            running = self._running.get((back[1], number))
            if running is not None:
                running.cancel()
        else:
            self._call_worker(back, number, pieces, *more)

    def _call_worker(
        self,
        back: PeerAddress,
        theirs: int,
        pieces: list[bytes],
        worker: int,
        hosted: str,
        method: str,
        options: CallOptions,
    ) -> None:
        key = back[1], theirs

        def answer(future: Any) -> None:
            self._running.pop(key, None)
            if future.cancelled():
                return
            fine, found = future.result()
            with suppress(RuntimeError):  # the session closes
                self._send(back, "answer", theirs, found, (fine,))

        future = self._running[key] = self._engine.call_pickled(worker, hosted, method, pieces, options)
        future.add_done_callback(answer)

    def close(self) -> None:
        self._sending.shutdown(wait=False)
