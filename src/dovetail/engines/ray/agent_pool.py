"""Agent pool of a run: starts, restarts and reuses agents, one per node and runtime_env. Driver side.

`engine` asks for the link to the agent of a node and starts workers through it; `node_loss` reports lost nodes. Agents
of a finished run stay idle for a while, for the next run of this process (`IDLE_AGENTS`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import time
from dataclasses import dataclass, field
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any

import ray
from ray.runtime_env import RuntimeEnv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dovetail.engines.local.code_pickle import PickledWorks
from dovetail.engines.local.memory_watch import FULL_SHARE
from dovetail.engines.ray import ray_private
from dovetail.engines.ray.agent import CONCURRENCY_GROUPS, Agent
from dovetail.engines.ray.agent_link import AgentLink, RestartAgent
from dovetail.engines.ray.protocol import MESSAGE_OVERHEAD_BYTES, AgentSetup
from dovetail.engines.runtime_env import ray_problems
from dovetail.errors import ConfigError, Problem
from dovetail.machine.host_usage import machine_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from dovetail.control.commands import HostedObject
    from dovetail.engines.local.code_pickle import PickledWork
    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.engines.ray.agent_link import AgentListener
    from dovetail.engines.ray.placement_groups import GroupReservation
    from dovetail.engines.ray.remote_worker import RemoteWorker
    from dovetail.engines.ray.worker_logs import LogPiece, ReceivedOffsets
    from dovetail.resources.cluster import Node

FIX_RUNTIME_ENV = "correct runtime_env= of the stage; for variables alone env= is enough"
FIXES_LOCAL_FOLDER = (
    "the address of a .zip that all nodes can read: s3://bucket/code.zip",
    'ray.init(runtime_env={"working_dir": ...}) in your program, and engine="ray:auto"',
)


PLUGINS_VARIABLE = "RAY_RUNTIME_ENV_PLUGINS"


def runtime_env_key(hosted: Iterable[HostedObject]) -> str:
    """The runtime_env of the stages as JSON, empty if there is none; the stages of a unit have the same one."""
    found: dict[str, Any] = {}
    for one in hosted:
        for stage in one.definition if isinstance(one.definition, tuple) else ():
            found |= getattr(stage, "runtime_env", None) or {}
    return json.dumps(found, sort_keys=True, default=str) if found else ""


def runtime_env_problems(name: str, runtime_env: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Problems of a stage's runtime_env: Ray rejects it, accepts it only in `ray.init`, which uploads local folders, or
    would ignore a part of it."""
    if not runtime_env:
        return
    has_plugins = bool(os.environ.get(PLUGINS_VARIABLE))  # they may define any key
    yield from ray_problems(name, runtime_env, runtime_env if has_plugins else RuntimeEnv.known_fields)
    try:
        made = RuntimeEnv(**json.loads(json.dumps(dict(runtime_env), default=str)))
    except Exception as error:  # its parts raise errors of many types
        yield _invalid_runtime_env(name, error, FIX_RUNTIME_ENV)
        return
    try:
        ray_private.require_no_local_paths(made)
    except Exception as error:
        yield _invalid_runtime_env(name, error, *FIXES_LOCAL_FOLDER)


def _invalid_runtime_env(name: str, error: Exception, *fixes: str) -> Problem:
    return Problem("DT403", f"stage {name!r}: invalid runtime_env: {error}", fixes=fixes)


def start_agent(node_id: str, runtime_env: str) -> Any:
    """The handle of a new agent, without waiting for its start. An agent requests no resources of Ray: the placement
    groups of the run hold those of its workers."""
    remote_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Agent)
    try:
        return remote_class.options(
            num_cpus=0,
            num_gpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env=json.loads(runtime_env) if runtime_env else None,
        ).remote()
    except (TypeError, ValueError) as error:
        if not runtime_env:
            raise
        message = f"invalid runtime_env {runtime_env}: {error}"  # not found by `runtime_env_problems`
        raise ConfigError(Problem("DT403", message, fixes=(FIX_RUNTIME_ENV,))) from None


MAX_AGENT_UNITS = 256
"""Code of hosted objects that an agent keeps; the code of others is sent again when it is needed."""
IDLE_KEEP_S = 60.0
IDLE_THREAD_NAME = "dovetail-idle"


class IdleAgents:
    """Agents without a run, by Ray job, node and runtime_env. They hold no resources of Ray, and end with this
    process."""

    def __init__(self, keep_s: float = IDLE_KEEP_S, kill: Callable[[Any], None] | None = None) -> None:
        self._keep_s = keep_s
        self._kill = kill or _kill_agent
        self._lock = Lock()
        self._kept: dict[tuple[str, str, str], list[tuple[float, Any]]] = {}
        """(expiry time, handle), in the order of arrival."""
        self._timer: Timer | None = None

    def take(self, node_id: str, runtime_env: str) -> Any:
        """An agent of an earlier run, which may have died; None if there is none."""
        with self._lock:
            kept = self._kept.get((_ray_job(), node_id, runtime_env))
            return kept.pop()[1] if kept else None

    def put(self, node_id: str, runtime_env: str, handle: Any) -> None:
        with self._lock:
            expiry = time.monotonic() + self._keep_s
            self._kept.setdefault((_ray_job(), node_id, runtime_env), []).append((expiry, handle))
            if self._timer is None:
                self._schedule_expiry(expiry)

    def _schedule_expiry(self, when: float) -> None:
        """One timer for all agents."""
        self._timer = Timer(max(0.0, when - time.monotonic()), self._expire)
        self._timer.name, self._timer.daemon = IDLE_THREAD_NAME, True
        self._timer.start()

    def _expire(self) -> None:
        with self._lock:
            now = time.monotonic()
            due = [handle for kept in self._kept.values() for expiry, handle in kept if expiry <= now]
            left = {key: [one for one in kept if one[0] > now] for key, kept in self._kept.items()}
            self._kept = {key: kept for key, kept in left.items() if kept}
            self._timer = None
            if self._kept:
                self._schedule_expiry(min(kept[0][0] for kept in self._kept.values()))
        for handle in due:
            self._kill(handle)


def _kill_agent(handle: Any) -> None:
    if ray.is_initialized():  # otherwise the call would start or join a Ray
        with contextlib.suppress(Exception):
            ray.kill(handle)


def _ray_job() -> str:
    """Identity of this process's connection to Ray; another one after it left and joined again."""
    return f"{ray_private.session_name()} {ray.get_runtime_context().get_job_id()}"


IDLE_AGENTS = IdleAgents()


FIRST_HELLO_TIMEOUT_S = 10.0
"""Limit for the hello of all agents, for which the first worker waits."""


RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.5, 10.0
STABLE_AGENT_S = 30.0
"""An agent that lived longer than this starts a new count of failures."""


def restart_delay_s(failed: int) -> float:
    """Delay before the next agent after a number of failures: Ray may still list a node that is gone."""
    return float(min(RESTART_DELAY_S * 2 ** min(failed - 1, 10), MAX_RESTART_DELAY_S))


@dataclass
class RayRunContext:
    """Settings and surroundings of a run on Ray."""

    run: str
    nodes: dict[str, Node]
    ids: dict[str, str]
    """Node -> Ray's id; only nodes that are in the cluster now."""
    driver_context: DriverContext
    token: str = ""
    """Content of a marker file in the run folder, by which agents check that they see the same folder."""
    memory_bytes: int = 0
    """Memory for payloads on each node; 0: a share of its memory."""
    pin_cpus: bool = False
    memory_full: float = FULL_SHARE
    """Used share of a node's memory at which a worker is killed."""
    source_paths: tuple[str, ...] = ()
    """Source files and folders that all agents must see."""
    sink_folders: tuple[tuple[str, str], ...] = ()
    """Folders into which workers write results, each with the content of its marker file."""
    stores: dict[str, int] = field(default_factory=dict)
    """Node -> size of Ray's object store in bytes, where known."""
    reservation: GroupReservation | None = None
    discover: Callable[[], Any] | None = None
    """Discovers the nodes of the cluster; called by the thread of `ClusterWatcher`."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment of the driver, for hints about variables that workers do not have."""


class AgentPool:
    """Thread: loop only."""

    def __init__(self, folder: Path, context: RayRunContext, listener: AgentListener) -> None:
        self.folder = folder
        self.context = context
        self._listener = listener
        self._links: dict[tuple[str, str], AgentLink] = {}
        self.returning: set[str] = set()
        """Nodes whose agent was lost; they count as left until a new agent answers."""
        self.has_begun = self.is_refused = False
        """Whether workers may be started; whether the run was refused, because a node does not see the source or the
        sink."""
        self._shipped = PickledWorks()
        self._failed: dict[str, int] = {}
        """Node -> number of agents that died in quick succession."""
        self._restarting: dict[str, set[str]] = {}
        """Node that waits for new agents -> their runtime_envs."""

    def links(self) -> list[AgentLink]:
        return list(self._links.values())

    def link(self, node: str, runtime_env: str) -> AgentLink | None:
        """Link to this agent, which may not be up yet; None: no such node, or it waits for a restart."""
        found = self._links.get((node, runtime_env))
        if found is None and node in self.context.ids and not self.is_restarting(node):
            found = self._start_link(node, runtime_env)
        return found

    def _start_link(self, node: str, runtime_env: str) -> AgentLink:
        context = self.context
        setup = AgentSetup(
            f"{context.run} {secrets.token_hex(4)}",
            node,
            runtime_env,
            str(self.folder),
            context.token,
            context.driver_context,
            context.memory_bytes,
            context.pin_cpus,
            context.memory_full,
            context.source_paths,
            context.sink_folders,
            machine_id(),
        )
        idle = IDLE_AGENTS.take(context.ids[node], runtime_env) if node not in self.returning else None
        handle = start_agent(context.ids[node], runtime_env) if idle is None else idle
        link = AgentLink(node, runtime_env, handle, setup, is_reused=idle is not None)
        self._links[node, runtime_env] = link
        self._listener.add(link)
        return link

    def can_begin(self, workers: Collection[RemoteWorker]) -> bool:
        """Whether workers may be started. The first one waits for the hello of all agents: if a node does not see the
        source or the sink, the run must fail before it has any effect."""
        if not self.has_begun and not self.is_refused:
            links = [self.link(node, worker.runtime_env) for worker in workers for node in worker.nodes]
            late = time.monotonic() - FIRST_HELLO_TIMEOUT_S
            checks_storage = bool(self.context.source_paths or self.context.sink_folders)
            self.has_begun = not checks_storage or all(
                link is None or link.is_up or link.started_at < late for link in links
            )
        return self.has_begun

    def shipped(self, hosted: HostedObject) -> PickledWork:
        """The pickled code of a hosted object; pickled once for all workers."""
        return self._shipped.get(hosted)

    def start(self, link: AgentLink, worker: RemoteWorker, devices: dict[int, str]) -> None:
        if devices != link.devices:
            link.devices = dict(devices)
            link.send(("devices", devices))
        for hosted in worker.command.hosted:
            code = self.shipped(hosted)
            definition = (code, hosted.slots, hosted.writer)
            known = link.units.pop(hosted.name, None)
            link.units[hosted.name] = definition  # the last one: it was used last
            if known != definition:
                writer = None if hosted.writer is None else pickle.dumps(hosted.writer, 5)
                link.send(("unit", hosted.name, code, hosted.slots, writer), MESSAGE_OVERHEAD_BYTES + len(code.code))
        while len(link.units) > max(MAX_AGENT_UNITS, len(worker.names)):
            oldest = next(iter(link.units))
            del link.units[oldest]
            link.send(("forget_unit", oldest))
        ranks, command = worker.ranks_by_agent[link], worker.command
        more = (command.context, command.rendezvous_seed)
        op = ("start", worker.number, command.seats, worker.names, ranks, worker.rendezvous, *more)
        link.send(op, MESSAGE_OVERHEAD_BYTES + len(command.context))

    def on_node_lost(self, node: str) -> bool:
        """Drop the agents of a node. True if Ray still lists it: then new agents are started after a delay."""
        gone = [self._links.pop(key) for key in [key for key in self._links if key[0] == node]]
        if node not in self.context.ids:
            self.returning.discard(node)
            self._restarting.pop(node, None)
            return False
        self.returning.add(node)
        if not self.is_restarting(node):
            lived_s = time.monotonic() - max((link.started_at for link in gone), default=0.0)
            self._failed[node] = failed = 1 if lived_s > STABLE_AGENT_S else self._failed.get(node, 0) + 1
            self._restarting[node] = {link.runtime_env for link in gone} or {""}
            self._listener.schedule(restart_delay_s(failed), RestartAgent(node))
        return True

    def is_restarting(self, node: str) -> bool:
        """Whether its agent died and the next one is not started yet."""
        return node in self._restarting

    def restart(self, node: str) -> None:
        """Start the agents of a node again, after the delay."""
        for runtime_env in sorted(self._restarting.pop(node, ())):
            self._start_link(node, runtime_env)

    def _keep_idle(self, link: AgentLink) -> None:
        """Keep the agent for the next run of this process."""
        if link.node in self.context.ids and not link.runtime_env:  # a runtime_env may refer to a file that changes
            link.lost_reason = "closed"
            IDLE_AGENTS.put(self.context.ids[link.node], link.runtime_env, link.handle)

    def replace(self, link: AgentLink) -> None:
        """Replace an idle agent that had died by a new one; no worker was started yet."""
        link.lost_reason = "it died while it was idle"
        del self._links[link.node, link.runtime_env]
        self._start_link(link.node, link.runtime_env)

    def flush(self, *, frees: bool = False) -> None:
        for link in self._links.values():
            link.flush(frees=frees)

    def close(self, wait_s: float, received: ReceivedOffsets) -> list[LogPiece]:
        """The last output of workers, beyond what was received. Agents close by themselves, which removes their files;
        those that do not within the limit are killed."""
        links = [link for link in self._links.values() if not link.lost_reason]
        printed: list[LogPiece] = []
        with contextlib.suppress(Exception):
            closing = {link.close(received): link for link in links if link.is_up}
            ready = ray.wait(list(closing), num_returns=len(closing), timeout=wait_s)[0] if closing else []
            for ref in ready:
                with contextlib.suppress(Exception):
                    printed += ray.get(ref)
                    self._keep_idle(closing[ref])
        for link in links:
            if not link.lost_reason:
                link.lost_reason = "closed"
                with contextlib.suppress(Exception):
                    ray.kill(link.handle)
        return printed
