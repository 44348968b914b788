"""Engine port on a Ray cluster: sends commands to agents, turns their messages into events, tracks workers and lost
nodes. Driver side."""

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
from dovetail.control.engine import WorkerLostError
from dovetail.control.events import BatchesReturned, LossCause, NodeLeft, WorkerLost, WorkerStopped
from dovetail.engines.local import process_setup
from dovetail.engines.local.protocol import pickle_value
from dovetail.engines.local.remote_calls import resolve_future
from dovetail.engines.ray.agent_link import AgentListener, ClusterWatcher, HeadWatchdog, fail_run_if_ray_lost
from dovetail.engines.ray.agent_pool import AgentPool, runtime_env_key
from dovetail.engines.ray.attachment import AUTO_INIT
from dovetail.engines.ray.driver_payloads import DriverPayloads
from dovetail.engines.ray.message_handlers import MessageHandlers
from dovetail.engines.ray.metrics import ClusterMetrics
from dovetail.engines.ray.protocol import MESSAGE_OVERHEAD_BYTES, OUTPUT_TO_DRIVER, SPOOL_OUTPUT
from dovetail.engines.ray.remote_worker import RemoteWorker, SentMessage
from dovetail.engines.ray.worker_logs import LogWriter
from dovetail.resources.amounts import add_amounts, subtract_amounts, sum_seats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dovetail.control.commands import EngineCommand, HostedObject
    from dovetail.control.events import Event
    from dovetail.engines.ray.agent_link import AgentLink
    from dovetail.engines.ray.agent_pool import RayRunContext
    from dovetail.resources.amounts import Amounts

PENDING_POLL_S = 0.02
"""Between two looks at what was asked of Ray and is not granted yet."""
CLOSE_TIMEOUT_S = 8.0
"""Agents that do not leave by then are killed, and their workers with them."""


class RayEngine:
    """See `control.engine.Engine`. One thread polls and submits; `post`, `call`, `store` and `load` are for any."""

    def __init__(self, folder: Path | None, around: RayRunContext) -> None:
        AUTO_INIT.disable()  # till it is closed
        self._folder = folder or process_setup.make_temporary_folder()
        self._numbers = count(1)
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._lock = RLock()
        self.payloads = DriverPayloads(self._folder / "spool", around.memory_bytes, self._numbers, around.stores)
        stock = self.payloads
        self.store, self.store_split, self.load, self.release_mappings = (
            stock.store,
            stock.store_split,
            stock.load,
            stock.release_mappings,
        )
        self.spool_record, self.from_spool_record = stock.spool_record, stock.from_spool_record
        self.measured = ClusterMetrics()
        self.logs = LogWriter(self._folder / "logs")
        self.workers: dict[int, RemoteWorker] = {}
        self._waiting: dict[int, RemoteWorker] = {}
        """Those that cannot be started yet: their agent is not up, or Ray has not granted their seats."""
        self._taken_amounts: Amounts = {}
        """By all that live or wait."""
        head = HeadWatchdog() if around.discover is not None else None
        self._listener = AgentListener(self._inbox, head)
        self._watcher = ClusterWatcher(self._inbox, around.discover, head=head) if around.discover is not None else None
        self.agents = AgentPool(self._folder, around, self._listener)
        self.reservation = around.reservation
        self.given_up = False
        """Ray is gone, or does not answer: it is not asked for anything any more."""
        self._calls: dict[int, tuple[int, Future[Any]]] = {}
        """Number -> the worker that was asked, and who waits."""
        self._answers: deque[tuple[Future[Any], bool, bytes]] = deque()
        self._departed_nodes: set[str] = set()
        """Nodes that are gone for good, and count as there only until another one is back."""
        self.events: list[Event] = []
        self._handlers = MessageHandlers(self)
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
                with fail_run_if_ray_lost(self):
                    self._submit(command)
            self._advance_and_flush()

    def _submit(self, command: EngineCommand) -> None:
        if isinstance(command, RunBatches):
            self._run(command)
        elif isinstance(command, StartWorker):
            self._start(command)
        elif isinstance(command, Cancel):
            self._cancel(command)
        elif isinstance(command, StopWorker):
            self._stop(command)

    def _advance_and_flush(self) -> None:
        with fail_run_if_ray_lost(self):
            self._advance()
            self.agents.flush()

    def poll(self, timeout_s: float | None) -> list[Event]:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed.is_set():
            left = None if until is None else max(0.0, until - time.monotonic())
            if self._waiting:
                left = PENDING_POLL_S if left is None else min(left, PENDING_POLL_S)
            nudged = self._drain_inbox(0.0 if self.events else left)
            with self._lock:
                if self._closed.is_set():
                    break
                self._advance_and_flush()
            self._settle()
            events, self.events = self.events, []
            if events or nudged or (until is not None and time.monotonic() >= until):
                return events
        return []

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    def nudge(self) -> None:
        """Wakes `poll`, which returns although nothing happened. From any thread."""
        self._inbox.put(None)

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        from concurrent.futures import Future  # late: most runs call nobody

        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        body = pickle_value((args, named))
        with self._lock:
            crew = self.workers.get(worker)
            if crew is None or not crew.ranks_by_agent:
                future.set_exception(WorkerLostError(f"worker {worker} is gone"))
                return future
            number = next(self._numbers)
            self._calls[number] = worker, future
            crew.lead.send(("call", number, worker, hosted, method, body), MESSAGE_OVERHEAD_BYTES + len(body))
            crew.lead.flush()
        return future

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._inbox.put(None)
        if self._watcher is not None:
            self._watcher.close()
        self._listener.close()
        try:
            with self._lock:  # whoever polls is done first, and sees that it is closed
                self.logs.write(self.agents.close(CLOSE_TIMEOUT_S))
                for crew in list(self.workers.values()):
                    self.forget(crew)
        finally:
            if self.reservation is not None:
                self.reservation.close()
            self.payloads.close()
            if not self.keep_spool:
                process_setup.remove_folder(self._folder / "spool")
            AUTO_INIT.restore()

    def prepare(self, hosted: Iterable[HostedObject]) -> None:
        """Packs the code of what will be started: what cannot be sent is said before anything runs."""
        for one in hosted:
            self.agents.shipped(one)

    # --- who is there

    @property
    def unreadable(self) -> bool:
        """Whether an item that was loaded could not be read, ever."""
        return self.payloads.unreadable

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]:
        """Worker -> what it hosts by name, and its processes, on whichever node."""
        crews = list(self.workers.values())
        return {crew.number: (crew.name, tuple(pid for pids in crew.pids.values() for pid in pids)) for crew in crews}

    def is_ready(self, worker: int) -> bool:
        crew = self.workers.get(worker)
        return crew is not None and bool(crew.ranks_by_agent) and len(crew.ready) == len(crew.ranks_by_agent)

    def running(self, worker: int) -> tuple[int, ...]:
        """The messages that are in a call of the user's code right now. Asks the agent, and waits for it."""
        crew = self.workers.get(worker)
        if crew is None or not crew.ranks_by_agent:
            return ()
        found: list[int] = []
        for link in crew.ranks_by_agent:
            found += ray.get(link.running_messages(worker), timeout=CLOSE_TIMEOUT_S)
        return tuple(found)

    @property
    def agent_pids(self) -> Mapping[str, int]:
        """Node -> the process of its agent, for those who look after it, or test that."""
        return {
            link.node: link.hello.pid for link in self.agents.links() if link.hello is not None and not link.lost_reason
        }

    # --- out

    def _start(self, command: StartWorker) -> None:
        crew = RemoteWorker(command, runtime_env_key(command.hosted))
        self.workers[crew.number] = self._waiting[crew.number] = crew
        self._taken_amounts = add_amounts(self._taken_amounts, sum_seats(command.seats))
        self.request_resources()

    def request_resources(self) -> None:
        """Ray is asked for what is missing; what is too much goes back after a while."""
        if self.reservation is not None:
            self.reservation.set_wanted(self._taken_amounts, time.monotonic())

    def _advance(self) -> None:
        """Starts whoever can be by now."""
        if not self._waiting or not self.agents.can_begin(self._waiting.values()):
            return
        granted = self.reservation is None or self.reservation.covers(self._taken_amounts)
        if self.reservation is not None and not granted and self.reservation.poll():
            granted = self.reservation.covers(self._taken_amounts)
        for crew in list(self._waiting.values()):
            if granted or self.reservation is None or self.reservation.covers(self._amounts_with(crew)):
                self._start_if_up(crew)

    def _amounts_with(self, crew: RemoteWorker) -> Amounts:
        """What is taken by those that live, and this one."""
        live = [one for one in self.workers.values() if one.number not in self._waiting]
        total: Amounts = {}
        for one in (*live, crew):
            total = add_amounts(total, sum_seats(one.command.seats))
        return total

    def _start_if_up(self, crew: RemoteWorker) -> None:
        links: list[AgentLink] = []
        for node in crew.nodes:
            if self.agents.is_restarting(node):
                return
            link = self.agents.link(node, crew.runtime_env)
            if link is None:  # there is no such node
                self.lose_worker(crew, WorkerLost(crew.number, LossCause.NODE_LOST, f"node {node} is not there"))
                return
            links.append(link)
        if not all(link.is_up for link in links):
            return
        if len(links) > 1 and crew.rendezvous is None:
            if not crew.has_asked_port:
                crew.has_asked_port = True
                links[0].send(("port", crew.number))
            return
        del self._waiting[crew.number]
        for link in links:
            crew.ranks_by_agent[link] = crew.ranks_on(link.node)
            devices = self.reservation.devices(link.node) if self.reservation is not None else {}
            self.agents.start(link, crew, devices)
        early, crew.pending_commands = crew.pending_commands, []
        for command in early:
            self._run(command) if isinstance(command, RunBatches) else self._stop(command)

    def _run(self, command: RunBatches) -> None:
        crew = self.workers.get(command.worker)
        if crew is None:
            return
        if not crew.ranks_by_agent:
            crew.pending_commands.append(command)
            return
        if crew.end is not None:
            return
        crew.sent[command.message] = SentMessage(command.parts, command.items, command.batch_size)
        home = any(hosted.results_to_driver for hosted in crew.command.hosted if hosted.name == command.hosted)
        flags = (SPOOL_OUTPUT if command.spool else 0) | (OUTPUT_TO_DRIVER if home else 0)
        sent = {link: self.payloads.send(link, command.parts) for link in crew.ranks_by_agent}
        for link, parts in sent.items():
            if parts is None or None in sent.values():  # who held some of it is lost: its node's end was reported
                crew.sent.pop(command.message, None)
                self.events.append(BatchesReturned(crew.number, command.message))
                return
            if command.spool and not (link.hello is not None and link.hello.sees_run_folder):
                flags = flags & ~SPOOL_OUTPUT | OUTPUT_TO_DRIVER  # its disk is nobody else's
            op = ("run", command.message, crew.number, command.hosted, command.batch_size, command.segment_items)
            link.send((*op, flags, command.items, parts), MESSAGE_OVERHEAD_BYTES + 20 * len(parts))

    def _cancel(self, command: Cancel) -> None:
        crew = self.workers.get(command.worker)
        if crew is None or len(crew.command.seats) > 1:
            return
        waits = [early for early in crew.pending_commands if getattr(early, "message", None) == command.message]
        if waits:
            crew.pending_commands.remove(waits[0])
            self.events.append(BatchesReturned(crew.number, command.message))
        elif crew.ranks_by_agent:
            crew.lead.send(("cancel", command.message, crew.number))

    def _stop(self, command: StopWorker) -> None:
        crew = self.workers.get(command.worker)
        if crew is None:
            return
        if not crew.ranks_by_agent:
            if command.drain and crew.pending_commands:
                crew.pending_commands.append(command)
            elif command.drain:
                self.lose_worker(crew, WorkerStopped(crew.number))
            else:
                self.lose_worker(crew, WorkerLost(crew.number, LossCause.STOPPED, command.reason))
            return
        for link in crew.ranks_by_agent:
            if link not in crew.ended:
                link.send(("stop", crew.number, command.drain, command.reason))

    # --- ends

    def lose_worker(self, crew: RemoteWorker, end: WorkerLost | WorkerStopped) -> None:
        """All of it is gone, as far as anybody will hear."""
        self.events.append(end)
        self.forget(crew, gives_back=isinstance(end, WorkerStopped))

    def kill_worker(self, crew: RemoteWorker, end: WorkerLost) -> None:
        """All of it is killed; `end` is told once everybody is gone."""
        crew.end = crew.end or end
        for link in crew.ranks_by_agent:
            if link not in crew.ended:
                link.send(("stop", crew.number, False, end.detail))

    def forget(self, crew: RemoteWorker, *, gives_back: bool = False) -> None:
        """`gives_back`: nobody is to take its place, and others may wait for it."""
        if self.workers.pop(crew.number, None) is None:
            return
        for caller in crew.callers:
            caller.send(("gone", crew.number))
        self._waiting.pop(crew.number, None)
        self._taken_amounts = subtract_amounts(self._taken_amounts, sum_seats(crew.command.seats))
        if gives_back and self.reservation is not None and not self._closed.is_set():
            self.reservation.release(sum_seats(crew.command.seats))
        elif not self._closed.is_set():
            self.request_resources()
        gone = [number for number, (worker, _) in self._calls.items() if worker == crew.number]
        error = pickle.dumps(WorkerLostError(f"worker {crew.number} is gone"))
        self._answers += [(self._calls.pop(number)[1], False, error) for number in gone]
        if self._closed.is_set():
            self._settle()

    def lose_node(self, node: str, why: str) -> None:
        """Its agents, workers and payloads; another agent is started there, if the node may still be there."""
        links = [link for link in self.agents.links() if link.node == node and not link.lost_reason]
        waiting = node in self.agents.returning
        for link in links:
            link.lost_reason = why
            if not self.given_up:
                with suppress(Exception):
                    ray.kill(link.handle)
        for crew in [crew for crew in self.workers.values() if node in crew.nodes]:
            for other in crew.ranks_by_agent:
                if not other.lost_reason:
                    other.send(("stop", crew.number, False, f"node {node} is lost"))
            self.lose_worker(crew, WorkerLost(crew.number, LossCause.NODE_LOST, f"node {node} is lost: {why}"))
        returns = self.agents.on_node_lost(node)
        self.payloads.transfers.start_ready()
        self.measured.on_node_left(node)
        if self.reservation is not None and not returns:
            self.reservation.on_node_left(node)
        others = self.agents.returning - {node}
        if not returns and others:
            self._departed_nodes.add(node)
        if not (waiting and returns):
            self.events.append(NodeLeft(node, why, returns or bool(others)))

    def on_node_back(self) -> None:
        """One of those whose agents were lost: now others may be told to be gone."""
        self.events += [NodeLeft(node, "Ray says that it is dead") for node in sorted(self._departed_nodes)]
        self._departed_nodes.clear()

    # --- in

    def _drain_inbox(self, left: float | None) -> bool:
        """Everything that was heard; whether somebody only wants to be seen."""
        nudged = False
        try:
            what = self._inbox.get(timeout=left) if left is None or left > 0 else self._inbox.get_nowait()
            while True:
                if what is None:
                    nudged = True
                elif type(what) is tuple:
                    with self._lock:
                        if not self._closed.is_set():
                            with fail_run_if_ray_lost(self):
                                self._handlers.handle(*what)
                else:
                    self.events.append(what)
                what = self._inbox.get_nowait()
        except Empty:
            return nudged

    def on_answer(self, number: int, fine: bool, body: bytes) -> None:
        _, future = self._calls.pop(number, (0, None))
        if future is not None:
            self._answers.append((future, fine, body))

    def _settle(self) -> None:
        """Whoever waits for a call may do anything then, so nobody holds the lock."""
        while self._answers:
            resolve_future(*self._answers.popleft())
