"""Events that engines, sources and users report to a controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.control.commands import FailedItem
    from dovetail.control.payload import Segment
    from dovetail.resources.cluster import Node
    from dovetail.resources.seat import Seats


VERDICT_RETRY, VERDICT_SKIP, VERDICT_FATAL = "retry", "skip", "fatal"
JOINED = -1
"""Value in `BatchesDone.epoch_segments`: the results of this epoch cannot be separated from those of the one before."""


class LossCause(Enum):
    """Why a worker was lost."""

    EXIT = "exit"
    """The process exited by itself, with an exit code."""
    SIGNAL = "signal"
    """The process was killed from outside, or crashed."""
    OUT_OF_MEMORY = "out of memory"
    NODE_LOST = "node lost"
    SERVER_LOST = "fork server lost"
    """Killed together with the process that starts workers; neither its items nor its setup are to blame."""
    SETUP_FAILED = "setup failed"
    STOPPED = "stopped"
    """Stopped on command: StopWorker without drain."""


@dataclass(slots=True)
class Breadcrumb:
    """The call that a dead worker was running: the message, and the position of the call in it."""

    message: int
    index: int
    """Index of the first item of the call in the message."""
    exact: bool = True
    """False after a fused stage that changed the number of items: then the whole message is suspect."""


@dataclass(slots=True)
class CallFailure:
    """Items [start, stop) of a message whose call raised."""

    start: int
    stop: int
    error: str
    """Type and message, one line."""
    detail: str = ""
    """The traceback."""
    out_of_memory: bool = False
    on_gpu: bool = False
    """Whether it was GPU memory."""
    keys: tuple[tuple[int, ...], ...] = ()
    verdict: str = ""
    """VERDICT_SKIP: retrying would not help; the items fail regardless of their stage's `on_error`.
    VERDICT_FATAL: no item is to blame and the run must fail (the source changed, the disk is full). VERDICT_RETRY: run
    the items again alone and uncharged, because it is unknown whether they are to blame. Empty: retry as the stage
    allows."""
    stage: str = ""
    """The stage that raised, if the unit has several."""
    place: str = ""
    """File and line of a row that cannot be parsed."""
    code: str = ""
    """Error code; only with VERDICT_FATAL."""
    fix: str = ""
    """One line for users; only with VERDICT_FATAL."""
    worker_broken: bool = False
    """The exception means that the worker is broken, such as a CUDA error."""


class FailureCause(Enum):
    """What made a run fail."""

    ITEM = "item"
    """An item failed, and its stage does not skip failed items."""
    ERROR_LIMIT = "error limit"
    """More items failed than `max_errors` allows."""
    BROKEN_WORKERS = "broken workers"
    """An exception that means a broken process ended one worker of a stage after the other."""
    OTHER = "other"
    """No item is to blame: the setup of workers, the cluster, the source, the sink."""


@dataclass(frozen=True, slots=True)
class RunFailure:
    """Why a run failed."""

    error: str
    """One sentence."""
    detail: str = ""
    """The traceback."""
    cause: FailureCause = FailureCause.OTHER
    code: str = ""
    """Error code; empty: that of a failed run."""
    fix: str = ""
    """One line for users."""
    items: tuple[FailedItem, ...] = ()
    """Items whose failure ended the run."""

    def __str__(self) -> str:
        return f"{self.code} {self.error}" if self.code else self.error


@dataclass(slots=True)
class WorkerReady:
    worker: int
    setup_s: float = 0.0


@dataclass(slots=True)
class WorkerStopped:
    """The worker was drained and has exited; its seats are free."""

    worker: int


@dataclass(slots=True)
class WorkerLost:
    """The worker is gone with its unfinished messages. Messages that it finished were reported before."""

    worker: int
    cause: LossCause
    detail: str = ""
    """Exit code, signal or exception in one line; further lines may contain a traceback."""
    breadcrumbs: tuple[Breadcrumb, ...] = ()
    """One per running call; empty: unknown."""
    peak_bytes: int = 0
    """Peak host memory; 0: unknown."""


@dataclass(slots=True)
class BatchesDone:
    """A message finished: its output, and the calls that raised."""

    worker: int
    message: int
    segments: list[Segment]
    seconds: float
    """Time in user code."""
    failures: list[CallFailure] = field(default_factory=list)
    peak_bytes: int = 0
    stages: list[tuple[int, int, float]] | None = None
    """Items in, items out and seconds of each fused stage."""
    cpu_s: float = 0.0
    """CPU time of the worker's processes since its previous message; 0: not measured."""
    epoch_segments: list[int] | None = None
    """For a message with items of several epochs: how many of the segments belong to each, in order. JOINED: the
    results of this epoch are among those of the epoch before it, because a call with items of both returned another
    number of items than it got. None: there are no segments, or all are of one epoch."""


@dataclass(slots=True)
class BatchesReturned:
    """A message that did not start: it was cancelled, or its input was lost with a node."""

    worker: int
    message: int


@dataclass(slots=True)
class NodeJoined:
    node: Node


@dataclass(slots=True)
class NodeLeft:
    """The node is gone with all payloads stored on it. Its workers are reported lost before this."""

    node: str
    reason: str = ""
    returns: bool = False
    """Whether the engine restarts the node's agent: the node counts as present, even if it is the last one."""


@dataclass(slots=True)
class ItemsArrived:
    """Source items, numbered from `first`."""

    first: int
    segments: list[Segment]


@dataclass(slots=True)
class InputExpected:
    """Estimated number of source items, for progress reports."""

    items: int


@dataclass(slots=True)
class InputEnded:
    """The source has no more items; `items` is their total number."""

    items: int


@dataclass(slots=True)
class Drain:
    """Stop reading input, finish the work in flight, then end the run."""

    reason: str = "requested"


@dataclass(slots=True)
class CancelRun:
    """Stop the run now."""

    reason: str = "requested"


@dataclass(slots=True)
class FailRun:
    """Fail the run because of an error outside the stream: the source raised, the sink cannot write."""

    error: str
    detail: str = ""
    """The traceback."""
    code: str = ""
    """Error code; empty: that of a failed run."""
    fix: str = ""
    """One line for users."""


@dataclass(slots=True)
class PinWorkers:
    """Fix the number of workers of a unit; None: let replans decide again."""

    unit: str
    workers: int | None
    reason: str = ""


@dataclass(slots=True)
class CapacityReserved:
    """Capacity of this run's nodes that other runs hold; replaces the previous event. Seats are amounts here, one or
    several per node: no worker of this run is started on them, and workers that use them are drained."""

    seats: Seats = ()


Event = (
    WorkerReady
    | WorkerStopped
    | WorkerLost
    | BatchesDone
    | BatchesReturned
    | NodeJoined
    | NodeLeft
    | ItemsArrived
    | InputExpected
    | InputEnded
    | Drain
    | CancelRun
    | FailRun
    | PinWorkers
    | CapacityReserved
)
