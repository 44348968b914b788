"""Thread of a live system that measures the signals of scaled roles and posts the decisions of their scalers."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.actors.scale_signal import OUTSTANDING, SignalMeasured, signal_parts
from dovetail.actors.scaling import Scaler
from dovetail.control.events import PinWorkers
from dovetail.errors import short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.actors.colocation import Bundle
    from dovetail.actors.live_system import LiveSystem
    from dovetail.actors.role import Role

MAX_SIGNAL_S = 5.0
"""Time limit of a method that returns a signal."""
REPORTED_FAILURES = 2


class ScaledRole(NamedTuple):
    """A role, its scaler, and where its signal comes from."""

    scaler: Scaler
    signal_role: str
    signal_name: str


def scaled_roles(roles: Sequence[Role], bundles: Sequence[Bundle]) -> dict[str, ScaledRole]:
    """The first role with `scale` decides for all roles of its group."""
    found = {}
    for bundle in bundles:
        scaled = next((role for role in roles if role.name in bundle.roles and role.scale is not None), None)
        if scaled is not None and scaled.scale is not None:
            step = bundle.instances_of(scaled.name)
            scaler = Scaler(scaled.scale, (bundle.low * step, bundle.high * step), step)
            found[scaled.name] = ScaledRole(scaler, *signal_parts(scaled))
    return found


class ScalingThread:
    """Measures signals from the end of the launch to the end of the system."""

    def __init__(
        self,
        live: LiveSystem,
        roles: Mapping[str, ScaledRole],
        post: Callable[[PinWorkers | SignalMeasured], None],
    ) -> None:
        self._live, self._roles, self._post = live, roles, post
        self._due = {role: time.monotonic() + scaled.scaler.interval_s for role, scaled in roles.items()}
        self._failures: dict[str, int] = {}
        """Role -> number of consecutive signals that could not be measured."""
        self._stop = Event()
        self._thread = Thread(target=self._run, name="dovetail-scaling", daemon=True)

    def start(self) -> None:
        if self._roles:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, min(self._due.values()) - time.monotonic())):
            role = min(self._due, key=lambda name: self._due[name])
            scaled = self._roles[role]
            self._decide(role, scaled)
            self._due[role] = max(time.monotonic(), self._due[role] + scaled.scaler.interval_s)

    def _decide(self, role: str, scaled: ScaledRole) -> None:
        signal, problem = None, ""
        try:
            signal = self._measure(scaled)
        except Exception as error:  # of the user's function or method, or an instance that is dead
            problem = f"{type(error).__name__}: {error}"
        self._report(role, problem)
        decision = scaled.scaler.decide(time.monotonic(), self._live.counts()[role], signal)
        if decision.change and not self._stop.is_set():
            self._post(PinWorkers(role, decision.workers, decision.reason))

    def _report(self, role: str, problem: str) -> None:
        """Report a signal that fails twice in succession: one call may fail because its instance is restarted."""
        failures = self._failures.get(role, 0)
        self._failures[role] = failures + 1 if problem else 0
        if not self._stop.is_set() and (
            failures + 1 == REPORTED_FAILURES if problem else failures >= REPORTED_FAILURES
        ):
            self._post(SignalMeasured(role, problem))

    def _measure(self, scaled: ScaledRole) -> float | bool | None:
        """The mean over all instances; None if there is none. Raises if it cannot be measured now."""
        signal = scaled.scaler.scale.signal
        if callable(signal):
            return _mean([signal(self._live)])
        if scaled.signal_name == OUTSTANDING:
            rows = self._live.status().instances
            return _mean([row.outstanding for row in rows if row.role == scaled.signal_role])
        handle = self._live[scaled.signal_role].options(deadline=min(MAX_SIGNAL_S, scaled.scaler.interval_s))
        return _mean(getattr(handle.all, scaled.signal_name)().result())


def _mean(values: Sequence[Any]) -> float | bool | None:
    if len(values) == 1 and isinstance(values[0], bool):
        return values[0]
    return sum(map(_number, values)) / len(values) if values else None


def _number(value: Any) -> float:
    if not hasattr(value, "__float__"):  # float("12") is a number
        raise TypeError(f"a signal is a number, True or False, not {short_repr(value)}")
    return float(value)
