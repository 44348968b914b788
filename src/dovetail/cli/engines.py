"""Which cluster does `--engine` mean, and who else is there?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.engines.ray.where import Kind, Where, is_ray

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.ray.discovery import Seen
    from dovetail.engines.ray.using import Using
    from dovetail.resources.seat import Seats

HELP = "local, ray (starts one here), ray:auto (the one that runs here), ray:HOST:PORT"
LOCAL, SIMULATED = "local", "sim"
SHOWN = 10


@dataclass(frozen=True, slots=True)
class There:
    """A cluster to plan on."""

    cluster: dt.Cluster
    on_ray: bool = False
    foreign: Seats = ()
    """What others than Dovetail have of it."""
    using: Using | None = None

    def planned(self, make: Callable[[dt.Cluster], dt.Plan], share: float | None = None) -> dt.Plan:
        """The plan for what others leave; with `share`, for at most that part of all."""
        from dovetail.claims.left import left_of, whole_again

        alone = make(self.cluster)  # or it never fits
        taken = self.foreign
        if share is not None and share < 1:
            alone, taken = self._within(share, alone, make)
        if not self.foreign:
            return alone
        why = "others use a part of the Ray cluster"
        try:
            return whole_again(make(left_of(self.cluster, taken)), self.cluster, taken, why)
        except dt.InfeasibleError:
            waits = (
                "it does not fit now, beside what others use: a run would wait for them; planned as if it were alone"
            )
            return replace(alone, warnings=(*alone.warnings, waits))

    def _within(self, share: float, alone: dt.Plan, make: Callable[[dt.Cluster], dt.Plan]) -> tuple[dt.Plan, Seats]:
        """The plan for a share of the cluster, and all that it leaves, or others have."""
        from dovetail.engines.ray.library import import_ray
        from dovetail.resources.amounts import amounts_of, capacity_of, least, minus, seats_of

        import_ray()  # or one clear error
        from dovetail.running.claiming_ray import capped

        plan, cap = capped(alone, make, share)
        assert cap is not None, "less than all was asked for"
        whole = capacity_of(self.cluster)
        return plan, seats_of(minus(whole, least(cap, minus(whole, amounts_of(self.foreign)))))

    def lines(self) -> list[str]:
        """Who else is there."""
        held = self.using.holder_lines() if self.using is not None else []
        more = [f"  ... and {len(held) - SHOWN} more"] if len(held) > SHOWN else []
        return ["in use:", *(f"  {line}" for line in held[:SHOWN]), *more] if held else []


def engine_of(
    allowed: tuple[str, ...],
    context: Any,  # noqa: ARG001 - click's
    parameter: Any,  # noqa: ARG001
    value: str | None,
) -> str | None:
    """Everything that is wrong with it is told before anything starts."""
    if value is None or value in allowed:
        return value
    if is_ray(value):
        Where.parse(value)
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
        callback=None if later else partial(engine_of, allowed),
        help=f"{'sim, ' if SIMULATED in allowed else ''}{HELP}.",
    )


def contradiction(engine: str, cluster: str | None, what: str = "--cluster") -> list[dt.Problem]:
    """On Ray, the cluster is what Ray has."""
    if not is_ray(engine) or cluster in (None, "auto"):
        return []
    message = f"{what} and --engine {engine} do not go together: the cluster is what Ray has"
    fixes = (f"leave out {what}", "or --engine sim, to see how it would be there")
    return [dt.Problem("DT367", message, fixes=fixes[: 2 if what == "--cluster" else 1])]


def there(engine: str, spec: str | None, *, start: bool = False) -> There:
    """The cluster to plan on. `ray` is started only if something is to `start`; else it is what it would be."""
    if not is_ray(engine):
        return There(dt.Cluster.of(spec or "auto"))
    where = Where.parse(engine)
    if where.kind is Kind.PRIVATE and not start:
        from dovetail.engines.ray.own_ray import expected

        return There(expected(dt.Cluster.local()), on_ray=True)
    seen, using = _looked(where)
    return There(seen.cluster, True, seen.foreign, using)


def used(engine: str) -> tuple[dt.Cluster, Seats, Using | None]:
    """A Ray cluster with all that is in use of it, whoever uses it."""
    where = Where.parse(engine)
    if where.kind is Kind.PRIVATE:
        return there(engine, None).cluster, (), None
    seen, using = _looked(where, ours={})
    return seen.cluster, seen.foreign, using


def _looked(where: Where, **how: Any) -> tuple[Seen, Using]:
    from dovetail.engines.ray.attaching import attach
    from dovetail.engines.ray.discovery import discover
    from dovetail.engines.ray.using import look

    attach(where)
    seen = discover(**how)
    return seen, look(seen)
