"""Which workers exist, on which seats, and how do they come and go?"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from dovetail.control.commands import StartWorker, StopWorker
from dovetail.control.events import Cause
from dovetail.control.lifecycle import WorkerState
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.totals import ON_CARDS, totals_of
from dovetail.scheduling.snapshot import Start
from dovetail.streaming.backpressure import set_cap
from dovetail.streaming.health import Health
from dovetail.streaming.reserve import WHY, Reserve, to_give_back
from dovetail.streaming.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.control.events import Reserved, WorkerLost, WorkerReady
    from dovetail.resources.cluster import Node
    from dovetail.resources.seat import Seat, Seats
    from dovetail.streaming.board import Board
    from dovetail.streaming.lane import Lane

RECYCLED_AT_ONCE = 10
"""One in so many workers of a unit may be on its way to being replaced by age, and at least one."""
RECYCLE_AGAIN_S = 5.0


class Fleet:
    """Starts and stops workers; the only one who takes seats and gives them back."""

    def __init__(self, board: Board, cluster: Cluster, fail: Callable[[str, str], None]) -> None:
        self.board = board
        self.cluster = cluster
        self.ledger = Ledger(cluster)
        self.reserve = Reserve()
        """What others hold: it stays free."""
        self.pressed = False
        """The last workers of some units sit on what others hold, until there is another place for them."""
        self._totals = totals_of(Counter(self.ledger.free))
        self._taken: dict[str, int] = {}
        self.fail = fail
        self.health = Health(board, fail)
        self.waiting: dict[int, Start] = {}
        """Starts whose seats others still hold."""
        self._waiting_on: dict[str, dict[int, None]] = {}
        """Node -> those that wait for seats there."""
        self.wants_replan = False
        """Something changed that a replan should look at soon."""
        self._postponed = 0
        self._plans = 0
        """How many there were: what one of them saw as missing is not started once more by who came before it."""

    # --- coming

    def start(self, start: Start) -> bool:
        """Takes the seats and starts the worker; False if somebody still sits there. Where its setup failed, later."""
        board = self.board
        lane = board.lane_of[start.unit]
        wait = self.health.wait_s(lane, tuple(seat.node for seat in start.seats))
        if wait > 0:
            self._postponed += 1
            board.at(board.now + wait, partial(self._start_later, start, self._plans))
            return True
        if not self._take(start.seats):
            return False
        worker = Worker(board.number(), lane.name, start.seats, board.now)
        board.workers[worker.id] = worker
        lane.workers[worker.id] = worker
        lane.started += 1
        set_cap(board, lane)
        board.out.append(StartWorker(worker.id, start.seats, (lane.work.hosted,)))
        deadline_s = lane.work.setup_deadline_s
        if deadline_s is not None:
            board.at(board.now + deadline_s, partial(self._setup_overdue, worker))
        return True

    def start_all(self, starts: Iterable[Start]) -> int:
        """Now, or as soon as their seats are free. Replaces what waited before. How many must wait because their setup
        failed where they would sit."""
        self._plans += 1
        postponed = self._postponed
        self.waiting.clear()
        self._waiting_on.clear()
        for start in starts:
            if not self.start(start):
                number = self.board.number()
                self.waiting[number] = start
                for seat in start.seats:
                    self._waiting_on.setdefault(seat.node, {})[number] = None
        return self._postponed - postponed

    def give_up(self, unit: str) -> None:
        """Nobody of this unit is started any more."""
        for number in [number for number, start in self.waiting.items() if start.unit == unit]:
            del self.waiting[number]

    def _start_waiting(self, nodes: Iterable[str]) -> None:
        """Those who waited for seats on these nodes."""
        for node in dict.fromkeys(nodes):
            for number in list(self._waiting_on.get(node, ())):
                start = self.waiting.get(number)
                if start is None or self.start(start):
                    self.waiting.pop(number, None)
                    del self._waiting_on[node][number]

    def ready(self, event: WorkerReady) -> None:
        worker = self.board.workers.get(event.worker)
        if worker is None or worker.state is not WorkerState.STARTING:
            return
        lane = self.board.lane_of[worker.unit]
        worker.move(WorkerState.READY)
        worker.ready_at = self.board.now
        seconds = event.setup_s or self.board.now - worker.asked_at
        lane.speeds.add_setup(seconds)
        lane.setup_s += seconds
        self.health.set_up(lane, worker.node)
        self._no_longer_recycling(lane, worker)
        if lane.finished:
            self.stop(worker, "finished")
            return
        lane.pool.add(worker)
        self.board.stir(lane)
        if lane.work.recycle_s is not None:
            self.board.at(self.board.now + lane.work.recycle_s, partial(self.recycle, worker))
        if self.pressed:
            self.press()

    # --- going

    def drain(self, worker: Worker, reason: str) -> None:
        """Nothing new for it; it is stopped when it has nothing left. Can be taken back until then."""
        if worker.state is WorkerState.STARTING:
            self.stop(worker, reason)
        elif worker.state is WorkerState.READY:
            self.board.lane_of[worker.unit].pool.remove(worker)
            worker.move(WorkerState.DRAINING)
            worker.reason = reason
            self.gone_if_empty(worker)

    def take_back(self, worker: Worker) -> None:
        if worker.state is WorkerState.DRAINING and not worker.replaced:
            lane = self.board.lane_of[worker.unit]
            worker.move(WorkerState.READY)
            worker.reason = ""
            if not worker.exclusive:
                lane.pool.add(worker)
            self.board.stir(lane)

    def recycle(self, worker: Worker) -> None:
        """Old enough: another takes its seats. Only a few at a time, or a unit whose workers began together would have
        none left."""
        lane = self.board.lane_of[worker.unit]
        if worker.state not in (WorkerState.READY, WorkerState.DRAINING) or worker.replaced or lane.finished:
            return
        if worker.state is WorkerState.READY and lane.recycling < max(1, len(lane.workers) // RECYCLED_AT_ONCE):
            lane.recycling += 1
            worker.recycling = worker.replaced = True
            self.drain(worker, "recycled")
        elif lane.work.recycle_s is not None:
            self.board.at(self.board.now + RECYCLE_AGAIN_S, partial(self.recycle, worker))

    def _no_longer_recycling(self, lane: Lane, worker: Worker) -> None:
        if worker.recycling:
            worker.recycling = False
            lane.recycling -= 1

    def stop(self, worker: Worker, reason: str, *, now: bool = False) -> None:
        if worker.state is WorkerState.STOPPING:
            if now:
                self.board.out.append(StopWorker(worker.id, drain=False, reason=reason))
            return
        if worker.state is WorkerState.READY:
            self.board.lane_of[worker.unit].pool.remove(worker)
        worker.move(WorkerState.STOPPING)
        worker.reason = reason
        self.board.out.append(StopWorker(worker.id, drain=not now, reason=reason))
        if not now:
            self._not_for_ever(worker)

    def _not_for_ever(self, worker: Worker) -> None:
        """A teardown that hangs must not hold up the run."""
        self.board.at(self.board.now + self.board.options.teardown_s, partial(self._hung, worker))

    def _hung(self, worker: Worker) -> None:
        if worker.state is WorkerState.STOPPING:
            text = (
                f"worker {worker.id} of {worker.unit} did not stop within {self.board.options.teardown_s:g} s: killed"
            )
            self.board.note("worker", text, worker=worker.id, unit=worker.unit)
            self.stop(worker, "its teardown hung", now=True)

    def gone_if_empty(self, worker: Worker) -> None:
        """A draining worker that has finished its last message is stopped."""
        if worker.state is WorkerState.DRAINING and not worker.messages:
            worker.move(WorkerState.STOPPING)
            self.board.out.append(StopWorker(worker.id, drain=True, reason=worker.reason))
            self._not_for_ever(worker)

    def stop_all(self, reason: str, *, now: bool) -> None:
        self.waiting.clear()
        for worker in self.board.workers.values():
            self.stop(worker, reason, now=now)

    def stopped(self, number: int) -> None:
        worker = self.board.workers.get(number)
        if worker is not None:
            lane = self.board.lane_of[worker.unit]
            lane.stopped += 1
            lane.crashes = 0  # one that lived to an orderly end
            worker.move(WorkerState.STOPPED)
            self._forget(worker)
            self._gone(worker)

    def lost(self, worker: Worker, event: WorkerLost, *, blamed: bool) -> None:
        """After its messages went back: a replacement, unless it was leaving or its unit cannot live."""
        lane = self.board.lane_of[worker.unit]
        leaving = worker.state in (WorkerState.DRAINING, WorkerState.STOPPING) and not worker.replaced
        was_setting_up = worker.state is WorkerState.STARTING
        worker.move(WorkerState.LOST)
        self._forget(worker)
        if event.cause is Cause.STOPPED and leaving:
            lane.stopped += 1
        else:
            lane.lost += 1
        node_lost = event.cause is Cause.NODE_LOST
        what = event.detail.partition("\n")[0] or event.cause.value
        worker.replaced = not (leaving or lane.finished or self.board.ending or node_lost or lane.grown)
        if node_lost:
            self.health.node_lost(worker.node)
            self.board.at(self.health.down[worker.node], self._look_again)
        elif was_setting_up:
            self.board.note("error", f"{lane.name}: worker {worker.id} failed in setup: {what}", unit=lane.name)
            self.health.setup_failed(lane, worker.node, what, event.detail)
        elif not (blamed or leaving) and worker.ready_at is not None:
            self.health.died_idle(lane, self.board.now - worker.ready_at, what, event.detail)
        self.wants_replan = self.wants_replan or not (leaving or worker.replaced)
        self._gone(worker)

    def _forget(self, worker: Worker) -> None:
        lane = self.board.lane_of[worker.unit]
        del lane.workers[worker.id]
        del self.board.workers[worker.id]
        if lane.reserved is worker:
            lane.reserved = None
        self._give_back(worker.seats)

    def _gone(self, worker: Worker) -> None:
        board = self.board
        lane = board.lane_of[worker.unit]
        if worker.replaced and not board.ending and not lane.finished:
            # it may need more by now
            enough = worker.seats[0].memory_bytes >= lane.shape.memory_bytes
            start = Start(lane.name, worker.seats, "replaces one that is gone")
            started = lane.started
            if not (enough and self.start(start)):
                self.wants_replan = True
            if worker.recycling and lane.started > started:
                successor = next(reversed(lane.workers.values()))
                worker.recycling, successor.recycling = False, True
        self._no_longer_recycling(lane, worker)
        set_cap(board, lane)
        board.stir(lane)
        if self.waiting and not board.ending:
            self._start_waiting(seat.node for seat in worker.seats)

    def _start_later(self, start: Start, plans: int) -> None:
        lane = self.board.lane_of[start.unit]
        if plans == self._plans and not self.board.ending and not lane.finished and not self.start(start):
            self.wants_replan = True

    def _setup_overdue(self, worker: Worker) -> None:
        if worker.state is WorkerState.STARTING:
            lane = self.board.lane_of[worker.unit]
            reason = f"setup took longer than its deadline of {lane.work.setup_deadline_s:g} s"
            worker.replaced = True
            self.stop(worker, reason, now=True)
            self.board.note("error", f"{lane.name}: worker {worker.id}: {reason}", unit=lane.name)
            self.health.setup_failed(lane, worker.node, reason, "")

    # --- nodes and seats

    def joined(self, node: Node) -> None:
        self.health.node_settled(node.name)
        if not self.ledger.knows(node.name):
            self._now_on(Cluster((*self.cluster.nodes, node)))

    def left(self, name: str, *, returns: bool = False) -> None:
        self.health.node_settled(name)
        if not self.ledger.knows(name):
            return
        if len(self.cluster.nodes) == 1 and returns:
            self.wants_replan = True
        elif len(self.cluster.nodes) == 1:
            self.fail(f"the last node, {name!r}, is gone", "")
        else:
            self._now_on(self.cluster.without({name}))

    def reserved(self, event: Reserved) -> None:
        """Others hold this from now on: as few as possible of ours go, and a replan looks at what is left."""
        before, self.reserve = self.reserve.amounts, Reserve(event.seats)
        if self.board.ending or before == self.reserve.amounts:
            return
        going = self.press()
        text = (
            f"what others hold of our nodes changed: {going} {'worker is' if going == 1 else 'workers are'} given back"
        )
        self.board.note("decision", text, starts=0, stops=going)
        self.wants_replan = True

    def press(self) -> int:
        """Drains those who sit on what others hold, as far as their units can do without; how many."""
        going, self.pressed = to_give_back(self.board, self.cluster, self.reserve)
        for worker in going:
            worker.replaced = False
            self.drain(worker, WHY)
        return len(going)

    def _look_again(self) -> None:
        """A node that was believed lost may be there after all."""
        if not self.board.ending:
            self.wants_replan = True
            self.health.nodes_down()
            self._start_waiting(list(self._waiting_on))

    def believed(self) -> Cluster:
        """The cluster without nodes whose workers were lost with them, although nobody said yet that they left."""
        down = [name for name in self.health.nodes_down() if self.ledger.knows(name)]
        return self.cluster.without(down) if len(down) < len(self.cluster.nodes) else self.cluster

    def _now_on(self, cluster: Cluster) -> None:
        there = {node.name for node in cluster.nodes}
        held = [seat for worker in self.board.workers.values() for seat in worker.seats if seat.node in there]
        self.cluster = cluster
        self.ledger = Ledger(cluster)
        self._totals = totals_of(Counter(self.ledger.free))
        for seat in held:
            self.ledger.take(seat)
        self._taken.clear()
        self._count(tuple(held), 1)
        self.wants_replan = True
        largest = max((node.memory_bytes for node in cluster.nodes), default=0)
        for lane in self.board.all_lanes:
            lane.largest_memory = largest

    def use(self) -> dict[str, tuple[int, int]]:
        """Resource -> (taken, there in all)."""
        return {name: (self._taken.get(name, 0), total) for name, total in self._totals.items() if total}

    def _count(self, seats: Seats, sign: int) -> None:
        taken = self._taken
        for seat in seats:
            amounts = {"CPUs": seat.cpu_milli, "memory": seat.memory_bytes, **dict(seat.custom)}
            for share in seat.cards:
                for name, amount in zip(ON_CARDS, share[1:], strict=True):
                    amounts[name] = amounts.get(name, 0) + amount
            for name, amount in amounts.items():
                taken[name] = taken.get(name, 0) + sign * amount

    def _take(self, seats: Seats) -> bool:
        for position, seat in enumerate(seats):
            if not (self._may_sit(seat) and self.ledger.takes(seat)):
                for other in seats[:position]:
                    self.ledger.give_back(other)
                return False
        self._count(seats, 1)
        return True

    def _may_sit(self, seat: Seat) -> bool:
        there = self.ledger.knows(seat.node) and seat.node not in self.health.down
        return there and self.reserve.leaves(self.ledger.free_on(seat.node), seat)

    def _give_back(self, seats: Seats) -> None:
        there = tuple(seat for seat in seats if self.ledger.knows(seat.node))
        for seat in there:
            self.ledger.give_back(seat)
        self._count(there, -1)
