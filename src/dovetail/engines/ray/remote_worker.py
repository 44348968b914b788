"""Remote worker as the driver knows it: nodes of its ranks, unanswered messages, merged reports of a gang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.control.events import BatchesDone, CallFailure

if TYPE_CHECKING:
    from dovetail.control.commands import StartWorker
    from dovetail.control.payload import SegmentSlice
    from dovetail.engines.ray.agent_link import AgentLink


class SentMessage:
    """A message that is not answered yet: what it holds, and what parts of a gang have said so far."""

    __slots__ = ("batch_size", "done", "items", "parts")

    def __init__(self, parts: list[SegmentSlice], items: int, batch_size: int) -> None:
        self.parts = parts
        self.items = items
        self.batch_size = batch_size
        self.done: list[tuple[AgentLink, BatchesDone]] = []


class RemoteWorker:
    """One worker: one process, or the ranks of a gang on one or several nodes."""

    def __init__(self, command: StartWorker, kind: str) -> None:
        self.number = command.worker
        self.command = command
        self.runtime_env = kind
        """The runtime_env of what it hosts."""
        self.names = tuple(hosted.name for hosted in command.hosted)
        self.nodes = tuple(dict.fromkeys(seat.node for seat in command.seats))
        self.ranks_by_agent: dict[AgentLink, tuple[int, ...]] = {}
        """Agent -> ranks; empty while it has not been started."""
        self.rendezvous: tuple[str, int] | None = None
        """Where the ranks of several nodes meet."""
        self.has_asked_port = False
        self.ready: dict[AgentLink, float] = {}
        self.ended: set[AgentLink] = set()
        self.end: Any = None
        """What is known of its end before all of it has come."""
        self.sent: dict[int, SentMessage] = {}
        self.pending_commands: list[Any] = []
        """Messages that came before it could be started."""
        self.pids: dict[AgentLink, tuple[int, ...]] = {}
        self.stopping = False
        self.callers: set[AgentLink] = set()
        """Agents whose workers call it."""

    @property
    def name(self) -> str:
        return "+".join(sorted(self.names))

    @property
    def lead(self) -> AgentLink:
        """The agent of rank 0."""
        return next(link for link, ranks in self.ranks_by_agent.items() if 0 in ranks)

    def ranks_on(self, node: str) -> tuple[int, ...]:
        return tuple(rank for rank, seat in enumerate(self.command.seats) if seat.node == node)

    def merge_done(self, link: AgentLink, done: BatchesDone) -> BatchesDone | None:
        """The end of a message, once all of its places have told it."""
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
        found = next(done for link, done in sent.done if link is self.lead)
        failures = [failure for _, done in sent.done for failure in done.failures]
        found.peak_bytes = max(done.peak_bytes for _, done in sent.done)
        if failures:
            # what one rank could not do counts as not done, whatever the others made of it
            first = min(failures, key=lambda failure: failure.start)
            starts = range(0, sent.items, sent.batch_size)
            size = sent.batch_size
            found.segments = []
            found.failures = [_failure_at(first, start, min(start + size, sent.items)) for start in starts]
        return found


def _failure_at(failure: CallFailure, start: int, stop: int) -> CallFailure:
    return CallFailure(start, stop, failure.error, failure.detail, failure.out_of_memory, failure.on_gpu)
