"""Periodic checks of a node by its agent: raylet health, memory pressure, metrics, new log output. Node side."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from dovetail.control.events import LossCause
from dovetail.engines.local.memory_watch import MemoryWatch
from dovetail.engines.ray import ray_private
from dovetail.engines.ray.metrics import NodeMeter
from dovetail.engines.ray.protocol import MESSAGE_OVERHEAD_BYTES, SizedOp
from dovetail.engines.ray.worker_logs import LogShipper

if TYPE_CHECKING:
    from threading import Event

    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.ray.worker_logs import LogPiece

RAYLET_PROBE_S = 1.0
HUNG_RAYLET_S = 4.0
"""A raylet that does not take the smallest object for so long, and does not even run, counts as hung."""
UNSEEN_RAYLET_S = 30.0
"""The same where it cannot be seen whether it runs: it may be busy with a full store."""
AGENT_STALL_S = 1.0
"""If we ourselves did not run for so long, we know nothing of others."""
MEASURE_S = 1.0
CHECK_S = 0.25


class NodeMonitor:
    def __init__(self, engine: LocalEngine, logs: Path | None, memory_full: float) -> None:
        """`logs`: a folder that the driver does not see. `memory_full`: the share at which a worker must go."""
        self._engine = engine
        self._memory = MemoryWatch(full=memory_full)
        self.requested_bytes: dict[int, int] = {}
        """Worker -> bytes that it asked for, if it did."""
        self._meter = NodeMeter(engine.processes)
        self._meter.start()
        self._logs = LogShipper(logs / "logs") if logs is not None else None
        self._raylet_seen_at = self._last_check_at = time.monotonic()
        self._measured = self._looked = 0.0
        self._is_hung = False
        self._raylet_pid = ray_private.raylet_pid()
        self._raylet_activity: tuple[int, float] = (-1, self._raylet_seen_at)
        """How often the raylet had run when it was last seen to, and when that was."""

    def probe_raylet(self, closing: Event) -> None:
        """In a thread of its own: as long as the raylet takes objects, all is well."""
        while not closing.is_set():
            ray.put(b"")
            self._raylet_seen_at = time.monotonic()
            closing.wait(RAYLET_PROBE_S)

    def check(self, now: float) -> list[SizedOp]:
        """By the agent's thread, after whatever it did."""
        if now - self._looked < CHECK_S:
            return []
        if now - self._last_check_at > AGENT_STALL_S:
            self._raylet_seen_at = max(self._raylet_seen_at, now)
        self._looked = self._last_check_at = now
        told = self._health(now)
        self._look_at_memory(now)
        if now - self._measured >= MEASURE_S:
            self._measured = now
            use = self._meter.take()
            told += [SizedOp(("use", use), MESSAGE_OVERHEAD_BYTES * 4)] if use is not None else []
            if self._logs is not None:
                pieces = self._logs.read_new()
                told += (
                    [SizedOp(("log", pieces), MESSAGE_OVERHEAD_BYTES + sum(len(data) for _, _, data, _ in pieces))]
                    if pieces
                    else []
                )
        return told

    def close(self) -> list[LogPiece]:
        """What was printed last, where the driver does not see it."""
        self._meter.stop()
        return self._logs.read_last() if self._logs is not None else []

    def _look_at_memory(self, now: float) -> None:
        chosen = self._memory.check(now, self._engine.processes(), self.requested_bytes)
        if chosen is not None:
            self._engine.end_worker(chosen[0], LossCause.OUT_OF_MEMORY, chosen[1])

    def _health(self, now: float) -> list[SizedOp]:
        runs = context_switches(self._raylet_pid)
        if runs != self._raylet_activity[0]:
            self._raylet_activity = runs, now
        silent_s = now - self._raylet_seen_at
        limit = HUNG_RAYLET_S if runs >= 0 or self._raylet_activity[0] >= 0 else UNSEEN_RAYLET_S
        if self._is_hung or silent_s < limit or now - self._raylet_activity[1] < HUNG_RAYLET_S / 2:
            return []
        self._is_hung = True
        return [SizedOp(("sick", f"its raylet has not answered for {now - self._raylet_seen_at:.0f} s"))]


def context_switches(pid: int | None) -> int:
    """How often a process got a turn on a CPU; -1: nobody knows. One that is stopped gets none."""
    if pid is None:
        return -1
    try:
        lines = Path("/proc", str(pid), "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return -1
    found = [line.split()[1] for line in lines if "voluntary_ctxt_switches" in line]
    return sum(map(int, found))
