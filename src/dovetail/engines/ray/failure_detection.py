"""Failure detection: after how many seconds of silence an agent's node, or Ray's head, counts as lost. Driver side.

An agent answers at least every 0.5 s; one that is silent for longer than its time limit is lost, even if Ray lists its
node as alive: Ray needs 14 to 66 s to detect that. `agent_link.AgentListener` measures the silence of agents and of the
head, `node_monitor` on each node that of its raylet, and the thread of `ClusterWatcher` polls Ray's list of nodes. They
put what they find into the inbox of `engine`; `node_loss` has what follows.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import ray

from dovetail.engines.ray.discovery import NoNodesError, has_same_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from queue import SimpleQueue

    from dovetail.engines.ray.discovery import DiscoveredCluster

SHUTDOWN_MESSAGE = "this program called ray.shutdown() while a run used Ray"
SHUTDOWN_FIX = "call run.wait() before ray.shutdown()"
STATUS_FIX = "check that the cluster is running: ray status"
HEAD_TIMEOUT_S = 30.0
"""Limit for an answer of Ray's head. After 60 s Ray itself would end the driver's process."""
SILENT_HEAD_MESSAGE = f"Ray's head has not answered for {HEAD_TIMEOUT_S:g} s"
SILENCE_TIMEOUT_S = 5.0
"""An agent that sent no answer for longer than this is lost."""
START_TIMEOUT_S = 60.0
"""The same for the first answer of a new agent."""
RUNTIME_ENV_TIMEOUT_S = 600.0
"""Added for an agent whose runtime_env must be created first; Ray has its own, shorter limit."""
DRIVER_STALL_S = 1.0
"""If the driver itself did not run for this long, silence proves nothing."""
NODE_POLL_S = 1.0
HUNG_RAYLET_S = 4.0
"""A raylet that stored no object for this long, and got no CPU time, counts as hung."""
UNSEEN_RAYLET_S = 30.0
"""The same where its CPU time is unknown: it may be busy with a full object store."""


@dataclass(frozen=True, slots=True)
class RayLost:
    """Ray cannot be used any more. Put into the inbox once."""

    why: str
    fix: str = STATUS_FIX
    agents_lost: bool = True
    """Whether the agents cannot be reached either."""


def diagnose_ray_error(error: BaseException) -> RayLost:
    """Reason for an error of a call into Ray that normally cannot fail."""
    if isinstance(error, SystemExit) or not ray.is_initialized():
        return RayLost(SHUTDOWN_MESSAGE, SHUTDOWN_FIX)
    text = str(error).strip().splitlines()
    return RayLost(f"Ray is gone: {type(error).__name__}: {text[0] if text else 'no reason given'}")


class HeadWatchdog:
    """Measures how long Ray's head has not answered. One thread asks the head, and may block without limit; another one
    measures."""

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._asked = False

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Mark the time in which the thread waits for the head."""
        self._silent_s, self._asked = 0.0, True
        try:
            yield
        finally:
            self._asked = False

    def has_expired(self, more_s: float) -> bool:
        """Add running time of this process; true once, when the limit is exceeded."""
        before, self._silent_s = self._silent_s, self._silent_s + more_s if self._asked else 0.0
        return before < HEAD_TIMEOUT_S <= self._silent_s


class ClusterWatcher:
    """Thread that polls the cluster every second and puts (None, DiscoveredCluster) into the inbox, or (None,
    NoNodesError). `discover` costs more than `nodes` and is called only when nodes have joined or left."""

    def __init__(
        self,
        inbox: SimpleQueue[Any],
        discover: Callable[[], DiscoveredCluster],
        nodes: Callable[[], list[Any]] = ray.nodes,
        head: HeadWatchdog | None = None,
    ) -> None:
        self._inbox = inbox
        self._discover = discover
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
            with suppress(Exception):  # a failed poll proves nothing; the next one may succeed
                self._inbox.put((None, self._observe()))

    def _observe(self) -> DiscoveredCluster | NoNodesError:
        with self._head.probe():
            rows = self._nodes()  # blocks without limit if the head is gone
        if self._seen is None or not has_same_nodes(self._seen, rows):
            self._seen = None
            try:
                self._seen = self._discover()
            except NoNodesError as error:
                return error
        return self._seen
