"""How does a described world answer commands? The engine port in virtual time: `poll` jumps to what happens next."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from itertools import islice
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, assert_never

from dovetail.control.commands import Cancel, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import WorkerGone
from dovetail.control.events import Cause, NodeJoined, NodeLeft, WorkerLost, WorkerReady, WorkerStopped
from dovetail.engines.simulated.agenda import Agenda
from dovetail.engines.simulated.messages import Messages
from dovetail.engines.simulated.workers import Asked, Unit, Worker
from dovetail.engines.simulated.world import JoinNode, KillWorker, LoseNode, Post, SlowDown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.control.commands import EngineCommand
    from dovetail.control.events import Crumb, Event
    from dovetail.control.segments import Segment
    from dovetail.engines.simulated.world import At, World
    from dovetail.resources.cluster import Cluster, Node

HOUR_S = 3600.0
STILL = 100_000
"""So many polls at one and the same time: whoever drives is going round in circles."""


class SimulatedEngine:
    """Happenings within `grain_s` of each other are reported together, so that a controller's steps are shared.

    `limit_s`: a run that is still going then will never end, and `poll` says so.
    """

    def __init__(self, world: World, cluster: Cluster, *, grain_s: float = 0.001, limit_s: float = inf) -> None:
        self.world = world
        self.nodes: dict[str, Node] = {}
        """Those that are there now."""
        self._grain_s = grain_s
        self._limit_s = limit_s
        self._agenda = Agenda()
        self._messages = Messages(world, self._agenda, self._lose, self._stop_if_drained)
        self._outside: deque[Event | Asked] = deque()
        """From other threads: only appended to there, only emptied in `poll` and `close`."""
        self._units: dict[str, Unit] = {}
        self._workers: dict[int, Worker] = {}
        self._workers_on: dict[str, dict[int, Worker]] = {}
        self._random = Random(f"{world.seed} nodes")  # noqa: S311
        self._still = 0
        self._closed = False
        for node in cluster.nodes:
            self._add(node)
        for at in world.script:
            self.at(at.time_s, self._happen, at)

    def submit(self, commands: Sequence[EngineCommand]) -> None:
        if self._closed:
            return
        workers, enter = self._workers, self._messages.enter
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
                self._messages.take_back(worker, command.message)
            else:
                assert_never(command)

    def poll(self, timeout_s: float | None) -> list[Event]:
        agenda, answered, before = self._agenda, self._messages.answered, self._agenda.now
        self._take_in()
        agenda.run(inf if timeout_s is None else agenda.now + timeout_s, self._grain_s)
        assert agenda.now <= self._limit_s, f"the run is still going after {self._limit_s} s; {self.state()}"
        self._still = self._still + 1 if agenda.now == before else 0
        assert self._still < STILL, f"the run goes round in circles at {agenda.now:.3f} s; {self.state()}"
        happened, agenda.out = agenda.out, []
        # a call that ended is no event, but whoever waited for it may do something now
        if not happened and timeout_s is None and self._messages.answered == answered and not self._closed:
            raise AssertionError(f"nothing will ever happen: the run would hang at {agenda.now:.3f} s; {self.state()}")
        return happened

    def post(self, event: Event) -> None:
        self._outside.append(event)

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        """It takes as long as one item, and is made when that time has passed."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._outside.append(Asked(worker, hosted, method, args, named, future))
        if self._closed:
            self._take_in()
        return future

    def now(self) -> float:
        return self._agenda.now

    def close(self) -> None:
        self._closed = True
        self._take_in()
        for worker in list(self._workers.values()):
            self._remove(worker, "the engine is closed")
        self._agenda.clear()

    # What tests and simulated data ask for. Like submit and poll, not for other threads.

    def at(self, time_s: float, do: Callable[[Any], None], what: Any) -> None:
        """Calls `do(what)` at that time."""
        self._agenda.at(time_s, do, what)

    def tell(self, event: Event) -> None:
        """Reports an event now."""
        self._agenda.out.append(event)

    def new_segment(self, items: int, size_bytes: int, node: str, ref: object = None) -> Segment:
        return self._messages.new_segment(items, size_bytes, node, ref)

    def kill(self, worker: int, cause: Cause = Cause.SIGNAL, detail: str = "signal 9") -> None:
        """Now, as if from outside; nothing happens if it is gone."""
        found = self._workers.get(worker)
        if found is not None:
            self._lose(found, cause, detail, self._messages.crumbs_of(found))

    def runs(self, worker: int, message: int) -> bool:
        """Whether the message has begun and not ended."""
        found = self._workers.get(worker)
        return found is not None and message in found.running

    @property
    def workers(self) -> int:
        """How many are there now, ready or not."""
        return len(self._workers)

    def state(self) -> str:
        """One line for people."""
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

    # Workers

    def _take_in(self) -> None:
        while True:
            try:
                item = self._outside.popleft()
            except IndexError:
                break
            if not isinstance(item, Asked):
                self._agenda.out.append(item)
                continue
            worker = self._workers.get(item.worker)
            item.hosting = worker.hosting.get(item.hosted) if worker else None
            if item.hosting is not None:
                self._messages.enter(item.hosting, item)
                continue
            self._messages.answered += 1
            gone, strange = f"worker {item.worker} is gone", f"worker {item.worker} hosts no {item.hosted!r}"
            item.future.set_exception(LookupError(strange) if worker else WorkerGone(gone))

    def _start(self, command: StartWorker) -> None:
        assert command.worker not in self._workers, f"worker {command.worker} is started twice"
        units = [self._unit(hosted.name) for hosted in command.hosted]
        worker = Worker(command, units)
        gone = [node for node in worker.nodes if node not in self.nodes]
        if gone:
            self.tell(WorkerLost(worker.number, Cause.NODE_LOST, f"node {gone[0]!r} is not there"))
            return
        self._workers[worker.number] = worker
        for node in worker.nodes:
            self._workers_on[node][worker.number] = worker
        for unit in units:
            unit.workers[worker.number] = worker
        setup_s = sum([unit.setup_seconds() for unit in units])
        failed = [unit for unit in units if unit.setup_fails()]
        self.at(self.now() + self.world.hop_s + setup_s, self._set_up, (worker, setup_s, failed))

    def _unit(self, name: str) -> Unit:
        unit = self._units.get(name)
        if unit is None:
            unit = self._units[name] = Unit(name, self.world.behaviour_of(name), self.world.seed)
        return unit

    def _set_up(self, what: tuple[Worker, float, list[Unit]]) -> None:
        worker, setup_s, failed = what
        if self._workers.get(worker.number) is not worker:
            return
        if failed:
            self._lose(worker, Cause.SETUP_FAILED, failed[0].behaviour.setup_error)
            return
        worker.ready = True
        self.tell(WorkerReady(worker.number, setup_s))
        for hosting in worker.hosting.values():
            deaths = hosting.unit.behaviour.deaths_per_hour
            if deaths:
                self.at(self.now() + hosting.unit.random.expovariate(deaths / HOUR_S), self._die, worker)
            self._messages.go_on(hosting)

    def _die(self, worker: Worker) -> None:
        if self._workers.get(worker.number) is worker:
            self.kill(worker.number)

    def _stop(self, worker: Worker, command: StopWorker) -> None:
        if command.drain:
            worker.stopping = True
            self._stop_if_drained(worker)
        else:
            self._lose(worker, Cause.STOPPED, command.reason, self._messages.crumbs_of(worker))

    def _stop_if_drained(self, worker: Worker) -> None:
        if worker.idle and self._workers.get(worker.number) is worker:
            self._remove(worker, "it was stopped")
            self.tell(WorkerStopped(worker.number))

    def _lose(self, worker: Worker, cause: Cause, detail: str, crumbs: tuple[Crumb, ...] = ()) -> None:
        self._remove(worker, f"{cause.value}, {detail}")
        self.tell(WorkerLost(worker.number, cause, detail, crumbs, worker.peak_bytes))

    def _remove(self, worker: Worker, why: str) -> None:
        del self._workers[worker.number]
        for node in worker.nodes:
            self._workers_on[node].pop(worker.number, None)
        calls = list(worker.calls.values())
        for hosting in worker.hosting.values():
            hosting.unit.workers.pop(worker.number, None)
            calls += [item for item in hosting.waiting if isinstance(item, Asked)]
        for running in worker.running.values():
            running.live = False
        for asked in calls:
            asked.live = False
            self._messages.answered += 1
            asked.future.set_exception(WorkerGone(f"worker {worker.number} is gone: {why}"))

    # Nodes and the script

    def _happen(self, at: At) -> None:
        match at.what:
            case Post(event):
                self.tell(event)
            case LoseNode(name):
                self._lose_node(name)
            case JoinNode(node):
                self._add(node)
                self.tell(NodeJoined(node))
            case KillWorker(unit, nth):
                for worker in list(islice(self._unit(unit).workers, nth, nth + 1)):
                    self.kill(worker)
            case SlowDown(unit, factor, until_s):
                self._unit(unit).slow_down(factor)
                self.at(until_s, self._unit(unit).speed_up, factor)
            case other:
                assert_never(other)

    def _add(self, node: Node) -> None:
        assert node.name not in self.nodes, f"node {node.name!r} joins although it is there"
        self.nodes[node.name] = node
        self._workers_on[node.name] = {}
        if self.world.node_losses_per_hour:
            age_s = self._random.expovariate(self.world.node_losses_per_hour / HOUR_S)
            self.at(self.now() + age_s, self._lose_by_chance, node)

    def _lose_by_chance(self, node: Node) -> None:
        if self.nodes.get(node.name) is node:
            self._lose_node(node.name)

    def _lose_node(self, name: str) -> None:
        if self.nodes.pop(name, None) is None:
            return
        self._messages.lost_before[name] = self._messages.segments
        for worker in list(self._workers_on[name].values()):
            self._lose(worker, Cause.NODE_LOST, f"node {name!r} is gone", self._messages.crumbs_of(worker))
        self.tell(NodeLeft(name, "lost"))
