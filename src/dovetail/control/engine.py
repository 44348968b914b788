"""Ports of the control loop: Engine, Controller, DataPort and Observer, and the errors of the engine port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from dovetail.control.commands import Command, DataCommand, EngineCommand
    from dovetail.control.events import Event


class Engine(Protocol):
    """Carries commands out and reports events.

    - `submit` never blocks. A command for a worker that is already gone is ignored: its end was or will be reported.
      After StopWorker nothing is sent to a worker any more, except StopWorker without drain.
    - StartWorker is answered by WorkerReady or WorkerLost, or by WorkerStopped if it was stopped first.
    - RunBatches, with at least one item, is answered once: BatchesDone, BatchesReturned (cancelled in time, or its
      input was lost with a node), or WorkerLost of its worker. What a worker finished before its death is reported
      before its loss.
    - After WorkerStopped or WorkerLost nothing more is heard of that worker.
    - A worker takes its messages in the order sent, as many at a time as its object has slots.
    - When a node is lost, its workers are reported lost first (NODE_LOST), then NodeLeft. A worker that is started on a
      node that is not there is lost for the same cause.
    - `poll` may return nothing at all, also without a timeout.
    """

    def submit(self, commands: Sequence[EngineCommand]) -> None: ...

    def poll(self, timeout_s: float | None) -> list[Event]:
        """What happened, and what was posted; waits for the first of them, at most so long (None: without end)."""
        ...

    def post(self, event: Event) -> None:
        """An event from outside. May be called from any thread; wakes `poll`."""
        ...

    def call(self, worker: int, hosted: str, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        """One method call on a hosted object, past the controller. Ends with WorkerGone if the worker does.

        It takes a slot of its object, in turn with messages. It may end only while somebody polls: do not wait for it
        in the thread of the loop.
        """
        ...

    def now(self) -> float:
        """Seconds; of the engine's own clock, which may be virtual."""
        ...

    def close(self) -> None:
        """Every process gone, everything given back. May be called twice, and after anything."""
        ...


class WorkerLostError(Exception):
    """A call on a worker that is not there any more."""


class UnsendableItemError(Exception):
    """An item that cannot be sent: its place among those given (-1: not known), and why."""

    def __init__(self, index: int, error_text: str) -> None:
        super().__init__(index, error_text)
        self.index = index
        self.error_text = error_text


class UnreadableItem:
    """Stands for an item that was sent and cannot be made again, and says why."""

    __slots__ = ("error_text",)

    def __init__(self, error_text: str) -> None:
        self.error_text = error_text


class DataPort(Protocol):
    """The two ends of a stream: answers Pull by posting, and takes what is delivered."""

    def submit(self, commands: Sequence[DataCommand]) -> None: ...


class Controller(Protocol):
    """Decides. Pure: the same events at the same times give the same commands."""

    @property
    def done(self) -> bool: ...

    def step(self, now: float, events: Sequence[Event]) -> list[Command]: ...

    def wake_at(self) -> float | None:
        """When it wants a step although nothing happens; None: only when something does."""
        ...


class Observer(Protocol):
    """Watches, never steers."""

    def on_step(self, now: float, events: Sequence[Event], commands: Sequence[Command]) -> None: ...

    def close(self, now: float) -> None: ...
