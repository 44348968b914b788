"""The engine port on a Ray cluster: commands go to agents in frames, and what agents say comes back as events."""

from __future__ import annotations

import pickle
import time
from collections import deque
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import RLock
from typing import TYPE_CHECKING, Any

import ray

from dovetail.control.commands import Cancel, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import WorkerGone
from dovetail.control.events import BatchesReturned, Cause, NodeLeft, WorkerLost, WorkerStopped
from dovetail.engines.local import limits
from dovetail.engines.local.agreed import dumps
from dovetail.engines.local.calling import settle
from dovetail.engines.ray.auto_init import AUTO_INIT
from dovetail.engines.ray.crews import Crew, Sent
from dovetail.engines.ray.fleet import Agents
from dovetail.engines.ray.gone import Head, while_ray_is_there
from dovetail.engines.ray.hearing import Hearing
from dovetail.engines.ray.links import Listener, Lookout
from dovetail.engines.ray.logs import LogKeeper
from dovetail.engines.ray.measured import Measured
from dovetail.engines.ray.starting import kind_of
from dovetail.engines.ray.stock import Stock
from dovetail.engines.ray.wire import ABOUT, GOES_HOME, SPOOL
from dovetail.resources.amounts import amounts_of, minus, plus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dovetail.control.commands import EngineCommand, Hosted
    from dovetail.control.events import Event
    from dovetail.engines.ray.fleet import Surroundings
    from dovetail.engines.ray.links import Link
    from dovetail.resources.amounts import Amounts

WAITING_S = 0.02
"""Between two looks at what was asked of Ray and is not granted yet."""
CLOSE_S = 8.0
"""Agents that do not leave by then are killed, and their workers with them."""


class RayEngine:
    """See `control.engine.Engine`. One thread polls and submits; `post`, `call`, `store` and `load` are for any."""

    def __init__(self, folder: Path | None, around: Surroundings) -> None:
        AUTO_INIT.off()  # till it is closed
        self._folder = folder or limits.a_folder()
        self._numbers = count(1)
        self._heard: SimpleQueue[Any] = SimpleQueue()
        self._lock = RLock()
        self.stock = Stock(self._folder / "spool", around.memory_bytes, self._numbers, around.stores)
        stock = self.stock
        self.store, self.store_split, self.load, self.let_go = stock.store, stock.store_split, stock.load, stock.let_go
        self.keepsake, self.from_keepsake = stock.keepsake, stock.from_keepsake
        self.measured = Measured()
        self.logs = LogKeeper(self._folder / "logs")
        self.crews: dict[int, Crew] = {}
        self._waiting: dict[int, Crew] = {}
        """Those that cannot be started yet: their agent is not up, or Ray has not granted their seats."""
        self._taken: Amounts = {}
        """By all that live or wait."""
        head = Head() if around.look is not None else None
        self._listener = Listener(self._heard, head)
        self._lookout = Lookout(self._heard, around.look, head=head) if around.look is not None else None
        self.agents = Agents(self._folder, around, self._listener)
        self.holdings = around.holdings
        self.given_up = False
        """Ray is gone, or does not answer: it is not asked for anything any more."""
        self._calls: dict[int, tuple[int, Future[Any]]] = {}
        """Number -> the worker that was asked, and who waits."""
        self._answers: deque[tuple[Future[Any], bool, bytes]] = deque()
        self._ghosts: set[str] = set()
        """Nodes that are gone for good, and count as there only until another one is back."""
        self.events: list[Event] = []
        self._hearing = Hearing(self)
        self._closed = Flag()
        self.keep_spool = False
        """Whether what lies in the spool is needed by who goes on with the run."""
        self.pids: list[int] = []

    # --- the port

    def submit(self, commands: Sequence[EngineCommand]) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            for command in commands:
                with while_ray_is_there(self):
                    self._submit(command)
            self._go_on()

    def _submit(self, command: EngineCommand) -> None:
        if isinstance(command, RunBatches):
            self._run(command)
        elif isinstance(command, StartWorker):
            self._start(command)
        elif isinstance(command, Cancel):
            self._cancel(command)
        elif isinstance(command, StopWorker):
            self._stop(command)

    def _go_on(self) -> None:
        with while_ray_is_there(self):
            self._advance()
            self.agents.flush()

    def poll(self, timeout_s: float | None) -> list[Event]:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed.is_set():
            left = None if until is None else max(0.0, until - time.monotonic())
            if self._waiting:
                left = WAITING_S if left is None else min(left, WAITING_S)
            nudged = self._take(0.0 if self.events else left)
            with self._lock:
                if self._closed.is_set():
                    break
                self._go_on()
            self._settle()
            events, self.events = self.events, []
            if events or nudged or (until is not None and time.monotonic() >= until):
                return events
        return []

    def post(self, event: Event) -> None:
        self._heard.put(event)

    def nudge(self) -> None:
        """Wakes `poll`, which returns although nothing happened. From any thread."""
        self._heard.put(None)

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        from concurrent.futures import Future  # late: most runs call nobody

        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        body = dumps((args, named))
        with self._lock:
            crew = self.crews.get(worker)
            if crew is None or not crew.places:
                future.set_exception(WorkerGone(f"worker {worker} is gone"))
                return future
            number = next(self._numbers)
            self._calls[number] = worker, future
            crew.lead.tell(("call", number, worker, hosted, method, body), ABOUT + len(body))
            crew.lead.flush()
        return future

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._heard.put(None)
        if self._lookout is not None:
            self._lookout.close()
        self._listener.close()
        try:
            with self._lock:  # whoever polls is done first, and sees that it is closed
                self.logs.took(self.agents.close(CLOSE_S))
                for crew in list(self.crews.values()):
                    self.forget(crew)
        finally:
            if self.holdings is not None:
                self.holdings.close()
            self.stock.close()
            if not self.keep_spool:
                limits.remove(self._folder / "spool")
            AUTO_INIT.back()

    def prepare(self, hosted: Iterable[Hosted]) -> None:
        """Packs the code of what will be started: what cannot be sent is said before anything runs."""
        for one in hosted:
            self.agents.shipped(one)

    # --- who is there

    @property
    def unreadable(self) -> bool:
        """Whether an item that was loaded could not be read, ever."""
        return self.stock.unreadable

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]:
        """Worker -> what it hosts by name, and its processes, on whichever node."""
        crews = list(self.crews.values())
        return {crew.number: (crew.name, tuple(pid for pids in crew.pids.values() for pid in pids)) for crew in crews}

    def is_ready(self, worker: int) -> bool:
        crew = self.crews.get(worker)
        return crew is not None and bool(crew.places) and len(crew.ready) == len(crew.places)

    def running(self, worker: int) -> tuple[int, ...]:
        """The messages that are in a call of the user's code right now. Asks the agent, and waits for it."""
        crew = self.crews.get(worker)
        if crew is None or not crew.places:
            return ()
        found: list[int] = []
        for link in crew.places:
            found += ray.get(link.running(worker), timeout=CLOSE_S)
        return tuple(found)

    @property
    def agent_pids(self) -> Mapping[str, int]:
        """Node -> the process of its agent, for those who look after it, or test that."""
        return {link.node: link.hello.pid for link in self.agents.links() if link.hello is not None and not link.dead}

    # --- out

    def _start(self, command: StartWorker) -> None:
        crew = Crew(command, kind_of(command.hosted))
        self.crews[crew.number] = self._waiting[crew.number] = crew
        self._taken = plus(self._taken, amounts_of(command.seats))
        self.want()

    def want(self) -> None:
        """Ray is asked for what is missing; what is too much goes back after a while."""
        if self.holdings is not None:
            self.holdings.want(self._taken, time.monotonic())

    def _advance(self) -> None:
        """Starts whoever can be by now."""
        if not self._waiting or not self.agents.may_begin(self._waiting.values()):
            return
        granted = self.holdings is None or self.holdings.holds(self._taken)
        if self.holdings is not None and not granted and self.holdings.poll():
            granted = self.holdings.holds(self._taken)
        for crew in list(self._waiting.values()):
            if granted or self.holdings is None or self.holdings.holds(self._with(crew)):
                self._start_if_up(crew)

    def _with(self, crew: Crew) -> Amounts:
        """What is taken by those that live, and this one."""
        live = [one for one in self.crews.values() if one.number not in self._waiting]
        total: Amounts = {}
        for one in (*live, crew):
            total = plus(total, amounts_of(one.command.seats))
        return total

    def _start_if_up(self, crew: Crew) -> None:
        links: list[Link] = []
        for node in crew.nodes:
            if self.agents.pauses(node):
                return
            link = self.agents.link(node, crew.kind)
            if link is None:  # there is no such node
                self.lose_crew(crew, WorkerLost(crew.number, Cause.NODE_LOST, f"node {node} is not there"))
                return
            links.append(link)
        if not all(link.up for link in links):
            return
        if len(links) > 1 and crew.meeting is None:
            if not crew.asked_port:
                crew.asked_port = True
                links[0].tell(("port", crew.number))
            return
        del self._waiting[crew.number]
        for link in links:
            crew.places[link] = crew.ranks_on(link.node)
            devices = self.holdings.devices(link.node) if self.holdings is not None else {}
            self.agents.start(link, crew, devices)
        early, crew.early = crew.early, []
        for command in early:
            self._run(command) if isinstance(command, RunBatches) else self._stop(command)

    def _run(self, command: RunBatches) -> None:
        crew = self.crews.get(command.worker)
        if crew is None:
            return
        if not crew.places:
            crew.early.append(command)
            return
        if crew.end is not None:
            return
        crew.sent[command.message] = Sent(command.parts, command.items, command.batch_size)
        home = any(hosted.home for hosted in crew.command.hosted if hosted.name == command.hosted)
        flags = (SPOOL if command.spool else 0) | (GOES_HOME if home else 0)
        sent = {link: self.stock.send(link, command.parts) for link in crew.places}
        for link, parts in sent.items():
            if parts is None or None in sent.values():  # who held some of it is lost: its node's end was reported
                crew.sent.pop(command.message, None)
                self.events.append(BatchesReturned(crew.number, command.message))
                return
            if command.spool and not (link.hello is not None and link.hello.shared):
                flags = flags & ~SPOOL | GOES_HOME  # its disk is nobody else's
            op = ("run", command.message, crew.number, command.hosted, command.batch_size, command.cut)
            link.tell((*op, flags, command.items, parts), ABOUT + 20 * len(parts))

    def _cancel(self, command: Cancel) -> None:
        crew = self.crews.get(command.worker)
        if crew is None or len(crew.command.seats) > 1:
            return
        waits = [early for early in crew.early if getattr(early, "message", None) == command.message]
        if waits:
            crew.early.remove(waits[0])
            self.events.append(BatchesReturned(crew.number, command.message))
        elif crew.places:
            crew.lead.tell(("cancel", command.message, crew.number))

    def _stop(self, command: StopWorker) -> None:
        crew = self.crews.get(command.worker)
        if crew is None:
            return
        if not crew.places:
            if command.drain and crew.early:
                crew.early.append(command)
            elif command.drain:
                self.lose_crew(crew, WorkerStopped(crew.number))
            else:
                self.lose_crew(crew, WorkerLost(crew.number, Cause.STOPPED, command.reason))
            return
        for link in crew.places:
            if link not in crew.ended:
                link.tell(("stop", crew.number, command.drain, command.reason))

    # --- ends

    def lose_crew(self, crew: Crew, end: WorkerLost | WorkerStopped) -> None:
        """All of it is gone, as far as anybody will hear."""
        self.events.append(end)
        self.forget(crew, gives_back=isinstance(end, WorkerStopped))

    def end_crew(self, crew: Crew, end: WorkerLost) -> None:
        """All of it is killed; `end` is told once everybody is gone."""
        crew.end = crew.end or end
        for link in crew.places:
            if link not in crew.ended:
                link.tell(("stop", crew.number, False, end.detail))

    def forget(self, crew: Crew, *, gives_back: bool = False) -> None:
        """`gives_back`: nobody is to take its place, and others may wait for it."""
        if self.crews.pop(crew.number, None) is None:
            return
        for caller in crew.callers:
            caller.tell(("gone", crew.number))
        self._waiting.pop(crew.number, None)
        self._taken = minus(self._taken, amounts_of(crew.command.seats))
        if gives_back and self.holdings is not None and not self._closed.is_set():
            self.holdings.give_back(amounts_of(crew.command.seats))
        elif not self._closed.is_set():
            self.want()
        gone = [number for number, (worker, _) in self._calls.items() if worker == crew.number]
        error = pickle.dumps(WorkerGone(f"worker {crew.number} is gone"))
        self._answers += [(self._calls.pop(number)[1], False, error) for number in gone]
        if self._closed.is_set():
            self._settle()

    def lose_node(self, node: str, why: str) -> None:
        """Its agents, workers and payloads; another agent is started there, if the node may still be there."""
        links = [link for link in self.agents.links() if link.node == node and not link.dead]
        waiting = node in self.agents.returning
        for link in links:
            link.dead = why
            if not self.given_up:
                with suppress(Exception):
                    ray.kill(link.handle)
        for crew in [crew for crew in self.crews.values() if node in crew.nodes]:
            for other in crew.places:
                if not other.dead:
                    other.tell(("stop", crew.number, False, f"node {node} is lost"))
            self.lose_crew(crew, WorkerLost(crew.number, Cause.NODE_LOST, f"node {node} is lost: {why}"))
        returns = self.agents.lost(node)
        self.stock.flights.go_on()
        self.measured.left(node)
        if self.holdings is not None and not returns:
            self.holdings.node_left(node)
        others = self.agents.returning - {node}
        if not returns and others:
            self._ghosts.add(node)
        if not (waiting and returns):
            self.events.append(NodeLeft(node, why, returns or bool(others)))

    def node_is_back(self) -> None:
        """One of those whose agents were lost: now others may be told to be gone."""
        self.events += [NodeLeft(node, "Ray says that it is dead") for node in sorted(self._ghosts)]
        self._ghosts.clear()

    # --- in

    def _take(self, left: float | None) -> bool:
        """Everything that was heard; whether somebody only wants to be seen."""
        nudged = False
        try:
            what = self._heard.get(timeout=left) if left is None or left > 0 else self._heard.get_nowait()
            while True:
                if what is None:
                    nudged = True
                elif type(what) is tuple:
                    with self._lock:
                        if not self._closed.is_set():
                            with while_ray_is_there(self):
                                self._hearing.hear(*what)
                else:
                    self.events.append(what)
                what = self._heard.get_nowait()
        except Empty:
            return nudged

    def answered(self, number: int, fine: bool, body: bytes) -> None:
        _, future = self._calls.pop(number, (0, None))
        if future is not None:
            self._answers.append((future, fine, body))

    def _settle(self) -> None:
        """Whoever waits for a call may do anything then, so nobody holds the lock."""
        while self._answers:
            settle(*self._answers.popleft())
