"""Links from the driver to agents, and failure detection: silent agents, nodes that left, a silent Ray head, Ray shut
down.

An agent answers at least every half second. One that is silent for longer than the deadline is lost, whatever Ray
thinks of its node: Ray takes 14 to 66 seconds for that.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from dovetail.control.events import FailRun
from dovetail.engines.ray.discovery import NoNodesError, has_same_nodes
from dovetail.engines.ray.protocol import HEARTBEAT_S, MESSAGE_OVERHEAD_BYTES, SizedOp, decode_frame, encode_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from queue import SimpleQueue

    from dovetail.engines.ray.discovery import DiscoveredCluster
    from dovetail.engines.ray.engine import RayEngine
    from dovetail.engines.ray.protocol import AgentHello, AgentSetup, Op

SHUTDOWN_MESSAGE = "this program has left Ray (ray.shutdown) while a run used it"
SHUTDOWN_FIX = "leave Ray when the run is over: run.wait()"
STATUS_FIX = "ray status: is the cluster still there?"
HEAD_TIMEOUT_S = 30.0
"""A head that has not answered for so long is gone: after 60 s Ray itself ends the driver's process."""
SILENT_HEAD_MESSAGE = f"Ray's head has not answered for {HEAD_TIMEOUT_S:g} s"


@dataclass(frozen=True, slots=True)
class RayLost:
    """Told once to the loop."""

    why: str
    fix: str = STATUS_FIX
    agents_lost: bool = True
    """Whether not even agents can be heard any more."""


def diagnose_ray_error(error: BaseException) -> RayLost:
    """What an error of a call into Ray means that should never fail."""
    if isinstance(error, SystemExit) or not ray.is_initialized():
        return RayLost(SHUTDOWN_MESSAGE, SHUTDOWN_FIX)
    text = str(error).strip().splitlines()
    return RayLost(f"Ray is gone: {type(error).__name__}: {text[0] if text else 'no reason given'}")


class HeadWatchdog:
    """How long has Ray's head not answered? One thread asks it, which may wait for ever; another counts."""

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._asked = False

    @contextmanager
    def probe(self) -> Iterator[None]:
        """While it is: what else its thread does may take long, and says nothing of the head."""
        self._silent_s, self._asked = 0.0, True
        try:
            yield
        finally:
            self._asked = False

    def has_expired(self, more_s: float) -> bool:
        """After so much more time in which this process ran; told once."""
        before, self._silent_s = self._silent_s, self._silent_s + more_s if self._asked else 0.0
        return before < HEAD_TIMEOUT_S <= self._silent_s


@contextmanager
def fail_run_if_ray_lost(engine: RayEngine) -> Iterator[None]:
    """Whatever is raised because this process has no Ray any more fails the run, in one way."""
    try:
        yield
    except (Exception, SystemExit) as error:  # the latter is how Ray says it where it is just leaving
        if ray.is_initialized() and not isinstance(error, SystemExit):
            raise
        give_up(engine, diagnose_ray_error(error))


def give_up(engine: RayEngine, gone: RayLost) -> None:
    """The run fails. Agents that are still there end its workers; where nobody can be heard, they are lost."""
    if not engine.given_up:
        engine.given_up = True
        engine.events.append(FailRun(f"DT397 {gone.why}", gone.fix))
        if engine.reservation is not None:
            engine.reservation.abandon()
            engine.reservation = None
        engine.agents.context.ids.clear()
    if gone.agents_lost:
        for node in sorted({*engine.agents.context.nodes, *(link.node for link in engine.agents.links())}):
            engine.lose_node(node, gone.why)


SILENCE_TIMEOUT_S = 5.0
"""Longer than this without a word is a loss."""
START_TIMEOUT_S = 60.0
"""The same for an agent that was just started."""
RUNTIME_ENV_TIMEOUT_S = 600.0
"""More for one whose runtime_env must be made first: Ray has a limit of its own for that."""
DRIVER_STALL_S = 1.0
"""If the driver itself did not run for so long, silence says nothing."""
MAX_PENDING_FREES = 64
NODE_POLL_S = 1.0


class AgentLink:
    """One agent. For the thread of the loop, or who holds the engine's lock; `freed` is for everybody."""

    def __init__(self, node: str, kind: str, handle: Any, setup: AgentSetup, *, used: bool = False) -> None:
        """`used`: it served an earlier run."""
        self.node = node
        self._session = setup.session
        self.is_reused = used
        self.runtime_env = kind
        """Which runtime_env it has; empty: none."""
        self.handle = handle
        self.hello: AgentHello | None = None
        self.lost_reason = ""
        """Why it is lost; empty: it is not."""
        self.heard_at = self.started_at = time.monotonic()
        self.units: dict[str, tuple[Any, ...]] = {}
        """What it was told of each that it hosts."""
        self.devices: dict[int, str] = {}
        self.freed: deque[int] = deque()
        self.partial_payloads: dict[int, list[bytes]] = {}
        """Of payloads that come in several answers, by their number there."""
        self._queued: list[SizedOp] = []
        self._objects: list[Any] = []
        self._number = 0
        handle.begin.remote(setup)

    @property
    def is_up(self) -> bool:
        return self.hello is not None and not self.lost_reason

    def send(self, op: Op, size: int = MESSAGE_OVERHEAD_BYTES) -> None:
        """With the next flush."""
        self._queued.append(SizedOp(op, size))

    def attach_object(self, what: Any) -> int:
        """Something that only Ray can carry; its number in the next frame."""
        self._objects.append(what)
        return len(self._objects) - 1

    def flush(self, *, frees: bool = False) -> None:
        """Frees go with the rest; alone only when they are many, or it is time."""
        if self.lost_reason:
            self._queued.clear()
            self._objects.clear()
            self.freed.clear()
            return
        if self.freed and (self._queued or frees or len(self.freed) >= MAX_PENDING_FREES):
            self.send(("free", [self.freed.popleft() for _ in range(len(self.freed))]))
        if not self._queued:
            return
        out, self._queued = self._queued, []
        beside, self._objects = self._objects, []
        cut = [pickle.dumps([told.op for told in out], 5)] if beside else encode_frames(out)
        for frame in cut:
            self.handle.receive.remote(self._session, self._number, frame, *([beside] if beside else []))
            self._number += 1

    # --- by Ray, each a reference to the answer

    def next_messages(self) -> Any:
        return self.handle.next_messages.remote(self._session)

    def read_payloads(self, keys: list[int]) -> Any:
        return self.handle.read_payloads.remote(self._session, keys)

    def running_messages(self, worker: int) -> Any:
        return self.handle.running_messages.remote(self._session, worker)

    def close(self) -> Any:
        return self.handle.close.remote(self._session)

    @property
    def peer(self) -> tuple[Any, str]:
        """For another agent that wants to call a worker there."""
        return self.handle, self._session

    def silent_s(self, now: float) -> float:
        """How much too long it has been silent; 0: not."""
        if self.hello is not None:
            return now - self.heard_at if now - self.heard_at > SILENCE_TIMEOUT_S else 0.0
        limit = START_TIMEOUT_S + (RUNTIME_ENV_TIMEOUT_S if self.runtime_env else 0.0)
        return now - self.started_at if now - self.started_at > limit else 0.0


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """It is time for another agent on this node."""

    node: str


class AgentListener:
    """Puts (link, operations) or (link, an error) into the queue of the loop."""

    def __init__(self, heard: SimpleQueue[Any], head: HeadWatchdog | None = None) -> None:
        """`head`: somebody asks it all the time, and here is noticed that it does not answer."""
        self._inbox = heard
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
            return  # the run is told already
        self._new.append(link)
        self._woken.set()
        if not self._thread.ident:
            self._thread.start()

    def schedule(self, delay_s: float, what: RestartAgent) -> None:
        """Puts (None, what) into the queue then."""
        self._scheduled.append((time.monotonic() + delay_s, what))

    def close(self) -> None:
        self._closing.set()
        self._woken.set()
        if self._thread.ident:
            self._thread.join(HEARTBEAT_S * 4)

    def _run(self) -> None:
        came = time.monotonic()
        while not self._closing.is_set():
            try:
                self._add_new()
                self._wait()
            except BaseException as error:  # Ray itself is gone, and with it everybody; it may say so by SystemExit
                self._broken = True
                self._inbox.put((None, diagnose_ray_error(error)))
                return
            now = time.monotonic()
            self._check_silence(now, now - came)
            if self._head is not None and self._head.has_expired(min(now - came, DRIVER_STALL_S)):
                self._inbox.put((None, RayLost(SILENT_HEAD_MESSAGE, agents_lost=False)))
            self._post_due(now)
            came = now

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
                self._inbox.put((link, TimeoutError(f"nothing was heard of it for {silent_s:.0f} s")))

    def _post_due(self, now: float) -> None:
        for _ in range(len(self._scheduled)):
            due, what = self._scheduled.popleft()
            if due <= now:
                self._inbox.put((None, what))
            else:
                self._scheduled.append((due, what))


class ClusterWatcher:
    """Looks at the cluster once per second, in a thread of its own, and puts (None, what it saw) into the queue; that
    there is nothing left to run on is a `NoNodes`. `look` costs more than `nodes`: only if some have come or gone."""

    def __init__(
        self,
        heard: SimpleQueue[Any],
        look: Callable[[], DiscoveredCluster],
        nodes: Callable[[], list[Any]] = ray.nodes,
        head: HeadWatchdog | None = None,
    ) -> None:
        self._inbox = heard
        self._look = look
        self._nodes = nodes
        self._head = head or HeadWatchdog()
        self._seen: DiscoveredCluster | None = None
        self._closing = Event()
        self._thread = Thread(target=self._run, name="dovetail-nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(NODE_POLL_S)

    def _run(self) -> None:
        while not self._closing.wait(NODE_POLL_S):
            with suppress(Exception):  # for a moment nobody knows; the next look may
                self._inbox.put((None, self._observe()))

    def _observe(self) -> DiscoveredCluster | NoNodesError:
        with self._head.probe():
            rows = self._nodes()  # where the head is gone, this waits for ever
        if self._seen is None or not has_same_nodes(self._seen, rows):
            self._seen = None
            try:
                self._seen = self._look()
            except NoNodesError as error:
                return error
        return self._seen
