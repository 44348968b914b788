"""Commands that a controller gives to an engine, a source or a sink, and notes for observers.

Plain slots dataclasses and not frozen ones: thousands are made per second, and frozen costs four times as much. Nobody
changes one after it was made.
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
    """An object that a worker holds: the stages of a unit, a role's object, a job's function."""

    name: str
    definition: object = None
    """What the engine needs to make it; engines agree with who starts the worker on what that is."""
    slots: int = 1
    """Batches or calls that may be inside it at the same time."""
    writer: object = None
    """Who writes its results where they belong (control.writing.Writer); None: they are given to who asked."""
    results_to_driver: bool = False
    """Whether its results leave the run through the driver: then no lost node may take them away."""


@dataclass(slots=True)
class StartWorker:
    """A process (or one per rank) that hosts one or several objects. Answered by WorkerReady or WorkerLost."""

    worker: int
    seats: Seats
    hosted: tuple[HostedObject, ...]


@dataclass(slots=True)
class RunBatches:
    """A message: items for one object, cut by the worker into calls of `batch_size` (only the last may be smaller).

    Answered by BatchesDone, by BatchesReturned if it was cancelled in time, or by the loss of the worker.
    """

    message: int
    worker: int
    hosted: str
    parts: list[SegmentSlice]
    items: int
    batch_size: int
    segment_items: int
    """Items per segment of the output: what the next stage takes per message."""
    spool: bool = False
    """Whether the output must outlive every worker: it is for a later wave."""


@dataclass(slots=True)
class Cancel:
    """Take a message back if it has not begun; otherwise nothing happens, and it ends as usual."""

    message: int
    worker: int


@dataclass(slots=True)
class StopWorker:
    """With drain: finish what was sent, tear down, then WorkerStopped. Without: now, then WorkerLost."""

    worker: int
    drain: bool = True
    reason: str = ""


@dataclass(slots=True)
class Pull:
    """Bring so many items of the source from this number on. Answered by ItemsArrived, once or several times, until all
    of them have come, or by InputEnded where the source has no more; fewer without that hold up the run."""

    first: int
    items: int
    segment_items: int = 1 << 10
    """Items per segment: what the first unit takes per message."""


@dataclass(slots=True)
class FailedItem:
    """An item that is given up: where it failed, why, and the item itself."""

    unit: str
    part: SegmentSlice
    error: str
    """Type and message, one line."""
    detail: str = ""
    key: tuple[int, ...] | None = None
    attempts: int = 1


@dataclass(slots=True)
class Deliver:
    """The results of an epoch, whole and for the first time; with a durable sink this is what the commit log lists.

    With ordered output epochs come in the order of their input. Within an epoch the segments are as they were finished:
    whoever writes them sorts the items by their keys, which only those who open segments can see.
    """

    wave: int
    epoch: int
    first: int
    """The numbers [first, last) of the wave's input that it covers: source items, or items of the spool."""
    last: int
    outputs: dict[str, list[Segment]]
    """Leaf unit -> what it gave: this leaves the run."""
    spooled: dict[str, list[Segment]] = field(default_factory=dict)
    """Unit of a later wave -> what it will get."""
    failed_items: list[FailedItem] = field(default_factory=list)


@dataclass(slots=True)
class Note:
    """Something that people should know: a decision with its reason, a worker that came or went, an error.

    It commands nothing; observers write it down.
    """

    kind: str
    """decision, worker, node, error, wave, epoch, run."""
    text: str
    data: Mapping[str, object] = field(default_factory=dict)


EngineCommand = StartWorker | RunBatches | Cancel | StopWorker
DataCommand = Pull | Deliver
Command = EngineCommand | DataCommand | Note

DATA_COMMANDS = frozenset({Pull, Deliver})
