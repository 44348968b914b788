"""Start, drain, stop, replacement and recycling of workers, and the ledger of the seats they hold."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import StartWorker, StopWorker
from dovetail.control.events import LossCause
from dovetail.control.lifecycle import WorkerState
from dovetail.resources.amounts import CARD_RESOURCES, total_free
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.scheduling.replan.snapshot import PlannedStart
from dovetail.streaming.dispatch import update_queue_limit
from dovetail.streaming.health import HealthTracker
from dovetail.streaming.reserved_capacity import RELEASE_REASON, ReservedCapacity, workers_to_release
from dovetail.streaming.worker_pool import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.control.events import CapacityReserved, WorkerLost, WorkerReady
    from dovetail.resources.cluster import Node
    from dovetail.resources.seat import Seat, Seats
    from dovetail.streaming.state import StreamState, UnitState

WORKERS_PER_RECYCLED_ONE = 10
"""One in so many workers of a unit may be on its way to being replaced by age, and at least one."""
RECYCLE_RETRY_S = 5.0


class Fleet:
    """Starts and stops workers; the only one who takes seats and gives them back."""

    def __init__(self, board: StreamState, cluster: Cluster, fail: Callable[[str, str], None]) -> None:
        self.state = board
        self.cluster = cluster
        self.ledger = Ledger(cluster)
        self.reserved_capacity = ReservedCapacity()
        """What others hold: it stays free."""
        self.overcommitted = False
        """The last workers of some units sit on what others hold, until there is another place for them."""
        self._totals = total_free(Counter(self.ledger.free))
        self._taken: dict[str, int] = {}
        self.fail = fail
        self.health = HealthTracker(board, fail)
        self.waiting_starts: dict[int, PlannedStart] = {}
        """Starts whose seats others still hold."""
        self._waiting_by_node: dict[str, dict[int, None]] = {}
        """Node -> those that wait for seats there."""
        self.replan_requested = False
        """Something changed that a replan should look at soon."""
        self._postponed = 0
        self._generation = 0
        """How many there were: what one of them saw as missing is not started once more by who came before it."""

    # --- coming

    def start(self, start: PlannedStart) -> bool:
        """Takes the seats and starts the worker; False if somebody still sits there. Where its setup failed, later."""
        board = self.state
        lane = board.units_by_name[start.unit]
        wait = self.health.backoff_s(lane, tuple(seat.node for seat in start.seats))
        if wait > 0:
            self._postponed += 1
            board.call_at(board.now + wait, partial(self._start_later, start, self._generation))
            return True
        if not self._try_take(start.seats):
            return False
        worker = Worker(board.next_id(), lane.name, start.seats, board.now)
        board.workers[worker.id] = worker
        lane.workers[worker.id] = worker
        lane.workers_started += 1
        update_queue_limit(board, lane)
        board.commands.append(StartWorker(worker.id, start.seats, (lane.spec.hosted,)))
        timeout_s = lane.spec.setup_timeout_s
        if timeout_s is not None:
            board.call_at(board.now + timeout_s, partial(self._on_setup_timeout, worker))
        return True

    def start_all(self, starts: Iterable[PlannedStart]) -> int:
        """Now, or as soon as their seats are free. Replaces what waited before. How many must wait because their setup
        failed where they would sit."""
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
        """Nobody of this unit is started any more."""
        for number in [number for number, start in self.waiting_starts.items() if start.unit == unit]:
            del self.waiting_starts[number]

    def _start_waiting(self, nodes: Iterable[str]) -> None:
        """Those who waited for seats on these nodes."""
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
        lane = self.state.units_by_name[worker.unit]
        worker.transition_to(WorkerState.READY)
        worker.ready_at = self.state.now
        seconds = event.setup_s or self.state.now - worker.requested_at
        lane.throughput.add_setup(seconds)
        lane.setup_s += seconds
        self.health.on_setup_succeeded(lane, worker.node)
        self._end_recycling(lane, worker)
        if lane.finished:
            self.stop(worker, "finished")
            return
        lane.pool.add(worker)
        self.state.mark_dirty(lane)
        if lane.spec.recycle_s is not None:
            self.state.call_at(self.state.now + lane.spec.recycle_s, partial(self.recycle, worker))
        if self.overcommitted:
            self.drain_for_others()

    # --- going

    def drain(self, worker: Worker, reason: str) -> None:
        """Nothing new for it; it is stopped when it has nothing left. Can be taken back until then."""
        if worker.state is WorkerState.STARTING:
            self.stop(worker, reason)
        elif worker.state is WorkerState.READY:
            self.state.units_by_name[worker.unit].pool.remove(worker)
            worker.transition_to(WorkerState.DRAINING)
            worker.stop_reason = reason
            self.stop_if_drained(worker)

    def cancel_drain(self, worker: Worker) -> None:
        if worker.state is WorkerState.DRAINING and not worker.will_be_replaced:
            lane = self.state.units_by_name[worker.unit]
            worker.transition_to(WorkerState.READY)
            worker.stop_reason = ""
            if not worker.exclusive:
                lane.pool.add(worker)
            self.state.mark_dirty(lane)

    def recycle(self, worker: Worker) -> None:
        """Old enough: another takes its seats. Only a few at a time, or a unit whose workers began together would have
        none left."""
        lane = self.state.units_by_name[worker.unit]
        if worker.state not in (WorkerState.READY, WorkerState.DRAINING) or worker.will_be_replaced or lane.finished:
            return
        if worker.state is WorkerState.READY and lane.recycling_workers < max(
            1, len(lane.workers) // WORKERS_PER_RECYCLED_ONE
        ):
            lane.recycling_workers += 1
            worker.recycling = worker.will_be_replaced = True
            self.drain(worker, "recycled")
        elif lane.spec.recycle_s is not None:
            self.state.call_at(self.state.now + RECYCLE_RETRY_S, partial(self.recycle, worker))

    def _end_recycling(self, lane: UnitState, worker: Worker) -> None:
        if worker.recycling:
            worker.recycling = False
            lane.recycling_workers -= 1

    def stop(self, worker: Worker, reason: str, *, now: bool = False) -> None:
        if worker.state is WorkerState.STOPPING:
            if now:
                self.state.commands.append(StopWorker(worker.id, drain=False, reason=reason))
            return
        if worker.state is WorkerState.READY:
            self.state.units_by_name[worker.unit].pool.remove(worker)
        worker.transition_to(WorkerState.STOPPING)
        worker.stop_reason = reason
        self.state.commands.append(StopWorker(worker.id, drain=not now, reason=reason))
        if not now:
            self._schedule_kill(worker)

    def _schedule_kill(self, worker: Worker) -> None:
        """A teardown that hangs must not hold up the run."""
        self.state.call_at(self.state.now + self.state.options.teardown_timeout_s, partial(self._kill_if_hung, worker))

    def _kill_if_hung(self, worker: Worker) -> None:
        if worker.state is WorkerState.STOPPING:
            text = (
                f"worker {worker.id} of {worker.unit} did not stop within "
                f"{self.state.options.teardown_timeout_s:g} s: killed"
            )
            self.state.add_note("worker", text, worker=worker.id, unit=worker.unit)
            self.stop(worker, "its teardown hung", now=True)

    def stop_if_drained(self, worker: Worker) -> None:
        """A draining worker that has finished its last message is stopped."""
        if worker.state is WorkerState.DRAINING and not worker.messages:
            worker.transition_to(WorkerState.STOPPING)
            self.state.commands.append(StopWorker(worker.id, drain=True, reason=worker.stop_reason))
            self._schedule_kill(worker)

    def stop_all(self, reason: str, *, now: bool) -> None:
        self.waiting_starts.clear()
        for worker in self.state.workers.values():
            self.stop(worker, reason, now=now)

    def on_worker_stopped(self, number: int) -> None:
        worker = self.state.workers.get(number)
        if worker is not None:
            lane = self.state.units_by_name[worker.unit]
            lane.workers_stopped += 1
            lane.idle_deaths = 0  # one that lived to an orderly end
            worker.transition_to(WorkerState.STOPPED)
            self._remove(worker)
            self._on_removed(worker)

    def on_worker_lost(self, worker: Worker, event: WorkerLost, *, blamed: bool) -> None:
        """After its messages went back: a replacement, unless it was leaving or its unit cannot live."""
        lane = self.state.units_by_name[worker.unit]
        leaving = worker.state in (WorkerState.DRAINING, WorkerState.STOPPING) and not worker.will_be_replaced
        was_setting_up = worker.state is WorkerState.STARTING
        worker.transition_to(WorkerState.LOST)
        self._remove(worker)
        if event.cause is LossCause.STOPPED and leaving:
            lane.workers_stopped += 1
        else:
            lane.workers_lost += 1
        node_lost = event.cause is LossCause.NODE_LOST
        what = event.detail.partition("\n")[0] or event.cause.value
        worker.will_be_replaced = not (
            leaving or lane.finished or self.state.is_ending or node_lost or lane.shape_changed
        )
        if node_lost:
            self.health.on_node_lost(worker.node)
            self.state.call_at(self.health.down_until[worker.node], self._recheck_nodes)
        elif was_setting_up:
            self.state.add_note("error", f"{lane.name}: worker {worker.id} failed in setup: {what}", unit=lane.name)
            self.health.on_setup_failed(lane, worker.node, what, event.detail)
        elif not (blamed or leaving) and worker.ready_at is not None:
            self.health.on_idle_death(lane, self.state.now - worker.ready_at, what, event.detail)
        self.replan_requested = self.replan_requested or not (leaving or worker.will_be_replaced)
        self._on_removed(worker)

    def _remove(self, worker: Worker) -> None:
        lane = self.state.units_by_name[worker.unit]
        del lane.workers[worker.id]
        del self.state.workers[worker.id]
        if lane.quarantine_worker is worker:
            lane.quarantine_worker = None
        self._release(worker.seats)

    def _on_removed(self, worker: Worker) -> None:
        board = self.state
        lane = board.units_by_name[worker.unit]
        if worker.will_be_replaced and not board.is_ending and not lane.finished:
            # it may need more by now
            enough = worker.seats[0].memory_bytes >= lane.shape.memory_bytes
            start = PlannedStart(lane.name, worker.seats, "replaces one that is gone")
            started = lane.workers_started
            if not (enough and self.start(start)):
                self.replan_requested = True
            if worker.recycling and lane.workers_started > started:
                successor = next(reversed(lane.workers.values()))
                worker.recycling, successor.recycling = False, True
        self._end_recycling(lane, worker)
        update_queue_limit(board, lane)
        board.mark_dirty(lane)
        if self.waiting_starts and not board.is_ending:
            self._start_waiting(seat.node for seat in worker.seats)

    def _start_later(self, start: PlannedStart, plans: int) -> None:
        lane = self.state.units_by_name[start.unit]
        if plans == self._generation and not self.state.is_ending and not lane.finished and not self.start(start):
            self.replan_requested = True

    def _on_setup_timeout(self, worker: Worker) -> None:
        if worker.state is WorkerState.STARTING:
            lane = self.state.units_by_name[worker.unit]
            reason = f"setup took longer than its timeout of {lane.spec.setup_timeout_s:g} s"
            worker.will_be_replaced = True
            self.stop(worker, reason, now=True)
            self.state.add_note("error", f"{lane.name}: worker {worker.id}: {reason}", unit=lane.name)
            self.health.on_setup_failed(lane, worker.node, reason, "")

    # --- nodes and seats

    def on_node_joined(self, node: Node) -> None:
        self.health.forget_node(node.name)
        if not self.ledger.has_node(node.name):
            self._set_cluster(Cluster((*self.cluster.nodes, node)))

    def on_node_left(self, name: str, *, returns: bool = False) -> None:
        self.health.forget_node(name)
        if not self.ledger.has_node(name):
            return
        if len(self.cluster.nodes) == 1 and returns:
            self.replan_requested = True
        elif len(self.cluster.nodes) == 1:
            self.fail(f"the last node, {name!r}, is gone", "")
        else:
            self._set_cluster(self.cluster.without({name}))

    def on_capacity_reserved(self, event: CapacityReserved) -> None:
        """Others hold this from now on: as few as possible of ours go, and a replan looks at what is left."""
        before, self.reserved_capacity = self.reserved_capacity.amounts, ReservedCapacity(event.seats)
        if self.state.is_ending or before == self.reserved_capacity.amounts:
            return
        going = self.drain_for_others()
        text = (
            f"what others hold of our nodes changed: {going} {'worker is' if going == 1 else 'workers are'} given back"
        )
        self.state.add_note("decision", text, starts=0, stops=going)
        self.replan_requested = True

    def drain_for_others(self) -> int:
        """Drains those who sit on what others hold, as far as their units can do without; how many."""
        going, self.overcommitted = workers_to_release(self.state, self.cluster, self.reserved_capacity)
        for worker in going:
            worker.will_be_replaced = False
            self.drain(worker, RELEASE_REASON)
        return len(going)

    def _recheck_nodes(self) -> None:
        """A node that was believed lost may be there after all."""
        if not self.state.is_ending:
            self.replan_requested = True
            self.health.current_down_nodes()
            self._start_waiting(list(self._waiting_by_node))

    def reachable_cluster(self) -> Cluster:
        """The cluster without nodes whose workers were lost with them, although nobody said yet that they left."""
        down = [name for name in self.health.current_down_nodes() if self.ledger.has_node(name)]
        return self.cluster.without(down) if len(down) < len(self.cluster.nodes) else self.cluster

    def _set_cluster(self, cluster: Cluster) -> None:
        there = {node.name for node in cluster.nodes}
        held = [seat for worker in self.state.workers.values() for seat in worker.seats if seat.node in there]
        self.cluster = cluster
        self.ledger = Ledger(cluster)
        self._totals = total_free(Counter(self.ledger.free))
        for seat in held:
            self.ledger.take(seat)
        self._taken.clear()
        self._count_use(tuple(held), 1)
        self.replan_requested = True
        largest = max((node.memory_bytes for node in cluster.nodes), default=0)
        for lane in self.state.all_units:
            lane.max_node_memory_bytes = largest

    def resource_use(self) -> dict[str, tuple[int, int]]:
        """Resource -> (taken, there in all)."""
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
