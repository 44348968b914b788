"""Commands from a controller to an engine, a source or a sink, and notes for observers.

The dataclasses have slots and are not frozen: thousands are created per second, and frozen ones cost four times as
much. Treat them as immutable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.control.payload import Segment, SegmentSlice
    from dovetail.resources.seat import Seats


@dataclass(frozen=True, slots=True)
class HostedObject:
    """An object that a worker hosts: the stages of a unit, the object of a role, the function of a job."""

    name: str
    definition: object = None
    """What the engine needs to create the object; its type is a contract between the engine and the caller."""
    slots: int = 1
    """Number of batches or calls that may run concurrently."""
    writer: object = None
    """Writes its results to the sink (control.payload.Writer); None: results are returned."""
    results_to_driver: bool = False
    """Whether its results leave the run through the driver, so that they must not be lost with a node."""


@dataclass(slots=True)
class StartWorker:
    """Start a process (or one per rank) that hosts one or several objects. Answered by WorkerReady or WorkerLost."""

    worker: int
    seats: Seats
    hosted: tuple[HostedObject, ...]
    context: bytes = b""
    """Data for the objects of this worker alone, as `Worker.context`; engines do not open it."""
    rendezvous_seed: int = 0
    """Number from which the port for the rendezvous of a gang follows, if that port is free; 0: any free port. A
    restarted gang has the same."""


@dataclass(slots=True)
class RunBatches:
    """Run a message: items for one object, split by the worker into calls of `batch_size` (only the last may be
    smaller).

    Answered by BatchesDone, by BatchesReturned if it was cancelled in time, or by the loss of the worker.
    """

    message: int
    worker: int
    hosted: str
    parts: list[SegmentSlice]
    items: int
    batch_size: int
    segment_items: int
    """Items per segment of the output: the message size of the next stage."""
    spool: bool = False
    """Whether the output must outlive the workers, because it is for a later wave."""
    epoch_starts: tuple[int, ...] = ()
    """Index of the first item of every epoch but the first; empty: all items are of one epoch. No segment of the output
    contains results of several epochs; see `BatchesDone.epoch_segments`."""


@dataclass(slots=True)
class Cancel:
    """Take a message back if it has not started; otherwise it finishes as usual."""

    message: int
    worker: int


@dataclass(slots=True)
class StopWorker:
    """Stop a worker. With drain: finish its messages, tear down, then WorkerStopped. Without: kill it, then
    WorkerLost."""

    worker: int
    drain: bool = True
    reason: str = ""


@dataclass(slots=True)
class Pull:
    """Read items of the source, starting at number `first`. Answered by one or several ItemsArrived with all of them,
    or by InputEnded if the source has fewer; otherwise the run stalls."""

    first: int
    items: int
    segment_items: int = 1 << 10
    """Items per segment: the message size of the first unit."""
    max_segment_items: int = 1 << 62
    """Limit for a source that prefers larger segments: the size of an epoch, which consists of whole segments."""


@dataclass(slots=True)
class FailedItem:
    """An item that failed for good: where, why, and the item itself."""

    unit: str
    part: SegmentSlice
    error: str
    """Type and message, one line."""
    detail: str = ""
    key: tuple[int, ...] | None = None
    attempts: int = 1
    stage: str = ""
    """The stage that failed, if the unit has several and it is known."""
    place: str = ""
    """File and line of a row that cannot be parsed; others are located by their key."""


@dataclass(slots=True)
class Deliver:
    """Deliver the complete results of an epoch, exactly once; with a durable sink the commit log lists them.

    With ordered output, epochs are delivered in the order of their input. Within an epoch, segments are in the order in
    which they were finished: the sink sorts the items by their keys, which are visible only in opened segments.
    """

    wave: int
    epoch: int
    first: int
    """The range [first, last) of the wave's input: numbers of source items, or of items of the spool."""
    last: int
    outputs: dict[str, list[Segment]]
    """Leaf unit -> its output, which leaves the run."""
    spooled: dict[str, list[Segment]] = field(default_factory=dict)
    """Unit of a later wave -> its input."""
    failed_items: list[FailedItem] = field(default_factory=list)
    also: list[tuple[int, int]] = field(default_factory=list)
    """Further ranges whose results are part of this delivery, because one call had items of several epochs and returned
    another number of results."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(self.first, self.last), *self.also]


@dataclass(slots=True)
class ReportFailure:
    """Items whose failure ends the run. They are not skipped: their epoch is not delivered.

    Engines ignore it; observers record it.
    """

    items: list[FailedItem]


@dataclass(slots=True)
class Note:
    """Information for users: a decision with its reason, a worker that started or stopped, an error.

    Engines ignore notes; observers record them.
    """

    kind: str
    """decision, look (a replan without changes), worker, node, error, wave, epoch or run."""
    text: str
    data: Mapping[str, object] = field(default_factory=dict)


EngineCommand = StartWorker | RunBatches | Cancel | StopWorker
DataCommand = Pull | Deliver
Command = EngineCommand | DataCommand | Note | ReportFailure

DATA_COMMANDS = frozenset({Pull, Deliver})
OBSERVER_COMMANDS = frozenset({Note, ReportFailure})
