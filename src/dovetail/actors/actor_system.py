"""ActorSystem: roles and pools, validated on construction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.actors.actor_plan import plan_bundles
from dovetail.actors.actors_file import find_problems, parse_actors_data, read_actors_file
from dovetail.actors.colocation import make_bundles
from dovetail.actors.role_profiles import complete_role
from dovetail.actors.simulation_fields import BAD_ACTOR_SIMULATION, SIMULATION, simulation_problems
from dovetail.documents.fields import file_problem
from dovetail.errors import ConfigError, InfeasibleError, Problem, did_you_mean
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.sizes import format_milli

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from dovetail.actors.actor_plan import ActorPlan
    from dovetail.actors.colocation import Bundle
    from dovetail.actors.live_system import LiveSystem
    from dovetail.actors.role import Pool, Role
    from dovetail.actors.simulation import ActorSimulation


class ActorSystem:
    """Long-lived roles that are planned and launched as a whole."""

    def __init__(
        self,
        roles: Iterable[Role],
        pools: Mapping[str, Pool] | None = None,
        *,
        name: str = "actors",
        simulation: Mapping[str, Any] | None = None,
    ) -> None:
        """`simulation`: call pattern and service times for `simulate`, as in a file."""
        given = tuple(roles)
        self.name = name
        self.simulation = simulation
        self.pools: dict[str, Pool] = dict(pools or {})
        problems = [problem for _, problem in find_problems(given, self.pools, name)]
        if problems:
            raise ConfigError(problems)
        self.roles: tuple[Role, ...] = tuple(complete_role(role, self.pools) for role in given)
        self.bundles: tuple[Bundle, ...] = tuple(make_bundles(self.roles, self.pools)[0])

    @classmethod
    def load(cls, path: str | Path) -> ActorSystem:
        """Read an actors file; a ConfigError lists every mistake with its line."""
        parsed = read_actors_file(path)
        if parsed.problems:
            raise ConfigError(parsed.problems)
        return cls(parsed.roles, parsed.pools, name=parsed.name, simulation=parsed.simulation)

    @classmethod
    def from_dict(cls, data: object) -> ActorSystem:
        """Create a system from the data of an actors file."""
        parsed = parse_actors_data(data)
        if parsed.problems:
            raise ConfigError(parsed.problems)
        return cls(parsed.roles, parsed.pools, name=parsed.name, simulation=parsed.simulation)

    def __repr__(self) -> str:
        return f"<ActorSystem {self.name}: {', '.join(role.name for role in self.roles)}>"

    def role(self, name: str) -> Role:
        """One role by name; KeyError if there is none."""
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(f"there is no role {name!r}{did_you_mean(name, [role.name for role in self.roles])}")

    def plan(self, cluster: Cluster | str = "auto") -> ActorPlan:
        """Plan the placement of every instance. Raises InfeasibleError if the minimum of all roles does not fit. Starts
        nothing."""
        return self.plan_on(Ledger(Cluster.of(cluster)))

    def plan_on(self, ledger: Ledger) -> ActorPlan:
        """Plan with the free resources of a ledger, which contains the seats of the plan afterwards."""
        return plan_bundles(self.name, self.roles, self.bundles, self.pools, ledger, self._colocation_lines())

    def validate(self, cluster: Cluster | str = "auto") -> list[Problem]:
        """All problems of the system on this cluster; an empty list if it fits."""
        try:
            self.plan(cluster)
        except InfeasibleError as error:
            return list(error.problems)
        return []

    def launch(
        self,
        engine: str = "local",
        cluster: Cluster | str = "auto",
        *,
        wait: bool = True,
        deadline: float | str = "60s",
        share: float | None = None,
        env_from: Sequence[str] = (),
        run_dir: str | Path | None = None,
    ) -> LiveSystem:
        """Start the system and return when all instances are ready.

        Everything or nothing: if an instance cannot be started within `deadline`, all are stopped and the error says
        why. `wait`: wait for resources that other runs hold, at most until the deadline. `share`: the maximum fraction
        of a Ray cluster. `env_from`: variables of this process that all workers get."""
        from dovetail.actors.launch import launch_system  # late: planning does not need it

        return launch_system(
            self,
            engine,
            cluster,
            wait=wait,
            deadline=deadline,
            share=share,
            env_from=env_from,
            run_dir=run_dir,
        )

    def simulate(self, cluster: Cluster | str = "auto", *, seed: int = 0) -> ActorSimulation:
        """Simulate the system with its call pattern (`simulation=`) on a cluster, in virtual time. Starts nothing."""
        from dovetail.actors.simulation import simulate_system  # late: few need it

        return simulate_system(self, Cluster.of(cluster), self._checked_simulation(), seed)

    def _checked_simulation(self) -> Mapping[str, Any]:
        if self.simulation is None:
            message = "the system has no call pattern to simulate"
            fixes = ("simulation={...}, or the key `simulate` in an actors file",)
            raise ConfigError(Problem(BAD_ACTOR_SIMULATION, message, fixes=fixes))
        mistakes = [file_problem(mistake) for mistake in SIMULATION.mistakes(self.simulation)]
        problems = mistakes or [problem for _, problem in simulation_problems(self.simulation, self.roles)]
        if problems:
            raise ConfigError(problems)
        return self.simulation

    def _colocation_lines(self) -> list[str]:
        """Notes on what colocation in one process saves."""
        lines = []
        for bundle in self.bundles:
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
