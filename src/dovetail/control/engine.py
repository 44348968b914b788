"""Ports of the control loop: Engine, Controller, DataPort and Observer, and the errors of the engine port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from dovetail.control.commands import Command, DataCommand, EngineCommand
    from dovetail.control.events import Event


class CallOptions(NamedTuple):
    """Options of one call."""

    rank: int = 0
    """The rank of a gang that is called."""
    deadline_s: float | None = None
    """Seconds after which the call ends with DeadlineExceededError; None: without limit."""
    origin: tuple[int, int, int, int] | None = None
    """Origin of a call between workers of different nodes, for the search for cycles: the calling worker, its rank, the
    number that it gave the call, and how many callers wait for it."""


DEFAULT_CALL = CallOptions()
CONTROL_METHODS = frozenset({"health", "_dovetail_status", "_dovetail_directory"})
"""Methods whose calls take no slot: they are answered while all slots are busy. The last two are those of actors
(`actors/hosted_actor.py`)."""


class Engine(Protocol):
    """Executes commands and reports events.

    - `submit` never blocks. A command for a worker that is gone is ignored: its end was or will be reported. After
      StopWorker a worker gets no further commands, except StopWorker without drain.
    - StartWorker is answered by WorkerReady or WorkerLost, or by WorkerStopped if it was stopped first.
    - RunBatches, with at least one item, is answered once: BatchesDone, BatchesReturned (cancelled in time, or its
      input was lost with a node), or WorkerLost of its worker. Messages that a worker finished before its death are
      reported before its loss.
    - WorkerStopped or WorkerLost is the last event of a worker.
    - A worker runs its messages in the order sent, as many concurrently as its object has slots.
    - When a node is lost, its workers are reported lost first (NODE_LOST), then NodeLeft. A worker that is started on
      an unknown node is lost with the same cause.
    - `poll` may return an empty list, also without a timeout.
    """

    def submit(self, commands: Sequence[EngineCommand]) -> None: ...

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Return events, including posted ones. Waits for the first event, at most `timeout_s` (None: without
        limit)."""
        ...

    def post(self, event: Event) -> None:
        """Add an event from outside. Thread: any; wakes `poll`."""
        ...

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        """Call a method of a hosted object directly, without the controller. Thread: any.

        The call takes a slot of its object, in turn with messages; calls of one thread to one object begin in the order
        made. The future raises WorkerLostError if the worker is lost. A cancelled call that has not begun never runs; a
        running async method is cancelled; a running sync method continues and keeps its slot, and its result is
        dropped. Results arrive while some thread is in `poll`, or while the polling thread waits for one.
        """
        ...

    def call_with(
        self, options: CallOptions, worker: int, hosted: str, method: str, /, *args: Any, **named: Any
    ) -> Future[Any]:
        """Like `call`, with options. After its deadline a call is cancelled and raises DeadlineExceededError."""
        ...

    def now(self) -> float:
        """Seconds of the engine's clock, which may be virtual."""
        ...

    def close(self) -> None:
        """End every process and release all resources. May be called twice and in any state."""
        ...


class WorkerLostError(Exception):
    """A call to a worker that is gone."""


class CallNotSentError(WorkerLostError):
    """The worker was gone before the call was sent: the method did not run."""


class DeadlineExceededError(TimeoutError):
    """A call was not answered before its deadline."""


class UnsendableItemError(Exception):
    """An item that cannot be serialized: its index (-1: unknown) and the reason."""

    def __init__(self, index: int, error_text: str) -> None:
        super().__init__(index, error_text)
        self.index = index
        self.error_text = error_text


class UnreadableItem:
    """Placeholder for an item that cannot be deserialized, with the reason."""

    __slots__ = ("error_text",)

    def __init__(self, error_text: str) -> None:
        self.error_text = error_text


class DataPort(Protocol):
    """Source and sink of a stream: answers Pull by posting events, and accepts Deliver."""

    def submit(self, commands: Sequence[DataCommand]) -> None: ...


class Controller(Protocol):
    """Makes decisions. Pure: the same events at the same times lead to the same commands."""

    @property
    def done(self) -> bool: ...

    def step(self, now: float, events: Sequence[Event]) -> list[Command]: ...

    def wake_at(self) -> float | None:
        """Time of the next step if no event occurs; None: only after events."""
        ...


class Observer(Protocol):
    """Receives every step and never influences the run."""

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None: ...

    def close(self, now: float) -> None: ...
