"""Thread of a live system that measures the signals of scaled roles and posts the decisions of their scalers."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from dovetail.actors.role import OUTSTANDING
from dovetail.actors.scaling import Scaler
from dovetail.control.events import PinWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.actors.colocation import Bundle
    from dovetail.actors.live_system import LiveSystem
    from dovetail.actors.role import Role

MAX_SIGNAL_S = 5.0
"""Limit for a method that returns a signal."""


def make_scalers(roles: Sequence[Role], bundles: Sequence[Bundle]) -> dict[str, Scaler]:
    """Role -> its scaler. Of several roles that are placed together, the first with `scale` decides for all."""
    found = {}
    for bundle in bundles:
        scaled = next((role for role in roles if role.name in bundle.roles and role.scale is not None), None)
        if scaled is not None and scaled.scale is not None:
            step = bundle.instances_of(scaled.name)
            found[scaled.name] = Scaler(scaled.scale, (bundle.low * step, bundle.high * step), step)
    return found


class ScalingThread:
    """Runs from the end of the launch to the end of the system."""

    def __init__(self, live: LiveSystem, scalers: Mapping[str, Scaler], post: Callable[[PinWorkers], None]) -> None:
        self._live, self._scalers, self._post = live, scalers, post
        self._due = {role: time.monotonic() + scaler.interval_s for role, scaler in scalers.items()}
        self._stop = Event()
        self._thread = Thread(target=self._run, name="dovetail-scaling", daemon=True)

    def start(self) -> None:
        if self._scalers:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, min(self._due.values()) - time.monotonic())):
            role = min(self._due, key=lambda name: self._due[name])
            scaler = self._scalers[role]
            self._decide(role, scaler)
            self._due[role] = max(time.monotonic(), self._due[role] + scaler.interval_s)

    def _decide(self, role: str, scaler: Scaler) -> None:
        signal = self._measure(role, scaler)
        workers = self._live.counts()[role]
        decision = scaler.decide(time.monotonic(), workers, signal)
        if decision.change and not self._stop.is_set():
            self._post(PinWorkers(role, decision.workers, decision.reason))

    def _measure(self, role: str, scaler: Scaler) -> float | None:
        """None if the signal cannot be measured now."""
        signal = scaler.scale.signal
        try:
            if callable(signal):
                return float(signal(self._live))
            if signal == OUTSTANDING:
                return _mean([row.outstanding for row in self._live.status().instances if row.role == role])
            deadline_s = min(MAX_SIGNAL_S, scaler.interval_s)
            values = getattr(self._live[role].options(deadline=deadline_s).all, signal)().result()
            return _mean([float(value) for value in values])
        except Exception:  # of the user's function or method, or an instance that is dead
            return None


def _mean(values: Sequence[Any]) -> float | None:
    return sum(values) / len(values) if values else None
