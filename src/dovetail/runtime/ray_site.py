"""Execution on a Ray cluster: attach, discover nodes under stable names, admit the run, start the engine."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dovetail.engines.local.worker_spec import RAY_NAMESPACE_VARIABLE, DriverContext
from dovetail.engines.payload_memory import OBJECT_STORE_DIVISOR, PAYLOAD_MEMORY_DIVISOR
from dovetail.engines.ray.attachment import AUTO_INIT, RayAddress, attach
from dovetail.engines.ray.discovery import discover
from dovetail.engines.ray.environment import select_variables
from dovetail.errors import ConfigError, Problem
from dovetail.runtime.run_handle import register_exit_handler
from dovetail.scheduling.planner import plan_on_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dovetail.engines.ray.discovery import DiscoveredCluster
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.admission import Admission
    from dovetail.runtime.sites import HasRuntimeEnv, RunEngine, WorkerEnvironment
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import StreamOptions


class NodeDiscovery:
    """Discovers the nodes of a Ray cluster under stable names. Thread: any."""

    def __init__(self, seen: DiscoveredCluster, look: Callable[..., DiscoveredCluster] = discover) -> None:
        """`seen`: the first result; `look` receives the names and ids of all nodes ever seen."""
        self.latest = seen
        self._known = dict(seen.ids)
        self._look = look
        self._lock = threading.Lock()

    def __call__(self) -> DiscoveredCluster:
        with self._lock:
            self.latest = self._look(known=dict(self._known))
            self._known |= self.latest.ids
            return self.latest


HOP_S = 0.003
"""Approximate round-trip time of a message to a worker."""
MIN_MESSAGE_S, MAX_MESSAGE_ITEMS = 0.1, 4096
"""Larger messages than on one machine, because each costs more."""


class RaySite:
    """A Ray cluster: a private one on this machine, or a running one."""

    def __init__(self, engine: str, share: float | None, env_from: tuple[str, ...]) -> None:
        self._variables = select_variables(os.environ, env_from)
        self.engine = engine
        self._share = share
        self.attached = attach(RayAddress.parse(engine))
        register_exit_handler()
        self._discovery = NodeDiscovery(discover())

    def cluster(self, asked: Cluster | str) -> Cluster | str:
        if asked != "auto":
            message = "cluster= cannot be used with Ray: the cluster is that of Ray"
            fixes = ('cluster="auto"', "to use at most half of it: share=0.5 (--share 0.5)")
            raise ConfigError(Problem("DT402", message, fixes=fixes))
        return self._discovery.latest.cluster

    def check_runtime_envs(self, parts: Iterable[HasRuntimeEnv]) -> None:
        from dovetail.engines.ray.agent_pool import runtime_env_problems

        problems = [one for part in parts for one in runtime_env_problems(part.name, part.runtime_env)]
        if problems:
            raise ConfigError(problems)

    def adapt_plan(self, plan: Plan, *, earlier: bool) -> tuple[Plan, Callable[[Cluster], Plan] | None]:
        cluster = self._discovery.latest.cluster
        if not earlier:
            plan.require_cluster(cluster)
            return plan, None
        planned = partial(plan_on_cluster, plan)  # its nodes may have left; spooled items belong to its units
        return planned(cluster), planned

    def admit(
        self,
        run: str,
        alone: Plan,
        planned: Callable[[Cluster], Plan] | None,
        *,
        wait: bool,
        timeout_s: float | None = None,
    ) -> Admission:
        from dovetail.runtime.ray_admission import admit_on_ray

        with AUTO_INIT.disabled():
            return admit_on_ray(
                run, alone, planned, wait=wait, discovery=self._discovery, share=self._share, timeout_s=timeout_s
            )

    def start_engine(self, admission: Admission, needs: WorkerEnvironment) -> RunEngine:
        from dovetail.engines.ray.agent_pool import RayRunContext
        from dovetail.engines.ray.engine import RayEngine
        from dovetail.engines.ray.shared_storage import write_marker

        cluster = admission.plan.cluster
        ray_variables = {"RAY_ADDRESS": self.attached.address, RAY_NAMESPACE_VARIABLE: self.attached.namespace}
        variables = {**self._variables, **ray_variables}
        local = tuple(path for path in needs.files if "://" not in path)
        context = RayRunContext(
            run=needs.folder.name,
            nodes={node.name: node for node in cluster.nodes},
            ids=dict(admission.reservation.ids if admission.reservation is not None else self._discovery.latest.ids),
            driver_context=DriverContext(tuple(map(str, sys.path)), _current_folder(), variables),
            token=write_marker(needs.folder),
            memory_bytes=min(node.memory_bytes for node in cluster.nodes) // PAYLOAD_MEMORY_DIVISOR,
            pin_cpus=needs.pin_cpus,
            source_paths=local,
            sink_folders=tuple((folder, write_marker(folder)) for folder in needs.writes),
            stores=dict(self._discovery.latest.object_store_bytes),
            reservation=admission.reservation,
            discover=self._discovery,
            environ=dict(os.environ),
        )
        return RayEngine(needs.folder, context)

    def adjust_options(self, options: StreamOptions, *, given: bool) -> StreamOptions:
        """Payloads are lost with their node, so results are delivered by whole epochs."""
        found = replace(options, payloads_survive=False, eager=False)
        stores = sum(self._discovery.latest.object_store_bytes.values())
        if stores:
            found = replace(found, byte_budget=min(found.byte_budget, stores // OBJECT_STORE_DIVISOR))
        if given:
            return found
        return replace(
            found,
            hop_s=HOP_S,
            target_message_s=max(found.target_message_s, MIN_MESSAGE_S),
            max_message_items=MAX_MESSAGE_ITEMS,
        )


def _current_folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return ""
