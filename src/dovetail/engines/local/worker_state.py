"""Driver-side state of a worker: its rank processes, messages in flight and cause of exit."""

from __future__ import annotations

import os
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.control.events import VERDICT_FATAL, LossCause, WorkerLost, WorkerStopped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.control.events import Breadcrumb, CallFailure
    from dovetail.control.payload import SegmentSlice
    from dovetail.engines.local.protocol import Channel
    from dovetail.engines.local.worker_call_router import Waiter


class RankProcess:
    """One process of a worker."""

    __slots__ = (
        "called",
        "cells",
        "channel",
        "child",
        "fds",
        "has_exited",
        "has_unsent",
        "is_read_by_caller",
        "number",
        "passed_fds",
        "pid",
        "rank",
        "reading",
        "ready",
        "stopped",
    )

    def __init__(self, number: int, rank: int, child: LocalWorker, channel: Channel, cells: tuple[int, ...]) -> None:
        self.number = number
        self.rank = rank
        self.child = child
        self.channel = channel
        self.cells = cells
        self.pid = 0
        self.ready = False
        self.stopped = False
        """Whether it reported a requested stop."""
        self.has_exited = False
        self.has_unsent = False
        """Whether its socket was full and is polled for writing."""
        self.reading = Lock()
        """Held while a thread reads its socket."""
        self.is_read_by_caller = False
        """Whether a thread that waits for an answer reads its socket, instead of the polling thread."""
        self.fds: dict[int, int] = {}
        """Buffer of its pool -> our descriptor of it."""
        self.passed_fds: list[int] = []
        """Descriptors to be closed when its queued frames are sent."""
        self.called: set[LocalWorker] = set()
        """Workers to which it has a link."""

    def close_passed(self) -> None:
        while self.passed_fds:
            os.close(self.passed_fds.pop())


class InFlightMessage:
    """A message without a reply yet. Keeps references to its payloads."""

    __slots__ = (
        "batch_size",
        "cpu_s",
        "failures",
        "parts",
        "payloads",
        "peak",
        "prefetch_number",
        "ranks_left",
        "report",
    )

    def __init__(self, parts: list[SegmentSlice], payloads: list[Any], batch_size: int, ranks: int) -> None:
        self.parts = parts
        self.batch_size = batch_size
        self.payloads = payloads
        """Payload references, in the order of the message."""
        self.ranks_left = ranks
        self.prefetch_number = 0
        """Its number among the messages prefetched by its worker; 0: not prefetched."""
        self.report: Any = None
        """Report of the first rank, until all ranks have reported."""
        self.failures: list[Any] = []
        """Failures reported by the other ranks."""
        self.peak = 0
        self.cpu_s = 0.0


class LocalWorker:
    """One worker: a process, or one process per rank of a gang."""

    __slots__ = (
        "callers",
        "calls",
        "end",
        "in_flight",
        "is_gang",
        "is_single_slot",
        "memory_bytes",
        "names",
        "node",
        "number",
        "peak",
        "prefetched",
        "ranks",
        "ready",
        "setup_s",
        "stopping",
    )

    def __init__(self, number: int, node: str, names: frozenset[str], *, gang: bool = False) -> None:
        self.number = number
        self.node = node
        self.names = names
        self.is_gang = gang
        """Whether it has several ranks, here or on other nodes."""
        self.ranks: list[RankProcess] = []
        """The local ranks, in order; the first one reports the results."""
        self.ready = False
        self.setup_s = 0.0
        self.is_single_slot = False
        """One process with one slot."""
        self.stopping = False
        self.prefetched = 0
        self.in_flight: dict[int, InFlightMessage] = {}
        self.calls: dict[int, Waiter] = {}
        """Call number -> receiver of the answer."""
        self.callers: set[RankProcess] = set()
        """Processes that have a link to it."""
        self.end: WorkerLost | WorkerStopped | None = None
        """The reason of its end, if known in advance."""
        self.peak = 0
        self.memory_bytes = 0
        """Requested memory of the local ranks; 0: not specified."""

    @property
    def name(self) -> str:
        return "+".join(sorted(self.names))

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of its processes, as far as known."""
        return tuple(rank.pid for rank in self.ranks if rank.pid)

    def on_process_died(self, rank: RankProcess, cause: LossCause, detail: str) -> None:
        """One of its processes exited without being stopped."""
        self.end = WorkerLost(self.number, cause, f"rank {rank.rank}: {detail}" if self.is_gang else detail)

    def add_breadcrumbs(self, breadcrumbs: tuple[Breadcrumb, ...]) -> None:
        """Add breadcrumbs of an exited process to the loss."""
        if isinstance(self.end, WorkerLost):
            known = {breadcrumb.message: breadcrumb for breadcrumb in (*self.end.breadcrumbs, *breadcrumbs)}
            self.end.breadcrumbs = tuple(known.values())

    def final_event(self) -> WorkerLost | WorkerStopped:
        """The event to report after all processes have exited."""
        end = self.end or WorkerStopped(self.number)
        if isinstance(end, WorkerLost):
            end.peak_bytes = end.peak_bytes or self.peak
            end.breadcrumbs = tuple(
                breadcrumb for breadcrumb in end.breadcrumbs if breadcrumb.message in self.in_flight
            )
        elif self.in_flight:
            end = WorkerLost(self.number, LossCause.EXIT, "it exited before it had finished its work")
        return end


def fail_all_batches(failures: Iterable[CallFailure], items: int, batch_size: int) -> list[CallFailure]:
    """Failures of a gang's message: a call that failed on one rank has failed, whatever the other ranks returned. Every
    batch gets the error of the first failure."""
    first = min(failures, key=lambda failure: failure.start)
    verdict = first.verdict if first.verdict == VERDICT_FATAL else ""
    return [
        replace(first, start=start, stop=min(start + batch_size, items), keys=(), verdict=verdict)
        for start in range(0, items, batch_size)
    ]
