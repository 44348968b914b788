"""ActorSystem: roles and pools, validated on construction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.actors.actor_plan import plan_bundles
from dovetail.actors.colocation import make_bundles, start_cycles
from dovetail.actors.role import DEFAULT_POOL
from dovetail.actors.role_problems import system_problems
from dovetail.actors.role_profiles import with_profile
from dovetail.errors import ConfigError, InfeasibleError, did_you_mean
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.sizes import format_milli

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dovetail.actors.actor_plan import ActorPlan
    from dovetail.actors.colocation import Bundle
    from dovetail.actors.role import Pool, Role
    from dovetail.errors import Problem


class ActorSystem:
    """Long-lived roles that are planned and launched as a whole."""

    def __init__(self, roles: Iterable[Role], pools: Mapping[str, Pool] | None = None, *, name: str = "actors") -> None:
        given = tuple(roles)
        self.name = name
        self.pools: dict[str, Pool] = dict(pools or {})
        problems = [problem for _, problem in system_problems(given, self.pools, name)]
        if problems:
            raise ConfigError(problems)
        self.roles: tuple[Role, ...] = tuple(self._complete(role) for role in given)
        bundles, problems = make_bundles(self.roles, self.pools)
        problems += start_cycles(self.roles)
        if problems:
            raise ConfigError(problems)
        self._bundles: tuple[Bundle, ...] = tuple(bundles)

    def __repr__(self) -> str:
        return f"<ActorSystem {self.name}: {', '.join(role.name for role in self.roles)}>"

    def _complete(self, role: Role) -> Role:
        """The role with the values that it leaves to its profile and to the system."""
        pool = DEFAULT_POOL if role.pool is None and DEFAULT_POOL in self.pools else role.pool
        return replace(with_profile(role), pool=pool)

    def role(self, name: str) -> Role:
        """One role by name; KeyError if there is none."""
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(f"there is no role {name!r}{did_you_mean(name, [role.name for role in self.roles])}")

    def plan(self, cluster: Cluster | str = "auto") -> ActorPlan:
        """Where every instance goes; InfeasibleError if the minimum of all roles does not fit. Starts nothing."""
        return self.plan_on(Ledger(Cluster.of(cluster)))

    def plan_on(self, ledger: Ledger) -> ActorPlan:
        """The plan on what is free in a ledger, which contains its seats afterwards."""
        return plan_bundles(self.name, self.roles, self._bundles, self.pools, ledger, self._colocation_lines())

    def validate(self, cluster: Cluster | str = "auto") -> list[Problem]:
        """Everything that is wrong on this cluster; an empty list if the system fits."""
        try:
            self.plan(cluster)
        except InfeasibleError as error:
            return list(error.problems)
        return []

    def _colocation_lines(self) -> list[str]:
        """What colocation in one process saves."""
        lines = []
        for bundle in self._bundles:
            for template, _ in bundle.processes:
                if len(template.instances) < 2:
                    continue
                parts = [(self.role(name), count) for name, count in template.instances]
                alone = sum(role.shape.cpu_milli * count for role, count in parts)
                together = template.shape.cpu_milli
                names = ", ".join(role.name for role, _ in parts)
                processes = sum(count for _, count in parts)
                lines.append(
                    f"{names} share one process instead of {processes}: {format_milli(alone)} CPUs apart, "
                    f"{format_milli(together)} together; they share one interpreter lock and fail together"
                )
        return lines
