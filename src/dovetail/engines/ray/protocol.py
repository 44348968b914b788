"""Protocol between driver and agents: operations, frames, setup and hello, and the encoding of engine events.

A call costs half a millisecond however little it says, and three times that beyond 100 KB, where Ray moves it through
its object store: so frames are filled, but not beyond that, unless one thing alone is larger.

Driver to agent: unit, devices, start, port, run, cancel, stop, put, file, block, comes, fetch, lost, free, call, found,
gone. Agent to driver: hello, ready, lost, stopped, piece, done, returned, over, lack, unusable, pids, port, answer,
seek, sick, use, log, broken. Who acts on them: `hosting.Host` there, `hearing.Hearing` here.
"""

from __future__ import annotations

import pickle
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    Breadcrumb,
    LossCause,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.payload import PartFileRange
from dovetail.engines.local.message_input import failure_as_tuple
from dovetail.engines.local.payload_codec import layout_bytes
from dovetail.engines.local.payload_table import SpoolRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dovetail.control.events import Event
    from dovetail.control.payload import Segment
    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.engines.ray.agent_payloads import AgentPayloads

FRAME_BYTES = 90_000
"""Bytes of a frame that stays out of the object store."""
MESSAGE_OVERHEAD_BYTES = 200
"""Bytes of a tuple beside its payload, about."""
HEARTBEAT_S = 0.5
"""An agent that has nothing to say says so this often."""
SPOOL_OUTPUT, OUTPUT_TO_DRIVER = 1, 2
"""What is to become of the output of a message."""
AT_AGENT, IN_ANSWER, IN_FILE, WRITTEN, IN_PIECES = 0, 1, 2, 3, 4
"""Where a segment of an answer is: at the agent, in the answer, in a file, in a sink's part file, in answers before."""

Op = tuple[Any, ...]


class AgentSetup(NamedTuple):
    """What an agent gets to know when it starts."""

    session: str
    """One run's use of an agent."""
    node: str
    runtime_env: str
    """The runtime_env of the agent, as text; empty: none."""
    folder: str
    """The run's folder where the driver is; empty: it has none."""
    token: str
    """What lies in it, so that an agent can tell whether it sees the same one."""
    home: DriverContext
    memory_bytes: int
    """What payloads may fill on its node; 0: a share of what is there."""
    pin_cpus: bool
    memory_full: float
    """The share of a node's memory at which a worker must go."""
    source_paths: tuple[str, ...] = ()
    """Paths of the source, of which it says whether it sees them."""
    sink_folders: tuple[tuple[str, str], ...] = ()
    """Folders into which its workers write results, and what lies in each, as above."""


class AgentHello(NamedTuple):
    """What an agent says of itself."""

    pid: int
    address: str
    sees_run_folder: bool
    """Whether it sees the run's folder."""
    missing_sources: tuple[str, ...]
    unwritable_folders: tuple[str, ...]
    """Folders for results that are not the driver's here."""
    version: str


def dovetail_version() -> str:
    """Empty: it was never installed, as in a checkout on PYTHONPATH."""
    try:
        return version("dovetail-ml")
    except PackageNotFoundError:
        return ""


class SizedOp(NamedTuple):
    """An operation and about how many bytes it is."""

    op: Op
    size: int = MESSAGE_OVERHEAD_BYTES


def encode_frames(told: Iterable[SizedOp]) -> Iterator[bytes]:
    """In order, each as full as it should be."""
    batch: list[Op] = []
    size = 0
    for op, bytes_of_it in told:
        if batch and size + bytes_of_it > FRAME_BYTES:
            yield pickle.dumps(batch, 5)
            batch, size = [], 0
        batch.append(op)
        size += bytes_of_it
    if batch:
        yield pickle.dumps(batch, 5)


def decode_frame(frame: bytes) -> list[Op]:
    found: list[Op] = pickle.loads(frame)  # noqa: S301 - between processes of one run, by Ray, which does the same
    return found


SEGMENT_BYTES, FAILURE_BYTES = 60, 400
PIECE_BYTES = 4 << 20


class EventEncoder:
    """The agent's side."""

    def __init__(self, engine: LocalEngine, parcels: AgentPayloads) -> None:
        self._engine = engine
        self._payloads = parcels

    def encode(self, event: Event) -> list[SizedOp]:
        if isinstance(event, BatchesDone):
            return self._encode_done(event)
        if isinstance(event, BatchesReturned):
            self._payloads.output_to_driver.discard(event.message)
            return [SizedOp(("returned", event.worker, event.message))]
        if isinstance(event, WorkerReady):
            return [self.processes(event.worker), SizedOp(("ready", event.worker, event.setup_s))]
        if isinstance(event, WorkerStopped):
            self._payloads.on_worker_gone(event.worker)
            return [SizedOp(("stopped", event.worker))]
        if isinstance(event, WorkerLost):
            self._payloads.on_worker_gone(event.worker)
            crumbs = [(crumb.message, crumb.index, crumb.exact) for crumb in event.breadcrumbs]
            told = (event.worker, event.cause.value, event.detail, crumbs, event.peak_bytes)
            return [SizedOp(("lost", *told), MESSAGE_OVERHEAD_BYTES + len(event.detail))]
        return []

    def processes(self, worker: int) -> SizedOp:
        name, pids = self._engine.processes().get(worker, ("", ()))
        return SizedOp(("pids", worker, name, pids))

    def _encode_done(self, event: BatchesDone) -> list[SizedOp]:
        home = event.message in self._payloads.output_to_driver
        self._payloads.output_to_driver.discard(event.message)
        size = MESSAGE_OVERHEAD_BYTES + FAILURE_BYTES * len(event.failures)
        segments = []
        before: list[SizedOp] = []
        for segment in event.segments:
            told, more = self._encode_segment(segment, home, before)
            segments.append(told)
            size += SEGMENT_BYTES + more
        failures = [failure_as_tuple(failure) for failure in event.failures]
        op = ("done", event.worker, event.message, segments, event.seconds, failures, event.peak_bytes, event.stages)
        return [*before, SizedOp(op, size)]

    def _encode_segment(self, segment: Segment, home: bool, before: list[SizedOp]) -> tuple[tuple[Any, ...], int]:
        """What is told of it, and how many bytes that is; a large payload that goes home goes before, in pieces: an
        agent that needs long for one answer would be believed lost."""
        ref: Any = segment.ref
        first = (segment.items, segment.size_bytes, segment.first)
        if type(ref) is PartFileRange:
            return (WRITTEN, *first, tuple(ref)), 0
        if type(ref) is SpoolRef:
            return (IN_FILE, *first, (ref.path, ref.offset, ref.sizes)), len(ref.path)
        if home:
            data = self._engine.read_raw(segment)
            if len(data) > PIECE_BYTES:
                before += [
                    SizedOp(("piece", segment.id, data[at : at + PIECE_BYTES]), MESSAGE_OVERHEAD_BYTES + PIECE_BYTES)
                    for at in range(0, len(data), PIECE_BYTES)
                ]
                return (IN_PIECES, *first, (ref.sizes, segment.id)), 0
            return (IN_ANSWER, *first, (ref.sizes, data)), len(data)
        return (AT_AGENT, *first, (self._payloads.keep(segment), ref.sizes)), 0


def decode_worker_lost(
    worker: int, cause: str, detail: str, crumbs: list[tuple[int, int, bool]], peak: int
) -> WorkerLost:
    return WorkerLost(worker, LossCause(cause), detail, tuple(Breadcrumb(*crumb) for crumb in crumbs), peak)


def split_payloads(data: bytes, sizes: list[tuple[int, ...]]) -> list[memoryview]:
    """Several payloads that came one behind another."""
    found, at = [], 0
    view = memoryview(data)
    for one in sizes:
        length = layout_bytes(one)
        found.append(view[at : at + length])
        at += length
    return found
