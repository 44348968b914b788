"""Agent pool of a run: starting, restarting and reusing agents, their runtime_env, and what they need before the first
worker. Driver side."""

from __future__ import annotations

import contextlib
import json
import pickle
import secrets
import time
from dataclasses import dataclass, field
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any

import ray
from ray.runtime_env import RuntimeEnv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dovetail.engines.local.code_pickle import pickle_hosted
from dovetail.engines.local.memory_watch import FULL_SHARE
from dovetail.engines.ray import ray_private
from dovetail.engines.ray.agent import CONCURRENCY_GROUPS, Agent
from dovetail.engines.ray.agent_link import AgentLink, RestartAgent
from dovetail.engines.ray.protocol import MESSAGE_OVERHEAD_BYTES, AgentSetup
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from dovetail.control.commands import HostedObject
    from dovetail.engines.local.code_pickle import PickledWork
    from dovetail.engines.local.worker_spec import DriverContext
    from dovetail.engines.ray.agent_link import AgentListener
    from dovetail.engines.ray.placement_groups import Reservation
    from dovetail.engines.ray.remote_worker import RemoteWorker
    from dovetail.engines.ray.worker_logs import LogPiece
    from dovetail.resources.cluster import Node

FIX_RUNTIME_ENV = "correct runtime_env= of the stage; for variables alone env= is enough"
FIXES_LOCAL_FOLDER = (
    "the address of a .zip that all nodes can read: s3://bucket/code.zip",
    'or ray.init(runtime_env={"working_dir": ...}) in your program, and engine="ray:auto"',
)


def runtime_env_key(hosted: Iterable[HostedObject]) -> str:
    """The runtime_env that the stages ask for, as a text; those of a unit agree on it."""
    found: dict[str, Any] = {}
    for one in hosted:
        for stage in one.definition if isinstance(one.definition, tuple) else ():
            found |= getattr(stage, "runtime_env", None) or {}
    return json.dumps(found, sort_keys=True, default=str) if found else ""


def check_runtime_env(name: str, runtime_env: Mapping[str, Any] | None) -> None:
    """ConfigError: Ray does not take it, or only from `ray.init`, which packs folders of this machine."""
    if not runtime_env:
        return
    try:
        made = RuntimeEnv(**json.loads(json.dumps(dict(runtime_env), default=str)))
    except Exception as error:  # whatever its many parts raise
        raise _runtime_env_error(name, error, FIX_RUNTIME_ENV) from None
    try:
        ray_private.require_no_local_paths(made)
    except Exception as error:
        raise _runtime_env_error(name, error, *FIXES_LOCAL_FOLDER) from None


def _runtime_env_error(name: str, error: Exception, *fixes: str) -> ConfigError:
    return ConfigError(Problem("DT403", f"the runtime_env of stage {name!r} cannot be used: {error}", fixes=fixes))


def start_agent(node_id: str, kind: str) -> Any:
    """Its handle, at once. It takes nothing of what Ray counts: the run's placement groups do."""
    made = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Agent)
    try:
        return made.options(
            num_cpus=0,
            num_gpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env=json.loads(kind) if kind else None,
        ).remote()
    except (TypeError, ValueError) as error:
        if not kind:
            raise
        message = f"the runtime_env {kind} cannot be used: {error}"  # which no check has found
        raise ConfigError(Problem("DT403", message, fixes=(FIX_RUNTIME_ENV,))) from None


IDLE_KEEP_S = 60.0
IDLE_THREAD_NAME = "dovetail-idle"


class IdleAgents:
    """Agents by Ray job, node and runtime_env. They hold nothing that Ray counts, and end with this process."""

    def __init__(self, kept_s: float = IDLE_KEEP_S, end: Callable[[Any], None] | None = None) -> None:
        self._kept_s = kept_s
        self._end = end or _kill_agent
        self._lock = Lock()
        self._kept: dict[tuple[str, str, str], list[tuple[float, Any]]] = {}
        """Those that came last at the end, each with the time when it is kept no longer."""
        self._timer: Timer | None = None

    def take(self, node_id: str, kind: str) -> Any:
        """An agent of an earlier run, perhaps dead by now; None: there is none."""
        with self._lock:
            kept = self._kept.get((_ray_job(), node_id, kind))
            return kept.pop()[1] if kept else None

    def put(self, node_id: str, kind: str, handle: Any) -> None:
        with self._lock:
            until = time.monotonic() + self._kept_s
            self._kept.setdefault((_ray_job(), node_id, kind), []).append((until, handle))
            if self._timer is None:
                self._schedule_expiry(until)

    def _schedule_expiry(self, when: float) -> None:
        """One timer for all of them."""
        self._timer = Timer(max(0.0, when - time.monotonic()), self._expire)
        self._timer.name, self._timer.daemon = IDLE_THREAD_NAME, True
        self._timer.start()

    def _expire(self) -> None:
        with self._lock:
            now = time.monotonic()
            due = [handle for kept in self._kept.values() for until, handle in kept if until <= now]
            left = {key: [one for one in kept if one[0] > now] for key, kept in self._kept.items()}
            self._kept = {key: kept for key, kept in left.items() if kept}
            self._timer = None
            if self._kept:
                self._schedule_expiry(min(kept[0][0] for kept in self._kept.values()))
        for handle in due:
            self._end(handle)


def _kill_agent(handle: Any) -> None:
    if ray.is_initialized():  # else Ray would be started, or joined, to say it
        with contextlib.suppress(Exception):
            ray.kill(handle)


def _ray_job() -> str:
    """This process's membership in a Ray: another after it left and joined again."""
    return f"{ray_private.session_name()} {ray.get_runtime_context().get_job_id()}"


IDLE_AGENTS = IdleAgents()


FIRST_HELLO_TIMEOUT_S = 10.0
"""The first worker waits no longer until all agents have told what they see."""


RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.5, 10.0
STABLE_AGENT_S = 30.0
"""An agent that lived longer died of something new."""


def restart_delay_s(failed: int) -> float:
    """Before the next agent, after so many have died: a node may be gone that Ray believes in."""
    return float(min(RESTART_DELAY_S * 2 ** min(failed - 1, 10), MAX_RESTART_DELAY_S))


@dataclass
class RayRunContext:
    """What a run on Ray is given."""

    run: str
    nodes: dict[str, Node]
    ids: dict[str, str]
    """Node -> what Ray calls it. Only those that are there."""
    home: DriverContext
    token: str = ""
    """Lies in the run's folder, so that agents can tell whether they see it."""
    memory_bytes: int = 0
    """What payloads may fill on each node; 0: a share of its memory."""
    pin_cpus: bool = False
    memory_full: float = FULL_SHARE
    """The share of a node's memory at which a worker must go."""
    source_paths: tuple[str, ...] = ()
    """Paths that all agents must see."""
    sink_folders: tuple[tuple[str, str], ...] = ()
    """Folders into which workers write results, with what lies in each as in the run's folder."""
    stores: dict[str, int] = field(default_factory=dict)
    """Node -> bytes of Ray's object store there, as far as known."""
    reservation: Reservation | None = None
    discover: Callable[[], Any] | None = None
    """Finds out which nodes are there (discovery.Seen); called once per second, in a thread of its own."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Of the driver, to tell who misses a variable of it."""


class AgentPool:
    """For the thread of the loop."""

    def __init__(self, folder: Path, around: RayRunContext, listener: AgentListener) -> None:
        self.folder = folder
        self.context = around
        self._listener = listener
        self._links: dict[tuple[str, str], AgentLink] = {}
        self.returning: set[str] = set()
        """Nodes whose agent was lost, and that count as gone until another one answers from there."""
        self.has_begun = self.is_refused = False
        """Whether workers may be started; whether they never will, because a node does not see what it should."""
        self._shipped: dict[int, tuple[object, PickledWork]] = {}
        self._failed: dict[str, int] = {}
        """How many agents of a node have died, one soon after the other."""
        self._restarting: dict[str, set[str]] = {}
        """Node -> the kinds of agents that were there, and will be again."""

    def links(self) -> list[AgentLink]:
        return list(self._links.values())

    def link(self, node: str, kind: str) -> AgentLink | None:
        """That agent, perhaps not up yet; None: there is no such node, or it `pauses`."""
        found = self._links.get((node, kind))
        if found is None and node in self.context.ids and not self.is_restarting(node):
            found = self._start_link(node, kind)
        return found

    def _start_link(self, node: str, kind: str) -> AgentLink:
        around = self.context
        setup = AgentSetup(
            f"{around.run} {secrets.token_hex(4)}",
            node,
            kind,
            str(self.folder),
            around.token,
            around.home,
            around.memory_bytes,
            around.pin_cpus,
            around.memory_full,
            around.source_paths,
            around.sink_folders,
        )
        idle = IDLE_AGENTS.take(around.ids[node], kind) if node not in self.returning else None
        handle = start_agent(around.ids[node], kind) if idle is None else idle
        link = AgentLink(node, kind, handle, setup, used=idle is not None)
        self._links[node, kind] = link
        self._listener.add(link)
        return link

    def can_begin(self, crews: Collection[RemoteWorker]) -> bool:
        """Whether workers may be started. The first waits until all agents have told what they see: if one does not
        see the source or the sink, nothing shall have happened."""
        if not self.has_begun and not self.is_refused:
            links = [self.link(node, crew.runtime_env) for crew in crews for node in crew.nodes]
            late = time.monotonic() - FIRST_HELLO_TIMEOUT_S
            asked = bool(self.context.source_paths or self.context.sink_folders)
            self.has_begun = not asked or all(link is None or link.is_up or link.started_at < late for link in links)
        return self.has_begun

    def shipped(self, hosted: HostedObject) -> PickledWork:
        """Its code; packed once for all workers."""
        found = self._shipped.get(id(hosted.definition))
        if found is None:
            found = self._shipped[id(hosted.definition)] = hosted.definition, pickle_hosted(hosted)
        return found[1]

    def start(self, link: AgentLink, crew: RemoteWorker, devices: dict[int, str]) -> None:
        if devices != link.devices:
            link.devices = dict(devices)
            link.send(("devices", devices))
        for hosted in crew.command.hosted:
            code = self.shipped(hosted)
            told = (code, hosted.slots, hosted.writer)
            if link.units.get(hosted.name) != told:
                link.units[hosted.name] = told
                writer = None if hosted.writer is None else pickle.dumps(hosted.writer, 5)
                link.send(("unit", hosted.name, code, hosted.slots, writer), MESSAGE_OVERHEAD_BYTES + len(code.code))
        link.send(("start", crew.number, crew.command.seats, crew.names, crew.ranks_by_agent[link], crew.rendezvous))

    def on_node_lost(self, node: str) -> bool:
        """Its agents are dead. Whether the node may come back: then another agent follows in a while."""
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
        """Whether its agent is dead, and the next one not started yet."""
        return node in self._restarting

    def restart(self, node: str) -> None:
        """The pause is over."""
        for kind in sorted(self._restarting.pop(node, ())):
            self._start_link(node, kind)

    def _keep_idle(self, link: AgentLink) -> None:
        """For the next run of this process."""
        if link.node in self.context.ids and not link.runtime_env:  # a runtime_env may name a file that changes
            link.lost_reason = "closed"
            IDLE_AGENTS.put(self.context.ids[link.node], link.runtime_env, link.handle)

    def replace(self, link: AgentLink) -> None:
        """By a new agent; nobody was started there yet."""
        link.lost_reason = "it died while it was idle"
        del self._links[link.node, link.runtime_env]
        self._start_link(link.node, link.runtime_env)

    def flush(self, *, frees: bool = False) -> None:
        for link in self._links.values():
            link.flush(frees=frees)

    def close(self, wait_s: float) -> list[LogPiece]:
        """What workers printed last. Agents leave by themselves if they can, so that what they wrote is tidied up; then
        they are killed."""
        links = [link for link in self._links.values() if not link.lost_reason]
        printed: list[LogPiece] = []
        with contextlib.suppress(Exception):
            leaving = {link.close(): link for link in links if link.is_up}
            ready = ray.wait(list(leaving), num_returns=len(leaving), timeout=wait_s)[0] if leaving else []
            for ref in ready:
                with contextlib.suppress(Exception):
                    printed += ray.get(ref)
                    self._keep_idle(leaving[ref])
        for link in links:
            if not link.lost_reason:
                link.lost_reason = "closed"
                with contextlib.suppress(Exception):
                    ray.kill(link.handle)
        return printed
