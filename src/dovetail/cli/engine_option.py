"""The `--engine` option, and the cluster it stands for with its current usage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.engines.ray.address import AddressKind, RayAddress, is_ray_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.ray.cluster_usage import ClusterUsage
    from dovetail.engines.ray.discovery import DiscoveredCluster
    from dovetail.resources.seat import Seats

ENGINE_HELP = "local, ray (starts one here), ray:auto (the one that runs here), ray:HOST:PORT"
LOCAL, SIMULATED = "local", "sim"
MAX_SHOWN_HOLDERS = 10


@dataclass(frozen=True, slots=True)
class TargetCluster:
    """A cluster to plan on."""

    cluster: dt.Cluster
    on_ray: bool = False
    foreign: Seats = ()
    """What others than Dovetail have of it."""
    ray_usage: ClusterUsage | None = None

    def plan(self, make: Callable[[dt.Cluster], dt.Plan], share: float | None = None) -> dt.Plan:
        """The plan for what others leave; with `share`, for at most that part of all."""
        from dovetail.claims.shared_plan import expand_plan, remaining_cluster

        alone = make(self.cluster)  # or it never fits
        taken = self.foreign
        if share is not None and share < 1:
            alone, taken = self._plan_within_share(share, alone, make)
        if not self.foreign:
            return alone
        why = "others use a part of the Ray cluster"
        try:
            return expand_plan(make(remaining_cluster(self.cluster, taken)), self.cluster, taken, why)
        except dt.InfeasibleError:
            waits = (
                "it does not fit now, beside what others use: a run would wait for them; planned as if it were alone"
            )
            return replace(alone, warnings=(*alone.warnings, waits))

    def _plan_within_share(
        self, share: float, alone: dt.Plan, make: Callable[[dt.Cluster], dt.Plan]
    ) -> tuple[dt.Plan, Seats]:
        """The plan for a share of the cluster, and all that it leaves, or others have."""
        from dovetail.engines.ray.ray_import import import_ray
        from dovetail.resources.amounts import (
            cluster_capacity,
            min_amounts,
            seats_from_amounts,
            subtract_amounts,
            sum_seats,
        )

        import_ray()  # or one clear error
        from dovetail.runtime.ray_admission import plan_within_share

        plan, cap = plan_within_share(alone, make, share)
        assert cap is not None, "less than all was asked for"
        whole = cluster_capacity(self.cluster)
        return plan, seats_from_amounts(
            subtract_amounts(whole, min_amounts(cap, subtract_amounts(whole, sum_seats(self.foreign))))
        )

    def usage_lines(self) -> list[str]:
        """Who else is there."""
        held = self.ray_usage.holder_lines() if self.ray_usage is not None else []
        more = [f"  ... and {len(held) - MAX_SHOWN_HOLDERS} more"] if len(held) > MAX_SHOWN_HOLDERS else []
        return ["in use:", *(f"  {line}" for line in held[:MAX_SHOWN_HOLDERS]), *more] if held else []


def check_engine(
    allowed: tuple[str, ...],
    context: Any,  # noqa: ARG001 - click's
    parameter: Any,  # noqa: ARG001
    value: str | None,
) -> str | None:
    """Everything that is wrong with it is told before anything starts."""
    if value is None or value in allowed:
        return value
    if is_ray_engine(value):
        RayAddress.parse(value)
        return value
    from dovetail.errors import did_you_mean

    hint = did_you_mean(value, (*allowed, "ray", "ray:auto"))
    fixes = (*(f"--engine {name}" for name in allowed), "--engine ray", "--engine ray:auto", "--engine ray:HOST:6379")
    raise dt.ConfigError(dt.Problem("DT331", f"there is no engine {value!r}{hint}", fixes=fixes))


def engine_option(*allowed: str, or_none: bool = False, later: bool = False) -> Callable[[Any], Any]:
    """`--engine` with these, and with Ray; `or_none`: None says that nobody has typed it; `later`: who takes it says
    what is wrong with it, together with all else."""
    return click.option(
        "--engine",
        default=None if or_none else LOCAL,
        show_default=LOCAL if or_none else True,
        metavar="ENGINE",
        callback=None if later else partial(check_engine, allowed),
        help=f"{'sim, ' if SIMULATED in allowed else ''}{ENGINE_HELP}.",
    )


def engine_conflicts(engine: str, cluster: str | None, what: str = "--cluster") -> list[dt.Problem]:
    """On Ray, the cluster is what Ray has."""
    if not is_ray_engine(engine) or cluster in (None, "auto"):
        return []
    message = f"{what} and --engine {engine} do not go together: the cluster is what Ray has"
    fixes = (f"leave out {what}", "--engine sim, to see how it would be there")
    return [dt.Problem("DT367", message, fixes=fixes[: 2 if what == "--cluster" else 1])]


def target_cluster(engine: str, spec: str | None, *, start: bool = False) -> TargetCluster:
    """The cluster to plan on. `ray` is started only if something is to `start`; else it is what it would be."""
    if not is_ray_engine(engine):
        return TargetCluster(dt.Cluster.of(spec or "auto"))
    where = RayAddress.parse(engine)
    if where.kind is AddressKind.PRIVATE and not start:
        from dovetail.engines.ray.local_cluster import expected_cluster

        return TargetCluster(expected_cluster(dt.Cluster.local()), on_ray=True)
    seen, using = _inspect_ray(where)
    return TargetCluster(seen.cluster, True, seen.foreign, using)


def ray_cluster_usage(engine: str) -> tuple[dt.Cluster, Seats, ClusterUsage | None]:
    """A Ray cluster with all that is in use of it, whoever uses it."""
    where = RayAddress.parse(engine)
    if where.kind is AddressKind.PRIVATE:
        return target_cluster(engine, None).cluster, (), None
    seen, using = _inspect_ray(where, ours={})
    return seen.cluster, seen.foreign, using


def _inspect_ray(where: RayAddress, **how: Any) -> tuple[DiscoveredCluster, ClusterUsage]:
    from dovetail.engines.ray.attachment import attach
    from dovetail.engines.ray.cluster_usage import read_cluster_usage
    from dovetail.engines.ray.discovery import discover

    attach(where)
    seen = discover(**how)
    return seen, read_cluster_usage(seen)
