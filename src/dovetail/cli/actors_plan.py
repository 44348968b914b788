"""`dovetail plan`, `dovetail explain` and `dovetail simulate` for actors files."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dovetail.actors.actor_system import ActorSystem
from dovetail.actors.actors_file import read_actors_file
from dovetail.actors.role_explanation import explain_role
from dovetail.actors.simulation_fields import BAD_ACTOR_SIMULATION
from dovetail.cli.output_file import STDOUT, write_output
from dovetail.documents.yaml_writer import YAML
from dovetail.errors import ConfigError, InfeasibleError, Problem, did_you_mean, nearest_word
from dovetail.resources.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.actors.actor_plan import ActorPlan
    from dovetail.actors.actors_file import ParsedActorsFile
    from dovetail.cli.engine_option import TargetCluster
    from dovetail.resources.cluster import Cluster

NO_OPTIONS: Mapping[str, object] = {}


def load_actors(
    file: str, sets: Sequence[str] = (), options: Mapping[str, object] = NO_OPTIONS
) -> tuple[ParsedActorsFile, ActorSystem]:
    """An actors file with the values of `--set`. `options`: those that are only for pipelines."""
    given = [name for name, value in options.items() if value not in (None, False, ())]
    if given:
        message = f"{' and '.join(given)} cannot be used with an actors file"
        raise ConfigError(Problem("DT371", message, fixes=(f"remove {' and '.join(given)}",), place=file))
    parsed = read_actors_file(file, sets)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return parsed, ActorSystem(parsed.roles, parsed.pools, name=parsed.name, simulation=parsed.simulation)


def plan_of(parsed: ParsedActorsFile, system: ActorSystem, on: TargetCluster) -> ActorPlan:
    """The plan on what other users of a cluster leave free; errors have lines of the file."""
    try:
        alone = system.plan(on.cluster)
    except InfeasibleError as error:
        raise InfeasibleError(parsed.located(problem) for problem in error.problems) from None
    if not on.foreign:
        return alone
    try:
        return system.plan_on(Ledger(on.cluster, on.foreign))
    except InfeasibleError:
        waits = "does not fit beside current users of the cluster; planned for an idle cluster"
        return replace(alone, warnings=(*alone.warnings, waits))


def print_plan(
    file: str,
    sets: Sequence[str],
    on: TargetCluster,
    out: str | None,
    as_json: bool,
    options: Mapping[str, object],
) -> None:
    parsed, system = load_actors(file, sets, options)
    made = plan_of(parsed, system, on)
    if out is not None:
        write_output(out, json.dumps(made.to_dict(), indent=2) + "\n", fix="--out plan.json")
    if as_json and out != STDOUT:
        click.echo(json.dumps(made.to_dict(), indent=2))
    if as_json or out == STDOUT:
        return
    click.echo(str(made))
    for line in on.usage_lines():
        click.echo(line)
    click.echo(f"\nNext:  {shlex.join(['dovetail', 'explain', file, made.roles[0].name])}", err=True)


def print_simulation(
    file: str,
    sets: Sequence[str],
    cluster: Cluster,
    seed: int,
    as_json: bool,
    options: Mapping[str, object],
) -> None:
    parsed, system = load_actors(file, sets, options)
    if parsed.simulation is None:
        message = "the file has no call pattern to simulate"
        method = f"{system.roles[0].name}.method"
        example = {"clients": [{"call": method, "callers": 8}], "methods": {method: {"time": "100ms"}}}
        fixes = (YAML.assignment("simulate", example),)
        raise ConfigError(Problem(BAD_ACTOR_SIMULATION, message, fixes=fixes, place=parsed.document.place()))
    try:
        result = system.simulate(cluster, seed=seed)
    except InfeasibleError as error:
        raise InfeasibleError(parsed.located(problem) for problem in error.problems) from None
    click.echo(json.dumps(result.to_dict(), indent=2) if as_json else str(result))


def print_explanation(
    file: str,
    sets: Sequence[str],
    role: str | None,
    on: TargetCluster,
    as_json: bool,
    options: Mapping[str, object],
) -> None:
    parsed, system = load_actors(file, sets, options)
    names = [one.name for one in system.roles]
    if role is not None and role not in names:
        message = f"there is no role {role!r}{did_you_mean(role, names)}"
        near = nearest_word(role, names)
        fixes = tuple(f"dovetail explain {shlex.quote(file)} {name}" for name in ([near] if near else names[:3]))
        raise ConfigError(Problem("DT502", message, (f"roles: {', '.join(names)}",), fixes, place=file))
    made = plan_of(parsed, system, on)
    if as_json:
        click.echo(json.dumps(made.to_dict(), indent=2))
        return
    shown = names if role is None else [role]
    click.echo("\n\n".join(explain_role(made, system.role(name), system.pools) for name in shown))
