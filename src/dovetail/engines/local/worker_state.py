"""Driver-side state of a worker: its rank processes, messages in flight and cause of exit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.control.events import LossCause, WorkerLost, WorkerStopped

if TYPE_CHECKING:
    from dovetail.control.events import Breadcrumb
    from dovetail.control.payload import SegmentSlice
    from dovetail.engines.local.protocol import Channel
    from dovetail.engines.local.remote_calls import Waiter


class RankProcess:
    """One process of a worker."""

    __slots__ = (
        "cells",
        "channel",
        "child",
        "fds",
        "has_exited",
        "has_unsent",
        "number",
        "pid",
        "rank",
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
        """It said that it goes, as it was told."""
        self.has_exited = False
        self.has_unsent = False
        """Whether its socket was full and it is watched for room."""
        self.fds: dict[int, int] = {}
        """Buffer of its pool -> our descriptor of it."""


class InFlightMessage:
    """A message that is not answered yet. Holds its payloads, whatever the controller does with them."""

    __slots__ = ("batch_size", "failures", "parts", "payloads", "peak", "prefetch_number", "ranks_left", "report")

    def __init__(self, parts: list[SegmentSlice], payloads: list[Any], batch_size: int, ranks: int) -> None:
        self.parts = parts
        self.batch_size = batch_size
        self.payloads = payloads
        """The refs, in the order of the message."""
        self.ranks_left = ranks
        self.prefetch_number = 0
        """Its number among all that were sent to its worker in advance; 0: it was not."""
        self.report: Any = None
        """What the first rank here said, while others are still at it."""
        self.failures: list[Any] = []
        """Of the other ranks."""
        self.peak = 0


class LocalWorker:
    """One worker: a process, or one per rank of a gang."""

    __slots__ = (
        "calls",
        "end",
        "in_flight",
        "is_gang",
        "is_single_slot",
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
        """Whether there are several ranks, here or elsewhere."""
        self.ranks: list[RankProcess] = []
        """Those that are here, in their order; the first of them tells what came out."""
        self.ready = False
        self.setup_s = 0.0
        self.is_single_slot = False
        """One process that does one thing at a time."""
        self.stopping = False
        self.prefetched = 0
        self.in_flight: dict[int, InFlightMessage] = {}
        self.calls: dict[int, Waiter] = {}
        """Number -> who waits for the answer."""
        self.end: WorkerLost | WorkerStopped | None = None
        """What is known of its end before it comes."""
        self.peak = 0

    @property
    def name(self) -> str:
        return "+".join(sorted(self.names))

    @property
    def pids(self) -> tuple[int, ...]:
        """Of its processes, as far as they are known."""
        return tuple(rank.pid for rank in self.ranks if rank.pid)

    def on_process_died(self, rank: RankProcess, cause: LossCause, detail: str) -> None:
        """One of its processes, without having been told to go."""
        self.end = WorkerLost(self.number, cause, f"rank {rank.rank}: {detail}" if self.is_gang else detail)

    def add_breadcrumbs(self, crumbs: tuple[Breadcrumb, ...]) -> None:
        """What a process left behind, for whoever is to blame."""
        if isinstance(self.end, WorkerLost):
            known = {crumb.message: crumb for crumb in (*self.end.breadcrumbs, *crumbs)}
            self.end.breadcrumbs = tuple(known.values())

    def final_event(self) -> WorkerLost | WorkerStopped:
        """All of its processes are gone."""
        end = self.end or WorkerStopped(self.number)
        if isinstance(end, WorkerLost):
            end.peak_bytes = end.peak_bytes or self.peak
            end.breadcrumbs = tuple(crumb for crumb in end.breadcrumbs if crumb.message in self.in_flight)
        elif self.in_flight:
            end = WorkerLost(self.number, LossCause.EXIT, "it left before it had finished")
        return end
