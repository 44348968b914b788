"""What does an agent do for a run? It hosts a local engine, whose workers are that node's share of the run's.

Ray's calls only bring frames and take some away; one thread does all the rest, as the loop of a run does on one
machine. Whatever needs Ray and may take its time (fetching payloads, sending calls to other agents) has its own.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError

from dovetail.control.commands import Cancel, Hosted, StartWorker
from dovetail.engines.local import limits
from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.local.payload import inline, lengths, pack, pack_split
from dovetail.engines.ray.parcels import Parcels
from dovetail.engines.ray.peers import Peers
from dovetail.engines.ray.rounds import Rounds
from dovetail.engines.ray.sharing import missing, sees
from dovetail.engines.ray.telling import Teller, parts_of
from dovetail.engines.ray.wire import ABOUT, BEAT_S, FULL, Hello, Op, Told, opened, our_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.engines.local.spec import Home
    from dovetail.engines.ray.logs import Piece
    from dovetail.engines.ray.wire import Setup

MUCH, MOST = 1 << 20, 8 << 20
"""With so much to tell, an answer is large: between the two sizes Ray is at its worst."""
GAP_S = 0.005
"""Between two answers, if all there is to tell can wait: more is in each then, and each costs a call of Ray."""
CAN_WAIT = ("done", "use", "over", "log")
FETCHES = 4
STILL_S = 1.0
"""So often who fetches looks whether it is still waited for."""
END_S = 2.0
NOT_THERE_S = 0.5
"""Who waits for a payload that is lost is told after this: by then it is known whether its node is, too."""


class Outbox:
    """What is to be told, from several threads to one; by few words that say much."""

    def __init__(self) -> None:
        self._told: deque[Told] = deque()
        self._size = 0
        self._urgent = False
        self._taken_at = 0.0
        self._there = Condition()

    def put(self, told: Iterable[Told]) -> None:
        with self._there:
            for one in told:
                self._told.append(one)
                self._size += one.size
                self._urgent = self._urgent or one.op[0] not in CAN_WAIT
            self._there.notify()

    def take(self, wait_s: float) -> list[Op]:
        with self._there:
            self._there.wait_for(lambda: bool(self._told), wait_s)
            left = self._taken_at + GAP_S - time.monotonic()
            if left > 0 and self._told:
                self._there.wait_for(lambda: self._urgent or self._size >= FULL, left)
            self._taken_at, self._urgent = time.monotonic(), False
            limit = MOST if self._size >= MUCH else FULL
            found: list[Op] = []
            while self._told and (not found or limit >= self._told[0].size):
                op, size = self._told.popleft()
                self._size -= size
                limit -= size
                found.append(op)
            return found


class Host:
    def __init__(self, setup: Setup) -> None:
        shared = bool(setup.folder) and sees(Path(setup.folder), setup.token)
        self._folder = Path(setup.folder) if shared else limits.a_folder()
        self._shared = shared
        self._engine = LocalEngine(
            self._folder, memory_bytes=setup.memory_bytes or None, pin_cpus=setup.pin_cpus, home=home_of(setup)
        )
        self._engine.keep_spool = shared
        self._node = setup.node
        self._parcels = Parcels(self._engine)
        self._teller = Teller(self._engine, self._parcels)
        self._rounds = Rounds(self._engine, None if shared else self._folder, setup.memory_full)
        self._units: dict[str, Hosted] = {}
        self._inbox: deque[tuple[int, list[Op], Any]] = deque()
        self._early: dict[int, tuple[list[Op], Any]] = {}
        self._next = 0
        self._mine: deque[Op] = deque()
        """From our own threads."""
        self._outbox = Outbox()
        self._fetching = ThreadPoolExecutor(FETCHES, "fetch")
        self.peers = Peers(self._engine, setup.session, self._outbox.put)
        self.peers.heard = self._do
        self._engine.on_foreign_call = self.peers.call
        self._closing = Event()
        address = ray.util.get_node_ip_address()
        unwritable = tuple(folder for folder, token in setup.writes if not sees(folder, token))
        hello = Hello(os.getpid(), address, shared, tuple(missing(setup.asks)), unwritable, our_version())
        self._outbox.put([Told(("hello", *hello))])
        self._ops = self._what_can_be_asked()
        self._thread = Thread(target=self._run, name="dovetail-agent", daemon=True)
        self._thread.start()
        Thread(target=self._rounds.pulse, args=(self._closing,), name="dovetail-pulse", daemon=True).start()

    # --- what Ray's calls bring and take

    def do(self, number: int, frame: bytes, beside: Any = ()) -> None:
        """The numbered frames of the driver; `beside` is what only Ray can carry."""
        try:
            self._inbox.append((number, opened(frame), beside))
            self._engine.nudge()
        except Exception:
            self._outbox.put([Told(("broken", traceback.format_exc()))])

    def listen(self) -> list[Op]:
        """What happened; after a beat also nothing."""
        return self._outbox.take(BEAT_S)

    def give(self, keys: list[int]) -> bytes:
        """Payloads, one behind another."""
        return b"".join(self._parcels.find(keys))

    def running(self, worker: int) -> tuple[int, ...]:
        return self._engine.running(worker)

    def close(self) -> list[Piece]:
        """Everybody gone; what workers printed last, if only this node sees it."""
        self._closing.set()
        self._engine.nudge()
        self._thread.join(END_S)  # or it takes the end of the nursery for a death, and kills it before it is done
        self._engine.close()
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self.peers.close()
        last = self._rounds.close()
        if not self._shared:
            limits.remove(self._folder)
        return last

    # --- the one thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                told = [one for event in self._engine.poll(BEAT_S) for one in self._teller.tell(event)]
                self._take_in()
                told += self._rounds.made(time.monotonic())
                if told:
                    self._outbox.put(told)
        except BaseException:
            if not self._closing.is_set():
                self._outbox.put([Told(("broken", traceback.format_exc()))])

    def _take_in(self) -> None:
        while self._inbox:
            number, ops, beside = self._inbox.popleft()
            self._early[number] = ops, beside
        while self._next in self._early:
            ops, beside = self._early.pop(self._next)
            self._next += 1
            for op in ops:
                self._act(op, beside)
        while self._mine:
            self._act(self._mine.popleft(), ())

    def _act(self, op: Op, beside: Any) -> None:
        kind = op[0]
        if kind == "run":
            if not self._parcels.run(op):
                self._outbox.put([Told(("returned", op[2], op[1]))])
        elif kind == "fetch":
            self._fetching.submit(self._fetch, op[1], op[2], beside[op[3]])
        elif kind == "block":
            self._parcels.comes([op[1]])
            self._fetching.submit(self._fetch_block, op[1], op[2], op[3], beside[op[4]])
        elif kind == "found":
            self.peers.found(op[1], None if op[2] is None else beside[op[2]])
        else:
            self._ops[kind](*op[1:])

    def _what_can_be_asked(self) -> dict[str, Callable[..., None]]:
        return {
            "put": self._put,
            "file": self._parcels.put_file,
            "comes": self._parcels.comes,
            "free": self._parcels.free,
            "unit": self._unit,
            "devices": lambda devices: self._engine.set_devices(self._node, devices),
            "start": self._start,
            "port": lambda worker: self._outbox.put([Told(("port", worker, self._engine.free_port()))]),
            "cancel": self._cancel,
            "stop": self._parcels.stop,
            "call": self._call,
            "arrived": self._arrived,
            "lost": self._lost,
            "over": lambda number: self._outbox.put([Told(("over", number))]),
            "answered": self.peers.answered,
            "gone": self.peers.gone,
        }

    def _put(self, key: int, items: int, sizes: tuple[int, ...], data: bytes) -> None:
        self._parcels.put(key, items, sizes, data)

    def _unit(self, name: str, work: Any, slots: int, writer: bytes | None) -> None:
        self._units[name] = Hosted(name, work, slots, writer)

    def _start(
        self, worker: int, seats: Any, names: tuple[str, ...], ranks: tuple[int, ...], meeting: tuple[str, int] | None
    ) -> None:
        command = StartWorker(worker, seats, tuple(self._units[name] for name in names))
        self._rounds.asked[worker] = sum(seats[rank].memory_bytes for rank in ranks)
        if len(ranks) == len(seats):
            self._engine.submit([command])
        else:
            self._engine.start_ranks(command, ranks, meeting)

    def _cancel(self, message: int, worker: int) -> None:
        if self._parcels.cancel(message, worker):
            self._outbox.put([Told(("returned", worker, message))])
        else:
            self._engine.submit([Cancel(message, worker)])

    # --- what Ray brings

    def _do(self, op: Op) -> None:
        """By the one thread. From any."""
        self._mine.append(op)
        self._engine.nudge()

    def _fetch(self, number: int, about: list[tuple[int, int, tuple[int, ...]]], ref: Any) -> None:
        """Payloads that another agent, or a store of Ray's, holds."""
        try:
            data = self._got(ref, [key for key, _, _ in about])
            found = parts_of(data, [sizes for _, _, sizes in about])
            self._do(("arrived", [(*one, part) for one, part in zip(about, found, strict=True)]))
        except Exception:  # it is lost, with its node or its agent
            self._closing.wait(NOT_THERE_S)
            self._do(("lost", [key for key, _, _ in about]))
        self._do(("over", number))

    def _got(self, ref: Any, keys: list[int]) -> Any:
        """Unless nobody waits for it any more: Ray looks for what lies on a node that hangs for a minute."""
        while True:
            try:
                return ray.get(ref, timeout=STILL_S)
            except GetTimeoutError:
                if self._closing.is_set() or not any(map(self._parcels.is_coming, keys)):
                    raise

    def _fetch_block(self, key: int, items: int, place: tuple[Any, Any, int, int], ref: Any) -> None:
        """Rows of a Ray Dataset, for workers who know nothing of Ray."""
        keys, cut, start, stop = place
        try:
            found = cut(ray.get(ref), start, stop)
            packed = pack(keys, found) if type(found) is list else pack_split(keys, found)
            self._do(("arrived", [(key, items, lengths(packed), inline(packed))]))
        except Exception as error:
            if not self._closing.is_set():
                self._outbox.put([Told(("unusable", f"DT406 a block of the Ray Dataset cannot be read: {error}"))])

    def _arrived(self, payloads: list[tuple[int, int, tuple[int, ...], memoryview]]) -> None:
        for key, items, sizes, data in payloads:
            if self._parcels.is_coming(key):  # and was not freed before it came
                self._parcels.put(key, items, sizes, data)
        self._parcels.arrived()

    def _lost(self, keys: list[int]) -> None:
        """These will not come: who would have given them is gone, or had them no more."""
        keys = [key for key in keys if not self._parcels.holds(key)]
        if not keys:
            return
        told = [Told(("lack", keys))]
        told += [Told(("returned", worker, message)) for worker, message in self._parcels.missing(keys)]
        self._outbox.put(told)

    # --- calls

    def _call(self, number: int, worker: int, hosted: str, method: str, body: bytes) -> None:
        """From the driver."""

        def answered(future: Any) -> None:
            error = future.exception()
            fine, found = future.result() if error is None else (False, pickle.dumps(error))
            self._outbox.put([Told(("answer", number, fine, found), ABOUT + len(found))])

        self._engine.call_packed(worker, hosted, method, body).add_done_callback(answered)


def home_of(setup: Setup) -> Home:
    """What workers get of the driver's place: where they have a runtime_env, that comes first."""
    home = setup.home
    if not setup.kind:
        return home
    asked: dict[str, Any] = json.loads(setup.kind)
    own = [entry for entry in sys.path if entry]
    others = [entry for entry in home.path if not _is_installed(entry)]
    return home._replace(path=(*own, *others), variables={**home.variables, **asked.get("env_vars", {})})


def _is_installed(entry: str) -> bool:
    """Whether a folder of sys.path holds packages, or the library of Python, and not what the user wrote."""
    parts = Path(entry).parts
    library = len(parts) > 1 and parts[-2] in ("lib", "lib64") and parts[-1].startswith("python3.")
    return library or entry.endswith(".zip") or not {"site-packages", "dist-packages", "lib-dynload"}.isdisjoint(parts)
