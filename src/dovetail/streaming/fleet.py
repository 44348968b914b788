"""Start, drain, stop, replacement and recycling of workers, and the ledger of the seats they hold."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import Cancel, StartWorker, StopWorker
from dovetail.control.events import LossCause, RunFailure
from dovetail.control.lifecycle import WorkerState
from dovetail.resources.amounts import CARD_RESOURCES, total_free
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.scheduling.replan.snapshot import PlannedStart
from dovetail.streaming.health import HealthTracker
from dovetail.streaming.reserved_capacity import RELEASE_REASON, ReservedCapacity, workers_to_release
from dovetail.streaming.worker_pool import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.control.events import CapacityReserved, NodeJoined, NodeLeft, WorkerLost, WorkerReady, WorkerStopped
    from dovetail.resources.seat import Seat, Seats
    from dovetail.streaming.state import StreamState

WORKERS_PER_RECYCLED_ONE = 10
"""One of this many workers of a unit may be replaced because of its age at the same time, and at least one."""
TEARDOWN_TIMEOUT_S = 30.0
"""A worker whose teardown takes longer is killed."""
RECYCLE_RETRY_S = 5.0


class Fleet:
    """Starts and stops workers. The only class that takes seats from the ledger and gives them back."""

    def __init__(
        self, state: StreamState, cluster: Cluster, fail: Callable[[RunFailure], None], reserved: Seats = ()
    ) -> None:
        self.state = state
        self.cluster = cluster
        self.ledger = Ledger(cluster)
        self.reserved_capacity = ReservedCapacity(reserved)
        """Capacity that stays free for other runs."""
        self.overcommitted = False
        """The last workers of some units use reserved capacity, until there are other seats for them."""
        self._totals = total_free(Counter(self.ledger.free))
        self._taken: dict[str, int] = {}
        self.fail = fail
        self.health = HealthTracker(state, fail)
        self.waiting_starts: dict[int, PlannedStart] = {}
        """Starts whose seats are still in use."""
        self._waiting_by_node: dict[str, dict[int, None]] = {}
        """Node -> starts that wait for seats on it."""
        self._postponed = 0
        self._generation = 0
        """Generation of planned starts; guards against starting a worker of an earlier plan as well."""
        self._set_max_node_memory()

    # --- starting

    def start(self, start: PlannedStart) -> bool:
        """Take the seats and start the worker, later if its setup failed on that node; False: the seats are in use."""
        state = self.state
        unit = state.units_by_name[start.unit]
        wait = self.health.backoff_s(unit, tuple(seat.node for seat in start.seats))
        if wait > 0:
            self._postponed += 1
            state.call_at(state.now + wait, partial(self._start_later, start, self._generation))
            return True
        if not self._try_take(start.seats):
            return False
        worker = Worker(state.next_id(), unit.name, start.seats, state.now)
        state.add_worker(worker)
        state.emit(StartWorker(worker.id, start.seats, (unit.spec.hosted,)))
        timeout_s = unit.spec.setup_timeout_s
        if timeout_s is not None:
            state.call_at(state.now + timeout_s, partial(self._on_setup_timeout, worker))
        return True

    def start_all(self, starts: Iterable[PlannedStart]) -> int:
        """Start workers now, or as soon as their seats are free. Replaces earlier waiting starts. Returns how many are
        postponed because setups failed on their nodes."""
        self._generation += 1
        postponed = self._postponed
        self.waiting_starts.clear()
        self._waiting_by_node.clear()
        for start in starts:
            if not self.start(start):
                number = self.state.next_id()
                self.waiting_starts[number] = start
                for seat in start.seats:
                    self._waiting_by_node.setdefault(seat.node, {})[number] = None
        return self._postponed - postponed

    def cancel_starts(self, unit: str) -> None:
        """Drop the waiting starts of a unit."""
        for number in [number for number, start in self.waiting_starts.items() if start.unit == unit]:
            del self.waiting_starts[number]

    def _start_waiting(self, nodes: Iterable[str]) -> None:
        """Start workers that waited for seats on these nodes."""
        for node in dict.fromkeys(nodes):
            for number in list(self._waiting_by_node.get(node, ())):
                start = self.waiting_starts.get(number)
                if start is None or self.start(start):
                    self.waiting_starts.pop(number, None)
                    del self._waiting_by_node[node][number]

    def on_worker_ready(self, event: WorkerReady) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is None or worker.state is not WorkerState.STARTING:
            return
        unit = self.state.units_by_name[worker.unit]
        worker.mark_ready(self.state.now)
        seconds = event.setup_s or self.state.now - worker.requested_at
        unit.add_setup_time(seconds)
        self.health.on_setup_succeeded(unit, worker.node)
        unit.end_recycling(worker)
        if unit.finished:
            self.stop(worker, "finished")
            return
        unit.pool.add(worker)
        unit.mark_dirty_with_parents()
        if unit.spec.recycle_s is not None:
            self.state.call_at(self.state.now + unit.spec.recycle_s, partial(self.recycle, worker))
        if self.overcommitted:
            self.drain_for_others()

    # --- draining and stopping

    def drain(self, worker: Worker, reason: str) -> None:
        """Send the worker nothing more and stop it when it is idle. `cancel_drain` undoes it until then."""
        if worker.state is WorkerState.STARTING:
            self.stop(worker, reason)
        elif worker.state is WorkerState.READY:
            self.state.units_by_name[worker.unit].pool.remove(worker)
            worker.transition_to(WorkerState.DRAINING, reason)
            self.stop_if_drained(worker)

    def cancel_drain(self, worker: Worker) -> None:
        if worker.state is WorkerState.DRAINING and not worker.will_be_replaced:
            unit = self.state.units_by_name[worker.unit]
            worker.transition_to(WorkerState.READY, "")
            if not (worker.exclusive or worker.paused):
                unit.pool.add(worker)
            unit.mark_dirty_with_parents()

    def replace(self, worker: Worker, reason: str) -> bool:
        """Stop a broken worker after the calls that it runs, and start another one on its seats; False: it is leaving
        already."""
        if worker.state is not WorkerState.READY:
            return False
        self.cancel_messages(worker)
        worker.set_will_be_replaced(True)
        self.drain(worker, reason)
        return True

    def cancel_messages(self, worker: Worker) -> None:
        """Take back the messages of a worker that have not begun."""
        for message in worker.messages.values():
            if not message.cancelled:
                message.mark_cancelled()
                self.state.emit(Cancel(message.id, worker.id))

    def recycle(self, worker: Worker) -> None:
        """Replace a worker because of its age. Only a few at a time, or a unit whose workers started together would
        have none left."""
        unit = self.state.units_by_name[worker.unit]
        if worker.state not in (WorkerState.READY, WorkerState.DRAINING) or worker.will_be_replaced or unit.finished:
            return
        if worker.state is WorkerState.READY and unit.recycling_workers < max(
            1, len(unit.workers) // WORKERS_PER_RECYCLED_ONE
        ):
            unit.begin_recycling(worker)
            self.drain(worker, "recycled")
        elif unit.spec.recycle_s is not None:
            self.state.call_at(self.state.now + RECYCLE_RETRY_S, partial(self.recycle, worker))

    def stop(self, worker: Worker, reason: str, *, now: bool = False) -> None:
        if worker.state is WorkerState.STOPPING:
            if now:
                self.state.emit(StopWorker(worker.id, drain=False, reason=reason))
            return
        if worker.state is WorkerState.READY:
            self.state.units_by_name[worker.unit].pool.remove(worker)
        worker.transition_to(WorkerState.STOPPING, reason)
        self.state.emit(StopWorker(worker.id, drain=not now, reason=reason))
        if not now:
            self._schedule_kill(worker)

    def _schedule_kill(self, worker: Worker) -> None:
        """Kill the worker if its teardown exceeds the timeout, so that it does not delay the run."""
        self.state.call_at(self.state.now + TEARDOWN_TIMEOUT_S, partial(self._kill_if_hung, worker))

    def _kill_if_hung(self, worker: Worker) -> None:
        if worker.state is WorkerState.STOPPING:
            text = f"worker {worker.id} of {worker.unit} did not stop within {TEARDOWN_TIMEOUT_S:g} s and is killed"
            self.state.add_note("worker", text, worker=worker.id, unit=worker.unit)
            self.stop(worker, "teardown timed out", now=True)

    def stop_if_drained(self, worker: Worker) -> None:
        """Stop a draining worker that has finished its last message."""
        if worker.state is WorkerState.DRAINING and not worker.messages:
            worker.transition_to(WorkerState.STOPPING)
            self.state.emit(StopWorker(worker.id, drain=True, reason=worker.stop_reason))
            self._schedule_kill(worker)

    def stop_all(self, reason: str, *, now: bool) -> None:
        self.waiting_starts.clear()
        for worker in self.state.workers.values():
            self.stop(worker, reason, now=now)

    def on_worker_stopped(self, event: WorkerStopped) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is not None:
            unit = self.state.units_by_name[worker.unit]
            unit.count_worker_stopped()
            unit.reset_idle_deaths()
            worker.transition_to(WorkerState.STOPPED)
            self._remove(worker)
            self._on_removed(worker)

    def on_worker_lost(self, worker: Worker, event: WorkerLost, *, blamed: bool) -> None:
        """Start a replacement, unless the worker was leaving anyway or a replan must decide. Call it after the worker's
        messages were put back."""
        unit = self.state.units_by_name[worker.unit]
        was_stopping = worker.state in (WorkerState.DRAINING, WorkerState.STOPPING) and not worker.will_be_replaced
        leaving = was_stopping or unit.finished
        was_setting_up = worker.state is WorkerState.STARTING
        worker.transition_to(WorkerState.LOST)
        self._remove(worker)
        if event.cause is LossCause.STOPPED and leaving:
            unit.count_worker_stopped()
        else:
            unit.count_worker_lost()
        node_lost = event.cause is LossCause.NODE_LOST
        what = event.detail.partition("\n")[0] or event.cause.value
        worker.set_will_be_replaced(not (leaving or self.state.is_ending or node_lost or unit.shape_changed))
        if node_lost:
            self.health.on_node_lost(worker.node)
            self.state.call_at(self.health.down_until[worker.node], self._recheck_nodes)
        elif event.cause is LossCause.SERVER_LOST:
            self.state.add_note("error", f"{unit.name}: worker {worker.id} is lost: {what}", unit=unit.name)
        elif was_setting_up:
            self.state.add_note("error", f"{unit.name}: worker {worker.id} failed in setup: {what}", unit=unit.name)
            self.health.on_setup_failed(unit, worker.node, what, event.detail)
        elif not (blamed or leaving) and worker.ready_at is not None:
            self.health.on_idle_death(unit, self.state.now - worker.ready_at, what, event.detail)
        if not (leaving or worker.will_be_replaced):
            self.state.request_replan(f"worker of {unit.name} lost")
        self._on_removed(worker)

    def _remove(self, worker: Worker) -> None:
        self.state.remove_worker(worker)
        self._release(worker.seats)

    def _on_removed(self, worker: Worker) -> None:
        state = self.state
        unit = state.units_by_name[worker.unit]
        if worker.will_be_replaced and not state.is_ending and not unit.finished:
            # the unit may need more memory per worker by now
            is_large_enough = worker.seats[0].memory_bytes >= unit.shape.memory_bytes
            start = PlannedStart(unit.name, worker.seats, "replaces a worker that is gone")
            started = unit.workers_started
            if not (is_large_enough and self.start(start)):
                state.request_replan(f"no seats for a replacement worker of {unit.name}")
            if worker.recycling and unit.workers_started > started:
                successor = next(reversed(unit.workers.values()))
                worker.hand_over_recycling(successor)
        unit.end_recycling(worker)
        unit.update_queue_limit()
        unit.mark_dirty_with_parents()
        if self.waiting_starts and not state.is_ending:
            self._start_waiting(seat.node for seat in worker.seats)

    def _start_later(self, start: PlannedStart, generation: int) -> None:
        unit = self.state.units_by_name[start.unit]
        if generation == self._generation and not self.state.is_ending and not unit.finished and not self.start(start):
            self.state.request_replan(f"no seats for a postponed worker of {unit.name}")

    def _on_setup_timeout(self, worker: Worker) -> None:
        if worker.state is WorkerState.STARTING:
            unit = self.state.units_by_name[worker.unit]
            reason = f"setup took longer than its timeout of {unit.spec.setup_timeout_s:g} s"
            worker.set_will_be_replaced(True)
            self.stop(worker, reason, now=True)
            self.state.add_note("error", f"{unit.name}: worker {worker.id}: {reason}", unit=unit.name)
            self.health.on_setup_failed(unit, worker.node, reason, "")

    # --- nodes and seats

    def on_node_joined(self, event: NodeJoined) -> None:
        node = event.node
        self.state.add_note("node", f"node {node.name} joined", node=node.name)
        self.health.forget_node(node.name)
        if not self.ledger.has_node(node.name):
            self._set_cluster(Cluster((*self.cluster.nodes, node)), f"node {node.name} joined")

    def on_node_left(self, event: NodeLeft) -> None:
        name = event.node
        self.health.forget_node(name)
        if not self.ledger.has_node(name):
            return
        if len(self.cluster.nodes) == 1 and event.returns:
            self.state.request_replan(f"node {name} restarts")
        elif len(self.cluster.nodes) == 1:
            self.fail(RunFailure(f"the last node, {name!r}, is gone"))
        else:
            self._set_cluster(self.cluster.without({name}), f"node {name} left")

    def on_capacity_reserved(self, event: CapacityReserved) -> None:
        """Release as few workers as possible for other runs, and replan the rest."""
        before, self.reserved_capacity = self.reserved_capacity.amounts, ReservedCapacity(event.seats)
        if self.state.is_ending or before == self.reserved_capacity.amounts:
            return
        going = self.drain_for_others()
        workers = "worker is" if going == 1 else "workers are"
        text = f"the capacity reserved for other runs changed: {going} {workers} released"
        self.state.add_note("decision", text, starts=0, stops=going)
        self.state.request_replan("capacity reserved for other runs changed")

    def drain_for_others(self) -> int:
        """Drain workers that use reserved capacity, as far as their units can spare them; return how many."""
        going, self.overcommitted = workers_to_release(self.state, self.cluster, self.reserved_capacity)
        for worker in going:
            worker.set_will_be_replaced(False)
            self.drain(worker, RELEASE_REASON)
        return len(going)

    def _recheck_nodes(self) -> None:
        """Use a node again that counted as down and was not reported to have left."""
        if not self.state.is_ending:
            self.state.request_replan("a node no longer counts as down")
            self.health.current_down_nodes()
            self._start_waiting(list(self._waiting_by_node))

    def reachable_cluster(self) -> Cluster:
        """The cluster without the nodes that count as down."""
        down = [name for name in self.health.current_down_nodes() if self.ledger.has_node(name)]
        return self.cluster.without(down) if len(down) < len(self.cluster.nodes) else self.cluster

    def _set_cluster(self, cluster: Cluster, reason: str) -> None:
        there = {node.name for node in cluster.nodes}
        held = [seat for worker in self.state.workers.values() for seat in worker.seats if seat.node in there]
        self.cluster = cluster
        self.ledger = Ledger(cluster)
        self._totals = total_free(Counter(self.ledger.free))
        for seat in held:
            self.ledger.take(seat)
        self._taken.clear()
        self._count_use(tuple(held), 1)
        self._set_max_node_memory()
        self.state.request_replan(reason)

    def _set_max_node_memory(self) -> None:
        self.state.set_max_node_memory(max((node.memory_bytes for node in self.cluster.nodes), default=0))

    def resource_use(self) -> dict[str, tuple[int, int]]:
        """Resource -> (used, total)."""
        return {name: (self._taken.get(name, 0), total) for name, total in self._totals.items() if total}

    def _count_use(self, seats: Seats, sign: int) -> None:
        taken = self._taken
        for seat in seats:
            amounts = {"CPUs": seat.cpu_milli, "memory": seat.memory_bytes, **dict(seat.custom)}
            for share in seat.cards:
                for name, amount in zip(CARD_RESOURCES, share[1:], strict=True):
                    amounts[name] = amounts.get(name, 0) + amount
            for name, amount in amounts.items():
                taken[name] = taken.get(name, 0) + sign * amount

    def _try_take(self, seats: Seats) -> bool:
        for position, seat in enumerate(seats):
            if not (self._can_seat(seat) and self.ledger.try_take(seat)):
                for other in seats[:position]:
                    self.ledger.give_back(other)
                return False
        self._count_use(seats, 1)
        return True

    def _can_seat(self, seat: Seat) -> bool:
        there = self.ledger.has_node(seat.node) and seat.node not in self.health.down_until
        return there and self.reserved_capacity.allows(self.ledger.free_on(seat.node), seat)

    def _release(self, seats: Seats) -> None:
        there = tuple(seat for seat in seats if self.ledger.has_node(seat.node))
        for seat in there:
            self.ledger.give_back(seat)
        self._count_use(there, -1)
