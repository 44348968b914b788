"""Which agents have nothing to do? A driver keeps those of its last run for a while: the next one begins at once."""

from __future__ import annotations

import contextlib
import time
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT_S = 60.0
THREAD = "dovetail-idle"


class Idle:
    """Agents by Ray job, node and runtime_env. They hold nothing that Ray counts, and end with this process."""

    def __init__(self, kept_s: float = KEPT_S, end: Callable[[Any], None] | None = None) -> None:
        self._kept_s = kept_s
        self._end = end or _end
        self._lock = Lock()
        self._kept: dict[tuple[str, str, str], list[tuple[float, Any]]] = {}
        """Those that came last at the end, each with the time when it is kept no longer."""
        self._timer: Timer | None = None

    def take(self, node_id: str, kind: str) -> Any:
        """An agent of an earlier run, perhaps dead by now; None: there is none."""
        with self._lock:
            kept = self._kept.get((_job(), node_id, kind))
            return kept.pop()[1] if kept else None

    def put(self, node_id: str, kind: str, handle: Any) -> None:
        with self._lock:
            until = time.monotonic() + self._kept_s
            self._kept.setdefault((_job(), node_id, kind), []).append((until, handle))
            if self._timer is None:
                self._look_at(until)

    def _look_at(self, when: float) -> None:
        """One timer for all of them."""
        self._timer = Timer(max(0.0, when - time.monotonic()), self._look)
        self._timer.name, self._timer.daemon = THREAD, True
        self._timer.start()

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic()
            due = [handle for kept in self._kept.values() for until, handle in kept if until <= now]
            left = {key: [one for one in kept if one[0] > now] for key, kept in self._kept.items()}
            self._kept = {key: kept for key, kept in left.items() if kept}
            self._timer = None
            if self._kept:
                self._look_at(min(kept[0][0] for kept in self._kept.values()))
        for handle in due:
            self._end(handle)


def _end(handle: Any) -> None:
    if ray.is_initialized():  # else Ray would be started, or joined, to say it
        with contextlib.suppress(Exception):
            ray.kill(handle)


def _job() -> str:
    """This process's membership in a Ray: another after it left and joined again."""
    return f"{ray._private.worker.global_worker.node.session_name} {ray.get_runtime_context().get_job_id()}"  # noqa: SLF001


IDLE = Idle()
