"""LiveSystem: a launched actor system, its handles, and the thread that drives it."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Event as ThreadEvent
from typing import TYPE_CHECKING, Any, Self, cast

from dovetail.actors.handles import ActorHandles, RoleHandle
from dovetail.actors.instance_directory import InstanceState
from dovetail.actors.role_fields import BAD_ROLE
from dovetail.actors.scaling_thread import ScalingThread
from dovetail.actors.system_controller import SystemPhase
from dovetail.actors.system_status import SystemStatus, instance_rows
from dovetail.actors.usage_advice import usage_advice
from dovetail.control.commands import Note, StartWorker
from dovetail.control.engine import CallOptions
from dovetail.control.events import CancelRun, Drain, PinWorkers
from dovetail.control.lifecycle import RunState
from dovetail.errors import Call, ConfigError, DovetailError, Problem, RunError, Subject, did_you_mean, nearest_word
from dovetail.pipeline.durations import checked_duration
from dovetail.runtime.assembly import LOOP_TICK_S, REFRESH_TIMEOUT_S
from dovetail.runtime.run_handle import MAX_TRACEBACK_LINES, RunHandle
from dovetail.runtime.run_loop import run_with_observers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from dovetail.actors.call_router import ActorCallRouter
    from dovetail.actors.heartbeat_monitor import HeartbeatMonitor
    from dovetail.actors.instance_directory import Directory
    from dovetail.actors.scaling_thread import ScaledRole
    from dovetail.actors.system_controller import ActorController
    from dovetail.control.commands import Command
    from dovetail.control.engine import Observer
    from dovetail.control.events import Event
    from dovetail.observe.control_socket import ControlSocket
    from dovetail.observe.recorder import Recorder
    from dovetail.observe.run_folder import RunFolder
    from dovetail.runtime.admission import Admission
    from dovetail.runtime.delayed_telemetry import DelayedTelemetry
    from dovetail.runtime.run_lock import RunLock
    from dovetail.runtime.sites import RunEngine
    from dovetail.scheduling.plan import Plan

NOT_STARTED, FAILED, BAD_COUNT = "DT522", "DT523", "DT524"
FIGURES_TIMEOUT_S = 0.2
"""Time limit for answers of instances; without an answer, the figures are those of the latest heartbeat."""
STOP_MARGIN_S = 10.0
"""Time limit for the end of killed processes."""


class DirectoryChanged:
    """Event: workers of the directory were started by the last step, and can be called."""


class DirectoryPublisher:
    """Observer that gives every new directory to the router of the driver and to the workers.

    Observers are called before the commands of their step are submitted: a directory is published in the next step."""

    def __init__(self, controller: ActorController, engine: RunEngine, router: ActorCallRouter) -> None:
        self._controller, self._engine, self._router = controller, engine, router
        self._published: Directory = controller.directory
        self._pending: Directory | None = None
        self._known: dict[int, int] = {}
        """Worker -> the version of the directory that it has."""

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002 - the port's
        if self._pending is not None:
            self._publish(self._pending)
            self._pending = None
        directory = self._controller.directory
        for command in commands:
            if isinstance(command, StartWorker):
                self._known[command.worker] = directory.version
        if directory is not self._published:
            self._pending = directory
            self._engine.post(cast("Event", DirectoryChanged()))

    def _publish(self, directory: Directory) -> None:
        is_moved = _targets(directory) != _targets(self._published)
        self._published = directory
        self._router.update(directory)
        if not is_moved:
            return
        pickled = pickle.dumps(directory, 5)
        current = {}
        for process in self._controller.processes:
            if process.worker is None:
                continue
            current[process.worker] = directory.version
            if self._known.get(process.worker, -1) < directory.version:
                for hosted in process.hosted_names:
                    for rank in range(process.template.ranks):
                        options = CallOptions(rank)
                        self._engine.call_with(options, process.worker, hosted, "_dovetail_directory", pickled)
        self._known = current

    def close(self, now: float) -> None:  # noqa: ARG002 - the port's
        self._router.close("has ended")


def _targets(directory: Directory) -> dict[str, list[tuple[int | None, bool]]]:
    """The state that callers depend on: the worker of each instance, and whether calls may be sent."""
    return {role: [(one.worker, one.is_expected) for one in entry.instances] for role, entry in directory.roles.items()}


class SystemWatch:
    """Observer that notifies threads that wait for a launch, a change of scale or the end."""

    def __init__(self, controller: ActorController) -> None:
        self._controller = controller
        self.launched = ThreadEvent()
        """Set when all instances are ready, or the launch has failed."""
        self.scaled: dict[int, tuple[ThreadEvent, list[Note]]] = {}
        """Identity of a request to scale -> an event that is set when it is handled, and the decision."""
        self._handled: list[ThreadEvent] = []
        """Requests that the latest step handled; its directory is being published."""

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002 - the port's
        if self._controller.phase is not SystemPhase.LAUNCHING:
            self.launched.set()
        for handled in self._handled:
            handled.set()
        self._handled = []
        for event in events:
            if isinstance(event, PinWorkers) and id(event) in self.scaled:
                handled, notes = self.scaled[id(event)]
                notes += [one for one in commands if isinstance(one, Note) and one.data.get("role") == event.unit]
                self._handled.append(handled)

    def close(self, now: float) -> None:  # noqa: ARG002 - the port's
        self.launched.set()
        for handled, _ in list(self.scaled.values()):
            handled.set()


@dataclass
class ActiveSystem:
    """The parts of a launched system."""

    admission: Admission
    folder: RunFolder
    lock: RunLock
    engine: RunEngine
    controller: ActorController
    router: ActorCallRouter
    recorder: Recorder
    monitor: HeartbeatMonitor
    watch: SystemWatch
    telemetry: DelayedTelemetry
    control_socket: ControlSocket
    observers: list[Observer] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        return self.admission.plan

    def refresh_figures(self) -> None:
        """Ask all instances for their figures, and wait briefly for the answers."""
        request = self.monitor.request_figures()
        self.engine.nudge()
        request.wait(FIGURES_TIMEOUT_S)

    def refresh_status(self) -> None:
        self.refresh_figures()
        written = self.recorder.request_view()
        self.engine.nudge()
        written.wait(REFRESH_TIMEOUT_S)

    def drive(self) -> None:
        """Run the control loop to the end, and close everything on every path."""
        with ExitStack() as closing:
            closing.callback(self.lock.release)
            closing.callback(self.admission.release)
            closing.callback(self.control_socket.close)
            claim_observers = self.admission.claim_observers(self.engine.post)
            self.telemetry.start()
            closing.callback(self.telemetry.stop)
            run_with_observers(
                self.controller,
                self.engine,
                None,
                self.recorder,
                self.observers,
                claim_observers=claim_observers,
                beat_s=LOOP_TICK_S,
            )


class LiveSystem(RunHandle):
    """A launched actor system. `live.trainer` and `live["trainer"]` are handles of roles.

    Leaving a `with` block stops the system: it drains, or after an exception is stopped at once."""

    _noun = "actor system"

    def __init__(self, name: str, active: ActiveSystem, scaled: Mapping[str, ScaledRole]) -> None:
        super().__init__(active)
        self.name = name
        self._scaling = ScalingThread(self, scaled, lambda event: active.engine.post(cast("Event", event)))
        self._system = active
        self._handles = ActorHandles(active.router)
        self._is_failure_raised = False
        self._shapes = {unit.name: unit.shape for unit in active.plan.units}
        self._start()

    def _drive(self) -> None:
        self._system.drive()

    def _close(self) -> None:
        self._scaling.stop()
        self._system.router.close("has ended")

    # --- roles

    def __getattr__(self, name: str) -> RoleHandle:
        if name.startswith("_"):
            raise AttributeError(name)
        return cast("RoleHandle", getattr(self._handles, name))

    def __getitem__(self, name: str) -> RoleHandle:
        return self._handles[name]

    def __repr__(self) -> str:
        return f"<LiveSystem {self.name} ({self.folder.name}): {self._system.controller.state.value}>"

    # --- status

    def status(self) -> SystemStatus:
        """All instances with their state, place, calls and memory."""
        controller = self._system.controller
        if not self.done:
            self._system.refresh_figures()
        pids = self._engine.processes() if not self.done else {}
        rows = instance_rows(
            list(controller.processes),
            self._engine.now(),
            self._system.monitor.heartbeats,
            self._system.telemetry.memory_of,
            lambda worker: pids[worker][1] if worker in pids else (),
            self._system.router.outstanding,
        )
        advice = usage_advice(self._system.telemetry.units(), self._shapes, self._ready_s())
        warnings = tuple(
            f"{role} is not scaled: its signal cannot be measured: {problem}"
            for role, problem in dict(controller.signal_problems).items()
        )
        state, error = controller.state.value, controller.error
        return SystemStatus(self.name, self.folder.name, state, error, tuple(rows), advice, warnings)

    def _ready_s(self) -> dict[str, float]:
        """Kind of process -> how long its oldest process has been ready."""
        now, found = self._engine.now(), dict.fromkeys(self._shapes, 0.0)
        for process in list(self._system.controller.processes):
            state, _, since = process.instance_state(process.instances[0])
            if state is InstanceState.READY:
                found[process.template.unit] = max(found.get(process.template.unit, 0.0), now - since)
        return found

    def counts(self) -> dict[str, int]:
        """Role -> instances that run or are starting."""
        return self._system.controller.counts()

    # --- scale

    def scale(self, **workers: int) -> None:
        """Change the number of instances of roles: `live.scale(rollout=4)`. Returns when their places are decided; new
        instances can be called at once. RunError if there is not enough room."""
        controller = self._system.controller
        problems = []
        possible: dict[str, int] = {}
        for role, count in workers.items():
            if role not in self._handles:
                hint = did_you_mean(role, self._handles)
                message = f"there is no role {role!r}{hint}; roles: {', '.join(self._handles)}"
                problems.append(Problem(BAD_COUNT, message, subject=Subject("role", role)))
            elif problem := controller.scale_problem(role, count):
                problems.append(Problem(BAD_COUNT, f"{role}={count}: {problem}", subject=Subject("role", role)))
            known = nearest_word(role, self._handles) if role not in self._handles else role
            if known is not None:
                possible[known] = controller.nearest_count(known, count)
        if problems:
            fixes = (Call("live.scale", (), possible),) if possible else ()
            raise ConfigError(replace(problem, fixes=fixes) for problem in problems)
        for role, count in workers.items():
            self._scale_role(role, count)

    def _scale_role(self, role: str, count: int) -> None:
        event = PinWorkers(role, count)
        handled, notes = self._system.watch.scaled[id(event)] = ThreadEvent(), []
        self._engine.post(event)
        while not handled.wait(0.2) and not self.done:
            pass
        del self._system.watch.scaled[id(event)]
        for note in notes:
            if note.data.get("to") != note.data.get("wanted"):
                fixes = (Call("live.scale", (), {role: note.data.get("to")}, "as many as there is room for"),)
                raise RunError(Problem(BAD_COUNT, note.text, fixes=fixes, subject=Subject("role", role)))

    # --- end

    def wait_until_ready(self) -> None:
        """Return when all instances are ready. Raises RunError if the launch failed."""
        try:
            while not self._system.watch.launched.wait(0.2) and not self.done:
                pass
        except BaseException:
            self.cancel("interrupted during its launch")
            self._wait_until_over(STOP_MARGIN_S)
            raise
        if self._system.controller.run_state in (RunState.STOPPING, RunState.FAILED) or self.done:
            self._wait_until_over()
            self._raise_failure(NOT_STARTED)
        self._scaling.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the system has ended. Raises RunError if it failed, and TimeoutError after `timeout` seconds.
        Ctrl-C stops waiting; it does not stop the system."""
        if not self._wait_until_over(timeout):
            raise TimeoutError(f"the system has not ended after {timeout} s")
        self._raise_failure(FAILED)

    def stop(self, *, drain: bool = True, deadline: float | str = "30s") -> None:
        """Stop the system and return when it has ended. With `drain`, running and waiting calls are finished first; at
        the deadline what is left is killed."""
        deadline_s = checked_duration("deadline", deadline, BAD_ROLE, "30s")
        self._scaling.stop()
        self._system.router.close("is stopped")
        if drain and not self.done:
            self._engine.post(Drain("stopped"))
            self._wait_until_over(deadline_s)
        if not self.done:
            self._engine.post(CancelRun(f"not drained within {deadline_s:g} s" if drain else "stopped"))
        self._wait_until_over()
        if self._crash is not None and not isinstance(self._crash, KeyboardInterrupt):
            raise self._crash

    def cancel(self, reason: str = "asked") -> None:
        """Stop at once, without waiting."""
        self._engine.post(CancelRun(reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(drain=error is None)
        if error is None and not self._is_failure_raised:
            self._raise_failure(FAILED)

    def _raise_failure(self, code: str) -> None:
        if self._crash is not None:
            raise self._crash
        controller = self._system.controller
        if controller.run_state is RunState.FAILED or code == NOT_STARTED:
            self._is_failure_raised = True
            raise _failure(self.name, code, controller.error, controller.error_detail, self.folder.name)


def _failure(name: str, code: str, error: str, detail: str, run: str) -> DovetailError:
    what = "did not start" if code == NOT_STARTED else "failed"
    lines = tuple(line for line in detail.splitlines()[1:] if line.strip())[-MAX_TRACEBACK_LINES:]
    fixes = (f"dovetail logs {run}",)
    return RunError(Problem(code, f"{name} {what}: {error or 'it was stopped'}", lines, fixes))


def requests(live: LiveSystem) -> Mapping[str, Any]:
    """Requests of the control socket: the status, and to scale roles."""

    def status(_asked: Mapping[str, Any]) -> dict[str, Any]:
        return {"status": live.status().to_dict()}

    def scale(asked: Mapping[str, Any]) -> dict[str, Any]:
        workers = asked.get("workers")
        if not isinstance(workers, dict) or not all(isinstance(count, int) for count in workers.values()):
            raise TypeError('expected {"workers": {role: number}}')
        live.scale(**workers)
        return {}

    return {"status": status, "scale": scale}
