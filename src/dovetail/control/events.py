"""Events that engines, sources and users report to a controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.control.payload import Segment
    from dovetail.resources.cluster import Node
    from dovetail.resources.seat import Seats


VERDICT_RETRY, VERDICT_SKIP, VERDICT_FATAL = "again", "aside", "fatal"


class LossCause(Enum):
    """Why a worker is gone without having been drained."""

    EXIT = "exit"
    """It left by itself, with an exit code."""
    SIGNAL = "signal"
    """It was killed from outside, or crashed."""
    OUT_OF_MEMORY = "out of memory"
    NODE_LOST = "node lost"
    SETUP_FAILED = "setup failed"
    STOPPED = "stopped"
    """We stopped it: StopWorker without drain."""


@dataclass(slots=True)
class Breadcrumb:
    """What a dead worker was doing: the message, and the place of the call in it."""

    message: int
    index: int
    """The first item of the call, counted in the message."""
    exact: bool = True
    """False behind a fused stage that changed counts: then the whole message is the suspect."""


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
    """Whether it was a card's memory."""
    keys: tuple[tuple[int, ...], ...] = ()
    verdict: str = ""
    """ASIDE: nothing would help, the items are set aside whatever their stage says about errors. FATAL: no item is to
    blame, and the run cannot go on (a source that changed, a disk that is full). AGAIN: it is run again by itself,
    uncharged, because nobody could tell whether it was to blame. Empty: it is tried again, as retries allow."""


@dataclass(slots=True)
class WorkerReady:
    worker: int
    setup_s: float = 0.0


@dataclass(slots=True)
class WorkerStopped:
    """It was drained and is gone; its seats are free."""

    worker: int


@dataclass(slots=True)
class WorkerLost:
    """It is gone with whatever it had in hand. Everything it finished was reported before this."""

    worker: int
    cause: LossCause
    detail: str = ""
    """Exit code, signal, exception: a line for people; after it perhaps more, such as the traceback of a setup."""
    breadcrumbs: tuple[Breadcrumb, ...] = ()
    """Of every call that was running; none: nothing is known of that."""
    peak_bytes: int = 0
    """The most host memory it was seen to use; 0: not known."""


@dataclass(slots=True)
class BatchesDone:
    """A message came to its end: what it gave, and which calls raised."""

    worker: int
    message: int
    segments: list[Segment]
    seconds: float
    """Spent in the user's code."""
    failures: list[CallFailure] = field(default_factory=list)
    peak_bytes: int = 0
    stages: list[tuple[int, int, float]] | None = None
    """Per fused stage: items in, items out, seconds."""


@dataclass(slots=True)
class BatchesReturned:
    """A message that did not begin: it was cancelled, or its input was lost with a node."""

    worker: int
    message: int


@dataclass(slots=True)
class NodeJoined:
    node: Node


@dataclass(slots=True)
class NodeLeft:
    """The node is gone with every payload that lay there. Its workers are reported lost before this."""

    node: str
    reason: str = ""
    returns: bool = False
    """Whether the engine brings it back, as after the death of an agent: it counts as there, even if it is the last."""


@dataclass(slots=True)
class ItemsArrived:
    """Source items, numbered from `first` on."""

    first: int
    segments: list[Segment]


@dataclass(slots=True)
class InputExpected:
    """The source has about so many items, as far as can be seen now: for who wants to know how far a run is."""

    items: int


@dataclass(slots=True)
class InputEnded:
    """The source has no more items; `items` is how many there were in all."""

    items: int


@dataclass(slots=True)
class Drain:
    """Stop feeding, finish what is in hand, then end."""

    reason: str = "asked"


@dataclass(slots=True)
class CancelRun:
    """Stop now."""

    reason: str = "asked"


@dataclass(slots=True)
class FailRun:
    """Something outside of the stream makes it impossible to go on: a source that raised, a sink that cannot write."""

    error: str
    detail: str = ""


@dataclass(slots=True)
class PinWorkers:
    """From now on so many workers of a unit; None: decide again."""

    unit: str
    workers: int | None


@dataclass(slots=True)
class CapacityReserved:
    """What others hold of our nodes from now on, all of it: it replaces what was said before. Seats are amounts here,
    one or several per node; nobody of ours may be started there, and who sits there already is drained."""

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
