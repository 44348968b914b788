"""Periodic checks of a node by its agent: raylet health, metrics, new log output. Node side.

`agent.AgentSession` calls `check` after everything it does, and runs `probe_raylet` in a thread. A raylet that hangs is
reported as "node_unhealthy" after 4 s: without that, the node would take work until Ray detects it, after 14 to 66 s.
Its context switches distinguish a raylet that hangs from one that is busy with a full object store, which also does not
answer.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from dovetail.engines.ray import ray_private
from dovetail.engines.ray.failure_detection import HUNG_RAYLET_S, UNSEEN_RAYLET_S
from dovetail.engines.ray.metrics import NodeMeter
from dovetail.engines.ray.protocol import MESSAGE_OVERHEAD_BYTES, SizedOp
from dovetail.engines.ray.worker_logs import LogShipper

if TYPE_CHECKING:
    from threading import Event

    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.ray.worker_logs import LogPiece, ReceivedOffsets

RAYLET_PROBE_S = 1.0
AGENT_STALL_S = 1.0
"""If the agent itself did not run for this long, the silence of the raylet proves nothing."""
MEASURE_S = 1.0
CHECK_S = 0.25


class NodeMonitor:
    """Thread: that of the session, except for `probe_raylet`."""

    def __init__(self, engine: LocalEngine, logs: Path | None) -> None:
        """`logs`: the run folder, if the driver does not see it."""
        self._meter = NodeMeter(engine.processes)
        self._meter.start()
        self._logs = LogShipper(logs / "logs") if logs is not None else None
        self._raylet_seen_at = self._last_check_at = time.monotonic()
        self._measured_at = self._checked_at = 0.0
        self._is_hung = False
        self._raylet_pid = ray_private.raylet_pid()
        self._raylet_activity: tuple[int, float] = (-1, self._raylet_seen_at)
        """Context switches of the raylet at their last change, and the time of that change."""

    def probe_raylet(self, closing: Event) -> None:
        """Store an empty object every second; blocks while the raylet hangs. In a thread of its own."""
        while not closing.is_set():
            ray.put(b"")
            self._raylet_seen_at = time.monotonic()
            closing.wait(RAYLET_PROBE_S)

    def check(self, now: float) -> list[SizedOp]:
        """Operations for the driver; does something at most every `CHECK_S`."""
        if now - self._checked_at < CHECK_S:
            return []
        if now - self._last_check_at > AGENT_STALL_S:
            self._raylet_seen_at = max(self._raylet_seen_at, now)
        self._checked_at = self._last_check_at = now
        ops = self._check_raylet(now)
        if now - self._measured_at >= MEASURE_S:
            self._measured_at = now
            use = self._meter.take()
            ops += [SizedOp(("metrics", use), MESSAGE_OVERHEAD_BYTES * 4)] if use is not None else []
            if self._logs is not None:
                pieces = self._logs.read_new()
                ops += (
                    [SizedOp(("log", pieces), MESSAGE_OVERHEAD_BYTES + sum(len(data) for _, _, _, data, _ in pieces))]
                    if pieces
                    else []
                )
        return ops

    def close(self, received: ReceivedOffsets) -> list[LogPiece]:
        """The last output of workers, if the driver does not see it; see `LogShipper.read_last`."""
        self._meter.stop()
        return self._logs.read_last(received) if self._logs is not None else []

    def _check_raylet(self, now: float) -> list[SizedOp]:
        switches = context_switches(self._raylet_pid)
        if switches != self._raylet_activity[0]:
            self._raylet_activity = switches, now
        silent_s = now - self._raylet_seen_at
        limit = HUNG_RAYLET_S if switches >= 0 or self._raylet_activity[0] >= 0 else UNSEEN_RAYLET_S
        if self._is_hung or silent_s < limit or now - self._raylet_activity[1] < HUNG_RAYLET_S / 2:
            return []
        self._is_hung = True
        return [SizedOp(("node_unhealthy", f"its raylet has not answered for {now - self._raylet_seen_at:.0f} s"))]


def context_switches(pid: int | None) -> int:
    """Number of context switches of a process, which a stopped process does not have; -1: unknown."""
    if pid is None:
        return -1
    try:
        lines = Path("/proc", str(pid), "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return -1
    found = [line.split()[1] for line in lines if "voluntary_ctxt_switches" in line]
    return sum(map(int, found))
