"""The driver's side of a worker: its processes, what was sent to it, and what is known of its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.control.events import Cause, WorkerLost, WorkerStopped

if TYPE_CHECKING:
    from dovetail.control.events import Crumb
    from dovetail.control.segments import Part
    from dovetail.engines.local.calling import Waits
    from dovetail.engines.local.frames import Channel


class Rank:
    """One process of a worker."""

    __slots__ = ("cells", "channel", "child", "fds", "gone", "number", "pid", "rank", "ready", "stopped", "unsent")

    def __init__(self, number: int, rank: int, child: Child, channel: Channel, cells: tuple[int, ...]) -> None:
        self.number = number
        self.rank = rank
        self.child = child
        self.channel = channel
        self.cells = cells
        self.pid = 0
        self.ready = False
        self.stopped = False
        """It said that it goes, as it was told."""
        self.gone = False
        self.unsent = False
        """Whether its socket was full and it is watched for room."""
        self.fds: dict[int, int] = {}
        """Buffer of its pool -> our descriptor of it."""


class Sent:
    """A message that is not answered yet. Holds its payloads, whatever the controller does with them."""

    __slots__ = ("batch_size", "failures", "parts", "payloads", "peak", "ranks_left", "report", "turn")

    def __init__(self, parts: list[Part], payloads: list[Any], batch_size: int, ranks: int) -> None:
        self.parts = parts
        self.batch_size = batch_size
        self.payloads = payloads
        """The refs, in the order of the message."""
        self.ranks_left = ranks
        self.turn = 0
        """Its number among all that were sent to its worker in advance; 0: it was not."""
        self.report: Any = None
        """What the first rank here said, while others are still at it."""
        self.failures: list[Any] = []
        """Of the other ranks."""
        self.peak = 0


class Child:
    """One worker: a process, or one per rank of a gang."""

    __slots__ = (
        "calls",
        "end",
        "gang",
        "names",
        "node",
        "number",
        "peak",
        "ranks",
        "ready",
        "sent",
        "setup_s",
        "simple",
        "stopping",
        "turns",
    )

    def __init__(self, number: int, node: str, names: frozenset[str], *, gang: bool = False) -> None:
        self.number = number
        self.node = node
        self.names = names
        self.gang = gang
        """Whether there are several ranks, here or elsewhere."""
        self.ranks: list[Rank] = []
        """Those that are here, in their order; the first of them tells what came out."""
        self.ready = False
        self.setup_s = 0.0
        self.simple = False
        """One process that does one thing at a time."""
        self.stopping = False
        self.turns = 0
        self.sent: dict[int, Sent] = {}
        self.calls: dict[int, Waits] = {}
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

    def died(self, rank: Rank, cause: Cause, detail: str) -> None:
        """One of its processes, without having been told to go."""
        self.end = WorkerLost(self.number, cause, f"rank {rank.rank}: {detail}" if self.gang else detail)

    def was_doing(self, crumbs: tuple[Crumb, ...]) -> None:
        """What a process left behind, for whoever is to blame."""
        if isinstance(self.end, WorkerLost):
            known = {crumb.message: crumb for crumb in (*self.end.crumbs, *crumbs)}
            self.end.crumbs = tuple(known.values())

    def last_word(self) -> WorkerLost | WorkerStopped:
        """All of its processes are gone."""
        end = self.end or WorkerStopped(self.number)
        if isinstance(end, WorkerLost):
            end.peak_bytes = end.peak_bytes or self.peak
            end.crumbs = tuple(crumb for crumb in end.crumbs if crumb.message in self.sent)
        elif self.sent:
            end = WorkerLost(self.number, Cause.EXIT, "it left before it had finished")
        return end
