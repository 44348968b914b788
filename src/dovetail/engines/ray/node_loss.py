"""Loss of a node and loss of Ray: everything that follows when an agent is silent. Driver side.

Four places detect it, and each puts a message into the engine's inbox: `agent_link.AgentListener` (an agent is silent
or has died), `node_monitor` on a node (operation "node_unhealthy": its raylet hangs), `ClusterWatcher` (Ray reports a
node dead) and `HeadWatchdog` (Ray's head is silent) of `failure_detection`. `message_handlers` decides what the message
means and calls `lose_node`, `on_node_back` or `lose_ray` here. These end the workers, release the payloads and the
reservation, notify the controller by events, and let `agent_pool` start another agent.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import ray

from dovetail.control.events import FailRun, LossCause, NodeLeft, WorkerLost
from dovetail.engines.ray.failure_detection import diagnose_ray_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.engines.ray.engine import RayEngine
    from dovetail.engines.ray.failure_detection import RayLost

DEAD_NODE = "Ray reports that it is dead"


class NodeLoss:
    """Thread: loop only, or with the engine's lock."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self.is_ray_lost = False
        """Ray is gone or does not answer: it is not called any more."""
        self._departed: set[str] = set()
        """Nodes that have left for good, and still count as returning for the controller until another one is back:
        with no node at all, it would fail the run."""

    def lose_node(self, node: str, why: str) -> None:
        """Its agents, workers and payloads are lost. If Ray still lists the node, another agent is started there."""
        engine = self._engine
        agents = engine.agents
        was_returning = node in agents.returning
        for link in [link for link in agents.links() if link.node == node and not link.lost_reason]:
            link.lost_reason = why
            if not self.is_ray_lost:
                with suppress(Exception):
                    ray.kill(link.handle)
        for worker in [worker for worker in engine.workers.values() if node in worker.nodes]:
            for other in worker.ranks_by_agent:
                if not other.lost_reason:
                    other.send(("stop", worker.number, False, f"node {node} is lost"))
            engine.lose_worker(worker, WorkerLost(worker.number, LossCause.NODE_LOST, f"node {node} is lost: {why}"))
        returns = agents.on_node_lost(node)
        engine.payloads.transfers.start_ready()
        engine.measured.on_node_left(node)
        if engine.reservation is not None and not returns:
            engine.reservation.on_node_left(node)
        others_return = bool(agents.returning - {node})
        if not returns and others_return:
            self._departed.add(node)
        if not (was_returning and returns):
            engine.events.append(NodeLeft(node, why, returns or others_return))

    def on_node_back(self) -> None:
        """A node has an agent again: report the nodes that left for good meanwhile."""
        self._engine.events += [NodeLeft(node, DEAD_NODE) for node in sorted(self._departed)]
        self._departed.clear()

    def lose_ray(self, lost: RayLost) -> None:
        """Fail the run, once. Agents that still answer stop its workers; workers of silent agents are lost."""
        engine = self._engine
        if not self.is_ray_lost:
            self.is_ray_lost = True
            engine.events.append(FailRun(lost.why, code="DT397", fix=lost.fix))
            if engine.reservation is not None:
                engine.reservation.abandon()
                engine.reservation = None
            engine.agents.context.ids.clear()
        if lost.agents_lost:
            for node in sorted({*engine.agents.context.nodes, *(link.node for link in engine.agents.links())}):
                self.lose_node(node, lost.why)

    @contextmanager
    def fail_run_if_ray_lost(self) -> Iterator[None]:
        """Turn an error of a call into Ray into a failed run if this process has no Ray any more."""
        try:
            yield
        except (Exception, SystemExit) as error:  # Ray raises SystemExit while it shuts down
            if ray.is_initialized() and not isinstance(error, SystemExit):
                raise
            self.lose_ray(diagnose_ray_error(error))
