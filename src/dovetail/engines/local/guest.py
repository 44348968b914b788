"""What may be asked of the engine by an agent that hosts it, beyond the port? A part of a gang, calls that leave the
machine, the names of cards, and the end of a worker."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from dovetail.control.events import WorkerLost
from dovetail.engines.local.calling import Unopened
from dovetail.engines.local.starting import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from threading import Lock

    from dovetail.control.commands import StartWorker
    from dovetail.control.events import Cause
    from dovetail.engines.local.bell import Bell
    from dovetail.engines.local.calling import Calls
    from dovetail.engines.local.children import Child, Rank
    from dovetail.engines.local.frames import Frame, Piece
    from dovetail.engines.local.starting import Starter

    OnForeignCall = Callable[[int, int, int, str, str, bytes], None]


class AsGuest:
    """A part of the local engine: the rest of it is in `engine.LocalEngine`. From the thread that polls, but for
    `call_packed` and `free_port`."""

    _lock: Lock
    _bell: Bell
    _closed: bool
    _starter: Starter
    _calls: Calls
    _children: dict[int, Child]
    _ranks: dict[int, Rank]
    on_foreign_call: OnForeignCall | None = None
    """Who passes on a call of a worker that is not here: (token of the process that asks, its number of the call,
    worker, hosted, method, body). It is answered by `answer_foreign`."""

    def start_ranks(self, command: StartWorker, ranks: tuple[int, ...], meeting: tuple[str, int] | None) -> None:
        """Like `submit([command])`, for these ranks only; the others live on other nodes. `meeting` is the address and
        a free port of rank 0's node; None: there is one rank, or all are here."""
        assert meeting is not None or len(ranks) == len(command.seats), "ranks on several nodes need a place to meet"
        with self._lock:
            if not self._closed:
                self._start(command, ranks, meeting)
                self._flush()

    def free_port(self) -> int:
        """Of this machine, for a gang to meet at."""
        return free_port()

    def set_devices(self, node: str, devices: Mapping[int, str]) -> None:
        """The names under which CUDA knows the cards of a node, by position; for workers that are started from now."""
        self._starter.devices[node] = dict(devices)

    def lose(self, worker: int, cause: Cause, detail: str) -> None:
        """Ends it now, for this reason; nothing happens if it is ending already."""
        with self._lock:
            child = self._children.get(worker)
            if child is None or child.end is not None:
                return
            child.end = WorkerLost(worker, cause, detail)
            self._kill(child)
            self._flush()

    def call_packed(self, worker: int, hosted: str, method: str, body: bytes) -> Future[tuple[bool, bytes]]:
        """Like `call`, with pickled arguments; (False, a pickled error) also if there is no such worker."""
        waits = Unopened()
        with self._lock:
            self._calls.ask(worker, hosted, method, body, waits)
            if get_ident() == self._bell.listener:
                self._flush()
        self._bell.ring()
        return waits.future

    def answer_foreign(self, token: int, number: int, fine: bool, body: bytes) -> None:
        """To the process that asked; ignored, if it is gone."""
        with self._lock:
            rank = self._ranks.get(token)
            if rank is not None and not rank.gone:
                self._put(rank, ("answer", number, fine), [body])
                self._flush()

    def _ask(self, rank: Rank, frame: Frame) -> None:
        """A worker calls another."""
        foreign = self.on_foreign_call
        with self._lock:
            here = self._calls.relay(rank, frame, elsewhere=foreign is not None)
        if not here and foreign is not None:
            _, number, worker, hosted, method = frame.head
            foreign(rank.number, number, worker, hosted, method, bytes(frame.body))

    # --- what the rest of the engine does

    def _start(self, command: StartWorker, ranks: Sequence[int] | None, meeting: tuple[str, int] | None) -> None:
        raise NotImplementedError

    def _kill(self, child: Child) -> None:
        raise NotImplementedError

    def _put(self, rank: Rank, head: tuple[Any, ...], body: Sequence[Piece] = ()) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError
