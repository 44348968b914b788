"""Heartbeats of a live system: the figures of every instance and its health checks, without waiting for answers."""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from dovetail.actors.directory import InstanceState
from dovetail.actors.health import HealthChecked
from dovetail.control.engine import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from dovetail.actors.health import HealthLimits
    from dovetail.actors.system_controller import ActorController
    from dovetail.control.commands import Command
    from dovetail.control.events import Event
    from dovetail.runtime.sites import RunEngine

HEARTBEAT_S = 2.0
LATE_HEARTBEATS = 3
"""Heartbeats without an answer after which an instance without `health` is degraded."""


class Heartbeat:
    """The last answer of one instance to the monitor, and its open health check."""

    __slots__ = ("answered_at", "asked_at", "check_due_at", "check_open_at", "figures", "is_unhealthy", "worker")

    def __init__(self, worker: int, now: float) -> None:
        self.worker = worker
        self.asked_at = self.answered_at = now
        self.figures: Mapping[str, Any] = {}
        self.check_due_at = now
        self.check_open_at: float | None = None
        """When the check began whose outcome is not known yet."""
        self.is_unhealthy = False

    @property
    def is_answered(self) -> bool:
        return self.asked_at <= self.answered_at

    @property
    def has_health(self) -> bool:
        return "health" in self.figures


class HeartbeatMonitor:
    """Observer that asks every instance for its figures, and starts a health check when one is due. Outcomes are posted
    as events; the controller decides what they mean."""

    def __init__(self, controller: ActorController, engine: RunEngine, limits: Mapping[str, HealthLimits]) -> None:
        """`limits`: by role."""
        self._controller, self._engine, self._limits = controller, engine, limits
        self._due = float("-inf")
        self._lock = Lock()
        """Answers arrive in threads of the engine."""
        self.heartbeats: dict[tuple[str, int], Heartbeat] = {}

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None:  # noqa: ARG002 - the port's
        if now >= self._due:
            self._due = now + HEARTBEAT_S
            self.ask_all(now)

    def ask_all(self, now: float) -> list[Future[Any]]:
        """Ask all instances that are ready and have answered the last time."""
        asked, current = [], {}
        for process in self._controller.processes:
            if process.worker is None or process.state is not InstanceState.READY:
                continue
            for hosted, instance in zip(process.hosted_names, process.instances, strict=True):
                beat = self.heartbeats.get(instance)
                if beat is None or beat.worker != process.worker:
                    beat = Heartbeat(process.worker, now)
                current[instance] = beat
                with self._lock:
                    self._open_check(now, beat, self._limits[instance[0]])
                    if not beat.is_answered:
                        self._on_silence(now, beat, instance)
                        continue
                    beat.asked_at = now + 1e-9
                    is_checked, timeout_s = beat.check_open_at is not None, self._limits[instance[0]].timeout_s
                future = self._engine.call(beat.worker, hosted, "_dovetail_status", is_checked, timeout_s)
                future.add_done_callback(partial(self._on_answer, beat, instance))
                asked.append(future)
        self.heartbeats = current
        return asked

    def _open_check(self, now: float, beat: Heartbeat, limits: HealthLimits) -> None:
        if beat.check_open_at is None and now >= beat.check_due_at:
            beat.check_open_at, beat.check_due_at = now, now + limits.period_s

    def _on_silence(self, now: float, beat: Heartbeat, instance: tuple[str, int]) -> None:
        """The last question is not answered yet."""
        silent_s = now - beat.answered_at
        if beat.has_health:
            is_late = beat.check_open_at is not None and now - beat.check_open_at > self._limits[instance[0]].timeout_s
            beat.check_open_at = None if is_late else beat.check_open_at
        else:
            is_late = silent_s > LATE_HEARTBEATS * HEARTBEAT_S and not beat.is_unhealthy
        if is_late:
            self._post(beat, instance, f"has not answered for {silent_s:.0f} s", counts=beat.has_health)

    def _on_answer(self, beat: Heartbeat, instance: tuple[str, int], done: Future[Any]) -> None:
        if done.cancelled() or isinstance(done.exception(), WorkerLostError):
            return  # its loss is reported
        error = done.exception()
        with self._lock:
            beat.answered_at = max(beat.asked_at, self._engine.now())
            if error is not None:
                self._post(beat, instance, f"{error}", counts=False)
                return
            beat.figures = done.result()
            problem = beat.figures.get("health", "")
            if problem is None or (beat.has_health and beat.check_open_at is None):
                return  # still running, or reported already
            beat.check_open_at = None
            self._post(beat, instance, problem, counts=beat.has_health)

    def _post(self, beat: Heartbeat, instance: tuple[str, int], problem: str, *, counts: bool) -> None:
        if not problem and not beat.is_unhealthy:
            return
        beat.is_unhealthy = bool(problem)
        self._engine.post(cast("Event", HealthChecked(beat.worker, instance, problem, counts)))

    def close(self, now: float) -> None:
        pass
