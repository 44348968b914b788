"""Liveness of workers: after how long without a heartbeat a worker counts as gone, and is forgotten. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.jobs.store import WorkerInfo


WORKER_SILENT_MS = 60_000
"""A worker without a heartbeat for longer than this does not count as running."""
WORKER_FORGOTTEN_MS = 3_600_000
"""A worker without a heartbeat for this long is removed when another one registers."""


def is_live(worker: WorkerInfo, now_ms: int) -> bool:
    """Whether the worker has sent a heartbeat lately."""
    return now_ms - worker.heartbeat_ms <= WORKER_SILENT_MS


def live_workers(workers: Iterable[WorkerInfo], now_ms: int) -> list[WorkerInfo]:
    """The workers that have sent a heartbeat lately."""
    return [worker for worker in workers if is_live(worker, now_ms)]
