"""Engine port on a Ray cluster: sends commands to agents and turns their messages into events. Driver side.

The controller's loop calls `submit` and `poll`. Commands go to the agents of `agent_pool` through `agent_link`; what
comes back is in the inbox, and `message_handlers` turns it into events. `remote_worker` holds the state of a worker,
`driver_payloads` knows where payloads are, `placement_groups` reserves resources, `node_loss` handles lost nodes.
"""

from __future__ import annotations

import time
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

import ray

from dovetail.control.commands import Cancel, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import DEFAULT_CALL, CallOptions
from dovetail.control.events import BatchesReturned, LossCause, WorkerLost, WorkerStopped
from dovetail.engines.local import driver_setup
from dovetail.engines.ray.agent_link import AgentListener
from dovetail.engines.ray.agent_pool import AgentPool, runtime_env_key
from dovetail.engines.ray.attachment import AUTO_INIT
from dovetail.engines.ray.call_links import READ_IN_CALLER_S
from dovetail.engines.ray.driver_calls import DriverCalls
from dovetail.engines.ray.driver_payloads import DriverPayloads
from dovetail.engines.ray.failure_detection import ClusterWatcher, HeadWatchdog
from dovetail.engines.ray.message_handlers import MessageHandlers
from dovetail.engines.ray.metrics import ClusterMetrics
from dovetail.engines.ray.node_loss import NodeLoss
from dovetail.engines.ray.protocol import MESSAGE_OVERHEAD_BYTES, OUTPUT_TO_DRIVER, SPOOL_OUTPUT
from dovetail.engines.ray.remote_worker import PendingCall, RemoteWorker, SentMessage
from dovetail.engines.ray.worker_logs import LogWriter
from dovetail.resources.amounts import add_amounts, subtract_amounts, sum_seats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dovetail.control.commands import EngineCommand, HostedObject
    from dovetail.control.events import Event
    from dovetail.engines.call_future import WorkerCallFuture
    from dovetail.engines.ray.agent_link import AgentLink
    from dovetail.engines.ray.agent_pool import RayRunContext
    from dovetail.engines.ray.placement_groups import GroupReservation
    from dovetail.resources.amounts import Amounts

PENDING_POLL_S = 0.02
"""Interval for polling resources that Ray has not granted yet."""
CLOSE_TIMEOUT_S = 8.0
"""Limit for the exit of agents; after it they are killed, and their workers with them."""


class RayEngine:
    """See `control.engine.Engine`. Thread: one thread polls and submits; `post`, `call`, `store` and `load` from
    any."""

    def __init__(self, folder: Path | None, context: RayRunContext) -> None:
        AUTO_INIT.disable()  # until `close`
        self._folder = folder or driver_setup.make_temporary_folder()
        self._numbers = count(1)
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._lock = RLock()
        self.payloads = DriverPayloads(self._folder / "spool", context.memory_bytes, self._numbers, context.stores)
        payloads = self.payloads
        self.store, self.store_split, self.load, self.release_mappings = (
            payloads.store,
            payloads.store_split,
            payloads.load,
            payloads.release_mappings,
        )
        self.spool_record, self.from_spool_record = payloads.spool_record, payloads.from_spool_record
        self.measured = ClusterMetrics()
        self.logs = LogWriter(self._folder / "logs")
        self.workers: dict[int, RemoteWorker] = {}
        self._waiting: dict[int, RemoteWorker] = {}
        """Workers that cannot be started yet: their agent is not up, or Ray has not granted their seats."""
        self._taken_amounts: Amounts = {}
        """Amounts of all live and waiting workers."""
        self._started_amounts: Amounts = {}
        """Amounts of the live workers."""
        head = HeadWatchdog() if context.discover is not None else None
        self._listener = AgentListener(self._inbox, head)
        self._watcher = (
            ClusterWatcher(self._inbox, context.discover, head=head) if context.discover is not None else None
        )
        self.agents = AgentPool(self._folder, context, self._listener)
        self.reservation = context.reservation
        self.losses = NodeLoss(self)
        self._draining: dict[int, StopWorker] = {}
        """Worker -> its stop, which is sent after the calls that wait for space in its socket."""
        self.calls = DriverCalls(
            self.workers, self._numbers, self._lock, self.nudge, self._wait_for, self._on_calls_sent
        )
        self._polling_thread = 0
        self._nudged = False
        """Whether `nudge` was called since the last `poll`."""
        self.events: list[Event] = []
        self._handlers = MessageHandlers(self)
        self._closed = Flag()
        self.keep_spool = False
        """Whether a resumed run needs the files of the spool."""

    # --- the port

    def submit(self, commands: Sequence[EngineCommand]) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            for command in commands:
                with self.losses.fail_run_if_ray_lost():
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
        with self.losses.fail_run_if_ray_lost():
            self._advance()
            for command in list(self._draining.values()):
                self._drain(command)
            self.agents.flush()

    def poll(self, timeout_s: float | None) -> list[Event]:
        self._polling_thread = get_ident()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed.is_set():
            left = None if until is None else max(0.0, until - time.monotonic())
            self._wait_and_handle(0.0 if self.events or self._nudged else left)
            if self._closed.is_set():
                break
            events, self.events = self.events, []
            nudged, self._nudged = self._nudged, False
            if events or nudged or (until is not None and time.monotonic() >= until):
                return events
        return []

    def _wait_and_handle(self, left: float | None) -> None:
        """Wait for messages, at most `left` seconds (None: without limit), and handle them."""
        if self._waiting:
            left = PENDING_POLL_S if left is None else min(left, PENDING_POLL_S)
        self._drain_inbox(self.calls.seconds_left(left))
        with self._lock:
            if self._closed.is_set():
                return
            self.calls.end_overdue()
            self._advance_and_flush()
        self.calls.deliver()

    def _wait_for(self, call: WorkerCallFuture, timeout_s: float | None) -> None:
        """See `CallOwner.wait_for`."""
        if get_ident() != self._polling_thread:
            self.calls.read_answer(call, timeout_s)
            return
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed.is_set() and not call.is_answered():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            if self.calls.read_answer(call, self.calls.seconds_left(left)):
                left = 0.0
            elif self.calls.is_linked(call):  # another thread reads its answer, which does not end the wait
                left = READ_IN_CALLER_S if left is None else min(left, READ_IN_CALLER_S)
            self._wait_and_handle(left)

    def post(self, event: Event) -> None:
        self._inbox.put(event)

    def nudge(self) -> None:
        """Make `poll` return, also without events. From any thread."""
        self._inbox.put(None)

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        return self.calls.call(DEFAULT_CALL, worker, hosted, method, args, named)

    def call_with(
        self, options: CallOptions, worker: int, hosted: str, method: str, /, *args: Any, **named: Any
    ) -> Future[Any]:
        return self.calls.call(options, worker, hosted, method, args, named)

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
        self._listener.stop()
        try:
            with self._lock:  # a thread in `poll` finishes first and sees that it is closed
                self.logs.write(self.agents.close(CLOSE_TIMEOUT_S, self.logs.received))
                self.calls.completions.close()
                for worker in list(self.workers.values()):
                    self.forget(worker)
            self.calls.deliver()
        finally:
            self.calls.links.close()
            self._listener.close()  # agents that are closed have answered, so this does not wait for a heartbeat
            if self.reservation is not None:
                self.reservation.close()
            self.payloads.close()
            if not self.keep_spool:
                driver_setup.remove_folder(self._folder / "spool")
            AUTO_INIT.restore()

    def prepare(self, hosted: Iterable[HostedObject]) -> None:
        """Pickle the code of all hosted objects, so that code that cannot be sent is an error before anything runs."""
        for one in hosted:
            self.agents.shipped(one)

    # --- state

    @property
    def unreadable(self) -> bool:
        """Whether some loaded item could not be unpickled."""
        return self.payloads.unreadable

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]:
        """Worker -> names of its hosted objects, and its process ids on all nodes."""
        workers = list(self.workers.values())
        return {
            worker.number: (worker.name, tuple(pid for pids in worker.pids.values() for pid in pids))
            for worker in workers
        }

    def is_ready(self, worker: int) -> bool:
        remote = self.workers.get(worker)
        return remote is not None and bool(remote.ranks_by_agent) and len(remote.ready) == len(remote.ranks_by_agent)

    def running(self, worker: int) -> tuple[int, ...]:
        """Messages that the user's code processes now. Waits for the agents' answers."""
        remote = self.workers.get(worker)
        if remote is None or not remote.ranks_by_agent:
            return ()
        found: list[int] = []
        for link in remote.ranks_by_agent:
            found += ray.get(link.running_messages(worker), timeout=CLOSE_TIMEOUT_S)
        return tuple(found)

    # --- commands

    def _start(self, command: StartWorker) -> None:
        worker = RemoteWorker(command, runtime_env_key(command.hosted))
        self.workers[worker.number] = self._waiting[worker.number] = worker
        self._taken_amounts = add_amounts(self._taken_amounts, sum_seats(command.seats))
        self.request_resources()

    def request_resources(self) -> None:
        """Reserve what is missing; a surplus is released after some time."""
        if self.reservation is not None:
            self.reservation.set_wanted(self._taken_amounts, time.monotonic())

    def _advance(self) -> None:
        """Start the waiting workers that can be started now."""
        if not self._waiting or not self.agents.can_begin(self._waiting.values()):
            return
        granted = self.reservation is None or self.reservation.covers(self._taken_amounts)
        if self.reservation is not None and not granted and self.reservation.poll():
            granted = self.reservation.covers(self._taken_amounts)
        for worker in list(self._waiting.values()):
            if granted or self.reservation is None or self._is_covered(self.reservation, worker):
                self._start_if_up(worker)

    def _is_covered(self, reservation: GroupReservation, worker: RemoteWorker) -> bool:
        """Whether the amounts of all live workers and of this one are reserved."""
        return reservation.covers(add_amounts(self._started_amounts, sum_seats(worker.command.seats)))

    def _start_if_up(self, worker: RemoteWorker) -> None:
        links: list[AgentLink] = []
        for node in worker.nodes:
            if self.agents.is_restarting(node):
                return
            link = self.agents.link(node, worker.runtime_env)
            if link is None:  # the cluster has no such node
                self.lose_worker(
                    worker, WorkerLost(worker.number, LossCause.NODE_LOST, f"node {node} is not in the cluster")
                )
                return
            links.append(link)
        if not all(link.is_up for link in links):
            return
        if len(links) > 1 and worker.rendezvous is None:
            if not worker.has_asked_port:
                worker.has_asked_port = True
                links[0].send(("port", worker.number, worker.command.rendezvous_seed))
            return
        del self._waiting[worker.number]
        self._started_amounts = add_amounts(self._started_amounts, sum_seats(worker.command.seats))
        for link in links:
            worker.ranks_by_agent[link] = worker.ranks_on(link.node)
            devices = self.reservation.devices(link.node) if self.reservation is not None else {}
            self.agents.start(link, worker, devices)
        early, worker.pending_commands = worker.pending_commands, []
        for command in early:
            if isinstance(command, RunBatches):
                self._run(command)
            elif isinstance(command, PendingCall):
                self.calls.send(worker, command)
            else:
                self._stop(command)

    def _run(self, command: RunBatches) -> None:
        worker = self.workers.get(command.worker)
        if worker is None:
            return
        if not worker.ranks_by_agent:
            worker.pending_commands.append(command)
            return
        if worker.end is not None:
            return
        worker.sent[command.message] = SentMessage(command.parts, command.items, command.batch_size)
        home = any(hosted.results_to_driver for hosted in worker.command.hosted if hosted.name == command.hosted)
        flags = (SPOOL_OUTPUT if command.spool else 0) | (OUTPUT_TO_DRIVER if home else 0)
        sent = {link: self.payloads.send(link, command.parts) for link in worker.ranks_by_agent}
        for link, parts in sent.items():
            if parts is None or None in sent.values():  # an agent that held a part of it is lost; its node was reported
                worker.sent.pop(command.message, None)
                self.events.append(BatchesReturned(worker.number, command.message))
                return
            if command.spool and not (link.hello is not None and link.hello.sees_run_folder):
                flags = flags & ~SPOOL_OUTPUT | OUTPUT_TO_DRIVER  # the driver cannot read its disk
            op = ("run", command.message, worker.number, command.hosted, command.batch_size, command.segment_items)
            size = MESSAGE_OVERHEAD_BYTES + 20 * len(parts)
            link.send((*op, flags, command.items, command.epoch_starts, parts), size)

    def _cancel(self, command: Cancel) -> None:
        worker = self.workers.get(command.worker)
        if worker is None or len(worker.command.seats) > 1:
            return
        waits = [early for early in worker.pending_commands if getattr(early, "message", None) == command.message]
        if waits:
            worker.pending_commands.remove(waits[0])
            self.events.append(BatchesReturned(worker.number, command.message))
        elif worker.ranks_by_agent:
            worker.lead.send(("cancel", command.message, worker.number))

    def _stop(self, command: StopWorker) -> None:
        worker = self.workers.get(command.worker)
        if worker is None:
            return
        if not worker.ranks_by_agent:
            if command.drain and worker.pending_commands:
                worker.pending_commands.append(command)
            elif command.drain:
                self.lose_worker(worker, WorkerStopped(worker.number))
            else:
                self.lose_worker(worker, WorkerLost(worker.number, LossCause.STOPPED, command.reason))
            return
        if command.drain:
            self._drain(command)
            return
        for link in worker.ranks_by_agent:
            if link not in worker.ended:
                link.send(("stop", worker.number, command.drain, command.reason))

    def _drain(self, command: StopWorker) -> None:
        """Stop a worker after the calls that were made before. It refuses calls from the stop on."""
        worker = self.workers.get(command.worker)
        self._draining.pop(command.worker, None)
        if worker is None:
            return
        worker.is_draining = True
        if self.calls.links.has_unsent(worker):
            self._draining[worker.number] = command
            return
        for link in worker.ranks_by_agent:
            if link not in worker.ended:
                link.send(("stop", worker.number, True, command.reason))

    def _on_calls_sent(self) -> None:
        """See `DriverCalls`."""
        if self._draining:
            self.nudge()

    # --- end of workers

    def lose_worker(self, worker: RemoteWorker, end: WorkerLost | WorkerStopped) -> None:
        """Report the end of a worker, and forget it."""
        self.events.append(end)
        self.forget(worker, release=isinstance(end, WorkerStopped))

    def kill_worker(self, worker: RemoteWorker, end: WorkerLost) -> None:
        """Kill all ranks; `end` is reported when the last one has ended."""
        worker.end = worker.end or end
        for link in worker.ranks_by_agent:
            if link not in worker.ended:
                link.send(("stop", worker.number, False, end.detail))

    def forget(self, worker: RemoteWorker, *, release: bool = False) -> None:
        """`release`: no replacement will be started, so its resources are released at once for other runs."""
        if self.workers.pop(worker.number, None) is None:
            return
        for caller in worker.callers:
            caller.send(("worker_gone", worker.number))
        amounts = sum_seats(worker.command.seats)
        if self._waiting.pop(worker.number, None) is None:
            self._started_amounts = subtract_amounts(self._started_amounts, amounts)
        self._taken_amounts = subtract_amounts(self._taken_amounts, amounts)
        if release and self.reservation is not None and not self._closed.is_set():
            self.reservation.release(amounts)
        elif not self._closed.is_set():
            self.request_resources()
        self.calls.on_worker_gone(worker, is_closing=self._closed.is_set())

    # --- inbox

    def _drain_inbox(self, left: float | None) -> None:
        """Handle everything in the inbox; waits for the first message."""
        try:
            what = self._inbox.get(timeout=left) if left is None or left > 0 else self._inbox.get_nowait()
            while True:
                if what is None:
                    self._nudged = True
                elif type(what) is tuple:
                    with self._lock:
                        if not self._closed.is_set():
                            with self.losses.fail_run_if_ray_lost():
                                self._handlers.handle(*what)
                else:
                    self.events.append(what)
                what = self._inbox.get_nowait()
        except Empty:
            pass
