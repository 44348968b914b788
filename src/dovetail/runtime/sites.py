"""`Site`: where a run executes (this machine or Ray), and everything that differs between the two."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.control.engine import Engine
from dovetail.data.interfaces import PayloadStore
from dovetail.engines.payload_memory import PAYLOAD_MEMORY_DIVISOR
from dovetail.engines.ray.address import is_ray_engine
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from dovetail.control.commands import HostedObject
    from dovetail.control.payload import Segment
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.admission import Admission
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import StreamOptions

    PlanFactory = Callable[[Cluster], Plan]
    """Plans for the resources that others leave free."""

HOP_S = 0.0002
"""Approximate cost of a message to a process on this machine."""


class RunEngine(Engine, PayloadStore, Protocol):
    """The engine interface of runs."""

    keep_spool: bool
    """Whether the spool is kept for a later resume."""

    def prepare(self, hosted: Iterable[HostedObject]) -> None: ...

    def nudge(self) -> None: ...

    def spool_record(self, segment: Segment) -> list[Any] | None: ...

    def from_spool_record(self, kept: list[Any]) -> Segment | None: ...

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]: ...

    def is_ready(self, worker: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Files and folders that a run needs on the machines of its workers."""

    folder: Path
    pin_cpus: bool = False
    files: tuple[str, ...] = ()
    """Files that workers read."""
    writes: tuple[str, ...] = ()
    """Folders that workers write results to."""


class HasRuntimeEnv(Protocol):
    """A stage or a role."""

    @property
    def name(self) -> str: ...

    @property
    def runtime_env(self) -> Mapping[str, Any] | None: ...


class Site(Protocol):
    engine: str

    def cluster(self, asked: Cluster | str) -> Cluster | str:
        """The cluster to plan for."""
        ...

    def check_runtime_envs(self, parts: Iterable[HasRuntimeEnv]) -> None:
        """Raises ConfigError if stages or roles need something that the site does not support."""
        ...

    def adapt_plan(self, plan: Plan, *, earlier: bool) -> tuple[Plan, PlanFactory | None]:
        """An existing plan adapted to the site, and a function that plans for what others leave free. `earlier`: the
        plan of a resumed run; otherwise the user passed it."""
        ...

    def admit(
        self, run: str, alone: Plan, planned: PlanFactory | None, *, wait: bool, timeout_s: float | None = None
    ) -> Admission:
        """`timeout_s`: limit for waiting; None: no limit."""
        ...

    def start_engine(self, admission: Admission, needs: WorkerEnvironment) -> RunEngine: ...

    def adjust_options(self, options: StreamOptions, *, given: bool) -> StreamOptions:
        """The options with the values that the site requires; `given`: the user passed them."""
        ...


class LocalSite:
    """Local processes on this machine."""

    engine = "local"

    def cluster(self, asked: Cluster | str) -> Cluster | str:
        return asked

    def check_runtime_envs(self, parts: Iterable[HasRuntimeEnv]) -> None:
        given = [part for part in parts if part.runtime_env]
        if not given:
            return
        from dovetail.engines.runtime_env import local_problems  # late: few pipelines need it

        problems = [one for part in given for one in local_problems(part.name, part.runtime_env)]
        if problems:
            raise ConfigError(problems)

    def adapt_plan(self, plan: Plan, *, earlier: bool) -> tuple[Plan, PlanFactory | None]:  # noqa: ARG002 - part of the interface
        return plan, None

    def admit(
        self, run: str, alone: Plan, planned: PlanFactory | None, *, wait: bool, timeout_s: float | None = None
    ) -> Admission:
        from dovetail.runtime.admission import admit

        return admit(run, alone, planned, wait=wait, timeout_s=timeout_s)

    def start_engine(self, admission: Admission, needs: WorkerEnvironment) -> RunEngine:
        from dovetail.engines.local.engine import LocalEngine

        cluster = admission.plan.cluster
        memory_bytes = sum(node.memory_bytes for node in cluster.nodes) // PAYLOAD_MEMORY_DIVISOR
        return LocalEngine(needs.folder, cluster, memory_bytes=memory_bytes, pin_cpus=needs.pin_cpus)

    def adjust_options(self, options: StreamOptions, *, given: bool) -> StreamOptions:
        return (
            replace(options, payloads_survive=True) if given else replace(options, payloads_survive=True, hop_s=HOP_S)
        )


def open_site(engine: str, *, share: float | None, env_from: tuple[str, ...]) -> Site:
    """Imports and contacts Ray only for a Ray engine."""
    if not is_ray_engine(engine):
        if env_from:  # local workers have all variables of the driver: only those that are not set are an error
            from dovetail.engines.ray.environment import select_variables

            select_variables(os.environ, env_from)
        return LocalSite()
    from dovetail.runtime.ray_site import RaySite

    return RaySite(engine, share, env_from)
