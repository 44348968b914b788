"""Controller of a running actor system: start in order, restart, scale, drain and stop. Pure: time is an argument."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from dataclasses import replace
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from dovetail.actors.health_check import HealthChecked, HealthLimits
from dovetail.actors.instance_directory import (
    Directory,
    InstanceAddress,
    InstanceState,
    RoleEntry,
    WorkerContext,
    instance_name,
)
from dovetail.actors.live_placement import LivePlacement
from dovetail.actors.placement import PlacedBundle
from dovetail.actors.process_state import ProcessState
from dovetail.actors.restart_rules import NODE_RETURN_S, ROOM_RETRY_S, RestartRules
from dovetail.actors.scale_signal import SignalMeasured
from dovetail.actors.start_order import start_levels
from dovetail.control.commands import Note, StartWorker, StopWorker
from dovetail.control.events import (
    CancelRun,
    CapacityReserved,
    Drain,
    FailRun,
    LossCause,
    NodeJoined,
    NodeLeft,
    PinWorkers,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.lifecycle import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dovetail.actors.actor_plan import PlannedProcess
    from dovetail.actors.colocation import Bundle, ProcessTemplate
    from dovetail.actors.instance_directory import RoleMethods
    from dovetail.actors.role import Pool, Role
    from dovetail.control.commands import Command, HostedObject
    from dovetail.control.events import Event
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.seat import Seats


class SystemPhase(Enum):
    """Phase of a system as a whole."""

    LAUNCHING = "launching"
    """Not all instances were ready yet: the failure of one ends the launch."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Draining or killing all processes, last level first."""
    ENDED = "ended"


class SystemDefinition(NamedTuple):
    """Definition of a system: its parts."""

    name: str
    roles: Sequence[Role]
    bundles: Sequence[Bundle]
    pools: Mapping[str, Pool]
    hosted: Mapping[str, HostedObject]
    """Role -> the object that its workers host."""
    methods: Mapping[str, RoleMethods]


class ActorController:
    """See `control.engine.Controller`."""

    def __init__(
        self,
        definition: SystemDefinition,
        processes: Sequence[PlannedProcess],
        cluster: Cluster,
        *,
        deadline_s: float,
        reserved: Seats = (),
        rendezvous_seed: int = 1,
    ) -> None:
        """`deadline_s`: seconds from the first step in which all instances must be ready. `rendezvous_seed`: see
        `StartWorker`; another one for each system."""
        self._rendezvous_seed = rendezvous_seed
        self._definition = definition
        self._roles = {role.name: role for role in definition.roles}
        self._health_limits = {role.name: HealthLimits.of(role.health_rules) for role in definition.roles}
        self._placement = LivePlacement(definition.bundles, definition.pools, cluster, reserved)
        self._levels = start_levels(definition.roles, definition.bundles)
        self._process_numbers, self._bundle_numbers, self._worker_numbers = count(), count(), count(1)
        self._bundles: dict[int, Bundle] = {}
        """Number of a placed bundle -> its kind."""
        self.processes: list[ProcessState] = []
        self._by_worker: dict[int, ProcessState] = {}
        self._deadline_s = deadline_s
        self._deadline_at: float | None = None
        self._level = 0
        self.phase = SystemPhase.LAUNCHING
        self.run_state = RunState.RUNNING
        self.error = ""
        self.error_detail = ""
        self.signal_problems: dict[str, str] = {}
        """Scaled role -> the reason why its signal cannot be measured at present."""
        self._outcome = RunState.FINISHED
        self._drains = True
        self._stop_level = 0
        self._stop_reason = ""
        self._returning: dict[str, float] = {}
        """Node whose agent was lost -> the time until which other nodes are preferred."""
        self._commands: list[Command] = []
        self._directory_version = 0
        self._is_directory_changed = True
        self.directory = Directory(0, {})
        self._add_planned(processes)

    # --- the port

    @property
    def done(self) -> bool:
        return self.phase is SystemPhase.ENDED

    def step(self, now: float, events: Sequence[Event | HealthChecked | SignalMeasured]) -> list[Command]:
        if self._deadline_at is None:
            self._deadline_at = now + self._deadline_s
        self._returning = {node: until for node, until in self._returning.items() if until > now}
        for event in events:
            if isinstance(event, HealthChecked):
                self._on_health_checked(now, event)
            elif isinstance(event, SignalMeasured):
                self._on_signal_measured(event)
            else:
                self._on_event(now, event)
        if self.phase is SystemPhase.LAUNCHING:
            self._advance_launch(now)
        if self.phase is SystemPhase.RUNNING:
            self._start_due(now)
        if self.phase is SystemPhase.STOPPING:
            self._advance_stop(now)
        self._update_directory()
        commands, self._commands = self._with_context(self._commands), []
        return commands

    def wake_at(self) -> float | None:
        times = [process.start_at for process in self.processes if process.start_at is not None]
        if self.phase is SystemPhase.LAUNCHING and self._deadline_at is not None:
            times.append(self._deadline_at)
        return min(times) if times and self.phase is not SystemPhase.ENDED else None

    # --- what others read

    @property
    def state(self) -> InstanceState:
        """State of the system as a whole."""
        if self.phase is SystemPhase.ENDED:
            return InstanceState.DEAD
        if self.phase is SystemPhase.STOPPING:
            return InstanceState.DRAINING
        if self.phase is SystemPhase.LAUNCHING:
            return InstanceState.STARTING
        live = [process for process in self.processes if process.state is not InstanceState.DRAINING]
        is_whole = all(process.state is InstanceState.READY and not process.unhealthy for process in live)
        return InstanceState.READY if is_whole else InstanceState.DEGRADED

    def counts(self) -> dict[str, int]:
        """Role -> instances that are to run; drained ones do not count."""
        found = dict.fromkeys(self._roles, 0)
        for process in self.processes:
            if process.state is not InstanceState.DRAINING:
                for role, _ in process.instances:
                    found[role] += 1
        return found

    # --- events

    def _on_event(self, now: float, event: Event) -> None:
        match event:
            case WorkerReady():
                self._on_worker_ready(now, event)
            case WorkerLost():
                self._on_worker_lost(now, event)
            case WorkerStopped():
                self._on_worker_stopped(now, event.worker)
            case NodeJoined():
                self._returning.pop(event.node.name, None)
                self._placement.on_node_joined(event.node)
            case NodeLeft() if event.returns:
                self._returning[event.node] = now + NODE_RETURN_S
            case NodeLeft():
                self._placement.on_node_left(event.node)
            case CapacityReserved():
                self._on_capacity_reserved(now, event)
            case PinWorkers() if event.workers is not None:
                self._scale(now, event.unit, event.workers, event.reason)
            case Drain():
                self._stop(now, RunState.FINISHED, event.reason, drain=True)
            case CancelRun():
                outcome = self._outcome if self.phase is SystemPhase.STOPPING else RunState.CANCELLED
                self._stop(now, outcome, event.reason, drain=False)
            case FailRun():
                self._fail(now, event.error, event.detail)
            case _:
                pass

    def _on_worker_ready(self, now: float, event: WorkerReady) -> None:
        process = self._by_worker.get(event.worker)
        if process is not None:
            process.on_ready(now)
            self._is_directory_changed = True

    def _on_worker_stopped(self, now: float, worker: int) -> None:
        process = self._by_worker.pop(worker, None)
        if process is not None:
            self._is_directory_changed = True
            process.end(now, process.reason or "stopped")
            self._remove_if_drained(process)

    def _on_worker_lost(self, now: float, event: WorkerLost) -> None:
        process = self._by_worker.pop(event.worker, None)
        if process is None:
            return
        self._is_directory_changed = True
        reason = process.kill_reason or _loss_text(event)
        if self.phase is SystemPhase.STOPPING or process.state is InstanceState.DRAINING:
            process.end(now, process.reason or reason)
            self._remove_if_drained(process)
            return
        if self.phase is SystemPhase.LAUNCHING and event.cause is LossCause.SETUP_FAILED:
            process.end(now, reason)
            self._fail(now, f"{process.name} did not start: {reason}", event.detail)
            return
        self._restart(now, process, reason, event.detail)

    def _on_health_checked(self, now: float, event: HealthChecked) -> None:
        """Consecutive failures make an instance degraded, then end its process, which is restarted by its policy."""
        process = self._by_worker.get(event.worker)
        if process is None or process.state is not InstanceState.READY or process.kill_reason:
            return
        before = process.instance_state(event.instance)
        found = process.on_health_checked(now, event)
        if process.instance_state(event.instance) != before:
            self._is_directory_changed = True
            self._note_instance(process, event.instance)
        limit = self._health_limits[event.instance[0]].failure_threshold
        if found is not None and event.counts and found.failures >= limit:
            who = f"{instance_name(*event.instance)} is " if len(process.instances) > 1 else ""
            process.kill_reason = f"{who}not healthy: {found.restart_reason()}"
            self._commands.append(StopWorker(event.worker, drain=False, reason=process.kill_reason))

    def _on_signal_measured(self, event: SignalMeasured) -> None:
        problem = event.problem.partition("\n")[0]
        if problem:
            self.signal_problems[event.role] = problem
            text = f"{event.role} is not scaled: its signal cannot be measured: {problem}"
        elif self.signal_problems.pop(event.role, None) is not None:
            text = f"{event.role} is scaled again: its signal can be measured"
        else:
            return
        data = {"role": event.role, "problem": event.problem}
        self._commands.append(Note("signal", text, data))

    def _note_states(self, process: ProcessState) -> None:
        for instance in process.instances:
            self._note_instance(process, instance)

    def _note_instance(self, process: ProcessState, instance: tuple[str, int]) -> None:
        state, reason, _ = process.instance_state(instance)
        name = instance_name(*instance)
        data = {"instance": name, "state": state.value, "reason": reason, "incarnation": process.incarnation}
        self._commands.append(Note("state", f"{name} is {state.value}{f': {reason}' if reason else ''}", data))

    def _restart(self, now: float, process: ProcessState, reason: str, detail: str) -> None:
        policy = process.rules.policy
        if policy == "fail":
            process.end(now, reason)
            self._fail(now, f"{process.name} died: {reason}", detail)
            return
        if policy == "never":
            process.end(now, f"{reason}; restart is 'never'")
            wait_s = None
        else:
            wait_s = process.schedule_restart(now, reason)
        self._note_death(process, reason, wait_s)
        if wait_s is None and self.phase is SystemPhase.LAUNCHING:
            self._fail(now, f"{process.name} did not start: {process.reason}", detail)

    def _note_death(self, process: ProcessState, reason: str, wait_s: float | None) -> None:
        what = "stays dead" if wait_s is None else f"restarts after {wait_s:g} s"
        data = {
            "instances": [instance_name(*one) for one in process.instances],
            "incarnation": process.incarnation,
            "restarts": process.restarts,
            "reason": reason,
            "wait_s": wait_s,
        }
        self._commands.append(Note("restart", f"{process.name} died: {reason}; it {what}", data))

    def _on_capacity_reserved(self, now: float, event: CapacityReserved) -> None:
        self._placement.reserve(event.seats)
        if self.phase is not SystemPhase.RUNNING:
            return
        for number in self._placement.bundles_to_release(self._placed_bundles()):
            names = ", ".join(process.name for process in self._processes_of(number))
            self._commands.append(Note("scale", f"{names} drained: released for another run", {"bundle": number}))
            self._drain_bundle(now, number, "released for another run")

    # --- launch

    def _add_planned(self, planned: Sequence[PlannedProcess]) -> None:
        """The n-th bundle has the n-th processes of each of its kinds."""
        by_unit: dict[str, deque[PlannedProcess]] = defaultdict(deque)
        for process in planned:
            by_unit[process.template.unit].append(process)
        for bundle in self._definition.bundles:
            while by_unit[bundle.processes[0][0].unit]:
                number = next(self._bundle_numbers)
                self._bundles[number] = bundle
                for template, per_bundle in bundle.processes:
                    for _ in range(per_bundle):
                        one = by_unit[template.unit].popleft()
                        self._add_process(number, template, one.instances, one.seats)

    def _add_process(
        self, bundle: int, template: ProcessTemplate, instances: tuple[tuple[str, int], ...], seats: Seats
    ) -> ProcessState:
        rules = RestartRules.of([self._roles[role] for role, _ in template.instances])
        level = self._levels[template.unit]
        process = ProcessState(next(self._process_numbers), bundle, template, instances, rules, level, seats)
        process.on_move = self._note_states
        self.processes.append(process)
        return process

    def _advance_launch(self, now: float) -> None:
        """Start the next level when all processes of the levels before it are ready."""
        assert self._deadline_at is not None
        last = max(process.level for process in self.processes)
        while self.phase is SystemPhase.LAUNCHING:
            for process in self.processes:
                if process.level == self._level and process.incarnation == 0 and process.start_at is None:
                    process.start_at = now
            self._start_due(now)
            level = [process for process in self.processes if process.level == self._level]
            if any(process.state is not InstanceState.READY for process in level):
                break
            if self._level == last:
                self.phase = SystemPhase.RUNNING
                self._commands.append(Note("run", f"all instances of {self._definition.name} are ready"))
                return
            self._level += 1
        if now >= self._deadline_at and self.phase is SystemPhase.LAUNCHING:
            self._fail(now, self._late_text())

    def _late_text(self) -> str:
        late = [process for process in self.processes if process.state is not InstanceState.READY]
        shown = "; ".join(f"{process.name}: {process.reason}" for process in late[:4])
        more = f"; and {len(late) - 4} more" if len(late) > 4 else ""
        return f"not ready within {self._deadline_s:g} s: {shown}{more}"

    def _start_due(self, now: float) -> None:
        """Start processes that are due, on their node or, if it is lost, on another one."""
        for process in list(self.processes):
            is_due = process.start_at is not None and process.start_at <= now
            if not is_due:
                continue
            if not self._placement.has_nodes_of(process.seats):
                if not self._place_again(now, process):
                    continue
            elif any(self._returning.get(seat.node, now) > now for seat in process.seats):
                self._move(process)
            self._start(now, process)

    def _start(self, now: float, process: ProcessState) -> None:
        process.start(now, next(self._worker_numbers))
        assert process.worker is not None
        self._by_worker[process.worker] = process
        self._is_directory_changed = True
        hosted = tuple(
            self._hosted_as(role, name) for (role, _), name in zip(process.instances, process.hosted_names, strict=True)
        )
        seed = self._rendezvous_seed + process.number if process.template.ranks > 1 else 0
        self._commands.append(StartWorker(process.worker, process.seats, hosted, rendezvous_seed=seed))

    def _hosted_as(self, role: str, name: str) -> HostedObject:
        hosted = self._definition.hosted[role]
        return hosted if hosted.name == name else replace(hosted, name=name)

    def _place_again(self, now: float, process: ProcessState) -> bool:
        """Find seats for all processes of a bundle whose node is lost, or wait."""
        if self._move(process):
            return True
        self._is_directory_changed = True
        process.wait_for_room(now, ROOM_RETRY_S, f"no node has room for {process.template.shape.describe()}")
        return False

    def _move(self, process: ProcessState) -> bool:
        """Give all processes of a bundle seats on other nodes. Returns False, without a change, if there is no room."""
        members = self._processes_of(process.bundle)
        if any(one.worker is not None for one in members):  # they were lost with the same node, and reported soon
            return False
        others = [one for number, one in self._seated_bundles().items() if number != process.bundle]
        found = self._placement.place(self._bundles[process.bundle], others, self._returning)
        if found is None:
            return False
        for one, seats in zip(members, found.seats, strict=True):
            one.seats = seats
        self._commands.append(Note("restart", f"{process.name} moves to {', '.join(found.nodes)}"))
        return True

    # --- bundles

    def _processes_of(self, bundle: int) -> list[ProcessState]:
        """Processes in the order of the bundle."""
        return [process for process in self.processes if process.bundle == bundle]

    def _placed_bundles(self) -> dict[int, PlacedBundle]:
        """Bundles whose processes run or will run."""
        return {
            number: PlacedBundle(bundle, tuple(process.seats for process in self._processes_of(number)))
            for number, bundle in self._bundles.items()
            if any(process.state is not InstanceState.DRAINING for process in self._processes_of(number))
        }

    def _seated_bundles(self) -> dict[int, PlacedBundle]:
        """Bundles that hold their seats, draining ones included."""
        return {
            number: PlacedBundle(bundle, tuple(process.seats for process in self._processes_of(number)))
            for number, bundle in self._bundles.items()
        }

    def _drain_bundle(self, now: float, number: int, reason: str) -> None:
        self._is_directory_changed = True
        for process in self._processes_of(number):
            process.drain(now, reason)
            if process.worker is not None and not process.is_stopping:
                process.is_stopping = True
                self._commands.append(StopWorker(process.worker, drain=True, reason=reason))
            self._remove_if_drained(process, drained=True)

    def _remove_if_drained(self, process: ProcessState, *, drained: bool = False) -> None:
        """A process that was drained while the system runs is not part of it any more."""
        if (
            self.phase is SystemPhase.RUNNING
            and process.state is InstanceState.DEAD
            and (drained or process.is_stopping)
        ):
            self.processes.remove(process)
            if not self._processes_of(process.bundle):
                del self._bundles[process.bundle]

    # --- scaling

    def scale_problem(self, role: str, workers: int) -> str:
        """The reason why this number of instances is impossible; empty if it may be possible."""
        bundle = self._bundle_of(role)
        per_bundle = bundle.instances_of(role)
        low, high = bundle.low * per_bundle, bundle.high * per_bundle
        if not low <= workers <= high:
            return f"role {role!r} has {low} to {high} workers" if low < high else f"role {role!r} has {low} workers"
        if workers % per_bundle:
            return f"role {role!r} has {per_bundle} instances per group, and {workers} is not a multiple of that"
        return ""

    def nearest_count(self, role: str, workers: int) -> int:
        """The number of instances next to this one that the role may have."""
        bundle = self._bundle_of(role)
        per_bundle = bundle.instances_of(role)
        return per_bundle * min(max(round(workers / per_bundle), bundle.low), bundle.high)

    def _bundle_of(self, role: str) -> Bundle:
        return next(bundle for bundle in self._definition.bundles if role in bundle.roles)

    def _scale(self, now: float, role: str, workers: int, reason: str = "") -> None:
        """Add or drain bundles until the role has this many instances, as far as there is room."""
        if self.phase is not SystemPhase.RUNNING or role not in self._roles or self.scale_problem(role, workers):
            return
        bundle = self._bundle_of(role)
        target = workers // bundle.instances_of(role)
        mine = [number for number, one in self._placed_bundles().items() if one.bundle.name == bundle.name]
        before = len(mine)
        for number in sorted(mine, reverse=True)[: max(0, before - target)]:
            self._drain_bundle(now, number, f"scaled to {workers}")
        added = 0
        while before + added < target and self._add_bundle(now, bundle):
            added += 1
        reached = min(before, target) + added
        if reached == before == target:
            return
        per = bundle.instances_of(role)
        text = f"{role}: {before * per} -> {reached * per} instances"
        if reached < target:
            text += f" instead of {workers}: no room for {bundle.processes[0][0].shape.describe()}"
        text += f" ({reason})" if reason else ""
        data = {"role": role, "from": before * per, "to": reached * per, "wanted": workers, "reason": reason}
        self._commands.append(Note("scale", text, data))

    def _add_bundle(self, now: float, bundle: Bundle) -> bool:
        found = self._placement.place(bundle, list(self._seated_bundles().values()))
        if found is None:
            return False
        number = next(self._bundle_numbers)
        self._bundles[number] = bundle
        templates = [template for template, per_bundle in bundle.processes for _ in range(per_bundle)]
        for template, seats in zip(templates, found.seats, strict=True):
            instances = tuple(
                (role, index) for role, per in template.instances for index in self._free_indices(role, per)
            )
            self._start(now, self._add_process(number, template, instances, seats))
        return True

    def _free_indices(self, role: str, wanted: int) -> list[int]:
        taken = {index for process in self.processes for name, index in process.instances if name == role}
        return [index for index in range(len(taken) + wanted) if index not in taken][:wanted]

    # --- end

    def _fail(self, now: float, error: str, detail: str = "") -> None:
        if self.phase in (SystemPhase.STOPPING, SystemPhase.ENDED):
            return
        self.error, self.error_detail = error, detail
        self._commands.append(Note("error", error, {"detail": detail[-4000:]}))
        self._stop(now, RunState.FAILED, error, drain=False)

    def _stop(self, now: float, outcome: RunState, reason: str, *, drain: bool) -> None:
        if self.phase is SystemPhase.ENDED:
            return
        if self.phase is not SystemPhase.STOPPING:
            self.phase, self.run_state, self._outcome = SystemPhase.STOPPING, RunState.STOPPING, outcome
            if drain:
                self.run_state = RunState.DRAINING
            self._stop_level = max(process.level for process in self.processes)
            self._stop_reason = reason
        self._drains = self._drains and drain
        self._is_directory_changed = True
        for process in self.processes:
            if process.worker is None or not self._drains:
                process.drain(now, reason)
        if not self._drains:
            self._kill_all(reason)

    def _kill_all(self, reason: str) -> None:
        for process in self.processes:
            if process.worker is not None:
                self._commands.append(StopWorker(process.worker, drain=False, reason=reason))

    def _advance_stop(self, now: float) -> None:
        """Drain level by level, the last first: the teardown of a role may call those that it started after."""
        while self.phase is SystemPhase.STOPPING:
            if all(process.worker is None for process in self.processes):
                self.phase, self.run_state = SystemPhase.ENDED, self._outcome
                for process in self.processes:
                    process.end(now, process.reason)
                return
            level = [process for process in self.processes if process.level >= self._stop_level]
            for process in level:
                if self._drains and process.worker is not None and not process.is_stopping:
                    self._is_directory_changed = True
                    process.drain(now, self._stop_reason)
                    process.is_stopping = True
                    self._commands.append(StopWorker(process.worker, drain=True, reason=self._stop_reason))
            if any(process.worker is not None for process in level):
                return
            self._stop_level -= 1

    # --- directory

    def _update_directory(self) -> None:
        if not self._is_directory_changed:
            return
        self._is_directory_changed = False
        entries = {name: self._role_entry(role) for name, role in self._roles.items()}
        if entries != self.directory.roles:
            self._directory_version += 1
            self.directory = Directory(self._directory_version, entries)

    def _role_entry(self, role: Role) -> RoleEntry:
        found: dict[int, InstanceAddress] = {}
        for process in self.processes:
            for position, (name, index) in enumerate(process.instances):
                if name == role.name:
                    found[index] = process.address(position)
        removed = InstanceAddress(InstanceState.DEAD, None, "", 0, "removed")
        instances = tuple(found.get(index, removed) for index in range(max(found, default=-1) + 1))
        return RoleEntry(instances, self._definition.methods[role.name], role.ranks)

    def _with_context(self, commands: Iterable[Command]) -> list[Command]:
        """Context of a worker, whose directory includes all workers that start with it."""
        done = []
        for command in commands:
            if isinstance(command, StartWorker):
                process = self._by_worker[command.worker]
                names = dict(zip(process.hosted_names, process.instances, strict=True))
                context = WorkerContext(self._definition.name, names, process.incarnation, self.directory)
                command.context = pickle.dumps(context, 5)
            done.append(command)
        return done


def _loss_text(event: WorkerLost) -> str:
    first = event.detail.splitlines()[0] if event.detail else ""
    return f"{event.cause.value}: {first}" if first else event.cause.value
