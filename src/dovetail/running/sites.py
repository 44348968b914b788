"""Where does a run take place? On this machine, or on a Ray cluster: everything that differs between them is here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.control.engine import Engine
from dovetail.data.ends import Store
from dovetail.engines.local.limits import SHARE_OF_MEMORY
from dovetail.engines.ray.where import is_ray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from dovetail.control.commands import Hosted
    from dovetail.control.segments import Segment
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.running.claiming import Place
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.options import Options

    Planned = Callable[[Cluster], Plan]
    """Makes a plan for what others leave."""

HOP_S = 0.0002
"""What a message to a process on this machine costs, about."""


class Workers(Engine, Store, Protocol):
    """An engine with all that a run wants of it."""

    keep_spool: bool
    """Whether what lies in the spool is needed by who goes on with the run."""

    def prepare(self, hosted: Iterable[Hosted]) -> None: ...

    def nudge(self) -> None: ...

    def keepsake(self, segment: Segment) -> list[Any] | None: ...

    def from_keepsake(self, kept: list[Any]) -> Segment | None: ...

    def processes(self) -> Mapping[int, tuple[str, tuple[int, ...]]]: ...

    def is_ready(self, worker: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run wants of the place where its workers are."""

    folder: Path
    pin_cpus: bool = False
    files: tuple[str, ...] = ()
    """What workers read."""
    writes: tuple[str, ...] = ()
    """Folders into which they write results."""


class Site(Protocol):
    engine: str

    def cluster(self, asked: Cluster | str) -> Cluster | str:
        """What to plan for."""
        ...

    def check(self, pipeline: Pipeline) -> None:
        """ConfigError: it asks for something that cannot be had here."""
        ...

    def adopted(self, plan: Plan, *, earlier: bool) -> tuple[Plan, Planned | None]:
        """A plan that was not made just now, as it can run here, and how one is made for what others leave. `earlier`:
        that of the run that goes on; else somebody has given it."""
        ...

    def place(self, run: str, alone: Plan, planned: Planned | None, *, wait: bool) -> Place: ...

    def workers(self, place: Place, needs: Needs) -> Workers: ...

    def options(self, options: Options, *, given: bool) -> Options:
        """As this place demands them; `given`: by the user."""
        ...


class Here:
    """This machine."""

    engine = "local"

    def cluster(self, asked: Cluster | str) -> Cluster | str:
        return asked

    def check(self, pipeline: Pipeline) -> None: ...

    def adopted(self, plan: Plan, *, earlier: bool) -> tuple[Plan, Planned | None]:  # noqa: ARG002 - the port's
        return plan, None

    def place(self, run: str, alone: Plan, planned: Planned | None, *, wait: bool) -> Place:
        from dovetail.running.claiming import place_for

        return place_for(run, alone, planned, wait=wait)

    def workers(self, place: Place, needs: Needs) -> Workers:
        from dovetail.engines.local.engine import LocalEngine

        cluster = place.plan.cluster
        memory_bytes = sum(node.memory_bytes for node in cluster.nodes) // SHARE_OF_MEMORY
        return LocalEngine(needs.folder, cluster, memory_bytes=memory_bytes, pin_cpus=needs.pin_cpus)

    def options(self, options: Options, *, given: bool) -> Options:
        return (
            replace(options, payloads_survive=True) if given else replace(options, payloads_survive=True, hop_s=HOP_S)
        )


def site_of(engine: str, *, share: float | None, env_from: tuple[str, ...]) -> Site:
    """Ray is imported, and reached, only where it is asked for."""
    if not is_ray(engine):
        return Here()
    from dovetail.running.on_ray import OnRay

    return OnRay(engine, share, env_from)
