"""The `--engine` option, and the cluster it stands for with its current usage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli.options import complete_values
from dovetail.documents.configuration import at_origin
from dovetail.engines.ray.address import AddressKind, RayAddress, is_ray_engine
from dovetail.runtime.configured_engine import configured_engine, described_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.ray.cluster_usage import ClusterUsage
    from dovetail.engines.ray.discovery import DiscoveredCluster
    from dovetail.resources.seat import Seats

ENGINE_HELP = "local, ray (start Ray on this machine), ray:auto (a running Ray) or ray:HOST:PORT"
LOCAL, SIMULATED = "local", "sim"
AUTO = "auto"
CLUSTER_PARAMETERS = ("cluster", "cluster_spec", "spec")
"""Names of the parameter that describes a cluster."""
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


def check_engine(engine: str, allowed: tuple[str, ...]) -> None:
    """Validates an engine before anything starts."""
    if engine in allowed:
        return
    if is_ray_engine(engine):
        try:
            RayAddress.parse(engine)
        except dt.ConfigError as error:
            raise at_origin(error, engine) from None
        return
    from dovetail.errors import did_you_mean

    hint = did_you_mean(engine, (*allowed, "ray", "ray:auto"))
    fixes = (*(f"--engine {name}" for name in allowed), "--engine ray", "--engine ray:auto", "--engine ray:HOST:6379")
    raise dt.ConfigError(dt.Problem("DT331", f"unknown engine {engine!r}{hint}", fixes=fixes))


def engine_option(*allowed: str, or_none: bool = False, later: bool = False) -> Callable[[Any], Any]:
    """`--engine` with these values and those of Ray. Engine and cluster are as typed, else as configured. `or_none`:
    the command resolves them itself. `later`: the command validates the engine with its other arguments."""
    option = click.option(
        "--engine",
        metavar="ENGINE",
        shell_complete=complete_values((*allowed, "ray", "ray:auto")),
        callback=None if later else partial(_check_typed_engine, allowed),
        help=f"{'sim, ' if SIMULATED in allowed else ''}{ENGINE_HELP}.  [default: as configured, or local]",
    )

    def decorate(command: Any) -> Any:
        return option(command if or_none else _with_configured_engine(command, () if later else allowed))

    return decorate


def _check_typed_engine(
    allowed: tuple[str, ...],
    context: Any,  # noqa: ARG001 - click's
    parameter: Any,  # noqa: ARG001
    value: str | None,
) -> str | None:
    if value is not None:
        check_engine(value, allowed)
    return value


def _with_configured_engine(command: Any, allowed: tuple[str, ...]) -> Any:
    """The command with engine and cluster resolved."""

    @wraps(command)
    def called(*arguments: Any, engine: str | None, **options: Any) -> Any:
        names = [name for name in CLUSTER_PARAMETERS if name in options]
        engine, cluster = configured_engine(engine, options[names[0]] if names else None)
        if allowed:
            check_engine(engine, allowed)
        return command(*arguments, engine=engine, **options | dict.fromkeys(names, cluster))

    return called


def engine_conflicts(
    engine: str, cluster: str | None, what: str = "--cluster", *, can_simulate: bool = False
) -> list[dt.Problem]:
    """On Ray, the cluster is the Ray cluster. `can_simulate`: the command takes --engine sim."""
    if not is_ray_engine(engine) or cluster in (None, AUTO):
        return []
    message = f"{what} and --engine {engine} cannot be combined: the cluster is that of Ray"
    fixes = (f"remove {what}", "--engine sim" if can_simulate else "remove --engine")
    return [dt.Problem("DT367", message, fixes=fixes)]


def target_cluster(engine: str, spec: str | None, *, start: bool = False) -> TargetCluster:
    """The cluster to plan on. For `ray`, Ray is started only with `start`; otherwise its nodes are predicted."""
    if not is_ray_engine(engine):
        return TargetCluster(described_cluster(AUTO if spec is None else spec))
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
