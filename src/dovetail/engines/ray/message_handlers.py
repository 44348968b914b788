"""Handlers of agent messages and failures, and of nodes that join or leave: what each means for the run. Driver side.

`engine` calls `handle` for everything in its inbox. Operations of agents become events for the controller; a lost node
or a lost Ray goes to `node_loss`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnschedulableError, RuntimeEnvSetupError

from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    CallFailure,
    FailRun,
    LossCause,
    NodeJoined,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.engines.ray import protocol
from dovetail.engines.ray.agent_link import RestartAgent
from dovetail.engines.ray.agent_pool import FIX_RUNTIME_ENV
from dovetail.engines.ray.discovery import NoNodesError
from dovetail.engines.ray.environment import missing_variable_hint
from dovetail.engines.ray.failure_detection import RayLost
from dovetail.engines.ray.node_loss import DEAD_NODE
from dovetail.engines.ray.protocol import FIX_VERSION, AgentHello, version_problem
from dovetail.engines.ray.shared_storage import storage_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.control.events import Event
    from dovetail.engines.ray.agent_link import AgentLink
    from dovetail.engines.ray.discovery import DiscoveredCluster
    from dovetail.engines.ray.engine import RayEngine
    from dovetail.engines.ray.remote_worker import RemoteWorker

MAX_FAILED_STARTS = 3
NO_WORKER_MESSAGE = "Failed to startup worker after retrying"
"""Text in Ray's error when the Python of a runtime_env does not start."""
NODE_DIED_MESSAGE = "its node has died"
"""Text in Ray's error when an actor died with its node."""
CREATION_MESSAGE = "creation task"
"""Text in Ray's error when the constructor of an actor failed."""
EXCEPTION_LINE = re.compile(r"[A-Za-z_.]*(Error|Exception|Exit|Found)\b")


class MessageHandlers:
    """Thread: loop only."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._excluded_nodes: dict[str, str] = {}
        """Node that does not see the source or the sink, or on which no agent starts -> Ray's id."""
        self._failed_starts: Counter[tuple[str, str]] = Counter()
        """Node and runtime_env -> number of agents in a row that failed before their hello."""
        self._handlers: dict[str, Callable[..., None]] = {
            "hello": self._on_hello,
            "done": self._on_done,
            "ready": self._on_ready,
            "returned": self._on_returned,
            "stopped": self._on_stopped,
            "lost": self._on_lost,
            "pids": self._on_pids,
            "port": self._on_port,
            "answer_piece": lambda _link, *piece: engine.calls.on_answer_piece(*piece),
            "answer": lambda _link, *answer: engine.calls.on_answer(*answer),
            "find_agent": self._on_find_agent,
            "piece": lambda link, number, data: link.partial_payloads.setdefault(number, []).append(data),
            "transfer_ended": engine.payloads.transfers.on_ended,
            "payloads_missing": engine.payloads.transfers.on_missing,
            "unusable": lambda _link, error: self._emit(FailRun(error, code="DT406", fix=_FIX_BLOCK)),
            "metrics": lambda link, data: engine.measured.record(link.node, data, link.runtime_env),
            "log": lambda _link, pieces: engine.logs.write(pieces),
            "node_unhealthy": lambda link, why: engine.losses.lose_node(link.node, why),
            "agent_failed": self._on_agent_failed,
        }

    def handle(self, link: AgentLink | None, message: Any) -> None:
        """`link`: the agent that sent it, or that failed; None: from `ClusterWatcher` or `AgentListener` itself."""
        if isinstance(message, RayLost):
            self._engine.losses.lose_ray(message)
        elif link is None:
            self._on_cluster_message(message)
        elif isinstance(message, BaseException):
            if not link.lost_reason:
                self._on_agent_died(link, message)
        else:
            for op in message:
                if link.lost_reason:
                    return
                self._handlers[op[0]](link, *op[1:])
            link.flush(frees=True)

    def _emit(self, event: Event) -> None:
        self._engine.events.append(event)

    # --- agents and nodes

    def _on_cluster_message(self, message: RestartAgent | DiscoveredCluster | NoNodesError) -> None:
        if self._engine.losses.is_ray_lost:
            return
        if isinstance(message, RestartAgent):
            self._engine.agents.restart(message.node)
        else:
            self._on_cluster(message)

    def _on_agent_died(self, link: AgentLink, error: BaseException) -> None:
        """Distinguish a failed runtime_env, a failed start and a lost node by Ray's error."""
        text = str(error)
        if link.is_reused and link.hello is None and not self._engine.losses.is_ray_lost:
            self._engine.agents.replace(link)  # it died while it was idle
        elif isinstance(error, RuntimeEnvSetupError) or (
            link.runtime_env and link.hello is None and is_runtime_env_error(error)
        ):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            self._fail_runtime_env(link, lines[-1] if lines else type(error).__name__)
        elif CREATION_MESSAGE in text or (link.runtime_env and link.hello is None and not is_node_error(error)):
            self._on_agent_failed(link, text)
        else:
            self._engine.losses.lose_node(link.node, _error_summary(error))

    def _fail_runtime_env(self, link: AgentLink, why: str, *, is_created: bool = False) -> None:
        """Fail the run: another agent would fail, too. `is_created`: Ray created it, but no agent starts with it."""
        link.lost_reason = "it could not be started with its runtime_env"
        names = sorted(
            {
                name
                for remote in self._engine.workers.values()
                if remote.runtime_env == link.runtime_env
                for name in remote.names
            }
        )
        action = "start an agent with" if is_created else "create"
        whose = f"of {', '.join(map(repr, names))}" if names else link.runtime_env  # no worker uses it any more
        message = f"node {link.node} cannot {action} the runtime_env {whose}: {why}"
        self._emit(FailRun(message, code="DT403", fix=FIX_RUNTIME_ENV))

    def _on_agent_failed(self, link: AgentLink, text: str) -> None:
        """An agent failed by itself. A node on which no agent starts is excluded after some attempts."""
        engine, node = self._engine, link.node
        if link.hello is None:
            self._failed_starts[node, link.runtime_env] += 1
        if self._failed_starts[node, link.runtime_env] < MAX_FAILED_STARTS:
            engine.losses.lose_node(node, f"its agent failed: {text.strip()}")
            return
        if link.runtime_env:
            self._fail_runtime_env(link, _last_error(text), is_created=True)
            return
        wrong = f"cannot start Dovetail on node {node}: {_last_error(text)}"
        ids = engine.agents.context.ids
        self._excluded_nodes[node] = ids.pop(node, "")
        if not ids:
            self._emit(FailRun(wrong, code="DT404", fix=FIX_VERSION))
        engine.losses.lose_node(node, f"DT404 {wrong}: {FIX_VERSION}")

    def _on_hello(self, link: AgentLink, *fields: Any) -> None:
        link.hello = hello = AgentHello(*fields)
        link.call_address, link.call_secret = hello.call_address, hello.call_secret
        del self._failed_starts[link.node, link.runtime_env]
        agents = self._engine.agents
        context = agents.context
        wrong = version_problem(link.node, hello) or storage_problem(link.node, hello, agents.folder)
        if wrong is not None:
            self._refuse(link, *wrong)
            return
        if link.node in agents.returning:
            agents.returning.discard(link.node)
            if link.node in context.nodes:
                self._emit(NodeJoined(context.nodes[link.node]))
            self._engine.losses.on_node_back()

    def _refuse(self, link: AgentLink, code: str, error: str, fix: str) -> None:
        """Fail the run before its first worker starts; later, continue without that node."""
        engine = self._engine
        if engine.agents.has_begun:
            self._excluded_nodes[link.node] = engine.agents.context.ids.pop(link.node, "")
            engine.losses.lose_node(link.node, f"{code} {error}: {fix}")
        elif not engine.agents.is_refused:
            engine.agents.is_refused = True
            self._emit(FailRun(error, code=code, fix=fix))

    def _on_cluster(self, seen: DiscoveredCluster | NoNodesError) -> None:
        """Compare with Ray's list: nodes that joined, and nodes that left without an error of their agent."""
        self._engine.request_resources()
        if not isinstance(seen, NoNodesError):
            self._on_nodes_joined(seen)
        present = {} if isinstance(seen, NoNodesError) else seen.ids
        context = self._engine.agents.context
        left = [name for name in context.ids if name not in present]
        for name in left:
            del context.ids[name]
            self._engine.losses.lose_node(name, DEAD_NODE)
        if left and not context.ids:
            self._emit(FailRun(f"the last node, {left[-1]!r}, is gone", DEAD_NODE))

    def _on_nodes_joined(self, seen: DiscoveredCluster) -> None:
        context = self._engine.agents.context
        context.stores.update(seen.object_store_bytes)
        for name, number in seen.ids.items():
            if number in (context.ids.get(name), self._excluded_nodes.get(name)):
                continue
            context.ids[name] = number
            node = next(node for node in seen.cluster.nodes if node.name == name)
            context.nodes[name] = node
            if context.reservation is not None:
                context.reservation.on_node_joined(name, number)
            self._emit(NodeJoined(node))
            self._engine.losses.on_node_back()

    # --- workers

    def _worker(self, link: AgentLink, worker: int) -> RemoteWorker | None:
        remote = self._engine.workers.get(worker)
        return remote if remote is not None and link in remote.ranks_by_agent else None

    def _on_ready(self, link: AgentLink, worker: int, setup_s: float) -> None:
        remote = self._worker(link, worker)
        if remote is None:
            return
        remote.ready[link] = setup_s
        self._send_agent_address(remote)
        if len(remote.ready) == len(remote.ranks_by_agent) and remote.end is None:
            self._emit(WorkerReady(worker, max(remote.ready.values())))

    def _on_done(
        self,
        link: AgentLink,
        worker: int,
        message: int,
        segments: list[tuple[Any, ...]],
        seconds: float,
        failures: list[tuple[Any, ...]],
        peak: int,
        stages: Any,
        cpu_s: float,
        epoch_segments: list[int] | None,
    ) -> None:
        received = [self._engine.payloads.receive(link, segment) for segment in segments]
        remote = self._worker(link, worker)
        if remote is None:
            return
        hinted = [self._with_hint(CallFailure(*failure)) for failure in failures]
        measured = (seconds, hinted, peak, stages, cpu_s)
        done = remote.merge_done(link, BatchesDone(worker, message, received, *measured, epoch_segments))
        if done is not None:
            self._emit(done)

    def _with_hint(self, failure: CallFailure) -> CallFailure:
        context = self._engine.agents.context
        found = missing_variable_hint(failure.error, failure.detail, context.environ, context.driver_context.variables)
        if found:
            failure.error = f"{failure.error} ({found})"
        return failure

    def _on_returned(self, link: AgentLink, worker: int, message: int) -> None:
        remote = self._worker(link, worker)
        if remote is None or message not in remote.sent:
            return
        if len(remote.ranks_by_agent) > 1:
            # other ranks have the message, and would wait for this one without limit
            self._engine.kill_worker(remote, WorkerLost(worker, LossCause.NODE_LOST, "a part of its input is lost"))
            return
        del remote.sent[message]
        self._emit(BatchesReturned(worker, message))

    def _on_stopped(self, link: AgentLink, worker: int) -> None:
        self._on_ended(link, worker, WorkerStopped(worker))

    def _on_lost(self, link: AgentLink, worker: int, cause: str, detail: str, breadcrumbs: Any, peak: int) -> None:
        context = self._engine.agents.context
        found = missing_variable_hint(
            detail.partition("\n")[0], detail, context.environ, context.driver_context.variables
        )
        if found:
            first, _, rest = detail.partition("\n")
            detail = f"{first} ({found})\n{rest}"
        self._on_ended(link, worker, protocol.decode_worker_lost(worker, cause, detail, breadcrumbs, peak))

    def _on_ended(self, link: AgentLink, worker: int, end: WorkerLost | WorkerStopped) -> None:
        """A worker ended on one of its nodes: end all other ranks of its gang."""
        remote = self._worker(link, worker)
        if remote is None or link in remote.ended:
            return
        remote.ended.add(link)
        if remote.end is None or isinstance(remote.end, WorkerStopped):
            remote.end = end
        if not isinstance(end, WorkerStopped):
            for other in remote.ranks_by_agent:
                if other not in remote.ended:
                    other.send(("stop", worker, False, "another rank of the gang ended"))
        if len(remote.ended) == len(remote.ranks_by_agent):
            self._engine.lose_worker(remote, remote.end)

    def _on_pids(self, link: AgentLink, worker: int, name: str, pids: tuple[int, ...]) -> None:  # noqa: ARG002 - the operation has it
        remote = self._worker(link, worker)
        if remote is not None:
            remote.pids[link] = tuple(pids)

    def _on_port(self, link: AgentLink, worker: int, port: int) -> None:
        remote = self._engine.workers.get(worker)
        if remote is not None and link.hello is not None:
            remote.rendezvous = link.hello.address, port

    # --- calls between workers

    def _on_find_agent(self, link: AgentLink, worker: int, rank: int) -> None:
        """A worker of that agent calls a worker of another node: send the address of its agent, once it is ready.
        Before that, the call could arrive before the command that starts the worker."""
        remote = self._engine.workers.get(worker)
        if remote is None or rank >= len(remote.command.seats):
            link.send(("agent_found", worker, rank, None))
            link.flush()
            return
        remote.callers.add(link)
        remote.waiting_callers.append((link, rank))
        self._send_agent_address(remote)

    def _send_agent_address(self, remote: RemoteWorker) -> None:
        """Send the address of the worker's agent to all agents that wait for it, if the worker is ready."""
        ready = {rank for link in remote.ready for rank in remote.ranks_by_agent[link]}
        waiting, remote.waiting_callers = remote.waiting_callers, []
        for caller, rank in waiting:
            if rank not in ready:
                remote.waiting_callers.append((caller, rank))
                continue
            caller.send(("agent_found", remote.number, rank, caller.attach_object(remote.agent_of(rank).peer)))
            caller.flush()


_FIX_BLOCK = "write the dataset to files on shared storage, and read those: dataset.write_parquet(...)"


def _last_error(text: str) -> str:
    """The line of a traceback that names the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in reversed(lines) if EXCEPTION_LINE.match(line)), lines[-1])


def is_runtime_env_error(error: BaseException) -> bool:
    """Whether Ray's error means that the runtime_env of an agent could not be created."""
    return isinstance(error, TimeoutError) or NO_WORKER_MESSAGE in str(error)


def is_node_error(error: BaseException) -> bool:
    return isinstance(error, ActorUnschedulableError) or NODE_DIED_MESSAGE in str(error)


def _error_summary(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
