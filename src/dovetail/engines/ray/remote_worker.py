"""Remote worker as the driver knows it: agents of its ranks, unanswered messages, merged results of a gang.

`engine` creates and ends workers; `message_handlers` records what their agents report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.engines.local.worker_state import fail_all_batches

if TYPE_CHECKING:
    from dovetail.control.commands import StartWorker
    from dovetail.control.events import BatchesDone
    from dovetail.control.payload import SegmentSlice
    from dovetail.engines.ray.agent_link import AgentLink


class PendingCall(NamedTuple):
    """A call of the driver to a worker that is not started yet."""

    number: int
    rank: int
    hosted: str
    method: str
    pieces: list[bytes]
    """Packed arguments, in pieces."""
    deadline: float
    """Time of the monotonic clock; 0: none."""


class SentMessage:
    """A message without an answer: its input, and the results of the ranks that have answered so far."""

    __slots__ = ("batch_size", "done", "items", "parts")

    def __init__(self, parts: list[SegmentSlice], items: int, batch_size: int) -> None:
        self.parts = parts
        self.items = items
        self.batch_size = batch_size
        self.done: list[tuple[AgentLink, BatchesDone]] = []


class RemoteWorker:
    """One worker: one process, or the ranks of a gang on one or several nodes."""

    def __init__(self, command: StartWorker, runtime_env: str) -> None:
        self.number = command.worker
        self.command = command
        self.runtime_env = runtime_env
        """The runtime_env as JSON; empty: none."""
        self.names = tuple(hosted.name for hosted in command.hosted)
        self.nodes = tuple(dict.fromkeys(seat.node for seat in command.seats))
        self.ranks_by_agent: dict[AgentLink, tuple[int, ...]] = {}
        """Agent -> ranks; empty until the worker is started."""
        self.rendezvous: tuple[str, int] | None = None
        """Address and port at which ranks of several nodes meet."""
        self.has_asked_port = False
        self.ready: dict[AgentLink, float] = {}
        self.ended: set[AgentLink] = set()
        self.end: Any = None
        """Reason for its end, while some ranks have not ended yet."""
        self.sent: dict[int, SentMessage] = {}
        self.pending_commands: list[Any] = []
        """Commands and calls received before the worker could be started."""
        self.is_draining = False
        """Whether it ends after the calls and messages that were sent to it."""
        self.pids: dict[AgentLink, tuple[int, ...]] = {}
        self.callers: set[AgentLink] = set()
        """Agents whose workers call this one."""
        self.waiting_callers: list[tuple[AgentLink, int]] = []
        """Those that asked for the agent of a rank before it was ready."""

    @property
    def name(self) -> str:
        return "+".join(sorted(self.names))

    @property
    def lead(self) -> AgentLink:
        """The agent of rank 0."""
        return self.agent_of(0)

    def agent_of(self, rank: int) -> AgentLink:
        return next(link for link, ranks in self.ranks_by_agent.items() if rank in ranks)

    def ranks_on(self, node: str) -> tuple[int, ...]:
        return tuple(rank for rank, seat in enumerate(self.command.seats) if seat.node == node)

    def merge_done(self, link: AgentLink, done: BatchesDone) -> BatchesDone | None:
        """The result of a message, once all of its agents have sent theirs."""
        sent = self.sent.get(done.message)
        if sent is None:
            return None
        if len(self.ranks_by_agent) > 1:
            sent.done.append((link, done))
            if len(sent.done) < len(self.ranks_by_agent):
                return None
            done = self._merge_ranks(sent)
        del self.sent[done.message]
        return done

    def _merge_ranks(self, sent: SentMessage) -> BatchesDone:
        merged = next(done for link, done in sent.done if link is self.lead)
        failures = [failure for _, done in sent.done for failure in done.failures]
        merged.peak_bytes = max(done.peak_bytes for _, done in sent.done)
        merged.cpu_s = sum(done.cpu_s for _, done in sent.done)
        if failures:
            merged.segments, merged.epoch_segments = [], None
            merged.failures = fail_all_batches(failures, sent.items, sent.batch_size)
        return merged
