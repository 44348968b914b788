"""Simulated engine: the engine port over an event queue in virtual time."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count, islice
from math import inf
from random import Random
from threading import get_ident
from typing import TYPE_CHECKING, Any, assert_never

from dovetail.control.commands import Cancel, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import DEFAULT_CALL, CallOptions, WorkerLostError
from dovetail.control.events import LossCause, NodeJoined, NodeLeft, WorkerLost, WorkerReady, WorkerStopped
from dovetail.engines.call_future import CompletionThread, WorkerCallFuture
from dovetail.engines.simulated.message_execution import MessageExecutor
from dovetail.engines.simulated.worker_model import CallRequest, SimulatedUnit, SimulatedWorker
from dovetail.engines.simulated.world import JoinNode, KillWorker, LoseNode, PostEvent, SlowDown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from dovetail.control.commands import EngineCommand
    from dovetail.control.events import Breadcrumb, Event
    from dovetail.control.payload import Segment
    from dovetail.engines.simulated.world import ScriptedEvent, World
    from dovetail.resources.cluster import Cluster, Node


class EventQueue:
    """Event queue in virtual time. Events due at the same time run in the order in which they were added."""

    __slots__ = ("_entries", "_waiting", "now", "out")

    def __init__(self) -> None:
        self.now = 0.0
        self.out: list[Event] = []
        """Events that were not reported yet."""
        self._waiting: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._entries = 0

    def schedule(self, time_s: float, do: Callable[[Any], None], what: Any) -> None:
        self._entries += 1
        heappush(self._waiting, (time_s, self._entries, do, what))

    def run(self, end: float, grain_s: float) -> None:
        """Advance to the next reportable event, including events up to `grain_s` later, but not beyond the end."""
        waiting = self._waiting
        limit = self.now
        while True:
            while waiting and waiting[0][0] <= limit:
                self.now, _, do, what = heappop(waiting)
                do(what)
            if self.out or not waiting or waiting[0][0] > end:
                break
            limit = min(waiting[0][0] + grain_s, end)
        if not self.out and end < inf:
            self.now = end

    def clear(self) -> None:
        self._waiting.clear()
        self.out = []


HOUR_S = 3600.0
MAX_POLLS_WITHOUT_PROGRESS = 100_000
"""Polls without progress of time that indicate an endless loop of the controller."""


class SimulatedEngine:
    """Events within `grain_s` of each other are reported together, which saves controller steps.

    `limit_s`: `poll` raises when a run takes longer in virtual time.
    """

    def __init__(self, world: World, cluster: Cluster, *, grain_s: float = 0.001, limit_s: float = inf) -> None:
        self.world = world
        self.nodes: dict[str, Node] = {}
        """Nodes that currently exist."""
        self._grain_s = grain_s
        self._limit_s = limit_s
        self._queue = EventQueue()
        self._messages = MessageExecutor(world, self._queue, self._lose, self._stop_if_idle)
        self._from_threads: deque[Event | CallRequest | WorkerCallFuture] = deque()
        """Events posted by other threads: appended there, taken in `poll` and `close`."""
        self._units: dict[str, SimulatedUnit] = {}
        self._workers: dict[int, SimulatedWorker] = {}
        self._workers_on: dict[str, dict[int, SimulatedWorker]] = {}
        self._random = Random(f"{world.seed} nodes")  # noqa: S311
        self._idle_polls = 0
        self._polling_thread = 0
        self._numbers = count(1)
        self.completions = CompletionThread()
        self._closed = False
        for node in cluster.nodes:
            self._add_node(node)
        for at in world.script:
            self.schedule(at.time_s, self._run_script, at)

    def submit(self, commands: Sequence[EngineCommand]) -> None:
        if self._closed:
            return
        workers, enter = self._workers, self._messages.enqueue
        for command in commands:
            if isinstance(command, StartWorker):
                self._start(command)
                continue
            worker = workers.get(command.worker)
            if worker is None:
                continue
            if isinstance(command, RunBatches):
                enter(worker.hosting[command.hosted], command)
            elif isinstance(command, StopWorker):
                self._stop(worker, command)
            elif isinstance(command, Cancel):
                self._messages.cancel(worker, command.message)
            else:
                assert_never(command)

    def poll(self, timeout_s: float | None) -> list[Event]:
        self._polling_thread = get_ident()
        agenda, answered, before = self._queue, self._messages.answered, self._queue.now
        self._advance(inf if timeout_s is None else agenda.now + timeout_s)
        assert agenda.now <= self._limit_s, f"the run has not ended after {self._limit_s} s; {self.state()}"
        self._idle_polls = self._idle_polls + 1 if agenda.now == before else 0
        assert self._idle_polls < MAX_POLLS_WITHOUT_PROGRESS, (
            f"the run makes no progress at {agenda.now:.3f} s; {self.state()}"
        )
        happened, agenda.out = agenda.out, []
        # a resolved call is no event, but its caller may act on it now
        if not happened and timeout_s is None and self._messages.answered == answered and not self._closed:
            raise AssertionError(f"no event is scheduled: the run hangs at {agenda.now:.3f} s; {self.state()}")
        return happened

    def _advance(self, end: float) -> None:
        """Advance to the next reportable event or deadline of a call, but not beyond the end."""
        self._take_posted()
        deadline = self._messages.deadlines.next_at()
        self._queue.run(end if deadline is None else min(end, deadline), self._grain_s)
        if deadline is not None:
            self._messages.end_overdue()

    def post(self, event: Event) -> None:
        self._from_threads.append(event)

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        """A call takes as long as one item; the method is called when that time has passed."""
        return self.call_with(DEFAULT_CALL, worker, hosted, method, *args, **named)

    def call_with(
        self, options: CallOptions, worker: int, hosted: str, method: str, /, *args: Any, **named: Any
    ) -> Future[Any]:
        """All ranks of a simulated gang are one object."""
        call = WorkerCallFuture(self)
        call.number, call.worker = next(self._numbers), worker
        self._from_threads.append(CallRequest(hosted, method, args, named, call, options.deadline_s))
        if self._closed:
            self._take_posted()
        return call

    def withdraw_call(self, call: WorkerCallFuture) -> bool:
        self._from_threads.append(call)
        return False  # `poll` does it

    def load(self, body: object, descriptors: Sequence[int]) -> Any:
        raise AssertionError(f"simulated results are not pickled: {body!r}, {descriptors}")

    def drop(self, descriptors: Sequence[int]) -> None:
        """Nothing: simulated results have no descriptors."""

    def wait_for(self, call: WorkerCallFuture, timeout_s: float | None) -> None:
        """See `CallOwner`. Seconds are those of the virtual clock."""
        if get_ident() != self._polling_thread:
            return
        agenda = self._queue
        end = inf if timeout_s is None else agenda.now + timeout_s
        events, agenda.out = agenda.out, []
        while not call.is_answered() and agenda.now < end and not self._closed:
            before = agenda.now, self._messages.answered
            self._advance(end)
            events += agenda.out
            agenda.out = []
            stuck = before == (agenda.now, self._messages.answered) and not self._from_threads
            assert call.is_answered() or not stuck, f"the call hangs at {agenda.now:.3f} s; {self.state()}"
        agenda.out = events

    def now(self) -> float:
        return self._queue.now

    def close(self) -> None:
        self._closed = True
        self._take_posted()
        for worker in list(self._workers.values()):
            self._remove(worker, "the engine is closed")
        self._queue.clear()

    # --- for tests and simulated data. Thread: that of submit and poll

    def schedule(self, time_s: float, do: Callable[[Any], None], what: Any) -> None:
        """Call `do(what)` at that time."""
        self._queue.schedule(time_s, do, what)

    def report(self, event: Event) -> None:
        """Report an event now."""
        self._queue.out.append(event)

    def new_segment(self, items: int, size_bytes: int, node: str, ref: object = None) -> Segment:
        return self._messages.new_segment(items, size_bytes, node, ref)

    def kill(self, worker: int, cause: LossCause = LossCause.SIGNAL, detail: str = "signal 9") -> None:
        """Kill a worker now, as if from outside; ignored if it is gone."""
        found = self._workers.get(worker)
        if found is not None:
            self._lose(found, cause, detail, self._messages.breadcrumbs_of(found))

    def runs(self, worker: int, message: int) -> bool:
        """Whether the message has started and not ended."""
        found = self._workers.get(worker)
        return found is not None and message in found.running

    @property
    def workers(self) -> int:
        """Number of workers that exist, ready or not."""
        return len(self._workers)

    def state(self) -> str:
        """One-line description."""
        lines = [f"{len(self.nodes)} nodes"]
        for unit in self._units.values():
            workers = unit.workers.values()
            ready = sum(worker.ready for worker in workers)
            running = [message for worker in workers for message in worker.running]
            lines.append(f"{unit.name}: {ready} of {len(workers)} workers ready, {len(running)} messages running")
            lines[-1] += (
                f" ({', '.join(map(str, running[:5]))}{', ...' if len(running) > 5 else ''})" if running else ""
            )
        return "; ".join(lines)

    # --- workers

    def _take_posted(self) -> None:
        while True:
            try:
                item = self._from_threads.popleft()
            except IndexError:
                break
            if isinstance(item, WorkerCallFuture):
                if self._messages.withdraw(item):
                    item.set_running_or_notify_cancel()
            elif isinstance(item, CallRequest):
                self._enqueue_call(item)
            else:
                self._queue.out.append(item)

    def _enqueue_call(self, asked: CallRequest) -> None:
        number = asked.future.worker
        worker = self._workers.get(number)
        if worker is not None and worker.stopping:
            worker = None
        hosting = worker.hosting.get(asked.hosted) if worker else None
        if hosting is not None:
            self._messages.enqueue_call(hosting, asked)
            return
        self._messages.answered += 1
        gone, unknown = f"worker {number} is gone", f"worker {number} hosts no {asked.hosted!r}"
        if asked.future.set_running_or_notify_cancel():
            asked.future.set_exception(LookupError(unknown) if worker else WorkerLostError(gone))

    def _start(self, command: StartWorker) -> None:
        assert command.worker not in self._workers, f"worker {command.worker} is started twice"
        units = [self._unit(hosted.name) for hosted in command.hosted]
        worker = SimulatedWorker(command, units)
        gone = [node for node in worker.nodes if node not in self.nodes]
        if gone:
            self.report(WorkerLost(worker.number, LossCause.NODE_LOST, f"node {gone[0]!r} is not there"))
            return
        self._workers[worker.number] = worker
        for node in worker.nodes:
            self._workers_on[node][worker.number] = worker
        for unit in units:
            unit.workers[worker.number] = worker
        setup_s = sum([unit.setup_seconds() for unit in units])
        failed = [unit for unit in units if unit.setup_fails()]
        self.schedule(self.now() + self.world.hop_s + setup_s, self._finish_setup, (worker, setup_s, failed))

    def _unit(self, name: str) -> SimulatedUnit:
        unit = self._units.get(name)
        if unit is None:
            unit = self._units[name] = SimulatedUnit(name, self.world.behaviour_of(name), self.world.seed)
        return unit

    def _finish_setup(self, what: tuple[SimulatedWorker, float, list[SimulatedUnit]]) -> None:
        worker, setup_s, failed = what
        if self._workers.get(worker.number) is not worker:
            return
        if failed:
            self._lose(worker, LossCause.SETUP_FAILED, failed[0].behaviour.setup_error)
            return
        worker.ready = True
        self.report(WorkerReady(worker.number, setup_s))
        for hosting in worker.hosting.values():
            deaths = hosting.unit.behaviour.deaths_per_hour
            if deaths:
                self.schedule(self.now() + hosting.unit.random.expovariate(deaths / HOUR_S), self._die, worker)
            self._messages.start_waiting(hosting)

    def _die(self, worker: SimulatedWorker) -> None:
        if self._workers.get(worker.number) is worker:
            self.kill(worker.number)

    def _stop(self, worker: SimulatedWorker, command: StopWorker) -> None:
        if command.drain:
            self._take_posted()  # calls that were made before
            worker.stopping = True
            self._stop_if_idle(worker)
        else:
            self._lose(worker, LossCause.STOPPED, command.reason, self._messages.breadcrumbs_of(worker))

    def _stop_if_idle(self, worker: SimulatedWorker) -> None:
        if worker.idle and self._workers.get(worker.number) is worker:
            self._remove(worker, "it was stopped")
            self.report(WorkerStopped(worker.number))

    def _lose(
        self, worker: SimulatedWorker, cause: LossCause, detail: str, crumbs: tuple[Breadcrumb, ...] = ()
    ) -> None:
        self._remove(worker, f"{cause.value}, {detail}")
        self.report(WorkerLost(worker.number, cause, detail, crumbs, worker.peak_bytes))

    def _remove(self, worker: SimulatedWorker, why: str) -> None:
        del self._workers[worker.number]
        for node in worker.nodes:
            self._workers_on[node].pop(worker.number, None)
        calls = list(worker.calls.values())
        for hosting in worker.hosting.values():
            hosting.unit.workers.pop(worker.number, None)
            calls += [item for item in hosting.waiting if isinstance(item, CallRequest)]
        for running in worker.running.values():
            running.live = False
        for asked in calls:
            asked.live = False
            self._messages.end_call(asked, WorkerLostError(f"worker {worker.number} is gone: {why}"))

    # --- nodes and scripted events

    def _run_script(self, at: ScriptedEvent) -> None:
        match at.action:
            case PostEvent(event):
                self.report(event)
            case LoseNode(name):
                self._lose_node(name)
            case JoinNode(node):
                self._add_node(node)
                self.report(NodeJoined(node))
            case KillWorker(unit, nth):
                for worker in list(islice(self._unit(unit).workers, nth, nth + 1)):
                    self.kill(worker)
            case SlowDown(unit, factor, until_s):
                self._unit(unit).slow_down(factor)
                self.schedule(until_s, self._unit(unit).speed_up, factor)
            case other:
                assert_never(other)

    def _add_node(self, node: Node) -> None:
        assert node.name not in self.nodes, f"node {node.name!r} joins although it is there"
        self.nodes[node.name] = node
        self._workers_on[node.name] = {}
        if self.world.node_losses_per_hour:
            age_s = self._random.expovariate(self.world.node_losses_per_hour / HOUR_S)
            self.schedule(self.now() + age_s, self._lose_by_chance, node)

    def _lose_by_chance(self, node: Node) -> None:
        if self.nodes.get(node.name) is node:
            self._lose_node(node.name)

    def _lose_node(self, name: str) -> None:
        if self.nodes.pop(name, None) is None:
            return
        self._messages.lost_before[name] = self._messages.segments
        for worker in list(self._workers_on[name].values()):
            self._lose(worker, LossCause.NODE_LOST, f"node {name!r} is gone", self._messages.breadcrumbs_of(worker))
        self.report(NodeLeft(name, "lost"))
