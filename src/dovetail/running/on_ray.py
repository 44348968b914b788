"""How does a run take place on Ray? It is attached to, looked at, claimed from, and its agents are told what to do."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dovetail.engines.local.limits import SHARE_OF_MEMORY
from dovetail.engines.local.spec import Home
from dovetail.engines.ray.attaching import Where, attach
from dovetail.engines.ray.auto_init import AUTO_INIT
from dovetail.engines.ray.discovery import discover
from dovetail.engines.ray.variables import to_send
from dovetail.errors import ConfigError, Problem
from dovetail.running.handle import end_before_others
from dovetail.running.ray_looks import Looks
from dovetail.scheduling.planner import plan_again

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.running.claiming import Place
    from dovetail.running.sites import Needs, Workers
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.options import Options

HOP_S = 0.003
"""What a message to a worker costs, there and back, about."""
MESSAGE_S, MESSAGE_ITEMS = 0.1, 4096
"""Larger messages than on one machine: each costs more."""
SHARE_OF_STORE = 2
"""Payloads on their way between nodes may fill one part in so many of Ray's object stores."""


class OnRay:
    """A Ray cluster: one of our own on this machine, or one that is there already."""

    def __init__(self, engine: str, share: float | None, env_from: tuple[str, ...]) -> None:
        self._variables = to_send(os.environ, env_from)
        self.engine = engine
        self._share = share
        self.attached = attach(Where.parse(engine))
        end_before_others()
        self._looks = Looks(discover())

    def cluster(self, asked: Cluster | str) -> Cluster | str:
        if asked != "auto":
            message = "on Ray the cluster is what Ray has; cluster= is for this machine and for simulations"
            fixes = ('cluster="auto"', "share=0.5 (--share 0.5) uses at most half of it")
            raise ConfigError(Problem("DT402", message, fixes=fixes))
        return self._looks.seen.cluster

    def check(self, pipeline: Pipeline) -> None:
        from dovetail.engines.ray.starting import check_runtime_env

        for stage in pipeline.stages:
            check_runtime_env(stage.name, stage.runtime_env)

    def adopted(self, plan: Plan, *, earlier: bool) -> tuple[Plan, Callable[[Cluster], Plan] | None]:
        cluster = self._looks.seen.cluster
        if not earlier:
            plan.require_cluster(cluster)
            return plan, None
        planned = partial(plan_again, plan)  # its nodes may be gone, and what it has spooled is for its units
        return planned(cluster), planned

    def place(self, run: str, alone: Plan, planned: Callable[[Cluster], Plan] | None, *, wait: bool) -> Place:
        from dovetail.running.claiming_ray import place_on_ray

        with AUTO_INIT.kept_off():
            return place_on_ray(run, alone, planned, wait=wait, looks=self._looks, share=self._share)

    def workers(self, place: Place, needs: Needs) -> Workers:
        from dovetail.engines.ray.engine import RayEngine
        from dovetail.engines.ray.fleet import Surroundings
        from dovetail.engines.ray.sharing import mark

        cluster = place.plan.cluster
        variables = {**self._variables, "RAY_ADDRESS": self.attached.address}
        local = tuple(path for path in needs.files if "://" not in path)
        around = Surroundings(
            run=needs.folder.name,
            nodes={node.name: node for node in cluster.nodes},
            ids=dict(place.holdings.ids if place.holdings is not None else self._looks.seen.ids),
            home=Home(tuple(map(str, sys.path)), _folder(), variables),
            token=mark(needs.folder),
            memory_bytes=min(node.memory_bytes for node in cluster.nodes) // SHARE_OF_MEMORY,
            pin_cpus=needs.pin_cpus,
            asks=local,
            writes=tuple((folder, mark(folder)) for folder in needs.writes),
            stores=dict(self._looks.seen.object_store_bytes),
            holdings=place.holdings,
            look=self._looks,
            environ=dict(os.environ),
        )
        return RayEngine(needs.folder, around)

    def options(self, options: Options, *, given: bool) -> Options:
        """A lost node takes payloads with it: results are delivered by whole epochs."""
        found = replace(options, payloads_survive=False, eager=False)
        stores = sum(self._looks.seen.object_store_bytes.values())
        if stores:
            found = replace(found, byte_budget=min(found.byte_budget, stores // SHARE_OF_STORE))
        if given:
            return found
        return replace(found, hop_s=HOP_S, message_s=max(found.message_s, MESSAGE_S), message_items=MESSAGE_ITEMS)


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return ""
