"""Agent: the Ray actor on each node, and its session per run that hosts a local engine. Node side.

The driver (`agent_link`) calls `receive` with frames of operations and `next_messages` for the answers. One thread per
session handles all operations, as the loop of a run does on one machine: `agent_payloads` holds payloads and queued
messages, `peer_calls` calls between nodes, `node_monitor` health, metrics and logs. Work that waits for Ray (fetching
payloads, sending calls to other agents) has threads of its own.

A driver reuses its agents for its next run. Every call names its session; a call for a closed session is dropped.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from collections import deque
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError

from dovetail.control.commands import Cancel, HostedObject, StartWorker
from dovetail.control.engine import CallOptions
from dovetail.engines.local import driver_setup
from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.local.memory_watch import MemoryWatch
from dovetail.engines.local.payload_codec import join_layout, pack_items, pack_split, part_lengths
from dovetail.engines.ray.agent_payloads import AgentPayloads
from dovetail.engines.ray.call_socket import CallSocket
from dovetail.engines.ray.node_monitor import NodeMonitor
from dovetail.engines.ray.peer_calls import PeerCalls
from dovetail.engines.ray.protocol import (
    FRAME_BYTES,
    HEARTBEAT_S,
    MAX_DIRECT_CALLS,
    NO_DIRECT_ANSWER,
    AgentHello,
    EventEncoder,
    Op,
    PieceCollector,
    SizedOp,
    decode_direct_call,
    decode_frame,
    dovetail_version,
    encode_answer,
    encode_direct_answer,
    split_payloads,
)
from dovetail.engines.ray.shared_storage import missing_files, sees_marker
from dovetail.engines.runtime_env import environment_variables
from dovetail.machine.host_usage import machine_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.engines.ray.call_socket import LinkRequest
    from dovetail.engines.ray.protocol import AgentSetup
    from dovetail.engines.ray.worker_logs import LogPiece, ReceivedOffsets

LARGE_BACKLOG_BYTES, MAX_ANSWER_BYTES = 1 << 20, 8 << 20
"""Backlog from which answers are filled, and the size up to which: sizes in between are the slowest for Ray."""
MIN_ANSWER_GAP_S = 0.005
"""Minimum time between two answers without urgent operations: each answer costs a call of Ray."""
NOT_URGENT = ("done", "metrics", "transfer_ended", "log")
FETCH_THREADS = 4
FETCH_POLL_S = 1.0
"""Interval in which a fetching thread checks whether its payloads are still expected."""
JOIN_TIMEOUT_S = 2.0
LOST_PAYLOAD_DELAY_S = 0.5
"""Delay before a lost payload is reported: by then the driver knows whether its node is lost, too."""


class Outbox:
    """Operations for the driver, from several threads to one, collected into few large answers."""

    def __init__(self) -> None:
        self._queue: deque[SizedOp] = deque()
        self._size = 0
        self._urgent = self._ended = False
        self._taken_at = 0.0
        self._has_messages = Condition()

    def put(self, ops: Iterable[SizedOp]) -> None:
        with self._has_messages:
            for sized in ops:
                self._queue.append(sized)
                self._size += sized.size
                self._urgent = self._urgent or sized.op[0] not in NOT_URGENT
            self._has_messages.notify()

    def end(self) -> None:
        """From now on `take` does not wait: the call that waits would delay those of the agent's next session."""
        with self._has_messages:
            self._ended = True
            self._has_messages.notify_all()

    def take(self, wait_s: float) -> list[Op]:
        with self._has_messages:
            self._has_messages.wait_for(lambda: bool(self._queue) or self._ended, wait_s)
            left = self._taken_at + MIN_ANSWER_GAP_S - time.monotonic()
            if left > 0 and self._queue:
                self._has_messages.wait_for(lambda: self._urgent or self._size >= FRAME_BYTES, left)
            self._taken_at, self._urgent = time.monotonic(), False
            limit = MAX_ANSWER_BYTES if self._size >= LARGE_BACKLOG_BYTES else FRAME_BYTES
            found: list[Op] = []
            while self._queue and (not found or limit >= self._queue[0].size):
                op, size = self._queue.popleft()
                self._size -= size
                limit -= size
                found.append(op)
            return found


class AgentSession:
    """One run's use of an agent. Thread: `_run`, except for the methods that Ray's calls use."""

    def __init__(self, setup: AgentSetup) -> None:
        shared = bool(setup.folder) and sees_marker(Path(setup.folder), setup.token)
        self._folder = Path(setup.folder) if shared else driver_setup.make_temporary_folder()
        self._shared = shared
        self._engine = LocalEngine(
            self._folder,
            memory_bytes=setup.memory_bytes or None,
            pin_cpus=setup.pin_cpus,
            driver_context=_driver_context(setup),
            memory_watch=MemoryWatch(full=setup.memory_full),
        )
        self._engine.keep_spool = shared
        self._node = setup.node
        self._payloads = AgentPayloads(self._engine)
        self._encoder = EventEncoder(self._engine, self._payloads)
        self._monitor = NodeMonitor(self._engine, None if shared else self._folder)
        self._units: dict[str, HostedObject] = {}
        self._inbox: deque[tuple[int, list[Op], Any]] = deque()
        self._early: dict[int, tuple[list[Op], Any]] = {}
        """Frames that arrived before an earlier one."""
        self._next = 0
        self._handling = Lock()
        """Held while frames are handled, in the order of their numbers."""
        self._internal: deque[Op] = deque()
        """Operations of this session's own threads."""
        self._outbox = Outbox()
        self._fetching = ThreadPoolExecutor(FETCH_THREADS, "fetch")
        self.peers = PeerCalls(self._engine, setup.session, self._outbox.put)
        self.peers.enqueue = self._enqueue
        self._engine.on_foreign_call = self.peers.call
        self._engine.on_foreign_cancel = self.peers.cancel
        self._call_pieces = PieceCollector()
        self._calls: dict[int, Future[tuple[bool, list[bytes]]]] = {}
        """Unanswered calls of the driver, by number."""
        self._direct_calls: dict[int, SimpleQueue[Future[tuple[bool, list[bytes]]]]] = {}
        """Calls of the driver that a thread of Ray has received and that are not sent yet."""
        self._closing = Event()
        self._link_requests: deque[LinkRequest] = deque()
        is_driver_here = bool(setup.machine) and setup.machine == machine_id()
        self._call_socket = CallSocket(self._on_link_request) if is_driver_here else None
        address = ray.util.get_node_ip_address()
        unwritable = tuple(folder for folder, token in setup.sink_folders if not sees_marker(folder, token))
        hello = AgentHello(
            os.getpid(),
            address,
            shared,
            tuple(missing_files(setup.source_paths)),
            unwritable,
            dovetail_version(),
            *([] if self._call_socket is None else [self._call_socket.address, self._call_socket.secret]),
        )
        self._outbox.put([SizedOp(("hello", *hello))])
        self._ops = self._make_handlers()
        self._thread = Thread(target=self._run, name="dovetail-agent", daemon=True)
        self._thread.start()
        Thread(
            target=self._monitor.probe_raylet, args=(self._closing,), name="dovetail-raylet-probe", daemon=True
        ).start()

    # --- for Ray's calls

    def receive(self, number: int, frame: bytes, objects: Any = ()) -> None:
        """A numbered frame of the driver; `objects`: references and handles that only Ray can pass."""
        try:
            self._inbox.append((number, decode_frame(frame), objects))
            self._engine.nudge()
        except Exception:
            self._outbox.put([SizedOp(("agent_failed", traceback.format_exc()))])

    def call(self, number: int, op: Op) -> bytes:
        """Like `receive`, with one call to a worker: wait for its answer."""
        future = self._call_if_next(number, op)
        if future is None:
            begun = self._direct_calls[op[1]] = SimpleQueue()
            self._inbox.append((number, [op], ()))
            self._engine.nudge()
            future = begun.get()
        try:
            fine, pieces = future.result()
        except CancelledError:
            return NO_DIRECT_ANSWER
        return encode_direct_answer(fine, pieces[0]) if len(pieces) == 1 else NO_DIRECT_ANSWER

    def _call_if_next(self, number: int, op: Op) -> Future[tuple[bool, list[bytes]]] | None:
        """Send a call from this thread; None: others must be handled before it."""
        if not self._handling.acquire(blocking=False):
            return None
        try:
            if number != self._next:
                return None
            self._next += 1
            future = self._send_call(*op[1:])
        finally:
            self._handling.release()
        if self._early or self._link_requests:
            self._engine.nudge()  # what waited for this one
        return future

    def next_messages(self) -> list[Op]:
        """Operations for the driver; an empty list after a heartbeat interval."""
        return self._outbox.take(HEARTBEAT_S)

    def read_payloads(self, keys: list[int]) -> bytes:
        """The bytes of payloads, concatenated."""
        return b"".join(self._payloads.read(keys))

    def running_messages(self, worker: int) -> tuple[int, ...]:
        return self._engine.running(worker)

    def close(self, received: ReceivedOffsets) -> list[LogPiece]:
        """End all workers; the last output of workers, if the driver cannot read it. `received`: what the driver has of
        it."""
        self._closing.set()
        if self._call_socket is not None:
            self._call_socket.close()
        self._outbox.end()
        self._engine.nudge()
        # before the engine closes: the thread would take the exit of the fork server for a crash, and kill it
        self._thread.join(JOIN_TIMEOUT_S)
        self._engine.close()
        for request in self._link_requests:
            request.sock.close()
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self.peers.close()
        last = self._monitor.close(received)
        if not self._shared:
            driver_setup.remove_folder(self._folder)
        return last

    # --- the thread of the session

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                ops = [op for event in self._engine.poll(HEARTBEAT_S) for op in self._encoder.encode(event)]
                self._handle_inbox()
                ops += self._monitor.check(time.monotonic())
                if ops:
                    self._outbox.put(ops)
        except BaseException:
            if not self._closing.is_set():
                self._outbox.put([SizedOp(("agent_failed", traceback.format_exc()))])

    def _handle_inbox(self) -> None:
        while self._inbox:
            number, ops, objects = self._inbox.popleft()
            self._early[number] = ops, objects
        with self._handling:
            while self._next in self._early:
                ops, objects = self._early.pop(self._next)
                self._next += 1
                for op in ops:
                    self._handle(op, objects)
        while self._internal:
            self._handle(self._internal.popleft(), ())
        if self._link_requests:
            self._link_driver()

    def _handle(self, op: Op, objects: Any) -> None:
        kind = op[0]
        if kind == "run":
            if not self._payloads.run(op):
                self._outbox.put([SizedOp(("returned", op[2], op[1]))])
        elif kind == "fetch":
            self._fetching.submit(self._fetch, op[1], op[2], objects[op[3]])
        elif kind == "block":
            self._payloads.expect([op[1]])
            self._fetching.submit(self._fetch_block, op[1], op[2], op[3], objects[op[4]])
        elif kind == "agent_found":
            self.peers.on_peer_found(op[1], op[2], None if op[3] is None else objects[op[3]])
        else:
            self._ops[kind](*op[1:])

    def _make_handlers(self) -> dict[str, Callable[..., None]]:
        return {
            "put": self._on_put,
            "file": self._payloads.put_file,
            "expect": self._payloads.expect,
            "free": self._payloads.free,
            "unit": self._on_unit,
            "forget_unit": self._on_forget_unit,
            "devices": lambda devices: self._engine.set_devices(self._node, devices),
            "start": self._on_start,
            "port": self._on_port,
            "cancel": self._on_cancel,
            "stop": self._payloads.stop,
            "call_piece": self._call_pieces.add,
            "call": self._on_call,
            "cancel_call": self._on_cancel_call,
            "arrived": self._on_arrived,
            "lost": self._on_lost,
            "transfer_ended": lambda number: self._outbox.put([SizedOp(("transfer_ended", number))]),
            "answered": self.peers.on_answer,
            "worker_gone": self.peers.on_worker_gone,
        }

    def _on_put(self, key: int, items: int, sizes: tuple[int, ...], data: bytes) -> None:
        self._payloads.put(key, items, sizes, data)

    def _on_unit(self, name: str, work: Any, slots: int, writer: bytes | None) -> None:
        self._units[name] = HostedObject(name, work, slots, writer)

    def _on_forget_unit(self, name: str) -> None:
        """It is sent again when a worker needs it."""
        self._units.pop(name, None)

    def _on_start(
        self,
        worker: int,
        seats: Any,
        names: tuple[str, ...],
        ranks: tuple[int, ...],
        rendezvous: tuple[str, int] | None,
        context: bytes,
        rendezvous_seed: int,
    ) -> None:
        command = StartWorker(worker, seats, tuple(self._units[name] for name in names), context, rendezvous_seed)
        if len(ranks) == len(seats):
            self._engine.submit([command])
        else:
            self._engine.start_ranks(command, ranks, rendezvous)

    def _on_port(self, worker: int, seed: int) -> None:
        self._outbox.put([SizedOp(("port", worker, self._engine.free_port(seed)))])

    def _on_cancel(self, message: int, worker: int) -> None:
        if self._payloads.cancel(message, worker):
            self._outbox.put([SizedOp(("returned", worker, message))])
        else:
            self._engine.submit([Cancel(message, worker)])

    # --- payloads from elsewhere

    def _enqueue(self, op: Op) -> None:
        """Let the thread of the session handle an operation. From any thread."""
        self._internal.append(op)
        self._engine.nudge()

    def _fetch(self, number: int, about: list[tuple[int, int, tuple[int, ...]]], ref: Any) -> None:
        """Fetch payloads that another agent holds."""
        try:
            data = self._get_payloads(ref, [key for key, _, _ in about])
            found = split_payloads(data, [sizes for _, _, sizes in about])
            self._enqueue(("arrived", [(*one, part) for one, part in zip(about, found, strict=True)]))
        except Exception:  # lost with its node or its agent
            self._closing.wait(LOST_PAYLOAD_DELAY_S)
            self._enqueue(("lost", [key for key, _, _ in about]))
        self._enqueue(("transfer_ended", number))

    def _get_payloads(self, ref: Any, keys: list[int]) -> Any:
        """Give up when the payloads are not expected any more: Ray waits a minute for a node that hangs."""
        while True:
            try:
                return ray.get(ref, timeout=FETCH_POLL_S)
            except GetTimeoutError:
                if self._closing.is_set() or not any(map(self._payloads.is_coming, keys)):
                    raise

    def _fetch_block(self, key: int, items: int, place: tuple[Any, Any, int, int], ref: Any) -> None:
        """Fetch rows of a Ray Dataset and pack them for workers, which do not use Ray."""
        keys, cut, start, stop = place
        try:
            found = cut(ray.get(ref), start, stop)
            packed = pack_items(keys, found) if type(found) is list else pack_split(keys, found)
            self._enqueue(("arrived", [(key, items, part_lengths(packed), join_layout(packed))]))
        except Exception as error:
            if not self._closing.is_set():
                self._outbox.put([SizedOp(("unusable", f"a block of the Ray Dataset cannot be read: {error}"))])

    def _on_arrived(self, payloads: list[tuple[int, int, tuple[int, ...], memoryview]]) -> None:
        for key, items, sizes, data in payloads:
            if self._payloads.is_coming(key):  # not freed meanwhile
                self._payloads.put(key, items, sizes, data)
        self._payloads.on_arrived()

    def _on_lost(self, keys: list[int]) -> None:
        """These payloads will not arrive: their agent is lost, or does not have them any more."""
        keys = [key for key in keys if not self._payloads.holds(key)]
        if not keys:
            return
        ops = [SizedOp(("payloads_missing", keys))]
        ops += [SizedOp(("returned", worker, message)) for worker, message in self._payloads.drop_missing(keys)]
        self._outbox.put(ops)

    # --- calls

    def _on_call(self, number: int, *call: Any) -> None:
        future = self._send_call(number, *call)
        begun = self._direct_calls.pop(number, None)
        if begun is not None:
            begun.put(future)

    def _send_call(
        self,
        number: int,
        worker: int,
        hosted: str,
        method: str,
        last_piece: bytes,
        rank: int,
        deadline_s: float | None,
        is_direct: bool,
    ) -> Future[tuple[bool, list[bytes]]]:
        """A call of the driver on a worker. `is_direct`: a thread of Ray waits for the answer."""

        def answered(future: Future[tuple[bool, list[bytes]]]) -> None:
            self._calls.pop(number, None)
            if not future.cancelled():
                fine, pieces = future.result()
                if not is_direct or len(pieces) > 1:
                    self._outbox.put(encode_answer(number, fine, pieces))

        options = CallOptions(rank, deadline_s)
        pieces = self._call_pieces.take(number, last_piece)
        future = self._calls[number] = self._engine.call_pickled(worker, hosted, method, pieces, options)
        future.add_done_callback(answered)
        return future

    def _on_link_request(self, request: LinkRequest) -> None:
        """Thread: that of the call socket."""
        self._link_requests.append(request)
        self._engine.nudge()

    def _link_driver(self) -> None:
        """Pass on the sockets of the driver to workers, if everything that it sent before is handled."""
        with self._handling:
            due = [request for request in self._link_requests.copy() if request.position <= self._next]
        for request in due:
            self._link_requests.remove(request)
            self._engine.link_driver(request.worker, request.rank, request.sock)

    def _on_cancel_call(self, number: int) -> None:
        future = self._calls.get(number)
        if future is not None:
            future.cancel()


def _driver_context(setup: AgentSetup) -> DriverContext:
    """Paths and variables of the driver for workers; those of a runtime_env have precedence."""
    context = setup.driver_context
    if not setup.runtime_env:
        return context
    runtime_env: dict[str, Any] = json.loads(setup.runtime_env)
    own = [entry for entry in sys.path if entry]
    others = [entry for entry in context.path if not _is_library_path(entry)]
    folder = str(Path.cwd()) if "working_dir" in runtime_env else context.folder
    variables = {**context.variables, **environment_variables(runtime_env)}
    return context._replace(path=(*own, *others), folder=folder, variables=variables)


def _is_library_path(entry: str) -> bool:
    """Whether an entry of sys.path holds installed packages or Python's library, not the user's own code."""
    parts = Path(entry).parts
    library = len(parts) > 1 and parts[-2] in ("lib", "lib64") and parts[-1].startswith("python3.")
    return library or entry.endswith(".zip") or not {"site-packages", "dist-packages", "lib-dynload"}.isdisjoint(parts)


MAX_CLOSED_SESSIONS = 64
CONCURRENCY_GROUPS = {"receive": 1, "listen": 1, "read": 4, "peer": 2, "call": MAX_DIRECT_CALLS}
"""Ray's concurrency group -> its number of threads."""
Method = TypeVar("Method", bound="Callable[..., Any]")


def _in_group(name: str) -> Callable[[Method], Method]:
    """Calls of different concurrency groups do not wait for each other. Ray does not record them, which would take
    longer than most of them."""
    found: Callable[[Method], Method] = ray.method(concurrency_group=name, enable_task_events=False)
    return found


class Agent:
    """Ray actor of a node; it has one session per run."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._failed: dict[str, str] = {}
        """Session -> traceback of its failed start."""
        self._closed_sessions: deque[str] = deque(maxlen=MAX_CLOSED_SESSIONS)
        """The sessions that were closed last: late calls for them do not wait for their start."""
        self._begun = Condition()

    @_in_group("read")
    def begin(self, setup: AgentSetup) -> None:
        try:
            started = AgentSession(setup)
        except Exception:
            self._failed[setup.session] = traceback.format_exc()
            return
        with self._begun:
            self._sessions[setup.session] = started
            self._begun.notify_all()

    def _session_for(self, session: str, wait_s: float = HEARTBEAT_S) -> AgentSession | None:
        """None: it is closed, or not started yet."""
        with self._begun:
            self._begun.wait_for(lambda: session in self._sessions or session in self._closed_sessions, wait_s)
            return self._sessions.get(session)

    @_in_group("receive")
    def receive(self, session: str, number: int, frame: bytes, objects: Any = ()) -> None:
        """See `AgentSession.receive`."""
        found = self._session_for(session)
        if found is not None:
            found.receive(number, frame, objects)

    @_in_group("call")
    def call(self, frame: bytes) -> bytes:
        """See `AgentSession.call`."""
        session, number, op = decode_direct_call(frame)
        found = self._session_for(session)
        return NO_DIRECT_ANSWER if found is None else found.call(number, op)

    @_in_group("listen")
    def next_messages(self, session: str) -> bytes:
        """See `AgentSession.next_messages`."""
        found = self._session_for(session)
        if found is None:
            return pickle.dumps([("agent_failed", self._failed[session])] if session in self._failed else [], 5)
        return pickle.dumps(found.next_messages(), 5)

    @_in_group("read")
    def read_payloads(self, session: str, keys: list[int]) -> bytes:
        """See `AgentSession.read_payloads`."""
        return self._sessions[session].read_payloads(keys)

    @_in_group("read")
    def running_messages(self, session: str, worker: int) -> tuple[int, ...]:
        found = self._session_for(session)
        return found.running_messages(worker) if found is not None else ()

    @_in_group("peer")
    def on_peer_message(self, session: str, back: Any, number: int, op: Op) -> None:
        """A call of a worker of another agent, or the answer to one; `back`: that agent and its session."""
        found = self._sessions.get(session)
        if found is not None:
            found.peers.on_message(back, number, op)

    @_in_group("read")
    def close(self, session: str, received: ReceivedOffsets) -> list[LogPiece]:
        """See `AgentSession.close`."""
        self._closed_sessions.append(session)
        self._failed.pop(session, None)
        found = self._sessions.pop(session, None)
        return found.close(received) if found is not None else []
