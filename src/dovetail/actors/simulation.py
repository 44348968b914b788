"""Simulation of an actor system in virtual time: a declared call pattern, service times, and the scaling decisions.

A call goes to the instance with the fewest calls, waits there for a slot, and holds it for the time of its own work and
of the calls that it waits for. The same planner and the same `Scaler` as in a running system decide about workers.
Deterministic: equal arguments and seeds give equal results.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from dovetail.actors.scale_signal import OUTSTANDING, signal_parts
from dovetail.actors.scaling import Scaler
from dovetail.actors.simulation_fields import FILL, METHOD, QUEUE_DEPTH, SIMULATION
from dovetail.errors import InfeasibleError
from dovetail.pipeline.durations import parse_duration
from dovetail.text_format import align_table, format_duration, format_number, format_percent, format_rate, sparkline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dovetail.actors.actor_system import ActorSystem
    from dovetail.actors.role import Role
    from dovetail.resources.cluster import Cluster

MAX_SHOWN_DECISIONS = 12
TIMELINE_POINTS = 60


@dataclass(frozen=True, slots=True)
class ScalingChange:
    """One change of the number of workers."""

    at_s: float
    role: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoleFigures:
    """What one role did."""

    role: str
    workers: tuple[int, int, int]
    """Number of workers at the start, at most, and at the end."""
    utilisation: float
    """Share of its slots that were in use while its instances were ready."""
    calls: int
    calls_per_s: float
    latency_p50_s: float
    latency_p95_s: float
    waiting_mean_s: float
    """Mean time that calls waited for a slot."""
    timeline: tuple[float, ...]
    """Workers over time, in equal intervals."""


@dataclass(frozen=True, slots=True)
class ActorSimulation:
    """Result of a simulated actor system; `str()` is the report."""

    name: str
    cluster: Cluster
    duration_s: float
    roles: tuple[RoleFigures, ...]
    changes: tuple[ScalingChange, ...]
    client_calls: int
    """Number of calls of clients that were answered."""
    unanswered: int
    """Number of calls of clients that were not answered at the end."""
    dropped: int
    """Number of items that did not fit into a store."""
    stuck: tuple[str, ...]
    """Roles whose calls wait for each other."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "duration_s": self.duration_s,
            "client_calls": self.client_calls,
            "unanswered": self.unanswered,
            "dropped": self.dropped,
            "stuck": list(self.stuck),
            "roles": {one.role: {name: getattr(one, name) for name in RoleFigures.__slots__[1:]} for one in self.roles},
            "changes": [{name: getattr(one, name) for name in ScalingChange.__slots__} for one in self.changes],
        }

    def __str__(self) -> str:
        return "\n".join(_report_lines(self))


# --- state


@dataclass(frozen=True, slots=True)
class _Method:
    mean_s: float
    sigma: float
    calls: tuple[str, ...]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> _Method:
        mean_s = parse_duration(data["time"]) if data.get("time") is not None else 0.0
        sigma = float(data.get("variation", METHOD.by_name["variation"].default))
        return cls(mean_s, sigma, tuple(data.get("calls") or ()))

    def service_time_s(self, source: random.Random) -> float:
        if not self.mean_s or not self.sigma:
            return self.mean_s
        return self.mean_s * math.exp(source.gauss(-self.sigma * self.sigma / 2, self.sigma))


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a method: waits for a slot, works, makes its own calls, and answers."""

    role: str
    method: str
    made_at: float
    instance: _Instance
    answer: Callable[[float], None]
    calls_left: deque[str] = field(default_factory=deque)
    waits_for: _Call | None = None


@dataclass(slots=True, eq=False)
class _Instance:
    index: int
    ready_at: float
    waiting: deque[_Call] = field(default_factory=deque)
    running: set[_Call] = field(default_factory=set)
    is_draining: bool = False

    @property
    def busy(self) -> int:
        return len(self.running)

    @property
    def outstanding(self) -> int:
        return self.busy + len(self.waiting)


class _RoleState:
    """Instances of a role, and the figures of their work."""

    def __init__(self, role: Role, workers: int) -> None:
        self.role = role
        self.slots = role.slots or 1
        self.instances = [_Instance(index, 0.0) for index in range(workers)]
        self._next_index = workers
        self.latencies: list[float] = []
        self.waited_s = 0.0
        self.busy_s = 0.0
        self.ready_s = 0.0
        self.outstanding_s = 0.0
        """Integrals over time: of slots in use, of instances that are ready, of calls that are not answered."""
        self._busy = self._outstanding = 0
        self._counted_until = 0.0
        self._by_load: list[tuple[int, int, _Instance]] = []
        for instance in self.instances:
            self.reindex(instance)

    @property
    def active(self) -> list[_Instance]:
        return [one for one in self.instances if not one.is_draining]

    def reindex(self, instance: _Instance) -> None:
        if not instance.is_draining:
            heappush(self._by_load, (instance.outstanding, instance.index, instance))

    def least_loaded(self) -> _Instance:
        """The least loaded instance. An entry of the heap is valid if it has the current load of its instance."""
        while True:
            load, _, instance = self._by_load[0]
            if not instance.is_draining and load == instance.outstanding:
                return instance
            heappop(self._by_load)

    def count(self, now: float, outstanding: int = 0, busy: int = 0) -> None:
        """Integrate up to now, then change the number of calls that are outstanding, and that have a slot."""
        passed = now - self._counted_until
        if passed > 0:
            self.outstanding_s += passed * self._outstanding
            self.busy_s += passed * self._busy
            self._counted_until = now
        self._outstanding += outstanding
        self._busy += busy

    def remove(self, now: float, instance: _Instance) -> None:
        self.ready_s += max(0.0, now - instance.ready_at)
        self.instances.remove(instance)

    def add(self, ready_at: float) -> _Instance:
        instance = _Instance(self._next_index, ready_at)
        self._next_index += 1
        self.instances.append(instance)
        self.reindex(instance)
        return instance


class _Store:
    """Items of a role, up to a capacity."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.capacity: int = data["capacity"]
        self.change = {name: int(count) for name, count in (data.get("adds") or {}).items()}
        self.change |= {name: -int(count) for name, count in (data.get("takes") or {}).items()}
        self.items = 0
        self.dropped = 0

    def on_call(self, method: str) -> None:
        then = self.items + self.change.get(method, 0)
        self.dropped += max(0, then - self.capacity)
        if then >= 0:
            self.items = min(then, self.capacity)

    def signal(self, name: str) -> float | bool:
        return self.items / self.capacity if name == FILL else self.items >= self.capacity


# --- the simulation


def simulate_system(
    system: ActorSystem, cluster: Cluster, pattern: Mapping[str, Any], seed: int = 0
) -> ActorSimulation:
    """Simulate a system whose call pattern was checked."""
    return _Simulation(system, cluster, pattern, seed).run()


class _Simulation:
    def __init__(self, system: ActorSystem, cluster: Cluster, pattern: Mapping[str, Any], seed: int) -> None:
        plan = system.plan(cluster)
        self.system, self.cluster, self.pattern = system, cluster, pattern
        self.duration_s = parse_duration(pattern.get("duration", SIMULATION.by_name["duration"].default))
        self.setup_s = parse_duration(pattern.get("setup", SIMULATION.by_name["setup"].default))
        self.random = random.Random(seed)  # noqa: S311 - not for secrets
        self.roles = {role.name: _RoleState(role, plan.workers[role.name]) for role in system.roles}
        self.stores = {name: _Store(data) for name, data in (pattern.get("stores") or {}).items()}
        self.store_of = {method: store for store in self.stores.values() for method in store.change}
        self.methods = {name: _Method.of(data or {}) for name, data in pattern["methods"].items()}
        self.scalers = {
            role.name: Scaler(role.scale, (role.low, role.high), _step(system, role))
            for role in system.roles
            if role.scale is not None
        }
        self.measured = dict.fromkeys(self.scalers, 0.0)
        """Role -> outstanding-seconds at the last decision."""
        self.changes: list[ScalingChange] = []
        self.counts = {name: [(0.0, len(state.instances))] for name, state in self.roles.items()}
        self.answered = self.open = 0
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._room: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}

    def run(self) -> ActorSimulation:
        for client in self.pattern["clients"]:
            self._start_client(client)
        for name, scaler in self.scalers.items():
            self._at(scaler.interval_s, partial(self._decide, name))
        while self._queue and self._queue[0][0] <= self.duration_s:
            self.now, _, action = heappop(self._queue)
            action()
        stuck = self._stuck_roles()
        self.now = self.duration_s
        figures = tuple(self._figures(name, state) for name, state in self.roles.items())
        return ActorSimulation(
            name=self.system.name,
            cluster=self.cluster,
            duration_s=self.duration_s,
            roles=figures,
            changes=tuple(self.changes),
            client_calls=self.answered,
            unanswered=self.open,
            dropped=sum(store.dropped for store in self.stores.values()),
            stuck=stuck,
        )

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heappush(self._queue, (time, self._sequence, action))

    # --- clients

    def _start_client(self, client: Mapping[str, Any]) -> None:
        start = parse_duration(client["start"]) if client.get("start") is not None else 0.0
        end = parse_duration(client["end"]) if client.get("end") is not None else self.duration_s
        if "rate" in client:
            self._at(start, lambda: self._arrive(client["call"], float(client["rate"]), end))
            return
        pause = parse_duration(client["pause"]) if client.get("pause") is not None else 0.0
        for _ in range(client["callers"]):
            self._at(start, lambda: self._call_repeatedly(client["call"], pause, end))

    def _arrive(self, method: str, rate: float, end: float) -> None:
        """Arrivals at a rate, with random intervals."""
        if self.now > end:
            return
        self.open += 1
        self._call(method, self._on_answer)
        self._at(self.now + self.random.expovariate(rate), lambda: self._arrive(method, rate, end))

    def _call_repeatedly(self, method: str, pause: float, end: float) -> None:
        if self.now > end:
            return

        def on_answer(now: float) -> None:
            self._on_answer(now)
            self._at(now + pause, lambda: self._call_repeatedly(method, pause, end))

        self.open += 1
        self._call(method, on_answer)

    def _on_answer(self, _now: float) -> None:
        self.open -= 1
        self.answered += 1

    # --- calls

    def _call(self, method: str, answer: Callable[[float], None]) -> _Call:
        role = method.rpartition(".")[0]
        state = self.roles[role]
        instance = state.least_loaded()
        call = _Call(role, method, self.now, instance, answer)
        state.count(self.now, outstanding=1)
        instance.waiting.append(call)
        state.reindex(instance)
        self._start_waiting(state, instance)
        return call

    def _start_waiting(self, state: _RoleState, instance: _Instance) -> None:
        while instance.waiting and instance.busy < state.slots and instance.ready_at <= self.now:
            state.count(self.now, busy=1)
            call = instance.waiting.popleft()
            instance.running.add(call)
            state.waited_s += self.now - call.made_at
            method = self.methods[call.method]
            call.calls_left.extend(method.calls)
            self._at(self.now + method.service_time_s(self.random), partial(self._continue, call))

    def _continue(self, call: _Call) -> None:
        """Make the next call, or answer."""
        call.waits_for = None
        if call.calls_left:
            call.waits_for = self._call(call.calls_left.popleft(), lambda _now: self._continue(call))
            return
        if call.method in self.store_of:
            self.store_of[call.method].on_call(call.method)
        state, instance = self.roles[call.role], call.instance
        state.count(self.now, outstanding=-1, busy=-1)
        instance.running.remove(call)
        state.latencies.append(self.now - call.made_at)
        state.reindex(instance)
        self._start_waiting(state, instance)
        self._remove_if_drained(state, instance)
        call.answer(self.now)

    # --- scaling

    def _decide(self, name: str) -> None:
        state, scaler = self.roles[name], self.scalers[name]
        workers = len(state.active)
        decision = scaler.decide(self.now, workers, self._signal(name, workers), self._room_of(name, workers))
        if decision.change:
            self.changes.append(ScalingChange(self.now, name, workers, decision.workers, decision.reason))
            self._change_workers(state, decision.change)
            self.counts[name].append((self.now, decision.workers))
        self._at(self.now + scaler.interval_s, partial(self._decide, name))

    def _signal(self, name: str, workers: int) -> float:
        of, signal = signal_parts(self.roles[name].role)
        state = self.roles[of]
        state.count(self.now)
        if signal == OUTSTANDING:
            before, self.measured[name] = self.measured[name], state.outstanding_s
            return (state.outstanding_s - before) / self.scalers[name].interval_s / max(1, workers)
        if signal == QUEUE_DEPTH:
            return float(sum(len(one.waiting) for one in state.instances))
        return self.stores[of].signal(signal)

    def _change_workers(self, state: _RoleState, change: int) -> None:
        for _ in range(change):
            instance = state.add(self.now + self.setup_s)
            self._at(instance.ready_at, partial(self._start_waiting, state, instance))
        if change < 0:
            for instance in state.active[change:]:  # the newest ones
                instance.is_draining = True
                self._remove_if_drained(state, instance)

    def _remove_if_drained(self, state: _RoleState, instance: _Instance) -> None:
        if instance.is_draining and not instance.outstanding and instance in state.instances:
            state.remove(self.now, instance)

    def _room_of(self, name: str, workers: int) -> int:
        """Instances that fit in addition to all that there are, by the planner."""
        counts = {role: len(state.active) for role, state in self.roles.items()}
        known = self._room.setdefault(tuple(counts.items()), {})
        if name not in known:
            step, high = self.scalers[name].step, self.scalers[name].high
            low_end, high_end = 0, (high - workers) // step
            while low_end < high_end:  # the most steps that fit
                middle = (low_end + high_end + 1) // 2
                if self._fits({**counts, name: workers + middle * step}):
                    low_end = middle
                else:
                    high_end = middle - 1
            known[name] = low_end * step
        return known[name]

    def _fits(self, counts: Mapping[str, int]) -> bool:
        roles = [replace(role, workers=counts[role.name], scale=None) for role in self.system.roles]
        try:
            type(self.system)(roles, self.system.pools).plan(self.cluster)
        except InfeasibleError:
            return False
        return True

    # --- results

    def _stuck_roles(self) -> tuple[str, ...]:
        """Roles with calls that can never be answered, because they wait for each other."""
        running = [call for state in self.roles.values() for one in state.instances for call in one.running]
        live = {call for call in running if call.waits_for is None}
        waiting = [call for call in running if call.waits_for is not None]
        found = waiting
        while found:
            found = [call for call in waiting if self._can_be_answered(call.waits_for, live)]
            live.update(found)
            waiting = [call for call in waiting if call not in live]
        return tuple(dict.fromkeys(call.role for call in waiting))

    def _can_be_answered(self, call: _Call | None, live: set[_Call]) -> bool:
        assert call is not None
        at = call.instance
        if call in at.running:
            return call in live
        is_free = at.ready_at > self.now or at.busy < self.roles[call.role].slots
        return is_free or not live.isdisjoint(at.running)

    def _figures(self, name: str, state: _RoleState) -> RoleFigures:
        state.count(self.now)
        for instance in list(state.instances):
            state.remove(self.now, instance)
        counts = [count for _, count in self.counts[name]]
        latencies = sorted(state.latencies)
        calls = len(latencies)
        return RoleFigures(
            role=name,
            workers=(counts[0], max(counts), counts[-1]),
            utilisation=state.busy_s / (state.ready_s * state.slots) if state.ready_s else 0.0,
            calls=calls,
            calls_per_s=calls / self.duration_s,
            latency_p50_s=_percentile(latencies, 0.5),
            latency_p95_s=_percentile(latencies, 0.95),
            waiting_mean_s=state.waited_s / max(1, calls),
            timeline=tuple(_timeline(self.counts[name], self.duration_s)),
        )


def _step(system: ActorSystem, role: Role) -> int:
    """Instances of the role in one bundle: groups grow as a whole."""
    together = role.colocation
    if together is None:
        return 1
    fewest = min(other.low for other in system.roles if other.colocation == together)
    return role.low // fewest


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _timeline(counts: Sequence[tuple[float, int]], duration_s: float) -> Iterator[float]:
    for point in range(TIMELINE_POINTS):
        now = duration_s * point / TIMELINE_POINTS
        yield float([count for at, count in counts if at <= now][-1])


# --- text


def _report_lines(result: ActorSimulation) -> Iterator[str]:
    rate = format_rate(result.client_calls / result.duration_s)
    yield f"{result.name} on {result.cluster.spec(exact=False)}, simulated for {format_duration(result.duration_s)}"
    answered = format_number(result.client_calls)
    yield f"  {answered} calls of clients answered, {rate}; {result.unanswered} open at the end"
    if result.dropped:
        yield f"  {format_number(result.dropped)} items dropped by full stores"
    yield ""
    rows = [["role", "workers", "busy", "calls/s", "p50", "p95", "waiting"]]
    for one in result.roles:
        times = [_time_text(value) for value in (one.latency_p50_s, one.latency_p95_s, one.waiting_mean_s)]
        rows.append(
            [
                one.role,
                _counts_text(*one.workers),
                format_percent(one.utilisation),
                format_number(one.calls_per_s),
                *times,
            ]
        )
    yield from (f"  {line}" for line in align_table(rows, left=2))
    if result.changes:
        yield ""
        yield "workers over time"
        scaled = dict.fromkeys(change.role for change in result.changes)
        width = max(map(len, scaled))
        yield from (
            f"  {one.role.ljust(width)}  {sparkline(one.timeline)}" for one in result.roles if one.role in scaled
        )
        yield ""
        yield "scaling"
        for change in result.changes[:MAX_SHOWN_DECISIONS]:
            yield f"  {format_duration(change.at_s)}  {change.role}: {change.reason}"
        if len(result.changes) > MAX_SHOWN_DECISIONS:
            yield f"  ... and {len(result.changes) - MAX_SHOWN_DECISIONS} more"
    if result.stuck:
        yield ""
        yield f"warning: calls of {', '.join(result.stuck)} wait for each other; raise slots, or remove a call"


def _counts_text(start: int, most: int, end: int) -> str:
    if start == most == end:
        return str(start)
    return f"{start} to {most}" if end == most else f"{start} to {most}, then {end}"


def _time_text(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else format_duration(seconds)
