"""The `--engine` option, and the cluster it stands for with its current usage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli.options import complete_values
from dovetail.engines.ray.address import AddressKind, RayAddress, is_ray_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.ray.cluster_usage import ClusterUsage
    from dovetail.engines.ray.discovery import DiscoveredCluster
    from dovetail.resources.seat import Seats

ENGINE_HELP = "local, ray (start Ray on this machine), ray:auto (a running Ray) or ray:HOST:PORT"
LOCAL, SIMULATED = "local", "sim"
MAX_SHOWN_HOLDERS = 10


@dataclass(frozen=True, slots=True)
class TargetCluster:
    """A cluster to plan on."""

    cluster: dt.Cluster
    on_ray: bool = False
    foreign: Seats = ()
    """Resources held by users other than Dovetail."""
    ray_usage: ClusterUsage | None = None

    def plan(self, make: Callable[[dt.Cluster], dt.Plan], share: float | None = None) -> dt.Plan:
        """The plan for what other users leave free; with `share`, for at most that fraction of the cluster."""
        from dovetail.claims.shared_plan import expand_plan, remaining_cluster

        alone = make(self.cluster)  # raises if it can never fit
        taken = self.foreign
        if share is not None and share < 1:
            alone, taken = self._plan_within_share(share, alone, make)
        if not self.foreign:
            return alone
        why = "a part of the Ray cluster is in use"
        try:
            return expand_plan(make(remaining_cluster(self.cluster, taken)), self.cluster, taken, why)
        except dt.InfeasibleError:
            waits = "does not fit beside current users of the cluster, so a run would wait; planned for an idle cluster"
            return replace(alone, warnings=(*alone.warnings, waits))

    def _plan_within_share(
        self, share: float, alone: dt.Plan, make: Callable[[dt.Cluster], dt.Plan]
    ) -> tuple[dt.Plan, Seats]:
        """The plan for a share of the cluster, and the resources that are outside the share or in use."""
        from dovetail.engines.ray.ray_import import import_ray
        from dovetail.resources.amounts import (
            cluster_capacity,
            min_amounts,
            seats_from_amounts,
            subtract_amounts,
            sum_seats,
        )

        import_ray()  # raises one clear error if Ray is missing
        from dovetail.runtime.ray_admission import plan_within_share

        plan, cap = plan_within_share(alone, make, share)
        assert cap is not None, "less than all was asked for"
        whole = cluster_capacity(self.cluster)
        return plan, seats_from_amounts(
            subtract_amounts(whole, min_amounts(cap, subtract_amounts(whole, sum_seats(self.foreign))))
        )

    def usage_lines(self) -> list[str]:
        """Current users of the cluster."""
        held = self.ray_usage.holder_lines() if self.ray_usage is not None else []
        more = [f"  ... and {len(held) - MAX_SHOWN_HOLDERS} more"] if len(held) > MAX_SHOWN_HOLDERS else []
        return ["in use:", *(f"  {line}" for line in held[:MAX_SHOWN_HOLDERS]), *more] if held else []


def check_engine(
    allowed: tuple[str, ...],
    context: Any,  # noqa: ARG001 - click's
    parameter: Any,  # noqa: ARG001
    value: str | None,
) -> str | None:
    """Validates --engine before anything starts."""
    if value is None or value in allowed:
        return value
    if is_ray_engine(value):
        RayAddress.parse(value)
        return value
    from dovetail.errors import did_you_mean

    hint = did_you_mean(value, (*allowed, "ray", "ray:auto"))
    fixes = (*(f"--engine {name}" for name in allowed), "--engine ray", "--engine ray:auto", "--engine ray:HOST:6379")
    raise dt.ConfigError(dt.Problem("DT331", f"unknown engine {value!r}{hint}", fixes=fixes))


def engine_option(*allowed: str, or_none: bool = False, later: bool = False) -> Callable[[Any], Any]:
    """`--engine` with these values and those of Ray. `or_none`: the value is None if it is not given; `later`: the
    command validates it together with its other arguments."""
    return click.option(
        "--engine",
        default=None if or_none else LOCAL,
        show_default=LOCAL if or_none else True,
        metavar="ENGINE",
        shell_complete=complete_values((*allowed, "ray", "ray:auto")),
        callback=None if later else partial(check_engine, allowed),
        help=f"{'sim, ' if SIMULATED in allowed else ''}{ENGINE_HELP}.",
    )


def engine_conflicts(
    engine: str, cluster: str | None, what: str = "--cluster", *, can_simulate: bool = False
) -> list[dt.Problem]:
    """On Ray, the cluster is the Ray cluster. `can_simulate`: the command takes --engine sim."""
    if not is_ray_engine(engine) or cluster in (None, "auto"):
        return []
    message = f"{what} and --engine {engine} cannot be combined: the cluster is that of Ray"
    fixes = (f"remove {what}", "--engine sim to simulate it" if can_simulate else "remove --engine")
    return [dt.Problem("DT367", message, fixes=fixes)]


def target_cluster(engine: str, spec: str | None, *, start: bool = False) -> TargetCluster:
    """The cluster to plan on. For `ray`, Ray is started only with `start`; otherwise its nodes are predicted."""
    if not is_ray_engine(engine):
        return TargetCluster(dt.Cluster.of(spec or "auto"))
    where = RayAddress.parse(engine)
    if where.kind is AddressKind.PRIVATE and not start:
        from dovetail.engines.ray.local_cluster import expected_cluster

        return TargetCluster(expected_cluster(dt.Cluster.local()), on_ray=True)
    seen, using = _inspect_ray(where)
    return TargetCluster(seen.cluster, True, seen.foreign, using)


def ray_cluster_usage(engine: str) -> tuple[dt.Cluster, Seats, ClusterUsage | None]:
    """A Ray cluster and everything that is in use on it, also by Dovetail."""
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
