"""Handlers of agent messages and failures, and of nodes that join or leave: what each means for the "
"run. Driver side."""

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
from dovetail.engines.ray.agent_link import RayLost, RestartAgent, give_up
from dovetail.engines.ray.agent_pool import FIX_RUNTIME_ENV
from dovetail.engines.ray.discovery import NoNodesError
from dovetail.engines.ray.environment import missing_variable_hint
from dovetail.engines.ray.protocol import AgentHello, dovetail_version

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dovetail.control.events import Event
    from dovetail.engines.ray.agent_link import AgentLink
    from dovetail.engines.ray.discovery import DiscoveredCluster
    from dovetail.engines.ray.engine import RayEngine
    from dovetail.engines.ray.remote_worker import RemoteWorker

MAX_FAILED_STARTS = 3
NO_WORKER_MESSAGE = "Failed to startup worker after retrying"
"""In Ray's error when the Python of a runtime_env does not start."""
NODE_DIED_MESSAGE = "its node has died"
"""In Ray's error when an actor died with its node."""
CREATION_MESSAGE = "creation task"
"""In Ray's error when the constructor of an actor failed."""
EXCEPTION_LINE = re.compile(r"[A-Za-z_.]*(Error|Exception|Exit|Found)\b")
_FIX_VERSION = "install the same dovetail-ml, with the same Python, on all nodes (pip install 'dovetail-ml[ray]')"


class MessageHandlers:
    """For the thread of the loop."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._excluded_nodes: dict[str, str] = {}
        """Nodes that do not see what workers read or write, or where no agent starts, and what Ray calls them."""
        self._failed_starts: Counter[tuple[str, str]] = Counter()
        """Node and runtime_env -> agents in a row that failed before they said a word."""
        self._handlers: dict[str, Callable[..., None]] = {
            "hello": self._on_hello,
            "done": self._on_done,
            "ready": self._on_ready,
            "returned": self._on_returned,
            "stopped": self._on_stopped,
            "lost": self._on_lost,
            "pids": self._on_pids,
            "port": self._on_port,
            "answer": lambda _link, *told: engine.on_answer(*told),
            "seek": self._on_seek,
            "piece": lambda link, number, data: link.partial_payloads.setdefault(number, []).append(data),
            "over": engine.payloads.transfers.on_over,
            "lack": engine.payloads.transfers.on_missing,
            "unusable": lambda _link, error: self._emit(FailRun(error, _FIX_BLOCK)),
            "use": lambda link, data: engine.measured.record(link.node, data, link.runtime_env),
            "log": lambda _link, pieces: engine.logs.write(pieces),
            "sick": lambda link, why: engine.lose_node(link.node, why),
            "broken": self._on_broken,
        }

    def handle(self, link: AgentLink | None, what: Any) -> None:
        if isinstance(what, RayLost):
            give_up(self._engine, what)
        elif link is None:
            self._on_cluster_message(what)
        elif isinstance(what, BaseException):
            if not link.lost_reason:
                self._on_agent_died(link, what)
        else:
            for op in what:
                if link.lost_reason:
                    return
                self._handlers[op[0]](link, *op[1:])
            link.flush(frees=True)

    def _emit(self, event: Event) -> None:
        self._engine.events.append(event)

    # --- agents and nodes

    def _on_cluster_message(self, what: RestartAgent | DiscoveredCluster | NoNodesError) -> None:
        if self._engine.given_up:
            return
        if isinstance(what, RestartAgent):
            self._engine.agents.restart(what.node)
        else:
            self._on_cluster(what)

    def _on_agent_died(self, link: AgentLink, error: BaseException) -> None:
        """An agent, by Ray's words; one that has a runtime_env may have none of it yet."""
        text = str(error)
        if link.is_reused and link.hello is None and not self._engine.given_up:
            self._engine.agents.replace(link)  # it died while it was idle
        elif isinstance(error, RuntimeEnvSetupError) or (
            link.runtime_env and link.hello is None and is_runtime_env_error(error)
        ):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            self._fail_runtime_env(link, lines[-1] if lines else type(error).__name__)
        elif CREATION_MESSAGE in text or (link.runtime_env and link.hello is None and not is_node_error(error)):
            self._on_broken(link, text)
        else:
            self._engine.lose_node(link.node, _error_summary(error))

    def _fail_runtime_env(self, link: AgentLink, why: str, *, made: bool = False) -> None:
        """Another agent would fare no better. `made`: it only does not start with it."""
        link.lost_reason = "it could not be started with its runtime_env"
        names = sorted(
            {
                name
                for crew in self._engine.workers.values()
                if crew.runtime_env == link.runtime_env
                for name in crew.names
            }
        )
        what = "start an agent with" if made else "make"
        whose = f"of {', '.join(map(repr, names))}" if names else link.runtime_env  # whose workers are lost already
        message = f"DT403 node {link.node} cannot {what} the runtime_env {whose}: {why}"
        self._emit(FailRun(message, FIX_RUNTIME_ENV))

    def _on_broken(self, link: AgentLink, text: str) -> None:
        """An agent that failed by itself. Where none starts, the next one would not either."""
        engine, node = self._engine, link.node
        if link.hello is None:
            self._failed_starts[node, link.runtime_env] += 1
        if self._failed_starts[node, link.runtime_env] < MAX_FAILED_STARTS:
            engine.lose_node(node, f"its agent failed: {text.strip()}")
            return
        if link.runtime_env:
            self._fail_runtime_env(link, _last_error(text), made=True)
            return
        wrong = f"DT404 Dovetail does not start on node {node}: {_last_error(text)}"
        ids = engine.agents.context.ids
        self._excluded_nodes[node] = ids.pop(node, "")
        if not ids:
            self._emit(FailRun(wrong, _FIX_VERSION))
        engine.lose_node(node, f"{wrong}: {_FIX_VERSION}")

    def _on_hello(self, link: AgentLink, *told: Any) -> None:
        link.hello = hello = AgentHello(*told)
        del self._failed_starts[link.node, link.runtime_env]
        agents = self._engine.agents
        around = agents.context
        wrong = _version_problem(link.node, hello) or _storage_problem(link.node, hello, agents.folder)
        if wrong is not None:
            self._refuse(link, *wrong)
            return
        if link.node in agents.returning:
            agents.returning.discard(link.node)
            if link.node in around.nodes:
                self._emit(NodeJoined(around.nodes[link.node]))
            self._engine.on_node_back()

    def _refuse(self, link: AgentLink, error: str, fix: str) -> None:
        """Nothing runs, or, if something does already, it goes on without that node."""
        engine = self._engine
        if engine.agents.has_begun:
            self._excluded_nodes[link.node] = engine.agents.context.ids.pop(link.node, "")
            engine.lose_node(link.node, f"{error}: {fix}")
        elif not engine.agents.is_refused:
            engine.agents.is_refused = True
            self._emit(FailRun(error, fix))

    def _on_cluster(self, seen: DiscoveredCluster | NoNodesError) -> None:
        """At the cluster: who joined, and who left without our noticing."""
        self._engine.request_resources()
        if not isinstance(seen, NoNodesError):
            self._on_nodes_joined(seen)
        there = {} if isinstance(seen, NoNodesError) else seen.ids
        around = self._engine.agents.context
        left = [name for name in around.ids if name not in there]
        for name in left:
            del around.ids[name]
            self._engine.lose_node(name, "Ray says that it is dead")
        if left and not around.ids:
            self._emit(FailRun(f"the last node, {left[-1]!r}, is gone", "Ray says that it is dead"))

    def _on_nodes_joined(self, seen: DiscoveredCluster) -> None:
        around = self._engine.agents.context
        around.stores.update(seen.object_store_bytes)
        for name, number in seen.ids.items():
            if number in (around.ids.get(name), self._excluded_nodes.get(name)):
                continue
            around.ids[name] = number
            node = next(node for node in seen.cluster.nodes if node.name == name)
            around.nodes[name] = node
            if around.reservation is not None:
                around.reservation.on_node_joined(name, number)
            self._emit(NodeJoined(node))
            self._engine.on_node_back()

    # --- workers

    def _worker(self, link: AgentLink, worker: int) -> RemoteWorker | None:
        crew = self._engine.workers.get(worker)
        return crew if crew is not None and link in crew.ranks_by_agent else None

    def _on_ready(self, link: AgentLink, worker: int, setup_s: float) -> None:
        crew = self._worker(link, worker)
        if crew is None:
            return
        crew.ready[link] = setup_s
        if len(crew.ready) == len(crew.ranks_by_agent) and crew.end is None:
            self._emit(WorkerReady(worker, max(crew.ready.values())))

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
    ) -> None:
        found = [self._engine.payloads.receive(link, told) for told in segments]
        crew = self._worker(link, worker)
        if crew is None:
            return
        told = [self._with_hint(CallFailure(*failure)) for failure in failures]
        done = crew.merge_done(link, BatchesDone(worker, message, found, seconds, told, peak, stages))
        if done is not None:
            self._emit(done)

    def _with_hint(self, failure: CallFailure) -> CallFailure:
        around = self._engine.agents.context
        found = missing_variable_hint(failure.error, failure.detail, around.environ, around.home.variables)
        if found:
            failure.error = f"{failure.error} ({found})"
        return failure

    def _on_returned(self, link: AgentLink, worker: int, message: int) -> None:
        crew = self._worker(link, worker)
        if crew is None or message not in crew.sent:
            return
        if len(crew.ranks_by_agent) > 1:
            # other ranks have it, and wait for those who will never begin
            self._engine.kill_worker(crew, WorkerLost(worker, LossCause.NODE_LOST, "a part of its input is lost"))
            return
        del crew.sent[message]
        self._emit(BatchesReturned(worker, message))

    def _on_stopped(self, link: AgentLink, worker: int) -> None:
        self._on_ended(link, worker, WorkerStopped(worker))

    def _on_lost(self, link: AgentLink, worker: int, cause: str, detail: str, crumbs: Any, peak: int) -> None:
        around = self._engine.agents.context
        found = missing_variable_hint(detail.partition("\n")[0], detail, around.environ, around.home.variables)
        if found:
            first, _, rest = detail.partition("\n")
            detail = f"{first} ({found})\n{rest}"
        self._on_ended(link, worker, protocol.decode_worker_lost(worker, cause, detail, crumbs, peak))

    def _on_ended(self, link: AgentLink, worker: int, end: WorkerLost | WorkerStopped) -> None:
        """On one of its nodes; a gang lives and dies together."""
        crew = self._worker(link, worker)
        if crew is None or link in crew.ended:
            return
        crew.ended.add(link)
        if crew.end is None or isinstance(crew.end, WorkerStopped):
            crew.end = end
        if not isinstance(end, WorkerStopped):
            for other in crew.ranks_by_agent:
                if other not in crew.ended:
                    other.send(("stop", worker, False, "another rank of it is gone"))
        if len(crew.ended) == len(crew.ranks_by_agent):
            self._engine.lose_worker(crew, crew.end)

    def _on_pids(self, link: AgentLink, worker: int, name: str, pids: tuple[int, ...]) -> None:  # noqa: ARG002 - as it is told
        crew = self._worker(link, worker)
        if crew is not None:
            crew.pids[link] = tuple(pids)
            self._engine.pids += pids

    def _on_port(self, link: AgentLink, worker: int, port: int) -> None:
        crew = self._engine.workers.get(worker)
        if crew is not None and link.hello is not None:
            crew.rendezvous = link.hello.address, port

    # --- what is asked

    def _on_seek(self, link: AgentLink, worker: int) -> None:
        """A worker there wants to call one of another node."""
        crew = self._engine.workers.get(worker)
        there = crew is not None and bool(crew.ranks_by_agent)
        if there and crew is not None:
            crew.callers.add(link)
        link.send(("found", worker, link.attach_object(crew.lead.peer) if there and crew is not None else None))
        link.flush()


_FIX_BLOCK = "write it to files that all nodes see, and read those: dataset.write_parquet(...)"
_FIX_SOURCE = "put it on storage that all nodes share, under the same path, or name an address such as s3://"
_FIX_SINK = (
    'write to storage that all nodes share, under the same path: sink="/shared/out.jsonl", --sink /shared/out.jsonl'
)
_FIX_RUN_DIR = (
    'run_dir="/shared/run" or --run-dir /shared/run, on storage that all nodes share: parts of results lie there'
)


def _version_problem(node: str, hello: AgentHello) -> tuple[str, str] | None:
    here = dovetail_version()
    if hello.version == here:
        return None
    theirs = hello.version or "of no version"
    return f"DT404 node {node} has Dovetail {theirs}, and here it is {here or 'of no version'}", _FIX_VERSION


def _storage_problem(node: str, hello: AgentHello, folder: Path) -> tuple[str, str] | None:
    """What is wrong, and what mends it; None: nothing."""
    if hello.missing_sources:
        more = f" and {len(hello.missing_sources) - 3} more" if len(hello.missing_sources) > 3 else ""
        return f"DT405 node {node} does not see the source: {', '.join(hello.missing_sources[:3])}{more}", _FIX_SOURCE
    if hello.unwritable_folders:
        ours = str(folder) in hello.unwritable_folders[0]
        where = hello.unwritable_folders[0] if ours else hello.unwritable_folders[0].rpartition("/")[0]
        return (
            f"DT401 node {node} does not see {where}, where workers write results",
            _FIX_RUN_DIR if ours else _FIX_SINK,
        )
    return None


def _last_error(text: str) -> str:
    """Of a traceback, what was raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in reversed(lines) if EXCEPTION_LINE.match(line)), lines[-1])


def is_runtime_env_error(error: BaseException) -> bool:
    """Whether Ray says of an agent that never was there that its runtime_env cannot be made."""
    return isinstance(error, TimeoutError) or NO_WORKER_MESSAGE in str(error)


def is_node_error(error: BaseException) -> bool:
    return isinstance(error, ActorUnschedulableError) or NODE_DIED_MESSAGE in str(error)


def _error_summary(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
