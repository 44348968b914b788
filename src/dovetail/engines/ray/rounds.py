"""What does an agent look after, now and then? Its node's raylet, memory, use and logs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from dovetail.control.events import Cause
from dovetail.engines.local.memory_watch import MemoryWatch
from dovetail.engines.ray.logs import LogShipper
from dovetail.engines.ray.measured import NodeMeter
from dovetail.engines.ray.wire import ABOUT, Told

if TYPE_CHECKING:
    from threading import Event

    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.ray.logs import Piece

PULSE_S = 1.0
SICK_S = 4.0
"""A raylet that does not take the smallest object for so long, and does not even run, counts as hung."""
UNKNOWN_S = 30.0
"""The same where it cannot be seen whether it runs: it may be busy with a full store."""
STALL_S = 1.0
"""If we ourselves did not run for so long, we know nothing of others."""
MEASURE_S = 1.0
LOOK_S = 0.25


class Rounds:
    def __init__(self, engine: LocalEngine, logs: Path | None, memory_full: float) -> None:
        """`logs`: a folder that the driver does not see. `memory_full`: the share at which a worker must go."""
        self._engine = engine
        self._memory = MemoryWatch(full=memory_full)
        self.asked: dict[int, int] = {}
        """Worker -> bytes that it asked for, if it did."""
        self._meter = NodeMeter(engine.processes)
        self._meter.start()
        self._logs = LogShipper(logs / "logs") if logs is not None else None
        self._pulsed = self._came = time.monotonic()
        self._measured = self._looked = 0.0
        self._sick = False
        self._raylet = os.environ.get("RAY_RAYLET_PID", "")
        self._ran: tuple[int, float] = (-1, self._pulsed)
        """How often the raylet had run when it was last seen to, and when that was."""

    def pulse(self, closing: Event) -> None:
        """In a thread of its own: as long as the raylet takes objects, all is well."""
        while not closing.is_set():
            ray.put(b"")
            self._pulsed = time.monotonic()
            closing.wait(PULSE_S)

    def made(self, now: float) -> list[Told]:
        """By the agent's thread, after whatever it did."""
        if now - self._looked < LOOK_S:
            return []
        if now - self._came > STALL_S:
            self._pulsed = max(self._pulsed, now)
        self._looked = self._came = now
        told = self._health(now)
        self._look_at_memory(now)
        if now - self._measured >= MEASURE_S:
            self._measured = now
            use = self._meter.take()
            told += [Told(("use", use), ABOUT * 4)] if use is not None else []
            if self._logs is not None:
                pieces = self._logs.news()
                told += [Told(("log", pieces), ABOUT + sum(len(data) for _, _, data, _ in pieces))] if pieces else []
        return told

    def close(self) -> list[Piece]:
        """What was printed last, where the driver does not see it."""
        self._meter.stop()
        return self._logs.last() if self._logs is not None else []

    def _look_at_memory(self, now: float) -> None:
        chosen = self._memory.look(now, self._engine.processes(), self.asked)
        if chosen is not None:
            self._engine.lose(chosen[0], Cause.OUT_OF_MEMORY, chosen[1])

    def _health(self, now: float) -> list[Told]:
        runs = turns_of(self._raylet)
        if runs != self._ran[0]:
            self._ran = runs, now
        silent_s = now - self._pulsed
        limit = SICK_S if runs >= 0 or self._ran[0] >= 0 else UNKNOWN_S
        if self._sick or silent_s < limit or now - self._ran[1] < SICK_S / 2:
            return []
        self._sick = True
        return [Told(("sick", f"its raylet has not answered for {now - self._pulsed:.0f} s"))]


def turns_of(pid: str) -> int:
    """How often a process got a turn on a CPU; -1: nobody knows. One that is stopped gets none."""
    try:
        lines = Path("/proc", pid, "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return -1
    found = [line.split()[1] for line in lines if "voluntary_ctxt_switches" in line]
    return sum(map(int, found)) if pid else -1
