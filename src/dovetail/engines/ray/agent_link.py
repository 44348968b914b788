"""Links from the driver to agents. Driver side.

`agent_pool` creates an `AgentLink` per agent. The thread of `AgentListener` collects the answers of all agents and puts
them into the inbox of `engine`, with the agents that are silent for longer than the limits of `failure_detection`.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from dovetail.engines.ray.failure_detection import (
    DRIVER_STALL_S,
    RUNTIME_ENV_TIMEOUT_S,
    SILENCE_TIMEOUT_S,
    SILENT_HEAD_MESSAGE,
    START_TIMEOUT_S,
    HeadWatchdog,
    RayLost,
    diagnose_ray_error,
)
from dovetail.engines.ray.protocol import (
    HEARTBEAT_S,
    MESSAGE_OVERHEAD_BYTES,
    SizedOp,
    decode_frame,
    encode_direct_call,
    encode_frames,
)

if TYPE_CHECKING:
    from queue import SimpleQueue

    from dovetail.engines.ray.protocol import AgentHello, AgentSetup, Op
    from dovetail.engines.ray.worker_logs import ReceivedOffsets


MAX_PENDING_FREES = 64


class AgentLink:
    """Connection to one agent. Thread: loop only, or with the engine's lock; `freed` from any thread."""

    def __init__(self, node: str, runtime_env: str, handle: Any, setup: AgentSetup, *, is_reused: bool = False) -> None:
        """`is_reused`: the agent served an earlier run."""
        self.node = node
        self._session = setup.session
        self.is_reused = is_reused
        self.runtime_env = runtime_env
        """The runtime_env as JSON; empty: none."""
        self.handle = handle
        self.hello: AgentHello | None = None
        self.lost_reason = ""
        """Why the agent is lost; empty: it is not lost."""
        self.heard_at = self.started_at = time.monotonic()
        self.units: dict[str, tuple[Any, ...]] = {}
        """Hosted object -> the definition that the agent has."""
        self.devices: dict[int, str] = {}
        self.freed: deque[int] = deque()
        self.partial_payloads: dict[int, list[bytes]] = {}
        """Payloads that arrive in several answers, by the agent's number."""
        self._queued: list[SizedOp] = []
        self._objects: list[Any] = []
        self._number = 0
        self.direct_calls: set[int] = set()
        """Calls whose answer is the result of a call of Ray. Thread: any."""
        self.call_address = self.call_secret = ""
        """See `AgentHello`; the address is empty if no links to workers can be made."""
        handle.begin.remote(setup)

    @property
    def is_up(self) -> bool:
        return self.hello is not None and not self.lost_reason

    @property
    def frames_sent(self) -> int:
        """Number of frames and direct calls that were sent to the agent."""
        return self._number

    def send(self, op: Op, size: int = MESSAGE_OVERHEAD_BYTES) -> None:
        """Queue an operation for the next flush."""
        self._queued.append(SizedOp(op, size))

    def attach_object(self, ray_object: Any) -> int:
        """Queue an object reference or actor handle, which only Ray can pass; its index in the next frame."""
        self._objects.append(ray_object)
        return len(self._objects) - 1

    def flush(self, *, frees: bool = False) -> None:
        """Send the queue. Freed payloads are sent with other operations; alone only if there are many, or with
        `frees`."""
        if self.lost_reason:
            self._queued.clear()
            self._objects.clear()
            self.freed.clear()
            return
        if self.freed and (self._queued or frees or len(self.freed) >= MAX_PENDING_FREES):
            self.send(("free", [self.freed.popleft() for _ in range(len(self.freed))]))
        if not self._queued:
            return
        queued, self._queued = self._queued, []
        objects, self._objects = self._objects, []
        frames = [pickle.dumps([sized.op for sized in queued], 5)] if objects else encode_frames(queued)
        for frame in frames:
            self.handle.receive.remote(self._session, self._number, frame, *([objects] if objects else []))
            self._number += 1

    def send_direct_call(self, call: int, op: Op) -> Any:
        """Send a call to a worker, behind everything that was sent before; its answer is that of the returned object
        reference."""
        self.direct_calls.add(call)
        self.flush()
        ref = self.handle.call.remote(encode_direct_call(self._session, self._number, op))
        self._number += 1
        return ref

    # --- calls of the agent; each returns an object reference

    def next_messages(self) -> Any:
        return self.handle.next_messages.remote(self._session)

    def read_payloads(self, keys: list[int]) -> Any:
        return self.handle.read_payloads.remote(self._session, keys)

    def running_messages(self, worker: int) -> Any:
        return self.handle.running_messages.remote(self._session, worker)

    def close(self, received: ReceivedOffsets) -> Any:
        return self.handle.close.remote(self._session, received)

    @property
    def peer(self) -> tuple[Any, str]:
        """Address for another agent that calls a worker of this one."""
        return self.handle, self._session

    def silent_s(self, now: float) -> float:
        """How long it has been silent, if that exceeds its limit; else 0."""
        if self.hello is not None:
            return now - self.heard_at if now - self.heard_at > SILENCE_TIMEOUT_S else 0.0
        limit = START_TIMEOUT_S + (RUNTIME_ENV_TIMEOUT_S if self.runtime_env else 0.0)
        return now - self.started_at if now - self.started_at > limit else 0.0


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """Start another agent on this node now."""

    node: str


class AgentListener:
    """Thread that puts (link, operations) or (link, error) into the inbox of the loop."""

    def __init__(self, inbox: SimpleQueue[Any], head: HeadWatchdog | None = None) -> None:
        """`head`: asked by `ClusterWatcher`, whose thread may block; this thread checks its time limit."""
        self._inbox = inbox
        self._head = head
        self._new: deque[AgentLink] = deque()
        self._scheduled: deque[tuple[float, RestartAgent]] = deque()
        self._pending: dict[Any, AgentLink] = {}
        self._links: list[AgentLink] = []
        self._broken = False
        self._closing = Event()
        self._woken = Event()
        self._thread = Thread(target=self._run, name="dovetail-ray", daemon=True)

    def add(self, link: AgentLink) -> None:
        if self._broken:
            return  # the run has failed already
        self._new.append(link)
        self._woken.set()
        if not self._thread.ident:
            self._thread.start()

    def schedule(self, delay_s: float, message: RestartAgent) -> None:
        """Put (None, message) into the inbox after the delay."""
        self._scheduled.append((time.monotonic() + delay_s, message))

    def stop(self) -> None:
        """Let the thread end after the next answer, without waiting for it."""
        self._closing.set()
        self._woken.set()

    def close(self) -> None:
        self.stop()
        if self._thread.ident:
            self._thread.join(HEARTBEAT_S * 4)

    def _run(self) -> None:
        previous = time.monotonic()
        while not self._closing.is_set():
            try:
                self._add_new()
                self._wait()
            except BaseException as error:  # Ray itself is gone; it may raise SystemExit
                self._broken = True
                self._inbox.put((None, diagnose_ray_error(error)))
                return
            now = time.monotonic()
            self._check_silence(now, now - previous)
            if self._head is not None and self._head.has_expired(min(now - previous, DRIVER_STALL_S)):
                self._inbox.put((None, RayLost(SILENT_HEAD_MESSAGE, agents_lost=False)))
            self._post_due(now)
            previous = now

    def _add_new(self) -> None:
        while self._new:
            link = self._new.popleft()
            link.heard_at = time.monotonic()
            self._links.append(link)
            self._pending[link.next_messages()] = link

    def _wait(self) -> None:
        if not self._pending:
            self._woken.wait(HEARTBEAT_S)
            self._woken.clear()
            return
        refs = list(self._pending)
        ready, rest = ray.wait(refs, num_returns=1, timeout=HEARTBEAT_S / 2)
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        for ref in ready:
            self._take(self._pending.pop(ref), ref)

    def _take(self, link: AgentLink, ref: Any) -> None:
        try:
            data: bytes = ray.get(ref)
        except RayError as error:
            self._inbox.put((link, error))
            return
        if link.lost_reason:
            return
        self._pending[link.next_messages()] = link
        link.heard_at = time.monotonic()
        self._inbox.put((link, decode_frame(data)))

    def _check_silence(self, now: float, gap: float) -> None:
        links = [link for link in self._links if not link.lost_reason]
        for ref in [ref for ref, link in self._pending.items() if link.lost_reason]:
            del self._pending[ref]
        self._links = links
        if gap > DRIVER_STALL_S:
            for link in links:
                link.heard_at += gap
                link.started_at += gap
            return
        for link in links:
            silent_s = link.silent_s(now)
            if silent_s:
                self._inbox.put((link, TimeoutError(f"its agent has not answered for {silent_s:.0f} s")))

    def _post_due(self, now: float) -> None:
        for _ in range(len(self._scheduled)):
            due, message = self._scheduled.popleft()
            if due <= now:
                self._inbox.put((None, message))
            else:
                self._scheduled.append((due, message))
