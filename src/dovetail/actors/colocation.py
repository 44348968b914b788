"""Colocation: the processes in which roles run, and the bundles of processes that must be on one node. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.actors.role import Together
from dovetail.actors.role_fields import object_source
from dovetail.errors import UNSET, Change, Problem, ResourceError, Subject
from dovetail.pipeline.graph import find_cycles
from dovetail.resources.resources import Resources
from dovetail.resources.sizes import format_exact_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dovetail.actors.role import Pool, Role
    from dovetail.resources.shape import Shape

BAD_GROUP = "DT504"
SUMMED = ("cpus", "gpus", "nvdecs", "nvencs")


@dataclass(frozen=True)
class ProcessTemplate:
    """A kind of process: the roles whose instances it hosts, and what it needs."""

    name: str
    """The role, or the group of several roles."""
    instances: tuple[tuple[str, int], ...]
    """(role, its instances per process)."""
    resources: Resources
    ranks: int = 1

    @property
    def shape(self) -> Shape:
        return self.resources.shape(self.ranks)

    @property
    def unit(self) -> str:
        """Its roles, joined: unique in the system, as a group may have the name of a role."""
        return "+".join(sorted(role for role, _ in self.instances))


@dataclass(frozen=True)
class Bundle:
    """Processes that are placed together: one process, or several on one node."""

    name: str
    processes: tuple[tuple[ProcessTemplate, int], ...]
    """(template, processes per bundle)."""
    low: int
    high: int
    grows_by_plan: bool
    """Whether a plan adds bundles beyond `low` if they fit; otherwise scaling adds them while the system runs."""
    pool: str | None
    spread: bool | str
    pack: bool | str
    near: tuple[str, ...]
    apart: tuple[str, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for template, _ in self.processes for role, _ in template.instances)

    def instances_of(self, role: str) -> int:
        """Instances of a role in one bundle."""
        return sum(
            processes * instances
            for template, processes in self.processes
            for name, instances in template.instances
            if name == role
        )


def start_cycles(roles: Sequence[Role]) -> list[Problem]:
    """Processes that cannot start because a role in them starts after a role that starts after the process."""
    process_of = {
        role.name: together.group if (together := role.colocation) and together.where == "process" else role.name
        for role in roles
    }
    edges: dict[str, tuple[str, ...]] = {}
    for role in roles:
        process = process_of[role.name]
        before = [process_of[name] for name in role.after if process_of[name] != process]
        edges[process] = tuple(dict.fromkeys((*edges.get(process, ()), *before)))
    return [
        _problem(
            cycle[0],
            f"the processes start after each other: {' -> '.join([*cycle, cycle[0]])}",
            tuple(f"{role.name} is in process {process_of[role.name]!r}" for role in roles if role.after),
            Change({"together": UNSET}),
        )
        for cycle in find_cycles(edges)
    ]


def make_bundles(roles: Sequence[Role], pools: Mapping[str, Pool]) -> tuple[list[Bundle], list[Problem]]:
    """The bundles of all roles, in the order of the roles, and the problems of groups that therefore have no bundle."""
    bundles, problems = [], []
    for members in _by_group(roles):
        together = members[0].colocation
        wrong = [] if together is None else _group_problems(members, together)
        try:
            if not wrong:
                bundles.append(_bundle(members, together, pools))
        except ResourceError as error:
            assert together is not None
            wrong = [_resources_problem(members, together, problem) for problem in error.problems]
        problems += wrong
    return bundles, problems


def _by_group(roles: Iterable[Role]) -> list[list[Role]]:
    """Roles of the same group in one list, at the place of the first."""
    groups: dict[str, list[Role]] = {}
    for role in roles:
        together = role.colocation
        groups.setdefault(f"role {role.name}" if together is None else f"group {together.group}", []).append(role)
    return list(groups.values())


def _bundle(members: list[Role], together: Together | None, pools: Mapping[str, Pool]) -> Bundle:
    first = members[0]
    low = min(role.low for role in members)
    if together is None:
        processes = [(_template(first.name, [first], low, pools), 1)]
    elif together.where == "process":
        processes = [(_template(together.group, members, low, pools, together.share), 1)]
    else:
        processes = [(_template(role.name, [role], role.low, pools), role.low // low) for role in members]
    bundle = Bundle(
        name=first.name if together is None else together.group,
        processes=tuple(processes),
        low=low,
        high=low * first.high // first.low,
        grows_by_plan=all(role.scale is None for role in members),
        pool=first.pool,
        spread=_strictest(role.spread for role in members),
        pack=_strictest(role.pack for role in members),
        near=_names(members, lambda role: role.near),
        apart=_names(members, lambda role: role.apart),
    )
    if bundle.pack == "strict":  # all on one node: one bundle with all processes
        whole = tuple((template, count * low) for template, count in bundle.processes)
        return replace(bundle, processes=whole, low=1, high=1)
    return bundle


def _names(members: Iterable[Role], of: Callable[[Role], Sequence[str]]) -> tuple[str, ...]:
    ours = {role.name for role in members}
    return tuple(dict.fromkeys(name for role in members for name in of(role) if name not in ours))


def _strictest(values: Iterable[bool | str]) -> bool | str:
    found = list(values)
    return "strict" if "strict" in found else any(found)


def _template(
    name: str, members: list[Role], processes: int, pools: Mapping[str, Pool], share: str = "sum"
) -> ProcessTemplate:
    instances = tuple((role.name, role.low // processes) for role in members)
    resources = combine_resources([(role.resources or Resources(), role.low // processes) for role in members], share)
    pool = pools.get(members[0].pool or "")
    labels = dict(pool.labels) if pool is not None else {}
    for role in members:
        labels |= {} if role.affinity is None else role.affinity.labels
    if labels:
        resources = replace(resources, labels={**resources.labels, **labels})
    return ProcessTemplate(name, instances, resources, members[0].ranks)


def combine_resources(parts: Sequence[tuple[Resources, int]], share: str) -> Resources:
    """Resources of one process with several roles, each with its number of instances. Raises ResourceError if such a
    process is impossible."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]

    def combined(amounts: list[float]) -> float:
        total = max(amounts) if share == "max" else sum(amounts)
        return int(total) if total == int(total) else round(total, 3)

    every = [one for one, count in parts for _ in range(1 if share == "max" else count)]
    amounts: dict[str, Any] = {name: combined([getattr(one, name) for one in every]) for name in SUMMED}
    for name in ("memory", "gpu_memory"):
        given = [parse_size(text) for one in every if (text := getattr(one, name)) is not None]
        amounts[name] = format_exact_size(int(combined([float(size) for size in given]))) if given else None
    custom: dict[str, list[float]] = defaultdict(list)
    for one in every:
        for name, amount in one.custom.items():
            custom[name].append(amount)
    labels = {name: value for one in every for name, value in one.labels.items()}
    return Resources(
        **amounts,
        entire_gpu=any(one.entire_gpu for one in every),
        accelerator=next((one.accelerator for one in every if one.accelerator is not None), None),
        labels=labels,
        custom={name: combined(values) for name, values in custom.items()},
    )


# --- problems


def _group_problems(members: list[Role], together: Together) -> list[Problem]:
    """Problems of settings on which the roles of a group must agree, but do not."""
    problems = []
    group, first = together.group, members[0]
    if any(role.colocation != together for role in members):
        modes = ", ".join(f"{role.name}: {_mode_text(role)}" for role in members)
        message = f"the roles of group {group!r} are together in different ways"
        problems.append(_problem(group, message, (modes,), Change({"together": group})))
    low = min(role.low for role in members)
    is_multiple = all(role.low % low == 0 for role in members)
    if not is_multiple or len({role.high / role.low for role in members}) > 1:
        counts = ", ".join(f"{role.name}: {_count_text(role)}" for role in members)
        message = (
            f"the roles of group {group!r} have different numbers of workers, and no role is a multiple of another"
        )
        problems.append(_problem(group, message, (counts,), Change({"workers": first.workers})))
    for name, values in (
        ("pool", {role.pool for role in members}),
        ("accelerator", {(role.resources or Resources()).accelerator for role in members} - {None}),
        ("labels", {tuple(labels.items()) for role in members if (labels := _labels(role))}),
    ):
        if len(values) > 1:
            shown = ", ".join(f"{role.name}: {_setting(role, name)}" for role in members)
            message = f"the roles of group {group!r} are in one place and have different values of {name}"
            problems.append(_problem(group, message, (shown,), Change({"together": UNSET})))
    if together.where == "process" and any(role.ranks > 1 for role in members):
        gangs = ", ".join(role.name for role in members if role.ranks > 1)
        message = f"group {group!r} is one process, and {gangs} needs several processes (ranks)"
        problems.append(_problem(group, message, (), Change({"together": object_source(Together(group, "node"))})))
    return problems


def _resources_problem(members: list[Role], together: Together, problem: Problem) -> Problem:
    shares = ", ".join(f"{role.name}: {role.shape.describe()}" for role in members)
    message = f"group {together.group!r} would need an impossible process: {problem.message}"
    shared = object_source(Together(together.group, share="max"))
    fix = Change({"together": shared}, note="if they never work at the same time")
    return _problem(together.group, message, (shares,), fix)


def _problem(group: str, message: str, evidence: tuple[str, ...], *fixes: Change) -> Problem:
    return Problem(BAD_GROUP, message, evidence, fixes, subject=Subject("group", group))


def _mode_text(role: Role) -> str:
    together = role.colocation
    return "alone" if together is None else f"{together.where}, share={together.share}"


def _count_text(role: Role) -> str:
    return str(role.low) if role.low == role.high else f"{role.low} to {role.high}"


def _setting(role: Role, name: str) -> object:
    if name == "labels":
        return _labels(role)
    return role.pool if name == "pool" else (role.resources or Resources()).accelerator


def _labels(role: Role) -> dict[str, str]:
    """Labels that nodes must have for the role, beside those of its pool."""
    affinity = {} if role.affinity is None else role.affinity.labels
    return dict(sorted({**(role.resources or Resources()).labels, **affinity}.items()))
