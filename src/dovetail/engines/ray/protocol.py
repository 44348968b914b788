"""Protocol between driver and agents: operations, frames, setup and hello, and the encoding of engine events.

A frame is a pickled list of operations. A call of Ray takes 0.5 ms however small it is, and three times as long beyond
100 KB, where Ray passes it through its object store: so frames are filled up to that size, and exceed it only for a
single operation that is larger.

Driver to agent: unit, forget_unit, devices, start, port, run, cancel, stop, put, file, block, expect, fetch, lost,
free, call_piece, call, cancel_call, agent_found, worker_gone. Agent to driver: hello, ready, lost, stopped, piece,
done, returned, transfer_ended, payloads_missing, unusable, pids, port, answer_piece, answer, find_agent,
node_unhealthy, metrics, log, agent_failed.
`agent.AgentSession` handles the first, `message_handlers.MessageHandlers` the others.
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
from dovetail.engines.local.call_body import PIECE_BYTES
from dovetail.engines.local.message_input import failure_as_tuple
from dovetail.engines.local.payload_codec import layout_bytes
from dovetail.engines.local.payload_table import SpoolRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dovetail.control.events import Event
    from dovetail.control.payload import Segment
    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.engines.ray.agent_payloads import AgentPayloads

FRAME_BYTES = 90_000
"""Size of a frame that Ray does not pass through its object store."""
MESSAGE_OVERHEAD_BYTES = 200
"""Approximate size of an operation without its payload."""
MAX_DIRECT_CALLS = 4
"""Calls of the driver to workers of one agent that are answered as results of calls of Ray. Each takes a thread of the
agent until it ends; further ones are answered with other messages, which takes twice as long."""
HEARTBEAT_S = 0.5
"""An agent without operations sends an empty answer after this time."""
SPOOL_OUTPUT, OUTPUT_TO_DRIVER = 1, 2
"""Flags of a message: where its output goes."""
AT_AGENT, IN_ANSWER, IN_FILE, WRITTEN, IN_PIECES = 0, 1, 2, 3, 4
"""Where a segment of an answer is: at the agent, in the answer, in a spool file, in a part file of the sink, in earlier
answers."""

Op = tuple[Any, ...]
FIX_VERSION = "install the same dovetail-ml, with the same Python, on all nodes (pip install 'dovetail-ml[ray]')"


class AgentSetup(NamedTuple):
    """Settings of a session, sent to its agent."""

    session: str
    """One run's use of an agent."""
    node: str
    runtime_env: str
    """The runtime_env of the agent as JSON; empty: none."""
    folder: str
    """The run folder of the driver; empty: none."""
    token: str
    """Content of a marker file in it, by which an agent checks that it sees the same folder."""
    driver_context: DriverContext
    memory_bytes: int
    """Memory for payloads on the node; 0: a share of its memory."""
    pin_cpus: bool
    memory_full: float
    """Used share of a node's memory at which a worker is killed."""
    source_paths: tuple[str, ...] = ()
    """Paths of the source; the agent reports those that it does not see."""
    sink_folders: tuple[tuple[str, str], ...] = ()
    """Folders into which its workers write results, each with the content of its marker file."""
    machine: str = ""
    """Identifier of the driver's machine; an agent on the same one accepts connections for calls. Empty: unknown."""


class AgentHello(NamedTuple):
    """First message of an agent."""

    pid: int
    address: str
    sees_run_folder: bool
    """Whether the node shares the run folder with the driver."""
    missing_sources: tuple[str, ...]
    unwritable_folders: tuple[str, ...]
    """Folders for results that the node does not share with the driver."""
    version: str
    call_address: str = ""
    """Name of the socket for calls in the abstract namespace (`call_socket`); empty: the driver is on another
    machine."""
    call_secret: str = ""


def dovetail_version() -> str:
    """Empty if it is not installed, as in a checkout on PYTHONPATH."""
    try:
        return version("dovetail-ml")
    except PackageNotFoundError:
        return ""


class SizedOp(NamedTuple):
    """An operation and its approximate size in bytes."""

    op: Op
    size: int = MESSAGE_OVERHEAD_BYTES


def encode_frames(ops: Iterable[SizedOp]) -> Iterator[bytes]:
    """Frames of at most FRAME_BYTES, in order."""
    batch: list[Op] = []
    size = 0
    for op, op_bytes in ops:
        if batch and size + op_bytes > FRAME_BYTES:
            yield pickle.dumps(batch, 5)
            batch, size = [], 0
        batch.append(op)
        size += op_bytes
    if batch:
        yield pickle.dumps(batch, 5)


def decode_frame(frame: bytes) -> list[Op]:
    found: list[Op] = pickle.loads(frame)  # noqa: S301 - between processes of one run; Ray unpickles, too
    return found


SEGMENT_BYTES, FAILURE_BYTES = 60, 400


class EventEncoder:
    """Turns events of the local engine into operations. Node side."""

    def __init__(self, engine: LocalEngine, payloads: AgentPayloads) -> None:
        self._engine = engine
        self._payloads = payloads

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
            breadcrumbs = [(crumb.message, crumb.index, crumb.exact) for crumb in event.breadcrumbs]
            fields = (event.worker, event.cause.value, event.detail, breadcrumbs, event.peak_bytes)
            return [SizedOp(("lost", *fields), MESSAGE_OVERHEAD_BYTES + len(event.detail))]
        return []

    def processes(self, worker: int) -> SizedOp:
        name, pids = self._engine.processes().get(worker, ("", ()))
        return SizedOp(("pids", worker, name, pids))

    def _encode_done(self, event: BatchesDone) -> list[SizedOp]:
        to_driver = event.message in self._payloads.output_to_driver
        self._payloads.output_to_driver.discard(event.message)
        size = MESSAGE_OVERHEAD_BYTES + FAILURE_BYTES * len(event.failures)
        segments = []
        before: list[SizedOp] = []
        for segment in event.segments:
            encoded, data_bytes = self._encode_segment(segment, to_driver, before)
            segments.append(encoded)
            size += SEGMENT_BYTES + data_bytes
        failures = [failure_as_tuple(failure) for failure in event.failures]
        measured = (event.seconds, failures, event.peak_bytes, event.stages, event.cpu_s, event.epoch_segments)
        op = ("done", event.worker, event.message, segments, *measured)
        return [*before, SizedOp(op, size)]

    def _encode_segment(self, segment: Segment, to_driver: bool, before: list[SizedOp]) -> tuple[tuple[Any, ...], int]:
        """The segment as a tuple, and the size of its data. A large payload for the driver is sent before it in pieces:
        an agent that takes long for one answer would count as lost."""
        ref: Any = segment.ref
        first = (segment.items, segment.size_bytes, segment.first)
        if type(ref) is PartFileRange:
            return (WRITTEN, *first, tuple(ref)), 0
        if type(ref) is SpoolRef:
            return (IN_FILE, *first, (ref.path, ref.offset, ref.sizes)), len(ref.path)
        if to_driver:
            data = self._engine.read_raw(segment)
            if len(data) > PIECE_BYTES:
                before += [
                    SizedOp(("piece", segment.id, data[at : at + PIECE_BYTES]), MESSAGE_OVERHEAD_BYTES + PIECE_BYTES)
                    for at in range(0, len(data), PIECE_BYTES)
                ]
                return (IN_PIECES, *first, (ref.sizes, segment.id)), 0
            return (IN_ANSWER, *first, (ref.sizes, data)), len(data)
        return (AT_AGENT, *first, (self._payloads.keep(segment), ref.sizes)), 0


def encode_direct_call(session: str, number: int, op: Op) -> bytes:
    """A frame with one call, which Ray passes as the only argument: Ray copies a single bytes object, and takes 0.1 ms
    more for several arguments or a tuple as a result."""
    return pickle.dumps((session, number, op), 5)


def decode_direct_call(frame: bytes) -> tuple[str, int, Op]:
    found: tuple[str, int, Op] = pickle.loads(frame)  # noqa: S301 - from our driver
    return found


NO_DIRECT_ANSWER = b""
"""The call was cancelled, or its answer comes in pieces."""


def encode_direct_answer(fine: bool, body: bytes) -> bytes:
    return (b"\1" if fine else b"\0") + body


def decode_direct_answer(answer: bytes) -> tuple[bool, memoryview]:
    return answer[0] == 1, memoryview(answer)[1:]


class PieceCollector:
    """Pieces of large values that have arrived, by the number of their call."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[bytes]] = {}

    def add(self, number: int, piece: bytes) -> None:
        self._pieces.setdefault(number, []).append(piece)

    def take(self, number: int, last: bytes) -> list[bytes]:
        """All pieces of a value."""
        return [*self._pieces.pop(number, ()), last]

    def drop(self, number: int) -> None:
        self._pieces.pop(number, None)


def earlier_pieces(kind: str, number: int, pieces: Sequence[bytes]) -> list[SizedOp]:
    """Operations with all pieces but the last one, which the operation that follows them contains."""
    return [SizedOp((kind, number, piece), MESSAGE_OVERHEAD_BYTES + len(piece)) for piece in pieces[:-1]]


def encode_answer(number: int, fine: bool, pieces: Sequence[bytes]) -> list[SizedOp]:
    """The answer to a call."""
    last = SizedOp(("answer", number, fine, pieces[-1]), MESSAGE_OVERHEAD_BYTES + len(pieces[-1]))
    return [*earlier_pieces("answer_piece", number, pieces), last]


def decode_worker_lost(
    worker: int, cause: str, detail: str, breadcrumbs: list[tuple[int, int, bool]], peak: int
) -> WorkerLost:
    return WorkerLost(worker, LossCause(cause), detail, tuple(Breadcrumb(*crumb) for crumb in breadcrumbs), peak)


def split_payloads(data: bytes, sizes: list[tuple[int, ...]]) -> list[memoryview]:
    """Views of payloads that are concatenated in one buffer."""
    found, at = [], 0
    view = memoryview(data)
    for one in sizes:
        length = layout_bytes(one)
        found.append(view[at : at + length])
        at += length
    return found


def version_problem(node: str, hello: AgentHello) -> tuple[str, str, str] | None:
    """Error code, message and fix; None if the versions are equal."""
    here = dovetail_version()
    if hello.version == here:
        return None
    theirs = hello.version or "without a version"
    return (
        "DT404",
        f"node {node} has Dovetail {theirs}, but the driver has {here or 'one without a version'}",
        FIX_VERSION,
    )
